/* kv_internal.h -- what map.c and ordered.c give to kv.c. Not for users of the core.
 *
 * Every function works on a view (reads) or a set (writes); kv.c has entered the arena, checked that the handle is usable and made
 * the reservation that reserve() asks for, so writes fail only with QUIRE_E_CORRUPT (damaged pages) or QUIRE_E_FULL; put_items reserves itself.
 */
#ifndef QUIRE_KV_INTERNAL_H
#define QUIRE_KV_INTERNAL_H

#include "kv.h"

/* Keys that are looked up or put together, so that their memory is asked for at once. */
#define QUIRE_GROUP_ITEMS 32

/* Where a cursor stands; each structure uses the fields as it likes. Valid only on its own pinned view. */
typedef struct {
    quire_page_id page;
    uint32_t slot;
    uint32_t aux;
    bool started;
    bool ended;
} quire_position;

typedef struct {
    quire_kind kind;
    /* Writes the super page of an empty structure (page 0 of the new set). */
    int (*create)(quire_set *set);
    /* Pages that one put, append or remove may touch, record streams not counted. */
    uint64_t (*reserve)(const quire_set *set);
    /* The record of key: QUIRE_OK with *record in its page, QUIRE_E_NOTFOUND, QUIRE_E_CORRUPT. live is the set when the view is a live
     * set's own (its private cache may then be used and built), NULL on a snapshot. */
    int (*find)(const quire_view *view, quire_set *live, const uint8_t *key, size_t key_bytes,
                const quire_record **record);
    /* The same on a snapshot, and the page that the record is on. */
    int (*locate)(const quire_view *view, const uint8_t *key, size_t key_bytes, const quire_record **record,
                  quire_page_id *page);
    /* The two that end in items, and ahead, take at most QUIRE_GROUP_ITEMS, and may be NULL: then one is done after the other. */
    /* A hint that these keys are looked up or changed next. */
    void (*ahead)(const quire_view *view, const quire_item *items, size_t count);
    /* The record of each key, NULL where it is missing. */
    int (*find_items)(const quire_view *view, const quire_item *items, size_t count, const quire_record **records);
    /* Inserts or replaces (append false), or adds a value (append true). */
    int (*put)(quire_set *set, const quire_item *item, bool append);
    /* Inserts or replaces; makes the reservations itself (quire_put_reserve). *done: how many, to which it adds. */
    int (*put_items)(quire_set *set, const quire_item *items, size_t count, size_t *done);
    int (*remove)(quire_set *set, const uint8_t *key, size_t key_bytes);
    /* Moves to the next record (reverse: the previous) and gives it; QUIRE_E_NOTFOUND at the end. First call: position zeroed but
     * for what seek has set. */
    int (*next)(const quire_view *view, quire_position *position, bool reverse, const quire_record **record);
    /* Ordered only, NULL for the map: after it, next gives the first record with key >= key (reverse: the last with key < key). */
    int (*seek)(const quire_view *view, quire_position *position, bool reverse, const uint8_t *key, size_t key_bytes);
    /* Calls visit for each record on one page of the structure (none if the page holds no records). */
    int (*page_records)(const quire_view *view, quire_page_id id,
                        int (*visit)(void *context, const quire_record *record), void *context);
    /* May be NULL. The record whose value was changed in place where `count` bytes from offset on were amended: these are its stamp, key and
     * value, all that there is of it but its first word. NULL if that is not what was done there. */
    const quire_record *(*amended)(const quire_view *view, const uint8_t *page, uint32_t offset, uint32_t count);
    int (*count)(const quire_view *view, uint64_t *count);
    int (*check)(const quire_view *view);
} quire_kv_ops;

extern const quire_kv_ops quire_map_ops;
extern const quire_kv_ops quire_ordered_ops;

/* What a put needs. pages: of the structure, reserve(). Twice these, so that a put which reaches the limit leaves room for a removal. */
static inline int quire_put_reserve(quire_set *set, uint64_t pages, const quire_item *item) {
    return quire_arena_reserve(set->view.arena,
                               2 * pages + quire_record_reserve(set, item->key_bytes, item->value_bytes));
}

/* ordered.c only: removes lo <= key < hi, a NULL bound being open. Makes its own reservations, one per stretch of
 * records, so it may stop part-way with QUIRE_E_LIMIT, _NOSPACE or _NOMEM; *removed says how many records went in any
 * case. */
int quire_ordered_remove_range(quire_set *set, const uint8_t *lo, size_t lo_bytes, const uint8_t *hi, size_t hi_bytes,
                               uint64_t *removed);

/* Row index of an Arrow input; *count its bytes. The row must not be null. */
static inline const uint8_t *quire_rows_at(const quire_rows *rows, int64_t row, size_t *count) {
    int64_t i = rows->offset + row;
    if (rows->offsets32 != NULL) {
        *count = (size_t)(rows->offsets32[i + 1] - rows->offsets32[i]);
        return rows->bytes + rows->offsets32[i];
    }
    if (rows->offsets64 != NULL) {
        *count = (size_t)(rows->offsets64[i + 1] - rows->offsets64[i]);
        return rows->bytes + rows->offsets64[i];
    }
    *count = (size_t)rows->width;
    return rows->bytes + i * rows->width;
}
static inline bool quire_rows_null(const quire_rows *rows, int64_t row) {
    int64_t i = rows->offset + row;
    return rows->validity != NULL && (rows->validity[i >> 3] >> (i & 7) & 1) == 0;
}
int quire_column_add_null(quire_column *column);

/* Accounts for each page of a set once; check functions share it. */
typedef struct {
    const quire_view *view;
    uint8_t *seen[2]; /* a bit per id of each table */
} quire_page_census;
int quire_census_open(const quire_view *view, quire_page_census *census);
/* QUIRE_E_CORRUPT if the page is not in use or was counted before. Fits quire_record_check's visit. */
int quire_census_count(void *census, quire_page_id id);
/* QUIRE_E_CORRUPT if a page in use was not counted. Frees the census in any case. */
int quire_census_close(quire_page_census *census, int rc);

/* ------------------------------------------------------------------------------------------------ shared with sequence.c */

/* A structure of the writer, or of a snapshot. */
typedef struct {
    quire_set *set;  /* NULL on a snapshot */
    quire_view view; /* of the snapshot */
} quire_handle;

/* Opens the set of that name, or makes it with create. */
int quire_handle_open(quire_arena *arena, const char *name, quire_kind kind, int (*create)(quire_set *set),
                      quire_handle *handle);
/* The handle's state as it is now: its snapshot's view (*snap NULL), or that of a snapshot which the caller releases.
 * Between enter and leave. */
int quire_handle_pin(quire_handle *handle, quire_snap **snap, quire_view *view);
/* QUIRE_E_INVALID unless the newer state grew out of the older one. */
int quire_view_comes_from(const quire_view *newer, const quire_view *older);
/* Frees every page and calls create. Between enter and leave. */
int quire_handle_clear(quire_handle *handle, int (*create)(quire_set *set));

static inline const quire_view *quire_handle_view(const quire_handle *handle) {
    return handle->set != NULL ? &handle->set->view : &handle->view;
}
static inline int quire_handle_enter(quire_handle *handle) {
    if (handle->set == NULL) {
        /* What a weak snapshot reads, the writer may change. */
        return handle->view.weak == NULL ? quire_view_usable(&handle->view) : quire_arena_enter(handle->view.arena);
    }
    QUIRE_TRY(quire_arena_enter(handle->set->view.arena));
    int rc = quire_set_usable(handle->set);
    if (QUIRE_UNLIKELY(rc != QUIRE_OK)) {
        quire_arena_leave(handle->set->view.arena);
    }
    return rc;
}
static inline int quire_handle_enter_write(quire_handle *handle) {
    if (QUIRE_UNLIKELY(handle->set == NULL)) {
        return quire_fail(QUIRE_E_READONLY, "a snapshot cannot be written: open the structure on its arena");
    }
    return quire_handle_enter(handle);
}
static inline void quire_handle_leave(quire_handle *handle) {
    if (handle->set == NULL && handle->view.weak == NULL) {
        return;
    }
    if (handle->set == NULL) {
        quire_view_forget(&handle->view);
    }
    quire_arena_leave(quire_handle_view(handle)->arena);
}

/* Checks the bytes of an argument; *bytes is never NULL afterwards. */
int quire_argument_check(const char *what, const uint8_t **bytes, size_t count);
/* Copies the description of an Arrow array after a look at all in it that can be looked at. */
int quire_rows_open(const char *what, const quire_rows *given, bool nulls_allowed, quire_rows *rows);
/* Puts the row before the message that is there. */
int quire_fail_at_row(int rc, int64_t row);

#endif
