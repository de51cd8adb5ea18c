/* pages.c -- page tables, page sets, the catalog, commit, abort and recovery.
 *
 * Purpose     Maps page ids to frames with copy-on-write, keeps the list of sets, and turns what was written into a committed state.
 *
 * Layout      A table is a radix tree of nodes, one frame each, holding page_bytes / 8 entries: frame in the low 32 bits, epoch in the
 *             high 32. Leaf entries of free ids have frame 0 and the next free id plus 1 in the high half.
 *             The catalog is a set of its own (not listed in itself): pages of quire_catalog_entry; its table is in the meta slot.
 *
 * Invariants  I1..I5 of pagemgr.h.
 *             I6 page_count + length of the free list == page_limit for table 0; table 1 has no free list.
 *             I7 without clones every frame is named by one entry; extra_refs counts those beyond the first. A frame made in the
 *                epoch being written is never shared: cloning starts a new epoch.
 *
 * Ownership   quire_set objects belong to the arena and live until it is closed, also when the set is destroyed, so that a stale
 *             handle finds `gone` instead of freed memory.
 * Threads     The writer alone, but for quire_view_changed, quire_catalog_find and quire_catalog_each on a snapshot's view.
 * Errors      CORRUPT for damaged tables; LIMIT, NOSPACE, NOMEM before anything is changed; FULL for too many pages, sets or epochs.
 */
#include "internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SETS_MAX 60000u

static uint32_t entry_frame(uint64_t entry) {
    return QUIRE_ENTRY_FRAME(entry);
}
static uint32_t entry_epoch(uint64_t entry) {
    return (uint32_t)(entry >> 32);
}
/* The first epoch that may have seen the frame: that of a borrowed one is not known. */
static uint32_t entry_birth(uint64_t entry) {
    return (entry & QUIRE_ENTRY_BORROWED) != 0 ? 1 : entry_epoch(entry);
}
static uint64_t make_entry(uint32_t epoch, uint32_t frame) {
    return (uint64_t)epoch << 32 | frame;
}
/* NULL only where the frame lies in a chunk of an image that cannot be had (arena.c). */
static uint8_t *frame_bytes(quire_arena *arena, uint32_t frame) {
    quire_view view = quire_arena_view(arena);
    return quire_frame(&view, frame);
}
static unsigned node_bits(const quire_arena *arena) {
    return arena->page_shift - 3u;
}

/* ------------------------------------------------------------------------------------------------ copy-on-write */

static int writable(const quire_arena *arena) {
    if (arena->failed) {
        return quire_fail(QUIRE_E_CORRUPT,
                          "the last commit could not be recovered: abort again, or restore from a checkpoint");
    }
    return arena->read_only
               ? quire_fail(QUIRE_E_READONLY, "%s is open read-only: take a snapshot to read it", arena->path)
               : QUIRE_OK;
}

int quire_frames_reserve(quire_arena *arena, uint64_t frame_count) {
    QUIRE_TRY(quire_retired_room(arena, frame_count));
    if (QUIRE_LIKELY(arena->free_count >= frame_count)) {
        return QUIRE_OK;
    }
    QUIRE_TRY(writable(arena));
    /* Sweeping is linear in what is retired: only when that has doubled, or when there is no other way. */
    if (arena->retired.count >= 2 * arena->retired_swept + 256) {
        quire_retired_sweep(arena);
    }
    int rc = quire_arena_grow(arena, frame_count);
    if (rc != QUIRE_OK) {
        quire_retired_sweep(arena);
        rc = quire_arena_grow(arena, frame_count);
    }
    return rc;
}

/* What a commit may write: every page of the catalog and the nodes above. On top of every reservation, so that whatever could be
 * written can be committed. */
uint64_t quire_catalog_frames(const quire_arena *arena) {
    return 2 * (uint64_t)arena->catalog.view.table[0].page_count + 8;
}

int quire_arena_reserve(quire_arena *arena, uint64_t page_count) {
    /* A page may drag a new copy of each table node above it, and one more level. */
    return quire_frames_reserve(arena, page_count * (arena->depth_max + 2) + quire_catalog_frames(arena));
}

/* A frame for something new, made *entry; its bytes, or NULL when nothing is reserved. */
static uint8_t *frame_new(quire_arena *arena, uint64_t *entry) {
    uint32_t frame = quire_frame_alloc(arena);
    uint8_t *bytes = frame == 0 ? NULL : frame_bytes(arena, frame);
    if (bytes == NULL) {
        if (frame == 0) {
            quire_fail(QUIRE_E_NOMEM, "a page was written without a reservation");
        }
        return NULL;
    }
    arena->changed = true;
    arena->dirty_count++;
    *entry = make_entry(arena->epoch_writing, frame);
    return bytes;
}

/* One entry stops naming a frame. node: the frame is a table node that was copied, so its children gain a parent. */
static int frame_drop(quire_arena *arena, uint64_t entry, bool node_was_copied) {
    uint32_t frame = entry_frame(entry);
    if ((entry & QUIRE_ENTRY_BORROWED) != 0) {
        quire_undo_copied(arena, entry);
    }
    if (arena->extra_refs == NULL || arena->extra_refs[frame] == 0) {
        return quire_frame_retire(arena, frame, entry_birth(entry));
    }
    arena->extra_refs[frame]--;
    if (node_was_copied) {
        const uint64_t *node = (const uint64_t *)frame_bytes(arena, frame);
        for (uint32_t i = 0; i < 1u << node_bits(arena); i++) {
            if (entry_frame(node[i]) != 0) {
                arena->extra_refs[entry_frame(node[i])]++;
            }
        }
    }
    return QUIRE_OK;
}

/* Makes *entry name a frame of this epoch with the same content; the frame's bytes, or NULL when nothing is reserved. */
static uint8_t *entry_own(quire_arena *arena, uint64_t *entry, bool is_node) {
    if (quire_entry_is_own(*entry, arena->epoch_writing)) {
        return frame_bytes(arena, entry_frame(*entry));
    }
    uint64_t made;
    const uint8_t *bytes = frame_bytes(arena, entry_frame(*entry));
    uint8_t *copy = bytes == NULL ? NULL : frame_new(arena, &made);
    if (copy == NULL) {
        return NULL;
    }
    memcpy(copy, bytes, arena->page_bytes);
    if (frame_drop(arena, *entry, is_node) != QUIRE_OK) {
        return NULL;
    }
    *entry = made;
    return copy;
}

/* The place of index's entry in a leaf that may be written; NULL on damage. Missing nodes are made. */
static uint64_t *entry_place(quire_set *set, quire_table *table, uint32_t index) {
    quire_arena *arena = set->view.arena;
    unsigned bits = node_bits(arena);
    uint64_t *entry = &table->root;
    set->dirty = true;
    for (unsigned shift = table->depth * bits; shift != 0;) {
        uint8_t *node;
        if (entry_frame(*entry) == 0) {
            node = frame_new(arena, entry);
            if (node == NULL) {
                return NULL;
            }
            memset(node, 0, arena->page_bytes);
        } else if (entry_frame(*entry) >= arena->frame_limit) {
            quire_fail(QUIRE_E_CORRUPT, "set '%s': its page table names frame %u, which does not exist", set->name,
                       entry_frame(*entry));
            return NULL;
        } else if ((node = entry_own(arena, entry, true)) == NULL) {
            return NULL;
        }
        shift -= bits;
        entry = (uint64_t *)node + ((index >> shift) & ((1u << bits) - 1));
    }
    return entry;
}

uint64_t *quire_page_place(quire_set *set, quire_page_id id) {
    return entry_place(set, &set->view.table[id >> 31], id & 0x7FFFFFFFu);
}

void *quire_page_copy_on_write(quire_set *set, quire_page_id id) {
    quire_arena *arena = set->view.arena;
    uint64_t *entry = quire_page_place(set, id);
    return entry == NULL ? NULL : entry_own(arena, entry, false);
}

/* Makes the table deep enough for index. */
static int table_deepen(quire_set *set, quire_table *table, uint32_t index) {
    quire_arena *arena = set->view.arena;
    while (table->depth * node_bits(arena) < 31 && (uint64_t)index >> (table->depth * node_bits(arena)) != 0) {
        if (entry_frame(table->root) != 0) {
            uint64_t made;
            uint64_t *node = (uint64_t *)frame_new(arena, &made);
            if (node == NULL) {
                return QUIRE_E_NOMEM;
            }
            memset(node, 0, arena->page_bytes);
            node[0] = table->root;
            table->root = made;
        }
        table->depth++;
        if (table->depth > arena->depth_max) {
            arena->depth_max = table->depth;
        }
    }
    return QUIRE_OK;
}

int quire_page_alloc(quire_set *set, int which, quire_page_id *id, void **page) {
    quire_arena *arena = set->view.arena;
    quire_table *table = &set->view.table[which];
    uint32_t index = table->free_head != 0 ? table->free_head - 1 : table->page_limit;
    if (index >= QUIRE_PAGE_COUNT_MAX) {
        return quire_fail(QUIRE_E_FULL, "set '%s' has %u pages, the most there can be", set->name, table->page_count);
    }
    QUIRE_TRY(table_deepen(set, table, index));
    uint64_t *entry = entry_place(set, table, index);
    if (entry == NULL) {
        return QUIRE_E_CORRUPT;
    }
    if (table->free_head != 0) {
        uint32_t next = entry_epoch(*entry);
        if (entry_frame(*entry) != 0 || next > table->page_limit) {
            return quire_fail(QUIRE_E_CORRUPT, "set '%s': page %u is on the free list and in use", set->name, index);
        }
        table->free_head = next;
    } else {
        table->page_limit++;
    }
    *page = frame_new(arena, entry);
    if (*page == NULL) {
        return QUIRE_E_NOMEM;
    }
    table->page_count++;
    *id = index | (quire_page_id)which << 31;
    memset(*page, 0, arena->page_bytes);
    return QUIRE_OK;
}

int quire_page_free(quire_set *set, quire_page_id id) {
    quire_table *table = &set->view.table[id >> 31];
    uint32_t index = id & 0x7FFFFFFFu;
    if (quire_page_entry(&set->view, id) == 0) {
        return quire_fail(QUIRE_E_NOTFOUND, "set '%s' has no page %u", set->name, id);
    }
    if (id >> 31 != 0 && index + 1 != table->page_limit) {
        return quire_fail(QUIRE_E_INVALID, "directory page %u of set '%s' is not its last", index, set->name);
    }
    uint64_t *entry = entry_place(set, table, index);
    if (entry == NULL) {
        return QUIRE_E_CORRUPT;
    }
    QUIRE_TRY(frame_drop(set->view.arena, *entry, false));
    set->view.arena->changed = true;
    table->page_count--;
    if (id >> 31 != 0) {
        *entry = 0;
        table->page_limit--;
    } else {
        *entry = (uint64_t)table->free_head << 32;
        table->free_head = index + 1;
    }
    return QUIRE_OK;
}

/* Empties the place of an id: what lay there is dropped. */
static uint64_t *place_vacate(quire_set *set, quire_table *table, uint32_t index) {
    uint64_t *entry = entry_place(set, table, index);
    if (entry != NULL && entry_frame(*entry) != 0) {
        if (entry_frame(*entry) >= set->view.arena->frame_limit) {
            quire_fail(QUIRE_E_CORRUPT, "set '%s': page %u is in frame %u, which does not exist", set->name, index,
                       entry_frame(*entry));
            return NULL;
        }
        if (quire_retired_room(set->view.arena, 1) != QUIRE_OK ||
            frame_drop(set->view.arena, *entry, false) != QUIRE_OK) {
            return NULL;
        }
        *entry = 0;
    }
    return entry;
}

static int table_resize(quire_set *set, quire_table *table, const quire_table *wanted) {
    quire_arena *arena = set->view.arena;
    for (uint32_t index = wanted->page_limit; index < table->page_limit; index++) {
        QUIRE_TRY(quire_arena_reserve(arena, 1));
        if (place_vacate(set, table, index) == NULL) {
            return QUIRE_E_CORRUPT;
        }
    }
    if (wanted->page_limit > 0) {
        QUIRE_TRY(quire_arena_reserve(arena, 1));
        QUIRE_TRY(table_deepen(set, table, wanted->page_limit - 1));
    }
    table->page_limit = wanted->page_limit;
    table->page_count = wanted->page_count;
    table->free_head = wanted->free_head;
    return QUIRE_OK;
}

int quire_set_resize(quire_set *set, const quire_table wanted[2]) {
    for (unsigned which = 0; which < 2; which++) {
        const quire_table *table = &wanted[which];
        if (table->page_limit > QUIRE_PAGE_COUNT_MAX || table->page_count > table->page_limit ||
            table->free_head > table->page_limit) {
            return quire_fail(QUIRE_E_CORRUPT,
                              "set '%s': a table of %u pages of %u, the first free one %u, is impossible", set->name,
                              table->page_count, table->page_limit, table->free_head);
        }
        QUIRE_TRY(table_resize(set, &set->view.table[which], table));
    }
    set->dirty = true;
    set->generation++;
    set->view.arena->changed = true;
    return QUIRE_OK;
}

int quire_page_install(quire_set *set, quire_page_id id, const void *bytes, uint32_t next_free) {
    quire_arena *arena = set->view.arena;
    quire_table *table = &set->view.table[id >> 31];
    uint32_t index = id & 0x7FFFFFFFu;
    if (index >= table->page_limit || next_free > table->page_limit) {
        return quire_fail(QUIRE_E_CORRUPT, "set '%s' has %u pages, and none of number %u", set->name, table->page_limit,
                          index >= table->page_limit ? index : next_free - 1);
    }
    QUIRE_TRY(quire_arena_reserve(arena, 1));
    uint64_t *entry = entry_place(set, table, index);
    if (entry == NULL) {
        return QUIRE_E_CORRUPT;
    }
    if (bytes != NULL && entry_frame(*entry) != 0 && quire_entry_is_own(*entry, arena->epoch_writing)) {
        memcpy(frame_bytes(arena, entry_frame(*entry)), bytes, arena->page_bytes);
        return QUIRE_OK;
    }
    if (place_vacate(set, table, index) == NULL) {
        return QUIRE_E_CORRUPT;
    }
    if (bytes == NULL) {
        *entry = (uint64_t)next_free << 32;
        return QUIRE_OK;
    }
    uint8_t *page = frame_new(arena, entry);
    if (page == NULL) {
        return QUIRE_E_NOMEM;
    }
    memcpy(page, bytes, arena->page_bytes);
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ walking tables */

/* Calls visit for the entry and, where it returns 1, for all below it. level 0 is a page. Checks what it follows. */
typedef int (*entry_visit)(void *context, uint64_t entry, unsigned level);
static int table_walk(const quire_view *view, uint64_t entry, unsigned level, uint32_t epoch_max, entry_visit visit,
                      void *context) {
    uint32_t frame = entry_frame(entry);
    if (frame >= view->frame_limit || entry_epoch(entry) == 0 || entry_epoch(entry) > epoch_max) {
        return quire_fail(QUIRE_E_CORRUPT, "a page table entry (frame %u of %u, epoch %u of %u) is impossible", frame,
                          view->frame_limit, entry_epoch(entry), epoch_max);
    }
    int down = visit(context, entry, level);
    if (down != 1 || level == 0) {
        return down < 0 ? down : QUIRE_OK;
    }
    const uint64_t *node = (const uint64_t *)quire_frame(view, frame);
    if (node == NULL) {
        return quire_fail(QUIRE_E_CORRUPT, "frame %u of the page table cannot be read", frame);
    }
    for (uint32_t i = 0; i < 1u << (view->page_shift - 3); i++) {
        if (entry_frame(node[i]) != 0) {
            QUIRE_TRY(table_walk(view, node[i], level - 1, entry_epoch(entry), visit, context));
        }
    }
    return QUIRE_OK;
}

/* Whether a table's numbers can be followed at all: quire_page_entry shifts by them. */
static bool table_sane(const quire_view *view, const quire_table *table) {
    return (table->depth == 0 || (table->depth - 1) * (view->page_shift - 3u) < 32) && table->depth <= 8 &&
           table->page_count <= table->page_limit && table->page_limit <= QUIRE_PAGE_COUNT_MAX;
}

static int table_walk_root(const quire_view *view, const quire_table *table, uint32_t epoch_max, entry_visit visit,
                           void *context) {
    if (!table_sane(view, table)) {
        return quire_fail(QUIRE_E_CORRUPT, "a page table %u levels deep with %u of %u pages is impossible",
                          table->depth, table->page_count, table->page_limit);
    }
    return entry_frame(table->root) == 0 ? QUIRE_OK
                                         : table_walk(view, table->root, table->depth, epoch_max, visit, context);
}

typedef struct {
    const quire_view *view;
    uint32_t since;
    int (*visit)(void *context, quire_page_id id, bool in_use);
    void *context;
    quire_page_id table_bit;
    uint32_t page_limit;
} changed_walk;

/* A node above pages: most of its entries are as old as ever, and are passed over here without more ado. */
static int changed_pages(const changed_walk *walk, const uint64_t *node, uint32_t first) {
    uint32_t left = walk->page_limit - first, count = 1u << (walk->view->page_shift - 3u);
    count = left < count ? left : count;
    for (uint32_t i = 0; i < count; i++) {
        bool in_use = entry_frame(node[i]) != 0;
        if (QUIRE_UNLIKELY(entry_epoch(node[i]) > walk->since || !in_use)) {
            QUIRE_TRY(walk->visit(walk->context, (first + i) | walk->table_bit, in_use));
        }
    }
    return QUIRE_OK;
}

static int changed_below(const changed_walk *walk, uint64_t entry, unsigned level, uint32_t first) {
    if (entry_epoch(entry) <= walk->since) {
        return QUIRE_OK;
    }
    if (level == 0) {
        return walk->visit(walk->context, first | walk->table_bit, true);
    }
    uint32_t frame = entry_frame(entry);
    unsigned bits = walk->view->page_shift - 3u;
    const uint64_t *node = frame < walk->view->frame_limit ? (const uint64_t *)quire_frame(walk->view, frame) : NULL;
    if (node == NULL) {
        return quire_fail(QUIRE_E_CORRUPT, "frame %u of the page table does not exist", frame);
    }
    if (level == 1) {
        return changed_pages(walk, node, first);
    }
    for (uint32_t i = 0; i < 1u << bits; i++) {
        uint64_t index = first + ((uint64_t)i << ((level - 1) * bits));
        if (index >= walk->page_limit) {
            break;
        }
        if (entry_frame(node[i]) != 0) {
            QUIRE_TRY(changed_below(walk, node[i], level - 1, (uint32_t)index));
        }
    }
    return QUIRE_OK;
}

uint32_t quire_page_next_free(const quire_view *view, quire_page_id id) {
    const quire_table *table = &view->table[id >> 31];
    uint64_t entry = table->root;
    for (unsigned shift = table->depth * (view->page_shift - 3u); shift != 0;) {
        const uint64_t *node = entry_frame(entry) != 0 && entry_frame(entry) < view->frame_limit
                                   ? (const uint64_t *)quire_frame(view, entry_frame(entry))
                                   : NULL;
        if (node == NULL) {
            return 0;
        }
        shift -= view->page_shift - 3u;
        entry = node[((id & 0x7FFFFFFFu) >> shift) & ((1u << (view->page_shift - 3u)) - 1)];
    }
    return entry_frame(entry) == 0 ? entry_epoch(entry) : 0;
}

int quire_view_changed(const quire_view *view, uint32_t since,
                       int (*visit)(void *context, quire_page_id id, bool in_use), void *context) {
    for (unsigned which = 0; which < 2; which++) {
        const quire_table *table = &view->table[which];
        changed_walk walk = {view, since, visit, context, which << 31, table->page_limit};
        if (entry_frame(table->root) != 0) {
            QUIRE_TRY(changed_below(&walk, table->root, table->depth, 0));
        } else if (table->depth == 0 && table->page_limit != 0) {
            QUIRE_TRY(visit(context, walk.table_bit, false)); /* the root is the only page itself, and free */
        }
    }
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ catalog */

static uint32_t catalog_per_page(const quire_view *catalog) {
    return quire_view_page_bytes(catalog) / (uint32_t)sizeof(quire_catalog_entry);
}

int quire_catalog_each(const quire_view *catalog, int (*visit)(void *context, const quire_catalog_entry *entry),
                       void *context) {
    uint32_t per_page = catalog_per_page(catalog);
    if (!table_sane(catalog, &catalog->table[0])) {
        return quire_fail(QUIRE_E_CORRUPT, "the catalog of sets is damaged");
    }
    for (uint32_t id = 0; id < catalog->table[0].page_limit; id++) {
        const quire_catalog_entry *entries = quire_page_read(catalog, id);
        if (entries == NULL) {
            return quire_fail(QUIRE_E_CORRUPT, "page %u of the catalog of sets is missing", id);
        }
        for (uint32_t i = 0; i < per_page; i++) {
            const quire_catalog_entry *entry = &entries[i];
            if (entry->set_id == 0) {
                continue;
            }
            if (entry->set_id != id * per_page + i + 1 || entry->name_bytes == 0 ||
                entry->name_bytes > QUIRE_NAME_BYTES_MAX || entry->name[entry->name_bytes] != 0 ||
                memchr(entry->name, 0, entry->name_bytes) != NULL || !table_sane(catalog, &entry->table[0]) ||
                !table_sane(catalog, &entry->table[1])) {
                return quire_fail(QUIRE_E_CORRUPT, "entry %u on page %u of the catalog of sets makes no sense", i, id);
            }
            int rc = visit(context, entry);
            if (rc != QUIRE_OK) {
                return rc;
            }
        }
    }
    return QUIRE_OK;
}

typedef struct {
    const char *name;
    quire_catalog_entry *entry;
} catalog_search;

static int catalog_match(void *context, const quire_catalog_entry *entry) {
    catalog_search *search = context;
    if (strcmp(entry->name, search->name) != 0) {
        return QUIRE_OK;
    }
    *search->entry = *entry;
    return 1;
}

int quire_catalog_find(const quire_view *catalog, const char *name, quire_catalog_entry *entry) {
    catalog_search search = {name, entry};
    int rc = quire_catalog_each(catalog, catalog_match, &search);
    return rc == 1 ? QUIRE_OK : rc == QUIRE_OK ? QUIRE_E_NOTFOUND : rc;
}

static quire_catalog_entry *catalog_entry_write(quire_arena *arena, uint32_t set_id) {
    uint32_t per_page = catalog_per_page(&arena->catalog.view);
    uint32_t page = (set_id - 1) / per_page;
    quire_catalog_entry *entries = quire_page_write(&arena->catalog, page);
    return entries == NULL ? NULL : &entries[(set_id - 1) % per_page];
}

int quire_catalog_flush(quire_arena *arena) {
    bool dirty = false;
    for (const quire_set *set = arena->sets; set != NULL && !dirty; set = set->next) {
        dirty = set->dirty && !set->gone;
    }
    if (!dirty) {
        return QUIRE_OK;
    }
    QUIRE_TRY(quire_frames_reserve(arena, quire_catalog_frames(arena)));
    for (quire_set *set = arena->sets; set != NULL; set = set->next) {
        if (!set->dirty || set->gone) {
            continue;
        }
        quire_catalog_entry *entry = catalog_entry_write(arena, set->set_id);
        if (entry == NULL) {
            return quire_fail(QUIRE_E_CORRUPT, "set '%s' has no place in the catalog", set->name);
        }
        memcpy(entry->table, set->view.table, sizeof entry->table);
        set->dirty = false;
    }
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ sets */

/* Bytes of the UTF-8 character at text, 0 if there is none. */
static size_t utf8_bytes(const uint8_t *text) {
    size_t count = text[0] < 0x80                      ? 1
                   : text[0] >= 0xC2 && text[0] < 0xE0 ? 2
                   : text[0] < 0xE0                    ? 0
                   : text[0] < 0xF0                    ? 3
                   : text[0] < 0xF5                    ? 4
                                                       : 0;
    for (size_t i = 1; i < count; i++) {
        if ((text[i] & 0xC0) != 0x80) {
            return 0;
        }
    }
    bool overlong = (text[0] == 0xE0 && text[1] < 0xA0) || (text[0] == 0xF0 && text[1] < 0x90);
    bool beyond = (text[0] == 0xED && text[1] >= 0xA0) || (text[0] == 0xF4 && text[1] >= 0x90);
    return overlong || beyond ? 0 : count;
}

static bool is_utf8(const char *text) {
    for (const uint8_t *at = (const uint8_t *)text; *at != 0;) {
        size_t count = utf8_bytes(at);
        if (count == 0) {
            return false;
        }
        at += count;
    }
    return true;
}

int quire_name_valid(const char *name, const char *what) {
    size_t bytes = name == NULL ? 0 : strnlen(name, QUIRE_NAME_BYTES_MAX + 1);
    if (bytes == 0 || bytes > QUIRE_NAME_BYTES_MAX) {
        return quire_fail(QUIRE_E_INVALID, "the name of a %s has 1 to %u bytes, '%.40s%s' does not", what,
                          QUIRE_NAME_BYTES_MAX, name == NULL ? "" : name, bytes > 40 ? "..." : "");
    }
    return is_utf8(name) ? QUIRE_OK : quire_fail(QUIRE_E_INVALID, "the name of a %s is UTF-8", what);
}

static quire_set *set_find(const quire_arena *arena, const char *name) {
    for (quire_set *set = arena->sets; set != NULL; set = set->next) {
        if (!set->gone && strcmp(set->name, name) == 0) {
            return set;
        }
    }
    return NULL;
}

int quire_set_exists(quire_arena *arena, const char *name) {
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, set_find(arena, name) != NULL);
}

int quire_set_usable(const quire_set *set) {
    return QUIRE_LIKELY(!set->gone)
               ? QUIRE_OK
               : quire_fail(QUIRE_E_CLOSED,
                            "set '%s' is gone: it was destroyed, or made in a transaction that was aborted", set->name);
}

static quire_set *set_object(quire_arena *arena, const char *name, uint32_t set_id, uint32_t kind) {
    quire_set *set = calloc(1, sizeof *set);
    if (set == NULL) {
        return NULL;
    }
    set->view = quire_arena_view(arena);
    set->epoch_writing = &arena->epoch_writing;
    set->set_id = set_id;
    set->kind = kind;
    memcpy(set->name, name, strnlen(name, QUIRE_NAME_BYTES_MAX));
    set->next = NULL;
    quire_set **at = &arena->sets;
    while (*at != NULL) {
        at = &(*at)->next;
    }
    *at = set;
    return set;
}

/* A free place in the catalog, by a new page if need be. */
static int catalog_place(quire_arena *arena, uint32_t *set_id) {
    const quire_view *catalog = &arena->catalog.view;
    uint32_t per_page = catalog_per_page(catalog);
    for (uint32_t id = 0; id < catalog->table[0].page_limit; id++) {
        const quire_catalog_entry *entries = quire_page_read(catalog, id);
        for (uint32_t i = 0; entries != NULL && i < per_page; i++) {
            if (entries[i].set_id == 0) {
                *set_id = id * per_page + i + 1;
                return QUIRE_OK;
            }
        }
    }
    quire_page_id id;
    void *page;
    QUIRE_TRY(quire_page_alloc(&arena->catalog, 0, &id, &page));
    *set_id = id * per_page + 1;
    return QUIRE_OK;
}

static int set_create(quire_arena *arena, const char *name, uint32_t kind, quire_set **set) {
    QUIRE_TRY(writable(arena));
    QUIRE_TRY(quire_name_valid(name, "set"));
    if (set_find(arena, name) != NULL) {
        return quire_fail(QUIRE_E_EXISTS, "there is a set '%s' already", name);
    }
    if (arena->set_count >= SETS_MAX) {
        return quire_fail(QUIRE_E_FULL, "an arena holds at most %u sets", SETS_MAX);
    }
    QUIRE_TRY(quire_arena_reserve(arena, 4));
    uint32_t set_id;
    QUIRE_TRY(catalog_place(arena, &set_id));
    quire_set *made = set_object(arena, name, set_id, kind);
    if (made == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for a set");
    }
    quire_catalog_entry *entry = catalog_entry_write(arena, set_id);
    *entry = (quire_catalog_entry){.set_id = set_id, .kind = kind, .name_bytes = (uint32_t)strlen(made->name)};
    memcpy(entry->name, made->name, sizeof entry->name);
    made->epoch_created = arena->epoch_writing;
    made->dirty = true;
    arena->set_count++;
    *set = made;
    return QUIRE_OK;
}

int quire_set_create(quire_arena *arena, const char *name, uint32_t kind, quire_set **set) {
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, set_create(arena, name, kind, set));
}

static int kind_check(const char *name, uint32_t kind, uint32_t wanted) {
    return wanted != 0 && kind != wanted
               ? quire_fail(QUIRE_E_MISMATCH, "set '%s' is of kind %u, not %u: open it as what it was made", name, kind,
                            wanted)
               : QUIRE_OK;
}

static int set_open(quire_arena *arena, const char *name, uint32_t kind, quire_set **set) {
    QUIRE_TRY(writable(arena));
    quire_set *found = set_find(arena, name);
    if (found == NULL) {
        return quire_fail(QUIRE_E_NOTFOUND, "there is no set '%s'", name);
    }
    QUIRE_TRY(kind_check(name, found->kind, kind));
    *set = found;
    return QUIRE_OK;
}

int quire_set_open(quire_arena *arena, const char *name, uint32_t kind, quire_set **set) {
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, set_open(arena, name, kind, set));
}

static int drop_visit(void *context, uint64_t entry, unsigned level) {
    quire_arena *arena = context;
    (void)level;
    /* A shared frame stays, and so does all below it: only this set's reference goes. */
    bool shared = arena->extra_refs != NULL && arena->extra_refs[entry_frame(entry)] > 0;
    int rc = quire_retired_room(arena, 1);
    if (rc == QUIRE_OK) {
        rc = frame_drop(arena, entry, false);
    }
    return rc != QUIRE_OK ? rc : !shared;
}

static int set_destroy(quire_arena *arena, const char *name) {
    QUIRE_TRY(writable(arena));
    quire_set *set = set_find(arena, name);
    if (set == NULL) {
        return quire_fail(QUIRE_E_NOTFOUND, "there is no set '%s'", name);
    }
    uint64_t frame_count = 0;
    for (unsigned which = 0; which < 2; which++) {
        /* pages, nodes at most as many */
        frame_count += 2 * (uint64_t)set->view.table[which].page_limit + set->view.table[which].depth + 1;
    }
    QUIRE_TRY(quire_retired_room(arena, frame_count));
    QUIRE_TRY(quire_arena_reserve(arena, 2));
    quire_catalog_entry *entry = catalog_entry_write(arena, set->set_id);
    if (entry == NULL) {
        return quire_fail(QUIRE_E_CORRUPT, "set '%s' has no place in the catalog", name);
    }
    for (unsigned which = 0; which < 2; which++) {
        /* A node is read after it was retired; that is sound, since no frame is reused before the walk ends. */
        QUIRE_TRY(table_walk_root(&set->view, &set->view.table[which], arena->epoch_writing, drop_visit, arena));
    }
    memset(entry, 0, sizeof *entry);
    memset(set->view.table, 0, sizeof set->view.table);
    set->gone = true;
    set->epoch_destroyed = arena->epoch_writing;
    set->generation++;
    arena->set_count--;
    arena->changed = true;
    return QUIRE_OK;
}

int quire_set_destroy(quire_arena *arena, const char *name) {
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, set_destroy(arena, name));
}

/* Every frame made so far is copied before its next change. */
int quire_arena_seal(quire_arena *arena) {
    if (!arena->changed) {
        return QUIRE_OK;
    }
    QUIRE_TRY(quire_catalog_flush(arena));
    if (arena->epoch_writing >= QUIRE_EPOCH_MAX) {
        return quire_fail(QUIRE_E_FULL,
                          "epoch %u is the last an arena can have: write it out and load it into a new one",
                          arena->epoch_writing);
    }
    arena->epoch_sealed = arena->epoch_writing;
    arena->epoch_writing++;
    arena->changed = false;
    return QUIRE_OK;
}

static int set_clone(quire_arena *arena, const char *source, const char *name) {
    QUIRE_TRY(writable(arena));
    quire_set *from = set_find(arena, source), *to;
    if (from == NULL) {
        return quire_fail(QUIRE_E_NOTFOUND, "there is no set '%s'", source);
    }
    if (arena->extra_refs == NULL) {
        arena->extra_refs = calloc(arena->bits_capacity, sizeof *arena->extra_refs);
        if (arena->extra_refs == NULL) {
            return quire_fail(QUIRE_E_NOMEM, "no memory to share the frames of '%s'", source);
        }
    }
    QUIRE_TRY(quire_arena_seal(arena));
    QUIRE_TRY(set_create(arena, name, from->kind, &to));
    memcpy(to->view.table, from->view.table, sizeof to->view.table);
    to->dirty = true;
    arena->changed = true;
    for (unsigned which = 0; which < 2; which++) {
        uint32_t frame = entry_frame(to->view.table[which].root);
        if (frame != 0) {
            arena->extra_refs[frame]++;
        }
    }
    return QUIRE_OK;
}

int quire_set_clone(quire_arena *arena, const char *source, const char *name) {
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, set_clone(arena, source, name));
}

int quire_set_list(quire_arena *arena, quire_set_info *infos, size_t max, size_t *count) {
    QUIRE_TRY(quire_arena_enter(arena));
    *count = 0;
    for (const quire_set *set = arena->sets; set != NULL; set = set->next) {
        if (!set->gone && (*count)++ < max) {
            infos[*count - 1].kind = set->kind;
            memcpy(infos[*count - 1].name, set->name, sizeof set->name);
        }
    }
    return quire_arena_left(arena, QUIRE_OK);
}

void quire_sets_free(quire_arena *arena) {
    while (arena->sets != NULL) {
        quire_set *set = arena->sets;
        arena->sets = set->next;
        if (set->cache != NULL) {
            set->cache_free(set->cache);
        }
        free(set);
    }
}

/* ------------------------------------------------------------------------------------------------ whole calls on pages */

static int raw_alloc(quire_set *set, quire_page_id *id) {
    void *page;
    QUIRE_TRY(quire_set_usable(set));
    QUIRE_TRY(quire_arena_reserve(set->view.arena, 1));
    return quire_page_alloc(set, 0, id, &page);
}

int quire_raw_alloc(quire_set *set, quire_page_id *id) {
    quire_arena *arena = set->view.arena;
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, raw_alloc(set, id));
}

static int raw_free(quire_set *set, quire_page_id id) {
    QUIRE_TRY(quire_set_usable(set));
    QUIRE_TRY(quire_arena_reserve(set->view.arena, 1));
    return quire_page_free(set, id);
}

int quire_raw_free(quire_set *set, quire_page_id id) {
    quire_arena *arena = set->view.arena;
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, raw_free(set, id));
}

static int no_page(const quire_set *set, quire_page_id id) {
    return quire_fail(QUIRE_E_NOTFOUND, "set '%s' has no page %u", set->name, id);
}

static int raw_read(quire_set *set, quire_page_id id, void *bytes) {
    QUIRE_TRY(quire_set_usable(set));
    const void *page = quire_page_read(&set->view, id);
    if (page == NULL) {
        return no_page(set, id);
    }
    memcpy(bytes, page, quire_view_page_bytes(&set->view));
    return QUIRE_OK;
}

int quire_raw_read(quire_set *set, quire_page_id id, void *bytes) {
    quire_arena *arena = set->view.arena;
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, raw_read(set, id, bytes));
}

static int raw_write(quire_set *set, quire_page_id id, size_t offset, const void *bytes, size_t count) {
    uint32_t page_bytes = quire_view_page_bytes(&set->view);
    QUIRE_TRY(quire_set_usable(set));
    if (count > page_bytes || offset > page_bytes - count) {
        return quire_fail(QUIRE_E_INVALID, "%zu bytes at offset %zu do not fit a page of %u bytes", count, offset,
                          page_bytes);
    }
    QUIRE_TRY(quire_arena_reserve(set->view.arena, 1));
    uint8_t *page = quire_page_write(set, id);
    if (page == NULL) {
        return no_page(set, id);
    }
    memcpy(page + offset, bytes, count);
    return QUIRE_OK;
}

int quire_raw_write(quire_set *set, quire_page_id id, size_t offset, const void *bytes, size_t count) {
    quire_arena *arena = set->view.arena;
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, raw_write(set, id, offset, bytes, count));
}

typedef struct {
    quire_page_state *pages;
    size_t max, count;
} page_list;

static int page_list_add(void *context, quire_page_id id, bool in_use) {
    page_list *list = context;
    if (list->count++ < list->max) {
        list->pages[list->count - 1] = (quire_page_state){id, in_use};
    }
    return QUIRE_OK;
}

int quire_set_changed(quire_set *set, uint32_t since, quire_page_state *pages, size_t max, size_t *count) {
    quire_arena *arena = set->view.arena;
    page_list list = {pages, max, 0};
    QUIRE_TRY(quire_arena_enter(arena));
    int rc = quire_set_usable(set);
    if (rc == QUIRE_OK) {
        rc = quire_view_changed(&set->view, since, page_list_add, &list);
    }
    *count = list.count;
    return quire_arena_left(arena, rc);
}

/* ------------------------------------------------------------------------------------------------ commit, abort */

/* Makes meta the committed state, by one aligned store (I4). */
static int publish(quire_arena *arena, quire_meta *meta) {
    quire_header *header = arena->header;
    if (__atomic_load_n(&header->synced, __ATOMIC_RELAXED) != 0) {
        /* From here on frames of the synced state may be reused, in whatever order the system writes them. */
        __atomic_store_n(&header->synced, 0, __ATOMIC_RELEASE);
        if (arena->file >= 0 && msync(header, QUIRE_PINS_OFFSET, MS_SYNC) != 0) {
            return quire_fail(QUIRE_E_IO, "cannot sync the header of %s", arena->path);
        }
    }
    meta->crc = quire_meta_crc(meta);
    uint64_t slot = (__atomic_load_n(&header->current, __ATOMIC_RELAXED) & 1) ^ 1;
    uint64_t *to = (uint64_t *)&header->meta[slot];
    const uint64_t *from = (const uint64_t *)meta;
    for (size_t i = 0; i < sizeof *meta / sizeof *to; i++) {
        __atomic_store_n(&to[i], from[i], __ATOMIC_RELAXED);
    }
    __atomic_store_n(&header->current, (uint64_t)meta->epoch << 1 | slot, __ATOMIC_SEQ_CST); /* the commit */
    return QUIRE_OK;
}

static int commit(quire_arena *arena) {
    QUIRE_TRY(writable(arena));
    if (!arena->changed && arena->epoch_sealed == arena->epoch_committed) {
        return QUIRE_OK;
    }
    QUIRE_TRY(quire_arena_seal(arena));
    quire_meta meta = {.epoch = arena->epoch_sealed,
                       .frame_limit = arena->frame_limit,
                       .catalog = arena->catalog.view.table[0],
                       .set_count = arena->set_count};
    QUIRE_TRY(publish(arena, &meta));
    arena->epoch_committed = meta.epoch;
    arena->dirty_count = 0;
    quire_undo_committed(arena);
    quire_retired_sweep(arena);
    quire_arena_trim(arena);
    return QUIRE_OK;
}

int quire_arena_commit(quire_arena *arena) {
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, commit(arena));
}

static int roll_back(quire_arena *arena) {
    if (arena->read_only) {
        return writable(arena);
    }
    quire_meta meta;
    uint64_t current;
    QUIRE_TRY(quire_meta_read(arena, &meta, &current));
    quire_undo_roll_back(arena, meta.epoch);
    return quire_arena_recover(arena, &meta, false);
}

int quire_arena_abort(quire_arena *arena) {
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, roll_back(arena));
}

/* Room for one more restore; those before all snapshots tell nothing any more. */
static int restored_room(quire_arena *arena) {
    pthread_mutex_lock(&arena->pins_mutex);
    uint32_t oldest = UINT32_MAX;
    for (const quire_local_pin *pin = arena->pins; pin != NULL; pin = pin->next) {
        oldest = pin->epoch < oldest ? pin->epoch : oldest;
    }
    size_t gone = 0;
    while (gone < arena->restored_count && arena->restored[gone].to <= oldest) {
        gone++;
    }
    arena->restored_count -= gone;
    if (gone != 0) {
        memmove(arena->restored, arena->restored + gone, arena->restored_count * sizeof *arena->restored);
    }
    quire_restored *grown = realloc(arena->restored, (arena->restored_count + 1) * sizeof *grown);
    arena->restored = grown == NULL ? arena->restored : grown;
    pthread_mutex_unlock(&arena->pins_mutex);
    return grown == NULL ? quire_fail(QUIRE_E_NOMEM, "no memory to note a restore") : QUIRE_OK;
}

static void restored_add(quire_arena *arena, uint32_t from, uint32_t to) {
    pthread_mutex_lock(&arena->pins_mutex);
    arena->restored[arena->restored_count++] = (quire_restored){from, to};
    pthread_mutex_unlock(&arena->pins_mutex);
}

bool quire_epoch_follows(quire_arena *arena, uint32_t newer, uint32_t older) {
    pthread_mutex_lock(&arena->pins_mutex);
    uint32_t at = newer;
    for (size_t i = arena->restored_count; i-- > 0 && at >= older;) {
        const quire_restored *restored = &arena->restored[i];
        if (restored->to <= at && restored->to > older) {
            at = restored->from;
        }
    }
    pthread_mutex_unlock(&arena->pins_mutex);
    return at >= older;
}

/* An object that is gone, or was made later than the snapshot, stands for no set that the snapshot has, whatever its name. */
static void sets_disown(quire_arena *arena, uint32_t epoch) {
    for (quire_set *set = arena->sets; set != NULL; set = set->next) {
        if (set->gone || set->epoch_created > epoch) {
            set->epoch_created = UINT32_MAX;
        }
    }
}

static int count_set(void *context, const char *name, uint32_t kind) {
    (void)name;
    (void)kind;
    ++*(uint32_t *)context;
    return QUIRE_OK;
}

/* The old state comes back under a new epoch, so that epochs only grow (I5) and its frames, all older, are copied before a change. */
static int restore(quire_arena *arena, quire_snap *snap) {
    QUIRE_TRY(writable(arena));
    if (snap->arena != arena) {
        return quire_fail(QUIRE_E_INVALID, "the snapshot is of another arena: only one of its own can be restored");
    }
    if (snap->sets != NULL) {
        return quire_fail(QUIRE_E_INVALID, "the snapshot is of some sets only: restore one of all sets");
    }
    if (arena->epoch_writing >= QUIRE_EPOCH_MAX) {
        return quire_fail(QUIRE_E_FULL,
                          "epoch %u is the last an arena can have: write it out and load it into a new one",
                          arena->epoch_writing);
    }
    if (snap->weak && quire_undo_pinned_after(arena, snap)) {
        return quire_fail(
            QUIRE_E_BUSY,
            "the state of a weak snapshot cannot be had again: newer ones are pinned, or it was lost to one");
    }
    QUIRE_TRY(restored_room(arena));
    quire_meta meta = {
        .epoch = arena->epoch_writing, .frame_limit = arena->frame_limit, .catalog = snap->pin->catalog.table[0]};
    QUIRE_TRY(quire_snap_each(snap, count_set, &meta.set_count));
    QUIRE_TRY(publish(arena, &meta));
    quire_undo_roll_back(arena, snap->weak ? snap->pin->epoch : arena->epoch_committed);
    restored_add(arena, snap->pin->epoch, meta.epoch);
    sets_disown(arena, snap->pin->epoch);
    return quire_arena_recover(arena, &meta, false);
}

int quire_arena_restore(quire_arena *arena, quire_snap *snap) {
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, restore(arena, snap));
}

/* ------------------------------------------------------------------------------------------------ recovery */

typedef struct {
    quire_arena *arena;
    uint32_t pinned; /* 0: the committed state; else the pin whose frames these are */
    uint32_t epoch;  /* of the state */
} recovery;

static int recover_visit(void *context, uint64_t entry, unsigned level) {
    recovery *state = context;
    quire_arena *arena = state->arena;
    uint32_t frame = entry_frame(entry);
    (void)level;
    if (frame < arena->header_frames || arena->chunk_absent[frame >> arena->chunk_shift]) {
        return quire_fail(QUIRE_E_CORRUPT, "a page table names frame %u, which is not for pages", frame);
    }
    if (quire_frame_take(arena, frame)) {
        if (state->pinned != 0) {
            int rc = quire_held_add(arena, state->pinned, (quire_retired){frame, entry_birth(entry), 0});
            return rc != QUIRE_OK ? rc : 1;
        }
        return 1;
    }
    if (state->pinned == 0) { /* a clone shares it */
        if (arena->extra_refs == NULL) {
            arena->extra_refs = calloc(arena->bits_capacity, sizeof *arena->extra_refs);
            if (arena->extra_refs == NULL) {
                return quire_fail(QUIRE_E_NOMEM, "no memory to count shared frames");
            }
        }
        if (arena->extra_refs[frame] == UINT16_MAX) {
            return quire_fail(QUIRE_E_CORRUPT, "frame %u is named by more page tables than there can be", frame);
        }
        arena->extra_refs[frame]++;
    }
    return 0;
}

static int recover_set(void *context, const quire_catalog_entry *entry) {
    recovery *state = context;
    quire_view view = quire_arena_view(state->arena);
    for (unsigned which = 0; which < 2; which++) {
        QUIRE_TRY(table_walk_root(&view, &entry->table[which], state->epoch, recover_visit, state));
    }
    return QUIRE_OK;
}

static int recover_state(recovery *state, const quire_table *catalog, uint32_t epoch) {
    quire_view view = quire_arena_view(state->arena);
    view.table[0] = *catalog;
    state->epoch = epoch;
    QUIRE_TRY(table_walk_root(&view, catalog, epoch, recover_visit, state));
    return quire_catalog_each(&view, recover_set, state);
}

static int adopt_set(void *context, const quire_catalog_entry *entry) {
    quire_arena *arena = context;
    quire_set *set = arena->sets;
    while (set != NULL && (set->set_id != entry->set_id || set->kind != entry->kind ||
                           strcmp(set->name, entry->name) != 0 || set->epoch_created > arena->epoch_committed ||
                           (set->epoch_destroyed != 0 && set->epoch_destroyed <= arena->epoch_committed))) {
        set = set->next;
    }
    if (set == NULL) {
        set = set_object(arena, entry->name, entry->set_id, entry->kind);
        if (set == NULL) {
            return quire_fail(QUIRE_E_NOMEM, "no memory for a set");
        }
        set->epoch_created = arena->epoch_committed;
    }
    set->view.frame_limit = arena->frame_limit;
    memcpy(set->view.table, entry->table, sizeof set->view.table);
    for (unsigned which = 0; which < 2; which++) {
        if (set->view.table[which].depth > arena->depth_max) {
            arena->depth_max = set->view.table[which].depth;
        }
    }
    set->gone = false;
    set->dirty = false;
    set->epoch_destroyed = 0;
    arena->set_count++;
    return QUIRE_OK;
}

static int table_check(void *context, const quire_catalog_entry *entry) {
    const quire_view *view = context;
    return table_sane(view, &entry->table[0]) && table_sane(view, &entry->table[1])
               ? QUIRE_OK
               : quire_fail(QUIRE_E_CORRUPT, "set '%s': its page tables are impossible", entry->name);
}

/* The frames that the committed state needs. An image has no others, so that its tables need not be walked for it. */
static int recover_committed(quire_arena *arena, const quire_meta *meta, bool is_image) {
    if (!is_image) {
        quire_frames_reset(arena);
        recovery state = {.arena = arena};
        return recover_state(&state, &meta->catalog, meta->epoch);
    }
    quire_view view = quire_arena_view(arena);
    view.table[0] = meta->catalog;
    return table_sane(&view, &meta->catalog) ? quire_catalog_each(&view, table_check, &view)
                                             : quire_fail(QUIRE_E_CORRUPT, "the catalog's page table is impossible");
}

/* Takes the state that meta describes as the one to write on: finds out by walking the tables which frames it and the pinned states
 * need; all others are free. Nothing about free frames is ever stored, so nothing about them can be lost. */
static int recover(quire_arena *arena, const quire_meta *meta, bool is_image) {
    arena->retired.count = 0;
    arena->retired_swept = 0;
    quire_held_clear(arena);
    free(arena->extra_refs);
    arena->extra_refs = NULL;
    arena->dirty_count = 0;
    arena->changed = false;
    arena->epoch_committed = meta->epoch;
    arena->epoch_sealed = meta->epoch;

    QUIRE_TRY(recover_committed(arena, meta, is_image));

    recovery state = {.arena = arena};
    uint32_t epochs[QUIRE_PIN_COUNT], epoch_max = meta->epoch;
    size_t pin_count = quire_pins_collect(arena, epochs, QUIRE_PIN_COUNT);
    for (size_t i = pin_count; i-- > 0;) { /* the newest first: a frame belongs to the newest pin that sees it */
        quire_table catalog;
        if (epochs[i] > epoch_max) {
            epoch_max = epochs[i];
        }
        if (!quire_pin_catalog(arena, epochs[i], &catalog)) {
            continue; /* released meanwhile, or not whole yet: then it is the committed state's, or will be given up */
        }
        state.pinned = epochs[i];
        QUIRE_TRY(recover_state(&state, &catalog, epochs[i]));
    }
    if (epoch_max < arena->epoch_writing) {
        epoch_max = arena->epoch_writing;
    }
    arena->epoch_writing = epoch_max + 1;

    arena->catalog.view = quire_arena_view(arena);
    arena->catalog.view.table[0] = meta->catalog;
    arena->catalog.epoch_writing = &arena->epoch_writing;
    memcpy(arena->catalog.name, "quire:catalog", 14);
    arena->depth_max = meta->catalog.depth > 1 ? meta->catalog.depth : 1;
    arena->set_count = 0;
    for (quire_set *set = arena->sets; set != NULL; set = set->next) {
        set->gone = true;
        set->generation++;
        if (set->epoch_created > meta->epoch) {
            set->epoch_created = UINT32_MAX; /* its epoch never was: no later commit brings it back */
        }
    }
    return quire_catalog_each(&arena->catalog.view, adopt_set, arena);
}

int quire_arena_recover(quire_arena *arena, const quire_meta *meta, bool is_image) {
    int rc = recover(arena, meta, is_image);
    arena->failed = rc != QUIRE_OK;
    for (quire_set *set = arena->sets; arena->failed && set != NULL; set = set->next) {
        set->gone = true; /* what they point at may be anything */
    }
    return rc;
}

/* ------------------------------------------------------------------------------------------------ check, statistics */

typedef struct {
    quire_arena *arena;
    uint8_t *seen; /* bit per frame: reachable */
    uint64_t reachable;
    uint32_t shared;
    uint64_t pages; /* pages (level 0) of the table being walked */
} check_walk;

static int check_visit(void *context, uint64_t entry, unsigned level) {
    check_walk *walk = context;
    uint32_t frame = entry_frame(entry);
    bool writer = !walk->arena->read_only; /* a reader knows nothing of free and shared frames */
    if (frame < walk->arena->header_frames || (writer && quire_frame_is_free(walk->arena, frame))) {
        return quire_fail(QUIRE_E_CORRUPT, "I2: frame %u is in a page table and free", frame);
    }
    if (walk->seen[frame >> 3] >> (frame & 7) & 1) {
        walk->shared++;
        if (writer && (walk->arena->extra_refs == NULL || walk->arena->extra_refs[frame] == 0)) {
            return quire_fail(QUIRE_E_CORRUPT, "I7: frame %u is in two page tables but not counted as shared", frame);
        }
        return 0;
    }
    walk->seen[frame >> 3] |= (uint8_t)(1u << (frame & 7));
    walk->reachable++;
    walk->pages += level == 0;
    return 1;
}

static int check_table(check_walk *walk, const quire_view *view, const char *name, unsigned which) {
    const quire_table *table = &view->table[which];
    walk->pages = 0;
    uint32_t shared_before = walk->shared;
    QUIRE_TRY(table_walk_root(view, table, QUIRE_EPOCH_MAX, check_visit, walk));
    if (walk->shared == shared_before && walk->pages != table->page_count) {
        return quire_fail(QUIRE_E_CORRUPT, "I6: table %u of set '%s' has %" PRIu64 " pages, %u by its count", which,
                          name, walk->pages, table->page_count);
    }
    uint32_t free_ids = 0;
    for (uint32_t next = table->free_head; next != 0; free_ids++) {
        if (next > table->page_limit || free_ids > table->page_limit) {
            return quire_fail(QUIRE_E_CORRUPT, "I6: the free list of set '%s' leads to page %u", name, next - 1);
        }
        /* As quire_page_entry, but the entry of a free page. */
        unsigned bits = view->page_shift - 3u;
        uint64_t entry = table->root;
        for (unsigned shift = table->depth * bits; shift != 0;) {
            shift -= bits;
            const uint64_t *node =
                entry_frame(entry) == 0 ? NULL : (const uint64_t *)quire_frame(view, entry_frame(entry));
            if (node == NULL) {
                return quire_fail(QUIRE_E_CORRUPT, "I6: free page %u of set '%s' is in no table", next - 1, name);
            }
            entry = node[(next - 1) >> shift & ((1u << bits) - 1)];
        }
        if (entry_frame(entry) != 0) {
            return quire_fail(QUIRE_E_CORRUPT, "I6: page %u of set '%s' is free and in use", next - 1, name);
        }
        next = entry_epoch(entry);
    }
    if (free_ids + table->page_count != table->page_limit) {
        return quire_fail(QUIRE_E_CORRUPT, "I6: set '%s' has %u pages and %u free ids, together not %u", name,
                          table->page_count, free_ids, table->page_limit);
    }
    return QUIRE_OK;
}

static int check_retired(check_walk *walk, const quire_retired_list *list) {
    for (size_t i = 0; i < list->count; i++) {
        uint32_t frame = list->items[i].frame;
        if (quire_frame_is_free(walk->arena, frame) || walk->seen[frame >> 3] >> (frame & 7) & 1) {
            return quire_fail(QUIRE_E_CORRUPT, "I2: frame %u is retired, and free or in use as well", frame);
        }
        walk->seen[frame >> 3] |= (uint8_t)(1u << (frame & 7));
    }
    return QUIRE_OK;
}

static int check_all(check_walk *walk) {
    quire_arena *arena = walk->arena;
    QUIRE_TRY(check_table(walk, &arena->catalog.view, "quire:catalog", 0));
    uint64_t retired = arena->retired.count;
    for (const quire_set *set = arena->sets; set != NULL; set = set->next) {
        for (unsigned which = 0; which < 2 && !set->gone; which++) {
            QUIRE_TRY(check_table(walk, &set->view, set->name, which));
        }
    }
    QUIRE_TRY(check_retired(walk, &arena->retired));
    for (size_t i = 0; i < arena->held_count; i++) {
        QUIRE_TRY(check_retired(walk, &arena->held[i].list));
        retired += arena->held[i].list.count;
    }
    uint64_t absent = (uint64_t)arena->absent_count << arena->chunk_shift;
    uint64_t sum = arena->header_frames + arena->free_count + walk->reachable + retired + absent;
    if (sum != arena->frame_limit) {
        return quire_fail(QUIRE_E_CORRUPT,
                          "I2: %u header + %u free + %" PRIu64 " in use + %" PRIu64 " retired + %" PRIu64
                          " absent frames are not the %u there are",
                          arena->header_frames, arena->free_count, walk->reachable, retired, absent,
                          arena->frame_limit);
    }
    return QUIRE_OK;
}

typedef struct {
    check_walk *walk;
    const quire_view *catalog;
} check_committed;

static int check_committed_set(void *context, const quire_catalog_entry *entry) {
    const check_committed *state = context;
    quire_view view = *state->catalog;
    memcpy(view.table, entry->table, sizeof view.table);
    QUIRE_TRY(check_table(state->walk, &view, entry->name, 0));
    return check_table(state->walk, &view, entry->name, 1);
}

/* What a reader can check: the tables of the last commit. */
static int check_read_only(quire_arena *arena) {
    quire_snap *snap;
    QUIRE_TRY(quire_snap_acquire(arena, &snap));
    const quire_view *catalog = &snap->pin->catalog;
    check_walk walk = {.arena = arena, .seen = calloc(catalog->frame_limit / 8 + 1, 1)};
    check_committed state = {&walk, catalog};
    int rc = walk.seen == NULL ? quire_fail(QUIRE_E_NOMEM, "no memory to check the arena")
                               : check_table(&walk, catalog, "quire:catalog", 0);
    if (rc == QUIRE_OK) {
        rc = quire_catalog_each(catalog, check_committed_set, &state);
    }
    free(walk.seen);
    quire_snap_release(snap);
    return rc;
}

static int arena_check(quire_arena *arena) {
    if (arena->read_only) {
        return check_read_only(arena);
    }
    check_walk walk = {.arena = arena, .seen = calloc(arena->frame_limit / 8 + 1, 1)};
    if (walk.seen == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory to check the arena");
    }
    int rc = check_all(&walk);
    free(walk.seen);
    return rc;
}

int quire_arena_check(quire_arena *arena) {
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, arena_check(arena));
}

static void arena_stats(quire_arena *arena, quire_stats *stats) {
    *stats = (quire_stats){.page_bytes = arena->page_bytes,
                           .bytes_held = arena->bytes_held,
                           .bytes_limit = arena->limit_bytes,
                           .bytes_reserved = (uint64_t)arena->chunks_reserved * QUIRE_CHUNK_BYTES,
                           .sets = arena->set_count,
                           .epoch_committed = quire_arena_epoch(arena),
                           .epoch_writing = arena->epoch_writing};
    uint32_t epochs[QUIRE_PIN_COUNT];
    stats->snapshots = quire_pins_collect(arena, epochs, QUIRE_PIN_COUNT);
    stats->epoch_pinned_min = stats->snapshots > 0 ? epochs[0] : 0;
    if (arena->read_only) {
        return;
    }
    quire_retired_sweep(arena);
    stats->frames_retired = arena->retired.count;
    for (size_t i = 0; i < arena->held_count; i++) {
        stats->frames_retired += arena->held[i].list.count;
    }
    stats->frames_free = arena->free_count;
    stats->frames_dirty = arena->dirty_count + arena->undo.page_count;
    stats->frames_used = arena->frame_limit - arena->header_frames - arena->free_count - stats->frames_retired -
                         ((uint64_t)arena->absent_count << arena->chunk_shift);
}

int quire_arena_stats(quire_arena *arena, quire_stats *stats) {
    QUIRE_TRY(quire_arena_enter(arena));
    arena_stats(arena, stats);
    return quire_arena_left(arena, QUIRE_OK);
}
