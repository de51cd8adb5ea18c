/* arena.c -- memory and files behind an arena: reserving, growing, giving back, locking, opening.
 *
 * Purpose     Provides frames. An arena is a row of 2 MiB chunks; address space for them is reserved in extents that double, so
 *             a small arena reserves little and no page ever moves. Memory is taken (and charged) in steps as frames are needed.
 *
 * Layout      internal.h for the header. Frame f lies at byte f * page_bytes of the arena, in chunk f >> chunk_shift.
 *             File locks stand on bytes past any file's end: LOCK_WRITER for the writer, LOCK_ATTACHMENT + n for process n.
 *
 * Invariants  I1 chunks[c] never changes once set, until the arena is closed.
 *             I2 a frame below frame_limit in a chunk that is not absent is backed: memory charged, disk space allocated. So a
 *                store to a page cannot fail, and a full disk shows as an error of quire_arena_reserve.
 *             I3 free_bits has no bit for header frames, absent chunks and frames at or above frame_limit;
 *                free_count is the number of bits; a summary bit is set exactly if its word is not zero.
 *
 * Ownership   The arena owns mappings, file descriptor and bit arrays; quire_arena_close releases them all.
 * Threads     quire_chunk_map may be called by readers on any thread; the rest by whoever has entered the arena.
 * Errors      LIMIT (own limit or budget), NOSPACE (disk), NOMEM (memory or address space), FULL (1 TiB per arena).
 */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LOCK_WRITER           ((off_t)1 << 62)
#define LOCK_ATTACHMENT       (LOCK_WRITER + 1)
#define ATTACHMENTS_MAX       4096u
#define HUGE_PAGES_FROM_CHUNK 8u
#define EXTENT_CHUNKS_MIN     1u
#define EXTENT_CHUNKS_MAX     512u
#define TRIM_SLACK_BYTES      ((uint64_t)32 << 20)
#define TRIM_COMMITS          8u
#define TRIM_COMMITS_IN_PLACE 2u /* room for copies is needed only while something is pinned */

/* ------------------------------------------------------------------------------------------------ fork */

uint32_t quire_fork_generation;

/* File arenas of this process. A descriptor is opened, locked and closed only with its arena in this list, so that no fork,
 * whenever it comes, leaves a child with a lock it does not know of. */
static quire_arena *open_files;
static pthread_mutex_t open_files_mutex = PTHREAD_MUTEX_INITIALIZER;

static void before_fork(void) {
    pthread_mutex_lock(&open_files_mutex);
}

static void after_fork_in_parent(void) {
    pthread_mutex_unlock(&open_files_mutex);
}

/* The child inherits the file descriptions and with them the parent's locks: it must let go of them, or they would outlive
 * the parent. */
static void after_fork_in_child(void) {
    quire_fork_generation++;
    for (quire_arena *arena = open_files; arena != NULL; arena = arena->open_next) {
        close(arena->file);
        close(arena->locks);
        arena->file = arena->locks = -1;
    }
    open_files = NULL;
    pthread_mutex_unlock(&open_files_mutex);
}

static void watch_forks(void) {
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* Opens the file twice, once for its bytes and once for locks. */
static int descriptors_open(quire_arena *arena, const char *path, int flags) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&open_files_mutex);
    arena->file = open(path, flags, 0600);
    arena->locks = arena->file < 0 ? -1 : open(path, O_RDWR | O_CLOEXEC);
    int error = errno;
    arena->open_next = open_files;
    open_files = arena;
    pthread_mutex_unlock(&open_files_mutex);
    return arena->file < 0 || arena->locks < 0 ? error : 0;
}

static void descriptors_close(quire_arena *arena) {
    pthread_mutex_lock(&open_files_mutex);
    for (quire_arena **at = &open_files; *at != NULL; at = &(*at)->open_next) {
        if (*at == arena) {
            *at = arena->open_next;
            break;
        }
    }
    if (arena->file >= 0) {
        close(arena->file);
    }
    if (arena->locks >= 0) {
        close(arena->locks); /* and with it go our locks */
    }
    arena->file = arena->locks = -1;
    pthread_mutex_unlock(&open_files_mutex);
}

/* ------------------------------------------------------------------------------------------------ budgets */

int quire_budget_create(uint64_t bytes_max, quire_budget **budget) {
    quire_budget *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for a budget");
    }
    made->bytes_max = bytes_max;
    made->users = 1;
    *budget = made;
    return QUIRE_OK;
}

static void budget_leave(quire_budget *budget) {
    if (budget != NULL && __atomic_sub_fetch(&budget->users, 1, __ATOMIC_ACQ_REL) == 0) {
        free(budget);
    }
}

void quire_budget_destroy(quire_budget *budget) {
    budget_leave(budget);
}

uint64_t quire_budget_used(const quire_budget *budget) {
    return __atomic_load_n(&budget->bytes_used, __ATOMIC_RELAXED);
}

int quire_arena_charge(quire_arena *arena, uint64_t bytes) {
    if (arena->limit_bytes != 0 && arena->bytes_held + bytes > arena->limit_bytes) {
        return quire_fail(QUIRE_E_LIMIT,
                          "memory limit reached: %" PRIu64 " bytes held, %" PRIu64 " more needed, limit %" PRIu64
                          "; abort, remove data or release snapshots, or open with a larger limit",
                          arena->bytes_held, bytes, arena->limit_bytes);
    }
    if (arena->budget != NULL) {
        uint64_t used = __atomic_load_n(&arena->budget->bytes_used, __ATOMIC_RELAXED);
        do {
            if (used + bytes > arena->budget->bytes_max) {
                return quire_fail(QUIRE_E_LIMIT,
                                  "memory limit of all stores together reached: %" PRIu64 " bytes held, %" PRIu64
                                  " more needed, limit %" PRIu64,
                                  used, bytes, arena->budget->bytes_max);
            }
        } while (!__atomic_compare_exchange_n(&arena->budget->bytes_used, &used, used + bytes, true, __ATOMIC_RELAXED,
                                              __ATOMIC_RELAXED));
    }
    arena->bytes_held += bytes;
    return QUIRE_OK;
}

void quire_arena_discharge(quire_arena *arena, uint64_t bytes) {
    arena->bytes_held -= bytes;
    if (arena->budget != NULL) {
        __atomic_sub_fetch(&arena->budget->bytes_used, bytes, __ATOMIC_RELAXED);
    }
}

/* ------------------------------------------------------------------------------------------------ address space */

/* Reserves one more extent, aligned for huge pages. */
static int extent_reserve(quire_arena *arena, uint32_t chunks_min) {
    uint32_t chunk_count = arena->chunks_reserved > EXTENT_CHUNKS_MAX ? EXTENT_CHUNKS_MAX : arena->chunks_reserved;
    if (chunk_count < chunks_min) {
        chunk_count = chunks_min;
    }
    quire_extent *extents = realloc(arena->extents, (arena->extent_count + 1) * sizeof *extents);
    if (extents == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for the list of extents");
    }
    arena->extents = extents;
    size_t bytes = (size_t)chunk_count * QUIRE_CHUNK_BYTES;
    uint8_t *raw = mmap(NULL, bytes + QUIRE_CHUNK_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) {
        return quire_fail(QUIRE_E_NOMEM, "cannot reserve %zu bytes of address space: %s", bytes, strerror(errno));
    }
    size_t lead = (QUIRE_CHUNK_BYTES - ((uintptr_t)raw & (QUIRE_CHUNK_BYTES - 1))) & (QUIRE_CHUNK_BYTES - 1);
    if (lead > 0) {
        munmap(raw, lead);
    }
    munmap(raw + lead + bytes, QUIRE_CHUNK_BYTES - lead);
    arena->extents[arena->extent_count++] = (quire_extent){raw + lead, bytes};
    arena->chunks_reserved += chunk_count;
    return QUIRE_OK;
}

static uint8_t *chunk_address(const quire_arena *arena, uint32_t chunk) {
    for (size_t i = 0; i < arena->extent_count; i++) {
        uint32_t chunk_count = (uint32_t)(arena->extents[i].bytes / QUIRE_CHUNK_BYTES);
        if (chunk < chunk_count) {
            return arena->extents[i].base + (size_t)chunk * QUIRE_CHUNK_BYTES;
        }
        chunk -= chunk_count;
    }
    return NULL;
}

static int chunk_map_locked(quire_arena *arena, uint32_t chunk) {
    if (__atomic_load_n(&arena->chunks[chunk], __ATOMIC_RELAXED) != NULL) {
        return QUIRE_OK;
    }
    while (chunk >= arena->chunks_reserved) {
        QUIRE_TRY(extent_reserve(arena, EXTENT_CHUNKS_MIN));
    }
    uint8_t *base = chunk_address(arena, chunk);
    if (arena->mapped != NULL && chunk < arena->mapped->chunk_limit) {
        QUIRE_TRY(quire_mapped_chunk(arena->mapped, chunk, base));
    } else if (arena->file >= 0) {
        int access = arena->read_only ? PROT_READ : PROT_READ | PROT_WRITE;
        if (mmap(base, QUIRE_CHUNK_BYTES, access, MAP_SHARED | MAP_FIXED, arena->file,
                 (off_t)chunk * QUIRE_CHUNK_BYTES) == MAP_FAILED) {
            return quire_fail(QUIRE_E_NOMEM, "cannot map %u bytes of %s: %s", QUIRE_CHUNK_BYTES, arena->path,
                              strerror(errno));
        }
    } else {
        if (mprotect(base, QUIRE_CHUNK_BYTES, PROT_READ | PROT_WRITE) != 0) {
            return quire_fail(QUIRE_E_NOMEM, "cannot get %u bytes of memory: %s", QUIRE_CHUNK_BYTES, strerror(errno));
        }
        if (chunk >= HUGE_PAGES_FROM_CHUNK) {
            (void)madvise(base, QUIRE_CHUNK_BYTES, MADV_HUGEPAGE); /* a hint: nothing depends on it */
        }
    }
    __atomic_store_n(&arena->chunks[chunk], base, __ATOMIC_RELEASE);
    return QUIRE_OK;
}

static int chunk_map(quire_arena *arena, uint32_t chunk) {
    if (chunk >= QUIRE_CHUNKS_MAX) {
        return quire_fail(QUIRE_E_CORRUPT, "chunk %u is beyond the end of any arena", chunk);
    }
    pthread_mutex_lock(&arena->pins_mutex);
    int rc = chunk_map_locked(arena, chunk);
    pthread_mutex_unlock(&arena->pins_mutex);
    return rc;
}

uint8_t *quire_chunk_map(quire_arena *arena, uint32_t chunk) {
    if ((arena->file < 0 && arena->mapped == NULL) || chunk_map(arena, chunk) != QUIRE_OK) {
        return NULL;
    }
    return __atomic_load_n(&arena->chunks[chunk], __ATOMIC_ACQUIRE);
}

/* ------------------------------------------------------------------------------------------------ frames */

static void summary_update(quire_arena *arena, uint32_t word) {
    uint64_t bit = (uint64_t)1 << (word & 63);
    if (arena->free_bits[word] != 0) {
        arena->free_summary[word >> 6] |= bit;
    } else {
        arena->free_summary[word >> 6] &= ~bit;
    }
}

uint32_t quire_frame_alloc(quire_arena *arena) {
    uint32_t summary_count = (arena->bits_capacity >> 12) + 1;
    for (uint32_t i = arena->free_hint; i < summary_count; i++) {
        if (arena->free_summary[i] != 0) {
            uint32_t word = i << 6 | (uint32_t)__builtin_ctzll(arena->free_summary[i]);
            uint32_t frame = word << 6 | (uint32_t)__builtin_ctzll(arena->free_bits[word]);
            arena->free_bits[word] &= arena->free_bits[word] - 1;
            summary_update(arena, word);
            arena->free_hint = i;
            if (--arena->free_count < arena->free_low) {
                arena->free_low = arena->free_count;
            }
            return frame;
        }
    }
    return 0;
}

void quire_frame_free(quire_arena *arena, uint32_t frame) {
    arena->free_bits[frame >> 6] |= (uint64_t)1 << (frame & 63);
    arena->free_summary[frame >> 12] |= (uint64_t)1 << (frame >> 6 & 63);
    arena->free_count++;
    if (arena->free_hint > frame >> 12) {
        arena->free_hint = frame >> 12;
    }
}

bool quire_frame_is_free(const quire_arena *arena, uint32_t frame) {
    return (arena->free_bits[frame >> 6] >> (frame & 63) & 1) != 0;
}

bool quire_frame_take(quire_arena *arena, uint32_t frame) {
    if (!quire_frame_is_free(arena, frame)) {
        return false;
    }
    arena->free_bits[frame >> 6] &= ~((uint64_t)1 << (frame & 63));
    summary_update(arena, frame >> 6);
    arena->free_count--;
    return true;
}

void quire_frames_reset(quire_arena *arena) {
    memset(arena->free_bits, 0, (arena->bits_capacity >> 6) * sizeof(uint64_t));
    memset(arena->free_summary, 0, ((arena->bits_capacity >> 12) + 1) * sizeof(uint64_t));
    arena->free_count = 0;
    arena->free_hint = 0;
    for (uint32_t frame = arena->header_frames; frame < arena->frame_limit; frame++) {
        if (!arena->chunk_absent[frame >> arena->chunk_shift]) {
            quire_frame_free(arena, frame);
        }
    }
}

static int bits_room(quire_arena *arena, uint32_t frame_limit) {
    if (frame_limit <= arena->bits_capacity) {
        return QUIRE_OK;
    }
    uint64_t capacity = arena->bits_capacity == 0 ? 4096 : arena->bits_capacity;
    while (capacity < frame_limit) {
        capacity *= 2;
    }
    uint32_t old_words = arena->bits_capacity >> 6;
    uint32_t old_summary = arena->bits_capacity == 0 ? 0 : (arena->bits_capacity >> 12) + 1;
    uint32_t old_chunks = (arena->bits_capacity >> arena->chunk_shift) + (arena->bits_capacity != 0);
    uint32_t words = (uint32_t)(capacity >> 6), summary = (uint32_t)(capacity >> 12) + 1;
    uint32_t chunk_count = (uint32_t)(capacity >> arena->chunk_shift) + 1;
    /* Each array is replaced as soon as it has grown, so that a failure half-way loses nothing. */
    uint64_t *bits = realloc(arena->free_bits, words * sizeof *bits);
    if (bits != NULL) {
        arena->free_bits = bits;
        uint64_t *sums = realloc(arena->free_summary, summary * sizeof *sums);
        if (sums != NULL) {
            arena->free_summary = sums;
            uint8_t *absent = realloc(arena->chunk_absent, chunk_count);
            if (absent != NULL) {
                arena->chunk_absent = absent;
                uint16_t *refs = NULL;
                if (arena->extra_refs == NULL || (refs = realloc(arena->extra_refs, capacity * sizeof *refs)) != NULL) {
                    if (refs != NULL) {
                        arena->extra_refs = refs;
                        memset(refs + arena->bits_capacity, 0, (capacity - arena->bits_capacity) * sizeof *refs);
                    }
                    memset(bits + old_words, 0, (words - old_words) * sizeof *bits);
                    memset(sums + old_summary, 0, (summary - old_summary) * sizeof *sums);
                    memset(absent + old_chunks, 0, chunk_count - old_chunks);
                    arena->bits_capacity = (uint32_t)capacity;
                    return QUIRE_OK;
                }
            }
        }
    }
    return quire_fail(QUIRE_E_NOMEM, "no memory to keep account of %u frames", frame_limit);
}

/* Gives file space its disk blocks, so that no later store can hit a full disk. */
static int file_back(quire_arena *arena, uint64_t offset, uint64_t bytes) {
    if (arena->file < 0) {
        return QUIRE_OK;
    }
    int error;
    do {
        error = fallocate(arena->file, 0, (off_t)offset, (off_t)bytes) == 0 ? 0 : errno;
        if (error == EOPNOTSUPP) {
            error = posix_fallocate(arena->file, (off_t)offset, (off_t)bytes);
        }
    } while (error == EINTR);
    if (error == 0) {
        return QUIRE_OK;
    }
    bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
    return quire_fail(full ? QUIRE_E_NOSPACE : QUIRE_E_IO, "cannot add %" PRIu64 " bytes to %s: %s; %s", bytes,
                      arena->path, strerror(error),
                      full ? "free space on its disk, or abort" : "check the file system");
}

static int absent_chunk_return(quire_arena *arena) {
    for (uint32_t chunk = 0;; chunk++) {
        if (!arena->chunk_absent[chunk]) {
            continue;
        }
        QUIRE_TRY(quire_arena_charge(arena, QUIRE_CHUNK_BYTES));
        int rc = file_back(arena, (uint64_t)chunk * QUIRE_CHUNK_BYTES, QUIRE_CHUNK_BYTES);
        if (rc != QUIRE_OK) {
            quire_arena_discharge(arena, QUIRE_CHUNK_BYTES);
            return rc;
        }
        arena->chunk_absent[chunk] = 0;
        arena->absent_count--;
        for (uint32_t i = 0; i < 1u << arena->chunk_shift; i++) {
            quire_frame_free(arena, (chunk << arena->chunk_shift) + i);
        }
        return QUIRE_OK;
    }
}

static int frames_add(quire_arena *arena, uint32_t frame_count) {
    uint64_t bytes = (uint64_t)frame_count << arena->page_shift;
    uint64_t limit = (uint64_t)arena->frame_limit + frame_count;
    if (limit > (uint64_t)QUIRE_CHUNKS_MAX << arena->chunk_shift) {
        return quire_fail(QUIRE_E_FULL, "an arena holds at most %" PRIu64 " bytes",
                          (uint64_t)QUIRE_CHUNKS_MAX * QUIRE_CHUNK_BYTES);
    }
    QUIRE_TRY(bits_room(arena, (uint32_t)limit));
    uint32_t last_chunk = (uint32_t)((limit - 1) >> arena->chunk_shift);
    for (uint32_t chunk = arena->frame_limit >> arena->chunk_shift; chunk <= last_chunk; chunk++) {
        QUIRE_TRY(chunk_map(arena, chunk));
    }
    QUIRE_TRY(quire_arena_charge(arena, bytes));
    int rc = file_back(arena, (uint64_t)arena->frame_limit << arena->page_shift, bytes);
    if (rc != QUIRE_OK) {
        quire_arena_discharge(arena, bytes);
        return rc;
    }
    uint32_t first = arena->frame_limit;
    arena->frame_limit = (uint32_t)limit;
    for (uint32_t frame = first; frame < arena->frame_limit; frame++) {
        quire_frame_free(arena, frame);
    }
    arena->catalog.view.frame_limit = arena->frame_limit;
    for (quire_set *set = arena->sets; set != NULL; set = set->next) {
        set->view.frame_limit = arena->frame_limit;
    }
    return QUIRE_OK;
}

int quire_arena_grow(quire_arena *arena, uint64_t frame_count) {
    while (arena->free_count < frame_count) {
        if (arena->absent_count > 0) {
            int rc = absent_chunk_return(arena);
            if (rc == QUIRE_OK) {
                continue;
            }
            if (rc != QUIRE_E_LIMIT) {
                return rc;
            } /* a whole chunk is too much, a few frames may not be */
        }
        uint64_t missing = frame_count - arena->free_count;
        if (missing > (uint64_t)QUIRE_CHUNKS_MAX << arena->chunk_shift) {
            return quire_fail(QUIRE_E_FULL, "%" PRIu64 " pages at once are more than an arena holds", frame_count);
        }
        uint64_t step_bytes = arena->bytes_held < (1u << 20)    ? 1u << 16
                              : arena->bytes_held < (16u << 20) ? 1u << 18
                                                                : QUIRE_CHUNK_BYTES;
        uint64_t step = step_bytes >> arena->page_shift;
        if (step < missing) {
            step = missing;
        }
        int rc = frames_add(arena, (uint32_t)step);
        if (rc == QUIRE_E_LIMIT && step > missing) {
            rc = frames_add(arena, (uint32_t)missing); /* the last bytes below the limit are usable, too */
        }
        QUIRE_TRY(rc);
    }
    return QUIRE_OK;
}

static bool chunk_is_free(const quire_arena *arena, uint32_t chunk) {
    uint32_t first = chunk << arena->chunk_shift, count = 1u << arena->chunk_shift;
    if (chunk == 0 || first + count > arena->frame_limit || arena->chunk_absent[chunk]) {
        return false;
    }
    for (uint32_t frame = first; frame < first + count;) {
        if (count >= 64) {
            if (~arena->free_bits[frame >> 6] != 0) {
                return false;
            }
            frame += 64;
        } else if (!quire_frame_is_free(arena, frame++)) {
            return false;
        }
    }
    return true;
}

/* Nobody needs the file's bytes there any more, whether they were mapped or not. */
static int mapped_chunk_replace(quire_arena *arena, uint32_t chunk) {
    uint8_t *base = chunk_address(arena, chunk);
    if (mmap(base, QUIRE_CHUNK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
             -1, 0) == MAP_FAILED) {
        return QUIRE_E_NOMEM;
    }
    __atomic_store_n(&arena->chunks[chunk], base, __ATOMIC_RELEASE);
    return QUIRE_OK;
}

static void chunk_give_back(quire_arena *arena, uint32_t chunk) {
    if (arena->file >= 0) {
        if (fallocate(arena->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)chunk * QUIRE_CHUNK_BYTES,
                      QUIRE_CHUNK_BYTES) != 0) {
            return; /* a file system without holes keeps the space */
        }
    } else if (arena->mapped != NULL && chunk < arena->mapped->chunk_limit) {
        if (mapped_chunk_replace(arena, chunk) != QUIRE_OK) {
            return;
        }
    } else if (madvise(arena->chunks[chunk], QUIRE_CHUNK_BYTES, MADV_DONTNEED) != 0) {
        return;
    }
    for (uint32_t i = 0; i < 1u << arena->chunk_shift; i++) {
        quire_frame_take(arena, (chunk << arena->chunk_shift) + i);
    }
    arena->chunk_absent[chunk] = 1;
    arena->absent_count++;
    quire_arena_discharge(arena, QUIRE_CHUNK_BYTES);
}

/* Frames that were free through the last commits are not needed for the changes between two of them and go back, and so does what
 * a state that has shrunk leaves at once. A writer that changes everything each time needs as much free room as it has state, again
 * and again: that stays. */
void quire_arena_trim(quire_arena *arena) {
    uint64_t free_bytes = (uint64_t)arena->free_count << arena->page_shift, used_bytes = arena->bytes_held - free_bytes;
    uint64_t spare_bytes = 0;
    if (++arena->trim_commits >= (arena->in_place ? TRIM_COMMITS_IN_PLACE : TRIM_COMMITS)) {
        spare_bytes = (uint64_t)arena->free_low << arena->page_shift;
        arena->trim_commits = 0;
        arena->free_low = arena->free_count;
    }
    if (free_bytes > used_bytes + TRIM_SLACK_BYTES && spare_bytes < free_bytes - used_bytes) {
        spare_bytes = free_bytes - used_bytes;
    }
    for (uint32_t chunk = arena->frame_limit >> arena->chunk_shift; chunk > 0 && spare_bytes >= QUIRE_CHUNK_BYTES;
         chunk--) {
        if (chunk_is_free(arena, chunk)) {
            chunk_give_back(arena, chunk);
            spare_bytes -= QUIRE_CHUNK_BYTES;
        }
    }
    if (arena->free_low > arena->free_count) {
        arena->free_low = arena->free_count;
    }
}

/* ------------------------------------------------------------------------------------------------ file locks */

static int lock_byte(int file, off_t byte, bool wait) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    int result;
    do {
        result = fcntl(file, wait ? F_OFD_SETLKW : F_OFD_SETLK, &lock);
    } while (result != 0 && errno == EINTR);
    return result == 0 ? 0 : errno;
}

static int writer_lock(quire_arena *arena, double wait_seconds) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double end = (double)now.tv_sec + (double)now.tv_nsec * 1e-9 + wait_seconds;
    for (;;) {
        int error = lock_byte(arena->locks, LOCK_WRITER, wait_seconds < 0);
        if (error == 0) {
            return QUIRE_OK;
        }
        if (error != EAGAIN && error != EACCES) {
            return quire_fail(QUIRE_E_IO, "cannot lock %s: %s", arena->path, strerror(error));
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((double)now.tv_sec + (double)now.tv_nsec * 1e-9 >= end) {
            return quire_fail(QUIRE_E_BUSY, "%s is open for writing elsewhere; wait for it, or open it read-only",
                              arena->path);
        }
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    }
}

static int attach(quire_arena *arena) {
    if (arena->file < 0) {
        arena->attachment = 1;
        return QUIRE_OK;
    }
    for (uint32_t n = 1; n < ATTACHMENTS_MAX; n++) {
        int error = lock_byte(arena->locks, LOCK_ATTACHMENT + (off_t)n, false);
        if (error == 0) {
            arena->attachment = n;
            quire_attachment_forget(arena, n); /* left by a process that died */
            return QUIRE_OK;
        }
        if (error != EAGAIN && error != EACCES) {
            return quire_fail(QUIRE_E_IO, "cannot lock %s: %s", arena->path, strerror(error));
        }
    }
    return quire_fail(QUIRE_E_FULL, "%s is open in %u places, the most there can be", arena->path, ATTACHMENTS_MAX - 1);
}

static void unlock_byte(int file, off_t byte) {
    struct flock lock = {.l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    (void)fcntl(file, F_OFD_SETLK, &lock);
}

/* Holding the dead process's lock while its pins are dropped keeps a new process from taking its number meanwhile. */
bool quire_attachment_dead(quire_arena *arena, uint32_t attachment) {
    off_t byte = LOCK_ATTACHMENT + (off_t)attachment;
    if (attachment == arena->attachment || arena->file < 0 || lock_byte(arena->locks, byte, false) != 0) {
        return false;
    }
    if (!arena->read_only) {
        quire_attachment_forget(arena, attachment);
    }
    unlock_byte(arena->locks, byte);
    return true;
}

/* ------------------------------------------------------------------------------------------------ opening */

uint32_t quire_meta_crc(const quire_meta *meta) {
    return quire_crc32c(0, meta, offsetof(quire_meta, crc));
}

int quire_meta_read(quire_arena *arena, quire_meta *meta, uint64_t *current) {
    for (;;) {
        uint64_t seen = __atomic_load_n(&arena->header->current, __ATOMIC_SEQ_CST);
        const uint64_t *from = (const uint64_t *)&arena->header->meta[seen & 1];
        uint64_t *to = (uint64_t *)meta;
        for (size_t i = 0; i < sizeof *meta / sizeof *to; i++) {
            to[i] = __atomic_load_n(&from[i], __ATOMIC_ACQUIRE); /* before the second look at current */
        }
        if (__atomic_load_n(&arena->header->current, __ATOMIC_SEQ_CST) != seen) {
            continue; /* the slot may have been written again meanwhile */
        }
        if (meta->crc != quire_meta_crc(meta) || meta->epoch != (uint32_t)(seen >> 1)) {
            return quire_fail(QUIRE_E_CORRUPT, "%s: the committed state's description fails its checksum",
                              arena->path == NULL ? "arena" : arena->path);
        }
        *current = seen;
        return QUIRE_OK;
    }
}

static void read_boot_id(uint8_t boot_id[16]) {
    memset(boot_id, 0, 16);
    int file = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    char text[64] = {0};
    if (file >= 0) {
        ssize_t count = read(file, text, sizeof text - 1);
        close(file);
        for (ssize_t i = 0, nibble = 0; i < count && nibble < 32; i++) {
            char c = text[i];
            int value = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
            if (value >= 0) {
                boot_id[nibble / 2] |= (uint8_t)(value << (nibble % 2 == 0 ? 4 : 0));
                nibble++;
            }
        }
    }
}

/* Page sizes are checked before, so both shifts are exact. */
static void set_page_bytes(quire_arena *arena, uint32_t page_bytes) {
    arena->page_bytes = page_bytes;
    arena->page_shift = (uint8_t)__builtin_ctz(page_bytes);
    arena->chunk_shift = (uint8_t)(__builtin_ctz(QUIRE_CHUNK_BYTES) - arena->page_shift);
    arena->header_frames = QUIRE_HEADER_BYTES <= page_bytes ? 1 : QUIRE_HEADER_BYTES >> arena->page_shift;
}

static bool page_bytes_valid(uint32_t page_bytes) {
    return page_bytes >= QUIRE_PAGE_BYTES_MIN && page_bytes <= QUIRE_PAGE_BYTES_MAX &&
           (page_bytes & (page_bytes - 1)) == 0;
}

static int identity_make(quire_header *header) {
    return getrandom(header->identity, sizeof header->identity, 0) == (ssize_t)sizeof header->identity
               ? QUIRE_OK
               : quire_fail(QUIRE_E_IO, "the system gives no random bytes: %s", strerror(errno));
}

static int header_make(quire_arena *arena) {
    quire_header *header = arena->header;
    header->version = QUIRE_FORMAT_VERSION;
    header->page_bytes = arena->page_bytes;
    QUIRE_TRY(identity_make(header));
    read_boot_id(header->boot_id);
    quire_meta meta = {.epoch = 1, .frame_limit = arena->frame_limit};
    meta.crc = quire_meta_crc(&meta);
    header->meta[0] = meta;
    __atomic_store_n(&header->current, (uint64_t)1 << 1, __ATOMIC_RELEASE);
    /* The magic makes the file an arena: a process killed before this leaves one that counts as empty. */
    uint8_t start[32];
    memcpy(start, header, sizeof start);
    memcpy(start, QUIRE_MAGIC, 8);
    header->crc = quire_crc32c(0, start, sizeof start);
    uint64_t magic;
    memcpy(&magic, QUIRE_MAGIC, 8);
    __atomic_store_n((uint64_t *)header->magic, magic, __ATOMIC_RELEASE);
    return QUIRE_OK;
}

static int arena_make(quire_arena *arena, uint32_t page_bytes) {
    set_page_bytes(arena, page_bytes == 0 ? QUIRE_PAGE_BYTES_DEFAULT : page_bytes);
    QUIRE_TRY(frames_add(arena, arena->header_frames + 1));
    arena->header = (quire_header *)arena->chunks[0];
    memset(arena->header, 0, sizeof *arena->header);
    QUIRE_TRY(header_make(arena));
    QUIRE_TRY(attach(arena));
    quire_meta meta;
    uint64_t current;
    QUIRE_TRY(quire_meta_read(arena, &meta, &current));
    return quire_arena_recover(arena, &meta, false);
}

/* What the file says of itself, before anything of it is trusted. */
static int header_check(quire_arena *arena, uint64_t file_bytes, uint32_t page_bytes) {
    quire_header start;
    if (file_bytes < QUIRE_HEADER_BYTES) {
        return quire_fail(QUIRE_E_CORRUPT,
                          "%s has %" PRIu64 " bytes, less than an arena's header: it is truncated or no arena",
                          arena->path, file_bytes);
    }
    if (pread(arena->file, &start, sizeof start, 0) != (ssize_t)sizeof start) {
        return quire_fail(QUIRE_E_IO, "cannot read the header of %s: %s", arena->path, strerror(errno));
    }
    if (memcmp(start.magic, QUIRE_MAGIC, 8) != 0) {
        return quire_fail(QUIRE_E_CORRUPT, "%s is not a Quire arena: it starts with other bytes", arena->path);
    }
    if (start.version != QUIRE_FORMAT_VERSION) {
        return quire_fail(QUIRE_E_VERSION,
                          "%s has format version %u, this build reads version %u: open it with a newer Quire",
                          arena->path, start.version, QUIRE_FORMAT_VERSION);
    }
    if (start.crc != quire_crc32c(0, &start, 32)) {
        return quire_fail(QUIRE_E_CORRUPT, "%s: the header fails its checksum", arena->path);
    }
    if (!page_bytes_valid(start.page_bytes)) {
        return quire_fail(QUIRE_E_CORRUPT, "%s: page size %u in its header is impossible", arena->path,
                          start.page_bytes);
    }
    if (quire_file_is_image(arena->file, file_bytes)) {
        return quire_fail(QUIRE_E_MISMATCH, "%s is a saved image, not an arena: load it into an arena", arena->path);
    }
    if (page_bytes != 0 && page_bytes != start.page_bytes) {
        return quire_fail(QUIRE_E_MISMATCH,
                          "%s has pages of %u bytes, not %u: open it without a page size, or with its own", arena->path,
                          start.page_bytes, page_bytes);
    }
    return QUIRE_OK;
}

static int boot_check(quire_arena *arena) {
    uint8_t boot_id[16];
    read_boot_id(boot_id);
    quire_header *header = arena->header;
    if (memcmp(boot_id, header->boot_id, sizeof boot_id) == 0) {
        return QUIRE_OK;
    }
    if (__atomic_load_n(&header->synced, __ATOMIC_ACQUIRE) != __atomic_load_n(&header->current, __ATOMIC_ACQUIRE)) {
        return quire_fail(QUIRE_E_CORRUPT,
                          "%s was not synced before the machine restarted, its pages may be incomplete: delete it and "
                          "restore from a checkpoint",
                          arena->path);
    }
    if (!arena->read_only) {
        memcpy(header->boot_id, boot_id, sizeof boot_id);
    }
    return QUIRE_OK;
}

static int arena_reopen(quire_arena *arena, uint64_t file_bytes, uint32_t page_bytes) {
    QUIRE_TRY(header_check(arena, file_bytes, page_bytes));
    quire_header *header = mmap(NULL, QUIRE_HEADER_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, arena->file, 0);
    if (header == MAP_FAILED) {
        return quire_fail(QUIRE_E_IO, "cannot map the header of %s: %s", arena->path, strerror(errno));
    }
    arena->header = header;
    set_page_bytes(arena, header->page_bytes);
    QUIRE_TRY(boot_check(arena));
    quire_meta meta;
    uint64_t current;
    QUIRE_TRY(quire_meta_read(arena, &meta, &current));
    uint64_t need = (uint64_t)meta.frame_limit << arena->page_shift;
    if (meta.frame_limit < arena->header_frames || meta.frame_limit > (uint64_t)QUIRE_CHUNKS_MAX
                                                                          << arena->chunk_shift) {
        return quire_fail(QUIRE_E_CORRUPT, "%s: %u frames in its header is impossible", arena->path, meta.frame_limit);
    }
    struct stat info;
    if (fstat(arena->file, &info) == 0) {
        file_bytes = (uint64_t)info.st_size; /* it may have grown with the commit just read */
    }
    if (file_bytes < need) {
        return quire_fail(QUIRE_E_CORRUPT, "%s is truncated: it has %" PRIu64 " bytes, its last commit needs %" PRIu64,
                          arena->path, file_bytes, need);
    }
    QUIRE_TRY(attach(arena));
    if (arena->read_only) {
        return QUIRE_OK;
    }
    QUIRE_TRY(bits_room(arena, meta.frame_limit));
    arena->frame_limit = meta.frame_limit;
    for (uint32_t chunk = 0; chunk <= (meta.frame_limit - 1) >> arena->chunk_shift; chunk++) {
        QUIRE_TRY(chunk_map(arena, chunk));
    }
    uint64_t limit = arena->limit_bytes;
    arena->limit_bytes = 0; /* what is there is there; the limit holds for growth */
    int rc = quire_arena_charge(arena, need);
    arena->limit_bytes = limit;
    QUIRE_TRY(rc);
    QUIRE_TRY(quire_arena_recover(arena, &meta, false));
    if (file_bytes > need && ftruncate(arena->file, (off_t)need) != 0) { /* a growth that was never committed */
        return quire_fail(QUIRE_E_IO, "cannot cut %s to its committed size: %s", arena->path, strerror(errno));
    }
    /* A chunk without pages may have been given back: nothing tells, so it counts as given back (I2). */
    for (uint32_t chunk = 1; chunk < arena->frame_limit >> arena->chunk_shift; chunk++) {
        if (chunk_is_free(arena, chunk)) {
            chunk_give_back(arena, chunk);
        }
    }
    return QUIRE_OK;
}

/* A file is new if it is empty, or if its maker was killed before it had written the magic. */
static int file_is_new(quire_arena *arena, uint64_t file_bytes, bool *is_new) {
    uint8_t start[QUIRE_PINS_OFFSET];
    ssize_t count = pread(arena->file, start, sizeof start, 0);
    if (count < 0) {
        return quire_fail(QUIRE_E_IO, "cannot read %s: %s", arena->path, strerror(errno));
    }
    *is_new = file_bytes == 0;
    if (file_bytes > 0 && file_bytes <= 4 * QUIRE_PAGE_BYTES_MAX && count == (ssize_t)sizeof start) {
        *is_new = true;
        for (size_t i = 0; i < 8; i++) {
            *is_new = *is_new && start[i] == 0;
        }
    }
    return QUIRE_OK;
}

static int file_open(quire_arena *arena, const quire_arena_options *options) {
    arena->path = strdup(options->path);
    if (arena->path == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for the path");
    }
    int error = descriptors_open(arena, options->path, O_RDWR | O_CLOEXEC | (options->read_only ? 0 : O_CREAT));
    if (error != 0) {
        return quire_fail(error == ENOENT && options->read_only ? QUIRE_E_NOTFOUND : QUIRE_E_IO, "cannot open %s: %s",
                          options->path, strerror(error));
    }
    struct stat info, again;
    if (fstat(arena->file, &info) != 0 || fstat(arena->locks, &again) != 0 || info.st_dev != again.st_dev ||
        info.st_ino != again.st_ino) {
        return quire_fail(QUIRE_E_IO, "%s went away while it was being opened", arena->path);
    }
    if (!options->read_only) {
        QUIRE_TRY(writer_lock(arena, options->lock_wait_seconds));
    }
    if (fstat(arena->file, &info) != 0 || !S_ISREG(info.st_mode)) {
        return quire_fail(QUIRE_E_INVALID, "%s is not a regular file", arena->path);
    }
    if (info.st_nlink == 0) {
        return quire_fail(QUIRE_E_IO, "%s was deleted while it was being opened: open it again", arena->path);
    }
    bool is_new = false;
    if (!options->read_only) {
        QUIRE_TRY(file_is_new(arena, (uint64_t)info.st_size, &is_new));
    }
    if (is_new) {
        if (ftruncate(arena->file, 0) != 0) {
            return quire_fail(QUIRE_E_IO, "cannot empty %s: %s", arena->path, strerror(errno));
        }
        return arena_make(arena, options->page_bytes);
    }
    return arena_reopen(arena, (uint64_t)info.st_size, options->page_bytes);
}

void quire_arena_free(quire_arena *arena) {
    quire_sets_free(arena);
    quire_undo_close(arena);
    quire_held_clear(arena);
    for (size_t i = 0; i < arena->extent_count; i++) {
        munmap(arena->extents[i].base, arena->extents[i].bytes);
    }
    if (arena->header != NULL && (arena->chunks == NULL || arena->header != (quire_header *)arena->chunks[0])) {
        munmap(arena->header, QUIRE_HEADER_BYTES);
    }
    if (arena->chunks != NULL) {
        munmap(arena->chunks, QUIRE_CHUNKS_MAX * sizeof *arena->chunks);
    }
    descriptors_close(arena);
    quire_mapped_close(arena->mapped);
    if (arena->budget != NULL) {
        __atomic_sub_fetch(&arena->budget->bytes_used, arena->bytes_held, __ATOMIC_RELAXED);
        budget_leave(arena->budget);
    }
    pthread_mutex_destroy(&arena->pins_mutex);
    free(arena->extents);
    free(arena->free_bits);
    free(arena->free_summary);
    free(arena->chunk_absent);
    free(arena->extra_refs);
    free(arena->restored);
    free(arena->retired.items);
    free(arena->held);
    free(arena->path);
    free(arena);
}

int quire_arena_new(const quire_arena_options *options, quire_arena **arena) {
    if (options->page_bytes != 0 && !page_bytes_valid(options->page_bytes)) {
        return quire_fail(QUIRE_E_INVALID, "page size %u: it must be a power of two from %u to %u", options->page_bytes,
                          QUIRE_PAGE_BYTES_MIN, QUIRE_PAGE_BYTES_MAX);
    }
    if (options->read_only && options->path == NULL) {
        return quire_fail(QUIRE_E_INVALID, "an arena without a file cannot be opened read-only: it would stay empty");
    }
    quire_arena *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for an arena");
    }
    made->file = made->locks = -1;
    made->read_only = options->read_only;
    made->in_place = options->in_place && options->path == NULL;
    made->limit_bytes = options->limit_bytes;
    made->fork_generation = quire_fork_generation;
    pthread_mutex_init(&made->pins_mutex, NULL);
    if (options->budget != NULL) {
        made->budget = options->budget;
        __atomic_add_fetch(&made->budget->users, 1, __ATOMIC_RELAXED);
    }
    made->chunks = mmap(NULL, QUIRE_CHUNKS_MAX * sizeof *made->chunks, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made->chunks == MAP_FAILED) {
        made->chunks = NULL;
        int rc = quire_fail(QUIRE_E_NOMEM, "cannot reserve address space: %s", strerror(errno));
        quire_arena_free(made);
        return rc;
    }
    *arena = made;
    return QUIRE_OK;
}

int quire_arena_open(const quire_arena_options *options, quire_arena **arena) {
    quire_arena *made;
    QUIRE_TRY(quire_arena_new(options, &made));
    int rc = options->path == NULL ? arena_make(made, options->page_bytes) : file_open(made, options);
    if (rc != QUIRE_OK) {
        quire_arena_free(made);
        return rc;
    }
    *arena = made;
    return QUIRE_OK;
}

int quire_arena_ends(quire_arena *arena, uint32_t chunk_count) {
    if (chunk_count > QUIRE_CHUNKS_MAX) {
        return quire_fail(QUIRE_E_FULL, "an arena holds at most %" PRIu64 " bytes, not %" PRIu64,
                          (uint64_t)QUIRE_CHUNKS_MAX * QUIRE_CHUNK_BYTES, (uint64_t)chunk_count * QUIRE_CHUNK_BYTES);
    }
    QUIRE_TRY(extent_reserve(arena, chunk_count));
    QUIRE_TRY(chunk_map(arena, 0));
    return chunk_map(arena, chunk_count - 1);
}

int quire_arena_room(quire_arena *arena, uint64_t bytes, uint8_t **base) {
    uint64_t chunk_count = (bytes + QUIRE_CHUNK_BYTES - 1) / QUIRE_CHUNK_BYTES;
    QUIRE_TRY(quire_arena_charge(arena, bytes));
    QUIRE_TRY(quire_arena_ends(arena, chunk_count > QUIRE_CHUNKS_MAX ? QUIRE_CHUNKS_MAX + 1 : (uint32_t)chunk_count));
    for (uint32_t chunk = 0; chunk < chunk_count; chunk++) {
        QUIRE_TRY(chunk_map(arena, chunk));
    }
    *base = arena->chunks[0];
    return QUIRE_OK;
}

int quire_arena_take(quire_arena *arena, uint32_t page_bytes, const quire_meta *meta) {
    quire_header *header = (quire_header *)arena->chunks[0];
    set_page_bytes(arena, page_bytes);
    QUIRE_TRY(bits_room(arena, meta->frame_limit));
    uint64_t need = (uint64_t)meta->frame_limit << arena->page_shift;
    if (need > arena->bytes_held) {
        QUIRE_TRY(quire_arena_charge(arena, need - arena->bytes_held));
    } else {
        quire_arena_discharge(arena, arena->bytes_held - need); /* checksums and footer, which lie behind the pages */
    }
    arena->frame_limit = meta->frame_limit;
    arena->header = header;
    memcpy(arena->origin.identity, header->identity, sizeof header->identity);
    arena->origin.epoch = arena->origin_epoch = meta->epoch;
    QUIRE_TRY(identity_make(header));
    read_boot_id(header->boot_id);
    header->crc = quire_crc32c(0, header, 32);
    QUIRE_TRY(attach(arena));
    return quire_arena_recover(arena, meta, arena->mapped != NULL);
}

void quire_arena_point(const quire_arena *arena, quire_point *point) {
    memcpy(point->identity, arena->header->identity, sizeof point->identity);
    point->epoch = quire_arena_epoch(arena);
}

uint32_t quire_arena_origin(const quire_arena *arena, quire_point *origin) {
    *origin = arena->origin;
    return arena->origin_epoch;
}

int quire_arena_close(quire_arena *arena) {
    if (arena->fork_generation == quire_fork_generation) {
        pthread_mutex_lock(&arena->pins_mutex);
        uint64_t open_count = arena->snap_count;
        pthread_mutex_unlock(&arena->pins_mutex);
        if (open_count > 0) {
            return quire_fail(QUIRE_E_BUSY,
                              "%" PRIu64 " snapshots or cursors of this arena are still open: release them first",
                              open_count);
        }
    }
    quire_arena_free(arena);
    return QUIRE_OK;
}

int quire_arena_close_all(quire_arena **arena) {
    quire_arena *closing = *arena;
    if (closing == NULL) {
        return QUIRE_OK;
    }
    *arena = NULL;
    while (closing->fork_generation == quire_fork_generation && closing->all != NULL) {
        quire_snap_release(closing->all);
    }
    return quire_arena_close(closing);
}

/* Its address tells threads apart. */
static _Thread_local char this_thread;

int quire_arena_enter(quire_arena *arena) {
    if (QUIRE_UNLIKELY(arena->fork_generation != quire_fork_generation)) {
        return quire_fail(QUIRE_E_CLOSED, "this arena was opened before a fork: open it again in the child");
    }
    uintptr_t self = (uintptr_t)&this_thread, none = 0;
    if (__atomic_load_n(&arena->busy, __ATOMIC_RELAXED) == self) {
        arena->busy_depth++;
        return QUIRE_OK;
    }
    for (unsigned tries = 0;
         !__atomic_compare_exchange_n(&arena->busy, &none, self, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
         none = 0, tries++) {
        if (tries < 64) {
            sched_yield();
        } else {
            nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
        }
    }
    return QUIRE_OK;
}

void quire_arena_leave(quire_arena *arena) {
    if (arena->busy_depth > 0) {
        arena->busy_depth--;
        return;
    }
    __atomic_store_n(&arena->busy, 0, __ATOMIC_RELEASE);
}

uint32_t quire_arena_page_bytes(const quire_arena *arena) {
    return arena->page_bytes;
}

uint32_t quire_arena_epoch(const quire_arena *arena) {
    return (uint32_t)(__atomic_load_n(&arena->header->current, __ATOMIC_ACQUIRE) >> 1);
}

int quire_folder_sync(const char *path) {
    char *folder = strdup(path);
    if (folder == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for a path");
    }
    char *slash = strrchr(folder, '/');
    if (slash == folder) {
        slash++;
    }
    if (slash != NULL) {
        *slash = 0;
    }
    int file = open(slash == NULL ? "." : folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = file < 0 || fsync(file) != 0
                 ? quire_fail(QUIRE_E_IO, "cannot sync the folder of %s: %s", path, strerror(errno))
                 : QUIRE_OK;
    if (file >= 0) {
        close(file);
    }
    free(folder);
    return rc;
}

static int arena_sync(quire_arena *arena) {
    if (arena->read_only) {
        return quire_fail(QUIRE_E_READONLY, "%s is open read-only", arena->path);
    }
    if (arena->file < 0) {
        return QUIRE_OK;
    }
    uint64_t current = arena->header->current;
    if (fsync(arena->file) == 0) {
        __atomic_store_n(&arena->header->synced, current, __ATOMIC_RELEASE);
        if (fsync(arena->file) == 0) {
            return quire_folder_sync(arena->path);
        }
    }
    return quire_fail(errno == ENOSPC ? QUIRE_E_NOSPACE : QUIRE_E_IO, "cannot sync %s: %s", arena->path,
                      strerror(errno));
}

int quire_arena_sync(quire_arena *arena) {
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, arena_sync(arena));
}
