/* family.c -- column families and scans.
 *
 * Purpose     See family.h.
 * Layout      none of its own.
 * Invariants  of family.h.
 * Ownership   of family.h.
 * Threads     of family.h.
 * Errors      What the structures return.
 */
#include "family.h"

#include <inttypes.h>
#include <stdlib.h>

struct quire_family {
    quire_kv *kv;
    quire_buffer value;
};

/* Keys handed on together. */
#define GET_ITEMS 64u
/* Most scans of a live family are short (the timers of a key, the rows of a join key). Up to this much is copied at once, which
 * spares the pin, and with it the copies of pages that writes after a pin cost. */
#define BRIEF_ROWS  32u
#define BRIEF_BYTES 8192u

struct quire_scan {
    quire_cursor *cursor; /* NULL: the rows are in brief */
    bool all;
    quire_buffer key, value;
    uint8_t *brief_bytes;
    quire_span_pair brief[BRIEF_ROWS];
    uint32_t brief_count, brief_next;
};

static int family_make(quire_family **family) {
    quire_family *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for a column family's handle");
    }
    *family = made;
    return QUIRE_OK;
}

static quire_kind kind_of(bool ordered) {
    return ordered ? QUIRE_KIND_ORDERED : QUIRE_KIND_MAP;
}

static int family_made(int rc, quire_family *made, quire_family **family) {
    if (rc == QUIRE_OK) {
        *family = made;
    } else {
        quire_family_close(made);
    }
    return rc;
}

/* Tools open the families of a store in one order, the default one among them that nobody wrote to. So a family of the other order
 * with nothing in it does not stand in the way: whether kv, opened as what it is, is one. */
static int is_empty(int opened, quire_kv *kv, bool *empty) {
    QUIRE_TRY(opened);
    uint64_t count = 0;
    int rc = quire_kv_count(kv, &count);
    quire_kv_close(kv);
    *empty = rc == QUIRE_OK && count == 0;
    return rc;
}

static int open_live(quire_arena *arena, const char *name, bool ordered, quire_kv **kv) {
    int rc = quire_kv_open(arena, name, kind_of(ordered), kv);
    if (rc != QUIRE_E_MISMATCH) {
        return rc;
    }
    quire_kv *other = NULL;
    bool empty = false;
    rc = quire_kv_open(arena, name, kind_of(!ordered), &other);
    QUIRE_TRY(is_empty(rc, other, &empty));
    if (empty) {
        QUIRE_TRY(quire_set_destroy(arena, name));
    }
    return quire_kv_open(arena, name, kind_of(ordered), kv);
}

static int open_snap(quire_snap *snap, const char *name, bool ordered, quire_kv **kv) {
    int rc = quire_kv_open_snap(snap, name, kind_of(ordered), kv);
    if (rc != QUIRE_E_MISMATCH) {
        return rc;
    }
    quire_kv *other = NULL;
    bool empty = false;
    rc = quire_kv_open_snap(snap, name, kind_of(!ordered), &other);
    QUIRE_TRY(is_empty(rc, other, &empty));
    return empty ? QUIRE_E_NOTFOUND : quire_kv_open_snap(snap, name, kind_of(ordered), kv);
}

int quire_family_open(quire_arena *arena, const char *name, bool ordered, quire_family **family) {
    quire_family *made = NULL;
    QUIRE_TRY(family_make(&made));
    return family_made(open_live(arena, name, ordered, &made->kv), made, family);
}

int quire_family_open_snap(quire_snap *snap, const char *name, bool ordered, quire_family **family) {
    quire_family *made = NULL;
    QUIRE_TRY(family_make(&made));
    return family_made(open_snap(snap, name, ordered, &made->kv), made, family);
}

void quire_family_close(quire_family *family) {
    if (family != NULL) {
        quire_kv_close(family->kv);
        quire_buffer_free(&family->value);
        free(family);
    }
}

int quire_family_count(quire_family *family, uint64_t *count) {
    return quire_kv_count(family->kv, count);
}

static bool in_page(const quire_buffer *buffer) {
    return buffer->bytes != buffer->own;
}

static quire_span span_of(const quire_buffer *buffer) {
    return (quire_span){(int64_t)(intptr_t)buffer->bytes,
                        (int64_t)buffer->count | (in_page(buffer) ? 0 : QUIRE_SPAN_OWN)};
}

int quire_family_get(quire_family *family, const uint8_t *key, size_t key_bytes, quire_span *value) {
    QUIRE_TRY(quire_kv_get(family->kv, key, key_bytes, &family->value));
    *value = span_of(&family->value);
    return QUIRE_OK;
}

int quire_family_get_many(quire_family *family, const uint8_t *keys, const int32_t *key_offsets, size_t first,
                          size_t count, quire_span *values, size_t *done) {
    quire_item items[GET_ITEMS];
    bool own = false;
    *done = 0;
    while (first + *done < count && !own) {
        size_t left = count - first - *done, some = left < GET_ITEMS ? left : GET_ITEMS, found;
        for (size_t i = 0, row = first + *done; i < some; i++, row++) {
            if (QUIRE_UNLIKELY(key_offsets[row] < 0 || key_offsets[row + 1] < key_offsets[row])) {
                return quire_fail(QUIRE_E_INVALID, "key %zu is said to lie from %" PRId32 " to %" PRId32, row,
                                  key_offsets[row], key_offsets[row + 1]);
            }
            items[i] = (quire_item){.key = keys + key_offsets[row],
                                    .key_bytes = (uint32_t)(key_offsets[row + 1] - key_offsets[row])};
        }
        QUIRE_TRY(quire_kv_get_items(family->kv, items, some, &family->value, &found));
        for (size_t i = 0; i < found; i++) {
            own = items[i].value != NULL && items[i].value == family->value.own;
            values[*done + i] = (quire_span){(int64_t)(intptr_t)items[i].value,
                                             (int64_t)items[i].value_bytes | (own ? QUIRE_SPAN_OWN : 0)};
        }
        *done += found;
    }
    return QUIRE_OK;
}

int quire_family_get_all(quire_family *family, const uint8_t *key, size_t key_bytes, quire_span *values) {
    uint64_t value_count;
    QUIRE_TRY(quire_kv_get_all(family->kv, key, key_bytes, &family->value, &value_count));
    *values = span_of(&family->value);
    return QUIRE_OK;
}

int quire_family_contains(quire_family *family, const uint8_t *key, size_t key_bytes, bool *found) {
    return quire_kv_contains(family->kv, key, key_bytes, found);
}

int quire_family_put(quire_family *family, const uint8_t *key, size_t key_bytes, const uint8_t *value,
                     size_t value_bytes) {
    return quire_kv_put(family->kv, key, key_bytes, value, value_bytes);
}

int quire_family_append(quire_family *family, const uint8_t *key, size_t key_bytes, const uint8_t *value,
                        size_t value_bytes) {
    return quire_kv_append(family->kv, key, key_bytes, value, value_bytes);
}

int quire_family_put_many(quire_family *family, const uint8_t *keys, const int32_t *key_offsets, const uint8_t *values,
                          const int32_t *value_offsets, size_t count) {
    quire_rows key_rows = {.bytes = keys, .offsets32 = key_offsets, .row_count = (int64_t)count};
    quire_rows value_rows = {.bytes = values, .offsets32 = value_offsets, .row_count = (int64_t)count};
    int64_t done;
    return quire_kv_put_many(family->kv, &key_rows, &value_rows, &done);
}

int quire_family_remove(quire_family *family, const uint8_t *key, size_t key_bytes) {
    int rc = quire_kv_remove(family->kv, key, key_bytes);
    return rc == QUIRE_E_NOTFOUND ? QUIRE_OK : rc;
}

int quire_family_remove_range(quire_family *family, const uint8_t *lo, size_t lo_bytes, const uint8_t *hi,
                              size_t hi_bytes) {
    uint64_t removed;
    return quire_kv_remove_range(family->kv, lo, lo_bytes, hi, hi_bytes, &removed);
}

/* The next record of the cursor, in the scan's buffers. */
static int scan_step(quire_scan *scan, quire_cursor *cursor) {
    uint64_t value_count;
    return scan->all ? quire_cursor_next_all(cursor, &scan->key, &scan->value, &value_count)
                     : quire_cursor_next(cursor, &scan->key, &scan->value);
}

static quire_span brief_add(quire_scan *scan, const quire_buffer *bytes, size_t *used) {
    if (bytes->count != 0) {
        memcpy(scan->brief_bytes + *used, bytes->bytes, bytes->count);
    }
    quire_span span = {(int64_t)(intptr_t)(scan->brief_bytes + *used), (int64_t)bytes->count};
    *used += (bytes->count + 7) & ~(size_t)7;
    return span;
}

/* Copies the rows; QUIRE_OK if that were all of them, QUIRE_E_FULL if there are more. */
static int brief_fill(quire_scan *scan, quire_cursor *cursor) {
    size_t used = 0;
    for (;;) {
        int rc = scan_step(scan, cursor);
        if (rc != QUIRE_OK) {
            return rc == QUIRE_E_NOTFOUND ? QUIRE_OK : rc;
        }
        if (scan->brief_count == BRIEF_ROWS || used + scan->key.count + scan->value.count + 16 > BRIEF_BYTES) {
            return QUIRE_E_FULL;
        }
        if (scan->brief_bytes == NULL && (scan->brief_bytes = malloc(BRIEF_BYTES)) == NULL) {
            return quire_fail(QUIRE_E_NOMEM, "no memory for the rows of a scan");
        }
        quire_span key = brief_add(scan, &scan->key, &used);
        scan->brief[scan->brief_count++] = (quire_span_pair){key, brief_add(scan, &scan->value, &used)};
    }
}

static int cursors_open(quire_family *family, const uint8_t *lo, size_t lo_bytes, const uint8_t *hi, size_t hi_bytes,
                        quire_scan *scan) {
    if (quire_kv_arena(family->kv) != NULL) {
        quire_cursor *passing;
        QUIRE_TRY(quire_cursor_open(family->kv, lo, lo_bytes, hi, hi_bytes, QUIRE_CURSOR_PASSING, &passing));
        int rc = brief_fill(scan, passing);
        quire_cursor_close(passing);
        if (rc != QUIRE_E_FULL) {
            return rc;
        }
        scan->brief_count = 0;
    }
    return quire_cursor_open(family->kv, lo, lo_bytes, hi, hi_bytes, 0, &scan->cursor);
}

int quire_scan_open(quire_family *family, const uint8_t *lo, size_t lo_bytes, const uint8_t *hi, size_t hi_bytes,
                    bool all, quire_scan **scan) {
    quire_scan *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for a scan");
    }
    made->all = all;
    quire_arena *arena = quire_kv_arena(family->kv);
    int rc = arena == NULL ? QUIRE_OK : quire_arena_enter(arena);
    if (rc == QUIRE_OK) {
        rc = cursors_open(family, lo, lo_bytes, hi, hi_bytes, made);
        if (arena != NULL) {
            quire_arena_leave(arena);
        }
    }
    if (rc != QUIRE_OK) {
        quire_scan_close(made);
        return rc;
    }
    *scan = made;
    return QUIRE_OK;
}

static size_t brief_take(quire_scan *scan, quire_span_pair *rows, size_t max) {
    size_t left = scan->brief_count - scan->brief_next, count = left < max ? left : max;
    memcpy(rows, scan->brief + scan->brief_next, count * sizeof *rows);
    scan->brief_next += (uint32_t)count;
    return count;
}

int quire_scan_next(quire_scan *scan, quire_span_pair *rows, size_t max, size_t *count) {
    if (scan->cursor == NULL) {
        *count = brief_take(scan, rows, max);
        return QUIRE_OK;
    }
    size_t row = 0;
    int rc = QUIRE_OK;
    while (row < max) {
        rc = scan_step(scan, scan->cursor);
        if (rc != QUIRE_OK) {
            break;
        }
        rows[row++] = (quire_span_pair){span_of(&scan->key), span_of(&scan->value)};
        if (!in_page(&scan->key) || !in_page(&scan->value)) {
            break; /* the next row would overwrite this one */
        }
    }
    *count = row;
    return rc == QUIRE_E_NOTFOUND ? QUIRE_OK : rc;
}

void quire_scan_close(quire_scan *scan) {
    if (scan != NULL) {
        quire_cursor_close(scan->cursor);
        quire_buffer_free(&scan->key);
        quire_buffer_free(&scan->value);
        free(scan->brief_bytes);
        free(scan);
    }
}
