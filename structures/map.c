/* map.c -- the unordered map: a linear hash over slotted pages.
 *
 * Purpose     Maps byte keys to byte values. The hash table holds one word per record, the records lie in slotted pages beside it: so a
 *             table page splits without moving a record, new records fill pages to the brim, and those written together leave together.
 *             The table grows and shrinks by one page at a time; no operation ever pays for the whole.
 *
 * Layout      page 0, super: map_super.
 *             directory page b: bucket b of the hash table. 64-byte lines of eight words, the first two words of the page being
 *             its header (table_page). A key's home line is given by its hash; a full line spills into the next, a full page
 *             into a chained page of table 0. A look-up so reads one line of the table and the record, seldom more.
 *             word: bits 0..33 where the record is (page id * page_bytes + offset, in units of 8 bytes), bits 34..63 signature.
 *             signature: bits 0.. group, then line, bit 28 half, bit 29 third: all that is needed to find the bucket again at
 *             any size of the table without reading the record.
 *             record page: heap_page, then records (record.h) and holes, back to back up to `bump`. A hole is a record header whose
 *             key word is HOLE, its value word the hole's units, its stamp the next hole's place (0: none).
 *
 *             Buckets come in groups, 2^level of them; each group has `planes` buckets, one more if its number is below
 *             `split`. Bucket j of group g is directory page j * 2^level + g. Growing goes 1, 2, 3, 4 planes, where 4 planes
 *             are 2 planes of twice the groups. Taking the steps 2 to 3 and 3 to 4 instead of 2 to 4 keeps the fullest
 *             buckets at 1.5 times the emptiest instead of 2, and the table's words well used at every size.
 *
 * Invariants  I1 directory pages == planes * 2^level + split.   I2 each word is in the bucket its signature names, and no line between its
 *             home line and its own has an empty word.   I3 each word leads to a record whose key has that signature, each record has one
 *             word; count is their number.   I4 in a record page records and holes lie back to back; free_units is the holes'
 *             sum; the hole list has each hole once.   I5 the partial list is doubly linked and has exactly the pages
 *             marked listed.   I6 a table page with a chained page has no empty word, so a search that sees one ends there.
 *
 * Ownership   The map owns all pages of its set. Records given out live until the next write (live) or the snapshot's release.
 * Threads     One writer; any number of readers on snapshots.
 * Errors      CORRUPT for whatever breaks the above; FULL beyond 128 GiB of records. Growing, shrinking and moving records together are
 *             done when memory allows: failing that they are left for later, and nothing but speed or space is lost.
 */
#include "kv_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif
#include <sys/random.h>
#include <time.h>

#define SUPER_MAGIC    0x50414D51u /* "QMAP" */
#define TABLE_MAGIC    0x4C425451u /* "QTBL" */
#define HEAP_MAGIC     0x50414851u /* "QHAP" */
#define LAYOUT_VERSION 1u
#define HOLE           0x4000u
#define PLACE_BITS     34u
#define PLACE_MASK     (((uint64_t)1 << PLACE_BITS) - 1)
#define LINE_WORDS     8u
#define HEADER_WORDS   2u
/* Partly filled pages that a placement looks at before it takes a fresh one. */
#define POPS_MAX 4u

typedef struct {
    uint32_t version;
    uint32_t magic;
    uint64_t seed;
    uint64_t count;
    uint32_t level;
    uint32_t planes;
    uint32_t split;
    uint32_t partial_head; /* record pages with room worth using; QUIRE_NO_PAGE: none */
    uint32_t fill_page;    /* where new records go first; QUIRE_NO_PAGE: none yet */
    uint32_t heap_count;
} map_super;
_Static_assert(sizeof(map_super) == 48, "super page of the map");

typedef struct {
    uint32_t chained; /* the next table page of this bucket, QUIRE_NO_PAGE: none */
    uint32_t magic;
    uint64_t reserved;
} table_page;
_Static_assert(sizeof(table_page) == HEADER_WORDS * 8, "header of a table page");

typedef struct {
    uint32_t previous, magic, next;
    uint16_t bump; /* units of 8 bytes, as all places in a page */
    uint16_t free_units;
    uint16_t hole; /* first hole, 0: none */
    uint16_t record_count;
    uint16_t listed;
    uint16_t reserved;
} heap_page;
_Static_assert(sizeof(heap_page) == 24, "header of a record page");
#define HEAP_FIRST_UNIT 3u

/* The shape of the table: what decides the bucket of a signature. */
typedef struct {
    uint32_t level, planes, split;
} shape;

/* Where a key's word and record are; of a key that is not there, where its word goes: word 0 if that takes a further table page. */
typedef struct {
    quire_page_id table;
    uint32_t word;
    uint64_t table_entry; /* of the pages, until one of them is written to */
    uint64_t page_entry;
    quire_page_id page;
    uint32_t unit;
    const quire_record *record;
} location;

/* ------------------------------------------------------------------------------------------------ hashing */

static inline uint64_t load64(const uint8_t *bytes) {
    uint64_t word;
    memcpy(&word, bytes, 8);
    return word;
}
static inline uint32_t load32(const uint8_t *bytes) {
    uint32_t word;
    memcpy(&word, bytes, 4);
    return word;
}
static inline uint64_t fold(uint64_t a, uint64_t b) {
    __uint128_t product = (__uint128_t)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* Multiply-and-fold over 16 bytes at a time; seeded, so that keys cannot be chosen to collide. */
static inline uint64_t hash_key(const uint8_t *key, size_t bytes, uint64_t seed) {
    const uint64_t k0 = 0x9E3779B97F4A7C15u, k1 = 0xD1B54A32D192ED03u, k2 = 0x8CB92BA72F3D8DD7u;
    uint64_t a, b, state = seed ^ fold(bytes ^ k0, k1);
    if (bytes > 16) {
        size_t left = bytes;
        for (; left > 16; left -= 16, key += 16) {
            state = fold(load64(key) ^ k1, load64(key + 8) ^ state);
        }
        a = load64(key + left - 16);
        b = load64(key + left - 8);
    } else if (bytes >= 8) {
        a = load64(key);
        b = load64(key + bytes - 8);
    } else if (bytes >= 4) {
        a = load32(key);
        b = load32(key + bytes - 4);
    } else {
        a = bytes == 0 ? 0 : (uint64_t)key[0] << 16 | (uint64_t)key[bytes / 2] << 8 | key[bytes - 1];
        b = 0;
    }
    return fold(fold(a ^ k1, b ^ state) ^ k2, state ^ k0);
}

static inline unsigned line_bits(const quire_view *view) {
    return view->page_shift - 6u;
}
static inline unsigned group_bits(const quire_view *view) {
    return 28u - line_bits(view);
}

static inline uint32_t signature_of(const quire_view *view, uint64_t hash) {
    uint32_t group = (uint32_t)hash & ((1u << group_bits(view)) - 1);
    uint32_t line = (uint32_t)(hash >> 32) & ((1u << line_bits(view)) - 1);
    uint32_t half = (uint32_t)(hash >> 63);
    uint32_t third = (uint32_t)((hash >> 43 & 0xFFFFF) * 3) >> 20 == 0;
    return group | line << group_bits(view) | half << 28 | third << 29;
}
static inline uint32_t signature_line(const quire_view *view, uint32_t signature) {
    return signature >> group_bits(view) & ((1u << line_bits(view)) - 1);
}

static inline shape shape_of(const map_super *super) {
    return (shape){super->level, super->planes, super->split};
}
static inline uint32_t shape_buckets(shape s) {
    return (s.planes << s.level) + s.split;
}

static inline uint32_t bucket_of(shape s, uint32_t signature) {
    uint32_t group = signature & ((1u << s.level) - 1), half = signature >> 28 & 1;
    uint32_t plane;
    switch (s.planes + (group < s.split)) {
    case 1:
        plane = 0;
        break;
    case 2:
        plane = half;
        break;
    case 3:
        plane = signature >> 29 ? 2 : half;
        break;
    default:
        plane = 2 * half + (signature >> s.level & 1);
        break;
    }
    return (plane << s.level) + group;
}

/* ------------------------------------------------------------------------------------------------ finding */

static int damaged(const char *what, uint64_t value) {
    return quire_fail(QUIRE_E_CORRUPT, "map: %s (%" PRIu64 ")", what, value);
}

static inline const map_super *super_read(const quire_view *view) {
    const map_super *super = quire_page_read(view, 0);
    return super != NULL && super->magic == SUPER_MAGIC && super->level < group_bits(view) && super->planes >= 1 &&
                   super->planes <= 3
               ? super
               : NULL;
}

static inline uint32_t table_words(const quire_view *view) {
    return quire_view_page_bytes(view) / 8;
}

/* The first word of a line that may be used. */
static inline uint32_t line_first(uint32_t line) {
    return line == 0 ? HEADER_WORDS : line * LINE_WORDS;
}

/* Where a word leads to; false if there is no record. */
static inline bool record_at(const quire_view *view, uint64_t word, location *at) {
    uint64_t place = word & PLACE_MASK;
    at->page = (quire_page_id)(place >> (view->page_shift - 3));
    at->unit = (uint32_t)place & ((1u << (view->page_shift - 3)) - 1);
    at->page_entry = quire_page_entry(view, at->page);
    const uint8_t *bytes = quire_entry_read(view, at->page_entry);
    if (QUIRE_UNLIKELY(bytes == NULL || at->unit < HEAP_FIRST_UNIT ||
                       !quire_record_fits(bytes, quire_view_page_bytes(view), at->unit * 8))) {
        return false;
    }
    at->record = (const quire_record *)(bytes + at->unit * 8);
    return true;
}

static inline bool line_full(const uint64_t *words, uint32_t line) {
    for (uint32_t i = line_first(line); i < (line + 1) * LINE_WORDS; i++) {
        if (words[i] == 0) {
            return false;
        }
    }
    return true;
}

/* The words of a line with this signature, and those that are empty, a bit each. */
static inline void line_look(const uint64_t *words, uint32_t line, uint32_t signature, unsigned *same,
                             unsigned *empty) {
    const uint64_t *at = words + (size_t)line * LINE_WORDS;
    unsigned like = 0, none = 0;
#ifdef __SSE2__
    const __m128i wanted = _mm_set1_epi32((int)signature), zero = _mm_setzero_si128();
    for (unsigned i = 0; i < LINE_WORDS; i += 4) {
        __m128 two = _mm_castsi128_ps(_mm_loadu_si128((const __m128i *)(at + i)));
        __m128 more = _mm_castsi128_ps(_mm_loadu_si128((const __m128i *)(at + i + 2)));
        __m128i low = _mm_castps_si128(_mm_shuffle_ps(two, more, _MM_SHUFFLE(2, 0, 2, 0)));
        __m128i high = _mm_castps_si128(_mm_shuffle_ps(two, more, _MM_SHUFFLE(3, 1, 3, 1)));
        __m128i equal = _mm_cmpeq_epi32(_mm_srli_epi32(high, PLACE_BITS - 32), wanted);
        __m128i no_bits = _mm_cmpeq_epi32(_mm_or_si128(low, high), zero);
        like |= (unsigned)_mm_movemask_ps(_mm_castsi128_ps(equal)) << i;
        none |= (unsigned)_mm_movemask_ps(_mm_castsi128_ps(no_bits)) << i;
    }
#else
    for (unsigned i = 0; i < LINE_WORDS; i++) {
        like |= (unsigned)((at[i] >> PLACE_BITS) == signature) << i;
        none |= (unsigned)(at[i] == 0) << i;
    }
#endif
    unsigned in_use = line == 0 ? 0xFFu << HEADER_WORDS & 0xFFu : 0xFFu;
    *same = like & ~none & in_use;
    *empty = none & in_use;
}

/* Looks for the key in one table page. Where it is not found, found->word is the first empty word that the search met, which is where the
 * key's word goes, or 0 if it met none. */
static inline int page_find(const quire_view *view, const uint64_t *words, uint32_t signature, const uint8_t *key,
                            size_t key_bytes, location *found) {
    uint32_t lines = table_words(view) / LINE_WORDS, line = signature_line(view, signature);
    for (uint32_t tries = 0; tries < lines; tries++, line = (line + 1) & (lines - 1)) {
        unsigned same, empty;
        line_look(words, line, signature, &same, &empty);
        for (; same != 0; same &= same - 1) {
            uint32_t i = line * LINE_WORDS + (uint32_t)__builtin_ctz(same);
            if (QUIRE_UNLIKELY(!record_at(view, words[i], found))) {
                return damaged("a word leads to no record", words[i]);
            }
            int rc = QUIRE_OK;
            if (quire_record_key_equals(view, found->record, key, key_bytes, &rc)) {
                found->word = i;
                return QUIRE_OK;
            }
            QUIRE_TRY(rc);
        }
        if (QUIRE_LIKELY(empty != 0)) {
            found->word = line * LINE_WORDS + (uint32_t)__builtin_ctz(empty);
            return QUIRE_E_NOTFOUND;
        }
    }
    found->word = 0;
    return QUIRE_E_NOTFOUND;
}

static inline int bucket_find(const quire_view *view, uint32_t bucket, uint32_t signature, const uint8_t *key,
                              size_t key_bytes, location *found) {
    quire_page_id id = QUIRE_DIRECTORY_PAGE(bucket);
    for (uint32_t tries = 0; tries <= view->table[0].page_limit; tries++) {
        found->table = id;
        found->table_entry = quire_page_entry(view, id);
        const table_page *table = quire_entry_read(view, found->table_entry);
        if (QUIRE_UNLIKELY(table == NULL)) {
            return damaged("a table page is missing", id);
        }
        int rc = page_find(view, (const uint64_t *)table, signature, key, key_bytes, found);
        if (rc != QUIRE_E_NOTFOUND) {
            return rc;
        }
        /* The header is another cache line: it is looked at only where there can be a chained page (I6). */
        if (QUIRE_LIKELY(found->word != 0) || table->chained == QUIRE_NO_PAGE) {
            return QUIRE_E_NOTFOUND;
        }
        id = table->chained;
    }
    return damaged("a chain of table pages has no end", bucket);
}

static int map_locate(const quire_view *view, const uint8_t *key, size_t key_bytes, const quire_record **record,
                      quire_page_id *page) {
    const map_super *super = super_read(view);
    if (QUIRE_UNLIKELY(super == NULL)) {
        return damaged("the super page is damaged", 0);
    }
    uint32_t signature = signature_of(view, hash_key(key, key_bytes, super->seed));
    location found;
    QUIRE_TRY(bucket_find(view, bucket_of(shape_of(super), signature), signature, key, key_bytes, &found));
    *record = found.record;
    *page = found.page;
    return QUIRE_OK;
}

static int map_find(const quire_view *view, quire_set *live, const uint8_t *key, size_t key_bytes,
                    const quire_record **record) {
    quire_page_id page;
    (void)live;
    return map_locate(view, key, key_bytes, record, &page);
}

/* ------------------------------------------------------------------------------------------------ words of a bucket */

/* The first empty place for a word from its home line on; 0 if the page has none. */
static uint32_t page_room(const quire_view *view, const uint64_t *words, uint64_t word) {
    uint32_t lines = table_words(view) / LINE_WORDS, line = signature_line(view, (uint32_t)(word >> PLACE_BITS));
    for (uint32_t tries = 0; tries < lines; tries++, line = (line + 1) & (lines - 1)) {
        unsigned same, empty;
        line_look(words, line, 0, &same, &empty);
        if (QUIRE_LIKELY(empty != 0)) {
            return line * LINE_WORDS + (uint32_t)__builtin_ctz(empty);
        }
    }
    return 0;
}

static bool page_insert(const quire_view *view, uint64_t *words, uint64_t word) {
    uint32_t i = page_room(view, words, word);
    if (i != 0) {
        words[i] = word;
    }
    return i != 0;
}

static int table_page_make(quire_set *set, int which, quire_page_id *id) {
    void *page;
    QUIRE_TRY(quire_page_alloc(set, which, id, &page));
    *(table_page *)page = (table_page){.chained = QUIRE_NO_PAGE, .magic = TABLE_MAGIC};
    return QUIRE_OK;
}

static int bucket_insert(quire_set *set, uint32_t bucket, uint64_t word) {
    quire_page_id id = QUIRE_DIRECTORY_PAGE(bucket);
    for (uint32_t tries = 0; tries <= set->view.table[0].page_limit + 1; tries++) {
        const table_page *table = quire_page_read(&set->view, id);
        if (table == NULL) {
            return damaged("a table page is missing", id);
        }
        uint32_t i = page_room(&set->view, (const uint64_t *)table, word);
        if (QUIRE_LIKELY(i != 0)) {
            uint64_t *words = quire_page_amend(set, id, (size_t)i * 8, 8, false);
            if (words == NULL) {
                return damaged("a table page is missing", id);
            }
            words[i] = word;
            return QUIRE_OK;
        }
        quire_page_id chained = table->chained;
        if (chained == QUIRE_NO_PAGE) {
            QUIRE_TRY(table_page_make(set, 0, &chained));
            table_page *changed = quire_page_write(set, id);
            if (changed == NULL) {
                return damaged("a table page is missing", id);
            }
            changed->chained = chained;
        }
        id = chained;
    }
    return damaged("a chain of table pages has no end", bucket);
}

/* Takes a word out and closes the gap: whatever had spilled past this line because it was full may come back into it. */
static void page_remove(const quire_view *view, uint64_t *words, uint32_t at) {
    uint32_t lines = table_words(view) / LINE_WORDS;
    for (uint32_t hole = at;;) {
        uint32_t line = hole / LINE_WORDS;
        bool was_full = line_full(words, line);
        words[hole] = 0;
        if (!was_full) {
            return;
        }
        uint32_t moved = 0;
        uint32_t next = line;
        for (uint32_t distance = 1; distance < lines && moved == 0; distance++) {
            next = (line + distance) & (lines - 1);
            bool next_full = true;
            for (uint32_t i = line_first(next); i < (next + 1) * LINE_WORDS; i++) {
                if (words[i] == 0) {
                    next_full = false;
                    continue;
                }
                uint32_t home = signature_line(view, (uint32_t)(words[i] >> PLACE_BITS));
                if (((next - home) & (lines - 1)) >= distance && moved == 0) {
                    moved = i;
                }
            }
            if (!next_full && moved == 0) {
                return;
            }
        }
        if (moved == 0) {
            return;
        }
        words[hole] = words[moved];
        hole = moved; /* still in its old place: the loop sees its line as it was */
    }
}

static uint32_t page_count_words(const quire_view *view, const uint64_t *words) {
    uint32_t count = 0;
    for (uint32_t i = HEADER_WORDS; i < table_words(view); i++) {
        count += words[i] != 0;
    }
    return count;
}

/* I6: fills the place that came free in a page with a chained page from the last page of the chain, and lets that go when it
 * is empty. */
static int chain_refill(quire_set *set, quire_page_id id) {
    quire_page_id before_id = id, last_id = id;
    for (uint32_t tries = 0;; tries++) {
        const table_page *last = quire_page_read(&set->view, last_id);
        if (last == NULL || last->magic != TABLE_MAGIC || tries > set->view.table[0].page_limit + 1) {
            return damaged("a chain of table pages is broken", last_id);
        }
        if (last->chained == QUIRE_NO_PAGE) {
            break;
        }
        before_id = last_id;
        last_id = last->chained;
    }
    uint64_t *words = quire_page_write(set, last_id), *to = quire_page_write(set, id);
    table_page *before = quire_page_write(set, before_id);
    uint32_t i = HEADER_WORDS;
    while (i < table_words(&set->view) && words[i] == 0) {
        i++;
    }
    if (i == table_words(&set->view)) {
        return damaged("a chained table page is empty", last_id);
    }
    uint64_t word = words[i];
    page_remove(&set->view, words, i);
    (void)page_insert(&set->view, to, word);
    if (page_count_words(&set->view, words) > 0) {
        return QUIRE_OK;
    }
    before->chained = QUIRE_NO_PAGE;
    return quire_page_free(set, last_id);
}

/* Removes the last page of the bucket's chain if the removal emptied it. */
static int chain_trim(quire_set *set, uint32_t bucket, quire_page_id emptied) {
    quire_page_id id = QUIRE_DIRECTORY_PAGE(bucket);
    for (uint32_t tries = 0; tries <= set->view.table[0].page_limit; tries++) {
        const table_page *table = quire_page_read(&set->view, id);
        if (table == NULL || table->magic != TABLE_MAGIC || table->chained == QUIRE_NO_PAGE) {
            break;
        }
        if (table->chained == emptied) {
            ((table_page *)quire_page_write(set, id))->chained = QUIRE_NO_PAGE;
            return quire_page_free(set, emptied);
        }
        id = table->chained;
    }
    return damaged("a chain of table pages is broken", id);
}

static int bucket_remove(quire_set *set, uint32_t bucket, const location *at) {
    uint64_t *words = quire_page_write(set, at->table);
    if (words == NULL) {
        return damaged("a table page is missing", at->table);
    }
    bool was_full = line_full(words, at->word / LINE_WORDS);
    page_remove(&set->view, words, at->word);
    if (was_full && ((table_page *)words)->chained != QUIRE_NO_PAGE) {
        return chain_refill(set, at->table);
    }
    return at->table >> 31 == 0 && page_count_words(&set->view, words) == 0 ? chain_trim(set, bucket, at->table)
                                                                            : QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ growing, shrinking */

static shape shape_next(shape s) {
    s.split++;
    if (s.split == 1u << s.level) {
        s.split = 0;
        s.planes++;
    }
    return s.planes == 4 ? (shape){s.level + 1, 2, 0} : s;
}

static shape shape_before(shape s) {
    if (s.split > 0) {
        s.split--;
    } else if (s.planes == 2 && s.level > 0) {
        s = (shape){s.level - 1, 3, (1u << (s.level - 1)) - 1};
    } else {
        s = (shape){s.level, s.planes - 1, (1u << s.level) - 1};
    }
    return s;
}

/* Words a table of this shape holds before it grows. The fullest buckets are those not yet split: 3/2 and 4/3 of the average
 * at the end of a pass over 2 and 3 planes; at these marks they are about 87 % full. */
static uint64_t shape_room(const quire_view *view, shape s) {
    static const uint32_t percent[4] = {0, 80, 58, 65};
    return (uint64_t)shape_buckets(s) * (table_words(view) - HEADER_WORDS) * percent[s.planes] / 100;
}

typedef struct {
    uint64_t *items;
    size_t count, capacity;
} word_list;

/* All words of a bucket; its chained pages go, its first page is left empty. */
static int bucket_drain(quire_set *set, uint32_t bucket, word_list *list) {
    uint32_t words_count = table_words(&set->view);
    quire_page_id id = QUIRE_DIRECTORY_PAGE(bucket);
    for (bool first = true; id != QUIRE_NO_PAGE; first = false) {
        table_page *table = quire_page_write(set, id);
        if (table == NULL || table->magic != TABLE_MAGIC) {
            return damaged("a table page is missing", id);
        }
        const uint64_t *words = (const uint64_t *)table;
        for (uint32_t i = HEADER_WORDS; i < words_count; i++) {
            if (words[i] != 0 && list->count < list->capacity) {
                list->items[list->count++] = words[i];
            }
        }
        quire_page_id chained = table->chained;
        if (first) {
            memset(table, 0, quire_view_page_bytes(&set->view));
            *table = (table_page){.chained = QUIRE_NO_PAGE, .magic = TABLE_MAGIC};
        } else {
            QUIRE_TRY(quire_page_free(set, id));
        }
        id = chained;
    }
    return QUIRE_OK;
}

static int bucket_page_count(const quire_view *view, uint32_t bucket, uint32_t *pages) {
    quire_page_id id = QUIRE_DIRECTORY_PAGE(bucket);
    for (uint32_t tries = 0; id != QUIRE_NO_PAGE; tries++) {
        const table_page *table = quire_page_read(view, id);
        if (table == NULL || table->magic != TABLE_MAGIC || tries > view->table[0].page_limit) {
            return damaged("a table page is missing", id);
        }
        (*pages)++;
        id = table->chained;
    }
    return QUIRE_OK;
}

/* Puts the words of a group into its empty buckets. The pages are looked up once, not for every word. */
static int group_fill(quire_set *set, shape s, uint32_t level, uint32_t planes, uint32_t group, const word_list *list) {
    uint64_t *pages[4];
    for (uint32_t plane = 0; plane < planes; plane++) {
        pages[plane] = quire_page_write(set, QUIRE_DIRECTORY_PAGE((plane << level) + group));
        if (pages[plane] == NULL) {
            return damaged("a table page is missing", plane);
        }
    }
    for (size_t i = 0; i < list->count; i++) {
        uint32_t bucket = bucket_of(s, (uint32_t)(list->items[i] >> PLACE_BITS)), plane = (bucket - group) >> level;
        if (plane >= planes || !page_insert(&set->view, pages[plane], list->items[i])) {
            QUIRE_TRY(bucket_insert(set, bucket, list->items[i]));
        }
    }
    return QUIRE_OK;
}

/* Takes one step from shape `from` to its neighbour `to`: the buckets of one group are drained and filled again. */
static int reshape(quire_set *set, shape from, shape to) {
    bool grows = shape_buckets(to) > shape_buckets(from);
    shape smaller = grows ? from : to;
    uint32_t group = smaller.split, fewer = smaller.planes, pages = 0;
    word_list list = {0};
    for (uint32_t plane = 0; plane < fewer + !grows; plane++) {
        QUIRE_TRY(bucket_page_count(&set->view, (plane << smaller.level) + group, &pages));
    }
    list.capacity = (size_t)pages * table_words(&set->view);
    /* For want of memory the table stays as it is; the next operation tries again. */
    if (quire_arena_reserve(set->view.arena, 2 * (uint64_t)pages + 4) != QUIRE_OK) {
        return QUIRE_OK;
    }
    list.items = malloc(list.capacity * sizeof *list.items);
    if (list.items == NULL) {
        return QUIRE_OK;
    }
    int rc = QUIRE_OK;
    for (uint32_t plane = 0; plane < fewer + !grows && rc == QUIRE_OK; plane++) {
        rc = bucket_drain(set, (plane << smaller.level) + group, &list);
    }
    quire_page_id last = QUIRE_DIRECTORY_PAGE(shape_buckets(smaller));
    if (rc == QUIRE_OK) {
        rc = grows ? table_page_make(set, 1, &last) : quire_page_free(set, last);
    }
    map_super *super = rc == QUIRE_OK ? quire_page_write(set, 0) : NULL;
    if (super != NULL) {
        super->level = to.level;
        super->planes = to.planes;
        super->split = to.split;
    }
    if (rc == QUIRE_OK) {
        rc = group_fill(set, to, smaller.level, fewer + grows, group, &list);
    }
    free(list.items);
    return rc;
}

static int table_adapt(quire_set *set) {
    const map_super *super = super_read(&set->view);
    if (super == NULL) {
        return damaged("the super page is damaged", 0);
    }
    shape now = shape_of(super);
    if (super->count > shape_room(&set->view, now) && now.level + 1 < group_bits(&set->view)) {
        return reshape(set, now, shape_next(now));
    }
    if (shape_buckets(now) > 1) {
        shape before = shape_before(now);
        if (super->count < shape_room(&set->view, before) * 3 / 4) {
            return reshape(set, now, before);
        }
    }
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ record pages */

static uint32_t page_units(const quire_view *view) {
    return quire_view_page_bytes(view) / 8;
}

static heap_page *heap_write(quire_set *set, quire_page_id id) {
    heap_page *page = quire_page_write(set, id);
    if (page == NULL || page->magic != HEAP_MAGIC || page->bump > page_units(&set->view) ||
        page->bump < HEAP_FIRST_UNIT || page->free_units > page->bump) {
        (void)damaged("a record page is damaged", id);
        return NULL;
    }
    return page;
}

static inline quire_record *unit_at(const heap_page *page, uint32_t unit) {
    return (quire_record *)((uint8_t *)(uintptr_t)page + (size_t)unit * 8);
}

static int list_remove(quire_set *set, heap_page *page) {
    map_super *super = quire_page_write(set, 0);
    heap_page *next = page->next == QUIRE_NO_PAGE ? NULL : heap_write(set, page->next);
    heap_page *previous = page->previous == QUIRE_NO_PAGE ? NULL : heap_write(set, page->previous);
    if (super == NULL || (page->next != QUIRE_NO_PAGE && next == NULL) ||
        (page->previous != QUIRE_NO_PAGE && previous == NULL)) {
        return damaged("the list of partly filled pages is broken", page->next);
    }
    if (next != NULL) {
        next->previous = page->previous;
    }
    if (previous != NULL) {
        previous->next = page->next;
    } else {
        super->partial_head = page->next;
    }
    page->next = page->previous = QUIRE_NO_PAGE;
    page->listed = 0;
    return QUIRE_OK;
}

static int list_add(quire_set *set, quire_page_id id, heap_page *page) {
    map_super *super = quire_page_write(set, 0);
    heap_page *head =
        super == NULL || super->partial_head == QUIRE_NO_PAGE ? NULL : heap_write(set, super->partial_head);
    if (super == NULL || (super->partial_head != QUIRE_NO_PAGE && head == NULL)) {
        return damaged("the list of partly filled pages is broken", id);
    }
    page->next = super->partial_head;
    page->previous = QUIRE_NO_PAGE;
    page->listed = 1;
    if (head != NULL) {
        head->previous = id;
    }
    super->partial_head = id;
    return QUIRE_OK;
}

/* A place for `units` in the page: a hole, or behind the last record. 0 if there is none. */
static uint32_t heap_take(const quire_view *view, heap_page *page, uint32_t units) {
    uint32_t limit = page_units(view);
    uint16_t *link = &page->hole;
    for (uint32_t tries = 0; *link != 0 && tries < 16; tries++) {
        uint32_t unit = *link;
        quire_record *hole = unit_at(page, unit);
        if (unit < HEAP_FIRST_UNIT || unit >= page->bump || hole->key_word != HOLE ||
            hole->value_word > page->free_units || hole->value_word == 0 || unit + hole->value_word > page->bump) {
            return 0; /* damaged: quire_kv_check tells; nothing is put there */
        }
        if (hole->value_word >= units) {
            uint32_t left = hole->value_word - units;
            uint16_t next = (uint16_t)hole->stamp;
            if (left > 0) {
                *unit_at(page, unit + units) =
                    (quire_record){.key_word = HOLE, .value_word = (uint16_t)left, .stamp = next};
                next = (uint16_t)(unit + units);
            }
            *link = next;
            page->free_units = (uint16_t)(page->free_units - units);
            page->record_count++;
            return unit;
        }
        /* The link to the next hole is the low half of the stamp (little endian, holes only). */
        link = (uint16_t *)(void *)&hole->stamp;
    }
    if (limit - page->bump >= units) {
        uint32_t unit = page->bump;
        page->bump = (uint16_t)(page->bump + units);
        page->record_count++;
        return unit;
    }
    return 0;
}

static void heap_make_hole(heap_page *page, uint32_t unit, uint32_t units) {
    if (unit + units == page->bump) {
        page->bump = (uint16_t)unit; /* the last one: it just ends the page earlier */
        return;
    }
    *unit_at(page, unit) = (quire_record){.key_word = HOLE, .value_word = (uint16_t)units, .stamp = page->hole};
    page->hole = (uint16_t)unit;
    page->free_units = (uint16_t)(page->free_units + units);
}

static uint32_t heap_free_units(const quire_view *view, const heap_page *page) {
    return page_units(view) - page->bump + page->free_units;
}

/* Sets the place in the word of a record that moved. */
static int word_repoint(quire_set *set, const map_super *super, const quire_record *record, quire_page_id old_page,
                        uint32_t old_unit, quire_page_id page, uint32_t unit) {
    quire_buffer key = {0};
    int rc = quire_record_key(&set->view, record, &key);
    uint32_t signature = rc == QUIRE_OK ? signature_of(&set->view, hash_key(key.bytes, key.count, super->seed)) : 0;
    quire_buffer_free(&key);
    QUIRE_TRY(rc);
    unsigned shift = set->view.page_shift - 3u;
    uint64_t old_word = (uint64_t)signature << PLACE_BITS | (uint64_t)old_page << shift | old_unit;
    uint64_t new_word = (uint64_t)signature << PLACE_BITS | (uint64_t)page << shift | unit;
    quire_page_id id = QUIRE_DIRECTORY_PAGE(bucket_of(shape_of(super), signature));
    for (uint32_t tries = 0; id != QUIRE_NO_PAGE && tries <= set->view.table[0].page_limit; tries++) {
        const uint64_t *words = quire_page_read(&set->view, id);
        for (uint32_t i = HEADER_WORDS; words != NULL && i < table_words(&set->view); i++) {
            if (words[i] == old_word) {
                uint64_t *changed = quire_page_write(set, id);
                if (changed == NULL) {
                    return damaged("a table page is missing", id);
                }
                changed[i] = new_word;
                return QUIRE_OK;
            }
        }
        id = words == NULL ? QUIRE_NO_PAGE : ((const table_page *)words)->chained;
    }
    return damaged("a record has no word", old_unit);
}

/* The next thing in a record page at *unit; false at the end or on damage. Holes are given, too. */
static bool heap_next(const quire_view *view, const heap_page *page, uint32_t *unit, const quire_record **record,
                      uint32_t *units) {
    if (*unit >= page->bump || page->bump > page_units(view)) {
        return false;
    }
    *record = unit_at(page, *unit);
    *units = (*record)->key_word == HOLE ? (*record)->value_word : quire_record_bytes(*record) / 8;
    return *units > 0 && *unit + *units <= page->bump;
}

static uint64_t map_reserve(const quire_set *set) {
    (void)set;
    /* super; table page, its chain's ends; record pages: fill, fresh, old and its two neighbours, each page popped and the
     * next in the list; some to spare */
    return 12 + 2 * POPS_MAX;
}

/* Pages that repointing the words of so many records may touch, and what an operation around it may still need. */
static uint64_t repoint_reserve(const quire_set *set, uint32_t record_count) {
    uint64_t table_pages = (uint64_t)set->view.table[1].page_count * 2;
    return (record_count < table_pages ? record_count : table_pages) + 2 * map_reserve(set);
}

/* Pushes the records of a page together, so that its free room is in one piece. */
static int heap_compact(quire_set *set, quire_page_id id) {
    heap_page *page = heap_write(set, id);
    if (page == NULL) {
        return QUIRE_E_CORRUPT;
    }
    uint8_t *copy = malloc(quire_view_page_bytes(&set->view));
    /* Each record may sit in another bucket: its table page is copied if it is not this epoch's. */
    if (copy == NULL || quire_arena_reserve(set->view.arena, repoint_reserve(set, page->record_count)) != QUIRE_OK) {
        free(copy);
        return QUIRE_OK; /* left as it is: the caller finds no room and goes elsewhere */
    }
    memcpy(copy, page, quire_view_page_bytes(&set->view));
    const map_super *super = super_read(&set->view);
    uint32_t unit = HEAP_FIRST_UNIT, to = HEAP_FIRST_UNIT, units;
    const quire_record *record;
    while (heap_next(&set->view, page, &unit, &record, &units)) {
        unit += units;
    }
    if (super == NULL || unit != page->bump) {
        free(copy);
        return damaged("a record page is damaged", id);
    }
    int rc = QUIRE_OK;
    unit = HEAP_FIRST_UNIT;
    page->hole = 0;
    page->free_units = 0;
    for (; rc == QUIRE_OK && heap_next(&set->view, (const heap_page *)copy, &unit, &record, &units); unit += units) {
        if (record->key_word != HOLE) {
            memcpy(unit_at(page, to), record, (size_t)units * 8);
            if (to != unit) {
                rc = word_repoint(set, super, record, id, unit, id, to);
            }
            to += units;
        }
    }
    page->bump = (uint16_t)to;
    free(copy);
    return rc;
}

/* A new record page, which is the one to be filled from now on. */
static int heap_fresh(quire_set *set, map_super *super, quire_page_id *id, heap_page **page) {
    void *fresh;
    QUIRE_TRY(quire_page_alloc(set, 0, id, &fresh));
    if (*id >= (quire_page_id)(PLACE_MASK >> (set->view.page_shift - 3))) {
        (void)quire_page_free(set, *id);
        return quire_fail(QUIRE_E_FULL,
                          "an unordered map holds at most 128 GiB of records: spread the keys over more maps");
    }
    *page = fresh;
    **page =
        (heap_page){.previous = QUIRE_NO_PAGE, .magic = HEAP_MAGIC, .next = QUIRE_NO_PAGE, .bump = HEAP_FIRST_UNIT};
    super->fill_page = *id;
    super->heap_count++;
    return QUIRE_OK;
}

/* Finds room for a record and gives its page and unit; the page is writable. At most `pops` partly filled pages are tried, each of
 * which, its neighbour in the list and, if it is compacted, the table pages of its records are written. */
static int heap_place(quire_set *set, uint32_t units, uint32_t pops, quire_page_id *id, uint32_t *unit,
                      heap_page **page) {
    map_super *super = quire_page_write(set, 0);
    if (super == NULL) {
        return damaged("the super page is missing", 0);
    }
    if (super->fill_page != QUIRE_NO_PAGE) {
        *page = heap_write(set, super->fill_page);
        if (*page == NULL) {
            return QUIRE_E_CORRUPT;
        }
        *unit = heap_take(&set->view, *page, units);
        if (*unit != 0) {
            *id = super->fill_page;
            return QUIRE_OK;
        }
    }
    for (uint32_t tries = 0; super->partial_head != QUIRE_NO_PAGE && tries < pops; tries++) {
        quire_page_id candidate = super->partial_head;
        heap_page *taken = heap_write(set, candidate);
        if (taken == NULL) {
            return QUIRE_E_CORRUPT;
        }
        QUIRE_TRY(list_remove(set, taken));
        *unit = heap_take(&set->view, taken, units);
        if (*unit == 0 && heap_free_units(&set->view, taken) >= units + page_units(&set->view) / 16) {
            QUIRE_TRY(heap_compact(set, candidate));
            *unit = heap_take(&set->view, taken, units);
        }
        if (*unit != 0) {
            super->fill_page = *id = candidate;
            *page = taken;
            return QUIRE_OK;
        }
    }
    QUIRE_TRY(heap_fresh(set, super, id, page));
    *unit = heap_take(&set->view, *page, units);
    return QUIRE_OK;
}

static int heap_page_release(quire_set *set, quire_page_id id, heap_page *page) {
    map_super *super = quire_page_write(set, 0);
    if (page->listed) {
        QUIRE_TRY(list_remove(set, page));
    }
    if (super->fill_page == id) {
        super->fill_page = QUIRE_NO_PAGE;
    }
    super->heap_count--;
    return quire_page_free(set, id);
}

/* Moves what is left on a page to other pages and lets it go. */
static int heap_empty(quire_set *set, quire_page_id id) {
    heap_page *page = heap_write(set, id);
    if (page == NULL) {
        return QUIRE_E_CORRUPT;
    }
    if (quire_arena_reserve(set->view.arena, repoint_reserve(set, page->record_count)) != QUIRE_OK) {
        return QUIRE_OK; /* costs space, not correctness */
    }
    if (page->listed) {
        QUIRE_TRY(list_remove(set, page));
    }
    const map_super *super = super_read(&set->view);
    if (super == NULL) {
        return damaged("the super page is damaged", 0);
    }
    uint32_t unit = HEAP_FIRST_UNIT, units;
    const quire_record *record;
    for (; heap_next(&set->view, page, &unit, &record, &units); unit += units) {
        if (record->key_word == HOLE) {
            continue;
        }
        quire_page_id to;
        uint32_t to_unit;
        heap_page *to_page;
        QUIRE_TRY(heap_place(set, units, 0, &to, &to_unit, &to_page));
        memcpy(unit_at(to_page, to_unit), record, (size_t)units * 8);
        QUIRE_TRY(word_repoint(set, super, record, id, unit, to, to_unit));
    }
    return heap_page_release(set, id, page);
}

/* Gives a record's room back to its page, and the page back when little is left on it. */
static int heap_release(quire_set *set, quire_page_id id, uint32_t unit, uint32_t units) {
    heap_page *page = heap_write(set, id);
    const map_super *super = quire_page_read(&set->view, 0);
    if (page == NULL || super == NULL || page->record_count == 0) {
        return damaged("a record page is damaged", id);
    }
    page->record_count--;
    heap_make_hole(page, unit, units);
    if (page->record_count == 0) {
        return heap_page_release(set, id, page);
    }
    if (id == super->fill_page) {
        return QUIRE_OK;
    }
    uint32_t all = page_units(&set->view), room = heap_free_units(&set->view, page);
    if (room > all - all * 3 / 8) {
        return heap_empty(set, id);
    }
    return !page->listed && room >= all / 16 ? list_add(set, id, page) : QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ put, remove */

static int map_create(quire_set *set) {
    quire_page_id id;
    void *page;
    QUIRE_TRY(quire_arena_reserve(set->view.arena, 4));
    QUIRE_TRY(quire_page_alloc(set, 0, &id, &page));
    map_super super = {.version = LAYOUT_VERSION,
                       .magic = SUPER_MAGIC,
                       .planes = 1,
                       .partial_head = QUIRE_NO_PAGE,
                       .fill_page = QUIRE_NO_PAGE};
    if (getrandom(&super.seed, sizeof super.seed, GRND_NONBLOCK) != (ssize_t)sizeof super.seed) {
        super.seed = (uint64_t)time(NULL) * 0x9E3779B97F4A7C15u; /* early in boot: any seed will do */
    }
    *(map_super *)page = super;
    return table_page_make(set, 1, &id);
}

/* Writes the composed record over the old one, or elsewhere if it does not fit there. */
static int record_replace(quire_set *set, const location *at, const uint8_t *image, uint32_t new_bytes,
                          uint32_t old_bytes) {
    heap_page *page = heap_write(set, at->page);
    if (page == NULL) {
        return QUIRE_E_CORRUPT;
    }
    uint32_t units = new_bytes / 8, old_units = old_bytes / 8;
    if (units <= old_units) {
        memcpy(unit_at(page, at->unit), image, new_bytes);
        if (units < old_units) {
            heap_make_hole(page, at->unit + units, old_units - units);
        }
        return QUIRE_OK;
    }
    quire_page_id id;
    uint32_t unit;
    heap_page *to;
    QUIRE_TRY(heap_place(set, units, POPS_MAX, &id, &unit, &to));
    memcpy(unit_at(to, unit), image, new_bytes);
    uint64_t *words = quire_page_write(set, at->table);
    if (words == NULL) {
        return damaged("a table page is missing", at->table);
    }
    /* heap_place may have compacted the old record's page: the word tells where it is now. */
    location old;
    if (!record_at(&set->view, words[at->word], &old)) {
        return damaged("a word leads to no record", words[at->word]);
    }
    words[at->word] = (words[at->word] & ~PLACE_MASK) | (uint64_t)id << (set->view.page_shift - 3) | unit;
    return heap_release(set, old.page, old.unit, old_units);
}

static inline uint64_t word_of(const quire_view *view, uint32_t signature, quire_page_id id, uint32_t unit) {
    return (uint64_t)signature << PLACE_BITS | (uint64_t)id << (view->page_shift - 3) | unit;
}

/* The word of a record that is placed goes where the search for its key ended. entry: of that page as it is now. */
static int word_insert(quire_set *set, const location *at, uint64_t entry, uint64_t word) {
    uint64_t *words = quire_page_amend_at(set, at->table, entry, (size_t)at->word * 8, 8, false);
    if (QUIRE_UNLIKELY(words == NULL)) {
        return damaged("a table page is missing", at->table);
    }
    words[at->word] = word;
    return QUIRE_OK;
}

static int count_up(quire_set *set, map_super *super) {
    super->count++;
    return QUIRE_UNLIKELY(super->count > shape_room(&set->view, shape_of(super))) ? table_adapt(set) : QUIRE_OK;
}

static int record_insert(quire_set *set, uint32_t bucket, uint32_t signature, const location *at, const uint8_t *image,
                         uint32_t bytes) {
    quire_page_id id;
    uint32_t unit;
    heap_page *page;
    QUIRE_TRY(heap_place(set, bytes / 8, POPS_MAX, &id, &unit, &page));
    memcpy(unit_at(page, unit), image, bytes);
    uint64_t word = word_of(&set->view, signature, id, unit);
    /* Placing may have written to table pages: their words then lead elsewhere, but stand where they were. */
    QUIRE_TRY(at->word == 0 ? bucket_insert(set, bucket, word)
                            : word_insert(set, at, quire_page_entry(&set->view, at->table), word));
    return count_up(set, quire_page_write(set, 0));
}

static inline bool value_is_replaced(const quire_record *old, size_t value_bytes) {
    return quire_record_value_part(old) == value_bytes && quire_record_form(old) == QUIRE_VALUE_INLINE;
}

/* The common update: a value of the same size, over the old one. */
static inline int value_replace(quire_set *set, const location *at, const uint8_t *value, size_t value_bytes) {
    const quire_record *old = at->record;
    size_t start = (size_t)at->unit * 8 + offsetof(quire_record, stamp);
    size_t end = (size_t)at->unit * 8 + quire_record_bytes(old);
    uint8_t *page =
        quire_page_amend_at(set, at->page, at->page_entry, start, end - start, old->stamp == *set->epoch_writing);
    if (QUIRE_UNLIKELY(page == NULL)) {
        return damaged("a record page is missing", at->page);
    }
    quire_record *record = (quire_record *)(page + (size_t)at->unit * 8);
    record->stamp = *set->epoch_writing;
    quire_bytes_copy(record->bytes + quire_record_key_part(record), value, value_bytes);
    return QUIRE_OK;
}

/* at: what bucket_find found, and rc what it returned. */
static int put_found(quire_set *set, uint32_t bucket, uint32_t signature, int rc, const location *at,
                     const quire_item *item, bool append) {
    if (rc != QUIRE_OK && rc != QUIRE_E_NOTFOUND) {
        return rc;
    }
    const quire_record *old = rc == QUIRE_OK ? at->record : NULL;
    if (QUIRE_LIKELY(old != NULL && !append && value_is_replaced(old, item->value_bytes))) {
        return value_replace(set, at, item->value, item->value_bytes);
    }
    uint8_t image[8192];
    uint32_t bytes, old_bytes = old == NULL ? 0 : quire_record_bytes(old);
    QUIRE_TRY(append ? quire_record_compose_append(set, old, item->key, item->key_bytes, item->value, item->value_bytes,
                                                   image, &bytes)
                     : quire_record_compose(set, old, item->key, item->key_bytes, item->value, item->value_bytes, image,
                                            &bytes));
    return old == NULL ? record_insert(set, bucket, signature, at, image, bytes)
                       : record_replace(set, at, image, bytes, old_bytes);
}

static int map_put(quire_set *set, const quire_item *item, bool append) {
    const map_super *super = super_read(&set->view);
    if (QUIRE_UNLIKELY(super == NULL)) {
        return damaged("the super page is damaged", 0);
    }
    uint32_t signature = signature_of(&set->view, hash_key(item->key, item->key_bytes, super->seed));
    uint32_t bucket = bucket_of(shape_of(super), signature);
    location at;
    int rc = bucket_find(&set->view, bucket, signature, item->key, item->key_bytes, &at);
    return put_found(set, bucket, signature, rc, &at, item, append);
}

static int map_remove(quire_set *set, const uint8_t *key, size_t key_bytes) {
    const map_super *super = super_read(&set->view);
    if (QUIRE_UNLIKELY(super == NULL)) {
        return damaged("the super page is damaged", 0);
    }
    uint32_t signature = signature_of(&set->view, hash_key(key, key_bytes, super->seed));
    uint32_t bucket = bucket_of(shape_of(super), signature);
    location at;
    QUIRE_TRY(bucket_find(&set->view, bucket, signature, key, key_bytes, &at));
    uint32_t units = quire_record_bytes(at.record) / 8;
    QUIRE_TRY(quire_record_drop(set, at.record));
    QUIRE_TRY(bucket_remove(set, bucket, &at));
    map_super *counted = quire_page_write(set, 0);
    counted->count--;
    QUIRE_TRY(heap_release(set, at.page, at.unit, units));
    return table_adapt(set);
}

/* ------------------------------------------------------------------------------------------------ many keys at a time */

static inline void record_ahead(const quire_view *view, uint64_t word, bool change) {
    uint64_t place = word & PLACE_MASK;
    uint64_t entry = quire_page_entry(view, (quire_page_id)(place >> (view->page_shift - 3)));
    const uint8_t *page = quire_entry_read(view, entry);
    if (change) {
        quire_amend_ahead(view, entry);
    }
    if (page != NULL) {
        const uint8_t *at = page + (place & ((1u << (view->page_shift - 3)) - 1)) * 8;
        __builtin_prefetch(at);
        __builtin_prefetch(at + 64);
    }
}

/* Asks for the memory of several keys at once, first their lines of the table, then the records these lead to: so the operations
 * that follow find it near, instead of waiting for one key's memory after the other's. Gives the keys' signatures. */
static void keys_ahead(const quire_view *view, const map_super *super, const quire_item *items, size_t count,
                       bool change, uint32_t signatures[QUIRE_GROUP_ITEMS]) {
    const uint64_t *pages[QUIRE_GROUP_ITEMS];
    shape s = shape_of(super);
    for (size_t i = 0; i < count; i++) {
        signatures[i] = signature_of(view, hash_key(items[i].key, items[i].key_bytes, super->seed));
        pages[i] = quire_page_read(view, QUIRE_DIRECTORY_PAGE(bucket_of(s, signatures[i])));
        if (QUIRE_LIKELY(pages[i] != NULL)) {
            __builtin_prefetch(pages[i] + (size_t)signature_line(view, signatures[i]) * LINE_WORDS);
        }
    }
    for (size_t i = 0; i < count; i++) {
        if (QUIRE_UNLIKELY(pages[i] == NULL)) {
            continue;
        }
        unsigned same, empty;
        uint32_t line = signature_line(view, signatures[i]);
        line_look(pages[i], line, signatures[i], &same, &empty);
        for (; same != 0; same &= same - 1) {
            record_ahead(view, pages[i][line * LINE_WORDS + (uint32_t)__builtin_ctz(same)], change);
        }
    }
}

static void map_ahead(const quire_view *view, const quire_item *items, size_t count) {
    uint32_t signatures[QUIRE_GROUP_ITEMS];
    const map_super *super = super_read(view);
    if (super != NULL) {
        keys_ahead(view, super, items, count, false, signatures);
    }
}

static int map_find_items(const quire_view *view, const quire_item *items, size_t count, const quire_record **records) {
    uint32_t signatures[QUIRE_GROUP_ITEMS];
    const map_super *super = super_read(view);
    if (QUIRE_UNLIKELY(super == NULL)) {
        return damaged("the super page is damaged", 0);
    }
    keys_ahead(view, super, items, count, false, signatures);
    shape s = shape_of(super);
    for (size_t i = 0; i < count; i++) {
        location found;
        int rc =
            bucket_find(view, bucket_of(s, signatures[i]), signatures[i], items[i].key, items[i].key_bytes, &found);
        if (rc != QUIRE_OK && rc != QUIRE_E_NOTFOUND) {
            return rc;
        }
        records[i] = rc == QUIRE_OK ? found.record : NULL;
    }
    return QUIRE_OK;
}

/* Pages that so many puts may touch which only write over a value, or append to the page being filled; and, as before any put, what
 * leaves room for a removal. A page holds more than two records. */
static uint64_t quick_reserve(const quire_set *set, size_t count) {
    uint64_t known = (uint64_t)set->view.table[0].page_count + set->view.table[1].page_count + count / 2;
    return 2 * map_reserve(set) + 1 + (known < 2 * count ? known : 2 * count);
}

/* What puts of a group share: pages of the epoch being written, which stay where they are until the map is written to in another way. */
typedef struct {
    quire_set *set;
    map_super *super; /* NULL: to be asked for */
    heap_page *fill;  /* the page being filled; NULL: to be asked for */
    uint64_t room;    /* keys that the table holds before it grows */
} put_run;

static int group_begin(put_run *group) {
    quire_set *set = group->set;
    group->super = quire_page_write(set, 0);
    if (super_read(&set->view) == NULL) {
        return damaged("the super page is damaged", 0);
    }
    group->room = shape_room(&set->view, shape_of(group->super));
    if (group->super->fill_page != QUIRE_NO_PAGE) {
        group->fill = heap_write(set, group->super->fill_page);
        return group->fill == NULL ? QUIRE_E_CORRUPT : QUIRE_OK;
    }
    return QUIRE_OK;
}

/* Writes the record of a new key behind the others of the page being filled, or on a fresh page. *done is false where it takes more than
 * that: no room but in holes or partly filled pages, streams, a further table page. */
static int record_append(put_run *group, uint32_t signature, const location *at, const quire_item *item, bool *done) {
    quire_set *set = group->set;
    const quire_view *view = &set->view;
    *done = false;
    if (!quire_record_is_plain(quire_view_page_bytes(view), item->key_bytes, item->value_bytes) || at->word == 0) {
        return QUIRE_OK;
    }
    if (group->super == NULL) {
        QUIRE_TRY(group_begin(group));
    }
    map_super *super = group->super;
    uint32_t units = quire_record_plain_bytes(item->key_bytes, item->value_bytes) / 8;
    if (group->fill == NULL || group->fill->hole != 0 || page_units(view) - group->fill->bump < units) {
        quire_page_id fresh;
        if (super->partial_head != QUIRE_NO_PAGE || (group->fill != NULL && group->fill->hole != 0)) {
            return QUIRE_OK;
        }
        QUIRE_TRY(heap_fresh(set, super, &fresh, &group->fill));
    }
    heap_page *page = group->fill;
    uint32_t unit = page->bump;
    quire_record_write_plain(unit_at(page, unit), *set->epoch_writing, item->key, item->key_bytes, item->value,
                             item->value_bytes);
    page->bump = (uint16_t)(unit + units);
    page->record_count++;
    super->count++;
    *done = true;
    return word_insert(set, at, at->table_entry, word_of(view, signature, super->fill_page, unit));
}

/* What most puts are, done with little ado: a value of the same size, or a new record behind the others. Else *done is false. */
static inline int put_quickly(put_run *group, uint32_t signature, int rc, const location *at, const quire_item *item,
                              bool *done) {
    if (rc == QUIRE_E_NOTFOUND) {
        return record_append(group, signature, at, item, done);
    }
    *done = rc == QUIRE_OK && value_is_replaced(at->record, item->value_bytes);
    return *done ? value_replace(group->set, at, item->value, item->value_bytes) : QUIRE_OK;
}

/* A put of any kind, with a reservation of its own. */
static int put_slowly(quire_set *set, uint32_t bucket, uint32_t signature, int rc, const location *at,
                      const quire_item *item) {
    QUIRE_TRY(quire_put_reserve(set, map_reserve(set), item));
    return put_found(set, bucket, signature, rc, at, item, false);
}

static int map_put_items(quire_set *set, const quire_item *items, size_t count, size_t *done) {
    const quire_view *view = &set->view;
    uint32_t signatures[QUIRE_GROUP_ITEMS];
    put_run group = {.set = set};
    const map_super *super = super_read(view);
    if (QUIRE_UNLIKELY(super == NULL)) {
        return damaged("the super page is damaged", 0);
    }
    keys_ahead(view, super, items, count, true, signatures);
    shape s = shape_of(super);
    bool reserved = quire_arena_reserve(view->arena, quick_reserve(set, count)) == QUIRE_OK;
    while (*done < count) {
        const quire_item *item = &items[*done];
        uint32_t signature = signatures[*done], bucket = bucket_of(s, signature);
        location at;
        bool quick = false;
        int rc = bucket_find(view, bucket, signature, item->key, item->key_bytes, &at);
        if (QUIRE_LIKELY(reserved)) {
            QUIRE_TRY(put_quickly(&group, signature, rc, &at, item, &quick));
        }
        if (QUIRE_UNLIKELY(!quick)) {
            QUIRE_TRY(put_slowly(set, bucket, signature, rc, &at, item));
        }
        ++*done;
        if (QUIRE_UNLIKELY(!quick || (group.super != NULL && group.super->count > group.room))) {
            QUIRE_TRY(quick ? table_adapt(set) : QUIRE_OK);
            group = (put_run){.set = set};
            super = super_read(view);
            if (QUIRE_UNLIKELY(super == NULL)) {
                return damaged("the super page is damaged", 0);
            }
            s = shape_of(super);
            /* Where there is too little room, looking for some is dear: not for each key. */
            reserved = reserved && quire_arena_reserve(view->arena, quick_reserve(set, count - *done)) == QUIRE_OK;
        }
    }
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ iterating */

/* The record page at id, NULL if that page is of another kind. */
static const heap_page *heap_read(const quire_view *view, quire_page_id id) {
    const heap_page *page = quire_page_read(view, id);
    return page != NULL && page->magic == HEAP_MAGIC ? page : NULL;
}

static int map_next(const quire_view *view, quire_position *position, bool reverse, const quire_record **record) {
    if (reverse) {
        return quire_fail(QUIRE_E_INVALID, "an unordered map has no reverse order");
    }
    if (!position->started) {
        *position = (quire_position){.page = 1, .slot = HEAP_FIRST_UNIT, .started = true};
    }
    for (; position->page < view->table[0].page_limit; position->page++, position->slot = HEAP_FIRST_UNIT) {
        const heap_page *page = heap_read(view, position->page);
        uint32_t units;
        const quire_record *at;
        if (page == NULL) {
            QUIRE_TRY(quire_view_whole(view));
        }
        while (page != NULL && heap_next(view, page, &position->slot, &at, &units)) {
            position->slot += units;
            if (at->key_word != HOLE) {
                *record = at;
                return QUIRE_OK;
            }
        }
        if (page != NULL && position->slot != page->bump) {
            return damaged("a record page is damaged", position->page);
        }
    }
    return QUIRE_E_NOTFOUND;
}

static int map_page_records(const quire_view *view, quire_page_id id,
                            int (*visit)(void *context, const quire_record *record), void *context) {
    const heap_page *page = id == 0 || id >> 31 != 0 ? NULL : heap_read(view, id);
    uint32_t unit = HEAP_FIRST_UNIT, units;
    const quire_record *record;
    if (page == NULL) {
        return quire_view_whole(view);
    }
    for (; heap_next(view, page, &unit, &record, &units); unit += units) {
        if (record->key_word != HOLE) {
            QUIRE_TRY(visit(context, record));
        }
    }
    return QUIRE_OK;
}

/* As value_replace leaves it. */
static const quire_record *map_amended(const quire_view *view, const uint8_t *page, uint32_t offset, uint32_t count) {
    const heap_page *heap = (const heap_page *)page;
    uint32_t start = offset - (uint32_t)offsetof(quire_record, stamp), page_bytes = quire_view_page_bytes(view);
    if (heap->magic != HEAP_MAGIC || heap->bump > page_units(view) || start < HEAP_FIRST_UNIT * 8 ||
        start >= (uint32_t)heap->bump * 8 || !quire_record_fits(page, page_bytes, start)) {
        return NULL;
    }
    const quire_record *record = (const quire_record *)(page + start);
    return record->key_word != HOLE && quire_record_key_is_inline(record) &&
                   quire_record_form(record) == QUIRE_VALUE_INLINE &&
                   start + quire_record_bytes(record) == offset + count
               ? record
               : NULL;
}

static int map_count(const quire_view *view, uint64_t *count) {
    const map_super *super = super_read(view);
    if (super == NULL) {
        return damaged("the super page is damaged", 0);
    }
    *count = super->count;
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ checking */

/* I2, I3 for the words of one table page. */
static int check_words(const quire_view *view, const map_super *super, uint32_t bucket, const table_page *table,
                       uint64_t *count) {
    const uint64_t *words = (const uint64_t *)table;
    uint32_t lines = table_words(view) / LINE_WORDS, in_use = 0;
    for (uint32_t i = HEADER_WORDS; i < table_words(view); i++) {
        if (words[i] == 0) {
            continue;
        }
        in_use++;
        uint32_t signature = (uint32_t)(words[i] >> PLACE_BITS);
        location at;
        if (bucket_of(shape_of(super), signature) != bucket || !record_at(view, words[i], &at) ||
            heap_read(view, at.page) == NULL || at.record->key_word == HOLE) {
            return damaged("I2: a word is in the wrong bucket or leads nowhere, bucket", bucket);
        }
        quire_buffer key = {0};
        int rc = quire_record_key(view, at.record, &key);
        bool same = rc == QUIRE_OK && signature_of(view, hash_key(key.bytes, key.count, super->seed)) == signature;
        quire_buffer_free(&key);
        QUIRE_TRY(rc);
        if (!same) {
            return damaged("I3: a word's signature is not its record's, bucket", bucket);
        }
        for (uint32_t line = signature_line(view, signature); line != i / LINE_WORDS; line = (line + 1) & (lines - 1)) {
            for (uint32_t w = line_first(line); w < (line + 1) * LINE_WORDS; w++) {
                if (words[w] == 0) {
                    return damaged("I2: an empty word stands before a spilled one, bucket", bucket);
                }
            }
        }
    }
    if (table->chained != QUIRE_NO_PAGE && in_use + HEADER_WORDS != table_words(view)) {
        return damaged("I6: a table page with room has a chained page, bucket", bucket);
    }
    *count += in_use;
    return QUIRE_OK;
}

static int check_table(const quire_view *view, const map_super *super, quire_page_census *census, uint64_t *count) {
    uint32_t buckets = shape_buckets(shape_of(super));
    if (buckets != view->table[1].page_limit) {
        return damaged("I1: directory pages do not fit the table's shape", view->table[1].page_limit);
    }
    for (uint32_t bucket = 0; bucket < buckets; bucket++) {
        quire_page_id id = QUIRE_DIRECTORY_PAGE(bucket);
        while (id != QUIRE_NO_PAGE) {
            QUIRE_TRY(quire_census_count(census, id)); /* also ends a chain that runs in a circle */
            const table_page *table = quire_page_read(view, id);
            if (table == NULL || table->magic != TABLE_MAGIC) {
                return damaged("a table page is missing", id);
            }
            QUIRE_TRY(check_words(view, super, bucket, table, count));
            id = table->chained;
        }
    }
    return QUIRE_OK;
}

static int check_heap_page(const quire_view *view, const heap_page *page, quire_page_id id, quire_page_census *census,
                           uint64_t *records) {
    uint32_t unit = HEAP_FIRST_UNIT, units, holes = 0, hole_units = 0, in_page = 0;
    const quire_record *record;
    for (; heap_next(view, page, &unit, &record, &units); unit += units) {
        if (record->key_word == HOLE) {
            holes++;
            hole_units += units;
        } else {
            in_page++;
            QUIRE_TRY(quire_record_check(view, record, quire_census_count, census));
        }
    }
    if (unit != page->bump || in_page != page->record_count || hole_units != page->free_units) {
        return damaged("I4: records and holes do not fill a page as it says, page", id);
    }
    uint32_t listed = 0;
    for (uint32_t hole = page->hole; hole != 0 && listed <= holes; listed++) {
        if (hole < HEAP_FIRST_UNIT || hole >= page->bump || unit_at(page, hole)->key_word != HOLE) {
            return damaged("I4: the hole list leaves the holes, page", id);
        }
        hole = (uint16_t)unit_at(page, hole)->stamp;
    }
    if (listed != holes) {
        return damaged("I4: the hole list is not complete, page", id);
    }
    *records += in_page;
    return QUIRE_OK;
}

static int check_partial_list(const quire_view *view, const map_super *super, uint32_t listed) {
    quire_page_id previous = QUIRE_NO_PAGE;
    for (quire_page_id id = super->partial_head; id != QUIRE_NO_PAGE;) {
        const heap_page *page = heap_read(view, id);
        if (page == NULL || !page->listed || page->previous != previous || listed == 0) {
            return damaged("I5: the list of partly filled pages is broken, page", id);
        }
        listed--;
        previous = id;
        id = page->next;
    }
    return listed == 0 ? QUIRE_OK : damaged("I5: a page is marked as listed but is not", listed);
}

static int check_all(const quire_view *view, quire_page_census *census) {
    const map_super *super = super_read(view);
    if (super == NULL || super->version != LAYOUT_VERSION) {
        return damaged("the super page is damaged", 0);
    }
    QUIRE_TRY(quire_census_count(census, 0));
    uint64_t words = 0, records = 0;
    uint32_t heaps = 0, listed = 0;
    QUIRE_TRY(check_table(view, super, census, &words));
    for (quire_page_id id = 1; id < view->table[0].page_limit; id++) {
        const heap_page *page = heap_read(view, id);
        if (page != NULL) {
            QUIRE_TRY(quire_census_count(census, id));
            QUIRE_TRY(check_heap_page(view, page, id, census, &records));
            heaps++;
            listed += page->listed != 0;
        }
    }
    if (words != super->count || records != super->count || heaps != super->heap_count) {
        return damaged("I3: words, records and the count differ", super->count);
    }
    return check_partial_list(view, super, listed);
}

static int map_check(const quire_view *view) {
    quire_page_census census;
    QUIRE_TRY(quire_census_open(view, &census));
    return quire_census_close(&census, check_all(view, &census));
}

const quire_kv_ops quire_map_ops = {.kind = QUIRE_KIND_MAP,
                                    .create = map_create,
                                    .reserve = map_reserve,
                                    .find = map_find,
                                    .locate = map_locate,
                                    .ahead = map_ahead,
                                    .find_items = map_find_items,
                                    .put = map_put,
                                    .put_items = map_put_items,
                                    .remove = map_remove,
                                    .next = map_next,
                                    .page_records = map_page_records,
                                    .amended = map_amended,
                                    .count = map_count,
                                    .check = map_check};
