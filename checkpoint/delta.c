/* delta.c -- writes and applies deltas.
 *
 * Purpose     See delta.h and records.h.
 * Layout      delta.h.
 * Invariants  I1 a payload never ends within a record.
 * Ownership   The writer owns one payload buffer and the scratch of one record, freed before it returns. What waits in a run to be
 *             applied points into the payload.
 * Threads     As delta.h.
 * Errors      What the sink returns is passed on.
 */
#include "records.h"

#include <inttypes.h>
#include <stdlib.h>

#include "../structures/sequence.h"

#define VARINT_BYTES_MAX 10u
#define LENGTH_BYTES     4u /* before each of several values */
#define RUN_ITEMS        64
#define RUN_BYTES        (64u << 10)
/* Shorter values are written whole: a patch would save little, and costs a look-up of the old value when it is applied. */
#define PATCHED_BYTES_MIN (32u + LENGTH_BYTES)
/* Runs that are closer than this become one: two lengths would take about as much as the bytes between. */
#define PATCH_GAP_BYTES   4u
#define PATCH_CHECK_BYTES 2u
/* After so many look-ups of old values that were not there, only one in as many is made: most keys are new. */
#define VAIN_LOOKUPS 32u

typedef struct {
    quire_records records;
    const char *const *lists;
    size_t list_count;
    bool list;
    quire_buffer older_values;
    quire_buffer patch;    /* own holds it */
    uint32_t vain_lookups; /* since an old value was found */
} delta_writer;

/* ------------------------------------------------------------------------------------------------ writing */

static size_t varint_put(uint8_t *bytes, uint64_t value) {
    size_t count = 0;
    for (; value >= 0x80; value >>= 7) {
        bytes[count++] = (uint8_t)(value | 0x80);
    }
    bytes[count++] = (uint8_t)value;
    return count;
}

/* Tells apart values that a patch might be applied to by mistake, at the price of adding up their words. */
static uint16_t patch_check_of(const uint8_t *value, size_t count) {
    uint64_t sum = count, word = 0;
    size_t at = 0;
    for (; at + 8 <= count; at += 8) {
        memcpy(&word, value + at, 8);
        sum += word;
    }
    if (at < count) {
        word = 0;
        memcpy(&word, value + at, count - at);
        sum += word;
    }
    return (uint16_t)(sum * 0x9E3779B97F4A7C15u >> 48);
}

int quire_records_flush(quire_records *records) {
    int rc = records->payload.count == 0
                 ? QUIRE_OK
                 : records->sink(records->context, records->payload.own, records->payload.count);
    records->payload.count = 0;
    records->family_written = false;
    return rc <= 0 ? rc : quire_fail(QUIRE_E_IO, "the sink of a delta failed with %d", rc);
}

static int payload_room(quire_records *records, size_t count) {
    size_t needed = records->payload.count + count;
    if (needed <= records->payload.own_capacity) {
        return QUIRE_OK;
    }
    return quire_buffer_grow(&records->payload, needed < 2 * QUIRE_DELTA_PAYLOAD_BYTES ? 2 * QUIRE_DELTA_PAYLOAD_BYTES
                                                                                       : needed + needed / 2);
}

static void payload_add(quire_records *records, const void *bytes, size_t count) {
    if (count != 0) {
        memcpy(records->payload.own + records->payload.count, bytes, count);
        records->payload.count += count;
    }
}

int quire_records_name(quire_records *records, quire_delta_op op, const quire_set_info *family) {
    uint16_t name_bytes = (uint16_t)strlen(family->name);
    uint8_t head[4] = {(uint8_t)op, op == QUIRE_DELTA_FAMILY ? (uint8_t)family->kind : 0, (uint8_t)name_bytes,
                       (uint8_t)(name_bytes >> 8)};
    QUIRE_TRY(payload_room(records, sizeof head + name_bytes));
    payload_add(records, head, sizeof head);
    payload_add(records, family->name, name_bytes);
    return QUIRE_OK;
}

int quire_records_begin(quire_records *records) {
    if (records->payload.count >= QUIRE_DELTA_PAYLOAD_BYTES) {
        QUIRE_TRY(quire_records_flush(records));
    }
    if (records->family_written) {
        return QUIRE_OK;
    }
    records->family_written = true;
    return quire_records_name(records, QUIRE_DELTA_FAMILY, records->family);
}

/* Whether a record of this kind says how many values it has. */
static bool has_count(quire_delta_op op) {
    return op == QUIRE_DELTA_PUT_ALL || op == QUIRE_DELTA_APPEND || op == QUIRE_DELTA_OPEN || op == QUIRE_DELTA_CHECK;
}

static int splice_add(quire_records *records, const quire_delta_record *record) {
    const uint64_t numbers[] = {record->position, record->removed, record->behind, record->value_bytes,
                                record->value_count};
    uint8_t head[1 + 5 * VARINT_BYTES_MAX] = {QUIRE_DELTA_SPLICE};
    size_t head_bytes = 1;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        head_bytes += varint_put(head + head_bytes, numbers[i]);
    }
    QUIRE_TRY(payload_room(records, head_bytes + record->value_bytes));
    payload_add(records, head, head_bytes);
    payload_add(records, record->value, record->value_bytes);
    return QUIRE_OK;
}

int quire_records_add(quire_records *records, const quire_delta_record *record) {
    quire_delta_op op = record->op;
    if (op == QUIRE_DELTA_SPLICE) {
        return splice_add(records, record);
    }
    QUIRE_TRY(payload_room(records, 1 + 3 * VARINT_BYTES_MAX + record->key_bytes + record->value_bytes));
    uint8_t head[1 + 3 * VARINT_BYTES_MAX] = {(uint8_t)op};
    size_t head_bytes = 1;
    head_bytes += varint_put(head + head_bytes, record->key_bytes);
    if (op == QUIRE_DELTA_PATCH) {
        head_bytes += varint_put(head + head_bytes, record->patched_bytes);
    }
    if (op != QUIRE_DELTA_REMOVE) {
        head_bytes += varint_put(head + head_bytes, record->value_bytes);
    }
    if (has_count(op)) {
        head_bytes += varint_put(head + head_bytes, record->value_count);
    }
    payload_add(records, head, head_bytes);
    payload_add(records, record->key, record->key_bytes);
    payload_add(records, record->value, record->value_bytes);
    return QUIRE_OK;
}

int quire_records_put(quire_records *records, const uint8_t *key, size_t key_bytes, const uint8_t *values,
                      size_t values_bytes, uint64_t value_count) {
    size_t skipped = value_count == 1 ? LENGTH_BYTES : 0;
    return quire_records_add(records,
                             &(quire_delta_record){.op = value_count == 1 ? QUIRE_DELTA_PUT : QUIRE_DELTA_PUT_ALL,
                                                   .key = key,
                                                   .key_bytes = key_bytes,
                                                   .value = values + skipped,
                                                   .value_bytes = values_bytes - skipped,
                                                   .value_count = value_count});
}

void quire_records_free(quire_records *records) {
    quire_buffer_free(&records->payload);
}

static int record_write(delta_writer *writer, const quire_delta_record *record) {
    QUIRE_TRY(quire_records_begin(&writer->records));
    return quire_records_add(&writer->records, record);
}

/* Makes a patch of at most bytes_max bytes. The run at hand, from start to end of the newer value, may grow yet. */
typedef struct {
    const uint8_t *newer;
    uint8_t *patch;
    size_t patch_bytes, bytes_max;
    size_t start, end;
    size_t done; /* where the run before ended */
} patch_maker;

/* False if the patch gets too long. */
static bool patch_end_run(patch_maker *maker) {
    size_t count = maker->end - maker->start;
    if (count == 0) {
        return true;
    }
    uint8_t head[2 * VARINT_BYTES_MAX];
    size_t head_bytes = varint_put(head, maker->start - maker->done);
    head_bytes += varint_put(head + head_bytes, count);
    if (head_bytes + count > maker->bytes_max - maker->patch_bytes) {
        return false;
    }
    memcpy(maker->patch + maker->patch_bytes, head, head_bytes);
    memcpy(maker->patch + maker->patch_bytes + head_bytes, maker->newer + maker->start, count);
    maker->patch_bytes += head_bytes + count;
    maker->done = maker->end;
    return true;
}

/* The bytes from start to end differ. */
static bool patch_add(patch_maker *maker, size_t start, size_t end) {
    if (maker->end == maker->start || start - maker->end >= PATCH_GAP_BYTES) {
        if (!patch_end_run(maker)) {
            return false;
        }
        maker->start = start;
    }
    maker->end = end;
    return true;
}

/* Rows of Spark are words of 8 bytes, of which a few change: these are compared whole, and written from the first byte that differs to the
 * last. */
static bool patch_make(patch_maker *maker, const uint8_t *older, size_t older_bytes, size_t newer_bytes) {
    size_t common = older_bytes < newer_bytes ? older_bytes : newer_bytes;
    size_t at = 0;
    for (; at + 8 <= common; at += 8) {
        uint64_t before, after;
        memcpy(&before, older + at, 8);
        memcpy(&after, maker->newer + at, 8);
        uint64_t differs = before ^ after;
        if (differs != 0 && !patch_add(maker, at + (size_t)(__builtin_ctzll(differs) / 8),
                                       at + 8 - (size_t)(__builtin_clzll(differs) / 8))) {
            return false;
        }
    }
    for (; at < common; at++) {
        if (older[at] != maker->newer[at] && !patch_add(maker, at, at + 1)) {
            return false;
        }
    }
    return (newer_bytes == common || patch_add(maker, common, newer_bytes)) && patch_end_run(maker);
}

/* The value as what changed in it, if that saves a quarter of its bytes; *written says whether it does. */
static int patch_write(delta_writer *writer, const quire_change *change, bool *written) {
    const uint8_t *older = writer->older_values.bytes + LENGTH_BYTES;
    size_t older_bytes = writer->older_values.count - LENGTH_BYTES;
    size_t newer_bytes = change->values_bytes - LENGTH_BYTES;
    patch_maker maker = {.newer = change->values + LENGTH_BYTES,
                         .patch_bytes = PATCH_CHECK_BYTES,
                         .bytes_max = newer_bytes - newer_bytes / 4};
    QUIRE_TRY(quire_buffer_grow(&writer->patch, maker.bytes_max));
    maker.patch = writer->patch.own;
    uint16_t check = patch_check_of(older, older_bytes);
    memcpy(maker.patch, &check, PATCH_CHECK_BYTES);
    *written = patch_make(&maker, older, older_bytes, newer_bytes);
    return *written ? record_write(writer, &(quire_delta_record){.op = QUIRE_DELTA_PATCH,
                                                                 .key = change->key,
                                                                 .key_bytes = change->key_bytes,
                                                                 .value = maker.patch,
                                                                 .value_bytes = maker.patch_bytes,
                                                                 .patched_bytes = newer_bytes})
                    : QUIRE_OK;
}

/* The values that are new, behind those that the key had, if these begin them; *written says whether they do. */
static int append_write(delta_writer *writer, const quire_change *change, uint64_t older_count, bool *written) {
    const quire_buffer *older = &writer->older_values;
    size_t older_bytes = older_count == 0 ? 0 : older->count;
    *written = older_bytes == 0 ||
               (older_bytes <= change->values_bytes && memcmp(older->bytes, change->values, older_bytes) == 0);
    if (!*written || change->value_count == older_count) {
        return QUIRE_OK; /* it is again what it was */
    }
    return record_write(writer, &(quire_delta_record){.op = QUIRE_DELTA_APPEND,
                                                      .key = change->key,
                                                      .key_bytes = change->key_bytes,
                                                      .value = change->values + older_bytes,
                                                      .value_bytes = change->values_bytes - older_bytes,
                                                      .value_count = change->value_count - older_count});
}

/* By what it was, if that makes it shorter. */
static int update_write(delta_writer *writer, const quire_change *change, bool *written) {
    uint64_t older_count = 0;
    int rc = quire_change_older(change, &writer->older_values, &older_count);
    if (rc != QUIRE_OK && rc != QUIRE_E_NOTFOUND) {
        return rc;
    }
    if (rc == QUIRE_OK && !change->older_here) {
        writer->vain_lookups = 0;
    }
    if (writer->list) {
        QUIRE_TRY(append_write(writer, change, older_count, written));
    }
    bool patchable = older_count == 1 && writer->older_values.count >= LENGTH_BYTES && change->value_count == 1 &&
                     change->values_bytes >= PATCHED_BYTES_MIN;
    return *written || !patchable ? QUIRE_OK : patch_write(writer, change, written);
}

/* Whether it is worth asking what the key had. */
static bool update_likely(delta_writer *writer, const quire_change *change) {
    if (writer->list) {
        return true;
    }
    if (change->value_count != 1 || change->values_bytes < PATCHED_BYTES_MIN) {
        return false;
    }
    if (change->older_here) {
        return true;
    }
    writer->vain_lookups++; /* until it turns out otherwise */
    return writer->vain_lookups <= VAIN_LOOKUPS || writer->vain_lookups % VAIN_LOOKUPS == 0;
}

static int change_write(void *context, const quire_change *change) {
    delta_writer *writer = context;
    if (change->values == NULL) {
        return record_write(writer, &(quire_delta_record){
                                        .op = QUIRE_DELTA_REMOVE, .key = change->key, .key_bytes = change->key_bytes});
    }
    if (update_likely(writer, change)) {
        bool written = false;
        QUIRE_TRY(update_write(writer, change, &written));
        if (written) {
            return QUIRE_OK;
        }
    }
    QUIRE_TRY(quire_records_begin(&writer->records));
    return quire_records_put(&writer->records, change->key, change->key_bytes, change->values, change->values_bytes,
                             change->value_count);
}

static int everything_write(delta_writer *writer, quire_kv *kv) {
    quire_cursor *cursor;
    QUIRE_TRY(quire_cursor_open(kv, NULL, 0, NULL, 0, 0, &cursor));
    quire_buffer key = {0}, values = {0};
    int rc;
    for (;;) {
        quire_change change = {0};
        rc = quire_cursor_next_all(cursor, &key, &values, &change.value_count);
        if (rc != QUIRE_OK) {
            break;
        }
        change.key = key.bytes;
        change.key_bytes = key.count;
        change.values = values.bytes;
        change.values_bytes = values.count;
        rc = change_write(writer, &change);
        if (rc != QUIRE_OK) {
            break;
        }
    }
    quire_buffer_free(&key);
    quire_buffer_free(&values);
    quire_cursor_close(cursor);
    return rc == QUIRE_E_NOTFOUND ? QUIRE_OK : rc;
}

const quire_set_info *quire_records_family(const quire_set_info *infos, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++) {
        if (strcmp(infos[i].name, name) == 0) {
            return &infos[i];
        }
    }
    return NULL;
}

static bool is_list(const delta_writer *writer, const char *name) {
    for (size_t i = 0; i < writer->list_count; i++) {
        if (strcmp(writer->lists[i], name) == 0) {
            return true;
        }
    }
    return false;
}

bool quire_records_is_map(uint32_t kind) {
    return kind == QUIRE_KIND_MAP || kind == QUIRE_KIND_ORDERED;
}

static int splice_write(void *context, const quire_splice *splice) {
    return record_write(context, &(quire_delta_record){.op = QUIRE_DELTA_SPLICE,
                                                       .value = splice->values,
                                                       .value_bytes = splice->values_bytes,
                                                       .value_count = splice->value_count,
                                                       .position = splice->position,
                                                       .removed = splice->removed,
                                                       .behind = splice->behind});
}

static int sequence_write(delta_writer *writer, quire_arena *arena, quire_snap *older, const quire_set_info *before) {
    quire_sequence *newer_sequence, *older_sequence = NULL;
    QUIRE_TRY(quire_sequence_open(arena, writer->records.family->name, &newer_sequence));
    int rc = before == NULL ? quire_records_begin(&writer->records) /* also an empty one is one */
                            : quire_sequence_open_snap(older, before->name, &older_sequence);
    if (rc == QUIRE_OK) {
        rc = quire_sequence_changes(newer_sequence, older_sequence, splice_write, writer);
    }
    quire_sequence_close(older_sequence);
    quire_sequence_close(newer_sequence);
    return rc;
}

/* before: the family in the older state, NULL if it was not there. */
static int map_write(delta_writer *writer, quire_arena *arena, quire_snap *older, const quire_set_info *before) {
    quire_kv *newer_kv, *older_kv = NULL;
    QUIRE_TRY(quire_kv_open(arena, writer->records.family->name, (quire_kind)writer->records.family->kind, &newer_kv));
    int rc = before == NULL ? quire_records_begin(&writer->records) /* also an empty family is one */
                            : quire_kv_open_snap(older, before->name, (quire_kind)before->kind, &older_kv);
    if (rc == QUIRE_OK) {
        writer->list = is_list(writer, writer->records.family->name);
        writer->vain_lookups = 0;
        rc = before == NULL ? everything_write(writer, newer_kv)
                            : quire_kv_changes(newer_kv, older_kv, change_write, writer);
    }
    quire_kv_close(older_kv);
    quire_kv_close(newer_kv);
    return rc;
}

/* Whether the family of the older state is still there, not destroyed and made again: a clone or an image has records that are older than
 * it, so that no changes can be told from their stamps. */
static int family_kept(quire_arena *arena, quire_snap *older, const quire_set_info *before, bool *kept) {
    quire_set *set;
    int rc = quire_set_open(arena, before->name, 0, &set);
    if (rc != QUIRE_OK && rc != QUIRE_E_NOTFOUND) {
        return rc;
    }
    *kept = rc == QUIRE_OK && set->kind == before->kind && set->epoch_created <= quire_snap_epoch(older);
    return QUIRE_OK;
}

int quire_records_drops(quire_records *records, quire_arena *arena, quire_snap *older, quire_set_info *before,
                        size_t before_count) {
    for (size_t i = 0; i < before_count; i++) {
        bool kept;
        QUIRE_TRY(family_kept(arena, older, &before[i], &kept));
        if (!kept) {
            QUIRE_TRY(quire_records_name(records, QUIRE_DELTA_DROP, &before[i]));
            before[i].name[0] = 0;
        }
    }
    return QUIRE_OK;
}

static int families_write(delta_writer *writer, quire_arena *arena, quire_snap *older, const quire_set_info *now,
                          size_t now_count, quire_set_info *before, size_t before_count) {
    QUIRE_TRY(quire_records_drops(&writer->records, arena, older, before, before_count));
    for (size_t i = 0; i < now_count; i++) {
        writer->records.family = &now[i];
        writer->records.family_written = false;
        const quire_set_info *was = quire_records_family(before, before_count, now[i].name);
        QUIRE_TRY(now[i].kind == QUIRE_KIND_SEQUENCE ? sequence_write(writer, arena, older, was)
                                                     : map_write(writer, arena, older, was));
    }
    return quire_records_flush(&writer->records);
}

int quire_records_families(quire_arena *arena, quire_snap *snap, quire_set_info **infos, size_t *count) {
    *count = 0;
    *infos = NULL;
    QUIRE_TRY(snap != NULL ? quire_snap_list(snap, NULL, 0, count) : quire_set_list(arena, NULL, 0, count));
    *infos = malloc((*count + 1) * sizeof **infos);
    if (*infos == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for the names of %zu families", *count);
    }
    size_t max = *count;
    return snap != NULL ? quire_snap_list(snap, *infos, max, count) : quire_set_list(arena, *infos, max, count);
}

static bool in_delta(uint32_t kind) {
    return quire_records_is_map(kind) || kind == QUIRE_KIND_SEQUENCE;
}

static int families_check(const quire_set_info *infos, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (!in_delta(infos[i].kind)) {
            return quire_fail(QUIRE_E_INVALID,
                              "'%s' is raw pages, and a delta holds maps, lists and deques: mode pages takes it",
                              infos[i].name);
        }
    }
    return QUIRE_OK;
}

int quire_delta_write(quire_arena *arena, quire_snap *older, const char *const *lists, size_t list_count,
                      quire_delta_sink sink, void *context) {
    delta_writer writer = {.records = {.sink = sink, .context = context}, .lists = lists, .list_count = list_count};
    quire_set_info *now = NULL, *before = NULL;
    size_t now_count = 0, before_count = 0;
    int rc = quire_records_families(arena, NULL, &now, &now_count);
    if (rc == QUIRE_OK) {
        rc = families_check(now, now_count);
    }
    if (rc == QUIRE_OK && older != NULL) {
        rc = quire_records_families(arena, older, &before, &before_count);
    }
    if (rc == QUIRE_OK) {
        rc = families_write(&writer, arena, older, now, now_count, before, before_count);
    }
    free(now);
    free(before);
    quire_records_free(&writer.records);
    quire_buffer_free(&writer.older_values);
    quire_buffer_free(&writer.patch);
    return rc;
}

/* ------------------------------------------------------------------------------------------------ reading */

static int bad_record(const char *what) {
    return quire_fail(QUIRE_E_CORRUPT, "a record of a delta makes no sense: %s", what);
}

static inline int varint_get(quire_delta_reader *reader, uint64_t *value) {
    if (QUIRE_LIKELY(reader->next != reader->end && *reader->next < 0x80)) {
        *value = *reader->next++;
        return QUIRE_OK;
    }
    uint64_t result = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
        if (reader->next == reader->end) {
            break;
        }
        uint8_t byte = *reader->next++;
        result |= (uint64_t)(byte & 0x7F) << shift;
        if ((byte & 0x80) == 0) {
            *value = result;
            return QUIRE_OK;
        }
    }
    return bad_record("a length does not end");
}

static inline int bytes_get(quire_delta_reader *reader, uint64_t count, const uint8_t **bytes, size_t *bytes_count) {
    if (count > (uint64_t)(reader->end - reader->next)) {
        return bad_record("it is longer than what is left");
    }
    *bytes = reader->next;
    *bytes_count = (size_t)count;
    reader->next += count;
    return QUIRE_OK;
}

static int name_read(quire_delta_reader *reader, quire_delta_record *record) {
    if (reader->end - reader->next < 3) {
        return bad_record("it ends within a family's name");
    }
    record->kind = reader->next[0];
    uint16_t name_bytes = (uint16_t)(reader->next[1] | reader->next[2] << 8);
    reader->next += 3;
    if (name_bytes == 0 || name_bytes > QUIRE_NAME_BYTES_MAX) {
        return bad_record("a family's name is empty or too long");
    }
    QUIRE_TRY(bytes_get(reader, name_bytes, &record->key, &record->key_bytes));
    if (memchr(record->key, 0, record->key_bytes) != NULL) {
        return bad_record("a family's name has a zero in it");
    }
    return record->op == QUIRE_DELTA_DROP || in_delta(record->kind) ? QUIRE_OK
                                                                    : bad_record("the family's kind is unknown");
}

/* Each value lies within the values, and they are as many as said. */
static int values_check(const quire_delta_record *record) {
    uint64_t count = 0;
    for (size_t at = 0; at < record->value_bytes; count++) {
        uint32_t value_bytes;
        if (record->value_bytes - at < 4) {
            return bad_record("its values do not fit");
        }
        memcpy(&value_bytes, record->value + at, 4);
        at += 4;
        if (value_bytes > record->value_bytes - at) {
            return bad_record("its values do not fit");
        }
        at += value_bytes;
    }
    bool enough = count != 0 || record->op == QUIRE_DELTA_SPLICE;
    return count == record->value_count && enough ? QUIRE_OK : bad_record("its values are not as many as it says");
}

/* The next run of a patch: bytes kept and new ones; *run is never NULL then. */
static int patch_run_get(quire_delta_reader *patch, uint64_t *kept, const uint8_t **run, size_t *run_bytes) {
    uint64_t count;
    QUIRE_TRY(varint_get(patch, kept));
    QUIRE_TRY(varint_get(patch, &count));
    if (count == 0) {
        return bad_record("a run of its patch is empty");
    }
    return bytes_get(patch, count, run, run_bytes);
}

static quire_delta_reader patch_runs(const quire_delta_record *record) {
    return (quire_delta_reader){record->value + PATCH_CHECK_BYTES, record->value + record->value_bytes};
}

/* The runs lie within the new value. */
static int patch_check(const quire_delta_record *record) {
    if (record->value_bytes < PATCH_CHECK_BYTES) {
        return bad_record("its patch has no check");
    }
    quire_delta_reader patch = patch_runs(record);
    uint64_t left = record->patched_bytes;
    while (patch.next != patch.end) {
        uint64_t kept;
        const uint8_t *run;
        size_t run_bytes;
        QUIRE_TRY(patch_run_get(&patch, &kept, &run, &run_bytes));
        if (kept > left || run_bytes > left - kept) {
            return bad_record("its patch runs over the end of the value");
        }
        left -= kept + run_bytes;
    }
    return QUIRE_OK;
}

static int splice_read(quire_delta_reader *reader, quire_delta_record *record) {
    uint64_t value_bytes;
    QUIRE_TRY(varint_get(reader, &record->position));
    QUIRE_TRY(varint_get(reader, &record->removed));
    QUIRE_TRY(varint_get(reader, &record->behind));
    QUIRE_TRY(varint_get(reader, &value_bytes));
    QUIRE_TRY(varint_get(reader, &record->value_count));
    QUIRE_TRY(bytes_get(reader, value_bytes, &record->value, &record->value_bytes));
    if (record->removed > UINT64_MAX - record->position ||
        record->behind > UINT64_MAX - record->position - record->removed) {
        return bad_record("its splice is of more records than there can be");
    }
    if (record->removed == 0 && record->value_count == 0) {
        return bad_record("its splice changes nothing");
    }
    return values_check(record);
}

int quire_delta_next(quire_delta_reader *reader, quire_delta_record *record) {
    if (reader->next == reader->end) {
        return QUIRE_E_NOTFOUND;
    }
    uint64_t key_bytes = 0, value_bytes = 0;
    *record = (quire_delta_record){.op = (quire_delta_op)*reader->next++, .value_count = 1};
    switch (record->op) {
    case QUIRE_DELTA_FAMILY:
    case QUIRE_DELTA_DROP:
        return name_read(reader, record);
    case QUIRE_DELTA_SPLICE:
        return splice_read(reader, record);
    case QUIRE_DELTA_PUT:
    case QUIRE_DELTA_PUT_ALL:
    case QUIRE_DELTA_REMOVE:
    case QUIRE_DELTA_APPEND:
    case QUIRE_DELTA_PATCH:
    case QUIRE_DELTA_OPEN:
    case QUIRE_DELTA_CHECK:
        break;
    default:
        return bad_record("its kind is unknown");
    }
    QUIRE_TRY(varint_get(reader, &key_bytes));
    if (record->op == QUIRE_DELTA_PATCH) {
        QUIRE_TRY(varint_get(reader, &record->patched_bytes));
    }
    if (record->op != QUIRE_DELTA_REMOVE) {
        QUIRE_TRY(varint_get(reader, &value_bytes));
    }
    if (has_count(record->op)) {
        QUIRE_TRY(varint_get(reader, &record->value_count));
    }
    QUIRE_TRY(bytes_get(reader, key_bytes, &record->key, &record->key_bytes));
    if (record->op == QUIRE_DELTA_REMOVE) {
        record->value_count = 0;
        return QUIRE_OK;
    }
    QUIRE_TRY(bytes_get(reader, value_bytes, &record->value, &record->value_bytes));
    if (key_bytes > UINT32_MAX || value_bytes > UINT32_MAX) {
        return bad_record("its key or value is longer than there can be");
    }
    if (record->op == QUIRE_DELTA_PATCH) {
        return patch_check(record);
    }
    return record->op == QUIRE_DELTA_PUT ? QUIRE_OK : values_check(record);
}

/* ------------------------------------------------------------------------------------------------ applying */

/* What the records at hand belong to: one of the two, or neither. */
typedef struct {
    quire_kv *kv;
    quire_sequence *sequence;
} delta_target;

static void target_close(delta_target *target) {
    quire_kv_close(target->kv);
    quire_sequence_close(target->sequence);
    *target = (delta_target){0};
}

static int family_open(quire_arena *arena, const quire_delta_record *record, delta_target *target) {
    char name[QUIRE_NAME_BYTES_MAX + 1];
    memcpy(name, record->key, record->key_bytes);
    name[record->key_bytes] = 0;
    target_close(target);
    if (record->op == QUIRE_DELTA_DROP) {
        int rc = quire_set_destroy(arena, name);
        return rc == QUIRE_E_NOTFOUND ? QUIRE_OK : rc;
    }
    return record->kind == QUIRE_KIND_SEQUENCE ? quire_sequence_open(arena, name, &target->sequence)
                                               : quire_kv_open(arena, name, (quire_kind)record->kind, &target->kv);
}

/* The values take the place of as many records; what there is more of either is added or removed. */
static int splice_apply(quire_sequence *sequence, const quire_delta_record *record) {
    uint64_t count, done = 0;
    QUIRE_TRY(quire_sequence_count(sequence, &count));
    if (record->position + record->removed + record->behind != count) {
        return bad_record("its splice was made from another sequence than there is");
    }
    for (size_t at = 0; at < record->value_bytes; done++) {
        uint32_t value_bytes;
        memcpy(&value_bytes, record->value + at, LENGTH_BYTES);
        const uint8_t *value = record->value + at + LENGTH_BYTES;
        uint64_t index = record->position + done;
        QUIRE_TRY(done < record->removed ? quire_sequence_set(sequence, index, value, value_bytes)
                                         : quire_sequence_insert(sequence, index, value, value_bytes));
        at += LENGTH_BYTES + value_bytes;
    }
    return done < record->removed ? quire_sequence_remove(sequence, record->position + done, record->removed - done)
                                  : QUIRE_OK;
}

static int values_put(quire_kv *kv, const quire_delta_record *record) {
    for (size_t at = 0; at < record->value_bytes;) {
        uint32_t value_bytes;
        memcpy(&value_bytes, record->value + at, 4);
        const uint8_t *value = record->value + at + 4;
        QUIRE_TRY(at == 0 && record->op != QUIRE_DELTA_APPEND
                      ? quire_kv_put(kv, record->key, record->key_bytes, value, value_bytes)
                      : quire_kv_append(kv, record->key, record->key_bytes, value, value_bytes));
        at += 4 + value_bytes;
    }
    return QUIRE_OK;
}

/* Puts and patches are done many at a time, so that the memory of several keys is asked for at once. They wait in two runs; patches are
 * done later than the puts before them, and may be so: no key is in both (delta.h I1). Keys and values stay in the payload. */
typedef struct {
    delta_target target;
    quire_item puts[RUN_ITEMS];
    size_t put_count;
    quire_delta_record patches[RUN_ITEMS];
    size_t patch_count;
    uint64_t patched_bytes; /* of what the patches lead to */
    quire_buffer older;     /* an old value that is not in one piece */
    quire_buffer patched;   /* own holds what the patches lead to, back to back */
} delta_runs;

static int puts_end(delta_runs *runs) {
    size_t done, count = runs->put_count;
    runs->put_count = 0;
    return count == 0 ? QUIRE_OK : quire_kv_put_items(runs->target.kv, runs->puts, count, &done);
}

typedef struct {
    const uint8_t *bytes;
    size_t count;
} older_value;

static int patch_keep(older_value older, size_t at, size_t count, uint8_t *value) {
    if (count == 0) {
        return QUIRE_OK;
    }
    if (at + count > older.count) {
        return bad_record("its patch keeps more bytes than the old value has");
    }
    memcpy(value + at, older.bytes + at, count);
    return QUIRE_OK;
}

/* The value that a patch makes of the older one, to what is in *patched behind its first `start` bytes. quire_delta_next has seen to it that
 * the runs lie within the new value. */
static int patch_apply(const quire_delta_record *record, older_value older, quire_buffer *patched, size_t start) {
    quire_delta_reader patch = patch_runs(record);
    size_t value_bytes = record->patched_bytes, at = 0;
    uint16_t check;
    memcpy(&check, record->value, PATCH_CHECK_BYTES);
    if (check != patch_check_of(older.bytes, older.count)) {
        return bad_record("its patch was made from another value than the key has");
    }
    if (value_bytes > older.count && value_bytes - older.count > record->value_bytes) {
        return bad_record("its patch keeps more bytes than the old value has");
    }
    if (value_bytes > UINT32_MAX) {
        return bad_record("its patch leads to a value longer than there can be");
    }
    QUIRE_TRY(quire_buffer_grow(patched, start + value_bytes + 1)); /* so that no bytes are at some address, too */
    uint8_t *value = patched->own + start;
    while (patch.next != patch.end) {
        uint64_t kept;
        const uint8_t *run;
        size_t run_bytes;
        QUIRE_TRY(patch_run_get(&patch, &kept, &run, &run_bytes));
        QUIRE_TRY(patch_keep(older, at, kept, value));
        memcpy(value + at + kept, run, run_bytes);
        at += kept + run_bytes;
    }
    return patch_keep(older, at, value_bytes - at, value);
}

/* The values that the patches lead to, put together in runs->patched. */
static int patches_apply(delta_runs *runs, quire_item *items, size_t count) {
    size_t start = 0;
    for (size_t first = 0, found; first < count; first += found) {
        QUIRE_TRY(quire_kv_get_items(runs->target.kv, items + first, count - first, &runs->older, &found));
        for (size_t i = first; i < first + found; i++) {
            if (items[i].value == NULL) {
                return bad_record("it is a patch of a value that is not there");
            }
            older_value older = {items[i].value, items[i].value_bytes};
            QUIRE_TRY(patch_apply(&runs->patches[i], older, &runs->patched, start));
            items[i].value_bytes = (uint32_t)runs->patches[i].patched_bytes;
            start += items[i].value_bytes;
        }
    }
    return QUIRE_OK;
}

static int patches_end(delta_runs *runs) {
    quire_item items[RUN_ITEMS];
    size_t done, count = runs->patch_count;
    if (count == 0) {
        return QUIRE_OK;
    }
    for (size_t i = 0; i < count; i++) {
        items[i] = (quire_item){.key = runs->patches[i].key, .key_bytes = (uint32_t)runs->patches[i].key_bytes};
    }
    QUIRE_TRY(patches_apply(runs, items, count));
    const uint8_t *value = runs->patched.own; /* which may have moved as it grew */
    for (size_t i = 0; i < count; value += items[i++].value_bytes) {
        items[i].value = value;
    }
    runs->patch_count = 0;
    runs->patched_bytes = 0;
    return quire_kv_put_items(runs->target.kv, items, count, &done);
}

static int runs_end(delta_runs *runs) {
    QUIRE_TRY(puts_end(runs));
    return patches_end(runs);
}

/* Where the only value of a record that replaces what the key has begins: behind its length, if it has one; else 0 and false. */
static bool is_put_of_one(const quire_delta_record *record, size_t *value_at) {
    bool counted = record->op == QUIRE_DELTA_OPEN || record->op == QUIRE_DELTA_CHECK;
    *value_at = counted ? LENGTH_BYTES : 0;
    return record->op == QUIRE_DELTA_PUT || (counted && record->value_count == 1);
}

static int runs_add(delta_runs *runs, const quire_delta_record *record, size_t value_at) {
    if (record->op == QUIRE_DELTA_PATCH) {
        runs->patches[runs->patch_count++] = *record;
        runs->patched_bytes += record->patched_bytes;
        return runs->patch_count < RUN_ITEMS && runs->patched_bytes < RUN_BYTES ? QUIRE_OK : runs_end(runs);
    }
    runs->puts[runs->put_count++] = (quire_item){record->key, record->value + value_at, (uint32_t)record->key_bytes,
                                                 (uint32_t)(record->value_bytes - value_at)};
    return runs->put_count < RUN_ITEMS ? QUIRE_OK : puts_end(runs);
}

static int record_apply(quire_arena *arena, const quire_delta_record *record, delta_runs *runs) {
    bool names_family = record->op == QUIRE_DELTA_FAMILY || record->op == QUIRE_DELTA_DROP;
    if (runs->target.kv == NULL && runs->target.sequence == NULL && !names_family) {
        return bad_record("it belongs to no family");
    }
    if (!names_family && (record->op == QUIRE_DELTA_SPLICE) != (runs->target.sequence != NULL)) {
        return bad_record("only splices are of sequences, and of nothing else");
    }
    size_t value_at = 0;
    if (record->op == QUIRE_DELTA_PATCH || is_put_of_one(record, &value_at)) {
        return runs_add(runs, record, value_at);
    }
    QUIRE_TRY(runs_end(runs));
    if (names_family) {
        return family_open(arena, record, &runs->target);
    }
    if (record->op == QUIRE_DELTA_SPLICE) {
        return splice_apply(runs->target.sequence, record);
    }
    if (has_count(record->op)) {
        return values_put(runs->target.kv, record);
    }
    int rc = quire_kv_remove(runs->target.kv, record->key, record->key_bytes);
    return rc == QUIRE_E_NOTFOUND ? QUIRE_OK : rc;
}

int quire_records_apply(quire_arena *arena, const uint8_t *payload, size_t count, quire_records_admit admit,
                        void *context) {
    QUIRE_TRY(quire_arena_enter(arena));
    quire_delta_reader reader = {payload, payload + count};
    quire_delta_record record;
    delta_runs runs;
    runs.target = (delta_target){0};
    runs.put_count = runs.patch_count = runs.patched_bytes = 0;
    runs.older = runs.patched = (quire_buffer){0};
    int rc;
    while ((rc = quire_delta_next(&reader, &record)) == QUIRE_OK) {
        rc = admit == NULL ? QUIRE_OK : admit(context, &record);
        rc = rc == QUIRE_OK ? record_apply(arena, &record, &runs) : rc;
        if (rc != QUIRE_OK) {
            break;
        }
    }
    if (rc == QUIRE_E_NOTFOUND) {
        rc = runs_end(&runs);
    }
    target_close(&runs.target);
    quire_buffer_free(&runs.older);
    quire_buffer_free(&runs.patched);
    quire_arena_leave(arena);
    return rc;
}

int quire_delta_apply(quire_arena *arena, const uint8_t *payload, size_t count) {
    return quire_records_apply(arena, payload, count, NULL, NULL);
}
