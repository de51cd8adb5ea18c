/* regressions.c -- bugs that once were, each by the shortest way to it; they need the inside of the page manager to be told apart
 * from good luck. Prints one line a case and exits 0, or says what went wrong and exits 1.
 */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "../../pagemgr/internal.h"
#include "../../structures/kv.h"

#define MUST(call)                                                                                                     \
    do {                                                                                                               \
        int must_rc_ = (call);                                                                                         \
        if (must_rc_ != QUIRE_OK) {                                                                                    \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, quire_error_message());                      \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
#define EXPECT(condition)                                                                                              \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not true: %s (%s)\n", __FILE__, __LINE__, #condition, quire_error_message());      \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static char path[] = "/tmp/quire-regressions-XXXXXX";

static quire_arena *open_arena(uint32_t page_bytes, bool read_only) {
    quire_arena *arena;
    quire_arena_options options = {.path = path, .page_bytes = page_bytes, .read_only = read_only};
    MUST(quire_arena_open(&options, &arena));
    return arena;
}

static quire_kv *open_map(quire_arena *arena, const char *name) {
    quire_kv *kv;
    MUST(quire_kv_open(arena, name, QUIRE_KIND_MAP, &kv));
    return kv;
}

static int put(quire_kv *kv, int number, size_t value_bytes) {
    char key[32];
    static const uint8_t value[8192];
    size_t key_bytes = (size_t)snprintf(key, sizeof key, "key-%08d", number);
    return quire_kv_put(kv, (const uint8_t *)key, key_bytes, value, value_bytes);
}

static int take(quire_kv *kv, int number) {
    char key[32];
    size_t key_bytes = (size_t)snprintf(key, sizeof key, "key-%08d", number);
    return quire_kv_remove(kv, (const uint8_t *)key, key_bytes);
}

/* A reader that has published its pin but not yet looked again whether its epoch is current may pin frames long reused: an abort
 * must not follow them. */
static void abort_beside_an_unconfirmed_pin(void) {
    quire_arena *writer = open_arena(4096, false), *reader = open_arena(0, true);
    quire_kv *kv = open_map(writer, "map");
    for (int i = 0; i < 3000; i++) {
        MUST(put(kv, i, 40));
    }
    MUST(quire_arena_commit(writer));
    quire_meta old;
    uint64_t current;
    MUST(quire_meta_read(reader, &old, &current));
    for (int round = 0; round < 6; round++) {
        for (int i = 0; i < 3000; i += 7) {
            MUST(put(kv, i, round % 2 == 0 ? 90 : 10));
        }
        MUST(quire_arena_commit(writer));
    }
    MUST(put(kv, 5000, 10));
    quire_pin *pin = &reader->header->pins[0];
    pin->owner = reader->attachment;
    reader->header->pin_limit = 1;
    pin->catalog_root = old.catalog.root;
    pin->catalog_depth = old.catalog.depth;
    pin->catalog_limit = old.catalog.page_limit;
    __atomic_store_n(&pin->epoch, old.epoch, __ATOMIC_SEQ_CST);
    MUST(quire_arena_abort(writer));
    pin->epoch = pin->owner = 0;
    MUST(quire_arena_check(writer));
    MUST(quire_kv_check(kv));
    MUST(quire_arena_close(reader));
    quire_kv_close(kv);
    MUST(quire_arena_close(writer));
}

/* A set made in an aborted epoch must not come back in the place of a later one of the same name. */
static void the_right_set_after_aborts(void) {
    quire_arena *arena = open_arena(4096, false);
    quire_kv *lost = open_map(arena, "name"), *kept;
    MUST(quire_arena_abort(arena));
    MUST(quire_kv_open(arena, "name", QUIRE_KIND_ORDERED, &kept));
    MUST(put(kept, 1, 8));
    MUST(quire_arena_commit(arena));
    MUST(put(kept, 2, 8));
    MUST(quire_arena_abort(arena));
    MUST(put(kept, 3, 8));
    EXPECT(put(lost, 3, 8) == QUIRE_E_CLOSED);
    quire_kv_close(lost);
    quire_kv_close(kept);
    MUST(quire_arena_close(arena));
}

/* Chunks given back leave holes in the file. Found again at the next opening, they must not count as backed by disk. */
static void holes_are_known_after_reopening(void) {
    quire_arena *arena = open_arena(4096, false);
    quire_kv *kv = open_map(arena, "map");
    for (int i = 0; i < 12000; i++) {
        MUST(put(kv, i, 8000));
    }
    MUST(quire_arena_commit(arena));
    MUST(quire_kv_clear(kv));
    MUST(quire_arena_commit(arena));
    MUST(put(kv, 1, 1));
    MUST(quire_arena_commit(arena));
    quire_kv_close(kv);
    MUST(quire_arena_close(arena));
    arena = open_arena(0, false);
    EXPECT(arena->absent_count > 20 && arena->bytes_held < (16u << 20));
    kv = open_map(arena, "map");
    for (int i = 0; i < 12000; i++) {
        MUST(put(kv, i, 8000));
    }
    MUST(quire_kv_check(kv));
    MUST(quire_arena_check(arena));
    quire_kv_close(kv);
    MUST(quire_arena_close(arena));
}

/* A hole that claims to reach past the records of its page must not be written to. */
static void a_damaged_hole(void) {
    quire_arena *arena = open_arena(4096, false);
    quire_kv *kv = open_map(arena, "map");
    quire_set *set;
    for (int i = 0; i < 40; i++) {
        MUST(put(kv, i, 80));
    }
    MUST(take(kv, 37));
    MUST(quire_set_open(arena, "map", 0, &set));
    uint16_t *page = NULL;
    for (quire_page_id id = 1; page == NULL && id < set->view.table[0].page_limit; id++) {
        uint8_t *bytes = quire_page_write(set, id);
        if (bytes != NULL && memcmp(bytes + 4, "QHAP", 4) == 0 && ((uint16_t *)bytes)[8] != 0) {
            page = (uint16_t *)bytes;
        }
    }
    EXPECT(page != NULL);
    page[7] = 200; /* the sum of holes, and the hole's size */
    page[(size_t)page[8] * 4 + 1] = 200;
    for (int i = 1000; i < 1200; i++) {
        int rc = put(kv, i, 900); /* once this wrote past the page, to the super page next to it */
        EXPECT(rc == QUIRE_OK || rc == QUIRE_E_CORRUPT);
    }
    EXPECT(quire_kv_check(kv) == QUIRE_E_CORRUPT);
    MUST(quire_arena_check(arena));
    quire_kv_close(kv);
    MUST(quire_arena_close(arena));
}

/* A depth read from a damaged catalog must not be shifted by. */
static void a_damaged_depth(void) {
    quire_arena *arena = open_arena(4096, false), *reader;
    quire_kv *kv = open_map(arena, "map"), *found;
    quire_snap *snap;
    for (int i = 0; i < 2000; i++) {
        MUST(put(kv, i, 10));
    }
    MUST(quire_arena_commit(arena));
    quire_catalog_entry *entry = (quire_catalog_entry *)(uintptr_t)quire_page_read(&arena->catalog.view, 0);
    uint32_t depth = entry->table[0].depth;
    entry->table[0].depth = 0x00200000;
    reader = open_arena(0, true);
    MUST(quire_snap_acquire(reader, &snap));
    EXPECT(quire_kv_open_snap(snap, "map", QUIRE_KIND_MAP, &found) == QUIRE_E_CORRUPT);
    quire_snap_release(snap);
    entry->table[0].depth = depth;
    MUST(quire_arena_close(reader));
    quire_kv_close(kv);
    MUST(quire_arena_close(arena));
}

/* Whatever could be written under a limit can be committed, and what is refused changes nothing. */
static void many_sets_at_the_limit(void) {
    quire_arena *arena;
    quire_arena_options options = {.limit_bytes = 24u << 20, .page_bytes = 4096};
    static quire_kv *kvs[600];
    int rc = QUIRE_OK, puts = 0;
    char name[16];
    MUST(quire_arena_open(&options, &arena));
    for (int i = 0; i < 600; i++) {
        snprintf(name, sizeof name, "set-%d", i);
        kvs[i] = open_map(arena, name);
    }
    MUST(quire_arena_commit(arena));
    for (; rc == QUIRE_OK; puts++) {
        rc = put(kvs[puts % 600], puts, 200);
    }
    EXPECT(rc == QUIRE_E_LIMIT && puts > 1000);
    MUST(quire_arena_commit(arena));
    rc = quire_set_clone(arena, "set-1", "copy");
    EXPECT((rc == QUIRE_OK) == quire_set_exists(arena, "copy"));
    MUST(quire_arena_check(arena));
    for (int i = 0; i < 600; i++) {
        quire_kv_close(kvs[i]);
    }
    MUST(quire_arena_close(arena));
}

/* Moving what is left on a page elsewhere must not run out of frames half-way, however little is left under the limit. */
static void removals_at_the_limit(void) {
    for (uint32_t spare = 0; spare < 80; spare += 8) {
        quire_arena *arena;
        quire_arena_options options = {.page_bytes = 65536};
        MUST(quire_arena_open(&options, &arena));
        quire_kv *kv = open_map(arena, "map");
        for (int i = 0; i < 20000; i++) {
            MUST(put(kv, i, 380));
        }
        for (int i = 0; i < 20000; i++) {
            if (i % 16 == 0 || (i < 160 && i > 60)) {
                MUST(take(kv, i));
            }
        }
        MUST(quire_arena_commit(arena));
        arena->limit_bytes = arena->bytes_held; /* as if it had been opened with this limit */
        while (arena->free_count > 20 + spare) {
            EXPECT(quire_frame_alloc(arena) != 0);
        }
        int refused = 0;
        for (int i = 0; i < 160; i++) {
            int rc = take(kv, i);
            EXPECT(rc == QUIRE_OK || rc == QUIRE_E_NOTFOUND || rc == QUIRE_E_LIMIT);
            refused += rc == QUIRE_E_LIMIT;
            MUST(quire_kv_check(kv));
        }
        quire_kv_close(kv);
        MUST(quire_arena_close(arena));
        (void)refused;
    }
}

static void run(const char *name, void (*test)(void)) {
    EXPECT(truncate(path, 0) == 0);
    test();
    printf("%s: passed\n", name);
}

int main(void) {
    int file = mkstemp(path);
    EXPECT(file >= 0);
    close(file);
    run("abort beside an unconfirmed pin", abort_beside_an_unconfirmed_pin);
    run("the right set after aborts", the_right_set_after_aborts);
    run("holes are known after reopening", holes_are_known_after_reopening);
    run("a damaged hole", a_damaged_hole);
    run("a damaged depth", a_damaged_depth);
    run("many sets at the limit", many_sets_at_the_limit);
    run("removals at the limit", removals_at_the_limit);
    unlink(path);
    return 0;
}
