/* record.h -- how one key and its value (or values) lie in a page.
 *
 * Purpose     Both maps keep records in this form, so that bulk access, deltas and checks read one layout. Sequences use it with
 *             empty keys. What does not fit in a page goes to a stream: a chain of pages holding bytes.
 *
 * Layout      offset size
 *             0      2    key word: bits 0..13 bytes of key inline, bit 15: the key is in a stream
 *             2      2    value word: bits 0..13 bytes of value inline, bits 14..15 form (quire_value_form)
 *             4      4    stamp: the epoch of the record's last change
 *             8      k    key, or quire_stream_ref followed by the key's first QUIRE_KEY_PREFIX_BYTES bytes
 *             8+k    v    value, or quire_stream_ref; several values: each a u32 length and its bytes, back to back
 *             padded with zeros to a multiple of 8. Little endian. Records start at multiples of 8.
 *             stream page: u32 next page (QUIRE_NO_PAGE at the end), u32 reserved 0, then bytes.
 *
 * Invariants  I1 a record is at most quire_record_inline_max bytes.   I2 a stream's pages belong to one record.
 *             I3 a value form of MANY holds at least one value.
 * Ownership   Records live in the caller's pages. quire_buffer belongs to the caller; its bytes point into a page (valid as
 *             long as that page pointer is) or into its own memory.
 * Threads     Reads as the view they go through; writes by the writer alone.
 * Errors      QUIRE_E_CORRUPT when lengths or streams do not fit; nothing is read out of bounds.
 */
#ifndef QUIRE_RECORD_H
#define QUIRE_RECORD_H

#include <string.h>

#include "../pagemgr/pagemgr.h"

typedef struct {
    uint16_t key_word;
    uint16_t value_word;
    uint32_t stamp;
    uint8_t bytes[];
} quire_record;

typedef enum {
    QUIRE_VALUE_INLINE = 0,
    QUIRE_VALUE_STREAM = 1,
    QUIRE_VALUE_MANY = 2,
    QUIRE_VALUE_MANY_STREAM = 3,
} quire_value_form;

typedef struct {
    uint64_t byte_count;
    uint32_t head;
    uint32_t tail;
    uint64_t value_count; /* 1 for a key or a single value */
} quire_stream_ref;

#define QUIRE_RECORD_HEADER_BYTES 8u
#define QUIRE_KEY_PREFIX_BYTES    32u
#define QUIRE_WORD_BYTES_MASK     0x3FFFu
#define QUIRE_KEY_IN_STREAM       0x8000u

/* Bytes that a caller reads from: in a page, or in memory of the buffer's own. Zero-initialise; free at the end. */
typedef struct {
    const uint8_t *bytes;
    size_t count;
    uint8_t *own;
    size_t own_capacity;
    bool
        copy; /* set by the caller: calls on live structures leave the bytes in own, safe from writes of other threads */
} quire_buffer;
void quire_buffer_free(quire_buffer *buffer);
/* If copy is set, moves bytes that lie in a page to own. */
int quire_buffer_keep(quire_buffer *buffer);
/* Makes room for count bytes in own; keeps what is there. */
int quire_buffer_grow(quire_buffer *buffer, size_t count);

/* The most bytes a record may take in a page; whatever is longer goes to streams. */
static inline uint32_t quire_record_inline_max(uint32_t page_bytes) {
    return page_bytes / 4 < 8192 ? page_bytes / 4 : 8192;
}
static inline uint32_t quire_record_key_part(const quire_record *record) {
    return record->key_word & QUIRE_WORD_BYTES_MASK;
}
static inline uint32_t quire_record_value_part(const quire_record *record) {
    return record->value_word & QUIRE_WORD_BYTES_MASK;
}
static inline quire_value_form quire_record_form(const quire_record *record) {
    return (quire_value_form)(record->value_word >> 14);
}
/* Bytes the record takes in its page, padding included. */
static inline uint32_t quire_record_bytes(const quire_record *record) {
    return (QUIRE_RECORD_HEADER_BYTES + quire_record_key_part(record) + quire_record_value_part(record) + 7u) & ~7u;
}
static inline bool quire_record_key_is_inline(const quire_record *record) {
    return (record->key_word & QUIRE_KEY_IN_STREAM) == 0;
}
/* True if the record starting at offset of a page lies inside it. Call before trusting a record read from a page. */
static inline bool quire_record_fits(const uint8_t *page, uint32_t page_bytes, uint32_t offset) {
    return (offset & 7u) == 0 && offset + QUIRE_RECORD_HEADER_BYTES <= page_bytes &&
           offset + quire_record_bytes((const quire_record *)(page + offset)) <= page_bytes;
}

/* memcmp order, a shorter one before those it begins. */
static inline int quire_bytes_order(const uint8_t *left, size_t left_bytes, const uint8_t *right, size_t right_bytes) {
    size_t common = left_bytes < right_bytes ? left_bytes : right_bytes;
    int order = common == 0 ? 0 : memcmp(left, right, common);
    return order != 0 ? order : (left_bytes > right_bytes) - (left_bytes < right_bytes);
}

/* QUIRE_E_CORRUPT if a set says that it has more records than its pages have room for. */
int quire_record_count_check(const quire_view *view, uint64_t count);

/* QUIRE_OK, or QUIRE_E_CORRUPT. */
int quire_record_key(const quire_view *view, const quire_record *record, quire_buffer *key);
/* The single value, or the first of several. */
int quire_record_value(const quire_view *view, const quire_record *record, quire_buffer *value);
/* All values back to back, each behind its u32 length: the form of QUIRE_VALUE_MANY, also for a single value. The lengths are checked:
 * they lead from value to value, and end where the values do. */
int quire_record_values(const quire_view *view, const quire_record *record, quire_buffer *values,
                        uint64_t *value_count);
/* memcmp order of the record's key against key; *order < 0 if the record's is smaller. */
int quire_record_compare(const quire_view *view, const quire_record *record, const uint8_t *key, size_t key_bytes,
                         int *order);
int quire_record_compare_slow(const quire_view *view, const quire_record *record, const uint8_t *key, size_t key_bytes,
                              int *order);
/* As memcmp and memcpy, for the few bytes that keys and values mostly are: without a call. */
static inline bool quire_bytes_equal(const uint8_t *left, const uint8_t *right, size_t count) {
    if (QUIRE_UNLIKELY(count > 64)) {
        return memcmp(left, right, count) == 0;
    }
    uint64_t a = 0, b = 0;
    for (; count >= 8; count -= 8, left += 8, right += 8) {
        memcpy(&a, left, 8);
        memcpy(&b, right, 8);
        if (a != b) {
            return false;
        }
    }
    for (; count > 0; count--) {
        if (*left++ != *right++) {
            return false;
        }
    }
    return true;
}
static inline void quire_bytes_copy(uint8_t *to, const uint8_t *from, size_t count) {
    if (QUIRE_UNLIKELY(count > 128)) {
        memcpy(to, from, count);
        return;
    }
    for (; count >= 8; count -= 8, to += 8, from += 8) {
        memcpy(to, from, 8);
    }
    for (; count > 0; count--) {
        *to++ = *from++;
    }
}

static inline bool quire_record_key_equals(const quire_view *view, const quire_record *record, const uint8_t *key,
                                           size_t key_bytes, int *rc) {
    if (QUIRE_LIKELY(quire_record_key_is_inline(record))) {
        return quire_record_key_part(record) == key_bytes && quire_bytes_equal(record->bytes, key, key_bytes);
    }
    int order = 1;
    *rc = quire_record_compare_slow(view, record, key, key_bytes, &order);
    return *rc == QUIRE_OK && order == 0;
}

/* Whether key and value both lie in the record, none in a stream. */
static inline bool quire_record_is_plain(uint32_t page_bytes, size_t key_bytes, size_t value_bytes) {
    uint32_t inline_max = quire_record_inline_max(page_bytes);
    return key_bytes <= inline_max / 2 && value_bytes <= inline_max &&
           QUIRE_RECORD_HEADER_BYTES + key_bytes + value_bytes <= inline_max;
}
static inline uint32_t quire_record_plain_bytes(size_t key_bytes, size_t value_bytes) {
    return (uint32_t)(QUIRE_RECORD_HEADER_BYTES + key_bytes + value_bytes + 7) & ~7u;
}
/* What quire_record_compose makes of them where they are plain and nothing is replaced, in its place. */
static inline void quire_record_write_plain(quire_record *record, uint32_t stamp, const uint8_t *key, size_t key_bytes,
                                            const uint8_t *value, size_t value_bytes) {
    memset((uint8_t *)record + quire_record_plain_bytes(key_bytes, value_bytes) - 8, 0, 8); /* with the padding */
    *record = (quire_record){.key_word = (uint16_t)key_bytes, .value_word = (uint16_t)value_bytes, .stamp = stamp};
    quire_bytes_copy(record->bytes, key, key_bytes);
    quire_bytes_copy(record->bytes + key_bytes, value, value_bytes);
}

/* How many pages may be touched by streams when a record of this size is put or appended to: add to the structure's own. */
uint64_t quire_record_reserve(const quire_set *set, size_t key_bytes, size_t value_bytes);

/* Composes the record for key = value into image (quire_record_inline_max bytes), stamped with the writing epoch. old is the record it
 * replaces, or NULL: its value stream is released and its key stream taken over, so the caller must then store the image
 * in old's place. *record_bytes is the padded size. Needs quire_record_reserve() pages in reserve. */
int quire_record_compose(quire_set *set, const quire_record *old, const uint8_t *key, size_t key_bytes,
                         const uint8_t *value, size_t value_bytes, uint8_t *image, uint32_t *record_bytes);
/* The same for old with one more value behind its values (old == NULL: a record of one value, form MANY). */
int quire_record_compose_append(quire_set *set, const quire_record *old, const uint8_t *key, size_t key_bytes,
                                const uint8_t *value, size_t value_bytes, uint8_t *image, uint32_t *record_bytes);
/* Releases the record's streams, before the record itself is taken from its page. */
int quire_record_drop(quire_set *set, const quire_record *record);
/* Checks one record for sense and calls visit for each stream page, so that a checker can account for it. */
int quire_record_check(const quire_view *view, const quire_record *record,
                       int (*visit)(void *context, quire_page_id id), void *context);

#endif
