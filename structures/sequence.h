/* sequence.h -- records in order of position: list, queue and deque.
 *
 * Purpose     Bytes of any length, added and taken at both ends in constant time, read, replaced, inserted and removed anywhere
 *             by position. Python's List and Deque are two faces of it.
 * Layout, invariants: sequence.c.
 * Ownership, threads, errors: as kv.h.
 */
#ifndef QUIRE_SEQUENCE_H
#define QUIRE_SEQUENCE_H

#include "kv.h"

typedef struct quire_sequence quire_sequence;
typedef struct quire_sequence_cursor quire_sequence_cursor;

int quire_sequence_open(quire_arena *arena, const char *name, quire_sequence **sequence);
int quire_sequence_open_snap(quire_snap *snap, const char *name, quire_sequence **sequence);
void quire_sequence_close(quire_sequence *sequence);

int quire_sequence_count(quire_sequence *sequence, uint64_t *count);
/* index in 0..count-1, else QUIRE_E_NOTFOUND. */
int quire_sequence_get(quire_sequence *sequence, uint64_t index, quire_buffer *value);
int quire_sequence_set(quire_sequence *sequence, uint64_t index, const uint8_t *value, size_t value_bytes);
/* Before index; index == count appends. QUIRE_E_INVALID beyond. */
int quire_sequence_insert(quire_sequence *sequence, uint64_t index, const uint8_t *value, size_t value_bytes);
/* Removes count records from index on; QUIRE_E_INVALID if they are not all there. */
int quire_sequence_remove(quire_sequence *sequence, uint64_t index, uint64_t count);
int quire_sequence_clear(quire_sequence *sequence);
/* Appends each row; *done rows were added. Null rows are QUIRE_E_INVALID and nothing is added. */
int quire_sequence_extend(quire_sequence *sequence, const quire_rows *rows, int64_t *done);

/* From index on (reverse: from index down), over the sequence as it is now. */
int quire_sequence_cursor_open(quire_sequence *sequence, uint64_t index, bool reverse, quire_sequence_cursor **cursor);
int quire_sequence_cursor_next(quire_sequence_cursor *cursor, quire_buffer *value); /* QUIRE_E_NOTFOUND at the end */
int quire_sequence_cursor_next_many(quire_sequence_cursor *cursor, int64_t row_count, size_t bytes_max,
                                    quire_column *values, int64_t *rows);
void quire_sequence_cursor_close(quire_sequence_cursor *cursor);
int quire_sequence_check(quire_sequence *sequence);

/* A stretch of records that others took the place of: behind `position` records, and before `behind` of them. */
typedef struct {
    uint64_t position;
    uint64_t removed;
    uint64_t behind;
    const uint8_t *values; /* what is there now: each a u32 length and its bytes */
    size_t values_bytes;
    uint64_t value_count;
} quire_splice;
typedef int (*quire_splice_visit)(void *context, const quire_splice *splice);
#define QUIRE_SPLICE_BYTES (256u << 10) /* values are handed on once they are longer, in several splices if need be */
/* What makes the newer sequence out of the older one, an older snapshot's (NULL: an empty one), if done in this order, from the front to
 * the back. Costs what changed; a change between two stretches that did not costs a look at the nodes before it, too. The splice lives until
 * visit returns; what that returns ends the walk if it is not 0. */
int quire_sequence_changes(quire_sequence *newer, quire_sequence *older, quire_splice_visit visit, void *context);

#endif
