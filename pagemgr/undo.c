/* undo.c -- changes in place: what lay there before is noted, so that the states before can be had again.
 *
 * Purpose     Copying a page for the first change of each epoch costs a page of memory and traffic per changed record where changes
 *             are spread thinly. An arena opened with in_place keeps a log of the bytes that a change of a few bytes overwrites
 *             instead, as long as nobody but the writer needs the page as it was: for going back (abort, restore), and for telling
 *             what changed (weak snapshots).
 *
 * Layout      The log is a list of blocks of notes, each note the bytes that lay at a place of a frame; the notes of a frame are chained from
 *             the newest (heads[frame]) to the oldest. Beside it, one item for each page and epoch in which it was changed in place.
 *             The page table entry of such a page is raised to the epoch, and marked BORROWED: its frame is older than the entry says,
 *             and other states' tables may name it, too.
 *
 * Invariants  U1 no frame with notes of the epochs since the last commit is named by a state that is pinned, but for weak pins. So notes
 *                may be undone in place whenever the state being written is given up.
 *             U2 a frame as it was at epoch e is its bytes with all notes newer than e undone, the newest first.
 *             U3 notes newer than the oldest weak pin are there. A weak pin that this was broken for is marked lost, and can be
 *                neither read nor restored.
 *             U4 the oldest note of a byte within an epoch has what lay there before; users see to it that there are not many.
 *             U5 tables of depth 0 have no borrowed pages: their root is in the catalog, not in a node.
 *
 * Ownership   The log belongs to the arena, and is charged to its limit; pages that a weak snapshot made up belong to the snapshot.
 * Threads     The writer alone; who reads a weak snapshot has entered the arena. Pins are counted under the pins' mutex.
 * Errors      Noting never fails an operation: without memory for a note the page is copied. Settling may fail with LIMIT, NOSPACE or
 *             NOMEM, and leaves everything as it was.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define BLOCK_BYTES_MIN (16u << 10)
#define BLOCK_BYTES_MAX (4u << 20)
/* Where so many places of each page change, copying the page once is quicker than noting them, and reading them back one by one. How it is with a
 * state does not change from one transaction to the next, so that it is tried again only after some. The pages of a set's two tables, records and hash table for one, are
 * not alike in this. */
#define DENSE_NOTES        12u
#define DENSE_NOTES_MIN    4096u
#define DENSE_TRANSACTIONS 8u

struct quire_note {
    quire_note
        *previous; /* of the same frame; to be followed only while previous_epoch is newer than what is looked for */
    uint32_t previous_epoch;
    uint16_t offset;
    uint16_t bytes;
    uint8_t old[];
};

struct quire_note_block {
    quire_note_block *next;
    size_t bytes; /* of the block in all */
    size_t used;
    uint32_t epoch_max; /* of its notes */
};

/* One page changed in place in one epoch. */
struct quire_amended {
    uint32_t set_id;
    quire_page_id page;
    uint32_t frame;
    uint32_t epoch;
};

static uint8_t *frame_bytes(quire_arena *arena, uint32_t frame) {
    quire_view view = quire_arena_view(arena);
    return quire_frame(&view, frame);
}

/* ------------------------------------------------------------------------------------------------ the log */

static void block_free(quire_arena *arena, quire_note_block *block) {
    quire_arena_discharge(arena, block->bytes);
    munmap(block, block->bytes);
}

static void blocks_free(quire_arena *arena, quire_note_block **blocks) {
    while (*blocks != NULL) {
        quire_note_block *block = *blocks;
        *blocks = block->next;
        block_free(arena, block);
    }
}

/* A block to write notes into; NULL if there is no memory for it. */
static quire_note_block *block_new(quire_arena *arena) {
    quire_undo *undo = &arena->undo;
    quire_note_block *block = undo->spare;
    if (block != NULL) {
        undo->spare = block->next;
    } else {
        size_t bytes = undo->last == NULL ? BLOCK_BYTES_MIN : undo->last->bytes * 2;
        bytes = bytes > BLOCK_BYTES_MAX ? BLOCK_BYTES_MAX : bytes;
        if (quire_arena_charge(arena, bytes) != QUIRE_OK) {
            return NULL;
        }
        block = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (block == MAP_FAILED) {
            quire_arena_discharge(arena, bytes);
            return NULL;
        }
        block->bytes = bytes;
    }
    block->next = NULL;
    block->used = sizeof *block;
    block->epoch_max = 0;
    *(undo->last == NULL ? &undo->first : &undo->last->next) = block;
    undo->last = block;
    return block;
}

static bool heads_room(quire_arena *arena) {
    quire_undo *undo = &arena->undo;
    if (undo->head_count >= arena->frame_limit) {
        return true;
    }
    quire_note **heads = realloc(undo->heads, arena->bits_capacity * sizeof *heads);
    undo->heads = heads == NULL ? undo->heads : heads;
    uint32_t *epochs = heads == NULL ? NULL : realloc(undo->head_epochs, arena->bits_capacity * sizeof *epochs);
    if (epochs == NULL) {
        return false;
    }
    undo->head_epochs = epochs;
    size_t more = arena->bits_capacity - undo->head_count;
    memset(heads + undo->head_count, 0, more * sizeof *heads);
    memset(epochs + undo->head_count, 0, more * sizeof *epochs);
    undo->head_count = arena->bits_capacity;
    return true;
}

static bool items_room(quire_undo *undo) {
    if (undo->item_count < undo->item_capacity) {
        return true;
    }
    size_t capacity = undo->item_capacity == 0 ? 64 : undo->item_capacity * 2;
    quire_amended *items = realloc(undo->items, capacity * sizeof *items);
    if (items == NULL) {
        return false;
    }
    undo->items = items;
    undo->item_capacity = capacity;
    return true;
}

static quire_note *head_of(const quire_undo *undo, uint32_t frame) {
    return frame < undo->head_count ? undo->heads[frame] : NULL;
}
/* The epoch of that note, 0: there is none. Told without a look at the note, which is seldom near. */
static uint32_t head_epoch(const quire_undo *undo, uint32_t frame) {
    return frame < undo->head_count ? undo->head_epochs[frame] : 0;
}
static void head_set(quire_undo *undo, uint32_t frame, quire_note *note, uint32_t epoch) {
    undo->heads[frame] = note;
    undo->head_epochs[frame] = epoch;
}

/* Whether these bytes were noted in this epoch. */
static bool is_noted(const quire_arena *arena, uint32_t frame, size_t offset, size_t count) {
    const quire_note *note = head_of(&arena->undo, frame);
    uint32_t epoch = head_epoch(&arena->undo, frame);
    while (epoch == arena->epoch_writing) {
        if (note->offset <= offset && offset + count <= (size_t)note->offset + note->bytes) {
            return true;
        }
        epoch = note->previous_epoch;
        note = note->previous;
    }
    return false;
}

/* False if there is no memory for it. */
static bool note_add(quire_arena *arena, uint32_t frame, const uint8_t *page, size_t offset, size_t count) {
    quire_undo *undo = &arena->undo;
    size_t bytes = (sizeof(quire_note) + count + 7) & ~(size_t)7;
    quire_note_block *block = undo->last;
    if (block == NULL || block->bytes - block->used < bytes) {
        block = block_new(arena);
        if (block == NULL || block->bytes - block->used < bytes) {
            return false;
        }
    }
    quire_note *note = (quire_note *)((uint8_t *)block + block->used);
    note->previous = undo->heads[frame];
    note->previous_epoch = undo->head_epochs[frame];
    note->offset = (uint16_t)offset;
    note->bytes = (uint16_t)count;
    memcpy(note->old, page + offset, count);
    block->used += bytes;
    block->epoch_max = arena->epoch_writing;
    head_set(undo, frame, note, arena->epoch_writing);
    undo->head_newest = arena->epoch_writing;
    return true;
}

/* Makes a page's bytes what they were at epoch; the notes stay. */
static void bytes_undo(const quire_undo *undo, uint32_t frame, uint32_t epoch, uint8_t *page) {
    const quire_note *note = head_of(undo, frame);
    uint32_t next = head_epoch(undo, frame);
    while (next > epoch) {
        memcpy(page + note->offset, note->old, note->bytes);
        next = note->previous_epoch;
        note = note->previous;
    }
}

/* The frame's notes newer than epoch are no longer of it. */
static void head_drop(quire_undo *undo, uint32_t frame, uint32_t epoch) {
    quire_note *note = head_of(undo, frame);
    uint32_t next = head_epoch(undo, frame);
    while (next > epoch) {
        next = note->previous_epoch;
        note = note->previous;
    }
    if (frame < undo->head_count) {
        head_set(undo, frame, next <= undo->floor ? NULL : note, next <= undo->floor ? 0 : next);
    }
}

/* ------------------------------------------------------------------------------------------------ weak pins */

/* The oldest epoch that a weak snapshot may be read at, or gone back to; UINT32_MAX if there is none. */
static uint32_t weak_oldest(quire_arena *arena) {
    uint32_t oldest = UINT32_MAX;
    pthread_mutex_lock(&arena->pins_mutex);
    for (const quire_local_pin *pin = arena->pins; pin != NULL; pin = pin->next) {
        if (pin->users > pin->firm_users && !pin->lost && pin->epoch < oldest) {
            oldest = pin->epoch;
        }
    }
    pthread_mutex_unlock(&arena->pins_mutex);
    return oldest;
}

/* What the pages of older commits were is not known any more. */
static void weak_lose(quire_arena *arena, uint32_t epoch) {
    pthread_mutex_lock(&arena->pins_mutex);
    for (quire_local_pin *pin = arena->pins; pin != NULL; pin = pin->next) {
        pin->lost = pin->lost || (pin->epoch < epoch && pin->users > pin->firm_users);
    }
    pthread_mutex_unlock(&arena->pins_mutex);
}

/* Forgets what no weak pin needs. Between two commits only. */
static void log_trim(quire_arena *arena) {
    quire_undo *undo = &arena->undo;
    uint32_t oldest = weak_oldest(arena);
    oldest = oldest < arena->epoch_committed ? oldest : arena->epoch_committed;
    undo->floor = oldest > undo->floor ? oldest : undo->floor;
    size_t gone = 0;
    for (; gone < undo->item_count && undo->items[gone].epoch <= oldest; gone++) {
        if (head_epoch(undo, undo->items[gone].frame) <= oldest) {
            head_set(undo, undo->items[gone].frame, NULL, 0);
        }
    }
    undo->item_count -= gone;
    if (gone != 0) {
        memmove(undo->items, undo->items + gone, undo->item_count * sizeof *undo->items);
    }
    while (undo->first != NULL && undo->first->epoch_max <= oldest) {
        quire_note_block *block = undo->first;
        undo->first = block->next;
        undo->last = undo->first == NULL ? NULL : undo->last;
        block->next = undo->spare;
        undo->spare = block;
    }
}

static void counts_reset(quire_undo *undo) {
    memset(undo->note_count, 0, sizeof undo->note_count);
    memset(undo->noted_pages, 0, sizeof undo->noted_pages);
    undo->page_count = 0;
}

void quire_undo_committed(quire_arena *arena) {
    quire_undo *undo = &arena->undo;
    for (unsigned table = 0; table < 2; table++) {
        undo->dense_left[table] -= undo->dense_left[table] > 0;
        if (undo->note_count[table] > DENSE_NOTES_MIN &&
            undo->note_count[table] > DENSE_NOTES * undo->noted_pages[table]) {
            undo->dense_left[table] = DENSE_TRANSACTIONS;
        }
    }
    counts_reset(undo);
    log_trim(arena);
    undo->committed_count = undo->item_count;
    /* Where weak pins keep the log until the next transaction begins, that one will find its blocks spare. */
    blocks_free(arena, &undo->spare);
}

void quire_undo_close(quire_arena *arena) {
    quire_undo *undo = &arena->undo;
    blocks_free(arena, &undo->first);
    blocks_free(arena, &undo->spare);
    free(undo->heads);
    free(undo->head_epochs);
    free(undo->items);
    *undo = (quire_undo){0};
}

/* ------------------------------------------------------------------------------------------------ changing in place */

/* Whether nobody reads the page as it is, but for the writer and weak snapshots. */
static bool may_borrow(const quire_arena *arena, const quire_table *table, uint64_t entry) {
    uint32_t frame = QUIRE_ENTRY_FRAME(entry);
    return table->depth > 0 && (uint32_t)(entry >> 32) > __atomic_load_n(&arena->undo.firm_newest, __ATOMIC_ACQUIRE) &&
           (arena->extra_refs == NULL || arena->extra_refs[frame] == 0);
}

/* The page of this entry becomes one that is changed in place in this epoch, or is copied. */
static void *borrow_first(quire_set *set, quire_page_id id, uint64_t entry, size_t offset, size_t count) {
    quire_arena *arena = set->view.arena;
    quire_undo *undo = &arena->undo;
    uint32_t frame = QUIRE_ENTRY_FRAME(entry);
    if (!arena->in_place || undo->dense_left[id >> 31] > 0) {
        return quire_page_copy_on_write(set, id);
    }
    if (undo->item_count == undo->committed_count) {
        log_trim(arena); /* the first of a transaction: what the one before left may be needed no more */
        undo->committed_count = undo->item_count;
    }
    uint8_t *page = quire_frame(&set->view, frame);
    if (page == NULL || !may_borrow(arena, &set->view.table[id >> 31], entry) || !heads_room(arena) ||
        !items_room(undo)) {
        return quire_page_copy_on_write(set, id);
    }
    uint64_t *place = quire_page_place(set, id);
    if (place == NULL) {
        return NULL;
    }
    /* Whether a clone has the frame, too, may have come out on the way. */
    if ((arena->extra_refs != NULL && arena->extra_refs[frame] > 0) || !note_add(arena, frame, page, offset, count)) {
        return quire_page_copy_on_write(set, id);
    }
    undo->note_count[id >> 31]++;
    undo->noted_pages[id >> 31]++;
    undo->items[undo->item_count++] = (quire_amended){set->set_id, id, frame, arena->epoch_writing};
    undo->page_count += (uint32_t)(entry >> 32) <= arena->epoch_committed;
    *place = (uint64_t)arena->epoch_writing << 32 | QUIRE_ENTRY_BORROWED | frame;
    arena->changed = true;
    return page;
}

void *quire_page_borrow(quire_set *set, quire_page_id id, uint64_t entry, size_t offset, size_t count, bool again) {
    quire_arena *arena = set->view.arena;
    uint32_t frame = QUIRE_ENTRY_FRAME(entry);
    if ((uint32_t)(entry >> 32) != arena->epoch_writing) { /* else it was borrowed in this epoch */
        return borrow_first(set, id, entry, offset, count);
    }
    uint8_t *page = quire_frame(&set->view, frame);
    arena->undo.note_count[id >> 31]++;
    bool noted = page != NULL &&
                 ((again && is_noted(arena, frame, offset, count)) || note_add(arena, frame, page, offset, count));
    return noted ? page : quire_page_copy_on_write(set, id);
}

void quire_undo_copied(quire_arena *arena, uint64_t entry) {
    arena->undo.page_count -= (uint32_t)(entry >> 32) > arena->epoch_committed && arena->undo.page_count > 0;
}

/* ------------------------------------------------------------------------------------------------ going back */

void quire_undo_roll_back(quire_arena *arena, uint32_t epoch) {
    quire_undo *undo = &arena->undo;
    size_t kept = undo->item_count;
    while (kept > 0 && undo->items[kept - 1].epoch > epoch) {
        const quire_amended *item = &undo->items[--kept];
        uint8_t *page = frame_bytes(arena, item->frame);
        if (page != NULL) { /* it was written to, so it is there */
            bytes_undo(undo, item->frame, epoch, page);
        }
        head_drop(undo, item->frame, epoch);
    }
    undo->item_count = kept;
    undo->committed_count = kept;
    counts_reset(undo);
}

bool quire_undo_pinned_after(quire_arena *arena, const quire_snap *snap) {
    bool found = snap->pin->lost;
    pthread_mutex_lock(&arena->pins_mutex);
    for (const quire_local_pin *pin = arena->pins; pin != NULL; pin = pin->next) {
        found = found || pin->epoch > snap->pin->epoch;
    }
    pthread_mutex_unlock(&arena->pins_mutex);
    return found;
}

/* ------------------------------------------------------------------------------------------------ settling */

/* The place of a page's entry in the tables of a state that nobody writes; NULL if it has none. */
static uint64_t *place_in(quire_view *view, quire_page_id id) {
    quire_table *table = &view->table[id >> 31];
    uint32_t index = id & 0x7FFFFFFFu;
    unsigned bits = view->page_shift - 3u;
    uint64_t *entry = &table->root;
    if (index >= table->page_limit || table->depth == 0) {
        return NULL;
    }
    for (unsigned shift = table->depth * bits; shift != 0;) {
        uint32_t frame = QUIRE_ENTRY_FRAME(*entry);
        uint64_t *node = frame == 0 || frame >= view->frame_limit ? NULL : (uint64_t *)quire_frame(view, frame);
        if (node == NULL) {
            return NULL;
        }
        shift -= bits;
        entry = node + ((index >> shift) & ((1u << bits) - 1));
    }
    return entry;
}

typedef struct {
    quire_arena *arena;
    uint32_t set_id;
    quire_view view; /* of that set in the last commit; set_id 0: it has none */
    quire_view catalog;
} committed_set;

static int committed_match(void *context, const quire_catalog_entry *entry) {
    committed_set *state = context;
    if (entry->set_id != state->set_id) {
        return QUIRE_OK;
    }
    state->view = quire_arena_view(state->arena);
    memcpy(state->view.table, entry->table, sizeof state->view.table);
    return 1;
}

/* Gives the last commit a page of its own where it shares a frame that was changed since, and the writer that frame. */
static int item_settle(committed_set *state, const quire_amended *item) {
    quire_arena *arena = state->arena;
    if (state->set_id != item->set_id) {
        state->set_id = item->set_id;
        state->view.table[0].page_limit = state->view.table[1].page_limit = 0;
        int rc = quire_catalog_each(&state->catalog, committed_match, state);
        QUIRE_TRY(rc == 1 ? QUIRE_OK : rc);
    }
    uint64_t *committed = place_in(&state->view, item->page);
    if (committed == NULL || QUIRE_ENTRY_FRAME(*committed) != item->frame ||
        (uint32_t)(*committed >> 32) > arena->epoch_committed) {
        return QUIRE_OK; /* settled before, or a frame that the last commit has not seen */
    }
    uint32_t frame = quire_frame_alloc(arena);
    uint8_t *copy = frame == 0 ? NULL : frame_bytes(arena, frame), *page = frame_bytes(arena, item->frame);
    if (copy == NULL || page == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "a page was settled without a reservation");
    }
    memcpy(copy, page, arena->page_bytes);
    bytes_undo(&arena->undo, item->frame, arena->epoch_committed, copy);
    uint32_t birth = (uint32_t)(*committed >> 32);
    *committed = (uint64_t)birth << 32 | frame;
    return quire_frame_retire(arena, frame, birth);
}

/* The frame is the writer's alone now, unless the page has got another since. */
static void item_own(quire_arena *arena, const quire_amended *item) {
    for (quire_set *set = arena->sets; set != NULL; set = set->next) {
        if (set->gone || set->set_id != item->set_id) {
            continue;
        }
        uint64_t entry = quire_page_entry(&set->view, item->page);
        if (QUIRE_ENTRY_FRAME(entry) == item->frame && (entry & QUIRE_ENTRY_BORROWED) != 0 &&
            (uint32_t)(entry >> 32) == arena->epoch_writing) {
            /* The nodes above are of this epoch, too, so that writing to them copies nothing. */
            uint64_t *place = place_in(&set->view, item->page);
            if (place != NULL) {
                *place &= ~(uint64_t)QUIRE_ENTRY_BORROWED;
                arena->dirty_count++;
            }
        }
    }
}

int quire_undo_settle(quire_arena *arena) {
    quire_undo *undo = &arena->undo;
    if (undo->item_count == undo->committed_count) {
        return QUIRE_OK;
    }
    quire_meta meta;
    uint64_t current;
    QUIRE_TRY(quire_meta_read(arena, &meta, &current));
    size_t count = undo->item_count - undo->committed_count;
    QUIRE_TRY(quire_frames_reserve(arena, count + quire_catalog_frames(arena)));
    committed_set state = {.arena = arena, .catalog = quire_arena_view(arena)};
    state.catalog.table[0] = meta.catalog;
    for (size_t i = undo->committed_count; i < undo->item_count; i++) {
        QUIRE_TRY(item_settle(&state, &undo->items[i]));
    }
    for (size_t i = undo->committed_count; i < undo->item_count; i++) {
        item_own(arena, &undo->items[i]);
    }
    /* From now on these frames are changed without a note, so that states before the last commit are lost. */
    weak_lose(arena, arena->epoch_committed);
    for (size_t i = 0; i < undo->item_count; i++) {
        head_set(undo, undo->items[i].frame, NULL, 0);
    }
    undo->floor = arena->epoch_committed;
    undo->item_count = undo->committed_count = 0;
    counts_reset(undo);
    blocks_free(arena, &undo->first);
    undo->last = NULL;
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ reading weak snapshots */

static size_t slot_of(const quire_made_up *made_up, uint32_t frame) {
    size_t slot = (size_t)(frame * 0x9E3779B1u) & (made_up->slot_count - 1);
    while (made_up->slots[slot].generation == made_up->generation && made_up->slots[slot].frame != frame) {
        slot = (slot + 1) & (made_up->slot_count - 1);
    }
    return slot;
}

static bool slots_grow(quire_made_up *made_up) {
    size_t old_count = made_up->slot_count, count = old_count == 0 ? 64 : old_count * 2;
    quire_made_up_page *old = made_up->slots, *slots = calloc(count, sizeof *slots);
    if (slots == NULL) {
        return false;
    }
    made_up->slots = slots;
    made_up->slot_count = count;
    made_up->generation += made_up->generation == 0;
    for (size_t i = 0; i < old_count; i++) {
        if (old[i].generation == made_up->generation) {
            made_up->slots[slot_of(made_up, old[i].frame)] = old[i];
        }
    }
    free(old);
    return true;
}

static uint8_t *page_from_pool(quire_made_up *made_up, size_t page_bytes) {
    if (made_up->used == made_up->pool_count) {
        uint8_t **pool = realloc(made_up->pool, (made_up->pool_count + 1) * sizeof *pool);
        if (pool == NULL) {
            return NULL;
        }
        made_up->pool = pool;
        pool[made_up->pool_count] = malloc(page_bytes);
        if (pool[made_up->pool_count] == NULL) {
            return NULL;
        }
        made_up->pool_count++;
    }
    return made_up->pool[made_up->used++];
}

const void *quire_page_read_weak(const quire_view *view, uint64_t entry) {
    quire_snap *snap = view->weak;
    quire_arena *arena = view->arena;
    quire_made_up *made_up = &snap->made_up;
    uint32_t frame = QUIRE_ENTRY_FRAME(entry);
    const uint8_t *bytes = quire_frame(view, frame);
    if (snap->pin->lost) {
        made_up->failure = QUIRE_E_CLOSED;
        return NULL;
    }
    if (bytes == NULL || arena->undo.head_newest <= view->epoch || head_epoch(&arena->undo, frame) <= view->epoch) {
        return bytes;
    }
    if (2 * (made_up->used + 1) > made_up->slot_count && !slots_grow(made_up)) {
        made_up->failure = QUIRE_E_NOMEM;
        return NULL;
    }
    quire_made_up_page *slot = &made_up->slots[slot_of(made_up, frame)];
    if (slot->generation != made_up->generation) {
        uint8_t *page = page_from_pool(made_up, arena->page_bytes);
        if (page == NULL) {
            made_up->failure = QUIRE_E_NOMEM;
            return NULL;
        }
        memcpy(page, bytes, arena->page_bytes);
        bytes_undo(&arena->undo, frame, view->epoch, page);
        *slot = (quire_made_up_page){frame, made_up->generation, page};
    }
    return slot->page;
}

void quire_amend_ahead(const quire_view *view, uint64_t entry) {
    const quire_undo *undo = &view->arena->undo;
    uint32_t frame = QUIRE_ENTRY_FRAME(entry);
    if (frame < undo->head_count) {
        __builtin_prefetch(undo->heads + frame, 1);
        __builtin_prefetch(undo->head_epochs + frame, 1);
    }
}

void quire_view_ahead(const quire_view *view, const quire_page_id *ids, size_t count) {
    const quire_undo *undo = &view->arena->undo;
    const quire_note *notes[QUIRE_AHEAD_PAGES];
    const uint8_t *pages[QUIRE_AHEAD_PAGES];
    size_t left = 0;
    /* What a lost one would need is not kept (U3). */
    bool readable = view->weak != NULL && !view->weak->pin->lost;
    for (size_t i = 0; readable && i < count && i < QUIRE_AHEAD_PAGES; i++) {
        uint64_t entry = quire_page_entry(view, ids[i]);
        uint32_t frame = QUIRE_ENTRY_FRAME(entry);
        if (entry != 0 && head_epoch(undo, frame) > view->epoch) {
            pages[left] = quire_frame(view, frame);
            __builtin_prefetch(pages[left]);
            notes[left] = head_of(undo, frame);
            __builtin_prefetch(notes[left++]);
        }
    }
    /* One step along all chains at a time. */
    while (left > 0) {
        size_t kept = 0;
        for (size_t i = 0; i < left; i++) {
            __builtin_prefetch(pages[i] + notes[i]->offset);
            if (notes[i]->previous_epoch > view->epoch) {
                pages[kept] = pages[i];
                notes[kept] = notes[i]->previous;
                __builtin_prefetch(notes[kept]);
                __builtin_prefetch((const uint8_t *)notes[kept++] + 63);
            }
        }
        left = kept;
    }
}

/* Adds what a note has to the amendments, in the order of places; false if there is no room, or it is of other bytes than one there is. */
static bool amendment_add(quire_amendments *amendments, const quire_note *note) {
    size_t at = amendments->count;
    while (at > 0 && amendments->items[at - 1].offset > note->offset) {
        at--;
    }
    quire_amendment *before = at == 0 ? NULL : &amendments->items[at - 1];
    if (before != NULL && before->offset == note->offset && before->count == note->bytes) {
        before->old = note->old; /* older than what was found so far (U4) */
        return true;
    }
    const quire_amendment *behind = at == amendments->count ? NULL : &amendments->items[at];
    if ((before != NULL && before->offset + before->count > note->offset) ||
        (behind != NULL && (uint32_t)note->offset + note->bytes > behind->offset) ||
        amendments->count == QUIRE_AMENDMENTS_MAX) {
        return false;
    }
    memmove(amendments->items + at + 1, amendments->items + at, (amendments->count - at) * sizeof *amendments->items);
    amendments->items[at] = (quire_amendment){note->offset, note->bytes, note->old};
    amendments->count++;
    return true;
}

bool quire_page_amendments(const quire_view *older, const quire_view *newer, quire_page_id id,
                           quire_amendments *amendments) {
    const quire_undo *undo = &older->arena->undo;
    amendments->count = 0;
    if (older->weak == NULL || older->weak->pin->lost || newer->weak != NULL) {
        return false;
    }
    uint64_t was = quire_page_entry(older, id), is = quire_page_entry(newer, id);
    uint32_t frame = QUIRE_ENTRY_FRAME(was);
    if (was == 0 || is == 0 || QUIRE_ENTRY_FRAME(is) != frame || head_epoch(undo, frame) <= older->epoch) {
        return false;
    }
    const quire_note *note = head_of(undo, frame);
    uint32_t epoch = head_epoch(undo, frame);
    while (epoch > older->epoch) {
        if (!amendment_add(amendments, note)) {
            return false;
        }
        epoch = note->previous_epoch;
        note = note->previous;
    }
    amendments->page = quire_frame(newer, frame);
    return amendments->page != NULL;
}

bool quire_view_has_made_up(const quire_view *view) {
    return view->weak != NULL && view->weak->made_up.used != 0;
}

void quire_view_forget(const quire_view *view) {
    if (view->weak != NULL && view->weak->made_up.used != 0) {
        view->weak->made_up.generation++;
        view->weak->made_up.used = 0;
    }
}

int quire_weak_failure(const quire_view *view) {
    switch (view->weak == NULL ? QUIRE_OK : view->weak->made_up.failure) {
    case QUIRE_OK:
        return QUIRE_OK;
    case QUIRE_E_CLOSED:
        return quire_fail(QUIRE_E_CLOSED, "the pages of a weak snapshot were changed since: load the state anew");
    default:
        return quire_fail(QUIRE_E_NOMEM, "no memory for the pages of a weak snapshot as they were");
    }
}

void quire_made_up_free(quire_made_up *made_up) {
    for (size_t i = 0; i < made_up->pool_count; i++) {
        free(made_up->pool[i]);
    }
    free(made_up->pool);
    free(made_up->slots);
}
