/* internal.h -- what the files of the page manager share. Not for users of the core.
 *
 * Purpose     The arena's header as it lies in memory or in the file, and the arena's private state.
 *
 * Layout      The header takes the first QUIRE_HEADER_BYTES of an arena, whatever its page size (docs/format.md repeats it):
 *             offset size  field
 *             0      8     magic "QUIREARN"; written last when an arena is made
 *             8      4     format version (1)
 *             12     4     page_bytes
 *             16     16    identity, random
 *             32     4     crc32c of bytes 0..31
 *             64     8     current: epoch of the last commit << 1 | the meta slot that describes it
 *             72     8     synced: value of current at the last quire_arena_sync, 0 if written since
 *             80     16    boot id of the machine run in which the arena was last opened for writing
 *             96     4     pin_limit: pins at and above this index have never been used
 *             128    64    meta slot 0
 *             192    64    meta slot 1
 *             4096   32*n  pins
 *
 * Invariants  of pagemgr.h; the files cite them by number.
 * Ownership   arena.c: memory, file, locks. pages.c: tables, sets, commit. snapshot.c: pins, retired frames.
 * Threads     Header words are read and written with atomics. Everything else in quire_arena belongs to whoever has entered
 *             it, but for the pins list, which has a mutex of its own, and chunks, which only ever gain entries.
 * Errors      error.h.
 */
#ifndef QUIRE_INTERNAL_H
#define QUIRE_INTERNAL_H

#include <pthread.h>

#include "pagemgr.h"

#define QUIRE_MAGIC          "QUIREARN"
#define QUIRE_FORMAT_VERSION 1u
#define QUIRE_HEADER_BYTES   32768u
#define QUIRE_CHUNK_BYTES    (2u << 20)
#define QUIRE_CHUNKS_MAX     (1u << 19)
#define QUIRE_EPOCH_MAX      0xFFFFFFF0u

/* A committed state: everything else is reached from the catalog's table. */
typedef struct {
    uint32_t epoch;
    uint32_t frame_limit;
    quire_table catalog;
    uint32_t set_count;
    uint32_t crc; /* of the bytes before it */
    uint64_t reserved[3];
} quire_meta;

typedef struct {
    uint32_t owner; /* attachment number of the process, 0: free */
    uint32_t epoch; /* 0: being set up */
    uint64_t catalog_root;
    uint32_t catalog_depth;
    uint32_t catalog_limit;
    uint32_t frame_limit;
    uint32_t confirmed; /* 1 once its reader has seen that the epoch was still the current one: only then is it whole */
} quire_pin;

#define QUIRE_PINS_OFFSET 4096u
#define QUIRE_PIN_COUNT   ((QUIRE_HEADER_BYTES - QUIRE_PINS_OFFSET) / sizeof(quire_pin))

typedef struct {
    char magic[8];
    uint32_t version;
    uint32_t page_bytes;
    uint8_t identity[16];
    uint32_t crc;
    uint32_t reserved0[7];
    uint64_t current;
    uint64_t synced;
    uint8_t boot_id[16];
    uint32_t pin_limit;
    uint32_t reserved1[7];
    quire_meta meta[2];
    uint8_t reserved2[QUIRE_PINS_OFFSET - 256];
    quire_pin pins[QUIRE_PIN_COUNT];
} quire_header;

_Static_assert(sizeof(quire_table) == 24, "table descriptor");
_Static_assert(sizeof(quire_meta) == 64, "meta slot");
_Static_assert(sizeof(quire_pin) == 32, "pin");
_Static_assert(offsetof(quire_header, current) == 64, "current");
_Static_assert(offsetof(quire_header, meta) == 128, "meta slots");
_Static_assert(offsetof(quire_header, pins) == QUIRE_PINS_OFFSET, "pins");
_Static_assert(sizeof(quire_header) == QUIRE_HEADER_BYTES, "header");

/* One set in a catalog page; set_id - 1 is its place among all entries. */
typedef struct {
    uint32_t set_id; /* 0: no set here */
    uint32_t kind;
    uint32_t name_bytes;
    uint32_t reserved;
    quire_table table[2];
    char name[QUIRE_NAME_BYTES_MAX + 1];
} quire_catalog_entry;
_Static_assert(sizeof(quire_catalog_entry) == 256, "catalog entry");

/* A frame no longer part of the state being written: seen by states birth <= epoch < death. */
typedef struct {
    uint32_t frame;
    uint32_t birth;
    uint32_t death;
} quire_retired;

typedef struct {
    quire_retired *items;
    size_t count, capacity;
} quire_retired_list;

/* Frames that the pin at epoch keeps alive and no newer one does. */
typedef struct {
    uint32_t epoch;
    quire_retired_list list;
} quire_held;

/* undo.c: changes made in place. */
typedef struct quire_note quire_note;
typedef struct quire_note_block quire_note_block;
typedef struct quire_amended quire_amended;
typedef struct {
    quire_note_block *first, *last; /* the log, in the order of time */
    quire_note_block *spare;
    quire_note **heads;    /* by frame: its newest note, NULL: none */
    uint32_t *head_epochs; /* by frame: that note's epoch, 0: none */
    uint32_t head_count;
    uint32_t head_newest; /* no note is newer */
    uint32_t floor;       /* notes of epochs up to this one are gone */
    quire_amended *items; /* by epoch */
    size_t item_count, item_capacity;
    size_t committed_count;  /* of the items, those of transactions before the one at hand */
    uint64_t page_count;     /* pages of the last commit that are changed in place since */
    uint64_t note_count[2];  /* of the transaction at hand, by the table that the pages are in */
    uint64_t noted_pages[2]; /* those that they are of */
    uint32_t dense_left[2];  /* transactions that copy pages yet, because so much is changed in each */
    uint32_t firm_newest;    /* the newest epoch with a pin that is not weak; 0: none */
} quire_undo;

/* Pages of a weak snapshot as they were, made up from what they are and the notes. */
typedef struct {
    uint32_t frame;
    uint32_t generation; /* another one than that of the whole: empty */
    uint8_t *page;
} quire_made_up_page;
typedef struct {
    quire_made_up_page *slots; /* hashed by frame */
    size_t slot_count;
    uint8_t **pool;
    size_t pool_count, used;
    uint32_t generation;
    int failure; /* why a page could not be made up; QUIRE_OK: so far none */
} quire_made_up;

/* A pin of this process; snapshots of one epoch share it. */
typedef struct quire_local_pin {
    uint32_t slot;
    uint32_t epoch;
    uint32_t users;
    uint32_t firm_users; /* of these, snapshots that are not weak */
    bool lost;           /* its weak snapshots can no longer be read */
    quire_view catalog;
    struct quire_local_pin *next;
} quire_local_pin;

struct quire_snap {
    quire_arena *arena;
    quire_local_pin *pin;
    char *name;
    char **sets; /* NULL: all of them */
    size_t set_count;
    bool weak;
    quire_made_up made_up;
    struct quire_snap *next;               /* named snapshots only */
    struct quire_snap *all_next, **all_at; /* every open snapshot of the arena; *all_at is this one */
};

/* The state of epoch to is the one of epoch from again (quire_arena_restore). */
typedef struct {
    uint32_t from;
    uint32_t to;
} quire_restored;

struct quire_budget {
    uint64_t bytes_max;
    uint64_t bytes_used;
    uint32_t users;
};

typedef struct {
    uint8_t *base;
    size_t bytes;
} quire_extent;

/* An image file whose chunks are mapped, and verified, when they are first touched. */
typedef struct {
    int file;
    char *path;
    uint64_t body_bytes;
    uint32_t *checksums;
    char *failure;        /* why a chunk could not be had; NULL: so far none */
    uint32_t chunk_limit; /* chunks below it are the file's; the first and the last, which may be a piece, were read */
} quire_mapped;

struct quire_arena {
    /* memory */
    quire_mapped *mapped; /* NULL: not from an image file */
    quire_header *header;
    uint8_t **chunks;
    quire_extent *extents; /* address space reserved, in the order of chunks */
    size_t extent_count;
    uint32_t chunks_reserved;
    uint32_t chunks_mapped; /* writer: chunks 0..this-1 are mapped */
    int file;               /* -1: anonymous */
    int locks; /* the same file, opened once more: mappings keep a description, and so its locks, in a forked child */
    char *path;
    bool read_only;
    uint32_t attachment; /* which lock byte is ours; pins carry it */
    uint32_t page_bytes;
    uint8_t page_shift;
    uint8_t chunk_shift;
    uint32_t header_frames;
    uint64_t bytes_held;
    uint64_t limit_bytes;
    quire_budget *budget;
    uint32_t fork_generation;
    uintptr_t busy;                /* the thread that has entered it (arena.c), 0: none */
    uint32_t busy_depth;           /* how often; the thread's own */
    bool failed;                   /* going back to the last commit failed: nothing may be written until it succeeds */
    struct quire_arena *open_next; /* arena.c: file arenas of this process */

    /* frames; a set bit is a frame ready for use, a set bit of the summary a word with one */
    uint64_t *free_bits;
    uint64_t *free_summary;
    uint32_t bits_capacity; /* frames the two cover */
    uint32_t free_count;
    uint32_t free_hint; /* no free frame below this one's summary word */
    uint32_t free_low;  /* the fewest free frames there were in the last trim_commits commits */
    uint32_t trim_commits;
    uint32_t frame_limit;
    uint8_t *chunk_absent; /* chunk given back to the system; its frames are not free */
    uint32_t absent_count;
    uint16_t *extra_refs; /* NULL until a set is cloned: how many table entries beyond the first name a frame */
    uint32_t dirty_count; /* frames in use that were made since the last commit */
    bool in_place;
    quire_undo undo;

    /* epochs */
    uint32_t epoch_writing;
    uint32_t epoch_committed;
    uint32_t
        epoch_sealed;   /* newest epoch that a snapshot, or the last commit, may hold: frames of newer ones are ours */
    bool changed;       /* something was written since epoch_sealed */
    quire_point origin; /* where the pages came from: an image or a pages file; else zeros */
    uint32_t origin_epoch; /* what that point is here */
    quire_retired_list retired;
    size_t retired_swept; /* length of retired after the last sweep */
    quire_held *held;
    size_t held_count, held_capacity;

    /* sets */
    quire_set catalog;
    quire_set *sets; /* every set of the state being written, and those that went while handles on them may be open */
    uint32_t set_count;
    uint32_t depth_max; /* of any table so far */

    /* snapshots of this process */
    pthread_mutex_t pins_mutex;
    quire_local_pin *pins;
    quire_snap *named;
    quire_snap *all;
    uint64_t snap_count;
    quire_restored *restored; /* by epoch; those that a snapshot may lie before */
    size_t restored_count;
};

extern uint32_t quire_fork_generation;

/* Leaves and passes on what was done meanwhile: return quire_arena_left(arena, work(arena)). */
static inline int quire_arena_left(quire_arena *arena, int rc) {
    quire_arena_leave(arena);
    return rc;
}

/* arena.c */
int quire_arena_new(const quire_arena_options *options, quire_arena **arena); /* without memory or file */
void quire_arena_free(quire_arena *arena);
/* Memory for the first bytes of a new arena, in one piece. */
int quire_arena_room(quire_arena *arena, uint64_t bytes, uint8_t **base);
/* Addresses for so many chunks of a new arena, and memory for the first and the last of them. */
int quire_arena_ends(quire_arena *arena, uint32_t chunk_count);
/* Makes an arena of the image whose first chunk is there and verified. mapped: the others come when they are touched. */
int quire_arena_take(quire_arena *arena, uint32_t page_bytes, const quire_meta *meta);
/* Counts memory against the arena's limit and its budget. */
int quire_arena_charge(quire_arena *arena, uint64_t bytes);
void quire_arena_discharge(quire_arena *arena, uint64_t bytes);
int quire_arena_grow(quire_arena *arena, uint64_t frame_count);
void quire_arena_trim(quire_arena *arena);
uint32_t quire_frame_alloc(quire_arena *arena); /* 0: none free, which a reservation excludes */
void quire_frame_free(quire_arena *arena, uint32_t frame);
void quire_frames_reset(quire_arena *arena);               /* every frame that is not header or absent becomes free */
bool quire_frame_take(quire_arena *arena, uint32_t frame); /* marks a frame as not free; false if it was not */
bool quire_frame_is_free(const quire_arena *arena, uint32_t frame);
/* True if the process behind an attachment has died; its pins are then gone, if we are the writer. */
bool quire_attachment_dead(quire_arena *arena, uint32_t attachment);
static inline quire_view quire_arena_view(const quire_arena *arena) {
    return (quire_view){.arena = (quire_arena *)arena,
                        .chunks = arena->chunks,
                        .frame_limit = arena->frame_limit,
                        .page_shift = arena->page_shift,
                        .chunk_shift = arena->chunk_shift};
}
/* Makes a file's name in its folder safe against a loss of power. */
int quire_folder_sync(const char *path);
uint32_t quire_meta_crc(const quire_meta *meta);
/* Reads the committed state; *current is the header word it belongs to. */
int quire_meta_read(quire_arena *arena, quire_meta *meta, uint64_t *current);

/* pages.c */
int quire_arena_recover(quire_arena *arena, const quire_meta *meta, bool is_image);
uint32_t quire_page_next_free(const quire_view *view,
                              quire_page_id id); /* what follows a free id in the list, plus 1 */
/* What a table of the set has besides its pages: page_limit, free_head and page_count of wanted. Pages beyond go. */
int quire_set_resize(quire_set *set, const quire_table wanted[2]);
/* Makes the page of that number these bytes; or, with NULL, a free one before next_free in the list. */
int quire_page_install(quire_set *set, quire_page_id id, const void *bytes, uint32_t next_free);
/* Brings the catalog's pages up to date with the sets; reserves what it needs. */
int quire_catalog_flush(quire_arena *arena);
int quire_catalog_find(const quire_view *catalog, const char *name, quire_catalog_entry *entry);
int quire_catalog_each(const quire_view *catalog, int (*visit)(void *context, const quire_catalog_entry *entry),
                       void *context);
/* Ends the epoch being written without committing it. */
int quire_arena_seal(quire_arena *arena);
int quire_frames_reserve(quire_arena *arena, uint64_t frame_count);
/* Frames that a commit may need for the catalog. */
uint64_t quire_catalog_frames(const quire_arena *arena);
/* The place of a page's entry, in a node of the epoch being written; NULL on damage. Needs a reservation. */
uint64_t *quire_page_place(quire_set *set, quire_page_id id);
int quire_name_valid(const char *name, const char *what);
void quire_sets_free(quire_arena *arena);

/* snapshot.c */
int quire_frame_retire(quire_arena *arena, uint32_t frame, uint32_t birth);
/* Frees what no state sees any more. Room for the lists was made by quire_retired_room. */
void quire_retired_sweep(quire_arena *arena);
int quire_retired_room(quire_arena *arena, size_t count);
int quire_held_add(quire_arena *arena, uint32_t epoch, quire_retired item);
size_t quire_pins_collect(quire_arena *arena, uint32_t *epochs, size_t max);
/* The catalog of a pinned state; false if nobody pins that epoch (any more). */
bool quire_pin_catalog(quire_arena *arena, uint32_t epoch, quire_table *catalog);
void quire_held_clear(quire_arena *arena);
void quire_attachment_forget(quire_arena *arena, uint32_t attachment); /* frees its pins */

/* undo.c */
void quire_undo_committed(quire_arena *arena); /* after a commit, before frames are swept */
void quire_undo_close(quire_arena *arena);
/* A page that was changed in place got a frame of its own, or was freed. */
void quire_undo_copied(quire_arena *arena, uint64_t entry);
/* Every frame becomes what it was at epoch. */
void quire_undo_roll_back(quire_arena *arena, uint32_t epoch);
/* Whether going back to a weak snapshot would change what others have pinned, or cannot be done any more. */
bool quire_undo_pinned_after(quire_arena *arena, const quire_snap *snap);
/* Makes the last commit whole in frames of its own, so that it, or the state being written, can be pinned. */
int quire_undo_settle(quire_arena *arena);
void quire_made_up_free(quire_made_up *made_up);
/* Why a page of a weak snapshot could not be read; QUIRE_OK if all could. */
int quire_weak_failure(const quire_view *view);

/* image.c */
int quire_mapped_chunk(quire_mapped *mapped, uint32_t chunk, uint8_t *base);
void quire_mapped_close(quire_mapped *mapped);
bool quire_file_is_image(int file, uint64_t file_bytes);

/* crc32c.c */
uint32_t quire_crc32c(uint32_t crc, const void *bytes, size_t count);

#endif
