/* pagemgr.h -- arenas, page sets, epochs and snapshots: the public face of the page manager.
 *
 * Purpose     Keeps named sets of equally sized pages in an arena (anonymous memory or a mapped file), lets one writer
 *             change them with copy-on-write, and lets any number of readers keep any committed state for as long as
 *             they pin it. A snapshot costs the same whatever the state's size.
 *
 * Layout      arena  = frames 0..n of page_size bytes; the first ones are the arena header (internal.h, docs/format.md).
 *             A page is named by (set, page id). The page table of a set is a radix tree whose nodes are frames too:
 *             an entry is 8 bytes, frame number in the low half, the epoch in which that frame was made in the high half.
 *             Bit 31 of a page id picks one of the set's two tables, so that a structure can keep a dense array of
 *             pages (a directory) beside those it allocates freely. Page 0 of table 0 is the super page.
 *
 * Invariants  I1 a frame whose epoch is not the one being written is never written (copy-on-write); in arenas with in_place it may be, where
 *                no snapshot but weak ones sees it, after what lay there was noted (undo.c).
 *             I2 every frame is exactly one of: header, free, reachable from the state being written, reachable only
 *                from states that are committed or pinned (retired), absent (given back to the system).
 *             I3 an inner entry's epoch is the newest epoch below it, so "what changed since e" skips clean subtrees.
 *             I4 the header names a complete committed state at every instant, also between any two instructions of a
 *                commit: the two meta slots are written in turn and one aligned store switches between them.
 *             I5 epochs only grow; an aborted epoch's number is not used again.
 *
 * Ownership   quire_arena owns the memory; sets, views and snapshots point into it and must be released before
 *             quire_arena_close (which refuses while snapshots are open). A pointer from quire_page_read lives as long as
 *             its snapshot, or on a live set until the next write to that set; one from quire_page_write until the next
 *             commit, abort or snapshot of the arena.
 *
 * Threads     One writer: calls on a writable arena and its sets are serialised by quire_arena_enter/leave, which a thread may
 *             nest. Every function on an arena, those on whole sets and the functions of kv.h and sequence.h do so
 *             themselves; users of quire_arena_reserve, quire_page_* and quire_view_changed on a live set, and who wants
 *             several calls to be one, must.
 *             Readers: quire_snap_acquire, and everything on a view of a snapshot, may run on any thread at any time and takes
 *             no lock. A committed state is published with release order and acquired by the reader; a frame is
 *             reused only after the writer has seen the last pin on it gone.
 *             Processes: a file arena may be opened read-only by any number of processes beside the one writer. The
 *             writer's lock and each process's pins hang on file locks, which the system drops with the process.
 *             fork: a child must not use handles made before it; every call on them returns QUIRE_E_CLOSED.
 *
 * Errors      See error.h. After quire_arena_reserve(a, n) has succeeded, n page writes or allocations cannot fail for want of
 *             memory; structures reserve first and so never stop half-way.
 */
#ifndef QUIRE_PAGEMGR_H
#define QUIRE_PAGEMGR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "error.h"

#define QUIRE_PAGE_BYTES_MIN     1024u
#define QUIRE_PAGE_BYTES_MAX     65536u
#define QUIRE_PAGE_BYTES_DEFAULT 4096u
#define QUIRE_NAME_BYTES_MAX     191u

typedef uint32_t quire_page_id;
#define QUIRE_NO_PAGE 0xFFFFFFFFu
/* The n-th page of a set's directory table. */
#define QUIRE_DIRECTORY_PAGE(n) ((quire_page_id)(n) | 0x80000000u)
#define QUIRE_PAGE_COUNT_MAX    0x7FFFFFFEu

typedef struct quire_arena quire_arena;
typedef struct quire_snap quire_snap;

/* A shared allowance of bytes; several arenas of a process may draw on one. */
typedef struct quire_budget quire_budget;
int quire_budget_create(uint64_t bytes_max, quire_budget **budget);
void quire_budget_destroy(quire_budget *budget); /* dropped once the last arena using it is closed */
uint64_t quire_budget_used(const quire_budget *budget);

typedef struct {
    const char *path;     /* NULL: anonymous memory */
    uint32_t page_bytes;  /* 0: the default for a new arena, whatever the file has for an existing one */
    uint64_t limit_bytes; /* 0: no limit */
    quire_budget *budget; /* NULL: none shared */
    bool read_only;       /* file arenas only: no writer lock, snapshots only */
    bool
        in_place; /* anonymous arenas only: changes of a few bytes copy no page (undo.c). Takes less memory and traffic; a
                               * snapshot waits for the writer's call at hand, and copies then what was changed since the commit */
    double lock_wait_seconds; /* 0: QUIRE_E_BUSY at once if another writer holds the arena; negative: wait for ever */
} quire_arena_options;

int quire_arena_open(const quire_arena_options *options, quire_arena **arena);
/* Drops what is not committed. QUIRE_E_BUSY while snapshots of this handle are open. */
int quire_arena_close(quire_arena *arena);
/* The same also with snapshots open, which it releases; *arena becomes NULL, and a NULL is fine. No call may be running on the
 * arena, and nobody may use the snapshots, their cursors or handles any more. For bindings, which may lose track of some. */
int quire_arena_close_all(quire_arena **arena);
/* Serialise the threads of one process; one that has entered may enter again, and leaves as often. QUIRE_E_CLOSED after a fork. */
int quire_arena_enter(quire_arena *arena);
void quire_arena_leave(quire_arena *arena);
uint32_t quire_arena_page_bytes(const quire_arena *arena);
/* The epoch of the last commit. */
uint32_t quire_arena_epoch(const quire_arena *arena);
/* Makes sure that page_count pages can be written or allocated. QUIRE_E_LIMIT, _NOSPACE, _NOMEM change nothing. */
int quire_arena_reserve(quire_arena *arena, uint64_t page_count);
/* Names a state by the pages it has: two arenas with the same content need not have the same ones. */
typedef struct {
    uint8_t identity[16]; /* of the arena that made it; zeros: the empty state */
    uint32_t epoch;       /* there */
} quire_point;
/* The point of the last commit, and that of the image or pages file that this arena grew out of, with its epoch here (0: none). */
void quire_arena_point(const quire_arena *arena, quire_point *point);
uint32_t quire_arena_origin(const quire_arena *arena, quire_point *origin);
/* Publishes everything written since the last commit as one state. Cannot half-happen. */
int quire_arena_commit(quire_arena *arena);
/* Goes back to the last commit. */
int quire_arena_abort(quire_arena *arena);
/* Makes the state of a snapshot (of all sets) the last commit again, and drops what is not committed. Costs a walk of the page tables,
 * as abort does. Handles on sets that the snapshot has stay usable, unless the set was destroyed since, by a restore too. */
int quire_arena_restore(quire_arena *arena, quire_snap *snap);
/* File arenas: makes the last commit survive a loss of power, too. Without it a file arena outlives its processes but not
 * the machine's run; opening it after a restart of the machine is then QUIRE_E_CORRUPT. Nothing on anonymous arenas. */
int quire_arena_sync(quire_arena *arena);
/* Walks every table and proves I2 and I3; structures have checks of their own on top. */
int quire_arena_check(quire_arena *arena);

typedef struct {
    uint64_t page_bytes;
    uint64_t frames_used;    /* reachable from the state being written, tables included */
    uint64_t frames_dirty;   /* of these, made since the last commit */
    uint64_t frames_retired; /* kept only for the last commit or a pinned snapshot */
    uint64_t frames_free;    /* ready for use */
    uint64_t bytes_held;     /* memory or file space taken from the system, header included */
    uint64_t bytes_limit;    /* 0: none */
    uint64_t bytes_reserved; /* address space */
    uint64_t snapshots;      /* pins in force, of all processes */
    uint64_t sets;
    uint32_t epoch_committed;
    uint32_t epoch_writing;
    uint32_t epoch_pinned_min; /* 0: nothing pinned */
} quire_stats;
int quire_arena_stats(quire_arena *arena, quire_stats *stats);
/* How many frames only the snapshots at each pinned epoch keep alive: fills up to max pairs, says how many there are. */
typedef struct {
    uint32_t epoch;
    uint64_t frames;
} quire_pinned;
int quire_arena_pinned(quire_arena *arena, quire_pinned *pinned, size_t max, size_t *count);

/* ------------------------------------------------------------------------------------------------ page sets */

/* One radix tree. root is an entry (epoch << 32 | frame); depth 0: root is page 0 itself. */
typedef struct {
    uint64_t root;
    uint32_t depth;
    uint32_t page_limit; /* ids below this have been given out */
    uint32_t free_head;  /* first id of the free list plus 1; 0: none */
    uint32_t page_count; /* ids in use */
} quire_table;

/* A set as one state sees it: what every read goes through. Plain data; valid while its snapshot or set is. */
typedef struct {
    quire_arena *arena;
    uint8_t *const *chunks;
    quire_table table[2];
    uint32_t frame_limit;
    uint32_t epoch; /* the pinned epoch; 0 on a live set */
    uint8_t page_shift;
    uint8_t chunk_shift; /* log2 of frames in a chunk */
    quire_snap *weak;    /* NULL: pages are as they lie in their frames */
} quire_view;

/* In the frame half of a page's entry: the frame is older than the epoch says, because the page was changed in place (undo.c). */
#define QUIRE_ENTRY_BORROWED     0x80000000u
#define QUIRE_ENTRY_FRAME(entry) ((uint32_t)(entry) & 0x7FFFFFFFu)

/* A set of the writer, one object per set and process however often it is opened. */
typedef struct quire_set {
    quire_view view;
    const uint32_t *epoch_writing; /* the arena's: a page whose epoch equals it may be written in place */
    uint32_t set_id;
    uint32_t kind;            /* the structure's own tag; a set is opened only as what it was made */
    uint32_t generation;      /* grows when the set's content is replaced under its users: abort, load */
    uint32_t epoch_created;   /* or of the state it was found in, when the arena was opened or restored */
    uint32_t epoch_destroyed; /* 0: it was not */
    bool gone;                /* destroyed, or made in a transaction that was aborted */
    bool dirty;               /* its catalog entry is behind */
    char name[QUIRE_NAME_BYTES_MAX + 1];
    /* A structure may keep one private object here, rebuilt when generation moves; freed with the set. */
    void *cache;
    void (*cache_free)(void *cache);
    struct quire_set *next;
} quire_set;

int quire_set_create(quire_arena *arena, const char *name, uint32_t kind, quire_set **set);
/* QUIRE_E_MISMATCH if the set is there as another kind. kind 0 opens any. */
int quire_set_open(quire_arena *arena, const char *name, uint32_t kind, quire_set **set);
/* 1, 0, or QUIRE_E_CLOSED. */
int quire_set_exists(quire_arena *arena, const char *name);
/* Releases every page of the set; open handles on it return QUIRE_E_CLOSED from then on. */
int quire_set_destroy(quire_arena *arena, const char *name);
/* A second set with the same content, sharing every frame until one of the two is written: O(1). */
int quire_set_clone(quire_arena *arena, const char *source, const char *name);
/* The sets of the state being written, in the order of creation: fills up to max, says how many there are. */
typedef struct {
    uint32_t kind;
    char name[QUIRE_NAME_BYTES_MAX + 1];
} quire_set_info;
int quire_set_list(quire_arena *arena, quire_set_info *infos, size_t max, size_t *count);
/* 0, or QUIRE_E_CLOSED with a message that says why. */
int quire_set_usable(const quire_set *set);

/* ------------------------------------------------------------------------------------------------ pages */

/* A zeroed page; table 0 or 1. Table 1 (the directory) hands out ids in sequence and takes back only the last. */
int quire_page_alloc(quire_set *set, int table, quire_page_id *id, void **page);
/* QUIRE_E_NOTFOUND if the id is not in use. */
int quire_page_free(quire_set *set, quire_page_id id);

uint8_t *quire_chunk_map(quire_arena *arena, uint32_t chunk); /* internal: maps a chunk this process has not seen yet */
void *quire_page_copy_on_write(quire_set *set, quire_page_id id);
void *quire_page_borrow(quire_set *set, quire_page_id id, uint64_t entry, size_t offset, size_t count, bool again);
const void *quire_page_read_weak(const quire_view *view, uint64_t entry);
/* A hint that these pages are read next: what a weak snapshot needs to make them up is asked for together, where reading would wait for one
 * note after the other. Nothing on other views, nor beyond the first QUIRE_AHEAD_PAGES. */
#define QUIRE_AHEAD_PAGES 16u
void quire_view_ahead(const quire_view *view, const quire_page_id *ids, size_t count);
/* A hint that the page of this entry is amended next. */
void quire_amend_ahead(const quire_view *view, uint64_t entry);
/* What was changed in place on a page since a weak snapshot: each stretch, in order, and what it held then. */
#define QUIRE_AMENDMENTS_MAX 16u
typedef struct {
    uint32_t offset, count;
    const uint8_t *old;
} quire_amendment;
typedef struct {
    const uint8_t *page; /* as it is now */
    size_t count;
    quire_amendment items[QUIRE_AMENDMENTS_MAX];
} quire_amendments;
/* older: of a weak snapshot, newer: of another state, not weak. False if there is more to tell of how the page differs: it must be read in
 * both. Valid until the next write or firm snapshot. */
bool quire_page_amendments(const quire_view *older, const quire_view *newer, quire_page_id id,
                           quire_amendments *amendments);
/* Whether reading made up a page since the last quire_view_forget. */
bool quire_view_has_made_up(const quire_view *view);
/* Frees the pages that reading a weak snapshot's view made up so far; pointers to them are gone. */
void quire_view_forget(const quire_view *view);

static inline uint8_t *quire_frame(const quire_view *view, uint32_t frame) {
    uint32_t chunk = frame >> view->chunk_shift;
    uint8_t *base = __atomic_load_n(&view->chunks[chunk], __ATOMIC_RELAXED);
    if (QUIRE_UNLIKELY(base == NULL)) {
        base = quire_chunk_map(view->arena, chunk);
        if (base == NULL) {
            return NULL;
        }
    }
    return base + ((size_t)(frame & ((1u << view->chunk_shift) - 1)) << view->page_shift);
}

/* The page-table entry of id, 0 if it is not in use or the table is damaged. */
static inline uint64_t quire_page_entry(const quire_view *view, quire_page_id id) {
    const quire_table *table = &view->table[id >> 31];
    uint32_t index = id & 0x7FFFFFFFu;
    if (QUIRE_UNLIKELY(index >= table->page_limit)) {
        return 0;
    }
    unsigned bits = view->page_shift - 3u;
    uint64_t entry = table->root;
    for (unsigned shift = table->depth * bits; shift != 0;) {
        uint32_t frame = (uint32_t)entry;
        if (QUIRE_UNLIKELY(frame == 0 || frame >= view->frame_limit)) {
            return 0;
        }
        const uint64_t *node = (const uint64_t *)quire_frame(view, frame);
        if (QUIRE_UNLIKELY(node == NULL)) {
            return 0;
        }
        shift -= bits;
        entry = node[(index >> shift) & ((1u << bits) - 1)];
    }
    return QUIRE_ENTRY_FRAME(entry) == 0 || QUIRE_ENTRY_FRAME(entry) >= view->frame_limit ? 0 : entry;
}

/* The page of an entry for reading, NULL if it names none. */
static inline const void *quire_entry_read(const quire_view *view, uint64_t entry) {
    if (QUIRE_UNLIKELY(view->weak != NULL) && entry != 0) {
        return quire_page_read_weak(view, entry);
    }
    return QUIRE_LIKELY(entry != 0) ? quire_frame(view, QUIRE_ENTRY_FRAME(entry)) : NULL;
}

/* The page for reading, NULL if id is not in use. */
static inline const void *quire_page_read(const quire_view *view, quire_page_id id) {
    return quire_entry_read(view, quire_page_entry(view, id));
}

/* Whether the epoch being written made the frame of this entry, so that it may be written to. */
static inline bool quire_entry_is_own(uint64_t entry, uint32_t epoch_writing) {
    return (uint32_t)(entry >> 32) == epoch_writing && (entry & QUIRE_ENTRY_BORROWED) == 0 && entry != 0;
}

/* The page for writing: itself if this epoch made it, else its copy. NULL if id is not in use.
 * Needs a reservation (quire_arena_reserve). A pointer got earlier for reading the same page may be stale afterwards. */
static inline void *quire_page_write(quire_set *set, quire_page_id id) {
    uint64_t entry = quire_page_entry(&set->view, id);
    if (QUIRE_LIKELY(quire_entry_is_own(entry, *set->epoch_writing))) {
        return quire_frame(&set->view, QUIRE_ENTRY_FRAME(entry));
    }
    return entry == 0 ? NULL : quire_page_copy_on_write(set, id);
}

/* As quire_page_amend, for who has the page's entry, which nothing was written since. */
static inline void *quire_page_amend_at(quire_set *set, quire_page_id id, uint64_t entry, size_t offset, size_t count,
                                        bool again) {
    if (QUIRE_LIKELY(quire_entry_is_own(entry, *set->epoch_writing))) {
        return quire_frame(&set->view, QUIRE_ENTRY_FRAME(entry));
    }
    return entry == 0 ? NULL : quire_page_borrow(set, id, entry, offset, count, again);
}

/* The page for writing count bytes at offset, and no others: the same, or without a copy where the arena changes pages in place.
 * again: they may have been changed in this epoch before, so that it is worth looking for their note. */
static inline void *quire_page_amend(quire_set *set, quire_page_id id, size_t offset, size_t count, bool again) {
    return quire_page_amend_at(set, id, quire_page_entry(&set->view, id), offset, count, again);
}

/* Calls visit for every page of the view whose epoch is newer than since, and with in_use false for every free id in a
 * table node changed since then (so freed pages are among them). Clean subtrees are not visited (I3). */
int quire_view_changed(const quire_view *view, uint32_t since,
                       int (*visit)(void *context, quire_page_id id, bool in_use), void *context);
static inline uint32_t quire_view_page_bytes(const quire_view *view) {
    return 1u << view->page_shift;
}

/* Whole calls on one page of a live set: they enter, reserve and copy. */
int quire_raw_alloc(quire_set *set, quire_page_id *id);
int quire_raw_free(quire_set *set, quire_page_id id);
int quire_raw_read(quire_set *set, quire_page_id id, void *bytes); /* a page's bytes */
int quire_raw_write(quire_set *set, quire_page_id id, size_t offset, const void *bytes, size_t count);
/* What quire_view_changed visits on a live set: fills up to max, says how many there are. */
typedef struct {
    quire_page_id id;
    bool in_use;
} quire_page_state;
int quire_set_changed(quire_set *set, uint32_t since, quire_page_state *pages, size_t max, size_t *count);

/* ------------------------------------------------------------------------------------------------ snapshots */

/* Pins the last commit. Any thread; no lock. QUIRE_E_FULL if all pins of the arena are taken. */
int quire_snap_acquire(quire_arena *arena, quire_snap **snap);
/* The last commit, for the writer: to tell what changed since, and to go back to. On an arena that is not in_place the same as
 * quire_snap_acquire. Else it keeps no page from being changed in place; its pages are then made up from what was noted, and pointers to them
 * live until quire_view_forget or the next write. A later firm snapshot (any other) may take the means for that: calls are then QUIRE_E_CLOSED. */
int quire_snap_acquire_weak(quire_arena *arena, quire_snap **snap);
/* Pins the state being written as it is now, uncommitted changes included. Only this process sees it. Iterators over live structures use this. */
int quire_snap_acquire_live(quire_arena *arena, quire_snap **snap);
/* Pins the last commit of the sets named (all of them if set_count is 0) under a name, to be found again by this process. */
int quire_snap_create(quire_arena *arena, const char *name, const char *const *sets, size_t set_count,
                      quire_snap **snap);
int quire_snap_find(quire_arena *arena, const char *name, quire_snap **snap); /* the same object: one release in all */
void quire_snap_release(quire_snap *snap);
uint32_t quire_snap_epoch(const quire_snap *snap);
/* True if the newer epoch's state came from the older one's: no restore to a still older one lies between. Both are pinned. Only the
 * process that restores knows. */
bool quire_epoch_follows(quire_arena *arena, uint32_t newer, uint32_t older);
/* QUIRE_E_NOTFOUND if the snapshot has no such set; kind as in quire_set_open. */
int quire_snap_view(quire_snap *snap, const char *name, uint32_t kind, quire_view *view);
int quire_snap_list(quire_snap *snap, quire_set_info *infos, size_t max, size_t *count); /* as quire_set_list */
int quire_snap_each(quire_snap *snap, int (*visit)(void *context, const char *name, uint32_t kind), void *context);
/* QUIRE_E_CORRUPT once a chunk of the mapped image below could not be had. To be asked where a page that cannot be read would else count as one
 * that is not in use. */
int quire_view_whole(const quire_view *view);
/* QUIRE_E_CLOSED if the view's arena was opened before a fork. */
int quire_view_usable(const quire_view *view);

/* ------------------------------------------------------------------------------------------------ images */

/* Writes the snapshot's sets as an image: a compact arena file followed by block checksums (docs/format.md). The sink
 * gets bytes in order and returns 0, or a code that is passed on. */
typedef int (*quire_sink)(void *context, const void *bytes, size_t count);
int quire_snap_write(quire_snap *snap, quire_sink sink, void *context);
int quire_snap_write_file(quire_snap *snap, const char *path); /* to a temporary name, synced, then renamed */
/* Adds every set of an image to the state being written. QUIRE_E_EXISTS if one of the names is taken, QUIRE_E_CORRUPT if
 * a checksum fails; nothing is changed then. */
int quire_arena_load_file(quire_arena *arena, const char *path);
/* The same from memory that is aligned for a uint64_t; name stands for it in messages. */
int quire_arena_load(quire_arena *arena, const void *bytes, size_t count, const char *name);

/* A new anonymous arena that is an image, without a second copy of it: the caller fills the room, from any number of threads, and ends. */
typedef struct quire_image quire_image;
int quire_image_begin(const quire_arena_options *options, uint64_t image_bytes, const char *name, quire_image **image);
uint8_t *quire_image_room(quire_image *image); /* image_bytes of it */
/* Says that count bytes from start on are as they will be. Their checksums are computed here, while they are in the caller's cache, and
 * need not be at the end; stretches that are told of by several threads must not overlap. */
int quire_image_filled(quire_image *image, uint64_t start, uint64_t count);
/* Verifies every block and makes the arena. *image is NULL afterwards, also after an error. */
int quire_image_end(quire_image **image, quire_arena **arena);
void quire_image_cancel(quire_image **image);
/* The same from a file that is mapped: costs the same for any size, and a chunk is read and verified when it is first touched (a damaged one
 * makes every call that needs it QUIRE_E_CORRUPT). The file must not change; it may be removed. */
int quire_image_map(const quire_arena_options *options, const char *path, quire_arena **arena);

#endif
