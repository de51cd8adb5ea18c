/* What Python calls of record.h, kv.h and sequence.h; the compiler checks each line against them. */
typedef struct {
    const uint8_t *bytes;
    size_t count;
    ...;
} quire_buffer;
void quire_buffer_free(quire_buffer *buffer);

typedef enum {
    QUIRE_KIND_MAP = 1,
    QUIRE_KIND_ORDERED = 2,
    QUIRE_KIND_SEQUENCE = 3,
    QUIRE_KIND_RAW = 4,
} quire_kind;

typedef struct quire_kv quire_kv;
typedef struct quire_cursor quire_cursor;

int quire_kv_open(quire_arena *arena, const char *name, quire_kind kind, quire_kv **kv);
int quire_kv_open_snap(quire_snap *snap, const char *name, quire_kind kind, quire_kv **kv);
void quire_kv_close(quire_kv *kv);
int quire_kv_count(quire_kv *kv, uint64_t *count);
int quire_kv_get(quire_kv *kv, const uint8_t *key, size_t key_bytes, quire_buffer *value);
int quire_kv_get_all(quire_kv *kv, const uint8_t *key, size_t key_bytes, quire_buffer *values, uint64_t *value_count);
int quire_kv_contains(quire_kv *kv, const uint8_t *key, size_t key_bytes, bool *found);
int quire_kv_put(quire_kv *kv, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes);
int quire_kv_append(quire_kv *kv, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes);
int quire_kv_remove(quire_kv *kv, const uint8_t *key, size_t key_bytes);
int quire_kv_clear(quire_kv *kv);
int quire_kv_remove_range(quire_kv *kv, const uint8_t *lo, size_t lo_bytes, const uint8_t *hi, size_t hi_bytes,
                          uint64_t *removed);

typedef struct {
    const uint8_t *bytes;
    const int32_t *offsets32;
    const int64_t *offsets64;
    int64_t width;
    const uint8_t *validity;
    int64_t offset;
    int64_t row_count;
} quire_rows;

typedef struct {
    uint8_t *bytes;
    size_t bytes_count, bytes_capacity;
    int32_t *offsets32;
    int64_t *offsets64;
    uint8_t *validity;
    int64_t row_count, row_capacity, null_count;
} quire_column;
void quire_column_free(quire_column *column);

int quire_kv_get_many(quire_kv *kv, const quire_rows *keys, quire_column *values);
int quire_kv_contains_many(quire_kv *kv, const quire_rows *keys, uint8_t *found);
int quire_kv_put_many(quire_kv *kv, const quire_rows *keys, const quire_rows *values, int64_t *done);
int quire_kv_append_many(quire_kv *kv, const quire_rows *keys, const quire_rows *values, int64_t *done);
int quire_kv_get_lists(quire_kv *kv, const quire_rows *keys, int64_t *offsets, quire_column *values);
int quire_kv_put_lists(quire_kv *kv, const quire_rows *keys, const int64_t *offsets, const quire_rows *values,
                       int64_t *done);
int quire_kv_remove_many(quire_kv *kv, const quire_rows *keys, uint8_t *found, int64_t *removed);

#define QUIRE_CURSOR_REVERSE 1

int quire_cursor_open(quire_kv *kv, const uint8_t *lo, size_t lo_bytes, const uint8_t *hi, size_t hi_bytes, unsigned flags,
                      quire_cursor **cursor);
void quire_cursor_close(quire_cursor *cursor);
int quire_cursor_next_all(quire_cursor *cursor, quire_buffer *key, quire_buffer *values, uint64_t *value_count);
int quire_cursor_next_many(quire_cursor *cursor, int64_t row_count, size_t bytes_max, quire_column *keys,
                           quire_column *values, int64_t *rows);

typedef struct {
    const uint8_t *key;
    size_t key_bytes;
    const uint8_t *values;
    size_t values_bytes;
    uint64_t value_count;
    bool older_here;
    const void *walk;
} quire_change;
typedef int (*quire_change_visit)(void *context, const quire_change *change);
int quire_kv_changes(quire_kv *newer, quire_kv *older, quire_change_visit visit, void *context);
int quire_kv_check(quire_kv *kv);

typedef struct {
    uint64_t count;
    uint64_t pages;
    uint64_t index_pages;
} quire_kv_stats;
int quire_kv_stats_get(quire_kv *kv, quire_kv_stats *stats);

typedef struct quire_sequence quire_sequence;
typedef struct quire_sequence_cursor quire_sequence_cursor;

int quire_sequence_open(quire_arena *arena, const char *name, quire_sequence **sequence);
int quire_sequence_open_snap(quire_snap *snap, const char *name, quire_sequence **sequence);
void quire_sequence_close(quire_sequence *sequence);
int quire_sequence_count(quire_sequence *sequence, uint64_t *count);
int quire_sequence_get(quire_sequence *sequence, uint64_t index, quire_buffer *value);
int quire_sequence_set(quire_sequence *sequence, uint64_t index, const uint8_t *value, size_t value_bytes);
int quire_sequence_insert(quire_sequence *sequence, uint64_t index, const uint8_t *value, size_t value_bytes);
int quire_sequence_remove(quire_sequence *sequence, uint64_t index, uint64_t count);
int quire_sequence_clear(quire_sequence *sequence);
int quire_sequence_extend(quire_sequence *sequence, const quire_rows *rows, int64_t *done);
int quire_sequence_cursor_open(quire_sequence *sequence, uint64_t index, bool reverse, quire_sequence_cursor **cursor);
int quire_sequence_cursor_next_many(quire_sequence_cursor *cursor, int64_t row_count, size_t bytes_max, quire_column *values,
                                    int64_t *rows);
void quire_sequence_cursor_close(quire_sequence_cursor *cursor);
int quire_sequence_check(quire_sequence *sequence);

/* A callback that Python supplies (structures/maps.py). */
extern "Python" int quire_python_visit_change(void *context, const quire_change *change);
