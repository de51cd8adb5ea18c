/* kv.c -- what both maps have in common: handles, reservations, bulk access in Arrow's layout, cursors, differences, footprints.
 *
 * Purpose     Carries out kv.h on top of the functions that map.c and ordered.c supply (kv_internal.h).
 * Layout      none of its own; record.h, map.c, ordered.c.
 *
 * Invariants  I1 every call on a live handle runs between enter and leave, and reserves before it writes.
 *             I2 a snapshot's handle holds nothing that changes after it was opened, so threads may share it.
 *             I3 no code of a caller (quire_change_visit, quire_footprint_visit) runs between enter and leave; what touch and
 *                stamps call does, and so calls nothing of the arena.
 *
 * Ownership   A handle owns nothing but itself. A cursor on a live handle owns a snapshot, one on a snapshot uses
 *             that one.
 * Threads     As kv.h.
 * Errors      A bulk call that fails names the row in its message. Columns hold the rows added so far.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "kv_internal.h"

/* Pages that a structure's create may write. */
#define CREATE_PAGES 16u
/* How far ahead the records of a page are compared before a look-up is made for one. */
#define SAME_PAGE_WINDOW 4u

struct quire_kv {
    quire_handle at;
    const quire_kv_ops *ops;
};

struct quire_cursor {
    const quire_kv_ops *ops;
    quire_snap *snap; /* NULL: the view belongs to the handle's snapshot */
    quire_view view;
    quire_position position;
    bool reverse;
    bool passing; /* no pin: the caller sees to it that nothing changes meanwhile */
    bool ended;
    bool has_lo, has_hi;
    quire_buffer lo, hi;
    quire_buffer key, value; /* scratch of next_many */
};

/* ------------------------------------------------------------------------------------------------ handles */

static const uint8_t no_bytes[1];

int quire_argument_check(const char *what, const uint8_t **bytes, size_t count) {
    if (QUIRE_LIKELY(*bytes != NULL && count <= UINT32_MAX)) {
        return QUIRE_OK;
    }
    if (count > UINT32_MAX) {
        return quire_fail(QUIRE_E_INVALID, "a %s of %zu bytes; at most %" PRIu32 " are allowed", what, count,
                          UINT32_MAX);
    }
    if (count != 0) {
        return quire_fail(QUIRE_E_INVALID, "a %s of %zu bytes at a null pointer", what, count);
    }
    *bytes = no_bytes;
    return QUIRE_OK;
}

static int ops_of(quire_kind kind, const quire_kv_ops **ops) {
    if (kind != QUIRE_KIND_MAP && kind != QUIRE_KIND_ORDERED) {
        return quire_fail(QUIRE_E_INVALID, "kind %d is no map; %d (map) and %d (ordered map) are", (int)kind,
                          QUIRE_KIND_MAP, QUIRE_KIND_ORDERED);
    }
    *ops = kind == QUIRE_KIND_MAP ? &quire_map_ops : &quire_ordered_ops;
    return QUIRE_OK;
}

static int open_or_create(quire_arena *arena, const char *name, quire_kind kind, int (*create)(quire_set *set),
                          quire_set **set) {
    int rc = quire_set_open(arena, name, kind, set);
    if (rc != QUIRE_E_NOTFOUND) {
        return rc;
    }
    QUIRE_TRY(quire_set_create(arena, name, kind, set));
    rc = quire_arena_reserve(arena, CREATE_PAGES);
    if (rc == QUIRE_OK) {
        rc = create(*set);
    }
    if (rc != QUIRE_OK) {
        quire_set_destroy(arena, name);
    }
    return rc;
}

int quire_handle_open(quire_arena *arena, const char *name, quire_kind kind, int (*create)(quire_set *set),
                      quire_handle *handle) {
    QUIRE_TRY(quire_arena_enter(arena));
    quire_set *set = NULL;
    int rc = open_or_create(arena, name, kind, create, &set);
    quire_arena_leave(arena);
    if (rc == QUIRE_OK) {
        *handle = (quire_handle){.set = set};
    }
    return rc;
}

/* Whoever keeps a place in a weak snapshot needs its pages as they are for longer than until the next write. */
static int pin_firmly(quire_snap **snap, quire_view *view) {
    if (quire_arena_epoch(view->arena) != view->epoch) {
        return quire_fail(QUIRE_E_CLOSED, "a commit came after the weak snapshot: it can no longer be walked over");
    }
    QUIRE_TRY(quire_snap_acquire(view->arena, snap));
    view->weak = NULL;
    return QUIRE_OK;
}

int quire_handle_pin(quire_handle *handle, quire_snap **snap, quire_view *view) {
    quire_set *set = handle->set;
    if (set == NULL) {
        *snap = NULL;
        *view = handle->view;
        return view->weak == NULL ? QUIRE_OK : pin_firmly(snap, view);
    }
    quire_snap *pinned = NULL;
    QUIRE_TRY(quire_snap_acquire_live(set->view.arena, &pinned));
    int rc = quire_snap_view(pinned, set->name, set->kind, view);
    if (rc != QUIRE_OK) {
        quire_snap_release(pinned);
        return rc;
    }
    *snap = pinned;
    return QUIRE_OK;
}

/* Every page of both tables, from the last down: so ids start at 0 again, as in a new set. */
static int free_all_pages(quire_set *set) {
    for (uint32_t table = 0; table < 2; table++) {
        for (uint32_t index = set->view.table[table].page_limit; index-- > 0;) {
            quire_page_id id = index | table << 31;
            if (quire_page_entry(&set->view, id) != 0) {
                QUIRE_TRY(quire_page_free(set, id));
            }
        }
    }
    return quire_view_whole(&set->view);
}

int quire_handle_clear(quire_handle *handle, int (*create)(quire_set *set)) {
    quire_set *set = handle->set;
    /* Freeing writes to the leaves of the two tables, and to nothing else. */
    unsigned bits = set->view.page_shift - 3u;
    uint64_t leaves = (set->view.table[0].page_limit >> bits) + (set->view.table[1].page_limit >> bits) + 2;
    QUIRE_TRY(quire_arena_reserve(set->view.arena, leaves + CREATE_PAGES));
    set->generation++;
    QUIRE_TRY(free_all_pages(set));
    return create(set);
}

static int handle_new(quire_kv **kv) {
    *kv = calloc(1, sizeof **kv);
    return *kv != NULL ? QUIRE_OK : quire_fail(QUIRE_E_NOMEM, "no memory for a handle of %zu bytes", sizeof **kv);
}

int quire_kv_open(quire_arena *arena, const char *name, quire_kind kind, quire_kv **kv) {
    const quire_kv_ops *ops = NULL;
    quire_kv *made = NULL;
    QUIRE_TRY(ops_of(kind, &ops));
    QUIRE_TRY(handle_new(&made));
    made->ops = ops;
    int rc = quire_handle_open(arena, name, kind, ops->create, &made->at);
    if (rc != QUIRE_OK) {
        free(made);
        return rc;
    }
    *kv = made;
    return QUIRE_OK;
}

int quire_kv_open_snap(quire_snap *snap, const char *name, quire_kind kind, quire_kv **kv) {
    const quire_kv_ops *ops = NULL;
    quire_kv *made = NULL;
    QUIRE_TRY(ops_of(kind, &ops));
    QUIRE_TRY(handle_new(&made));
    made->ops = ops;
    int rc = quire_snap_view(snap, name, kind, &made->at.view);
    if (rc != QUIRE_OK) {
        free(made);
        return rc;
    }
    *kv = made;
    return QUIRE_OK;
}

void quire_kv_close(quire_kv *kv) {
    free(kv);
}

static inline const quire_view *view_of(const quire_kv *kv) {
    return quire_handle_view(&kv->at);
}

static inline int find(quire_kv *kv, const uint8_t *key, size_t key_bytes, const quire_record **record) {
    return kv->ops->find(view_of(kv), kv->at.set, key, key_bytes, record);
}

/* ------------------------------------------------------------------------------------------------ one key */

quire_arena *quire_kv_arena(quire_kv *kv) {
    return kv->at.set != NULL ? kv->at.set->view.arena : NULL;
}

int quire_kv_count(quire_kv *kv, uint64_t *count) {
    QUIRE_TRY(quire_handle_enter(&kv->at));
    uint64_t found;
    int rc = kv->ops->count(view_of(kv), &found);
    if (rc == QUIRE_OK) {
        rc = quire_record_count_check(view_of(kv), found);
    }
    if (rc == QUIRE_OK) {
        *count = found;
    }
    quire_handle_leave(&kv->at);
    return rc;
}

/* What is found lies in a page that may change as soon as this call is over, or in one that a weak snapshot made up for it alone. A page that
 * was not made up stays where it is as long as the snapshot does; the writer may change the record in it. */
static int keep(const quire_kv *kv, quire_buffer *found) {
    bool copy = found->copy;
    found->copy = (copy && kv->at.set != NULL) || (kv->at.set == NULL && quire_view_has_made_up(&kv->at.view));
    int rc = quire_buffer_keep(found);
    found->copy = copy;
    return rc;
}

int quire_kv_get(quire_kv *kv, const uint8_t *key, size_t key_bytes, quire_buffer *value) {
    const quire_record *record;
    QUIRE_TRY(quire_argument_check("key", &key, key_bytes));
    QUIRE_TRY(quire_handle_enter(&kv->at));
    int rc = find(kv, key, key_bytes, &record);
    if (rc == QUIRE_OK) {
        rc = quire_record_value(view_of(kv), record, value);
    }
    if (rc == QUIRE_OK) {
        rc = keep(kv, value);
    }
    quire_handle_leave(&kv->at);
    return rc;
}

int quire_kv_get_all(quire_kv *kv, const uint8_t *key, size_t key_bytes, quire_buffer *values, uint64_t *value_count) {
    const quire_record *record;
    QUIRE_TRY(quire_argument_check("key", &key, key_bytes));
    QUIRE_TRY(quire_handle_enter(&kv->at));
    int rc = find(kv, key, key_bytes, &record);
    if (rc == QUIRE_OK) {
        rc = quire_record_values(view_of(kv), record, values, value_count);
    }
    if (rc == QUIRE_OK) {
        rc = keep(kv, values);
    }
    quire_handle_leave(&kv->at);
    return rc;
}

int quire_kv_contains(quire_kv *kv, const uint8_t *key, size_t key_bytes, bool *found) {
    const quire_record *record;
    QUIRE_TRY(quire_argument_check("key", &key, key_bytes));
    QUIRE_TRY(quire_handle_enter(&kv->at));
    int rc = find(kv, key, key_bytes, &record);
    quire_handle_leave(&kv->at);
    if (rc != QUIRE_OK && rc != QUIRE_E_NOTFOUND) {
        return rc;
    }
    *found = rc == QUIRE_OK;
    return QUIRE_OK;
}

/* Between enter and leave, arguments checked. */
static int put_entered(quire_kv *kv, const quire_item *item, bool append) {
    quire_set *set = kv->at.set;
    QUIRE_TRY(quire_put_reserve(set, kv->ops->reserve(set), item));
    return kv->ops->put(set, item, append);
}

static int remove_entered(quire_kv *kv, const uint8_t *key, size_t key_bytes) {
    quire_set *set = kv->at.set;
    /* Streams of the record make a reservation of their own (record.c). */
    QUIRE_TRY(quire_arena_reserve(set->view.arena, kv->ops->reserve(set) + quire_record_reserve(set, 0, 0)));
    return kv->ops->remove(set, key, key_bytes);
}

static int put_one(quire_kv *kv, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes,
                   bool append) {
    QUIRE_TRY(quire_argument_check("key", &key, key_bytes));
    QUIRE_TRY(quire_argument_check("value", &value, value_bytes));
    quire_item item = {key, value, (uint32_t)key_bytes, (uint32_t)value_bytes};
    QUIRE_TRY(quire_handle_enter_write(&kv->at));
    int rc = put_entered(kv, &item, append);
    quire_handle_leave(&kv->at);
    return rc;
}

int quire_kv_put(quire_kv *kv, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes) {
    return put_one(kv, key, key_bytes, value, value_bytes, false);
}

int quire_kv_append(quire_kv *kv, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes) {
    return put_one(kv, key, key_bytes, value, value_bytes, true);
}

int quire_kv_remove(quire_kv *kv, const uint8_t *key, size_t key_bytes) {
    QUIRE_TRY(quire_argument_check("key", &key, key_bytes));
    QUIRE_TRY(quire_handle_enter_write(&kv->at));
    int rc = remove_entered(kv, key, key_bytes);
    quire_handle_leave(&kv->at);
    return rc;
}

int quire_kv_remove_range(quire_kv *kv, const uint8_t *lo, size_t lo_bytes, const uint8_t *hi, size_t hi_bytes,
                          uint64_t *removed) {
    if (kv->ops->kind != QUIRE_KIND_ORDERED) {
        return quire_fail(QUIRE_E_INVALID, "an unordered map has no ranges: use an ordered map");
    }
    QUIRE_TRY(quire_handle_enter_write(&kv->at));
    int rc = quire_ordered_remove_range(kv->at.set, lo, lo_bytes, hi, hi_bytes, removed);
    quire_handle_leave(&kv->at);
    return rc;
}

int quire_kv_clear(quire_kv *kv) {
    QUIRE_TRY(quire_handle_enter_write(&kv->at));
    int rc = quire_handle_clear(&kv->at, kv->ops->create);
    quire_handle_leave(&kv->at);
    return rc;
}

/* ------------------------------------------------------------------------------------------------ columns */

void quire_column_free(quire_column *column) {
    free(column->bytes);
    free(column->offsets32);
    free(column->offsets64);
    free(column->validity);
    *column = (quire_column){0};
}

static int column_no_memory(size_t bytes) {
    return quire_fail(QUIRE_E_NOMEM, "no memory for a column buffer of %zu bytes: ask for fewer rows at a time", bytes);
}

static int column_resize(void **memory, size_t bytes) {
    void *grown = realloc(*memory, bytes);
    if (grown == NULL) {
        return column_no_memory(bytes);
    }
    *memory = grown;
    return QUIRE_OK;
}

static size_t validity_bytes(int64_t row_capacity) {
    return ((size_t)row_capacity + 7) / 8;
}

/* Room for one more row: offsets, and validity if there is any. */
static int column_grow_rows(quire_column *column) {
    int64_t capacity = column->row_capacity == 0 ? 64 : column->row_capacity * 2;
    size_t entries = (size_t)capacity + 1;
    bool wide = column->offsets64 != NULL;
    void *offsets = wide ? (void *)column->offsets64 : (void *)column->offsets32;
    bool first = offsets == NULL;
    QUIRE_TRY(column_resize(&offsets, entries * (wide ? sizeof(int64_t) : sizeof(int32_t))));
    if (wide) {
        column->offsets64 = offsets;
    } else {
        column->offsets32 = offsets;
        if (first) {
            column->offsets32[0] = 0;
        }
    }
    if (column->validity != NULL) {
        void *validity = column->validity;
        size_t before = validity_bytes(column->row_capacity);
        QUIRE_TRY(column_resize(&validity, validity_bytes(capacity)));
        column->validity = validity;
        memset(column->validity + before, 0, validity_bytes(capacity) - before);
    }
    column->row_capacity = capacity;
    return QUIRE_OK;
}

static int column_grow_bytes(quire_column *column, size_t count) {
    size_t capacity = column->bytes_capacity < 4096 ? 4096 : column->bytes_capacity * 2;
    if (capacity < column->bytes_count + count) {
        capacity = column->bytes_count + count;
    }
    void *bytes = column->bytes;
    QUIRE_TRY(column_resize(&bytes, capacity));
    column->bytes = bytes;
    column->bytes_capacity = capacity;
    return QUIRE_OK;
}

static int column_widen(quire_column *column) {
    size_t bytes = ((size_t)column->row_capacity + 1) * sizeof(int64_t);
    int64_t *offsets = malloc(bytes);
    if (offsets == NULL) {
        return column_no_memory(bytes);
    }
    for (int64_t row = 0; row <= column->row_count; row++) {
        offsets[row] = column->offsets32[row];
    }
    free(column->offsets32);
    column->offsets32 = NULL;
    column->offsets64 = offsets;
    return QUIRE_OK;
}

/* The row's bytes are in place and there is room for it. */
static void column_end_row(quire_column *column) {
    column->row_count++;
    if (QUIRE_LIKELY(column->offsets32 != NULL)) {
        column->offsets32[column->row_count] = (int32_t)column->bytes_count;
    } else {
        column->offsets64[column->row_count] = (int64_t)column->bytes_count;
    }
}

int quire_column_add(quire_column *column, const uint8_t *bytes, size_t count) {
    if (QUIRE_UNLIKELY(column->row_count == column->row_capacity)) {
        QUIRE_TRY(column_grow_rows(column));
    }
    if (QUIRE_UNLIKELY(count > column->bytes_capacity - column->bytes_count)) {
        QUIRE_TRY(column_grow_bytes(column, count));
    }
    if (QUIRE_UNLIKELY(column->bytes_count + count > INT32_MAX && column->offsets32 != NULL)) {
        QUIRE_TRY(column_widen(column));
    }
    if (count != 0) {
        memcpy(column->bytes + column->bytes_count, bytes, count);
        column->bytes_count += count;
    }
    if (column->validity != NULL) {
        column->validity[column->row_count >> 3] |= (uint8_t)(1u << (column->row_count & 7));
    }
    column_end_row(column);
    return QUIRE_OK;
}

/* The first null: all rows so far are valid. */
static int column_make_validity(quire_column *column) {
    uint8_t *validity = calloc(validity_bytes(column->row_capacity), 1);
    if (validity == NULL) {
        return column_no_memory(validity_bytes(column->row_capacity));
    }
    memset(validity, 0xFF, (size_t)column->row_count >> 3);
    if ((column->row_count & 7) != 0) {
        validity[column->row_count >> 3] = (uint8_t)((1u << (column->row_count & 7)) - 1);
    }
    column->validity = validity;
    return QUIRE_OK;
}

int quire_column_add_null(quire_column *column) {
    if (column->row_count == column->row_capacity) {
        QUIRE_TRY(column_grow_rows(column));
    }
    if (column->validity == NULL) {
        QUIRE_TRY(column_make_validity(column));
    }
    column->null_count++;
    column_end_row(column);
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ bulk */

static int64_t first_null(const quire_rows *rows) {
    for (int64_t row = 0; row < rows->row_count && rows->validity != NULL; row++) {
        if (quire_rows_null(rows, row)) {
            return row;
        }
    }
    return -1;
}

static int check_offsets(const char *what, const quire_rows *rows) {
    for (int64_t row = 0, at = rows->offset; row < rows->row_count; row++, at++) {
        int64_t start = rows->offsets32 != NULL ? rows->offsets32[at] : rows->offsets64[at];
        int64_t end = rows->offsets32 != NULL ? rows->offsets32[at + 1] : rows->offsets64[at + 1];
        if (start < 0 || end < start || end - start > UINT32_MAX) {
            return quire_fail(QUIRE_E_INVALID,
                              "row %" PRId64 " of the %s is said to lie from %" PRId64 " to %" PRId64
                              ": offsets must not fall, and a row has at most %" PRIu32 " bytes",
                              row, what, start, end, UINT32_MAX);
        }
    }
    return QUIRE_OK;
}

int quire_rows_open(const char *what, const quire_rows *given, bool nulls_allowed, quire_rows *rows) {
    *rows = *given;
    if (rows->bytes == NULL) {
        rows->bytes = no_bytes;
    }
    if (rows->row_count < 0 || rows->offset < 0 || rows->width < 0 || rows->width > UINT32_MAX) {
        return quire_fail(QUIRE_E_INVALID,
                          "%s with %" PRId64 " rows from row %" PRId64 " on, each %" PRId64
                          " bytes wide: none may be negative, and a row has at most %" PRIu32 " bytes",
                          what, rows->row_count, rows->offset, rows->width, UINT32_MAX);
    }
    if (rows->offsets32 != NULL || rows->offsets64 != NULL) {
        QUIRE_TRY(check_offsets(what, rows));
    }
    int64_t null_row = nulls_allowed ? -1 : first_null(rows);
    if (null_row >= 0) {
        return quire_fail(QUIRE_E_INVALID, "row %" PRId64 " of the %s is null; nulls cannot be stored", null_row, what);
    }
    return QUIRE_OK;
}

int quire_fail_at_row(int rc, int64_t row) {
    char message[768];
    snprintf(message, sizeof message, "%s", quire_error_message());
    return quire_fail(rc, "row %" PRId64 ": %s", row, message);
}

static inline size_t group_of(int64_t left) {
    return left < QUIRE_GROUP_ITEMS ? (size_t)left : QUIRE_GROUP_ITEMS;
}

/* Rows from first on as items; a null one has no bytes. values may be NULL. */
static void rows_items(const quire_rows *keys, const quire_rows *values, int64_t first, size_t count,
                       quire_item *items) {
    for (size_t i = 0; i < count; i++) {
        size_t key_bytes, value_bytes = 0;
        const uint8_t *key = quire_rows_at(keys, first + (int64_t)i, &key_bytes);
        const uint8_t *value = values == NULL ? NULL : quire_rows_at(values, first + (int64_t)i, &value_bytes);
        bool null = quire_rows_null(keys, first + (int64_t)i);
        items[i] = (quire_item){null ? no_bytes : key, value, null ? 0 : (uint32_t)key_bytes, (uint32_t)value_bytes};
    }
}

/* Before the first row of each group: asks for the memory of them all. */
static inline void ahead(const quire_kv *kv, const quire_rows *keys, int64_t row) {
    if (row % QUIRE_GROUP_ITEMS == 0 && kv->ops->ahead != NULL) {
        quire_item items[QUIRE_GROUP_ITEMS];
        size_t count = group_of(keys->row_count - row);
        rows_items(keys, NULL, row, count, items);
        kv->ops->ahead(view_of(kv), items, count);
    }
}

/* The records of a group, NULL where the key is missing. *done: how many were looked for before an error. */
static int find_group(quire_kv *kv, const quire_item *items, size_t count, const quire_record **records, size_t *done) {
    *done = 0;
    if (kv->ops->find_items != NULL && kv->ops->find_items(view_of(kv), items, count, records) == QUIRE_OK) {
        *done = count;
        return QUIRE_OK;
    }
    for (; *done < count; ++*done) { /* or where the error was is found by going through them once more */
        int rc = find(kv, items[*done].key, items[*done].key_bytes, &records[*done]);
        if (rc == QUIRE_E_NOTFOUND) {
            records[*done] = NULL;
        } else {
            QUIRE_TRY(rc);
        }
    }
    return QUIRE_OK;
}

/* The same of rows; an error names its row. */
static int find_rows(quire_kv *kv, const quire_rows *keys, int64_t first, size_t count, const quire_record **records) {
    quire_item items[QUIRE_GROUP_ITEMS];
    size_t done;
    rows_items(keys, NULL, first, count, items);
    int rc = find_group(kv, items, count, records, &done);
    if (rc != QUIRE_OK) {
        return quire_fail_at_row(rc, first + (int64_t)done);
    }
    for (size_t i = 0; keys->validity != NULL && i < count; i++) {
        records[i] = quire_rows_null(keys, first + (int64_t)i) ? NULL : records[i];
    }
    return QUIRE_OK;
}

static int get_row(quire_kv *kv, const quire_record *record, quire_buffer *value, quire_column *values) {
    if (record == NULL) {
        return quire_column_add_null(values);
    }
    QUIRE_TRY(quire_record_value(view_of(kv), record, value));
    return quire_column_add(values, value->bytes, value->count);
}

static int get_rows(quire_kv *kv, const quire_rows *rows, quire_buffer *value, quire_column *values) {
    const quire_record *records[QUIRE_GROUP_ITEMS];
    size_t count;
    for (int64_t row = 0; row < rows->row_count; row += (int64_t)count) {
        count = group_of(rows->row_count - row);
        QUIRE_TRY(find_rows(kv, rows, row, count, records));
        for (size_t i = 0; i < count; i++) {
            int rc = get_row(kv, records[i], value, values);
            QUIRE_TRY(rc == QUIRE_OK ? rc : quire_fail_at_row(rc, row + (int64_t)i));
        }
    }
    return QUIRE_OK;
}

int quire_kv_get_many(quire_kv *kv, const quire_rows *keys, quire_column *values) {
    quire_rows rows;
    QUIRE_TRY(quire_rows_open("keys", keys, true, &rows));
    QUIRE_TRY(quire_handle_enter(&kv->at));
    quire_buffer value = {0};
    int rc = get_rows(kv, &rows, &value, values);
    quire_buffer_free(&value);
    quire_handle_leave(&kv->at);
    return rc;
}

int quire_kv_contains_many(quire_kv *kv, const quire_rows *keys, uint8_t *found) {
    quire_rows rows;
    QUIRE_TRY(quire_rows_open("keys", keys, true, &rows));
    QUIRE_TRY(quire_handle_enter(&kv->at));
    int rc = QUIRE_OK;
    size_t count;
    for (int64_t row = 0; row < rows.row_count && rc == QUIRE_OK; row += (int64_t)count) {
        const quire_record *records[QUIRE_GROUP_ITEMS];
        count = group_of(rows.row_count - row);
        rc = find_rows(kv, &rows, row, count, records);
        for (size_t i = 0; i < count && rc == QUIRE_OK; i++) {
            found[row + (int64_t)i] = records[i] != NULL;
        }
    }
    quire_handle_leave(&kv->at);
    return rc;
}

/* Values of some keys that were found, until one had to be copied. */
static int get_group(quire_kv *kv, quire_item *items, size_t count, quire_buffer *buffer, size_t *done, bool *copied) {
    const quire_record *records[QUIRE_GROUP_ITEMS];
    size_t found;
    QUIRE_TRY(find_group(kv, items, count, records, &found));
    for (size_t i = 0; i < count && !*copied; i++, ++*done) {
        items[i].value = NULL;
        items[i].value_bytes = 0;
        if (records[i] == NULL) {
            continue;
        }
        QUIRE_TRY(quire_record_value(view_of(kv), records[i], buffer));
        QUIRE_TRY(keep(kv, buffer));
        items[i].value = buffer->bytes;
        items[i].value_bytes = (uint32_t)buffer->count;
        *copied = buffer->bytes == buffer->own;
    }
    return QUIRE_OK;
}

int quire_kv_get_items(quire_kv *kv, quire_item *items, size_t count, quire_buffer *buffer, size_t *done) {
    *done = 0;
    QUIRE_TRY(quire_handle_enter(&kv->at));
    /* Pages that a weak snapshot makes up are gone afterwards, so what lies in them is copied, which ends the call. */
    size_t most = view_of(kv)->weak == NULL ? QUIRE_GROUP_ITEMS : 1;
    bool copied = false;
    int rc = QUIRE_OK;
    while (rc == QUIRE_OK && *done < count && !copied) {
        size_t left = count - *done;
        rc = get_group(kv, items + *done, left < most ? left : most, buffer, done, &copied);
    }
    quire_handle_leave(&kv->at);
    return rc;
}

/* Puts a group; *done grows by how many. */
static int put_group(quire_kv *kv, const quire_item *items, size_t count, size_t *done) {
    if (kv->ops->put_items != NULL) {
        size_t put = 0;
        int rc = kv->ops->put_items(kv->at.set, items, count, &put);
        *done += put;
        return rc;
    }
    for (size_t i = 0; i < count; i++, ++*done) {
        QUIRE_TRY(put_entered(kv, &items[i], false));
    }
    return QUIRE_OK;
}

int quire_kv_put_items(quire_kv *kv, const quire_item *items, size_t count, size_t *done) {
    *done = 0;
    QUIRE_TRY(quire_handle_enter_write(&kv->at));
    int rc = QUIRE_OK;
    while (rc == QUIRE_OK && *done < count) {
        rc = put_group(kv, items + *done, group_of((int64_t)(count - *done)), done);
    }
    quire_handle_leave(&kv->at);
    return rc;
}

static int put_rows(quire_kv *kv, const quire_rows *keys, const quire_rows *values, int64_t *row) {
    quire_item items[QUIRE_GROUP_ITEMS];
    while (*row < keys->row_count) {
        size_t count = group_of(keys->row_count - *row), done = 0;
        rows_items(keys, values, *row, count, items);
        int rc = put_group(kv, items, count, &done);
        *row += (int64_t)done;
        QUIRE_TRY(rc);
    }
    return QUIRE_OK;
}

static int append_rows(quire_kv *kv, const quire_rows *keys, const quire_rows *values, int64_t *row) {
    for (; *row < keys->row_count; ++*row) {
        quire_item item;
        ahead(kv, keys, *row);
        rows_items(keys, values, *row, 1, &item);
        QUIRE_TRY(put_entered(kv, &item, true));
    }
    return QUIRE_OK;
}

static int change_many(quire_kv *kv, const quire_rows *keys, const quire_rows *values, int64_t *done,
                       int (*change)(quire_kv *kv, const quire_rows *keys, const quire_rows *values, int64_t *row)) {
    quire_rows key_rows;
    quire_rows value_rows;
    *done = 0;
    QUIRE_TRY(quire_rows_open("keys", keys, false, &key_rows));
    QUIRE_TRY(quire_rows_open("values", values, false, &value_rows));
    if (key_rows.row_count != value_rows.row_count) {
        return quire_fail(QUIRE_E_INVALID, "%" PRId64 " keys but %" PRId64 " values", key_rows.row_count,
                          value_rows.row_count);
    }
    QUIRE_TRY(quire_handle_enter_write(&kv->at));
    int rc = change(kv, &key_rows, &value_rows, done);
    quire_handle_leave(&kv->at);
    return rc == QUIRE_OK ? rc : quire_fail_at_row(rc, *done);
}

int quire_kv_put_many(quire_kv *kv, const quire_rows *keys, const quire_rows *values, int64_t *done) {
    return change_many(kv, keys, values, done, put_rows);
}

int quire_kv_append_many(quire_kv *kv, const quire_rows *keys, const quire_rows *values, int64_t *done) {
    return change_many(kv, keys, values, done, append_rows);
}

/* Takes values that lie back to back, each behind its length, apart. */
static int add_values(const quire_buffer *values, uint64_t value_count, quire_column *column) {
    size_t at = 0;
    for (uint64_t i = 0; i < value_count; i++) {
        uint32_t value_bytes;
        if (values->count - at < sizeof value_bytes) {
            break;
        }
        memcpy(&value_bytes, values->bytes + at, sizeof value_bytes);
        at += sizeof value_bytes;
        if (values->count - at < value_bytes) {
            break;
        }
        QUIRE_TRY(quire_column_add(column, values->bytes + at, value_bytes));
        at += value_bytes;
        if (i + 1 == value_count && at == values->count) {
            return QUIRE_OK;
        }
    }
    return quire_fail(QUIRE_E_CORRUPT, "the key is said to have %" PRIu64 " values, which %zu bytes do not hold",
                      value_count, values->count);
}

static int get_list(quire_kv *kv, const quire_rows *keys, int64_t row, quire_buffer *list, quire_column *values) {
    const quire_record *record;
    size_t key_bytes;
    uint64_t value_count;
    if (quire_rows_null(keys, row)) {
        return QUIRE_OK;
    }
    const uint8_t *key = quire_rows_at(keys, row, &key_bytes);
    int rc = find(kv, key, key_bytes, &record);
    if (rc == QUIRE_E_NOTFOUND) {
        return QUIRE_OK;
    }
    QUIRE_TRY(rc);
    QUIRE_TRY(quire_record_values(view_of(kv), record, list, &value_count));
    return add_values(list, value_count, values);
}

int quire_kv_get_lists(quire_kv *kv, const quire_rows *keys, int64_t *offsets, quire_column *values) {
    quire_rows rows;
    QUIRE_TRY(quire_rows_open("keys", keys, true, &rows));
    QUIRE_TRY(quire_handle_enter(&kv->at));
    int rc = QUIRE_OK;
    quire_buffer list = {0};
    int64_t first = values->row_count;
    offsets[0] = 0;
    for (int64_t row = 0; row < rows.row_count && rc == QUIRE_OK; row++) {
        ahead(kv, &rows, row);
        rc = get_list(kv, &rows, row, &list, values);
        rc = rc == QUIRE_OK ? rc : quire_fail_at_row(rc, row);
        offsets[row + 1] = values->row_count - first;
    }
    quire_buffer_free(&list);
    quire_handle_leave(&kv->at);
    return rc;
}

static int check_lists(const int64_t *offsets, int64_t row_count, int64_t value_count) {
    for (int64_t row = 0; row < row_count; row++) {
        if (offsets[row] < 0 || offsets[row + 1] < offsets[row] || offsets[row + 1] > value_count) {
            return quire_fail(QUIRE_E_INVALID,
                              "list %" PRId64 " is said to be the values %" PRId64 " to %" PRId64
                              ": offsets must not fall, and there are %" PRId64 " values",
                              row, offsets[row], offsets[row + 1], value_count);
        }
    }
    return QUIRE_OK;
}

static int put_list(quire_kv *kv, const quire_rows *keys, int64_t row, const quire_rows *values, int64_t first,
                    int64_t end) {
    size_t key_bytes;
    const uint8_t *key = quire_rows_at(keys, row, &key_bytes);
    if (first == end) {
        int rc = remove_entered(kv, key, key_bytes);
        return rc == QUIRE_E_NOTFOUND ? QUIRE_OK : rc;
    }
    for (int64_t i = first; i < end; i++) {
        size_t value_bytes;
        const uint8_t *value = quire_rows_at(values, i, &value_bytes);
        quire_item item = {key, value, (uint32_t)key_bytes, (uint32_t)value_bytes};
        QUIRE_TRY(put_entered(kv, &item, i != first));
    }
    return QUIRE_OK;
}

int quire_kv_put_lists(quire_kv *kv, const quire_rows *keys, const int64_t *offsets, const quire_rows *values,
                       int64_t *done) {
    quire_rows key_rows;
    quire_rows value_rows;
    *done = 0;
    QUIRE_TRY(quire_rows_open("keys", keys, false, &key_rows));
    QUIRE_TRY(quire_rows_open("values", values, false, &value_rows));
    QUIRE_TRY(check_lists(offsets, key_rows.row_count, value_rows.row_count));
    QUIRE_TRY(quire_handle_enter_write(&kv->at));
    int rc = QUIRE_OK;
    int64_t row = 0;
    for (; row < key_rows.row_count; row++) {
        ahead(kv, &key_rows, row);
        rc = put_list(kv, &key_rows, row, &value_rows, offsets[row], offsets[row + 1]);
        if (QUIRE_UNLIKELY(rc != QUIRE_OK)) {
            rc = quire_fail_at_row(rc, row);
            break;
        }
    }
    quire_handle_leave(&kv->at);
    *done = row;
    return rc;
}

int quire_kv_remove_many(quire_kv *kv, const quire_rows *keys, uint8_t *found, int64_t *removed) {
    quire_rows rows;
    *removed = 0;
    QUIRE_TRY(quire_rows_open("keys", keys, true, &rows));
    QUIRE_TRY(quire_handle_enter_write(&kv->at));
    int rc = QUIRE_OK;
    int64_t removed_count = 0;
    for (int64_t row = 0; row < rows.row_count && rc == QUIRE_OK; row++) {
        ahead(kv, &rows, row);
        rc = QUIRE_E_NOTFOUND;
        if (!quire_rows_null(&rows, row)) {
            size_t key_bytes;
            const uint8_t *key = quire_rows_at(&rows, row, &key_bytes);
            rc = remove_entered(kv, key, key_bytes);
        }
        removed_count += rc == QUIRE_OK;
        if (found != NULL) {
            found[row] = rc == QUIRE_OK;
        }
        rc = rc == QUIRE_OK || rc == QUIRE_E_NOTFOUND ? QUIRE_OK : quire_fail_at_row(rc, row);
    }
    quire_handle_leave(&kv->at);
    *removed = removed_count;
    return rc;
}

/* ------------------------------------------------------------------------------------------------ cursors */

static int bound_copy(const uint8_t *bytes, size_t count, quire_buffer *bound, bool *has) {
    *has = bytes != NULL;
    if (bytes == NULL) {
        return QUIRE_OK;
    }
    *bound = (quire_buffer){.bytes = bytes, .count = count, .copy = true};
    return quire_buffer_keep(bound);
}

/* To the cursor's first record, or the place seek asks for. */
static int cursor_rewind(quire_cursor *cursor) {
    cursor->position = (quire_position){0};
    cursor->ended = false;
    const quire_buffer *start = cursor->reverse ? &cursor->hi : &cursor->lo;
    bool has_start = cursor->reverse ? cursor->has_hi : cursor->has_lo;
    if (!has_start) {
        return QUIRE_OK;
    }
    return cursor->ops->seek(&cursor->view, &cursor->position, cursor->reverse, start->bytes, start->count);
}

static int cursor_fill(quire_kv *kv, const uint8_t *lo, size_t lo_bytes, const uint8_t *hi, size_t hi_bytes,
                       quire_cursor *cursor) {
    QUIRE_TRY(bound_copy(lo, lo_bytes, &cursor->lo, &cursor->has_lo));
    QUIRE_TRY(bound_copy(hi, hi_bytes, &cursor->hi, &cursor->has_hi));
    QUIRE_TRY(quire_handle_enter(&kv->at));
    int rc = QUIRE_OK;
    if (cursor->passing) {
        cursor->view = *view_of(kv);
    } else {
        rc = quire_handle_pin(&kv->at, &cursor->snap, &cursor->view);
    }
    quire_handle_leave(&kv->at);
    return rc == QUIRE_OK ? cursor_rewind(cursor) : rc;
}

int quire_cursor_open(quire_kv *kv, const uint8_t *lo, size_t lo_bytes, const uint8_t *hi, size_t hi_bytes,
                      unsigned flags, quire_cursor **cursor) {
    if ((flags & ~(unsigned)(QUIRE_CURSOR_REVERSE | QUIRE_CURSOR_PASSING)) != 0) {
        return quire_fail(QUIRE_E_INVALID, "cursor flags %#x; only %#x are known", flags,
                          QUIRE_CURSOR_REVERSE | QUIRE_CURSOR_PASSING);
    }
    if (kv->ops->seek == NULL && (lo != NULL || hi != NULL || (flags & QUIRE_CURSOR_REVERSE) != 0)) {
        return quire_fail(QUIRE_E_INVALID, "an unordered map has no bounds and no reverse: use an ordered map");
    }
    quire_cursor *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for a cursor of %zu bytes", sizeof *made);
    }
    made->ops = kv->ops;
    made->reverse = (flags & QUIRE_CURSOR_REVERSE) != 0;
    made->passing = (flags & QUIRE_CURSOR_PASSING) != 0;
    int rc = cursor_fill(kv, lo, lo_bytes, hi, hi_bytes, made);
    if (rc != QUIRE_OK) {
        quire_cursor_close(made);
        return rc;
    }
    *cursor = made;
    return QUIRE_OK;
}

void quire_cursor_close(quire_cursor *cursor) {
    if (cursor == NULL) {
        return;
    }
    if (cursor->snap != NULL) {
        quire_snap_release(cursor->snap);
    }
    quire_buffer_free(&cursor->lo);
    quire_buffer_free(&cursor->hi);
    quire_buffer_free(&cursor->key);
    quire_buffer_free(&cursor->value);
    free(cursor);
}

int quire_cursor_seek(quire_cursor *cursor, const uint8_t *key, size_t key_bytes) {
    if (cursor->ops->seek == NULL) {
        return quire_fail(QUIRE_E_INVALID, "an unordered map cannot be searched by order: use an ordered map");
    }
    QUIRE_TRY(quire_argument_check("key", &key, key_bytes));
    QUIRE_TRY(quire_view_usable(&cursor->view));
    bool outside = cursor->reverse
                       ? cursor->has_hi && quire_bytes_order(key, key_bytes, cursor->hi.bytes, cursor->hi.count) > 0
                       : cursor->has_lo && quire_bytes_order(key, key_bytes, cursor->lo.bytes, cursor->lo.count) < 0;
    if (outside) {
        return cursor_rewind(cursor);
    }
    cursor->position = (quire_position){0};
    cursor->ended = false;
    return cursor->ops->seek(&cursor->view, &cursor->position, cursor->reverse, key, key_bytes);
}

/* The next record within the far bound. */
static int cursor_step(quire_cursor *cursor, const quire_record **record) {
    if (cursor->ended) {
        return QUIRE_E_NOTFOUND;
    }
    int rc = cursor->ops->next(&cursor->view, &cursor->position, cursor->reverse, record);
    const quire_buffer *end = cursor->reverse ? &cursor->lo : &cursor->hi;
    bool has_end = cursor->reverse ? cursor->has_lo : cursor->has_hi;
    if (rc == QUIRE_OK && has_end) {
        int order;
        QUIRE_TRY(quire_record_compare(&cursor->view, *record, end->bytes, end->count, &order));
        rc = (cursor->reverse ? order >= 0 : order < 0) ? QUIRE_OK : QUIRE_E_NOTFOUND;
    }
    cursor->ended = rc == QUIRE_E_NOTFOUND;
    return rc;
}

int quire_cursor_next(quire_cursor *cursor, quire_buffer *key, quire_buffer *value) {
    const quire_record *record;
    QUIRE_TRY(quire_view_usable(&cursor->view));
    QUIRE_TRY(cursor_step(cursor, &record));
    QUIRE_TRY(quire_record_key(&cursor->view, record, key));
    return quire_record_value(&cursor->view, record, value);
}

int quire_cursor_next_all(quire_cursor *cursor, quire_buffer *key, quire_buffer *values, uint64_t *value_count) {
    const quire_record *record;
    QUIRE_TRY(quire_view_usable(&cursor->view));
    QUIRE_TRY(cursor_step(cursor, &record));
    QUIRE_TRY(quire_record_key(&cursor->view, record, key));
    return quire_record_values(&cursor->view, record, values, value_count);
}

/* One record to the columns; *bytes grows by what it added. */
static int cursor_add(quire_cursor *cursor, const quire_record *record, quire_column *keys, quire_column *values,
                      size_t *bytes) {
    if (keys != NULL) {
        QUIRE_TRY(quire_record_key(&cursor->view, record, &cursor->key));
        QUIRE_TRY(quire_column_add(keys, cursor->key.bytes, cursor->key.count));
        *bytes += cursor->key.count;
    }
    if (values != NULL) {
        QUIRE_TRY(quire_record_value(&cursor->view, record, &cursor->value));
        QUIRE_TRY(quire_column_add(values, cursor->value.bytes, cursor->value.count));
        *bytes += cursor->value.count;
    }
    return QUIRE_OK;
}

int quire_cursor_next_many(quire_cursor *cursor, int64_t row_count, size_t bytes_max, quire_column *keys,
                           quire_column *values, int64_t *rows) {
    QUIRE_TRY(quire_view_usable(&cursor->view));
    int64_t row = 0;
    size_t bytes = 0;
    while (row < row_count && bytes <= bytes_max) {
        const quire_record *record;
        int rc = cursor_step(cursor, &record);
        if (rc == QUIRE_E_NOTFOUND) {
            break;
        }
        QUIRE_TRY(rc);
        QUIRE_TRY(cursor_add(cursor, record, keys, values, &bytes));
        row++;
    }
    *rows = row;
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ differences */

/* A record of the newer page at hand and, if it was found on the older one, what it was there. */
typedef struct {
    const quire_record *newer;
    const quire_record *older;
} record_pair;

typedef struct {
    const quire_kv_ops *ops;
    const quire_view *newer;
    const quire_view *older; /* NULL: there was nothing */
    uint32_t since;          /* epoch of the older state */
    quire_change_visit visit;
    const quire_footprint_visit *footprints; /* in place of visit */
    void *context;
    quire_buffer key, values;
    quire_buffer amended;             /* own holds a record as it was before it was amended */
    const quire_record *older_record; /* of the change being visited, NULL: not on the page */
    quire_page_id page;
    uint32_t stamp_oldest;
    /* A record mostly stays where it is, so that what it was is found without a look-up. */
    record_pair *here;
    size_t here_count, here_capacity;
    size_t here_next;
    /* Pages that differ, to be visited together. */
    quire_page_id waiting[QUIRE_AHEAD_PAGES];
    bool waiting_in_use[QUIRE_AHEAD_PAGES];
    size_t waiting_count;
} difference;

static int difference_newer_record(void *context, const quire_record *record) {
    difference *d = context;
    if (d->here_count == d->here_capacity) {
        size_t capacity = d->here_capacity == 0 ? 256 : d->here_capacity * 2;
        void *here = realloc(d->here, capacity * sizeof *d->here);
        if (here == NULL) {
            return quire_fail(QUIRE_E_NOMEM, "no memory for the %zu records of a page", capacity);
        }
        d->here = here;
        d->here_capacity = capacity;
    }
    d->here[d->here_count++] = (record_pair){.newer = record};
    if (record->stamp < d->stamp_oldest) {
        d->stamp_oldest = record->stamp;
    }
    return QUIRE_OK;
}

/* QUIRE_OK if the newer page holds the key in d->key close to where the last one was, else QUIRE_E_NOTFOUND. */
static int difference_pair(difference *d, const quire_record *older) {
    size_t end = d->here_next + SAME_PAGE_WINDOW;
    for (size_t i = d->here_next; i < end && i < d->here_count; i++) {
        int rc = QUIRE_OK;
        bool same = quire_record_key_equals(d->newer, d->here[i].newer, d->key.bytes, d->key.count, &rc);
        QUIRE_TRY(rc);
        if (same) {
            d->here[i].older = older;
            d->here_next = i + 1;
            return QUIRE_OK;
        }
    }
    return QUIRE_E_NOTFOUND;
}

static int difference_removed(difference *d, const quire_record *record) {
    if (d->footprints != NULL) {
        return d->footprints->record(d->context, d->page, record->stamp, d->key.bytes, d->key.count, NULL, 0, 0);
    }
    d->older_record = record;
    quire_change change = {.key = d->key.bytes, .key_bytes = d->key.count, .older_here = true, .walk = d};
    return d->visit(d->context, &change);
}

/* Most records of a page that differs are the same, in the same order: those are told apart from the rest with little ado. */
static bool same_inline_key(const quire_record *left, const quire_record *right) {
    uint32_t bytes = quire_record_key_part(left), at = 0;
    if (left->key_word != right->key_word || !quire_record_key_is_inline(left)) {
        return false;
    }
    for (; at + 8 <= bytes; at += 8) {
        uint64_t words[2];
        memcpy(&words[0], left->bytes + at, 8);
        memcpy(&words[1], right->bytes + at, 8);
        if (words[0] != words[1]) {
            return false;
        }
    }
    return at == bytes || memcmp(left->bytes + at, right->bytes + at, bytes - at) == 0;
}

static int difference_older_record(void *context, const quire_record *record) {
    difference *d = context;
    const quire_record *found;
    quire_page_id page;
    if (QUIRE_LIKELY(d->here_next < d->here_count && same_inline_key(d->here[d->here_next].newer, record))) {
        d->here[d->here_next++].older = record;
        return QUIRE_OK;
    }
    QUIRE_TRY(quire_record_key(d->older, record, &d->key));
    int rc = difference_pair(d, record);
    if (rc != QUIRE_E_NOTFOUND) {
        return rc;
    }
    rc = d->ops->locate(d->newer, d->key.bytes, d->key.count, &found, &page);
    if (rc == QUIRE_E_NOTFOUND) {
        return difference_removed(d, record);
    }
    QUIRE_TRY(rc);
    return d->footprints != NULL && page != d->page && found->stamp <= d->since
               ? d->footprints->moved(d->context, d->page, page, found->stamp)
               : QUIRE_OK;
}

/* The stamp that the record with the key in d->key had before, 0: it was not there. */
static int difference_before(difference *d, const quire_record *older, uint32_t *stamp) {
    int rc = QUIRE_OK;
    *stamp = 0;
    if (older == NULL) {
        rc = d->older == NULL ? QUIRE_E_NOTFOUND : d->ops->find(d->older, NULL, d->key.bytes, d->key.count, &older);
    }
    if (rc == QUIRE_OK) {
        *stamp = older->stamp;
    }
    return rc == QUIRE_E_NOTFOUND ? QUIRE_OK : rc;
}

static int difference_visit_newer(difference *d, const record_pair *pair) {
    if (pair->newer->stamp <= d->since) {
        return QUIRE_OK;
    }
    QUIRE_TRY(quire_record_key(d->newer, pair->newer, &d->key));
    quire_change change = {.key = d->key.bytes,
                           .key_bytes = d->key.count,
                           .older_here = pair->older != NULL,
                           .walk = d->older == NULL ? NULL : d};
    QUIRE_TRY(quire_record_values(d->newer, pair->newer, &d->values, &change.value_count));
    change.values = d->values.bytes;
    change.values_bytes = d->values.count;
    if (d->footprints == NULL) {
        d->older_record = pair->older;
        return d->visit(d->context, &change);
    }
    uint32_t before;
    QUIRE_TRY(difference_before(d, pair->older, &before));
    return d->footprints->record(d->context, d->page, before, change.key, change.key_bytes, change.values,
                                 change.values_bytes, change.value_count);
}

/* One on a page that the older state does not have. */
static int difference_unpaired_record(void *context, const quire_record *record) {
    difference *d = context;
    if (record->stamp < d->stamp_oldest) {
        d->stamp_oldest = record->stamp;
    }
    return difference_visit_newer(d, &(record_pair){.newer = record});
}

/* What records were, of which all but the first word was amended and noted, in memory of our own: whoever is visited may do what lets the notes
 * go. */
static int difference_amended(difference *d, const quire_amendments *amendments, record_pair *pairs) {
    size_t kept = offsetof(quire_record, stamp), bytes = 0;
    for (size_t i = 0; i < amendments->count; i++) {
        bytes += (kept + amendments->items[i].count + 7) & ~(size_t)7;
    }
    QUIRE_TRY(quire_buffer_grow(&d->amended, bytes));
    uint8_t *record = d->amended.own;
    for (size_t i = 0; i < amendments->count; i++) {
        memcpy(record, pairs[i].newer, kept);
        memcpy(record + kept, amendments->items[i].old, amendments->items[i].count);
        pairs[i].older = (const quire_record *)record;
        record += (kept + amendments->items[i].count + 7) & ~(size_t)7;
    }
    return QUIRE_OK;
}

/* A page on which nothing but values was changed, in place: what was noted of it tells all, so the rest of its records is not looked at.
 * *done is false if that is not so. */
static int difference_of_notes(difference *d, quire_page_id id, bool *done) {
    quire_amendments amendments;
    record_pair pairs[QUIRE_AMENDMENTS_MAX];
    *done = false;
    /* Footprints are of all records of a page. */
    if (d->footprints != NULL || d->ops->amended == NULL || id >> 31 != 0 ||
        !quire_page_amendments(d->older, d->newer, id, &amendments)) {
        return QUIRE_OK;
    }
    for (size_t i = 0; i < amendments.count; i++) {
        const quire_amendment *item = &amendments.items[i];
        pairs[i].newer = d->ops->amended(d->newer, amendments.page, item->offset, item->count);
        if (pairs[i].newer == NULL) {
            return QUIRE_OK;
        }
    }
    *done = true;
    QUIRE_TRY(difference_amended(d, &amendments, pairs));
    for (size_t i = 0; i < amendments.count; i++) {
        QUIRE_TRY(difference_visit_newer(d, &pairs[i]));
    }
    return QUIRE_OK;
}

/* A page that differs: what was on it and is nowhere now, and what is new on it. */
static int difference_page(void *context, quire_page_id id, bool in_use) {
    difference *d = context;
    bool was_in_use = d->older != NULL && quire_page_entry(d->older, id) != 0;
    if (d->older != NULL) {
        quire_view_forget(d->older);
    }
    d->page = id;
    d->stamp_oldest = UINT32_MAX;
    if (!was_in_use) {
        QUIRE_TRY(d->older == NULL ? QUIRE_OK : quire_view_whole(d->older));
        QUIRE_TRY(in_use ? d->ops->page_records(d->newer, id, difference_unpaired_record, d) : QUIRE_OK);
        return d->footprints == NULL ? QUIRE_OK : d->footprints->page(d->context, id, d->stamp_oldest);
    }
    bool done;
    QUIRE_TRY(difference_of_notes(d, id, &done));
    if (done) {
        return QUIRE_OK;
    }
    d->here_count = 0;
    d->here_next = 0;
    if (in_use) {
        QUIRE_TRY(d->ops->page_records(d->newer, id, difference_newer_record, d));
    }
    QUIRE_TRY(d->ops->page_records(d->older, id, difference_older_record, d));
    for (size_t i = 0; i < d->here_count; i++) {
        QUIRE_TRY(difference_visit_newer(d, &d->here[i]));
    }
    return d->footprints == NULL ? QUIRE_OK : d->footprints->page(d->context, id, d->stamp_oldest);
}

int quire_change_older(const quire_change *change, quire_buffer *values, uint64_t *value_count) {
    const difference *d = change->walk;
    if (d == NULL) {
        return QUIRE_E_NOTFOUND;
    }
    const quire_record *record = d->older_record;
    if (record == NULL) {
        QUIRE_TRY(d->ops->find(d->older, NULL, change->key, change->key_bytes, &record));
    }
    return quire_record_values(d->older, record, values, value_count);
}

static int difference_waiting(difference *d) {
    size_t count = d->waiting_count;
    d->waiting_count = 0;
    if (d->older != NULL) {
        quire_view_ahead(d->older, d->waiting, count);
    }
    for (size_t i = 0; i < count; i++) {
        QUIRE_TRY(difference_page(d, d->waiting[i], d->waiting_in_use[i]));
    }
    return QUIRE_OK;
}

static int difference_add(void *context, quire_page_id id, bool in_use) {
    difference *d = context;
    d->waiting[d->waiting_count] = id;
    d->waiting_in_use[d->waiting_count++] = in_use;
    return d->waiting_count == QUIRE_AHEAD_PAGES ? difference_waiting(d) : QUIRE_OK;
}

static int difference_run(difference *d) {
    QUIRE_TRY(quire_view_changed(d->newer, d->since, difference_add, d));
    QUIRE_TRY(difference_waiting(d));
    /* A table that was emptied has no nodes left to tell of the ids it had. */
    uint32_t older_limit = d->older == NULL ? 0 : d->older->table[0].page_limit;
    for (uint32_t id = d->newer->table[0].page_limit; id < older_limit; id++) {
        QUIRE_TRY(difference_page(d, id, false));
    }
    return QUIRE_OK;
}

int quire_view_comes_from(const quire_view *newer, const quire_view *older) {
    if (newer->epoch < older->epoch) {
        return quire_fail(QUIRE_E_INVALID,
                          "the newer state is of epoch %" PRIu32 ", the older of %" PRIu32 ": exchange them",
                          newer->epoch, older->epoch);
    }
    if (!quire_epoch_follows(newer->arena, newer->epoch, older->epoch)) {
        return quire_fail(QUIRE_E_INVALID,
                          "a restore lies between epochs %" PRIu32 " and %" PRIu32
                          ", so that the newer state did not come from the older: read both in full",
                          older->epoch, newer->epoch);
    }
    return QUIRE_OK;
}

static int view_as_it_is(const quire_handle *handle, quire_view *view) {
    *view = *quire_handle_view(handle);
    if (handle->set != NULL) {
        view->epoch = *handle->set->epoch_writing;
    }
    return QUIRE_OK;
}

/* d: what to call. older may be NULL. */
static int differences(quire_kv *newer, quire_kv *older, difference *d) {
    if (older != NULL &&
        (older->at.set != NULL || older->ops != newer->ops || older->at.view.arena != view_of(newer)->arena)) {
        return quire_fail(QUIRE_E_INVALID,
                          "the older state must be a snapshot's map, of the same kind and arena as the newer");
    }
    if (older != NULL) {
        QUIRE_TRY(quire_view_usable(&older->at.view));
    }
    quire_snap *snap = NULL;
    quire_view view = {0};
    /* A weak snapshot can be read only while nothing is written: then the newer state needs no pin. */
    quire_arena *stopped = older != NULL && older->at.view.weak != NULL ? older->at.view.arena : NULL;
    QUIRE_TRY(stopped != NULL ? quire_arena_enter(stopped) : QUIRE_OK);
    int rc = quire_handle_enter(&newer->at);
    if (rc == QUIRE_OK) {
        rc = stopped == NULL ? quire_handle_pin(&newer->at, &snap, &view) : view_as_it_is(&newer->at, &view);
        quire_handle_leave(&newer->at);
    }
    if (rc != QUIRE_OK) {
        if (stopped != NULL) {
            quire_arena_leave(stopped);
        }
        return rc;
    }
    if (older != NULL) {
        rc = quire_view_comes_from(&view, &older->at.view);
        d->older = &older->at.view;
        d->since = older->at.view.epoch;
    }
    d->ops = newer->ops;
    d->newer = &view;
    if (rc == QUIRE_OK) {
        rc = difference_run(d);
    }
    quire_buffer_free(&d->key);
    quire_buffer_free(&d->values);
    quire_buffer_free(&d->amended);
    free(d->here);
    if (snap != NULL) {
        quire_snap_release(snap);
    }
    if (stopped != NULL) {
        quire_view_forget(&older->at.view);
        quire_arena_leave(stopped);
    }
    return rc;
}

int quire_kv_changes(quire_kv *newer, quire_kv *older, quire_change_visit visit, void *context) {
    difference d = {.visit = visit, .context = context};
    return differences(newer, older, &d);
}

/* ------------------------------------------------------------------------------------------------ footprints */

int quire_kv_footprints(quire_kv *newer, quire_kv *older, const quire_footprint_visit *visit, void *context) {
    difference d = {.footprints = visit, .context = context};
    return differences(newer, older, &d);
}

typedef struct {
    const quire_view *view;
    uint32_t stamp_max;
    uint32_t epoch; /* what to stamp with; 0: not yet */
    quire_touch_visit visit;
    void *context;
    quire_buffer key, values;
    uint64_t count;
    uint32_t stamp_rest;
} touch;

static int touch_record(void *context, const quire_record *record) {
    touch *t = context;
    if (record->stamp > t->stamp_max) {
        t->stamp_rest = record->stamp < t->stamp_rest ? record->stamp : t->stamp_rest;
        return QUIRE_OK;
    }
    if (t->epoch != 0) {
        ((quire_record *)(uintptr_t)record)->stamp = t->epoch; /* in the page that quire_page_write gave */
        return QUIRE_OK;
    }
    t->count++;
    if (t->visit == NULL) {
        return QUIRE_OK;
    }
    uint64_t value_count;
    QUIRE_TRY(quire_record_key(t->view, record, &t->key));
    QUIRE_TRY(quire_record_values(t->view, record, &t->values, &value_count));
    return t->visit(t->context, record->stamp, t->key.bytes, t->key.count, t->values.bytes, t->values.count,
                    value_count);
}

/* Reserves first: once a record was given to visit, it will be stamped. */
static int touch_entered(quire_kv *kv, quire_page_id page, touch *t) {
    quire_set *set = kv->at.set;
    QUIRE_TRY(quire_arena_reserve(set->view.arena, 1));
    QUIRE_TRY(kv->ops->page_records(&set->view, page, touch_record, t));
    if (t->count == 0) {
        return QUIRE_OK;
    }
    if (quire_page_write(set, page) == NULL) {
        return quire_fail(QUIRE_E_CORRUPT, "page %" PRIu32 " of '%s' cannot be written", page, set->name);
    }
    t->epoch = *set->epoch_writing;
    t->stamp_rest = UINT32_MAX;
    return kv->ops->page_records(&set->view, page, touch_record, t);
}

int quire_kv_touch(quire_kv *kv, quire_page_id page, uint32_t stamp_max, quire_touch_visit visit, void *context,
                   uint32_t *stamp_rest) {
    touch t = {.stamp_max = stamp_max, .visit = visit, .context = context, .stamp_rest = UINT32_MAX};
    QUIRE_TRY(quire_handle_enter_write(&kv->at));
    t.view = view_of(kv);
    int rc = touch_entered(kv, page, &t);
    quire_handle_leave(&kv->at);
    quire_buffer_free(&t.key);
    quire_buffer_free(&t.values);
    *stamp_rest = t.stamp_rest;
    return rc;
}

uint32_t quire_kv_page_limit(quire_kv *kv) {
    return view_of(kv)->table[0].page_limit;
}

typedef struct {
    quire_stamp_visit visit;
    void *context;
    quire_page_id page;
} stamp_walk;

static int stamp_record(void *context, const quire_record *record) {
    const stamp_walk *walk = context;
    return walk->visit(walk->context, walk->page, record->stamp);
}

int quire_kv_stamps(quire_kv *kv, quire_stamp_visit visit, void *context) {
    QUIRE_TRY(quire_handle_enter(&kv->at));
    stamp_walk walk = {visit, context, 0};
    int rc = QUIRE_OK;
    for (; rc == QUIRE_OK && walk.page < view_of(kv)->table[0].page_limit; walk.page++) {
        rc = kv->ops->page_records(view_of(kv), walk.page, stamp_record, &walk);
    }
    quire_handle_leave(&kv->at);
    return rc;
}

/* ------------------------------------------------------------------------------------------------ checks */

int quire_kv_check(quire_kv *kv) {
    QUIRE_TRY(quire_handle_enter(&kv->at));
    int rc = kv->ops->check(view_of(kv));
    quire_handle_leave(&kv->at);
    return rc;
}

int quire_kv_stats_get(quire_kv *kv, quire_kv_stats *stats) {
    QUIRE_TRY(quire_handle_enter(&kv->at));
    const quire_view *view = view_of(kv);
    uint64_t count;
    int rc = kv->ops->count(view, &count);
    if (rc == QUIRE_OK) {
        *stats = (quire_kv_stats){.count = count,
                                  .pages = (uint64_t)view->table[0].page_count + view->table[1].page_count,
                                  .index_pages = view->table[1].page_count};
    }
    quire_handle_leave(&kv->at);
    return rc;
}

int quire_census_open(const quire_view *view, quire_page_census *census) {
    *census = (quire_page_census){.view = view};
    for (int table = 0; table < 2; table++) {
        size_t bytes = (size_t)view->table[table].page_limit / 8 + 1;
        census->seen[table] = calloc(bytes, 1);
        if (census->seen[table] == NULL) {
            free(census->seen[0]);
            return quire_fail(QUIRE_E_NOMEM, "no memory for a page census of %zu bytes", bytes);
        }
    }
    return QUIRE_OK;
}

int quire_census_count(void *context, quire_page_id id) {
    quire_page_census *census = context;
    uint32_t index = id & 0x7FFFFFFFu;
    uint8_t *seen = census->seen[id >> 31];
    uint8_t bit = (uint8_t)(1u << (index & 7));
    if (quire_page_entry(census->view, id) == 0) {
        return quire_fail(QUIRE_E_CORRUPT, "page %#" PRIx32 " is referred to but not in use", id);
    }
    if ((seen[index >> 3] & bit) != 0) {
        return quire_fail(QUIRE_E_CORRUPT, "page %#" PRIx32 " is referred to twice", id);
    }
    seen[index >> 3] |= bit;
    return QUIRE_OK;
}

static int census_compare(const quire_page_census *census) {
    for (uint32_t table = 0; table < 2; table++) {
        for (uint32_t index = 0; index < census->view->table[table].page_limit; index++) {
            bool seen = (census->seen[table][index >> 3] >> (index & 7) & 1) != 0;
            if (!seen && quire_page_entry(census->view, index | table << 31) != 0) {
                return quire_fail(QUIRE_E_CORRUPT, "page %#" PRIx32 " is in use, but nothing refers to it",
                                  index | table << 31);
            }
        }
    }
    return QUIRE_OK;
}

int quire_census_close(quire_page_census *census, int rc) {
    if (rc == QUIRE_OK) {
        rc = census_compare(census);
    }
    free(census->seen[0]);
    free(census->seen[1]);
    return rc;
}
