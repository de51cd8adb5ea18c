/* family.h -- one column family of a state store, as a task reads and writes it.
 *
 * Purpose     A map or ordered map together with the memory its answers lie in, so that one call across a language border gives a whole
 *             answer, and a scan gives many rows a call.
 *
 * Layout      Answers are written as 64-bit words where the caller says: an address and a length for each run of bytes.
 *
 * Invariants  I1 bytes of an answer lie in the page itself: on a snapshot's family they are valid until the snapshot is released, on a live
 *                one until the next write to its arena, in a scan until the scan is closed.
 *             I2 those that do not (too large for a page) have QUIRE_SPAN_OWN set in their length and are valid until the family's
 *                or scan's next answer.
 *             I3 a scan sees the family as it was when the scan was opened.
 *
 * Ownership   A family owns its answer's memory and its handle; a scan its cursor. Close scans before the family's arena or snapshot.
 * Threads     A family and a scan belong to one thread at a time; any number of families may be open on one snapshot.
 * Errors      error.h.
 */
#ifndef QUIRE_FAMILY_H
#define QUIRE_FAMILY_H

#include "../structures/kv.h"

typedef struct quire_family quire_family;
typedef struct quire_scan quire_scan;

#define QUIRE_SPAN_OWN ((int64_t)1 << 62)

/* An answer: where bytes lie, and how many. */
typedef struct {
    int64_t address;
    int64_t count;
} quire_span;

typedef struct {
    quire_span key;
    quire_span value;
} quire_span_pair;

/* Made if it is not there; made anew if it is there in the other order with nothing in it. */
int quire_family_open(quire_arena *arena, const char *name, bool ordered, quire_family **family);
/* QUIRE_E_NOTFOUND if the snapshot has none of this name, or one of the other order with nothing in it. */
int quire_family_open_snap(quire_snap *snap, const char *name, bool ordered, quire_family **family);
void quire_family_close(quire_family *family);
int quire_family_count(quire_family *family, uint64_t *count);

/* QUIRE_E_NOTFOUND if the key is not there. */
int quire_family_get(quire_family *family, const uint8_t *key, size_t key_bytes, quire_span *value);
/* The values of many keys, from row first on: the memory of several keys is then asked for together. A key that is not there has address 0.
 * *done: how many rows were answered, one at least; the last may be the only one whose bytes do not lie in a page (I2), so ask again from there
 * on when it was read. Offsets as in put_many. */
int quire_family_get_many(quire_family *family, const uint8_t *keys, const int32_t *key_offsets, size_t first,
                          size_t count, quire_span *values, size_t *done);
/* All values, each behind its u32 length. */
int quire_family_get_all(quire_family *family, const uint8_t *key, size_t key_bytes, quire_span *values);
int quire_family_contains(quire_family *family, const uint8_t *key, size_t key_bytes, bool *found);
int quire_family_put(quire_family *family, const uint8_t *key, size_t key_bytes, const uint8_t *value,
                     size_t value_bytes);
int quire_family_append(quire_family *family, const uint8_t *key, size_t key_bytes, const uint8_t *value,
                        size_t value_bytes);
/* Many at once, in order: the memory of several keys is then asked for together. Each offset is where a row's bytes begin; one more
 * says where the last row's end. */
int quire_family_put_many(quire_family *family, const uint8_t *keys, const int32_t *key_offsets, const uint8_t *values,
                          const int32_t *value_offsets, size_t count);
/* Also QUIRE_OK if the key is not there. */
int quire_family_remove(quire_family *family, const uint8_t *key, size_t key_bytes);
int quire_family_remove_range(quire_family *family, const uint8_t *lo, size_t lo_bytes, const uint8_t *hi,
                              size_t hi_bytes);

/* lo <= key < hi, NULL for an open bound; both NULL on an unordered family. all: rows carry every value of their key, as get_all. */
int quire_scan_open(quire_family *family, const uint8_t *lo, size_t lo_bytes, const uint8_t *hi, size_t hi_bytes,
                    bool all, quire_scan **scan);
/* Up to max rows, valid until the next call on the scan; *count 0 at the end. */
int quire_scan_next(quire_scan *scan, quire_span_pair *rows, size_t max, size_t *count);
void quire_scan_close(quire_scan *scan);

#endif
