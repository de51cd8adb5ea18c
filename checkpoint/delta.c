/* delta.c -- writes and applies deltas.
 *
 * Purpose     See delta.h and records.h.
 * Layout      delta.h.
 * Invariants  I1 a payload never ends within a record.
 * Ownership   The writer owns one payload buffer, freed before it returns.
 * Threads     As delta.h.
 * Errors      What the sink returns is passed on.
 */
#include "records.h"

#include <inttypes.h>
#include <stdlib.h>

#define VARINT_BYTES_MAX 10u
#define RUN_ROWS         256
#define RUN_BYTES        (64u << 10)

typedef struct {
    quire_records records;
    const char *const *lists;
    size_t list_count;
    bool list;
    quire_kv *older_kv; /* the family before, NULL: it was not there */
    quire_buffer older_values;
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

int quire_records_add(quire_records *records, quire_delta_op op, const uint8_t *key, size_t key_bytes,
                      const uint8_t *values, size_t values_bytes, uint64_t value_count) {
    QUIRE_TRY(payload_room(records, 1 + 3 * VARINT_BYTES_MAX + key_bytes + values_bytes));
    uint8_t head[1 + 3 * VARINT_BYTES_MAX] = {(uint8_t)op};
    size_t head_bytes = 1;
    head_bytes += varint_put(head + head_bytes, key_bytes);
    if (op != QUIRE_DELTA_REMOVE) {
        head_bytes += varint_put(head + head_bytes, values_bytes);
    }
    if (has_count(op)) {
        head_bytes += varint_put(head + head_bytes, value_count);
    }
    payload_add(records, head, head_bytes);
    payload_add(records, key, key_bytes);
    payload_add(records, values, values_bytes);
    return QUIRE_OK;
}

int quire_records_put(quire_records *records, const uint8_t *key, size_t key_bytes, const uint8_t *values,
                      size_t values_bytes, uint64_t value_count) {
    const size_t length_bytes = 4;
    return value_count == 1
               ? quire_records_add(records, QUIRE_DELTA_PUT, key, key_bytes, values + length_bytes,
                                   values_bytes - length_bytes, 1)
               : quire_records_add(records, QUIRE_DELTA_PUT_ALL, key, key_bytes, values, values_bytes, value_count);
}

void quire_records_free(quire_records *records) {
    quire_buffer_free(&records->payload);
}

/* How many bytes and values the key had, if its new values begin with them; else 0 and *begins is false. */
static int beginning(delta_writer *writer, const uint8_t *key, size_t key_bytes, const uint8_t *values,
                     size_t values_bytes, uint64_t *older_count, bool *begins) {
    *older_count = 0;
    writer->older_values.count = 0;
    int rc = writer->older_kv == NULL
                 ? QUIRE_E_NOTFOUND
                 : quire_kv_get_all(writer->older_kv, key, key_bytes, &writer->older_values, older_count);
    const quire_buffer *older = &writer->older_values;
    *begins = rc == QUIRE_E_NOTFOUND ||
              (rc == QUIRE_OK && older->count <= values_bytes && memcmp(older->bytes, values, older->count) == 0);
    return rc == QUIRE_E_NOTFOUND ? QUIRE_OK : rc;
}

static int change_write(void *context, const uint8_t *key, size_t key_bytes, const uint8_t *values, size_t values_bytes,
                        uint64_t value_count) {
    delta_writer *writer = context;
    quire_records *records = &writer->records;
    if (values == NULL) {
        QUIRE_TRY(quire_records_begin(records));
        return quire_records_add(records, QUIRE_DELTA_REMOVE, key, key_bytes, NULL, 0, 0);
    }
    if (writer->list) {
        uint64_t older_count;
        bool begins;
        QUIRE_TRY(beginning(writer, key, key_bytes, values, values_bytes, &older_count, &begins));
        if (begins) {
            size_t older_bytes = older_count == 0 ? 0 : writer->older_values.count;
            if (value_count == older_count) {
                return QUIRE_OK; /* it is again what it was */
            }
            QUIRE_TRY(quire_records_begin(records));
            return quire_records_add(records, QUIRE_DELTA_APPEND, key, key_bytes, values + older_bytes,
                                     values_bytes - older_bytes, value_count - older_count);
        }
    }
    QUIRE_TRY(quire_records_begin(records));
    return quire_records_put(records, key, key_bytes, values, values_bytes, value_count);
}

static int everything_write(delta_writer *writer, quire_kv *kv) {
    quire_cursor *cursor;
    QUIRE_TRY(quire_cursor_open(kv, NULL, 0, NULL, 0, 0, &cursor));
    quire_buffer key = {0}, values = {0};
    int rc;
    for (;;) {
        uint64_t value_count;
        rc = quire_cursor_next_all(cursor, &key, &values, &value_count);
        if (rc != QUIRE_OK) {
            break;
        }
        rc = change_write(writer, key.bytes, key.count, values.bytes, values.count, value_count);
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

static bool is_map(uint32_t kind) {
    return kind == QUIRE_KIND_MAP || kind == QUIRE_KIND_ORDERED;
}

/* before: the family in the older state, NULL if it was not there. */
static int family_write(delta_writer *writer, quire_arena *arena, quire_snap *older, const quire_set_info *before) {
    quire_kv *newer_kv, *older_kv = NULL;
    QUIRE_TRY(quire_kv_open(arena, writer->records.family->name, (quire_kind)writer->records.family->kind, &newer_kv));
    int rc = before == NULL ? quire_records_begin(&writer->records) /* also an empty family is one */
                            : quire_kv_open_snap(older, before->name, (quire_kind)before->kind, &older_kv);
    if (rc == QUIRE_OK) {
        writer->list = is_list(writer, writer->records.family->name);
        writer->older_kv = older_kv;
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
        QUIRE_TRY(family_write(writer, arena, older, quire_records_family(before, before_count, now[i].name)));
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
    QUIRE_TRY(snap != NULL ? quire_snap_list(snap, *infos, max, count) : quire_set_list(arena, *infos, max, count));
    for (size_t i = 0; i < *count && snap == NULL; i++) {
        if (!is_map((*infos)[i].kind)) {
            return quire_fail(QUIRE_E_INVALID, "'%s' is no map: a delta holds maps and ordered maps", (*infos)[i].name);
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
    return rc;
}

/* ------------------------------------------------------------------------------------------------ reading */

static int bad_record(const char *what) {
    return quire_fail(QUIRE_E_CORRUPT, "a record of a delta makes no sense: %s", what);
}

static int varint_get(quire_delta_reader *reader, uint64_t *value) {
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

static int bytes_get(quire_delta_reader *reader, uint64_t count, const uint8_t **bytes, size_t *bytes_count) {
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
    return record->op == QUIRE_DELTA_DROP || is_map(record->kind) ? QUIRE_OK : bad_record("the family is no map");
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
    return count == record->value_count && count != 0 ? QUIRE_OK : bad_record("its values are not as many as it says");
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
    case QUIRE_DELTA_PUT:
    case QUIRE_DELTA_PUT_ALL:
    case QUIRE_DELTA_REMOVE:
    case QUIRE_DELTA_APPEND:
    case QUIRE_DELTA_OPEN:
    case QUIRE_DELTA_CHECK:
        break;
    default:
        return bad_record("its kind is unknown");
    }
    QUIRE_TRY(varint_get(reader, &key_bytes));
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
    return record->op == QUIRE_DELTA_PUT ? QUIRE_OK : values_check(record);
}

/* ------------------------------------------------------------------------------------------------ applying */

static int family_open(quire_arena *arena, const quire_delta_record *record, quire_kv **kv) {
    char name[QUIRE_NAME_BYTES_MAX + 1];
    memcpy(name, record->key, record->key_bytes);
    name[record->key_bytes] = 0;
    quire_kv_close(*kv);
    *kv = NULL;
    if (record->op == QUIRE_DELTA_DROP) {
        int rc = quire_set_destroy(arena, name);
        return rc == QUIRE_E_NOTFOUND ? QUIRE_OK : rc;
    }
    return quire_kv_open(arena, name, (quire_kind)record->kind, kv);
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

/* Puts that follow each other are done together, so that the memory of several keys is asked for at once. */
typedef struct {
    quire_kv *kv;
    quire_column keys, values;
} put_run;

static quire_rows rows_of(const quire_column *column) {
    return (quire_rows){.bytes = column->bytes,
                        .offsets32 = column->offsets32,
                        .offsets64 = column->offsets64,
                        .row_count = column->row_count};
}

static void column_clear(quire_column *column) {
    column->bytes_count = 0;
    column->row_count = 0;
}

static int run_end(put_run *run) {
    if (run->keys.row_count == 0) {
        return QUIRE_OK;
    }
    quire_rows keys = rows_of(&run->keys), values = rows_of(&run->values);
    int64_t done;
    int rc = quire_kv_put_many(run->kv, &keys, &values, &done);
    column_clear(&run->keys);
    column_clear(&run->values);
    return rc;
}

static int run_add(put_run *run, const quire_delta_record *record, size_t value_at) {
    QUIRE_TRY(quire_column_add(&run->keys, record->key, record->key_bytes));
    QUIRE_TRY(quire_column_add(&run->values, record->value + value_at, record->value_bytes - value_at));
    return run->keys.row_count < RUN_ROWS && run->values.bytes_count < RUN_BYTES ? QUIRE_OK : run_end(run);
}

/* Where the only value of a record that replaces what the key has begins: behind its length, if it has one; else 0 and false. */
static bool is_put_of_one(const quire_delta_record *record, size_t *value_at) {
    bool counted = record->op == QUIRE_DELTA_OPEN || record->op == QUIRE_DELTA_CHECK;
    *value_at = counted ? 4 : 0;
    return record->op == QUIRE_DELTA_PUT || (counted && record->value_count == 1);
}

static int record_apply(quire_arena *arena, const quire_delta_record *record, put_run *run) {
    size_t value_at;
    if (is_put_of_one(record, &value_at)) {
        return run->kv == NULL ? bad_record("it belongs to no family") : run_add(run, record, value_at);
    }
    QUIRE_TRY(run_end(run));
    if (record->op == QUIRE_DELTA_FAMILY || record->op == QUIRE_DELTA_DROP) {
        return family_open(arena, record, &run->kv);
    }
    if (run->kv == NULL) {
        return bad_record("it belongs to no family");
    }
    if (has_count(record->op)) {
        return values_put(run->kv, record);
    }
    int rc = quire_kv_remove(run->kv, record->key, record->key_bytes);
    return rc == QUIRE_E_NOTFOUND ? QUIRE_OK : rc;
}

int quire_delta_apply(quire_arena *arena, const uint8_t *payload, size_t count) {
    QUIRE_TRY(quire_arena_enter(arena));
    quire_delta_reader reader = {payload, payload + count};
    quire_delta_record record;
    put_run run = {0};
    int rc;
    while ((rc = quire_delta_next(&reader, &record)) == QUIRE_OK) {
        rc = record_apply(arena, &record, &run);
        if (rc != QUIRE_OK) {
            break;
        }
    }
    if (rc == QUIRE_E_NOTFOUND) {
        rc = run_end(&run);
    }
    quire_kv_close(run.kv);
    quire_column_free(&run.keys);
    quire_column_free(&run.values);
    quire_arena_leave(arena);
    return rc;
}
