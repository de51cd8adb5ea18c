/* What Python calls of container.h, delta.h, pages.h, cec.h and xxhash32.h; the compiler checks each line against them. */
#define QUIRE_FILE_HEADER_BYTES_MIN 72
#define QUIRE_FILE_HEADER_BYTES_MAX 4096
#define QUIRE_FRAME_HEADER_BYTES    24
#define QUIRE_FRAME_END_BYTES       32
#define QUIRE_FRAME_BYTES_MAX       ...

typedef enum {
    QUIRE_FILE_DELTA = 1,
    QUIRE_FILE_BASE = 2,
    QUIRE_FILE_PAGES = 3,
    QUIRE_FILE_LOG = 4,
    QUIRE_FILE_PART = 5,
} quire_file_kind;
#define QUIRE_FILE_ROW_CHECKSUMS ...
typedef enum {
    QUIRE_FRAME_RECORDS = 1,
    QUIRE_FRAME_IMAGE = 2,
    QUIRE_FRAME_END = 3,
    QUIRE_FRAME_PAGES = 4,
    QUIRE_FRAME_PARTS = 5,
} quire_frame_kind;

typedef struct {
    const char *bytes;
    size_t count;
} quire_text;

typedef struct {
    quire_file_kind kind;
    uint64_t version;
    uint64_t parent_version;
    uint64_t operator_id;
    uint32_t partition_id;
    uint32_t page_bytes;
    uint32_t flags;
    quire_text store_name, id, parent_id, codec;
} quire_file_header;

int quire_file_header_bytes(const quire_file_header *header);
int quire_file_header_encode(const quire_file_header *header, uint8_t *bytes, size_t capacity);
int quire_file_header_peek(const uint8_t *bytes, size_t count);
int quire_file_header_decode(const uint8_t *bytes, size_t count, quire_file_header *header);

typedef struct {
    quire_frame_kind kind;
    uint32_t raw_bytes;
    uint32_t stored_bytes;
    uint32_t crc;
} quire_frame_header;
int quire_frame_encode(quire_frame_kind kind, uint32_t raw_bytes, const uint8_t *stored, size_t stored_bytes,
                       uint8_t bytes[QUIRE_FRAME_HEADER_BYTES]);
int quire_frame_decode(const uint8_t bytes[QUIRE_FRAME_HEADER_BYTES], quire_frame_header *frame);
int quire_frame_verify(const quire_frame_header *frame, const uint8_t *stored);

typedef struct {
    uint64_t frames;
    uint64_t raw_bytes;
    uint64_t keys;
    uint64_t since;
} quire_file_end;
void quire_file_end_encode(const quire_file_end *end, uint8_t bytes[QUIRE_FRAME_END_BYTES]);
int quire_file_end_decode(const uint8_t *bytes, size_t count, quire_file_end *end);

typedef int (*quire_delta_sink)(void *context, const uint8_t *payload, size_t count);
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
    uint32_t kind;
    const uint8_t *key;
    size_t key_bytes;
    const uint8_t *value;
    size_t value_bytes;
    uint64_t value_count;
    uint64_t patched_bytes;
    uint64_t position, removed, behind;
} quire_delta_record;
int quire_delta_next(quire_delta_reader *reader, quire_delta_record *record);

uint32_t quire_xxhash32(uint32_t seed, const uint8_t *bytes, size_t count);

typedef struct quire_cec quire_cec;

typedef struct {
    double extent_target;
    uint64_t bytes_max;
    uint64_t nanos_max;
} quire_cec_policy;

typedef struct {
    uint64_t opens;
    uint64_t footprints;
    uint64_t results;
    uint64_t checks;
    uint64_t keys;
    uint64_t records;
    uint64_t extent;
    uint64_t since;
    uint64_t to_read;
} quire_cec_summary;

int quire_cec_create(quire_arena *arena, const quire_cec_policy *policy, quire_cec **cec);
void quire_cec_destroy(quire_cec *cec);
int quire_cec_write(quire_cec *cec, quire_snap *older, uint64_t version, quire_delta_sink sink, void *context,
                    quire_cec_summary *summary);
int quire_cec_committed(quire_cec *cec);
int quire_cec_apply(quire_cec *cec, const uint8_t *payload, size_t count);
int quire_cec_loaded(quire_cec *cec, uint64_t version);
int quire_cec_complete(quire_cec *cec, uint64_t keys);
int quire_cec_foreign(quire_cec *cec, uint64_t version);
int quire_cec_restored(quire_cec *cec, uint64_t version);

/* A callback that Python supplies (checkpoint/delta.py). */
extern "Python" int quire_python_take_payload(void *context, const uint8_t *payload, size_t count);

int quire_pages_write(quire_arena *arena, uint32_t since, quire_delta_sink sink, void *context);
int quire_pages_bytes(quire_arena *arena, uint32_t since, uint64_t *bytes);
int quire_pages_apply(quire_arena *arena, const uint8_t *payload, size_t count);
