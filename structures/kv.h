/* kv.h -- key-value structures: the unordered map (linear hash, map.c) and the ordered map (T-tree, ordered.c).
 *
 * Purpose     One interface over both, so that bulk access, cursors, differences and the two bindings are written once.
 * Layout      record.h for records; map.c and ordered.c for their pages.
 * Invariants  those of map.c and ordered.c; quire_kv_check proves them.
 * Ownership   A quire_kv on an arena stays usable across commit and abort; one on a snapshot as long as the snapshot. Bytes given out
 *             in a quire_buffer point into pages (valid until the next write, commit or abort; on a snapshot until its release)
 *             or into the buffer's own memory. A cursor pins a snapshot of its own and must be closed.
 * Threads     A live quire_kv serialises its callers (quire_arena_enter). A snapshot's quire_kv may be read by any number of
 *             threads. A cursor, column or buffer belongs to one thread at a time.
 * Errors      error.h. A put that returns QUIRE_E_LIMIT, _NOSPACE or _NOMEM has changed nothing; a bulk call says how many rows it did.
 */
#ifndef QUIRE_KV_H
#define QUIRE_KV_H

#include "record.h"

typedef enum {
    QUIRE_KIND_MAP = 1,
    QUIRE_KIND_ORDERED = 2,
    QUIRE_KIND_SEQUENCE = 3,
    QUIRE_KIND_RAW = 4,
} quire_kind;

typedef struct quire_kv quire_kv;
typedef struct quire_cursor quire_cursor;

/* Opens or creates; QUIRE_E_MISMATCH if the name is another kind. kind: QUIRE_KIND_MAP or _ORDERED. */
int quire_kv_open(quire_arena *arena, const char *name, quire_kind kind, quire_kv **kv);
int quire_kv_open_snap(quire_snap *snap, const char *name, quire_kind kind, quire_kv **kv);
void quire_kv_close(quire_kv *kv);
/* The arena of a live structure, to enter for several calls; NULL on a snapshot. */
quire_arena *quire_kv_arena(quire_kv *kv);

int quire_kv_count(quire_kv *kv, uint64_t *count);
/* QUIRE_OK with the value (the first of several), or QUIRE_E_NOTFOUND. */
int quire_kv_get(quire_kv *kv, const uint8_t *key, size_t key_bytes, quire_buffer *value);
/* All values of the key, each behind its u32 length. */
int quire_kv_get_all(quire_kv *kv, const uint8_t *key, size_t key_bytes, quire_buffer *values, uint64_t *value_count);
int quire_kv_contains(quire_kv *kv, const uint8_t *key, size_t key_bytes, bool *found);
int quire_kv_put(quire_kv *kv, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes);
/* Adds one value behind those the key has. */
int quire_kv_append(quire_kv *kv, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes);
/* QUIRE_OK, or QUIRE_E_NOTFOUND. */
int quire_kv_remove(quire_kv *kv, const uint8_t *key, size_t key_bytes);
int quire_kv_clear(quire_kv *kv);
/* Ordered only: removes lo <= key < hi; a NULL bound is open. */
int quire_kv_remove_range(quire_kv *kv, const uint8_t *lo, size_t lo_bytes, const uint8_t *hi, size_t hi_bytes,
                          uint64_t *removed);

/* ------------------------------------------------------------------------------------------------ bulk, wherever keys and values lie */

/* A key and its value. No pointer to a key, or to a value that is put, may be NULL. */
typedef struct {
    const uint8_t *key, *value;
    uint32_t key_bytes, value_bytes;
} quire_item;

/* Sets each item's value, NULL where the key is missing: in its page, until the next write. A value that is not in one piece there is copied to the
 * buffer, and the call ends with it. *done: how many items. */
int quire_kv_get_items(quire_kv *kv, quire_item *items, size_t count, quire_buffer *buffer, size_t *done);
/* *done: how many were stored; all of them unless an error is returned. */
int quire_kv_put_items(quire_kv *kv, const quire_item *items, size_t count, size_t *done);

/* ------------------------------------------------------------------------------------------------ bulk, in Arrow's layout */

/* An Arrow array of (large) binary, string or fixed-size binary, as its buffers. */
typedef struct {
    const uint8_t *bytes;
    const int32_t *offsets32; /* one of the three says where a row's bytes are */
    const int64_t *offsets64;
    int64_t width;
    const uint8_t *validity; /* NULL: no nulls */
    int64_t offset;
    int64_t row_count;
} quire_rows;

/* A binary Arrow array being built; offsets32 while the bytes fit, offsets64 (and offsets32 NULL) from 2 GiB on. */
typedef struct {
    uint8_t *bytes;
    size_t bytes_count, bytes_capacity;
    int32_t *offsets32;
    int64_t *offsets64;
    uint8_t *validity; /* NULL: no nulls so far */
    int64_t row_count, row_capacity, null_count;
} quire_column;
void quire_column_free(quire_column *column);
int quire_column_add(quire_column *column, const uint8_t *bytes, size_t count);

/* A row per key, null where the key is missing. To get, contains and remove a null key is one that is missing. */
int quire_kv_get_many(quire_kv *kv, const quire_rows *keys, quire_column *values);
/* found: one byte per row, 0 or 1. */
int quire_kv_contains_many(quire_kv *kv, const quire_rows *keys, uint8_t *found);
/* *done: rows stored; all of them unless an error is returned. Null keys or values are QUIRE_E_INVALID and nothing is stored. */
int quire_kv_put_many(quire_kv *kv, const quire_rows *keys, const quire_rows *values, int64_t *done);
int quire_kv_append_many(quire_kv *kv, const quire_rows *keys, const quire_rows *values, int64_t *done);
/* All values of each key, appended to values. Those of row r are the rows offsets[r] to offsets[r + 1] - 1 of what is appended; offsets has
 * room for a number more than there are keys. A key that is missing has none: every key that is there has one at least. */
int quire_kv_get_lists(quire_kv *kv, const quire_rows *keys, int64_t *offsets, quire_column *values);
/* Replaces all values of the key of row r by the rows offsets[r] to offsets[r + 1] - 1 of values; if there are none, the key is removed.
 * *done: keys done. Nulls are QUIRE_E_INVALID and nothing is stored; after another error the key of row *done may have the first of its new
 * values only. */
int quire_kv_put_lists(quire_kv *kv, const quire_rows *keys, const int64_t *offsets, const quire_rows *values,
                       int64_t *done);
/* found may be NULL. *removed: how many keys were there. */
int quire_kv_remove_many(quire_kv *kv, const quire_rows *keys, uint8_t *found, int64_t *removed);

/* ------------------------------------------------------------------------------------------------ cursors */

enum {
    QUIRE_CURSOR_REVERSE = 1, /* ordered only */
    QUIRE_CURSOR_PASSING =
        2, /* pins nothing: opened, used and closed while the caller has entered the arena and writes nothing */
};

/* Over lo <= key < hi, NULL for an open bound (both NULL for an unordered map). Sees the structure as it is now,
 * whatever is written later. */
int quire_cursor_open(quire_kv *kv, const uint8_t *lo, size_t lo_bytes, const uint8_t *hi, size_t hi_bytes,
                      unsigned flags, quire_cursor **cursor);
void quire_cursor_close(quire_cursor *cursor);
/* Ordered only: the next record given is the first with key >= key (reverse: the last with key < key), within the bounds. */
int quire_cursor_seek(quire_cursor *cursor, const uint8_t *key, size_t key_bytes);
/* The next record, valid until the next call on this cursor (until its close, if inline); QUIRE_E_NOTFOUND at the end. */
int quire_cursor_next(quire_cursor *cursor, quire_buffer *key, quire_buffer *value);
int quire_cursor_next_all(quire_cursor *cursor, quire_buffer *key, quire_buffer *values, uint64_t *value_count);
/* Appends up to row_count records (one row per key, first value) to the columns, either of which may be NULL, and
 * stops early past bytes_max. *rows: how many; 0 at the end. */
int quire_cursor_next_many(quire_cursor *cursor, int64_t row_count, size_t bytes_max, quire_column *keys,
                           quire_column *values, int64_t *rows);

/* ------------------------------------------------------------------------------------------------ differences, checks */

/* One changed key, valid until the visit returns. */
typedef struct {
    const uint8_t *key;
    size_t key_bytes;
    const uint8_t *values; /* as quire_kv_get_all gives them; NULL: the key was removed */
    size_t values_bytes;
    uint64_t value_count;
    bool older_here;  /* quire_change_older needs no look-up */
    const void *walk; /* for quire_change_older; NULL: there is no older state */
} quire_change;

/* What changed from the older to the newer state of one structure, visiting only pages that differ. older may be a snapshot's quire_kv
 * only. visit may call anything; what it returns other than 0 ends the walk and is passed on. */
typedef int (*quire_change_visit)(void *context, const quire_change *change);
int quire_kv_changes(quire_kv *newer, quire_kv *older, quire_change_visit visit, void *context);
/* The values that the key had, in the form of change->values; QUIRE_E_NOTFOUND: none. Called within the visit. Costs a look-up unless the
 * record is where it was, as one is whose size has not changed. */
int quire_change_older(const quire_change *change, quire_buffer *values, uint64_t *value_count);

/* The same walk for who keeps account of where each page's records were last written to a log (checkpoint/cec.c). older NULL: there was
 * nothing before. */
typedef struct {
    /* As quire_change_visit. page: where the record is, or was if it is removed; stamp_before: its stamp in the older state, 0: it was
     * not there. */
    int (*record)(void *context, quire_page_id page, uint32_t stamp_before, const uint8_t *key, size_t key_bytes,
                  const uint8_t *values, size_t values_bytes, uint64_t value_count);
    /* A record that did not change stands on another page than before. */
    int (*moved)(void *context, quire_page_id from, quire_page_id to, uint32_t stamp);
    /* After the records of a page: the oldest stamp on it now, UINT32_MAX if it holds no records. */
    int (*page)(void *context, quire_page_id page, uint32_t stamp_oldest);
} quire_footprint_visit;
int quire_kv_footprints(quire_kv *newer, quire_kv *older, const quire_footprint_visit *visit, void *context);
/* Gives each record of one page whose stamp is at most stamp_max to visit (NULL: nobody), and then the epoch being written to it as its stamp:
 * it counts as changed from then on. visit runs between enter and leave and calls nothing of the arena. *stamp_rest: the oldest stamp of the
 * page's other records, UINT32_MAX: there are none. QUIRE_E_LIMIT, _NOSPACE and _NOMEM of the reservation change nothing and visit
 * nothing. */
typedef int (*quire_touch_visit)(void *context, uint32_t stamp, const uint8_t *key, size_t key_bytes,
                                 const uint8_t *values, size_t values_bytes, uint64_t value_count);
int quire_kv_touch(quire_kv *kv, quire_page_id page, uint32_t stamp_max, quire_touch_visit visit, void *context,
                   uint32_t *stamp_rest);
/* Ids of pages that may hold records are below this. */
uint32_t quire_kv_page_limit(quire_kv *kv);
/* The stamp of every record, page by page in the order of their ids. On a live structure visit runs between enter and leave. */
typedef int (*quire_stamp_visit)(void *context, quire_page_id page, uint32_t stamp);
int quire_kv_stamps(quire_kv *kv, quire_stamp_visit visit, void *context);

/* Proves the structure's invariants and that each of its pages is reached once. */
int quire_kv_check(quire_kv *kv);

typedef struct {
    uint64_t count;       /* keys */
    uint64_t pages;       /* pages in use, all kinds */
    uint64_t index_pages; /* of these, directory pages of the hash */
} quire_kv_stats;
int quire_kv_stats_get(quire_kv *kv, quire_kv_stats *stats);

#endif
