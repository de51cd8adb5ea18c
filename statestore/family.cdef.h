/* What Python calls of family.h; the compiler checks each line against it. */
typedef struct quire_family quire_family;
typedef struct quire_scan quire_scan;

#define QUIRE_SPAN_OWN ...

typedef struct {
    int64_t address;
    int64_t count;
} quire_span;

typedef struct {
    quire_span key;
    quire_span value;
} quire_span_pair;

int quire_family_open(quire_arena *arena, const char *name, bool ordered, quire_family **family);
int quire_family_open_snap(quire_snap *snap, const char *name, bool ordered, quire_family **family);
void quire_family_close(quire_family *family);
int quire_family_count(quire_family *family, uint64_t *count);
int quire_family_get(quire_family *family, const uint8_t *key, size_t key_bytes, quire_span *value);
int quire_family_get_many(quire_family *family, const uint8_t *keys, const int32_t *key_offsets, size_t first, size_t count,
                          quire_span *values, size_t *done);
int quire_family_get_all(quire_family *family, const uint8_t *key, size_t key_bytes, quire_span *values);
int quire_family_contains(quire_family *family, const uint8_t *key, size_t key_bytes, bool *found);
int quire_family_put(quire_family *family, const uint8_t *key, size_t key_bytes, const uint8_t *value, size_t value_bytes);
int quire_family_append(quire_family *family, const uint8_t *key, size_t key_bytes, const uint8_t *value,
                        size_t value_bytes);
int quire_family_put_many(quire_family *family, const uint8_t *keys, const int32_t *key_offsets, const uint8_t *values,
                          const int32_t *value_offsets, size_t count);
int quire_family_remove(quire_family *family, const uint8_t *key, size_t key_bytes);
int quire_family_remove_range(quire_family *family, const uint8_t *lo, size_t lo_bytes, const uint8_t *hi, size_t hi_bytes);

int quire_scan_open(quire_family *family, const uint8_t *lo, size_t lo_bytes, const uint8_t *hi, size_t hi_bytes, bool all,
                    quire_scan **scan);
int quire_scan_next(quire_scan *scan, quire_span_pair *rows, size_t max, size_t *count);
void quire_scan_close(quire_scan *scan);
