/* records.h -- writing the records of delta.h, for delta.c and cec.c. Not for users of the core.
 *
 * Purpose     One place that knows how a record's bytes lie and when a payload ends; carried out in delta.c.
 * Layout      delta.h.
 * Invariants  I1 a payload never ends within a record and begins with a family, or with families dropped.
 * Ownership   The writer owns its payload until quire_records_free.
 * Threads     One thread at a time.
 * Errors      What the sink returns is passed on.
 */
#ifndef QUIRE_RECORDS_H
#define QUIRE_RECORDS_H

#include "delta.h"

typedef struct {
    quire_delta_sink sink;
    void *context;
    quire_buffer payload; /* own holds it, count its length */
    const quire_set_info *family;
    bool family_written; /* in this payload */
} quire_records;

/* A family's name, or that it is dropped. */
int quire_records_name(quire_records *records, quire_delta_op op, const quire_set_info *family);
/* Ends a payload that is long enough, and begins the next with the family's name. */
int quire_records_begin(quire_records *records);
/* A record of the family, in the payload that was begun. */
int quire_records_add(quire_records *records, const quire_delta_record *record);
/* A key with its values, as put if it is one and as put all if there are several. */
int quire_records_put(quire_records *records, const uint8_t *key, size_t key_bytes, const uint8_t *values,
                      size_t values_bytes, uint64_t value_count);
/* Hands the payload on, however short. */
int quire_records_flush(quire_records *records);
void quire_records_free(quire_records *records);

/* quire_delta_apply, for who has a say in each record before it is applied. */
typedef int (*quire_records_admit)(void *context, const quire_delta_record *record);
int quire_records_apply(quire_arena *arena, const uint8_t *payload, size_t count, quire_records_admit admit,
                        void *context);

/* The families of a snapshot, or of the arena's state being written if it is NULL; the caller frees *infos. */
int quire_records_families(quire_arena *arena, quire_snap *snap, quire_set_info **infos, size_t *count);
bool quire_records_is_map(uint32_t kind);
const quire_set_info *quire_records_family(const quire_set_info *infos, size_t count, const char *name);
/* Writes the families of the older state that are not there any more, or not the same: these have no name in before afterwards. */
int quire_records_drops(quire_records *records, quire_arena *arena, quire_snap *older, quire_set_info *before,
                        size_t before_count);

#endif
