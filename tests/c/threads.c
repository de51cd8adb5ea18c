/* threads.c -- one writer and several readers on one arena, meant to run under ThreadSanitizer.
 *
 * Accounts are kept in an unordered map, an ordered map and a sequence at once. The writer moves money between accounts, commits, aborts,
 * clones and iterates; so every committed state has the same total in all three. Readers pin snapshots all the time, on their own
 * threads, and check just that, by look-ups and by cursors. A second file handle, opened read-only, plays another process.
 *
 * usage: threads [commits] [page_bytes]; prints "threads: N snapshots checked" and exits 0, or says what went wrong and exits 1.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "../../structures/kv.h"
#include "../../structures/sequence.h"

#define ACCOUNTS    700
#define START_MONEY 1000
#define READERS     3

#define MUST(call)                                                                                                     \
    do {                                                                                                               \
        int must_rc_ = (call);                                                                                         \
        if (must_rc_ != QUIRE_OK) {                                                                                    \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, quire_error_message());                      \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

static int stop;
static long checked;

static void fail(const char *what, long long got) {
    fprintf(stderr, "threads: %s: %lld\n", what, got);
    exit(1);
}

static size_t account_key(int account, uint8_t *key) {
    return (size_t)snprintf((char *)key, 32, "account-%05d", account);
}

/* Values vary in length with the amount, so that records move within and between pages. */
static size_t account_value(int64_t money, uint8_t *value) {
    memset(value, 'x', 160);
    memcpy(value, &money, sizeof money);
    return 8 + (size_t)(money % 150);
}

static int64_t money_of(const quire_buffer *value) {
    int64_t money;
    if (value->count < 8) {
        fail("a value is too short", (long long)value->count);
    }
    memcpy(&money, value->bytes, sizeof money);
    return money;
}

static void put(quire_kv *kv, int account, int64_t money) {
    uint8_t key[32], value[160];
    size_t key_bytes = account_key(account, key);
    MUST(quire_kv_put(kv, key, key_bytes, value, account_value(money, value)));
}

static void check_map(quire_snap *snap, quire_kind kind, const char *name) {
    quire_kv *kv;
    quire_cursor *cursor;
    quire_buffer key = {0}, value = {0};
    int64_t total = 0, by_key = 0;
    MUST(quire_kv_open_snap(snap, name, kind, &kv));
    MUST(quire_cursor_open(kv, NULL, 0, NULL, 0, 0, &cursor));
    int rc, rows = 0;
    while ((rc = quire_cursor_next(cursor, &key, &value)) == QUIRE_OK) {
        total += money_of(&value);
        rows++;
    }
    if (rc != QUIRE_E_NOTFOUND) {
        fail(quire_error_message(), rc);
    }
    for (int account = 0; account < ACCOUNTS; account++) {
        uint8_t bytes[32];
        size_t count = account_key(account, bytes);
        MUST(quire_kv_get(kv, bytes, count, &value));
        by_key += money_of(&value);
    }
    if (rows != ACCOUNTS || total != (int64_t)ACCOUNTS * START_MONEY || by_key != total) {
        fail(name, total);
    }
    quire_buffer_free(&key);
    quire_buffer_free(&value);
    quire_cursor_close(cursor);
    quire_kv_close(kv);
}

static void check_sequence(quire_snap *snap) {
    quire_sequence *sequence;
    quire_buffer value = {0};
    int64_t total = 0;
    uint64_t count;
    MUST(quire_sequence_open_snap(snap, "sequence", &sequence));
    MUST(quire_sequence_count(sequence, &count));
    for (uint64_t i = 0; i < count; i += 7) {
        MUST(quire_sequence_get(sequence, i, &value));
        total += money_of(&value);
    }
    if (count != ACCOUNTS || total < 0) {
        fail("sequence", (long long)count);
    }
    quire_buffer_free(&value);
    quire_sequence_close(sequence);
}

static void *reader(void *argument) {
    quire_arena *arena = argument;
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
        quire_snap *snap;
        MUST(quire_snap_acquire(arena, &snap));
        check_map(snap, QUIRE_KIND_MAP, "map");
        check_map(snap, QUIRE_KIND_ORDERED, "ordered");
        check_sequence(snap);
        quire_snap_release(snap);
        __atomic_add_fetch(&checked, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

static void commit(quire_arena *arena) {
    MUST(quire_arena_enter(arena));
    MUST(quire_arena_commit(arena));
    quire_arena_leave(arena);
}

static void abort_all(quire_arena *arena) {
    MUST(quire_arena_enter(arena));
    MUST(quire_arena_abort(arena));
    quire_arena_leave(arena);
}

static void churn_clone(quire_arena *arena) {
    MUST(quire_arena_enter(arena));
    if (!quire_set_exists(arena, "copy")) {
        MUST(quire_set_clone(arena, "map", "copy"));
    } else {
        MUST(quire_set_destroy(arena, "copy"));
    }
    quire_arena_leave(arena);
}

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void writer(quire_arena *arena, int commits) {
    quire_kv *map, *ordered;
    quire_sequence *sequence;
    static int64_t money[ACCOUNTS], committed[ACCOUNTS];
    uint8_t value[160];
    uint64_t random = 0x9E3779B97F4A7C15u;
    MUST(quire_kv_open(arena, "map", QUIRE_KIND_MAP, &map));
    MUST(quire_kv_open(arena, "ordered", QUIRE_KIND_ORDERED, &ordered));
    MUST(quire_sequence_open(arena, "sequence", &sequence));
    memcpy(committed, money, sizeof money);
    for (int i = 0; i < ACCOUNTS; i++) {
        committed[i] = money[i] = START_MONEY;
    }
    for (int round = 0; round < commits; round++) {
        for (int moves = 0; moves < 40; moves++) {
            int from = (int)(next_random(&random) % ACCOUNTS), to = (int)(next_random(&random) % ACCOUNTS);
            if (from == to || money[from] < 10) {
                continue;
            }
            int64_t amount = 1 + (int64_t)(next_random(&random) % 10);
            money[from] -= amount;
            money[to] += amount;
            put(map, from, money[from]);
            put(map, to, money[to]);
            put(ordered, from, money[from]);
            put(ordered, to, money[to]);
            MUST(quire_sequence_set(sequence, (uint64_t)from, value, account_value(money[from], value)));
            MUST(quire_sequence_set(sequence, (uint64_t)to, value, account_value(money[to], value)));
        }
        if (round % 5 == 4) {
            abort_all(arena);
            memcpy(money, committed, sizeof money);
        } else {
            if (round % 7 == 0) {
                churn_clone(arena);
            }
            commit(arena);
            memcpy(committed, money, sizeof money);
        }
    }
    quire_kv_close(map);
    quire_kv_close(ordered);
    quire_sequence_close(sequence);
}

static void fill(quire_arena *arena) {
    quire_kv *map, *ordered;
    quire_sequence *sequence;
    uint8_t value[160];
    MUST(quire_kv_open(arena, "map", QUIRE_KIND_MAP, &map));
    MUST(quire_kv_open(arena, "ordered", QUIRE_KIND_ORDERED, &ordered));
    MUST(quire_sequence_open(arena, "sequence", &sequence));
    for (int account = 0; account < ACCOUNTS; account++) {
        put(map, account, START_MONEY);
        put(ordered, account, START_MONEY);
        MUST(quire_sequence_insert(sequence, (uint64_t)account, value, account_value(START_MONEY, value)));
    }
    quire_kv_close(map);
    quire_kv_close(ordered);
    quire_sequence_close(sequence);
    commit(arena);
}

static void run(const char *path, int commits, uint32_t page_bytes) {
    quire_arena *arena, *other = NULL;
    quire_arena_options options = {.path = path, .page_bytes = page_bytes};
    pthread_t threads[READERS];
    MUST(quire_arena_open(&options, &arena));
    fill(arena);
    if (path != NULL) {
        quire_arena_options again = {.path = path, .read_only = true};
        MUST(quire_arena_open(&again, &other));
    }
    stop = 0;
    for (int i = 0; i < READERS; i++) {
        pthread_create(&threads[i], NULL, reader, other != NULL && i == 0 ? other : arena);
    }
    writer(arena, commits);
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < READERS; i++) {
        pthread_join(threads[i], NULL);
    }
    MUST(quire_arena_enter(arena));
    MUST(quire_arena_check(arena));
    quire_arena_leave(arena);
    if (other != NULL) {
        MUST(quire_arena_close(other));
    }
    MUST(quire_arena_close(arena));
}

int main(int argc, char **argv) {
    int commits = argc > 1 ? atoi(argv[1]) : 200;
    uint32_t page_bytes = argc > 2 ? (uint32_t)atoi(argv[2]) : 1024;
    char path[] = "/tmp/quire-threads-XXXXXX";
    int file = mkstemp(path);
    if (file < 0) {
        fail("cannot make a temporary file", 0);
    }
    close(file);
    run(NULL, commits, page_bytes);
    run(path, commits, page_bytes);
    unlink(path);
    printf("threads: %ld snapshots checked\n", checked);
    return checked > 0 ? 0 : 1;
}
