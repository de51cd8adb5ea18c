/* cec.h -- continuous eventual checkpointing: a log of changes that holds every live key in its last stretch.
 *
 * Purpose     A commit of the `cec` mode writes what changed and, besides, keys that did not change but whose newest record in the log
 *             is the oldest. So no base is ever needed: whoever reads the log from `since` on has read every live key.
 *
 * Layout      The records of delta.h in payloads as there: 8 for a key that is new, 3 or 4 for one that was changed, 5 for one removed,
 *             9 for one written again. Each file of the log begins with the names of all families.
 *
 *             footprint  a live key's newest record in the log; the key's stamp (record.h) tells which version it is in
 *             place      how many records the log has before one
 *             extent     the stretch of log from the oldest footprint to the end, in records
 *
 * Invariants  I1 the extent is at most extent_target * live keys (and what one commit wrote on top, where the keys became fewer), unless a
 *                bound of the policy, or want of memory for copies of pages, stood against it; then for one commit.
 *             I2 no live record has its footprint before the version `since`.
 *             I3 nothing changed, nothing is written again.
 * Ownership   The object belongs to the owner of the arena, who destroys it before closing the arena.
 * Threads     The writer's.
 * Errors      A write that failed, or was not followed by quire_cec_committed, counts as not made; the arena may be aborted or written again.
 */
#ifndef QUIRE_CEC_H
#define QUIRE_CEC_H

#include "delta.h"

typedef struct quire_cec quire_cec;

typedef struct {
    double extent_target; /* extent in multiples of the live keys, more than 1 */
    uint64_t
        bytes_max; /* of keys and values written again in a commit; 0: no bound. Passed where the target would else be missed for */
    uint64_t nanos_max; /* more than one commit. The same for time */
} quire_cec_policy;

typedef struct {
    uint64_t opens;      /* keys that are new */
    uint64_t footprints; /* that were changed */
    uint64_t results;    /* removed */
    uint64_t checks;     /* written again */
    uint64_t keys;       /* live */
    uint64_t records;    /* in this version: the sum of the first four */
    uint64_t extent;     /* from the oldest footprint on; what the target is for */
    uint64_t since;      /* the version in which it begins */
    uint64_t to_read;    /* records from the first of that version on */
} quire_cec_summary;

/* The object knows nothing yet: the arena is empty, or quire_cec_foreign says what it holds. QUIRE_E_INVALID for a policy that cannot be
 * kept. */
int quire_cec_create(quire_arena *arena, const quire_cec_policy *policy, quire_cec **cec);
void quire_cec_destroy(quire_cec *cec);
/* The state being written becomes a version of the log. older: the state of the version before (NULL: nothing, in the first version). Changes
 * stamps, so the arena is committed afterwards, or aborted. Payloads as quire_delta_write gives them. */
int quire_cec_write(quire_cec *cec, quire_snap *older, uint64_t version, quire_delta_sink sink, void *context,
                    quire_cec_summary *summary);
/* What was written last is durable and the arena committed. */
int quire_cec_committed(quire_cec *cec);

/* Recovery: the payloads of one version after the other from `since` on, in order, on an empty arena; after each version the owner commits
 * the arena and tells that it was loaded. QUIRE_E_CORRUPT for what is no record of a log; what came before it is applied then. */
int quire_cec_apply(quire_cec *cec, const uint8_t *payload, size_t count);
int quire_cec_loaded(quire_cec *cec, uint64_t version);
/* QUIRE_E_CORRUPT unless the arena holds that many live keys: with the number in the last file's end frame, what was loaded is whole. */
int quire_cec_complete(quire_cec *cec, uint64_t keys);

/* The arena's last commit is this version, and its records are not from the log: they count as written in this version. */
int quire_cec_foreign(quire_cec *cec, uint64_t version);
/* The arena's last commit is this version of the log again, later ones are not: after quire_arena_restore. QUIRE_E_NOTFOUND if that is too
 * long ago: load it instead. */
int quire_cec_restored(quire_cec *cec, uint64_t version);

#endif
