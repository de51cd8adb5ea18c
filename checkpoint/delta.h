/* delta.h -- what changed between two states of an arena's maps and sequences, as bytes; and those bytes applied to another arena.
 *
 * Purpose     A commit of the `delta` mode writes these records, a restart applies them on top of a base. The cost follows what
 *             changed: only pages that differ are visited (quire_kv_changes, quire_sequence_changes).
 *
 * Layout      A payload (the raw bytes of one frame) is a row of records; the first names a family, so that each payload can be read alone.
 *             u8 1  family   u8 kind of structure, u16 bytes, name: the records that follow are this family's; made if it is not there
 *             u8 2  drop     u8 0, u16 bytes, name: the family is gone
 *             u8 3  put      varint key bytes, varint value bytes, key, value
 *             u8 4  put all  varint key bytes, varint bytes of values, varint count, key, values: each a u32 length and its bytes
 *             u8 5  remove   varint key bytes, key
 *             u8 6  append   as put all: the values come behind those that the key has, if any
 *             u8 7  patch    varint key bytes, varint bytes of the new value, varint patch bytes, key, patch: the key's one value is replaced
 *                            by another one: the old bytes at the same places but for some runs. A patch is a u16 check of the
 *                            old value and the runs, each varint bytes kept since the run before, varint count (not 0), count new bytes;
 *                            what lies behind the last is kept. The check: the sum of the old value's u64 words, the last
 *                            filled up with zeros, and its length, times 0x9E3779B97F4A7C15, modulo 2^64; the top 16 bits.
 *             u8 8  open     as put all: a key that was not there (logs only, as 9)
 *             u8 9  check    as put all: a key that did not change, written again
 *             u8 10 splice   varint records before it, removed, and behind these, varint bytes of values, varint count, values as in put all: of
 *                            a sequence; the removed ones make room for the values, of which there may be none. All splices of a
 *                            sequence are done in order; the three numbers add up to the records that it has then.
 *             A varint has 7 bits a byte, the lowest first, the top bit set on all but the last.
 *
 * Invariants  I1 a key occurs at most once in the payloads of one delta; drops of a family come before its records.
 *             I2 a patch is applied to the value that it was made from. A delta is applied to the state that it starts from; where two
 *                writers made different states of one version, the check tells; of a splice, its sum.
 * Ownership   The sink's bytes live until it returns. A reader's bytes point into its payload.
 * Threads     Writing: as quire_kv_changes, on a live arena by the writer. Applying: the writer. Reading: any.
 * Errors      QUIRE_E_CORRUPT for a payload that does not decode; what came before the bad record has been applied then, so the
 *             caller aborts the arena.
 */
#ifndef QUIRE_DELTA_H
#define QUIRE_DELTA_H

#include "../structures/kv.h"

#define QUIRE_DELTA_PAYLOAD_BYTES (256u << 10) /* a payload is handed on once it is longer */

typedef int (*quire_delta_sink)(void *context, const uint8_t *payload, size_t count);
/* From older (NULL: an empty state) to the arena's state being written, which has no raw pages. Families in lists mostly grow by appending: where a key's old
 * values begin its new ones, only the rest is written. Of a long value that replaces another one, only what differs is written where that
 * is less. */
int quire_delta_write(quire_arena *arena, quire_snap *older, const char *const *lists, size_t list_count,
                      quire_delta_sink sink, void *context);
int quire_delta_apply(quire_arena *arena, const uint8_t *payload, size_t count);

typedef enum {
    QUIRE_DELTA_FAMILY = 1,
    QUIRE_DELTA_DROP = 2,
    QUIRE_DELTA_PUT = 3,
    QUIRE_DELTA_PUT_ALL = 4,
    QUIRE_DELTA_REMOVE = 5,
    QUIRE_DELTA_APPEND = 6,
    QUIRE_DELTA_PATCH = 7,
    QUIRE_DELTA_OPEN = 8,
    QUIRE_DELTA_CHECK = 9,
    QUIRE_DELTA_SPLICE = 10,
} quire_delta_op;

typedef struct {
    const uint8_t *next, *end;
} quire_delta_reader;

typedef struct {
    quire_delta_op op;
    uint32_t kind;      /* of a family */
    const uint8_t *key; /* or the family's name */
    size_t key_bytes;
    const uint8_t *value; /* several values with their lengths; of a patch, its bytes */
    size_t value_bytes;
    uint64_t value_count;
    uint64_t patched_bytes;             /* of the value that a patch leads to */
    uint64_t position, removed, behind; /* of a splice: records before it, taken away, and behind these */
} quire_delta_record;
/* QUIRE_OK, QUIRE_E_NOTFOUND at the end, QUIRE_E_CORRUPT. */
int quire_delta_next(quire_delta_reader *reader, quire_delta_record *record);

#endif
