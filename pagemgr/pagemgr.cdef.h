/* What Python calls of error.h and pagemgr.h; the compiler checks each line against them. */
enum {
    QUIRE_OK = 0,
    QUIRE_E_NOTFOUND = -1,
    QUIRE_E_EXISTS = -2,
    QUIRE_E_INVALID = -3,
    QUIRE_E_NOMEM = -4,
    QUIRE_E_LIMIT = -5,
    QUIRE_E_NOSPACE = -6,
    QUIRE_E_IO = -7,
    QUIRE_E_CORRUPT = -8,
    QUIRE_E_VERSION = -9,
    QUIRE_E_BUSY = -10,
    QUIRE_E_CLOSED = -11,
    QUIRE_E_READONLY = -12,
    QUIRE_E_FULL = -13,
    QUIRE_E_MISMATCH = -14,
};
const char *quire_error_message(void);
const char *quire_error_name(int code);

#define QUIRE_PAGE_BYTES_MIN     1024
#define QUIRE_PAGE_BYTES_MAX     65536
#define QUIRE_PAGE_BYTES_DEFAULT ...
#define QUIRE_NAME_BYTES_MAX     191

typedef uint32_t quire_page_id;
typedef struct quire_arena quire_arena;
typedef struct quire_snap quire_snap;
typedef struct quire_budget quire_budget;

typedef struct {
    const char *path;
    uint32_t page_bytes;
    uint64_t limit_bytes;
    quire_budget *budget;
    bool read_only;
    bool in_place;
    double lock_wait_seconds;
} quire_arena_options;

int quire_arena_open(const quire_arena_options *options, quire_arena **arena);
int quire_arena_close_all(quire_arena **arena);
uint32_t quire_arena_page_bytes(const quire_arena *arena);
uint32_t quire_arena_epoch(const quire_arena *arena);
typedef struct {
    uint8_t identity[16];
    uint32_t epoch;
} quire_point;
void quire_arena_point(const quire_arena *arena, quire_point *point);
uint32_t quire_arena_origin(const quire_arena *arena, quire_point *origin);
int quire_arena_commit(quire_arena *arena);
int quire_arena_abort(quire_arena *arena);
int quire_arena_restore(quire_arena *arena, quire_snap *snap);
int quire_arena_sync(quire_arena *arena);
int quire_arena_check(quire_arena *arena);

typedef struct {
    uint64_t page_bytes;
    uint64_t frames_used;
    uint64_t frames_dirty;
    uint64_t frames_retired;
    uint64_t frames_free;
    uint64_t bytes_held;
    uint64_t bytes_limit;
    uint64_t bytes_reserved;
    uint64_t snapshots;
    uint64_t sets;
    uint32_t epoch_committed;
    uint32_t epoch_writing;
    uint32_t epoch_pinned_min;
} quire_stats;
int quire_arena_stats(quire_arena *arena, quire_stats *stats);
typedef struct {
    uint32_t epoch;
    uint64_t frames;
} quire_pinned;
int quire_arena_pinned(quire_arena *arena, quire_pinned *pinned, size_t max, size_t *count);

typedef struct {
    ...;
} quire_view;
typedef struct quire_set quire_set;

int quire_set_create(quire_arena *arena, const char *name, uint32_t kind, quire_set **set);
int quire_set_open(quire_arena *arena, const char *name, uint32_t kind, quire_set **set);
int quire_set_exists(quire_arena *arena, const char *name);
int quire_set_destroy(quire_arena *arena, const char *name);
int quire_set_clone(quire_arena *arena, const char *source, const char *name);
typedef struct {
    uint32_t kind;
    char name[...];
} quire_set_info;
int quire_set_list(quire_arena *arena, quire_set_info *infos, size_t max, size_t *count);

const void *quire_page_read(const quire_view *view, quire_page_id id);
int quire_raw_alloc(quire_set *set, quire_page_id *id);
int quire_raw_free(quire_set *set, quire_page_id id);
int quire_raw_read(quire_set *set, quire_page_id id, void *bytes);
int quire_raw_write(quire_set *set, quire_page_id id, size_t offset, const void *bytes, size_t count);
typedef struct {
    quire_page_id id;
    bool in_use;
} quire_page_state;
int quire_set_changed(quire_set *set, uint32_t since, quire_page_state *pages, size_t max, size_t *count);

int quire_snap_acquire(quire_arena *arena, quire_snap **snap);
int quire_snap_acquire_weak(quire_arena *arena, quire_snap **snap);
int quire_snap_create(quire_arena *arena, const char *name, const char *const *sets, size_t set_count,
                      quire_snap **snap);
int quire_snap_find(quire_arena *arena, const char *name, quire_snap **snap);
void quire_snap_release(quire_snap *snap);
uint32_t quire_snap_epoch(const quire_snap *snap);
int quire_snap_view(quire_snap *snap, const char *name, uint32_t kind, quire_view *view);
int quire_snap_list(quire_snap *snap, quire_set_info *infos, size_t max, size_t *count);
typedef int (*quire_sink)(void *context, const void *bytes, size_t count);
int quire_snap_write(quire_snap *snap, quire_sink sink, void *context);
int quire_snap_write_file(quire_snap *snap, const char *path);
int quire_arena_load_file(quire_arena *arena, const char *path);
int quire_arena_load(quire_arena *arena, const void *bytes, size_t count, const char *name);
typedef struct quire_image quire_image;
int quire_image_begin(const quire_arena_options *options, uint64_t image_bytes, const char *name, quire_image **image);
uint8_t *quire_image_room(quire_image *image);
int quire_image_end(quire_image **image, quire_arena **arena);
int quire_image_map(const quire_arena_options *options, const char *path, quire_arena **arena);

/* A callback that Python supplies (pagemgr/callbacks.py). */
extern "Python" int quire_python_take_bytes(void *context, const void *bytes, size_t count);
