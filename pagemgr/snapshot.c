/* snapshot.c -- pins, snapshots, and the frames that only they keep alive.
 *
 * Purpose     A snapshot pins an epoch in the header's pin table, where the writer of any process sees it. A frame that leaves the
 *             state being written is retired, and freed when no pin and no commit can see it any more.
 *
 * Layout      internal.h: quire_pin, quire_retired, quire_held.
 *
 * Invariants  I1 a frame seen by a pinned epoch p (birth <= p < death) is not free.
 *             I2 held lists are sorted by epoch, each epoch once; a frame is in the list of the newest pin that sees it, so
 *                each release looks at the frames it may free and no others.
 *             I3 while a snapshot of this process at an epoch lives, the process holds exactly one pin on that epoch.
 *
 * Ownership   quire_snap belongs to its user until quire_snap_release. Pins belong to the process's attachment number and are freed
 *             by the next writer when the process is dead.
 * Threads     Acquiring and releasing take a mutex of this process for a moment; reading through a view takes nothing.
 *             A reader publishes its pin and then looks again whether its epoch is still the current one; the writer switches the
 *             current epoch and then looks at the pins. Whichever comes first, one of the two sees the other.
 * Errors      FULL when all pins are taken. A sweep cannot fail: what it has no memory to sort stays retired until the next one.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------------------------------ retired frames */

static int list_room(quire_retired_list *list, size_t count) {
    if (list->capacity - list->count >= count) {
        return QUIRE_OK;
    }
    size_t capacity = list->capacity * 2 > list->count + count ? list->capacity * 2 : list->count + count;
    quire_retired *items = realloc(list->items, capacity * sizeof *items);
    if (items == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for a list of %zu retired frames", capacity);
    }
    list->items = items;
    list->capacity = capacity;
    return QUIRE_OK;
}

int quire_retired_room(quire_arena *arena, size_t count) {
    return list_room(&arena->retired, count);
}

int quire_frame_retire(quire_arena *arena, uint32_t frame, uint32_t birth) {
    arena->dirty_count -= birth > arena->epoch_committed;
    if (birth > arena->epoch_sealed) {
        quire_frame_free(arena, frame); /* made and dropped in this epoch: nobody else has seen it */
        return QUIRE_OK;
    }
    QUIRE_TRY(list_room(&arena->retired, 1));
    arena->retired.items[arena->retired.count++] = (quire_retired){frame, birth, arena->epoch_writing};
    return QUIRE_OK;
}

int quire_held_add(quire_arena *arena, uint32_t epoch, quire_retired item) {
    size_t at = arena->held_count;
    while (at > 0 && arena->held[at - 1].epoch >= epoch) {
        at--;
    }
    if (at == arena->held_count || arena->held[at].epoch != epoch) {
        if (arena->held_count == arena->held_capacity) {
            size_t capacity = arena->held_capacity * 2 + 8;
            quire_held *held = realloc(arena->held, capacity * sizeof *held);
            if (held == NULL) {
                return quire_fail(QUIRE_E_NOMEM, "no memory for pinned frames");
            }
            arena->held = held;
            arena->held_capacity = capacity;
        }
        memmove(&arena->held[at + 1], &arena->held[at], (arena->held_count - at) * sizeof *arena->held);
        arena->held[at] = (quire_held){.epoch = epoch};
        arena->held_count++;
    }
    QUIRE_TRY(list_room(&arena->held[at].list, 1));
    arena->held[at].list.items[arena->held[at].list.count++] = item;
    return QUIRE_OK;
}

void quire_held_clear(quire_arena *arena) {
    for (size_t i = 0; i < arena->held_count; i++) {
        free(arena->held[i].list.items);
    }
    arena->held_count = 0;
}

/* The newest of the sorted epochs in birth <= epoch < end; 0 if there is none. */
static uint32_t newest_between(const uint32_t *epochs, size_t count, uint32_t birth, uint32_t end) {
    size_t low = 0, high = count; /* epochs[low - 1] < end <= epochs[high] */
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (epochs[middle] < end) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low > 0 && epochs[low - 1] >= birth ? epochs[low - 1] : 0;
}

/* Hands the frame to the pin that still sees it, or frees it; false if there was no memory to do so. */
static bool settle(quire_arena *arena, const uint32_t *pins, size_t pin_count, quire_retired item, uint32_t end) {
    uint32_t holder = newest_between(pins, pin_count, item.birth, end);
    if (holder == 0) {
        quire_frame_free(arena, item.frame);
        return true;
    }
    return quire_held_add(arena, holder, item) == QUIRE_OK;
}

void quire_retired_sweep(quire_arena *arena) {
    uint32_t pins[QUIRE_PIN_COUNT];
    size_t pin_count = quire_pins_collect(arena, pins, QUIRE_PIN_COUNT);
    for (size_t i = arena->held_count; i-- > 0;) { /* from the newest: frames only move to older pins */
        uint32_t epoch = arena->held[i].epoch;
        if (newest_between(pins, pin_count, epoch, epoch + 1) != 0) {
            continue;
        }
        quire_retired_list list = arena->held[i].list;
        memmove(&arena->held[i], &arena->held[i + 1], (arena->held_count - i - 1) * sizeof *arena->held);
        arena->held_count--;
        for (size_t k = 0; k < list.count; k++) {
            if (!settle(arena, pins, pin_count, list.items[k], epoch) && list_room(&arena->retired, 1) == QUIRE_OK) {
                list.items[k].death = epoch;
                arena->retired.items[arena->retired.count++] = list.items[k];
            }
        }
        free(list.items);
        i = arena->held_count; /* settling may have added lists: look again from the newest */
    }
    size_t kept = 0;
    for (size_t k = 0; k < arena->retired.count; k++) {
        quire_retired item = arena->retired.items[k];
        bool committed = item.birth <= arena->epoch_committed && arena->epoch_committed < item.death;
        if (committed || !settle(arena, pins, pin_count, item, item.death)) {
            arena->retired.items[kept++] = item;
        }
    }
    arena->retired.count = kept;
    arena->retired_swept = kept;
}

int quire_arena_pinned(quire_arena *arena, quire_pinned *pinned, size_t max, size_t *count) {
    QUIRE_TRY(quire_arena_enter(arena));
    uint32_t epochs[QUIRE_PIN_COUNT];
    *count = quire_pins_collect(arena, epochs, QUIRE_PIN_COUNT);
    for (size_t i = 0; i < *count && i < max; i++) {
        pinned[i] = (quire_pinned){.epoch = epochs[i]};
        for (size_t k = 0; k < arena->held_count; k++) {
            if (arena->held[k].epoch == epochs[i]) {
                pinned[i].frames = arena->held[k].list.count;
            }
        }
    }
    return quire_arena_left(arena, QUIRE_OK);
}

/* ------------------------------------------------------------------------------------------------ pins */

void quire_attachment_forget(quire_arena *arena, uint32_t attachment) {
    for (uint32_t slot = 0; slot < QUIRE_PIN_COUNT; slot++) {
        quire_pin *pin = &arena->header->pins[slot];
        if (__atomic_load_n(&pin->owner, __ATOMIC_ACQUIRE) == attachment) {
            __atomic_store_n(&pin->epoch, 0, __ATOMIC_SEQ_CST);
            __atomic_store_n(&pin->confirmed, 0, __ATOMIC_RELEASE);
            __atomic_store_n(&pin->owner, 0, __ATOMIC_RELEASE);
        }
    }
}

/* The pinned epochs, sorted, each once; also those whose readers have yet to look again. */
size_t quire_pins_collect(quire_arena *arena, uint32_t *epochs, size_t max) {
    uint32_t limit = __atomic_load_n(&arena->header->pin_limit, __ATOMIC_SEQ_CST);
    uint32_t dead = 0, alive = arena->attachment; /* the last answers: most pins in a row have one owner */
    size_t count = 0;
    for (uint32_t slot = 0; slot < limit && slot < QUIRE_PIN_COUNT; slot++) {
        const quire_pin *pin = &arena->header->pins[slot];
        uint32_t owner = __atomic_load_n(&pin->owner, __ATOMIC_SEQ_CST);
        uint32_t epoch = __atomic_load_n(&pin->epoch, __ATOMIC_SEQ_CST);
        if (owner == 0 || owner == dead) {
            continue;
        }
        if (owner != alive) {
            if (quire_attachment_dead(arena, owner)) {
                dead = owner;
                continue;
            }
            alive = owner;
        }
        size_t at = count;
        while (at > 0 && epochs[at - 1] >= epoch) {
            at--;
        }
        if (epoch == 0 || (at < count && epochs[at] == epoch) || count == max) {
            continue;
        }
        memmove(&epochs[at + 1], &epochs[at], (count - at) * sizeof *epochs);
        epochs[at] = epoch;
        count++;
    }
    return count;
}

static int pin_claim(quire_arena *arena, uint32_t *slot) {
    for (uint32_t i = 0; i < QUIRE_PIN_COUNT; i++) {
        uint32_t none = 0;
        if (__atomic_compare_exchange_n(&arena->header->pins[i].owner, &none, arena->attachment, false,
                                        __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
            uint32_t limit = __atomic_load_n(&arena->header->pin_limit, __ATOMIC_RELAXED);
            while (limit < i + 1 && !__atomic_compare_exchange_n(&arena->header->pin_limit, &limit, i + 1, true,
                                                                 __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {
            }
            *slot = i;
            return QUIRE_OK;
        }
    }
    return quire_fail(QUIRE_E_FULL, "all %zu pins are taken, one for each epoch and process: release snapshots",
                      (size_t)QUIRE_PIN_COUNT);
}

static void pin_set(quire_arena *arena, uint32_t slot, uint32_t epoch, const quire_table *catalog,
                    uint32_t frame_limit) {
    quire_pin *pin = &arena->header->pins[slot];
    __atomic_store_n(&pin->catalog_root, catalog->root, __ATOMIC_RELAXED);
    __atomic_store_n(&pin->catalog_depth, catalog->depth, __ATOMIC_RELAXED);
    __atomic_store_n(&pin->catalog_limit, catalog->page_limit, __ATOMIC_RELAXED);
    __atomic_store_n(&pin->frame_limit, frame_limit, __ATOMIC_RELAXED);
    __atomic_store_n(&pin->epoch, epoch, __ATOMIC_SEQ_CST);
}

/* A reader may let go of a slot, or take it for another epoch, at any time: the second look tells. Several slots may pin one
 * epoch; no new pin is made on any but the current one, so when all have been looked at, there is none. */
bool quire_pin_catalog(quire_arena *arena, uint32_t epoch, quire_table *catalog) {
    for (uint32_t slot = 0; slot < QUIRE_PIN_COUNT; slot++) {
        const quire_pin *pin = &arena->header->pins[slot];
        if (__atomic_load_n(&pin->epoch, __ATOMIC_SEQ_CST) != epoch ||
            !__atomic_load_n(&pin->confirmed, __ATOMIC_ACQUIRE)) {
            continue;
        }
        *catalog = (quire_table){.root = __atomic_load_n(&pin->catalog_root, __ATOMIC_ACQUIRE),
                                 .depth = __atomic_load_n(&pin->catalog_depth, __ATOMIC_ACQUIRE),
                                 .page_limit = __atomic_load_n(&pin->catalog_limit, __ATOMIC_ACQUIRE)};
        if (__atomic_load_n(&pin->epoch, __ATOMIC_SEQ_CST) == epoch) {
            return true;
        }
    }
    return false;
}

static void pin_clear(quire_arena *arena, uint32_t slot) {
    quire_pin *pin = &arena->header->pins[slot];
    __atomic_store_n(&pin->epoch, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&pin->confirmed, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&pin->owner, 0, __ATOMIC_RELEASE);
}

/* The process's pin on an epoch, with the mutex held; NULL if there is none. */
static quire_local_pin *pin_find(const quire_arena *arena, uint32_t epoch) {
    for (quire_local_pin *pin = arena->pins; pin != NULL; pin = pin->next) {
        if (pin->epoch == epoch) {
            return pin;
        }
    }
    return NULL;
}

static int pin_make(quire_arena *arena, uint32_t slot, uint32_t epoch, const quire_table *catalog, uint32_t frame_limit,
                    quire_local_pin **pin) {
    __atomic_store_n(&arena->header->pins[slot].confirmed, 1, __ATOMIC_RELEASE);
    quire_local_pin *made = calloc(1, sizeof *made);
    if (made == NULL) {
        pin_clear(arena, slot);
        return quire_fail(QUIRE_E_NOMEM, "no memory for a snapshot");
    }
    made->slot = slot;
    made->epoch = epoch;
    made->catalog = (quire_view){.arena = arena,
                                 .chunks = arena->chunks,
                                 .frame_limit = frame_limit,
                                 .epoch = epoch,
                                 .page_shift = arena->page_shift,
                                 .chunk_shift = arena->chunk_shift};
    made->catalog.table[0] = *catalog;
    made->next = arena->pins;
    arena->pins = made;
    *pin = made;
    return QUIRE_OK;
}

static int pin_committed(quire_arena *arena, quire_local_pin **pin) {
    for (;;) {
        quire_meta meta;
        uint64_t current;
        QUIRE_TRY(quire_meta_read(arena, &meta, &current));
        *pin = pin_find(arena, meta.epoch);
        if (*pin != NULL) {
            if (arena->in_place && (*pin)->firm_users == 0) {
                (*pin)->catalog.frame_limit = arena->frame_limit;
            }
            return QUIRE_OK;
        }
        uint32_t slot;
        QUIRE_TRY(pin_claim(arena, &slot));
        /* Settling (undo.c) may have given the commit frames that were made after it. */
        uint32_t frame_limit = arena->in_place ? arena->frame_limit : meta.frame_limit;
        pin_set(arena, slot, meta.epoch, &meta.catalog, frame_limit);
        if (__atomic_load_n(&arena->header->current, __ATOMIC_SEQ_CST) == current) {
            return pin_make(arena, slot, meta.epoch, &meta.catalog, frame_limit, pin);
        }
        pin_clear(arena, slot); /* a commit came between: its frames may be gone already */
    }
}

static int pin_live(quire_arena *arena, quire_local_pin **pin) {
    const quire_table *catalog = &arena->catalog.view.table[0];
    *pin = pin_find(arena, arena->epoch_sealed);
    if (*pin != NULL) {
        return QUIRE_OK;
    }
    uint32_t slot;
    QUIRE_TRY(pin_claim(arena, &slot));
    pin_set(arena, slot, arena->epoch_sealed, catalog, arena->frame_limit);
    return pin_make(arena, slot, arena->epoch_sealed, catalog, arena->frame_limit, pin);
}

/* With the mutex held. */
static void firm_newest_update(quire_arena *arena) {
    uint32_t newest = 0;
    for (const quire_local_pin *pin = arena->pins; pin != NULL; pin = pin->next) {
        newest = pin->firm_users > 0 && pin->epoch > newest ? pin->epoch : newest;
    }
    __atomic_store_n(&arena->undo.firm_newest, newest, __ATOMIC_RELEASE);
}

/* ------------------------------------------------------------------------------------------------ snapshots */

static int arena_usable(const quire_arena *arena) {
    return QUIRE_LIKELY(arena->fork_generation == quire_fork_generation)
               ? QUIRE_OK
               : quire_fail(QUIRE_E_CLOSED, "this arena was opened before a fork: open it again in the child");
}

static int snap_make(quire_arena *arena, int (*pin)(quire_arena *, quire_local_pin **), bool weak, quire_snap **snap) {
    QUIRE_TRY(arena_usable(arena));
    quire_snap *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for a snapshot");
    }
    made->arena = arena;
    made->weak = weak;
    pthread_mutex_lock(&arena->pins_mutex);
    int rc = pin(arena, &made->pin);
    if (rc == QUIRE_OK) {
        made->pin->users++;
        made->pin->firm_users += !weak;
        firm_newest_update(arena);
        made->all_next = arena->all;
        made->all_at = &arena->all;
        if (made->all_next != NULL) {
            made->all_next->all_at = &made->all_next;
        }
        arena->all = made;
        arena->snap_count++;
    }
    pthread_mutex_unlock(&arena->pins_mutex);
    if (rc != QUIRE_OK) {
        free(made);
        return rc;
    }
    *snap = made;
    return QUIRE_OK;
}

static int acquire_settled(quire_arena *arena, quire_snap **snap) {
    QUIRE_TRY(quire_undo_settle(arena));
    return snap_make(arena, pin_committed, false, snap);
}

int quire_snap_acquire(quire_arena *arena, quire_snap **snap) {
    if (!arena->in_place) {
        return snap_make(arena, pin_committed, false, snap);
    }
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, acquire_settled(arena, snap));
}

int quire_snap_acquire_weak(quire_arena *arena, quire_snap **snap) {
    if (!arena->in_place) {
        return quire_snap_acquire(arena, snap);
    }
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, snap_make(arena, pin_committed, true, snap));
}

static int acquire_live(quire_arena *arena, quire_snap **snap) {
    QUIRE_TRY(quire_undo_settle(arena));
    QUIRE_TRY(quire_arena_seal(arena));
    return snap_make(arena, pin_live, false, snap);
}

int quire_snap_acquire_live(quire_arena *arena, quire_snap **snap) {
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, acquire_live(arena, snap));
}

static void snap_free(quire_snap *snap) {
    for (size_t i = 0; i < snap->set_count; i++) {
        free(snap->sets[i]);
    }
    free(snap->sets);
    free(snap->name);
    quire_made_up_free(&snap->made_up);
    free(snap);
}

void quire_snap_release(quire_snap *snap) {
    quire_arena *arena = snap->arena;
    if (arena_usable(arena) != QUIRE_OK) {
        return; /* the pin is the parent's, and the lists may be mid-change there */
    }
    pthread_mutex_lock(&arena->pins_mutex);
    for (quire_snap **at = &arena->named; *at != NULL; at = &(*at)->next) {
        if (*at == snap) {
            *at = snap->next;
            break;
        }
    }
    quire_local_pin *pin = snap->pin;
    pin->firm_users -= !snap->weak;
    if (--pin->users == 0) {
        quire_local_pin **at = &arena->pins;
        while (*at != pin) {
            at = &(*at)->next;
        }
        *at = pin->next;
        pin_clear(arena, pin->slot);
        free(pin);
    }
    firm_newest_update(arena);
    *snap->all_at = snap->all_next;
    if (snap->all_next != NULL) {
        snap->all_next->all_at = snap->all_at;
    }
    arena->snap_count--;
    pthread_mutex_unlock(&arena->pins_mutex);
    snap_free(snap);
}

int quire_snap_find(quire_arena *arena, const char *name, quire_snap **snap) {
    QUIRE_TRY(arena_usable(arena));
    pthread_mutex_lock(&arena->pins_mutex);
    quire_snap *found = arena->named;
    while (found != NULL && strcmp(found->name, name) != 0) {
        found = found->next;
    }
    pthread_mutex_unlock(&arena->pins_mutex);
    if (found == NULL) {
        return quire_fail(QUIRE_E_NOTFOUND, "there is no snapshot '%s'", name);
    }
    *snap = found;
    return QUIRE_OK;
}

static int snap_restrict(quire_snap *snap, const char *name, const char *const *sets, size_t set_count) {
    snap->name = strdup(name);
    snap->sets = set_count == 0 ? NULL : calloc(set_count, sizeof *snap->sets);
    if (snap->name == NULL || (set_count > 0 && snap->sets == NULL)) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for a snapshot");
    }
    for (size_t i = 0; i < set_count; i++) {
        quire_catalog_entry entry;
        int rc = quire_catalog_find(&snap->pin->catalog, sets[i], &entry);
        if (rc == QUIRE_E_NOTFOUND) {
            return quire_fail(rc, "there is no set '%s' in the last commit", sets[i]);
        }
        QUIRE_TRY(rc);
        snap->sets[i] = strdup(sets[i]);
        if (snap->sets[i] == NULL) {
            return quire_fail(QUIRE_E_NOMEM, "no memory for a snapshot");
        }
        snap->set_count++;
    }
    return QUIRE_OK;
}

int quire_snap_create(quire_arena *arena, const char *name, const char *const *sets, size_t set_count,
                      quire_snap **snap) {
    QUIRE_TRY(quire_name_valid(name, "snapshot"));
    quire_snap *made;
    QUIRE_TRY(quire_snap_acquire(arena, &made));
    int rc = snap_restrict(made, name, sets, set_count);
    if (rc == QUIRE_OK) {
        pthread_mutex_lock(&arena->pins_mutex);
        for (const quire_snap *other = arena->named; other != NULL && rc == QUIRE_OK; other = other->next) {
            if (strcmp(other->name, name) == 0) {
                rc = quire_fail(QUIRE_E_EXISTS, "there is a snapshot '%s' already: release it or choose another name",
                                name);
            }
        }
        if (rc == QUIRE_OK) {
            made->next = arena->named;
            arena->named = made;
        }
        pthread_mutex_unlock(&arena->pins_mutex);
    }
    if (rc != QUIRE_OK) {
        quire_snap_release(made);
        return rc;
    }
    *snap = made;
    return QUIRE_OK;
}

uint32_t quire_snap_epoch(const quire_snap *snap) {
    return snap->pin->epoch;
}

int quire_view_usable(const quire_view *view) {
    return arena_usable(view->arena);
}

static bool snap_has(const quire_snap *snap, const char *name) {
    for (size_t i = 0; i < snap->set_count; i++) {
        if (strcmp(snap->sets[i], name) == 0) {
            return true;
        }
    }
    return snap->set_count == 0;
}

int quire_snap_view(quire_snap *snap, const char *name, uint32_t kind, quire_view *view) {
    QUIRE_TRY(arena_usable(snap->arena));
    quire_catalog_entry entry;
    int rc = snap_has(snap, name) ? quire_catalog_find(&snap->pin->catalog, name, &entry) : QUIRE_E_NOTFOUND;
    if (rc == QUIRE_E_NOTFOUND) {
        return quire_fail(rc, "the snapshot has no set '%s'", name);
    }
    QUIRE_TRY(rc);
    if (kind != 0 && entry.kind != kind) {
        return quire_fail(QUIRE_E_MISMATCH, "set '%s' is of kind %u, not %u: open it as what it was made", name,
                          entry.kind, kind);
    }
    quire_view made = snap->pin->catalog;
    memcpy(made.table, entry.table, sizeof made.table);
    if (snap->weak) {
        made.weak = snap;
        made.frame_limit = QUIRE_CHUNKS_MAX << made.chunk_shift; /* settling gives it frames that are made after it */
    }
    *view = made;
    return QUIRE_OK;
}

typedef struct {
    const quire_snap *snap;
    int (*visit)(void *context, const char *name, uint32_t kind);
    void *context;
} snap_each;

static int snap_each_entry(void *context, const quire_catalog_entry *entry) {
    const snap_each *each = context;
    return snap_has(each->snap, entry->name) ? each->visit(each->context, entry->name, entry->kind) : QUIRE_OK;
}

int quire_snap_each(quire_snap *snap, int (*visit)(void *context, const char *name, uint32_t kind), void *context) {
    QUIRE_TRY(arena_usable(snap->arena));
    snap_each each = {snap, visit, context};
    return quire_catalog_each(&snap->pin->catalog, snap_each_entry, &each);
}

typedef struct {
    quire_set_info *infos;
    size_t max, count;
} set_list;

static int set_list_add(void *context, const char *name, uint32_t kind) {
    set_list *list = context;
    if (list->count++ < list->max) {
        list->infos[list->count - 1].kind = kind;
        memcpy(list->infos[list->count - 1].name, name, strlen(name) + 1);
    }
    return QUIRE_OK;
}

int quire_snap_list(quire_snap *snap, quire_set_info *infos, size_t max, size_t *count) {
    set_list list = {infos, max, 0};
    int rc = quire_snap_each(snap, set_list_add, &list);
    *count = list.count;
    return rc;
}
