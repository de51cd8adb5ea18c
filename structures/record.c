/* record.c -- composing, reading and releasing records and their streams.
 *
 * Purpose     The one place that knows how a record's key and values are laid out, when they move to a stream, and how
 *             a stream is written, read and given back. map.c, ordered.c and sequence.c place the images it makes.
 *
 * Layout      record.h. Of a stream: byte_count bytes lie back to back in the chain from head to tail; every page but
 *             the last is full; bytes behind the last are zero.
 *
 * Invariants  I1 to I3 of record.h.
 *             I4 a key longer than half of quire_record_inline_max is in a stream, a shorter one never.
 *             I5 a stream holds at least one byte, and exactly as many pages as its bytes need.
 *             I6 the word at offset 4 of a stream page is 0; other pages of a structure have their magic there.
 *             I7 bytes that hold nothing are zero: equal content gives equal images.
 *
 * Ownership   A stream belongs to the record that refers to it. Composing over an old record moves the old key stream
 *             to the image and releases the old value stream.
 * Threads     As record.h.
 * Errors      Composing and dropping find out everything that can go wrong (damaged old streams, memory, page ids)
 *             before they change anything, so a structure that calls them first is left as it was. Reading trusts no
 *             length: a chain is followed for as many pages as its bytes need.
 */
#include "record.h"

#include <inttypes.h>
#include <stdlib.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pages are little endian and used in place");
_Static_assert(sizeof(quire_stream_ref) == 24, "the stream ref is 24 bytes on the page");
_Static_assert(offsetof(quire_record, bytes) == QUIRE_RECORD_HEADER_BYTES, "the record header is 8 bytes");

#define KEY_WORD_UNUSED 0x4000u
#define LENGTH_BYTES    4u
/* Old streams of up to so many pages are dealt with inside what quire_record_reserve asks for. */
#define SHORT_STREAM_PAGES 4u

typedef struct {
    uint32_t next;
    uint32_t zero;
    uint8_t bytes[];
} stream_page;
_Static_assert(sizeof(stream_page) == 8, "the stream page header is 8 bytes");

/* ------------------------------------------------------------------------------------------------ buffers */

void quire_buffer_free(quire_buffer *buffer) {
    free(buffer->own);
    *buffer = (quire_buffer){0};
}

int quire_buffer_grow(quire_buffer *buffer, size_t count) {
    if (count <= buffer->own_capacity) {
        return QUIRE_OK;
    }
    size_t capacity = buffer->own_capacity + buffer->own_capacity / 2;
    if (capacity < count) {
        capacity = count < 64 ? 64 : count;
    }
    uint8_t *own = realloc(buffer->own, capacity);
    if (own == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for a buffer of %zu bytes", capacity);
    }
    buffer->own = own;
    buffer->own_capacity = capacity;
    return QUIRE_OK;
}

int quire_buffer_keep(quire_buffer *buffer) {
    if (!buffer->copy || buffer->bytes == buffer->own) {
        return QUIRE_OK;
    }
    QUIRE_TRY(quire_buffer_grow(buffer, buffer->count + 1)); /* so that no bytes are at some address, too */
    memcpy(buffer->own, buffer->bytes, buffer->count);
    buffer->bytes = buffer->own;
    return QUIRE_OK;
}

static void buffer_point(quire_buffer *buffer, const uint8_t *bytes, size_t count) {
    buffer->bytes = bytes;
    buffer->count = count;
}

/* ------------------------------------------------------------------------------------------------ reading streams */

static uint32_t payload_bytes(const quire_view *view) {
    return quire_view_page_bytes(view) - (uint32_t)sizeof(stream_page);
}

static uint64_t pages_for(const quire_view *view, uint64_t bytes) {
    uint32_t payload = payload_bytes(view);
    return bytes / payload + (bytes % payload != 0);
}

static int ref_get(const quire_view *view, const uint8_t *bytes, quire_stream_ref *ref) {
    memcpy(ref, bytes, sizeof *ref);
    if (ref->byte_count == 0 || pages_for(view, ref->byte_count) > view->table[0].page_count) {
        return quire_fail(QUIRE_E_CORRUPT,
                          "a record claims a stream of %" PRIu64 " bytes, but its set has %" PRIu32 " pages",
                          ref->byte_count, view->table[0].page_count);
    }
    return QUIRE_OK;
}

static const stream_page *stream_page_read(const quire_view *view, quire_page_id id) {
    const stream_page *page = id >> 31 != 0 ? NULL : quire_page_read(view, id);
    return page != NULL && page->zero == 0 ? page : NULL;
}

static int stream_broken(quire_page_id id) {
    return quire_fail(QUIRE_E_CORRUPT, "a stream leads to page %" PRIu32 ", which is no stream page or not in use", id);
}

/* The part of a stream not yet read. */
typedef struct {
    const quire_view *view;
    quire_page_id page;
    uint64_t left;
    const uint8_t *bytes;
    uint32_t available; /* at bytes, within the current page */
} stream_reader;

static stream_reader reader_open(const quire_view *view, const quire_stream_ref *ref) {
    return (stream_reader){.view = view, .page = ref->head, .left = ref->byte_count};
}

/* Makes available > 0, or leaves it 0 when left is 0. */
static int reader_fill(stream_reader *reader) {
    if (reader->available != 0 || reader->left == 0) {
        return QUIRE_OK;
    }
    const stream_page *page = stream_page_read(reader->view, reader->page);
    if (page == NULL) {
        return stream_broken(reader->page);
    }
    uint32_t payload = payload_bytes(reader->view);
    reader->page = page->next;
    reader->bytes = page->bytes;
    reader->available = reader->left < payload ? (uint32_t)reader->left : payload;
    return QUIRE_OK;
}

static void reader_skip(stream_reader *reader, uint32_t count) {
    reader->bytes += count;
    reader->available -= count;
    reader->left -= count;
}

static int reader_take(stream_reader *reader, uint8_t *destination, uint64_t count) {
    if (count > reader->left) {
        return quire_fail(QUIRE_E_CORRUPT, "a stream has %" PRIu64 " bytes left where %" PRIu64 " are needed",
                          reader->left, count);
    }
    while (count > 0) {
        QUIRE_TRY(reader_fill(reader));
        uint32_t step = reader->available < count ? reader->available : (uint32_t)count;
        memcpy(destination, reader->bytes, step);
        reader_skip(reader, step);
        destination += step;
        count -= step;
    }
    return QUIRE_OK;
}

/* The next count bytes: in the page if they lie in one, else copied. */
static int reader_give(stream_reader *reader, uint64_t count, quire_buffer *buffer) {
    if (count > reader->left) {
        return quire_fail(QUIRE_E_CORRUPT,
                          "a value of %" PRIu64 " bytes is said to lie in %" PRIu64 " bytes of a stream", count,
                          reader->left);
    }
    QUIRE_TRY(reader_fill(reader));
    if (count <= reader->available) {
        buffer_point(buffer, reader->bytes, (size_t)count);
        reader_skip(reader, (uint32_t)count);
        return QUIRE_OK;
    }
    QUIRE_TRY(quire_buffer_grow(buffer, (size_t)count));
    QUIRE_TRY(reader_take(reader, buffer->own, count));
    buffer_point(buffer, buffer->own, (size_t)count);
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ reading records */

static bool form_is_stream(quire_value_form form) {
    return form == QUIRE_VALUE_STREAM || form == QUIRE_VALUE_MANY_STREAM;
}

static const uint8_t *value_at(const quire_record *record) {
    return record->bytes + quire_record_key_part(record);
}

static int key_ref(const quire_view *view, const quire_record *record, quire_stream_ref *ref) {
    if (quire_record_key_part(record) != sizeof *ref + QUIRE_KEY_PREFIX_BYTES) {
        return quire_fail(QUIRE_E_CORRUPT,
                          "a record with its key in a stream has a key part of %" PRIu32 " bytes, not %zu",
                          quire_record_key_part(record), sizeof *ref + QUIRE_KEY_PREFIX_BYTES);
    }
    QUIRE_TRY(ref_get(view, record->bytes, ref));
    if (ref->byte_count < QUIRE_KEY_PREFIX_BYTES) {
        return quire_fail(QUIRE_E_CORRUPT, "a key of %" PRIu64 " bytes is in a stream; only long keys are",
                          ref->byte_count);
    }
    return QUIRE_OK;
}

static int value_ref(const quire_view *view, const quire_record *record, quire_stream_ref *ref) {
    if (quire_record_value_part(record) != sizeof *ref) {
        return quire_fail(QUIRE_E_CORRUPT,
                          "a record with its value in a stream has a value part of %" PRIu32 " bytes, not %zu",
                          quire_record_value_part(record), sizeof *ref);
    }
    return ref_get(view, value_at(record), ref);
}

static int many_broken(uint32_t length, uint64_t room) {
    return quire_fail(QUIRE_E_CORRUPT, "one of several values claims %" PRIu32 " bytes where %" PRIu64 " are left",
                      length, room);
}

static int many_miscounted(uint64_t found, uint64_t said) {
    return quire_fail(QUIRE_E_CORRUPT, "a stream holds %" PRIu64 " values, its record says %" PRIu64, found, said);
}

/* The length of the value that starts at offset of a list; it lies inside the list. */
static int many_length(const uint8_t *list, uint64_t list_bytes, uint64_t offset, uint32_t *length) {
    uint64_t left = list_bytes - offset;
    if (left < LENGTH_BYTES) {
        return many_broken(0, left);
    }
    uint32_t found;
    memcpy(&found, list + offset, sizeof found);
    if (found > left - LENGTH_BYTES) {
        return many_broken(found, left - LENGTH_BYTES);
    }
    *length = found;
    return QUIRE_OK;
}

static int many_count(const uint8_t *list, uint64_t list_bytes, uint64_t *value_count) {
    uint64_t found = 0;
    uint32_t length = 0;
    for (uint64_t offset = 0; offset < list_bytes; offset += LENGTH_BYTES + (uint64_t)length) {
        QUIRE_TRY(many_length(list, list_bytes, offset, &length));
        found++;
    }
    if (found == 0) {
        return quire_fail(QUIRE_E_CORRUPT, "a list of values is empty (record.h I3)");
    }
    *value_count = found;
    return QUIRE_OK;
}

int quire_record_count_check(const quire_view *view, uint64_t count) {
    uint64_t pages = view->table[0].page_count;
    uint64_t most = pages * quire_view_page_bytes(view) / QUIRE_RECORD_HEADER_BYTES;
    return count <= most
               ? QUIRE_OK
               : quire_fail(QUIRE_E_CORRUPT, "%" PRIu64 " records are said to lie in %" PRIu64 " pages", count, pages);
}

int quire_record_key(const quire_view *view, const quire_record *record, quire_buffer *key) {
    if (QUIRE_LIKELY(quire_record_key_is_inline(record))) {
        buffer_point(key, record->bytes, quire_record_key_part(record));
        return QUIRE_OK;
    }
    quire_stream_ref ref;
    QUIRE_TRY(key_ref(view, record, &ref));
    stream_reader reader = reader_open(view, &ref);
    return reader_give(&reader, ref.byte_count, key);
}

int quire_record_value(const quire_view *view, const quire_record *record, quire_buffer *value) {
    quire_value_form form = quire_record_form(record);
    uint32_t part = quire_record_value_part(record);
    if (QUIRE_LIKELY(form == QUIRE_VALUE_INLINE)) {
        buffer_point(value, value_at(record), part);
        return QUIRE_OK;
    }
    uint32_t length = 0;
    if (form == QUIRE_VALUE_MANY) {
        QUIRE_TRY(many_length(value_at(record), part, 0, &length));
        buffer_point(value, value_at(record) + LENGTH_BYTES, length);
        return QUIRE_OK;
    }
    quire_stream_ref ref;
    QUIRE_TRY(value_ref(view, record, &ref));
    stream_reader reader = reader_open(view, &ref);
    if (form == QUIRE_VALUE_STREAM) {
        return reader_give(&reader, ref.byte_count, value);
    }
    QUIRE_TRY(reader_take(&reader, (uint8_t *)&length, LENGTH_BYTES));
    return reader_give(&reader, length, value);
}

/* One value of value_bytes behind its length: room in the buffer's own memory, the length written. */
static int values_of_one(quire_buffer *values, uint64_t value_bytes) {
    if (value_bytes > UINT32_MAX) {
        return quire_fail(QUIRE_E_CORRUPT, "a value claims %" PRIu64 " bytes; at most %" PRIu32 " are allowed",
                          value_bytes, UINT32_MAX);
    }
    uint32_t length = (uint32_t)value_bytes;
    QUIRE_TRY(quire_buffer_grow(values, LENGTH_BYTES + (size_t)length));
    memcpy(values->own, &length, LENGTH_BYTES);
    buffer_point(values, values->own, LENGTH_BYTES + (size_t)length);
    return QUIRE_OK;
}

int quire_record_values(const quire_view *view, const quire_record *record, quire_buffer *values,
                        uint64_t *value_count) {
    quire_value_form form = quire_record_form(record);
    uint32_t part = quire_record_value_part(record);
    if (form == QUIRE_VALUE_MANY) {
        QUIRE_TRY(many_count(value_at(record), part, value_count));
        buffer_point(values, value_at(record), part);
        return QUIRE_OK;
    }
    if (form == QUIRE_VALUE_INLINE) {
        QUIRE_TRY(values_of_one(values, part));
        memcpy(values->own + LENGTH_BYTES, value_at(record), part);
        *value_count = 1;
        return QUIRE_OK;
    }
    quire_stream_ref ref;
    QUIRE_TRY(value_ref(view, record, &ref));
    stream_reader reader = reader_open(view, &ref);
    if (form == QUIRE_VALUE_STREAM) {
        QUIRE_TRY(values_of_one(values, ref.byte_count));
        QUIRE_TRY(reader_take(&reader, values->own + LENGTH_BYTES, ref.byte_count));
        *value_count = 1;
        return QUIRE_OK;
    }
    QUIRE_TRY(reader_give(&reader, ref.byte_count, values));
    /* Callers follow the lengths without looking. */
    QUIRE_TRY(many_count(values->bytes, values->count, value_count));
    return *value_count == ref.value_count ? QUIRE_OK : many_miscounted(*value_count, ref.value_count);
}

int quire_record_compare(const quire_view *view, const quire_record *record, const uint8_t *key, size_t key_bytes,
                         int *order) {
    if (QUIRE_LIKELY(quire_record_key_is_inline(record))) {
        *order = quire_bytes_order(record->bytes, quire_record_key_part(record), key, key_bytes);
        return QUIRE_OK;
    }
    return quire_record_compare_slow(view, record, key, key_bytes, order);
}

int quire_record_compare_slow(const quire_view *view, const quire_record *record, const uint8_t *key, size_t key_bytes,
                              int *order) {
    quire_stream_ref ref;
    QUIRE_TRY(key_ref(view, record, &ref));
    size_t common = key_bytes < QUIRE_KEY_PREFIX_BYTES ? key_bytes : QUIRE_KEY_PREFIX_BYTES;
    int found = common == 0 ? 0 : memcmp(record->bytes + sizeof ref, key, common);
    if (found != 0 || key_bytes < QUIRE_KEY_PREFIX_BYTES) {
        *order = found != 0 ? found : 1;
        return QUIRE_OK;
    }
    stream_reader reader = reader_open(view, &ref);
    while (found == 0 && reader.left != 0 && key_bytes != 0) {
        QUIRE_TRY(reader_fill(&reader));
        uint32_t step = reader.available < key_bytes ? reader.available : (uint32_t)key_bytes;
        found = memcmp(reader.bytes, key, step);
        reader_skip(&reader, step);
        key += step;
        key_bytes -= step;
    }
    *order = found != 0 ? found : (reader.left != 0) - (key_bytes != 0);
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ writing streams */

/* A stream being written; page NULL before the first byte. */
typedef struct {
    quire_set *set;
    quire_stream_ref ref;
    stream_page *page;
    uint32_t used;
} stream_writer;

static stream_writer writer_open(quire_set *set) {
    return (stream_writer){.set = set, .ref = {.head = QUIRE_NO_PAGE, .tail = QUIRE_NO_PAGE, .value_count = 1}};
}

static int writer_extend(stream_writer *writer) {
    quire_page_id id;
    void *page;
    QUIRE_TRY(quire_page_alloc(writer->set, 0, &id, &page));
    if (writer->page == NULL) {
        writer->ref.head = id;
    } else {
        writer->page->next = id;
    }
    writer->ref.tail = id;
    writer->page = page;
    writer->page->next = QUIRE_NO_PAGE;
    writer->used = 0;
    return QUIRE_OK;
}

static int writer_put(stream_writer *writer, const uint8_t *bytes, size_t count) {
    uint32_t payload = payload_bytes(&writer->set->view);
    while (count > 0) {
        if (writer->page == NULL || writer->used == payload) {
            QUIRE_TRY(writer_extend(writer));
        }
        uint32_t step = payload - writer->used < count ? payload - writer->used : (uint32_t)count;
        memcpy(writer->page->bytes + writer->used, bytes, step);
        writer->used += step;
        writer->ref.byte_count += step;
        bytes += step;
        count -= step;
    }
    return QUIRE_OK;
}

static int writer_put_counted(stream_writer *writer, const uint8_t *value, size_t value_bytes) {
    uint32_t length = (uint32_t)value_bytes;
    QUIRE_TRY(writer_put(writer, (const uint8_t *)&length, LENGTH_BYTES));
    return writer_put(writer, value, value_bytes);
}

static int writer_put_stream(stream_writer *writer, const quire_stream_ref *ref) {
    stream_reader reader = reader_open(&writer->set->view, ref);
    while (reader.left != 0) {
        QUIRE_TRY(reader_fill(&reader));
        uint32_t step = reader.available;
        QUIRE_TRY(writer_put(writer, reader.bytes, step));
        reader_skip(&reader, step);
    }
    return QUIRE_OK;
}

/* Follows the chain to its end without changing anything (I5). visit may be NULL. */
static int stream_walk(const quire_view *view, const quire_stream_ref *ref,
                       int (*visit)(void *context, quire_page_id id), void *context) {
    quire_page_id id = ref->head;
    quire_page_id last = QUIRE_NO_PAGE;
    for (uint64_t left = pages_for(view, ref->byte_count); left > 0; left--) {
        const stream_page *page = stream_page_read(view, id);
        if (page == NULL) {
            return stream_broken(id);
        }
        if (visit != NULL) {
            QUIRE_TRY(visit(context, id));
        }
        last = id;
        id = page->next;
    }
    if (id != QUIRE_NO_PAGE || last != ref->tail) {
        return quire_fail(QUIRE_E_CORRUPT,
                          "a stream of %" PRIu64 " bytes ends at page %" PRIu32 ", not at its tail %" PRIu32 " (I5)",
                          ref->byte_count, last, ref->tail);
    }
    return QUIRE_OK;
}

/* The stream has been walked before. */
static int stream_free(quire_set *set, const quire_stream_ref *ref) {
    quire_page_id id = ref->head;
    for (uint64_t left = pages_for(&set->view, ref->byte_count); left > 0; left--) {
        const stream_page *page = stream_page_read(&set->view, id);
        if (page == NULL) {
            return stream_broken(id);
        }
        quire_page_id next = page->next;
        if (quire_page_free(set, id) != QUIRE_OK) {
            return stream_broken(id);
        }
        id = next;
    }
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ making sure first */

/* Table nodes above any so many pages, used or not: a path each, but no more than the table has, or will have. */
static uint64_t nodes_above(const quire_view *view, uint64_t page_count) {
    uint64_t leaves = ((view->table[0].page_limit + page_count) >> (view->page_shift - 3u)) + 2;
    uint64_t all = leaves + leaves / 64 + 8;
    uint64_t paths = page_count * (view->table[0].depth + 1);
    return paths < all ? paths : all;
}

/* What to reserve for new pages beside the release of old ones. A reserved page stands for itself and a node on each
 * level; the pages of a long stream share their nodes, and asking for each of them would claim several times that. */
static uint64_t pages_to_reserve(const quire_view *view, uint64_t new_pages, uint64_t old_pages) {
    uint64_t frames = new_pages + nodes_above(view, new_pages + old_pages);
    return frames / (view->table[0].depth + 1) + 1;
}

/* The most that a structure of this set touches by one change: some pages on each level of a binary tree of all. */
static uint64_t pages_of_structure(const quire_view *view) {
    uint64_t levels = 0;
    for (uint32_t left = view->table[0].page_count; left != 0; left >>= 1) {
        levels++;
    }
    return 20 + 4 * levels;
}

/* Room for new_pages beside the release of old_pages. Where that is more than quire_record_reserve has seen to, the
 * reservation takes in what the structure has yet to do. */
static int make_sure(quire_set *set, uint64_t new_pages, uint64_t old_pages) {
    const quire_view *view = &set->view;
    if (new_pages > QUIRE_PAGE_COUNT_MAX - view->table[0].page_count) {
        return quire_fail(QUIRE_E_FULL,
                          "%" PRIu64 " more pages for one record, but the set has %" PRIu32 " of at most %" PRIu32,
                          new_pages, view->table[0].page_count, QUIRE_PAGE_COUNT_MAX);
    }
    if (old_pages <= SHORT_STREAM_PAGES) {
        return QUIRE_OK;
    }
    return quire_arena_reserve(view->arena, pages_to_reserve(view, new_pages, old_pages) + pages_of_structure(view));
}

static uint32_t key_inline_max(uint32_t page_bytes) {
    return quire_record_inline_max(page_bytes) / 2;
}

uint64_t quire_record_reserve(const quire_set *set, size_t key_bytes, size_t value_bytes) {
    const quire_view *view = &set->view;
    uint32_t inline_max = quire_record_inline_max(quire_view_page_bytes(view));
    if (QUIRE_LIKELY(key_bytes <= inline_max / 2 && value_bytes <= inline_max)) {
        return 2 + 2 * SHORT_STREAM_PAGES; /* what follows, without its divisions */
    }
    uint64_t pages = key_bytes > inline_max / 2 ? pages_for(view, key_bytes) : 0;
    /* An append may move a whole inline list to the stream, or write to its tail. */
    pages += pages_for(view, (uint64_t)value_bytes + LENGTH_BYTES + inline_max) + 1;
    /* A short old stream may be written anew, and is released. */
    uint64_t reserve = pages_to_reserve(view, pages, 0) + 2 * SHORT_STREAM_PAGES;
    /* Whoever writes a long stream leaves enough to drop it again. */
    return pages <= SHORT_STREAM_PAGES ? reserve
                                       : reserve + pages_to_reserve(view, 0, pages) + pages_of_structure(view);
}

/* ------------------------------------------------------------------------------------------------ composing */

/* A record being put together in the caller's image. */
typedef struct {
    quire_set *set;
    uint8_t *image;
    uint16_t key_word;
    uint32_t key_part;
} record_draft;

static record_draft draft_open(quire_set *set, uint8_t *image, size_t key_bytes) {
    if (key_bytes <= key_inline_max(quire_view_page_bytes(&set->view))) {
        return (record_draft){
            .set = set, .image = image, .key_word = (uint16_t)key_bytes, .key_part = (uint32_t)key_bytes};
    }
    uint32_t part = sizeof(quire_stream_ref) + QUIRE_KEY_PREFIX_BYTES;
    return (record_draft){
        .set = set, .image = image, .key_word = (uint16_t)(part | QUIRE_KEY_IN_STREAM), .key_part = part};
}

/* Whether a value part of this many bytes stays in the record. */
static bool value_fits(const record_draft *draft, uint64_t part) {
    uint32_t inline_max = quire_record_inline_max(quire_view_page_bytes(&draft->set->view));
    return QUIRE_RECORD_HEADER_BYTES + (uint64_t)draft->key_part + part <= inline_max;
}

static int draft_key(const record_draft *draft, const quire_record *old, const uint8_t *key, size_t key_bytes) {
    uint8_t *at = draft->image + QUIRE_RECORD_HEADER_BYTES;
    if ((draft->key_word & QUIRE_KEY_IN_STREAM) == 0) {
        if (key_bytes != 0) {
            memcpy(at, key, key_bytes);
        }
        return QUIRE_OK;
    }
    if (old != NULL) {
        memcpy(at, old->bytes, draft->key_part);
        return QUIRE_OK;
    }
    stream_writer writer = writer_open(draft->set);
    QUIRE_TRY(writer_put(&writer, key, key_bytes));
    memcpy(at, &writer.ref, sizeof writer.ref);
    memcpy(at + sizeof writer.ref, key, QUIRE_KEY_PREFIX_BYTES);
    return QUIRE_OK;
}

/* The value part is in place: header and padding. */
static void draft_finish(const record_draft *draft, quire_value_form form, uint32_t value_part,
                         uint32_t *record_bytes) {
    quire_record header = {
        .key_word = draft->key_word,
        .value_word = (uint16_t)(value_part | (uint32_t)form << 14),
        .stamp = *draft->set->epoch_writing,
    };
    uint32_t end = QUIRE_RECORD_HEADER_BYTES + draft->key_part + value_part;
    *record_bytes = quire_record_bytes(&header);
    memcpy(draft->image, &header, QUIRE_RECORD_HEADER_BYTES);
    memset(draft->image + end, 0, *record_bytes - end);
}

static uint8_t *draft_value(const record_draft *draft) {
    return draft->image + QUIRE_RECORD_HEADER_BYTES + draft->key_part;
}

static void draft_finish_stream(const record_draft *draft, quire_value_form form, const stream_writer *writer,
                                uint32_t *record_bytes) {
    memcpy(draft_value(draft), &writer->ref, sizeof writer->ref);
    draft_finish(draft, form, sizeof writer->ref, record_bytes);
}

/* An old record that is to be composed over: its value's stream, if any. */
typedef struct {
    quire_value_form form;
    quire_stream_ref ref;
    uint64_t pages; /* 0: no stream */
} old_value;

/* Reads old (or nothing) and proves that its key part can be taken over. */
static int old_read(const quire_view *view, const quire_record *old, uint16_t key_word, bool walk, old_value *value) {
    *value = (old_value){.form = QUIRE_VALUE_MANY};
    if (old == NULL) {
        return QUIRE_OK;
    }
    if (old->key_word != key_word) {
        return quire_fail(QUIRE_E_CORRUPT, "a record's key word is %#x where its key makes %#x",
                          (unsigned)old->key_word, (unsigned)key_word);
    }
    value->form = quire_record_form(old);
    if (form_is_stream(value->form)) {
        QUIRE_TRY(value_ref(view, old, &value->ref));
        value->pages = pages_for(view, value->ref.byte_count);
        return walk ? stream_walk(view, &value->ref, NULL, NULL) : QUIRE_OK;
    }
    return QUIRE_OK;
}

/* Pages of a key stream that composing has to write. */
static uint64_t draft_key_pages(const record_draft *draft, const quire_record *old, size_t key_bytes) {
    bool in_stream = (draft->key_word & QUIRE_KEY_IN_STREAM) != 0;
    return in_stream && old == NULL ? pages_for(&draft->set->view, key_bytes) : 0;
}

int quire_record_compose(quire_set *set, const quire_record *old, const uint8_t *key, size_t key_bytes,
                         const uint8_t *value, size_t value_bytes, uint8_t *image, uint32_t *record_bytes) {
    record_draft draft = draft_open(set, image, key_bytes);
    bool fits = value_fits(&draft, value_bytes);
    old_value before;
    QUIRE_TRY(old_read(&set->view, old, draft.key_word, true, &before));
    uint64_t value_pages = fits ? 0 : pages_for(&set->view, value_bytes);
    QUIRE_TRY(make_sure(set, draft_key_pages(&draft, old, key_bytes) + value_pages, before.pages));
    QUIRE_TRY(draft_key(&draft, old, key, key_bytes));
    if (fits) {
        if (value_bytes != 0) {
            memcpy(draft_value(&draft), value, value_bytes);
        }
        draft_finish(&draft, QUIRE_VALUE_INLINE, (uint32_t)value_bytes, record_bytes);
    } else {
        stream_writer writer = writer_open(set);
        QUIRE_TRY(writer_put(&writer, value, value_bytes));
        draft_finish_stream(&draft, QUIRE_VALUE_STREAM, &writer, record_bytes);
    }
    /* Last, since value may point into the old stream. */
    return before.pages == 0 ? QUIRE_OK : stream_free(set, &before.ref);
}

/* The old values as an inline list behind the draft's key (one that fits there); *part its bytes. */
static void draft_old_list(const record_draft *draft, const quire_record *old, uint32_t *part) {
    uint8_t *at = draft_value(draft);
    *part = 0;
    if (old == NULL) {
        return;
    }
    *part = quire_record_value_part(old);
    if (quire_record_form(old) == QUIRE_VALUE_INLINE) {
        memcpy(at, part, LENGTH_BYTES);
        at += LENGTH_BYTES;
    }
    memcpy(at, value_at(old), *part);
    *part += (uint32_t)(at - draft_value(draft));
}

/* The list of old values, which are inline, and the new one: inline if they fit, else as a stream. */
static int append_to_inline(const record_draft *draft, const quire_record *old, const uint8_t *key, size_t key_bytes,
                            const uint8_t *value, size_t value_bytes, uint32_t *record_bytes) {
    quire_set *set = draft->set;
    uint64_t before = old == NULL ? 0 : quire_record_value_part(old);
    bool counted = old == NULL || quire_record_form(old) == QUIRE_VALUE_MANY;
    uint64_t list_bytes = before + (counted ? 0 : LENGTH_BYTES) + LENGTH_BYTES + value_bytes;
    uint64_t value_count = 1;
    if (old != NULL && counted) {
        QUIRE_TRY(many_count(value_at(old), (uint32_t)before, &value_count));
    }
    bool fits = value_fits(draft, list_bytes);
    uint64_t value_pages = fits ? 0 : pages_for(&set->view, list_bytes);
    QUIRE_TRY(make_sure(set, draft_key_pages(draft, old, key_bytes) + value_pages, 0));
    if (fits) {
        uint32_t part;
        uint32_t length = (uint32_t)value_bytes;
        QUIRE_TRY(draft_key(draft, old, key, key_bytes));
        draft_old_list(draft, old, &part);
        memcpy(draft_value(draft) + part, &length, LENGTH_BYTES);
        if (value_bytes != 0) {
            memcpy(draft_value(draft) + part + LENGTH_BYTES, value, value_bytes);
        }
        draft_finish(draft, QUIRE_VALUE_MANY, (uint32_t)list_bytes, record_bytes);
        return QUIRE_OK;
    }
    stream_writer writer = writer_open(set);
    if (old != NULL) {
        QUIRE_TRY(counted ? writer_put(&writer, value_at(old), before)
                          : writer_put_counted(&writer, value_at(old), before));
        writer.ref.value_count = value_count + 1;
    }
    QUIRE_TRY(writer_put_counted(&writer, value, value_bytes));
    QUIRE_TRY(draft_key(draft, old, key, key_bytes));
    draft_finish_stream(draft, QUIRE_VALUE_MANY_STREAM, &writer, record_bytes);
    return QUIRE_OK;
}

/* Behind a stream of several values: touches the tail page and what comes after it. */
static int append_to_stream(quire_set *set, const quire_stream_ref *ref, const uint8_t *value, size_t value_bytes,
                            stream_writer *writer) {
    uint32_t payload = payload_bytes(&set->view);
    uint32_t used = (uint32_t)((ref->byte_count - 1) % payload) + 1;
    const stream_page *tail = stream_page_read(&set->view, ref->tail);
    if (tail == NULL || tail->next != QUIRE_NO_PAGE) {
        return stream_broken(ref->tail);
    }
    if (value_bytes + LENGTH_BYTES > UINT64_MAX - ref->byte_count || ref->value_count == UINT64_MAX) {
        return quire_fail(QUIRE_E_CORRUPT, "a stream claims %" PRIu64 " values in %" PRIu64 " bytes", ref->value_count,
                          ref->byte_count);
    }
    QUIRE_TRY(make_sure(set, pages_for(&set->view, value_bytes + LENGTH_BYTES), 0));
    stream_page *page = quire_page_write(set, ref->tail);
    if (page == NULL) {
        return stream_broken(ref->tail);
    }
    *writer = (stream_writer){.set = set, .ref = *ref, .page = page, .used = used};
    writer->ref.value_count++;
    return writer_put_counted(writer, value, value_bytes);
}

/* Behind a single value that is a stream: its length must go before it, so it is written anew. */
static int append_to_single(quire_set *set, const quire_stream_ref *ref, const uint8_t *value, size_t value_bytes,
                            stream_writer *writer) {
    uint32_t length = (uint32_t)ref->byte_count;
    if (length != ref->byte_count) {
        return quire_fail(QUIRE_E_CORRUPT, "a value claims %" PRIu64 " bytes; at most %" PRIu32 " are allowed",
                          ref->byte_count, UINT32_MAX);
    }
    uint64_t new_pages = pages_for(&set->view, ref->byte_count + 2 * LENGTH_BYTES + value_bytes);
    QUIRE_TRY(make_sure(set, new_pages, pages_for(&set->view, ref->byte_count)));
    *writer = writer_open(set);
    QUIRE_TRY(writer_put(writer, (const uint8_t *)&length, LENGTH_BYTES));
    QUIRE_TRY(writer_put_stream(writer, ref));
    writer->ref.value_count = 2;
    QUIRE_TRY(writer_put_counted(writer, value, value_bytes));
    return stream_free(set, ref);
}

int quire_record_compose_append(quire_set *set, const quire_record *old, const uint8_t *key, size_t key_bytes,
                                const uint8_t *value, size_t value_bytes, uint8_t *image, uint32_t *record_bytes) {
    record_draft draft = draft_open(set, image, key_bytes);
    old_value before;
    bool walk = old != NULL && quire_record_form(old) == QUIRE_VALUE_STREAM;
    QUIRE_TRY(old_read(&set->view, old, draft.key_word, walk, &before));
    if (before.pages == 0) {
        return append_to_inline(&draft, old, key, key_bytes, value, value_bytes, record_bytes);
    }
    QUIRE_TRY(draft_key(&draft, old, key, key_bytes));
    stream_writer writer;
    QUIRE_TRY(walk ? append_to_single(set, &before.ref, value, value_bytes, &writer)
                   : append_to_stream(set, &before.ref, value, value_bytes, &writer));
    draft_finish_stream(&draft, QUIRE_VALUE_MANY_STREAM, &writer, record_bytes);
    return QUIRE_OK;
}

int quire_record_drop(quire_set *set, const quire_record *record) {
    const quire_view *view = &set->view;
    bool has_key = !quire_record_key_is_inline(record);
    bool has_value = form_is_stream(quire_record_form(record));
    if (QUIRE_LIKELY(!has_key && !has_value)) {
        return QUIRE_OK;
    }
    quire_stream_ref key = {0};
    quire_stream_ref value = {0};
    if (has_key) {
        QUIRE_TRY(key_ref(view, record, &key));
        QUIRE_TRY(stream_walk(view, &key, NULL, NULL));
    }
    if (has_value) {
        QUIRE_TRY(value_ref(view, record, &value));
        QUIRE_TRY(stream_walk(view, &value, NULL, NULL));
    }
    QUIRE_TRY(make_sure(set, 0, pages_for(view, key.byte_count) + pages_for(view, value.byte_count)));
    QUIRE_TRY(stream_free(set, &key));
    return stream_free(set, &value);
}

/* ------------------------------------------------------------------------------------------------ checking */

/* The lengths in a stream of several values add up. */
static int check_many_stream(const quire_view *view, const quire_stream_ref *ref) {
    stream_reader reader = reader_open(view, ref);
    uint64_t value_count = 0;
    while (reader.left != 0) {
        uint32_t length = 0;
        QUIRE_TRY(reader_take(&reader, (uint8_t *)&length, LENGTH_BYTES));
        if (length > reader.left) {
            return many_broken(length, reader.left);
        }
        while (length > 0) {
            QUIRE_TRY(reader_fill(&reader));
            uint32_t step = reader.available < length ? reader.available : length;
            reader_skip(&reader, step);
            length -= step;
        }
        value_count++;
    }
    return value_count == ref->value_count ? QUIRE_OK : many_miscounted(value_count, ref->value_count);
}

static int check_key(const quire_view *view, const quire_record *record, int (*visit)(void *context, quire_page_id id),
                     void *context) {
    uint32_t inline_max = key_inline_max(quire_view_page_bytes(view));
    if (quire_record_key_is_inline(record)) {
        if (quire_record_key_part(record) > inline_max) {
            return quire_fail(QUIRE_E_CORRUPT, "a key of %" PRIu32 " bytes is inline; at most %" PRIu32 " are (I4)",
                              quire_record_key_part(record), inline_max);
        }
        return QUIRE_OK;
    }
    quire_stream_ref ref;
    QUIRE_TRY(key_ref(view, record, &ref));
    if (ref.byte_count <= inline_max || ref.value_count != 1) {
        return quire_fail(QUIRE_E_CORRUPT, "a key of %" PRIu64 " bytes is in a stream (I4) of %" PRIu64 " values",
                          ref.byte_count, ref.value_count);
    }
    QUIRE_TRY(stream_walk(view, &ref, visit, context));
    uint8_t prefix[QUIRE_KEY_PREFIX_BYTES];
    stream_reader reader = reader_open(view, &ref);
    QUIRE_TRY(reader_take(&reader, prefix, sizeof prefix));
    if (memcmp(prefix, record->bytes + sizeof ref, sizeof prefix) != 0) {
        return quire_fail(QUIRE_E_CORRUPT, "the first bytes of a long key differ between its record and its stream");
    }
    return QUIRE_OK;
}

static int check_value(const quire_view *view, const quire_record *record,
                       int (*visit)(void *context, quire_page_id id), void *context) {
    quire_value_form form = quire_record_form(record);
    if (form == QUIRE_VALUE_INLINE) {
        return QUIRE_OK;
    }
    if (form == QUIRE_VALUE_MANY) {
        uint64_t value_count;
        return many_count(value_at(record), quire_record_value_part(record), &value_count);
    }
    quire_stream_ref ref;
    QUIRE_TRY(value_ref(view, record, &ref));
    QUIRE_TRY(stream_walk(view, &ref, visit, context));
    if (form == QUIRE_VALUE_MANY_STREAM) {
        return check_many_stream(view, &ref);
    }
    if (ref.byte_count > UINT32_MAX || ref.value_count != 1) {
        return quire_fail(QUIRE_E_CORRUPT, "a single value claims %" PRIu64 " bytes and %" PRIu64 " values",
                          ref.byte_count, ref.value_count);
    }
    return QUIRE_OK;
}

int quire_record_check(const quire_view *view, const quire_record *record,
                       int (*visit)(void *context, quire_page_id id), void *context) {
    uint32_t record_bytes = quire_record_bytes(record);
    if (record_bytes > quire_record_inline_max(quire_view_page_bytes(view)) ||
        (record->key_word & KEY_WORD_UNUSED) != 0) {
        return quire_fail(QUIRE_E_CORRUPT, "a record has %" PRIu32 " bytes (record.h I1) and the key word %#x",
                          record_bytes, (unsigned)record->key_word);
    }
    uint32_t used = quire_record_key_part(record) + quire_record_value_part(record);
    for (uint32_t i = used; i < record_bytes - QUIRE_RECORD_HEADER_BYTES; i++) {
        if (record->bytes[i] != 0) {
            return quire_fail(QUIRE_E_CORRUPT, "a record's padding is not zero (I7)");
        }
    }
    QUIRE_TRY(check_key(view, record, visit, context));
    return check_value(view, record, visit, context);
}
