/* ordered.c -- the ordered map: a T-tree whose nodes are pages.
 *
 * Purpose     Maps byte keys to one or several byte values in memcmp order of the keys. A height-balanced (AVL) binary
 *             tree of pages, each with a sorted run of records (record.h), so a scan reads page after page and a change
 *             writes the one page it falls into. Links are page ids and a page keeps its id when it is copied on write:
 *             writing a node never makes its parent be written.
 *
 * Layout      super page (page 0)               node page
 *             0   4  format version             0   4  parent (QUIRE_NO_PAGE: none, here and below)
 *             4   4  magic "QTRS"               4   4  magic "QTRN" (0 in a stream page)
 *             8   4  root                       8   4  left child
 *             12  4  first node in key order    12  4  right child
 *             16  4  last node                  16  2  n, the number of records
 *             20  4  number of nodes            18  2  p, how many leading bytes all keys of the node share
 *             24  8  number of records          20  4  floor, the lowest byte taken by a record
 *             32  8  payload bytes              24  4  hole bytes between floor and the page's end
 *                                               28  1  height of the subtree, 1 for a leaf; 3 reserved bytes, 0
 *                                               32  4n heads: bytes p..p+3 of each key, big endian, zero filled
 *                                               32+4n  2n offsets of the records in key order; records end the page
 *             Payload: bytes of keys and of values as stored (several values with their lengths).
 *
 *             The index, in the writer's memory only: the nodes' ids in key order, in blocks of up to BLOCK_ENTRIES,
 *             each with eight bytes of its node's smallest key, taken behind the bytes that all keys of the block
 *             share; above the blocks one array of the same form. It finds a node without walking the tree.
 *
 * Invariants  I1 keys ascend inside a node and across nodes in order.   I2 every node holds a record.
 *             I3 a node's height is one more than its higher subtree's, and its two subtrees differ by at most one.
 *             I4 a child names its parent; first and last are the outermost nodes; the super page's counts hold.
 *             I5 records lie between floor and the page's end, do not overlap, and with the hole bytes fill that space.
 *             I6 the node's keys share p bytes and the heads are taken from the keys.
 *             I7 each page of the set is the super page, a node, or in the stream of one record.
 *             I8 the index, while its generation is the set's, lists every node in order; a run of heads that can no
 *                longer be trusted is marked stale and made again from the nodes before its next use.
 * Ownership   Pages belong to the set. The index hangs on set->cache and is freed with the set. Records given out point
 *             into pages: valid until the next write to a live set, or as long as the snapshot.
 * Threads     Reads on a snapshot's view touch no shared state. Everything with a set runs under quire_arena_enter.
 * Errors      QUIRE_E_CORRUPT for pages that break the layout: offsets, ids and heights are checked before they are
 *             followed and each step down must lower the height, so no damage leads out of a page or round in a circle.
 *             Want of memory for the index fails nothing: it is dropped and the tree is walked.
 */
#include <stdlib.h>

#include "kv_internal.h"

#define SUPER_MAGIC      0x53525451u
#define NODE_MAGIC       0x4E525451u
#define FORMAT_VERSION   1u
#define HEIGHT_MAX       48u
#define SLOT_BYTES       6u
#define HEAD_BYTES       4u
#define ENTRY_HEAD_BYTES 8u
/* Sharing fewer bytes than this is not worth reading a record to compare them. */
#define PREFIX_BYTES_MIN 3u
#define PREFIX_BYTES_MAX 120u
#define BLOCK_ENTRIES    64u
/* Building the index costs about as much as one descent for this many nodes. */
#define NODES_PER_DESCENT 32u
#define CACHE_LINE_BYTES  64u
/* Lines that hold header, heads and offsets in a page of the default size with records of a hundred bytes. */
#define HEAD_LINES 5u

typedef uint32_t __attribute__((may_alias)) head_word;
typedef uint16_t __attribute__((may_alias)) offset_word;

typedef struct {
    uint32_t version;
    uint32_t magic;
    quire_page_id root;
    quire_page_id first;
    quire_page_id last;
    uint32_t node_count;
    uint64_t record_count;
    uint64_t payload_bytes;
} super_page;
_Static_assert(sizeof(super_page) == 40, "the super page's layout is part of the format");

typedef struct {
    quire_page_id parent;
    uint32_t magic;
    quire_page_id left;
    quire_page_id right;
    uint16_t count;
    uint16_t prefix_bytes;
    uint32_t floor;
    uint32_t hole_bytes;
    uint8_t height;
    uint8_t reserved[3];
    head_word heads[];
} node_page;
_Static_assert(sizeof(node_page) == 32, "the node header's layout is part of the format");
_Static_assert(sizeof(quire_stream_ref) == 24, "a stream reference has no padding");

/* The leading bytes of a key that are at hand without reading a stream. */
typedef struct {
    const uint8_t *bytes;
    size_t count;
    bool whole; /* false: the key goes on in a stream */
} key_start;

typedef struct {
    uint64_t *heads;
    uint32_t count;
    uint32_t skip; /* leading bytes shared by all keys of the run */
    bool stale;
    uint8_t shared[PREFIX_BYTES_MAX];
} index_run;

typedef struct {
    index_run run;
    uint64_t heads[BLOCK_ENTRIES];
    quire_page_id pages[BLOCK_ENTRIES];
} index_block;

typedef struct {
    uint32_t generation;
    uint32_t descents; /* look-ups without the index since it was last there */
    uint32_t capacity; /* of blocks and of top.heads */
    index_run top;     /* an entry per block, with the head of the block's first node */
    index_block **blocks;
} node_index;

/* A node, a slot in it, and where the index lists the node (index NULL: it is not in use). */
typedef struct {
    quire_page_id page;
    node_page *node; /* for writing; NULL until place_write */
    uint32_t slot;
    bool found;
    node_index *index;
    uint32_t block;
    uint32_t entry;
} place;

static int corrupt(quire_page_id id, const char *what) {
    return quire_fail(QUIRE_E_CORRUPT, "ordered map: page %u: %s; go back to an earlier state (I1-I7 of ordered.c)", id,
                      what);
}

/* ------------------------------------------------------------------------------------------------ super page */

static int super_read(const quire_view *view, const super_page **super) {
    const super_page *page = quire_page_read(view, 0);
    if (QUIRE_UNLIKELY(page == NULL || page->magic != SUPER_MAGIC)) {
        return corrupt(0, "not the super page of an ordered map");
    }
    if (QUIRE_UNLIKELY(page->version != FORMAT_VERSION)) {
        return quire_fail(QUIRE_E_VERSION, "ordered map: format version %u; this build reads %u", page->version,
                          FORMAT_VERSION);
    }
    *super = page;
    return QUIRE_OK;
}

static int super_write(quire_set *set, super_page **super) {
    const super_page *page;
    QUIRE_TRY(super_read(&set->view, &page));
    *super = quire_page_write(set, 0);
    return *super != NULL ? QUIRE_OK : corrupt(0, "cannot be written");
}

/* Adds to the counts, modulo 2^64: what is taken away comes as its negative. */
static int super_add(quire_set *set, uint64_t records, uint64_t payload_bytes) {
    if (records == 0 && payload_bytes == 0) {
        return QUIRE_OK;
    }
    super_page *super;
    QUIRE_TRY(super_write(set, &super));
    super->record_count += records;
    super->payload_bytes += payload_bytes;
    return QUIRE_OK;
}

static int ordered_create(quire_set *set) {
    quire_page_id id;
    void *page;
    QUIRE_TRY(quire_page_alloc(set, 0, &id, &page));
    if (id != 0) {
        return corrupt(id, "the set is not empty");
    }
    *(super_page *)page = (super_page){.version = FORMAT_VERSION,
                                       .magic = SUPER_MAGIC,
                                       .root = QUIRE_NO_PAGE,
                                       .first = QUIRE_NO_PAGE,
                                       .last = QUIRE_NO_PAGE};
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ keys and heads */

static key_start record_key_start(const quire_record *record) {
    uint32_t part = quire_record_key_part(record);
    if (QUIRE_LIKELY(quire_record_key_is_inline(record))) {
        return (key_start){record->bytes, part, true};
    }
    size_t lead = sizeof(quire_stream_ref);
    return (key_start){record->bytes + lead, part > lead ? part - lead : 0, false};
}

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

/* How many leading bytes of the key may be skipped so that head_bytes behind them are still at hand. */
static size_t skip_max(const key_start *start, size_t head_bytes) {
    if (start->whole) {
        return smaller(start->count, PREFIX_BYTES_MAX);
    }
    return start->count > head_bytes ? smaller(start->count - head_bytes, PREFIX_BYTES_MAX) : 0;
}

static size_t common_bytes(const key_start *a, const key_start *b, size_t max) {
    max = smaller(max, smaller(a->count, b->count));
    size_t i = 0;
    while (i < max && a->bytes[i] == b->bytes[i]) {
        i++;
    }
    return i;
}

/* The first eight bytes as a number that orders as they do; a shorter string is filled up with zeros. */
static inline uint64_t head_of(const uint8_t *bytes, size_t count) {
    uint64_t head = 0;
    if (QUIRE_LIKELY(count >= 8)) {
        memcpy(&head, bytes, 8);
        return __builtin_bswap64(head);
    }
    for (size_t i = 0; i < count; i++) {
        head |= (uint64_t)bytes[i] << (56 - 8 * i);
    }
    return head;
}

static inline uint32_t short_head_of(const uint8_t *bytes, size_t count) {
    if (QUIRE_LIKELY(count >= 4)) {
        uint32_t head;
        memcpy(&head, bytes, 4);
        return __builtin_bswap32(head);
    }
    return (uint32_t)(head_of(bytes, count) >> 32);
}

/* Order of the record's key against key, the common case without a call. */
static inline int record_order(const quire_view *view, const quire_record *record, const uint8_t *key, size_t key_bytes,
                               int *order) {
    if (QUIRE_UNLIKELY(!quire_record_key_is_inline(record))) {
        return quire_record_compare(view, record, key, key_bytes, order);
    }
    size_t part = quire_record_key_part(record);
    int result = memcmp(record->bytes, key, smaller(part, key_bytes));
    *order = result != 0 ? result : (part > key_bytes) - (part < key_bytes);
    return QUIRE_OK;
}

static bool record_has_streams(const quire_record *record) {
    return !quire_record_key_is_inline(record) || (quire_record_form(record) & 1) != 0;
}

static uint64_t stream_bytes(const uint8_t *ref_bytes, uint32_t part) {
    quire_stream_ref ref = {0};
    if (part >= sizeof ref) {
        memcpy(&ref, ref_bytes, sizeof ref);
    }
    return ref.byte_count;
}

/* Bytes of the record's key and value, wherever they lie. */
static uint64_t record_payload(const quire_record *record) {
    uint32_t key_part = quire_record_key_part(record), value_part = quire_record_value_part(record);
    uint64_t key = quire_record_key_is_inline(record) ? key_part : stream_bytes(record->bytes, key_part);
    uint64_t value =
        (quire_record_form(record) & 1) == 0 ? value_part : stream_bytes(record->bytes + key_part, value_part);
    return key + value;
}

/* ------------------------------------------------------------------------------------------------ one node */

static inline offset_word *node_offsets(node_page *node) {
    return (offset_word *)(node->heads + node->count);
}

static inline uint32_t node_offset(const node_page *node, uint32_t slot) {
    return ((const offset_word *)(node->heads + node->count))[slot];
}

static inline uint32_t node_slots_end(const node_page *node) {
    return (uint32_t)sizeof(node_page) + SLOT_BYTES * node->count;
}

/* Bytes that records and their slots could still take, holes included. */
static inline uint32_t node_free_bytes(const node_page *node) {
    return node->floor - node_slots_end(node) + node->hole_bytes;
}

static inline uint32_t node_used_bytes(const node_page *node, uint32_t page_bytes) {
    return page_bytes - (uint32_t)sizeof(node_page) - node_free_bytes(node);
}

static inline bool node_sound(const node_page *node, uint32_t page_bytes) {
    return node->magic == NODE_MAGIC && node_slots_end(node) <= node->floor && node->floor <= page_bytes &&
           node->hole_bytes <= page_bytes - node->floor && node->prefix_bytes <= PREFIX_BYTES_MAX;
}

static inline int node_read(const quire_view *view, quire_page_id id, const node_page **node) {
    const node_page *page = quire_page_read(view, id);
    if (QUIRE_UNLIKELY(page == NULL || !node_sound(page, quire_view_page_bytes(view)))) {
        return corrupt(id, "not a sound node");
    }
    *node = page;
    return QUIRE_OK;
}

static inline int node_write(quire_set *set, quire_page_id id, node_page **node) {
    node_page *page = quire_page_write(set, id);
    if (QUIRE_UNLIKELY(page == NULL || !node_sound(page, quire_view_page_bytes(&set->view)))) {
        return corrupt(id, "not a sound node");
    }
    *node = page;
    return QUIRE_OK;
}

/* The record in a slot, NULL if the slot does not name one that lies in the page. */
static inline const quire_record *node_record(const node_page *node, uint32_t page_bytes, uint32_t slot) {
    if (QUIRE_UNLIKELY(slot >= node->count)) {
        return NULL;
    }
    uint32_t offset = node_offset(node, slot);
    if (QUIRE_UNLIKELY(offset < node->floor || !quire_record_fits((const uint8_t *)node, page_bytes, offset))) {
        return NULL;
    }
    return (const quire_record *)((const uint8_t *)node + offset);
}

/* The start of the node's smallest key. */
static bool node_first_key(const node_page *node, uint32_t page_bytes, key_start *start) {
    const quire_record *record = node_record(node, page_bytes, 0);
    if (record == NULL) {
        return false;
    }
    *start = record_key_start(record);
    return true;
}

static inline uint32_t lower_bound(const head_word *heads, uint32_t count, uint32_t head) {
    const head_word *base = heads;
    while (count > 1) {
        uint32_t half = count / 2;
        base += half &
                -(uint32_t)(base[half - 1] < head); /* by arithmetic: a branch here would be foreseen half the time */
        count -= half;
    }
    return (uint32_t)(base - heads) + (count == 1 && *base < head);
}

/* Where key stands against the bytes that all keys of the node share: 0 if it begins with them. */
static int node_prefix_order(const node_page *node, uint32_t page_bytes, const uint8_t *key, size_t key_bytes,
                             int *order) {
    key_start first;
    if (!node_first_key(node, page_bytes, &first) || first.count < node->prefix_bytes) {
        return quire_fail(QUIRE_E_CORRUPT, "ordered map: a node's first record does not hold its prefix (I6)");
    }
    int result = memcmp(key, first.bytes, smaller(key_bytes, node->prefix_bytes));
    *order = result != 0 ? result : -(key_bytes < node->prefix_bytes);
    return QUIRE_OK;
}

/* The first slot whose key is not below key; *found: it is key. */
static int node_search(const quire_view *view, const node_page *node, const uint8_t *key, size_t key_bytes,
                       uint32_t *slot, bool *found) {
    uint32_t page_bytes = quire_view_page_bytes(view), count = node->count, prefix = node->prefix_bytes;
    *found = false;
    if (prefix != 0) {
        int order = 0;
        QUIRE_TRY(node_prefix_order(node, page_bytes, key, key_bytes, &order));
        if (order != 0) {
            *slot = order < 0 ? 0 : count;
            return QUIRE_OK;
        }
    }
    uint32_t head = short_head_of(key + prefix, key_bytes - prefix);
    uint32_t low = lower_bound(node->heads, count, head), high = low;
    if (low < count && node->heads[low] == head) {
        high = head == UINT32_MAX ? count : low + lower_bound(node->heads + low, count - low, head + 1);
    }
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const quire_record *record = node_record(node, page_bytes, middle);
        if (QUIRE_UNLIKELY(record == NULL)) {
            return quire_fail(QUIRE_E_CORRUPT, "ordered map: slot %u of a node names no record (I5)", middle);
        }
        int order;
        QUIRE_TRY(record_order(view, record, key, key_bytes, &order));
        if (order == 0) {
            *slot = middle;
            *found = true;
            return QUIRE_OK;
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    *slot = low;
    return QUIRE_OK;
}

/* Order of the node's smallest key against key. */
static int node_first_order(const quire_view *view, const node_page *node, const uint8_t *key, size_t key_bytes,
                            int *order) {
    if (node->prefix_bytes == 0 && node->count != 0) {
        uint32_t head = short_head_of(key, key_bytes);
        if (node->heads[0] != head) {
            *order = node->heads[0] < head ? -1 : 1;
            return QUIRE_OK;
        }
    }
    const quire_record *record = node_record(node, quire_view_page_bytes(view), 0);
    if (record == NULL) {
        return quire_fail(QUIRE_E_CORRUPT, "ordered map: a node without a first record (I2, I5)");
    }
    return record_order(view, record, key, key_bytes, order);
}

/* Finds the longest prefix that the node's keys share and takes all heads behind it. */
static int node_make_heads(node_page *node, uint32_t page_bytes) {
    key_start first, start;
    const quire_record *last = node->count != 0 ? node_record(node, page_bytes, node->count - 1u) : NULL;
    if (last == NULL || !node_first_key(node, page_bytes, &first)) {
        return quire_fail(QUIRE_E_CORRUPT, "ordered map: a node's slots name no records (I5)");
    }
    start = record_key_start(last);
    size_t prefix = common_bytes(&first, &start, PREFIX_BYTES_MAX);
    for (uint32_t slot = 0; slot < node->count; slot++) {
        const quire_record *record = node_record(node, page_bytes, slot);
        if (record == NULL) {
            return quire_fail(QUIRE_E_CORRUPT, "ordered map: slot %u of a node names no record (I5)", slot);
        }
        start = record_key_start(record);
        prefix = smaller(prefix, skip_max(&start, HEAD_BYTES));
    }
    prefix = prefix < PREFIX_BYTES_MIN ? 0 : prefix;
    for (uint32_t slot = 0; slot < node->count; slot++) {
        start = record_key_start(node_record(node, page_bytes, slot));
        node->heads[slot] = short_head_of(start.bytes + prefix, start.count - prefix);
    }
    node->prefix_bytes = (uint16_t)prefix;
    return QUIRE_OK;
}

/* Packs the records against the page's end in key order, so that all free bytes lie in one piece. */
static int node_compact(node_page *node, uint32_t page_bytes) {
    uint8_t copy[QUIRE_PAGE_BYTES_MAX];
    uint8_t *page = (uint8_t *)node;
    uint32_t bottom = page_bytes, floor = node->floor;
    memcpy(copy + floor, page + floor, page_bytes - floor);
    for (uint32_t slot = node->count; slot-- > 0;) {
        uint32_t offset = node_offset(node, slot);
        if (offset < floor || !quire_record_fits(copy, page_bytes, offset)) {
            return quire_fail(QUIRE_E_CORRUPT, "ordered map: slot %u of a node names no record (I5)", slot);
        }
        uint32_t bytes = quire_record_bytes((const quire_record *)(copy + offset));
        if (bottom - floor < bytes) {
            return quire_fail(QUIRE_E_CORRUPT, "ordered map: records of a node overlap (I5)");
        }
        bottom -= bytes;
        memcpy(page + bottom, copy + offset, bytes);
        node_offsets(node)[slot] = (uint16_t)bottom;
    }
    node->floor = bottom;
    node->hole_bytes = 0;
    return node->count != 0 ? node_make_heads(node, page_bytes) : QUIRE_OK;
}

/* Makes width empty slots before slot at; there is room for them below floor. */
static void node_open_slots(node_page *node, uint32_t at, uint32_t width) {
    uint32_t count = node->count;
    offset_word *from = node_offsets(node), *to = from + 2 * (size_t)width;
    memmove(to + at + width, from + at, (count - at) * sizeof *from);
    memmove(to, from, at * sizeof *from);
    memmove(node->heads + at + width, node->heads + at, (count - at) * sizeof *node->heads);
    node->count = (uint16_t)(count + width);
}

/* Takes width slots from slot at on; their records become holes. */
static int node_cut(node_page *node, uint32_t page_bytes, uint32_t at, uint32_t width) {
    uint32_t count = node->count;
    for (uint32_t slot = at; slot < at + width; slot++) {
        const quire_record *record = node_record(node, page_bytes, slot);
        if (record == NULL) {
            return quire_fail(QUIRE_E_CORRUPT, "ordered map: slot %u of a node names no record (I5)", slot);
        }
        uint32_t bytes = quire_record_bytes(record);
        if ((const uint8_t *)record == (const uint8_t *)node + node->floor) {
            node->floor += bytes;
        } else {
            node->hole_bytes += bytes;
        }
    }
    offset_word *from = node_offsets(node), *to = from - 2 * (size_t)width;
    uint32_t behind = count - at - width;
    memmove(node->heads + at, node->heads + at + width, behind * sizeof *node->heads);
    memmove(to, from, at * sizeof *from);
    memmove(to + at, from + at + width, behind * sizeof *from);
    node->count = (uint16_t)(count - width);
    if (node->count == 0) {
        node->floor = page_bytes;
        node->hole_bytes = 0;
        node->prefix_bytes = 0;
    }
    return QUIRE_OK;
}

/* Makes the node's prefix one that the new key shares too. */
static int node_admit(node_page *node, uint32_t page_bytes, const key_start *start) {
    size_t prefix = skip_max(start, HEAD_BYTES);
    if (node->count == 0) {
        node->prefix_bytes = (uint16_t)(prefix < PREFIX_BYTES_MIN ? 0 : prefix);
        return QUIRE_OK;
    }
    if (node->prefix_bytes == 0) {
        return QUIRE_OK;
    }
    key_start first;
    if (!node_first_key(node, page_bytes, &first) || first.count < node->prefix_bytes) {
        return quire_fail(QUIRE_E_CORRUPT, "ordered map: a node's first record does not hold its prefix (I6)");
    }
    prefix = smaller(prefix, common_bytes(&first, start, node->prefix_bytes));
    if (prefix >= node->prefix_bytes) {
        return QUIRE_OK;
    }
    prefix = prefix < PREFIX_BYTES_MIN ? 0 : prefix;
    for (uint32_t slot = 0; slot < node->count; slot++) {
        const quire_record *record = node_record(node, page_bytes, slot);
        if (record == NULL) {
            return quire_fail(QUIRE_E_CORRUPT, "ordered map: slot %u of a node names no record (I5)", slot);
        }
        key_start here = record_key_start(record);
        size_t skip = smaller(prefix, here.count);
        node->heads[slot] = short_head_of(here.bytes + skip, here.count - skip);
    }
    node->prefix_bytes = (uint16_t)prefix;
    return QUIRE_OK;
}

/* Opens a slot for a key and gives the record_bytes where its record goes; the node has that much room. */
static int node_insert(node_page *node, uint32_t page_bytes, uint32_t slot, const key_start *start,
                       uint32_t record_bytes, uint8_t **record) {
    if (node->floor - node_slots_end(node) < record_bytes + SLOT_BYTES) {
        QUIRE_TRY(node_compact(node, page_bytes));
        if (node->floor - node_slots_end(node) < record_bytes + SLOT_BYTES) {
            return quire_fail(QUIRE_E_CORRUPT, "ordered map: a node has fewer free bytes than it says (I5)");
        }
    }
    QUIRE_TRY(node_admit(node, page_bytes, start));
    node_open_slots(node, slot, 1);
    node->floor -= record_bytes;
    node_offsets(node)[slot] = (uint16_t)node->floor;
    node->heads[slot] = short_head_of(start->bytes + node->prefix_bytes, start->count - node->prefix_bytes);
    *record = (uint8_t *)node + node->floor;
    return QUIRE_OK;
}

/* Heads of width slots just copied from source: as they were there if both nodes cut them at the same byte. */
static int node_take_heads(node_page *target, uint32_t at, const node_page *source, uint32_t first, uint32_t width,
                           uint32_t page_bytes) {
    uint32_t prefix = target->count == width ? source->prefix_bytes : target->prefix_bytes;
    const quire_record *low = node_record(target, page_bytes, 0);
    const quire_record *high = node_record(target, page_bytes, target->count - 1u);
    if (low == NULL || high == NULL) {
        return quire_fail(QUIRE_E_CORRUPT, "ordered map: a node's slots name no records (I5)");
    }
    key_start a = record_key_start(low), b = record_key_start(high);
    if (source->prefix_bytes != prefix || common_bytes(&a, &b, prefix) < prefix) {
        return node_make_heads(target, page_bytes);
    }
    memcpy(target->heads + at, source->heads + first, width * sizeof *source->heads);
    target->prefix_bytes = (uint16_t)prefix;
    return QUIRE_OK;
}

/* Moves width records from slot first of source to the front or the back of target, which has room for them. */
static int node_move(node_page *source, uint32_t first, uint32_t width, node_page *target, bool to_back,
                     uint32_t page_bytes) {
    uint32_t bytes = 0;
    if (width == 0) {
        return QUIRE_OK;
    }
    for (uint32_t slot = first; slot < first + width; slot++) {
        const quire_record *record = node_record(source, page_bytes, slot);
        if (record == NULL) {
            return quire_fail(QUIRE_E_CORRUPT, "ordered map: slot %u of a node names no record (I5)", slot);
        }
        bytes += quire_record_bytes(record);
    }
    if (target->floor - node_slots_end(target) < bytes + SLOT_BYTES * width) {
        QUIRE_TRY(node_compact(target, page_bytes));
        if (target->floor - node_slots_end(target) < bytes + SLOT_BYTES * width) {
            return quire_fail(QUIRE_E_CORRUPT, "ordered map: a node has fewer free bytes than it says (I5)");
        }
    }
    uint32_t at = to_back ? target->count : 0;
    node_open_slots(target, at, width);
    for (uint32_t i = width; i-- > 0;) {
        const quire_record *record = node_record(source, page_bytes, first + i);
        uint32_t record_bytes = quire_record_bytes(record);
        target->floor -= record_bytes;
        memcpy((uint8_t *)target + target->floor, record, record_bytes);
        node_offsets(target)[at + i] = (uint16_t)target->floor;
    }
    QUIRE_TRY(node_take_heads(target, at, source, first, width, page_bytes));
    return node_cut(source, page_bytes, first, width);
}

/* How many records, counted from the node's front or back, take at most bytes_max with their slots; never all. */
static uint32_t node_count_within(const node_page *node, uint32_t page_bytes, bool from_back, uint32_t bytes_max) {
    uint32_t width = 0, bytes = 0;
    while (width + 1u < node->count) {
        uint32_t slot = from_back ? node->count - 1u - width : width;
        const quire_record *record = node_record(node, page_bytes, slot);
        bytes += record != NULL ? quire_record_bytes(record) + SLOT_BYTES : page_bytes;
        if (bytes > bytes_max) {
            break;
        }
        width++;
    }
    return width;
}

/* ------------------------------------------------------------------------------------------------ the tree, reading */

/* A child of node id. It must name its parent and stand lower, so no damaged link leads round in a circle. */
static int child_read(const quire_view *view, quire_page_id id, const node_page *node, bool right,
                      const node_page **child) {
    quire_page_id child_id = right ? node->right : node->left;
    QUIRE_TRY(node_read(view, child_id, child));
    if (QUIRE_UNLIKELY((*child)->parent != id || (*child)->height >= node->height || node->left == node->right)) {
        return corrupt(child_id, "not where its parent says (I3, I4)");
    }
    return QUIRE_OK;
}

/* The node next to id in key order; QUIRE_NO_PAGE at the end. */
static int neighbour(const quire_view *view, quire_page_id id, bool right, quire_page_id *next) {
    const node_page *node;
    QUIRE_TRY(node_read(view, id, &node));
    if ((right ? node->right : node->left) != QUIRE_NO_PAGE) {
        quire_page_id child_id = right ? node->right : node->left;
        QUIRE_TRY(child_read(view, id, node, right, &node));
        while ((right ? node->left : node->right) != QUIRE_NO_PAGE) {
            quire_page_id below = right ? node->left : node->right;
            QUIRE_TRY(child_read(view, child_id, node, !right, &node));
            child_id = below;
        }
        *next = child_id;
        return QUIRE_OK;
    }
    while (node->parent != QUIRE_NO_PAGE) {
        quire_page_id parent_id = node->parent;
        const node_page *parent;
        QUIRE_TRY(node_read(view, parent_id, &parent));
        if (parent->height <= node->height || parent->left == parent->right ||
            (parent->left != id && parent->right != id)) {
            return corrupt(id, "not where its parent says (I3, I4)");
        }
        if ((right ? parent->left : parent->right) == id) {
            *next = parent_id;
            return QUIRE_OK;
        }
        id = parent_id;
        node = parent;
    }
    *next = QUIRE_NO_PAGE;
    return QUIRE_OK;
}

/* The last node whose smallest key is not above key, else the first node; QUIRE_NO_PAGE in an empty tree. */
static int descend(const quire_view *view, const uint8_t *key, size_t key_bytes, quire_page_id *found) {
    const super_page *super;
    QUIRE_TRY(super_read(view, &super));
    quire_page_id id = super->root, best = super->first;
    if (id == QUIRE_NO_PAGE) {
        *found = QUIRE_NO_PAGE;
        return QUIRE_OK;
    }
    const node_page *node;
    QUIRE_TRY(node_read(view, id, &node));
    for (;;) {
        int order;
        QUIRE_TRY(node_first_order(view, node, key, key_bytes, &order));
        best = order <= 0 ? id : best;
        quire_page_id below = order > 0 ? node->left : node->right;
        if (order == 0 || below == QUIRE_NO_PAGE) {
            break;
        }
        QUIRE_TRY(child_read(view, id, node, order < 0, &node));
        id = below;
    }
    *found = best;
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ the index */

static void index_clear(node_index *index) {
    for (uint32_t i = 0; i < index->top.count; i++) {
        free(index->blocks[i]);
    }
    free(index->blocks);
    free(index->top.heads);
    index->blocks = NULL;
    index->top = (index_run){.stale = true};
    index->capacity = 0;
    index->descents = 0;
}

static void index_free(void *cache) {
    index_clear(cache);
    free(cache);
}

/* Room for one more block in the top arrays. */
static bool index_grow(node_index *index) {
    if (index->top.count < index->capacity) {
        return true;
    }
    uint32_t capacity = index->capacity != 0 ? 2 * index->capacity : 16;
    uint64_t *heads = realloc(index->top.heads, capacity * sizeof *heads);
    if (heads == NULL) {
        return false;
    }
    index->top.heads = heads;
    index_block **blocks = realloc(index->blocks, capacity * sizeof *blocks);
    if (blocks == NULL) {
        return false;
    }
    index->blocks = blocks;
    index->capacity = capacity;
    return true;
}

/* Puts an empty block before block at; its heads are stale. */
static index_block *index_new_block(node_index *index, uint32_t at) {
    if (!index_grow(index)) {
        return NULL;
    }
    index_block *block = malloc(sizeof *block);
    if (block == NULL) {
        return NULL;
    }
    block->run = (index_run){.heads = block->heads, .stale = true};
    memmove(index->blocks + at + 1, index->blocks + at, (index->top.count - at) * sizeof *index->blocks);
    memmove(index->top.heads + at + 1, index->top.heads + at, (index->top.count - at) * sizeof *index->top.heads);
    index->blocks[at] = block;
    index->top.heads[at] = 0;
    index->top.count++;
    return block;
}

static bool page_first_key(const quire_view *view, quire_page_id id, key_start *start) {
    const node_page *node = quire_page_read(view, id);
    uint32_t page_bytes = quire_view_page_bytes(view);
    return node != NULL && node_sound(node, page_bytes) && node_first_key(node, page_bytes, start);
}

/* The page that entry i of a run stands for; block NULL: of the top run. */
static inline quire_page_id run_page(const node_index *index, const index_block *block, uint32_t i) {
    return block != NULL ? block->pages[i] : index->blocks[i]->pages[0];
}

/* Makes all heads of a run again. */
static bool run_refresh(const quire_view *view, node_index *index, index_block *block) {
    index_run *run = block != NULL ? &block->run : &index->top;
    key_start first, start;
    if (run->count == 0 || !page_first_key(view, run_page(index, block, 0), &first) ||
        !page_first_key(view, run_page(index, block, run->count - 1), &start)) {
        return false;
    }
    size_t skip = common_bytes(&first, &start, PREFIX_BYTES_MAX);
    for (uint32_t i = 0; i < run->count; i++) {
        if (!page_first_key(view, run_page(index, block, i), &start)) {
            return false;
        }
        size_t max = skip_max(&start, ENTRY_HEAD_BYTES);
        if (max < skip) {
            skip = max;
            i = UINT32_MAX; /* those before were cut too late: once more from the start */
            continue;
        }
        run->heads[i] = head_of(start.bytes + skip, start.count - skip);
    }
    memcpy(run->shared, first.bytes, skip);
    run->skip = (uint32_t)skip;
    run->stale = false;
    return true;
}

/* Sets one head of a run, or marks the run stale if the key does not begin as the others do. */
static void run_set(index_run *run, uint32_t i, const key_start *start) {
    if (run->stale) {
        return;
    }
    if (run->skip > skip_max(start, ENTRY_HEAD_BYTES) || memcmp(start->bytes, run->shared, run->skip) != 0) {
        run->stale = true;
        return;
    }
    run->heads[i] = head_of(start->bytes + run->skip, start->count - run->skip);
}

/* How many entries of a run are not above key. Equal heads are told apart by the nodes' own keys. */
static int run_rank(const quire_view *view, node_index *index, index_block *block, const uint8_t *key, size_t key_bytes,
                    uint32_t *rank) {
    const index_run *run = block != NULL ? &block->run : &index->top;
    int order = memcmp(key, run->shared, smaller(run->skip, key_bytes));
    if (order != 0 || key_bytes < run->skip) {
        *rank = order > 0 ? run->count : 0;
        return QUIRE_OK;
    }
    uint64_t head = head_of(key + run->skip, key_bytes - run->skip);
    const uint64_t *base = run->heads;
    for (uint32_t count = run->count; count > 1;) {
        uint32_t half = count / 2;
        base += half & -(uint32_t)(base[half - 1] < head);
        count -= half;
    }
    uint32_t low = (uint32_t)(base - run->heads) + (*base < head), high = low;
    /* Ties are few unless keys differ only far behind the shared bytes: double the stride to find their end. */
    for (uint32_t stride = 1; high < run->count && run->heads[high] == head; stride *= 2) {
        high = run->count - high > stride ? high + stride : run->count;
    }
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (run->heads[middle] == head) {
            const node_page *node;
            QUIRE_TRY(node_read(view, run_page(index, block, middle), &node));
            QUIRE_TRY(node_first_order(view, node, key, key_bytes, &order));
        } else {
            order = 1;
        }
        if (order <= 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    *rank = low;
    return QUIRE_OK;
}

/* Lists all nodes; heads are left stale. */
static bool index_build(const quire_view *view, node_index *index, const super_page *super) {
    quire_page_id id = super->first;
    index_block *block = NULL;
    for (uint32_t i = 0; i < super->node_count; i++) {
        if (block == NULL || block->run.count == BLOCK_ENTRIES * 3 / 4) {
            block = index_new_block(index, index->top.count);
        }
        if (id == QUIRE_NO_PAGE || block == NULL) {
            return false;
        }
        block->pages[block->run.count++] = id;
        if (neighbour(view, id, true, &id) != QUIRE_OK) {
            return false;
        }
    }
    return id == QUIRE_NO_PAGE;
}

/* The set's index, NULL while there is none to be had or too few look-ups have asked for one to pay for building it. */
static node_index *index_of(quire_set *set) {
    node_index *index = set->cache;
    if (QUIRE_UNLIKELY(index == NULL)) {
        index = calloc(1, sizeof *index);
        if (index == NULL) {
            return NULL;
        }
        index->generation = set->generation;
        index->top.stale = true;
        set->cache = index;
        set->cache_free = index_free;
    }
    if (QUIRE_UNLIKELY(index->generation != set->generation)) {
        index_clear(index);
        index->generation = set->generation;
    }
    if (QUIRE_UNLIKELY(index->top.count == 0)) {
        const super_page *super;
        if (super_read(&set->view, &super) != QUIRE_OK || index->descents++ < super->node_count / NODES_PER_DESCENT) {
            return NULL;
        }
        if (!index_build(&set->view, index, super) || index->top.count == 0) {
            index_clear(index);
            return NULL;
        }
    }
    return index;
}

/* As descend, through the index. */
static bool index_find(const quire_view *view, node_index *index, const uint8_t *key, size_t key_bytes, place *at) {
    uint32_t rank;
    if (QUIRE_UNLIKELY(index->top.stale) && !run_refresh(view, index, NULL)) {
        return false;
    }
    if (run_rank(view, index, NULL, key, key_bytes, &rank) != QUIRE_OK) {
        return false;
    }
    at->block = rank != 0 ? rank - 1 : 0;
    index_block *block = index->blocks[at->block];
    for (size_t line = 0; line < sizeof *block; line += CACHE_LINE_BYTES) {
        __builtin_prefetch((const uint8_t *)block + line); /* side by side, not one after the other */
    }
    if (QUIRE_UNLIKELY(block->run.stale) && !run_refresh(view, index, block)) {
        return false;
    }
    if (run_rank(view, index, block, key, key_bytes, &rank) != QUIRE_OK) {
        return false;
    }
    at->entry = rank != 0 ? rank - 1 : 0;
    at->page = block->pages[at->entry];
    at->index = index;
    return true;
}

/* Moves a place to the neighbouring entry of the index; false at the end. */
static bool index_step(place *at, bool right) {
    node_index *index = at->index;
    if (right) {
        if (at->entry + 1 < index->blocks[at->block]->run.count) {
            at->entry++;
        } else if (at->block + 1 < index->top.count) {
            at->block++;
            at->entry = 0;
        } else {
            return false;
        }
    } else {
        if (at->entry != 0) {
            at->entry--;
        } else if (at->block != 0) {
            at->block--;
            at->entry = index->blocks[at->block]->run.count - 1;
        } else {
            return false;
        }
    }
    at->page = index->blocks[at->block]->pages[at->entry];
    return true;
}

/* The node at a place has a new smallest key. */
static void index_rekey(const place *at, const key_start *start) {
    if (at->index == NULL) {
        return;
    }
    run_set(&at->index->blocks[at->block]->run, at->entry, start);
    if (at->entry == 0) {
        run_set(&at->index->top, at->block, start);
    }
}

static void index_rekey_node(const place *at, const node_page *node, uint32_t page_bytes) {
    key_start start;
    if (at->index != NULL && node_first_key(node, page_bytes, &start)) {
        index_rekey(at, &start);
    }
}

/* Sets the top head of a block from its first node. */
static void index_rekey_block(const quire_view *view, node_index *index, uint32_t at) {
    key_start start;
    if (page_first_key(view, index->blocks[at]->pages[0], &start)) {
        run_set(&index->top, at, &start);
    } else {
        index->top.stale = true;
    }
}

/* Makes room in a full block for an entry behind entry: at its end in a new block, else by halving it. */
static bool index_split(const quire_view *view, node_index *index, uint32_t at, uint32_t entry) {
    index_block *block = index->blocks[at];
    index_block *fresh = index_new_block(index, at + 1);
    if (fresh == NULL) {
        return false;
    }
    bool halve = entry + 1 != BLOCK_ENTRIES;
    uint32_t keep = halve ? BLOCK_ENTRIES / 2 : BLOCK_ENTRIES - 1;
    fresh->run.count = BLOCK_ENTRIES - keep;
    memcpy(fresh->pages, block->pages + keep, fresh->run.count * sizeof *fresh->pages);
    block->run.count = keep;
    block->run.stale |= halve; /* half the keys may share more bytes */
    index_rekey_block(view, index, at + 1);
    return true;
}

/* Lists page behind the place (before: in front of it). The place still names its own node afterwards, or no index. */
static void index_add(const quire_view *view, place *at, bool before, quire_page_id page, const key_start *start) {
    node_index *index = at->index;
    if (index == NULL) {
        return;
    }
    if (index->blocks[at->block]->run.count == BLOCK_ENTRIES) {
        if (!index_split(view, index, at->block, at->entry)) {
            index_clear(index);
            at->index = NULL;
            return;
        }
        if (at->entry >= index->blocks[at->block]->run.count) {
            at->entry -= index->blocks[at->block]->run.count;
            at->block++;
        }
    }
    index_block *block = index->blocks[at->block];
    uint32_t entry = at->entry + !before, behind = block->run.count - entry;
    memmove(block->pages + entry + 1, block->pages + entry, behind * sizeof *block->pages);
    memmove(block->heads + entry + 1, block->heads + entry, behind * sizeof *block->heads);
    block->pages[entry] = page;
    block->run.count++;
    place added = {.index = index, .block = at->block, .entry = entry};
    index_rekey(&added, start);
    at->entry += before;
}

/* Takes the block behind at into it if the two leave half a block empty. */
static void index_join(node_index *index, uint32_t at) {
    if (at + 1 >= index->top.count ||
        index->blocks[at]->run.count + index->blocks[at + 1]->run.count > BLOCK_ENTRIES / 2) {
        return;
    }
    index_block *block = index->blocks[at], *next = index->blocks[at + 1];
    memcpy(block->pages + block->run.count, next->pages, next->run.count * sizeof *block->pages);
    block->run.count += next->run.count;
    block->run.stale = true;
    free(next);
    uint32_t behind = index->top.count - at - 2;
    memmove(index->blocks + at + 1, index->blocks + at + 2, behind * sizeof *index->blocks);
    memmove(index->top.heads + at + 1, index->top.heads + at + 2, behind * sizeof *index->top.heads);
    index->top.count--;
}

/* Takes the entry of a place from the index. */
static void index_remove(const quire_view *view, const place *at) {
    node_index *index = at->index;
    if (index == NULL) {
        return;
    }
    index_block *block = index->blocks[at->block];
    uint32_t behind = block->run.count - at->entry - 1;
    memmove(block->pages + at->entry, block->pages + at->entry + 1, behind * sizeof *block->pages);
    memmove(block->heads + at->entry, block->heads + at->entry + 1, behind * sizeof *block->heads);
    block->run.count--;
    if (block->run.count == 0) {
        behind = index->top.count - at->block - 1;
        memmove(index->blocks + at->block, index->blocks + at->block + 1, behind * sizeof *index->blocks);
        memmove(index->top.heads + at->block, index->top.heads + at->block + 1, behind * sizeof *index->top.heads);
        index->top.count--;
        free(block);
        return;
    }
    if (at->entry == 0) {
        index_rekey_block(view, index, at->block);
    }
    index_join(index, at->block);
}

/* ------------------------------------------------------------------------------------------------ places */

/* The node for key and its slot there; page QUIRE_NO_PAGE in an empty tree. live as in quire_kv_ops.find. */
static int locate(const quire_view *view, quire_set *live, const uint8_t *key, size_t key_bytes, place *at,
                  const node_page **node) {
    node_index *index = live != NULL ? index_of(live) : NULL;
    *at = (place){.page = QUIRE_NO_PAGE};
    if (index != NULL && QUIRE_UNLIKELY(!index_find(view, index, key, key_bytes, at))) {
        index_clear(index);
        index = NULL;
    }
    if (index == NULL) {
        QUIRE_TRY(descend(view, key, key_bytes, &at->page));
        if (at->page == QUIRE_NO_PAGE) {
            return QUIRE_OK;
        }
    }
    const node_page *page = quire_page_read(view, at->page);
    for (uint32_t line = 1; page != NULL && line < HEAD_LINES; line++) {
        __builtin_prefetch((const uint8_t *)page + line * CACHE_LINE_BYTES);
    }
    if (QUIRE_UNLIKELY(page == NULL || !node_sound(page, quire_view_page_bytes(view)))) {
        return corrupt(at->page, "not a sound node");
    }
    *node = page;
    return node_search(view, *node, key, key_bytes, &at->slot, &at->found);
}

static int place_write(quire_set *set, place *at) {
    return node_write(set, at->page, &at->node);
}

/* The place of the neighbouring node, page QUIRE_NO_PAGE if there is none; slot 0, not yet for writing. */
static int place_beside(const quire_view *view, const place *at, bool right, place *beside) {
    *beside = (place){.page = at->page, .index = at->index, .block = at->block, .entry = at->entry};
    if (at->index == NULL) {
        return neighbour(view, at->page, right, &beside->page);
    }
    if (!index_step(beside, right)) {
        *beside = (place){.page = QUIRE_NO_PAGE};
    }
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ the tree, writing */

static int height_of(const quire_view *view, quire_page_id id, uint32_t *height) {
    const node_page *node;
    if (id == QUIRE_NO_PAGE) {
        *height = 0;
        return QUIRE_OK;
    }
    QUIRE_TRY(node_read(view, id, &node));
    *height = node->height;
    return node->height <= HEIGHT_MAX ? QUIRE_OK : corrupt(id, "impossible height (I3)");
}

/* Makes the parent (or the super page) name another child. */
static int replace_child(quire_set *set, quire_page_id parent, quire_page_id old, quire_page_id new) {
    if (parent == QUIRE_NO_PAGE) {
        super_page *super;
        QUIRE_TRY(super_write(set, &super));
        super->root = new;
        return QUIRE_OK;
    }
    node_page *node;
    QUIRE_TRY(node_write(set, parent, &node));
    if (node->left == old) {
        node->left = new;
    } else if (node->right == old) {
        node->right = new;
    } else {
        return corrupt(parent, "does not name its child (I4)");
    }
    return QUIRE_OK;
}

static int set_parent(quire_set *set, quire_page_id id, quire_page_id parent) {
    node_page *node;
    if (id == QUIRE_NO_PAGE) {
        return QUIRE_OK;
    }
    QUIRE_TRY(node_write(set, id, &node));
    node->parent = parent;
    return QUIRE_OK;
}

/* Sets the node's height from its children's. */
static int set_height(quire_set *set, quire_page_id id, node_page *node) {
    uint32_t left, right;
    QUIRE_TRY(height_of(&set->view, node->left, &left));
    QUIRE_TRY(height_of(&set->view, node->right, &right));
    uint32_t height = 1 + (left > right ? left : right);
    if (height > HEIGHT_MAX) {
        return corrupt(id, "impossible height (I3)");
    }
    node->height = (uint8_t)height;
    return QUIRE_OK;
}

/* Lifts the child on the side opposite to right over node id; *top is then that child. */
static int rotate(quire_set *set, quire_page_id id, bool right, quire_page_id *top) {
    node_page *node, *child;
    QUIRE_TRY(node_write(set, id, &node));
    quire_page_id child_id = right ? node->left : node->right;
    QUIRE_TRY(node_write(set, child_id, &child));
    quire_page_id inner = right ? child->right : child->left;
    QUIRE_TRY(replace_child(set, node->parent, id, child_id));
    QUIRE_TRY(set_parent(set, inner, id));
    child->parent = node->parent;
    node->parent = child_id;
    if (right) {
        node->left = inner;
        child->right = id;
    } else {
        node->right = inner;
        child->left = id;
    }
    QUIRE_TRY(set_height(set, id, node));
    QUIRE_TRY(set_height(set, child_id, child));
    *top = child_id;
    return QUIRE_OK;
}

/* Brings a node whose subtrees differ by two back into balance; right: the right one is higher. */
static int rebalance_node(quire_set *set, quire_page_id id, bool right, quire_page_id *top) {
    const node_page *node, *child;
    uint32_t inner, outer;
    QUIRE_TRY(node_read(&set->view, id, &node));
    quire_page_id child_id = right ? node->right : node->left;
    QUIRE_TRY(node_read(&set->view, child_id, &child));
    QUIRE_TRY(height_of(&set->view, right ? child->left : child->right, &inner));
    QUIRE_TRY(height_of(&set->view, right ? child->right : child->left, &outer));
    if (inner > outer) {
        QUIRE_TRY(rotate(set, child_id, right, top));
    }
    return rotate(set, id, !right, top);
}

/* Restores I3 from node id upwards, up to the first subtree that is as high as before. */
static int rebalance(quire_set *set, quire_page_id id) {
    for (uint32_t steps = 0; id != QUIRE_NO_PAGE; steps++) {
        const node_page *node;
        uint32_t left, right;
        QUIRE_TRY(node_read(&set->view, id, &node));
        QUIRE_TRY(height_of(&set->view, node->left, &left));
        QUIRE_TRY(height_of(&set->view, node->right, &right));
        uint32_t before = node->height;
        if (steps > HEIGHT_MAX || left > right + 2 || right > left + 2) {
            return corrupt(id, "out of balance (I3)");
        }
        if (left > right + 1 || right > left + 1) {
            QUIRE_TRY(rebalance_node(set, id, right > left, &id));
        } else if (before != 1 + (left > right ? left : right)) {
            node_page *changed;
            QUIRE_TRY(node_write(set, id, &changed));
            QUIRE_TRY(set_height(set, id, changed));
        }
        QUIRE_TRY(node_read(&set->view, id, &node));
        if (node->height == before) {
            break;
        }
        id = node->parent;
    }
    return QUIRE_OK;
}

/* Hangs an empty node beside node id in key order (id QUIRE_NO_PAGE: as the root of an empty tree). */
static int link_node(quire_set *set, quire_page_id id, bool right, quire_page_id *fresh_id, node_page **fresh) {
    void *page;
    super_page *super;
    node_page *parent = NULL;
    QUIRE_TRY(super_write(set, &super));
    bool outermost = id == (right ? super->last : super->first);
    if (id != QUIRE_NO_PAGE) {
        QUIRE_TRY(node_write(set, id, &parent));
        if ((right ? parent->right : parent->left) != QUIRE_NO_PAGE) {
            /* Then the neighbour is the innermost node of that subtree, and its side towards id is free. */
            QUIRE_TRY(neighbour(&set->view, id, right, &id));
            QUIRE_TRY(node_write(set, id, &parent));
            right = !right;
        }
    }
    QUIRE_TRY(quire_page_alloc(set, 0, fresh_id, &page));
    *fresh = page;
    **fresh = (node_page){.parent = id,
                          .magic = NODE_MAGIC,
                          .left = QUIRE_NO_PAGE,
                          .right = QUIRE_NO_PAGE,
                          .floor = quire_view_page_bytes(&set->view),
                          .height = 1};
    super->node_count++;
    if (parent == NULL) {
        super->root = super->first = super->last = *fresh_id;
        return QUIRE_OK;
    }
    *(right ? &parent->right : &parent->left) = *fresh_id;
    if (outermost) {
        *(right ? &super->last : &super->first) = *fresh_id;
    }
    return rebalance(set, id);
}

/* Takes a node with at most one child out of the tree and frees its page. */
static int unlink_node(quire_set *set, quire_page_id id) {
    const node_page *node;
    super_page *super;
    QUIRE_TRY(node_read(&set->view, id, &node));
    QUIRE_TRY(super_write(set, &super));
    if (super->first == id) {
        QUIRE_TRY(neighbour(&set->view, id, true, &super->first));
    }
    if (super->last == id) {
        QUIRE_TRY(neighbour(&set->view, id, false, &super->last));
    }
    quire_page_id parent = node->parent, child = node->left != QUIRE_NO_PAGE ? node->left : node->right;
    QUIRE_TRY(replace_child(set, parent, id, child));
    QUIRE_TRY(set_parent(set, child, parent));
    super->node_count--;
    QUIRE_TRY(quire_page_free(set, id));
    return rebalance(set, parent);
}

/* ------------------------------------------------------------------------------------------------ making room */

/* The place of a node that has just been put beside another one, in the tree and in the index. */
static place place_of_new(const place *at, bool right, quire_page_id page, node_page *node) {
    place fresh = {.page = page, .index = at->index, .block = at->block, .entry = at->entry};
    if (fresh.index != NULL) {
        index_step(&fresh, right);
    }
    fresh.node = node;
    return fresh;
}

/* Adds an empty node beside the place, for a record with this key, and moves the place there. */
static int add_node(quire_set *set, place *at, bool right, const key_start *start) {
    quire_page_id id;
    node_page *node;
    QUIRE_TRY(link_node(set, at->page, right, &id, &node));
    index_add(&set->view, at, !right, id, start);
    *at = place_of_new(at, right, id, node);
    return QUIRE_OK;
}

/* Evens out two neighbours by moving records of the place's node, which is full, to beside. */
static int shift(quire_set *set, place *at, place *beside, bool right, uint32_t need) {
    uint32_t page_bytes = quire_view_page_bytes(&set->view);
    QUIRE_TRY(place_write(set, beside));
    node_page *node = at->node, *other = beside->node;
    uint32_t surplus = (node_free_bytes(other) - node_free_bytes(node)) / 2;
    uint32_t width = node_count_within(node, page_bytes, right, surplus), before = other->count;
    QUIRE_TRY(node_move(node, right ? node->count - width : 0, width, other, !right, page_bytes));
    index_rekey_node(right ? beside : at, right ? other : node, page_bytes);
    if (right && at->slot > node->count) {
        beside->slot = at->slot - node->count;
        *at = *beside;
    } else if (!right && (at->slot < width || (at->slot == width && node_free_bytes(other) >= need))) {
        beside->slot = before + at->slot;
        *at = *beside;
    } else if (!right) {
        at->slot -= width;
    }
    return QUIRE_OK;
}

/* Puts a node between the place's and beside, both full, and gives it a third of each. */
static int spread(quire_set *set, place *at, place *beside, bool right) {
    uint32_t page_bytes = quire_view_page_bytes(&set->view), third = page_bytes / 3;
    place *low = right ? at : beside, *high = right ? beside : at;
    quire_page_id id;
    node_page *node;
    key_start first;
    QUIRE_TRY(place_write(set, beside));
    QUIRE_TRY(link_node(set, low->page, true, &id, &node));
    uint32_t from_low = node_count_within(low->node, page_bytes, true, third);
    uint32_t from_high = node_count_within(high->node, page_bytes, false, third);
    QUIRE_TRY(node_move(low->node, low->node->count - from_low, from_low, node, true, page_bytes));
    QUIRE_TRY(node_move(high->node, 0, from_high, node, true, page_bytes));
    if (!node_first_key(node, page_bytes, &first)) {
        return corrupt(id, "empty after a split (I2)");
    }
    index_rekey_node(high, high->node, page_bytes);
    index_add(&set->view, low, false, id, &first);
    place fresh = place_of_new(low, true, id, node);
    if (right && at->slot > low->node->count) {
        fresh.slot = at->slot - low->node->count;
        *at = fresh;
    } else if (!right && at->slot <= from_high) {
        fresh.slot = from_low + at->slot;
        *at = fresh;
    } else if (!right) {
        uint32_t slot = at->slot - from_high;
        *at = place_of_new(&fresh, true, at->page, at->node);
        at->slot = slot;
    }
    return QUIRE_OK;
}

/* Moves the records from slot on to a new node behind the place's. */
static int split(quire_set *set, place *at, uint32_t slot) {
    uint32_t page_bytes = quire_view_page_bytes(&set->view);
    quire_page_id id;
    node_page *node;
    key_start first;
    QUIRE_TRY(link_node(set, at->page, true, &id, &node));
    QUIRE_TRY(node_move(at->node, slot, at->node->count - slot, node, true, page_bytes));
    if (!node_first_key(node, page_bytes, &first)) {
        return corrupt(id, "empty after a split (I2)");
    }
    index_add(&set->view, at, false, id, &first);
    if (at->slot > slot) {
        uint32_t slot_there = at->slot - slot;
        *at = place_of_new(at, true, id, node);
        at->slot = slot_there;
    }
    return QUIRE_OK;
}

/* The free bytes of a neighbour, 0 if there is none. */
static int place_free_bytes(const quire_view *view, const place *at, uint32_t *bytes) {
    const node_page *node;
    *bytes = 0;
    if (at->page != QUIRE_NO_PAGE) {
        QUIRE_TRY(node_read(view, at->page, &node));
        *bytes = node_free_bytes(node);
    }
    return QUIRE_OK;
}

/* Moves a place at the end or the front of a full node to the neighbour there if it has need bytes, else to a new node:
 * what is loaded in order fills each node to the brim. */
static int step_out(quire_set *set, place *at, place *beside, bool right, uint32_t free_bytes, uint32_t need,
                    const key_start *start) {
    if (free_bytes < need) {
        return add_node(set, at, right, start);
    }
    QUIRE_TRY(place_write(set, beside));
    beside->slot = right ? 0 : beside->node->count;
    *at = *beside;
    return QUIRE_OK;
}

/* Finds need bytes for a record with this key at the place, which may move to another node. A full node first gives
 * records to a neighbour with room; only if there is none do the two make a third. */
static int make_room(quire_set *set, place *at, uint32_t need, const key_start *start) {
    place low, high;
    uint32_t low_free, high_free, roomy = quire_view_page_bytes(&set->view) / 8;
    if (node_free_bytes(at->node) >= need) {
        return QUIRE_OK;
    }
    QUIRE_TRY(place_beside(&set->view, at, false, &low));
    QUIRE_TRY(place_beside(&set->view, at, true, &high));
    QUIRE_TRY(place_free_bytes(&set->view, &low, &low_free));
    QUIRE_TRY(place_free_bytes(&set->view, &high, &high_free));
    if (at->slot == at->node->count) {
        return step_out(set, at, &high, true, high_free, need, start);
    }
    if (at->slot == 0) {
        return step_out(set, at, &low, false, low_free, need, start);
    }
    bool right = high_free >= low_free && high.page != QUIRE_NO_PAGE;
    uint32_t best = right ? high_free : low_free;
    if (best >= roomy && best > node_free_bytes(at->node)) {
        QUIRE_TRY(shift(set, at, right ? &high : &low, right, need));
    } else if (low.page != QUIRE_NO_PAGE || high.page != QUIRE_NO_PAGE) {
        QUIRE_TRY(spread(set, at, right ? &high : &low, right));
    } else {
        QUIRE_TRY(split(set, at, at->node->count / 2u));
    }
    if (node_free_bytes(at->node) < need && at->slot != 0 && at->slot != at->node->count) {
        QUIRE_TRY(split(set, at, at->slot));
    }
    return make_room(set, at, need, start); /* there is room, or the place stands at an edge */
}

/* ------------------------------------------------------------------------------------------------ put */

static const uint8_t nothing[1];

/* The record of key and value as it will lie in the page. Made before anything is moved, since key and value may point
 * into pages. What takes streams, now or in the record it replaces, is left to record.c. */
static int compose(quire_set *set, const quire_record *old, const uint8_t *key, size_t key_bytes, const uint8_t *value,
                   size_t value_bytes, bool append, quire_record *image, uint32_t *record_bytes) {
    size_t inline_max = quire_record_inline_max(quire_view_page_bytes(&set->view));
    size_t end = QUIRE_RECORD_HEADER_BYTES + key_bytes + value_bytes, bytes = (end + 7u) & ~(size_t)7u;
    bool plain = !append && key_bytes <= inline_max / 2 && value_bytes <= inline_max && bytes <= inline_max;
    if (QUIRE_UNLIKELY(!plain || (old != NULL && record_has_streams(old)))) {
        return (append ? quire_record_compose_append : quire_record_compose)(
            set, old, key, key_bytes, value, value_bytes, (uint8_t *)image, record_bytes);
    }
    image->key_word = (uint16_t)key_bytes;
    image->value_word = (uint16_t)value_bytes;
    image->stamp = *set->epoch_writing;
    memcpy(image->bytes, key, key_bytes);
    memcpy(image->bytes + key_bytes, value, value_bytes);
    memset((uint8_t *)image + end, 0, bytes - end);
    *record_bytes = (uint32_t)bytes;
    return QUIRE_OK;
}

/* Stores a record at the place, whose slot holds none with its key. */
static int insert(quire_set *set, place *at, const quire_record *image, uint32_t record_bytes) {
    uint32_t page_bytes = quire_view_page_bytes(&set->view);
    key_start start = record_key_start(image);
    uint8_t *record = NULL;
    QUIRE_TRY(make_room(set, at, record_bytes + SLOT_BYTES, &start));
    QUIRE_TRY(node_insert(at->node, page_bytes, at->slot, &start, record_bytes, &record));
    memcpy(record, image, record_bytes);
    if (at->slot == 0) {
        index_rekey(at, &start);
    }
    return QUIRE_OK;
}

/* Stores a record over the one in the place's slot: where that lies if it is no longer than old_bytes, else anew. */
static int replace(quire_set *set, place *at, uint32_t old_bytes, const quire_record *image, uint32_t record_bytes) {
    uint32_t page_bytes = quire_view_page_bytes(&set->view);
    if (QUIRE_LIKELY(record_bytes <= old_bytes)) {
        memcpy((uint8_t *)at->node + node_offset(at->node, at->slot), image, record_bytes);
        at->node->hole_bytes += old_bytes - record_bytes;
        return QUIRE_OK;
    }
    QUIRE_TRY(node_cut(at->node, page_bytes, at->slot, 1));
    if (at->slot == 0) {
        index_rekey_node(at, at->node, page_bytes);
    }
    return insert(set, at, image, record_bytes);
}

static int ordered_put(quire_set *set, const quire_item *item, bool append) {
    union {
        quire_record record;
        uint8_t bytes[QUIRE_PAGE_BYTES_MAX / 8];
    } image;
    place at;
    const node_page *node;
    const quire_record *old = NULL;
    uint32_t record_bytes = 0, old_bytes = 0;
    uint64_t old_payload_bytes = 0;
    size_t key_bytes = item->key_bytes, value_bytes = item->value_bytes;
    const uint8_t *key = key_bytes != 0 ? item->key : nothing;
    const uint8_t *value = value_bytes != 0 ? item->value : nothing;
    QUIRE_TRY(locate(&set->view, set, key, key_bytes, &at, &node));
    if (QUIRE_LIKELY(at.page != QUIRE_NO_PAGE)) {
        /* A new record goes right below floor: fetched while it is being composed. */
        const uint8_t *bottom = (const uint8_t *)node + node->floor;
        __builtin_prefetch(bottom - CACHE_LINE_BYTES, 1);
        __builtin_prefetch(bottom - 2 * CACHE_LINE_BYTES, 1);
        QUIRE_TRY(place_write(set, &at));
    }
    if (at.found) {
        old = node_record(at.node, quire_view_page_bytes(&set->view), at.slot);
        if (old == NULL) {
            return corrupt(at.page, "a slot names no record (I5)");
        }
        old_bytes = quire_record_bytes(old);
        old_payload_bytes = record_payload(old);
    }
    QUIRE_TRY(compose(set, old, key, key_bytes, value, value_bytes, append, &image.record, &record_bytes));
    if (old != NULL) {
        QUIRE_TRY(replace(set, &at, old_bytes, &image.record, record_bytes));
    } else {
        if (at.page == QUIRE_NO_PAGE) {
            QUIRE_TRY(link_node(set, QUIRE_NO_PAGE, true, &at.page, &at.node));
        }
        QUIRE_TRY(insert(set, &at, &image.record, record_bytes));
    }
    return super_add(set, old == NULL, record_payload(&image.record) - old_payload_bytes);
}

/* ------------------------------------------------------------------------------------------------ remove */

/* Makes one node of two neighbours. Of two neighbours at least one has at most one child: that one goes. */
static int merge(quire_set *set, place *low, place *high) {
    uint32_t page_bytes = quire_view_page_bytes(&set->view);
    QUIRE_TRY(place_write(set, low));
    QUIRE_TRY(place_write(set, high));
    bool keep_low = low->node->right != QUIRE_NO_PAGE;
    if (keep_low) {
        QUIRE_TRY(node_move(high->node, 0, high->node->count, low->node, true, page_bytes));
    } else {
        QUIRE_TRY(node_move(low->node, 0, low->node->count, high->node, false, page_bytes));
    }
    if (low->index != NULL) {
        low->index->blocks[low->block]->pages[low->entry] = keep_low ? low->page : high->page;
        index_remove(&set->view, high);
    }
    return unlink_node(set, keep_low ? high->page : low->page);
}

/* Merges the place's node with a neighbour if the two fit in one page with a little room to spare. */
static int try_merge(quire_set *set, place *at) {
    uint32_t page_bytes = quire_view_page_bytes(&set->view);
    uint32_t enough = page_bytes - (uint32_t)sizeof(node_page) - page_bytes / 16;
    for (int right = 1; right >= 0; right--) {
        place beside;
        uint32_t free_bytes;
        QUIRE_TRY(place_beside(&set->view, at, right, &beside));
        QUIRE_TRY(place_free_bytes(&set->view, &beside, &free_bytes));
        if (beside.page == QUIRE_NO_PAGE) {
            continue;
        }
        uint32_t beside_used = page_bytes - (uint32_t)sizeof(node_page) - free_bytes;
        if (beside_used + node_used_bytes(at->node, page_bytes) <= enough) {
            return right ? merge(set, at, &beside) : merge(set, &beside, at);
        }
    }
    return QUIRE_OK;
}

/* Takes the place's node, which is empty, out of the tree. With two children it takes over its successor's records, and
 * that node, which has no left child, goes instead. */
static int remove_node(quire_set *set, place *at) {
    if (at->node->left == QUIRE_NO_PAGE || at->node->right == QUIRE_NO_PAGE) {
        index_remove(&set->view, at);
        return unlink_node(set, at->page);
    }
    uint32_t page_bytes = quire_view_page_bytes(&set->view);
    place next;
    QUIRE_TRY(place_beside(&set->view, at, true, &next));
    QUIRE_TRY(place_write(set, &next));
    QUIRE_TRY(node_move(next.node, 0, next.node->count, at->node, true, page_bytes));
    index_rekey_node(at, at->node, page_bytes);
    index_remove(&set->view, &next);
    return unlink_node(set, next.page);
}

/* Takes width records from the place on, whose streams are gone already, and keeps the tree in shape. */
static int cut(quire_set *set, place *at, uint32_t width) {
    uint32_t page_bytes = quire_view_page_bytes(&set->view), step = page_bytes / 16;
    uint32_t before = node_used_bytes(at->node, page_bytes);
    QUIRE_TRY(node_cut(at->node, page_bytes, at->slot, width));
    if (at->node->count == 0) {
        return remove_node(set, at);
    }
    if (at->slot == 0) {
        index_rekey_node(at, at->node, page_bytes);
    }
    /* Neighbours are looked at only when the fill falls past a sixteenth of the page, not on each removal. */
    uint32_t used = node_used_bytes(at->node, page_bytes);
    return used <= 12 * step && used / step != before / step ? try_merge(set, at) : QUIRE_OK;
}

static int ordered_remove(quire_set *set, const uint8_t *key, size_t key_bytes) {
    place at;
    const node_page *node;
    QUIRE_TRY(locate(&set->view, set, key_bytes != 0 ? key : nothing, key_bytes, &at, &node));
    if (!at.found) {
        return QUIRE_E_NOTFOUND;
    }
    QUIRE_TRY(place_write(set, &at));
    const quire_record *record = node_record(at.node, quire_view_page_bytes(&set->view), at.slot);
    if (record == NULL) {
        return corrupt(at.page, "a slot names no record (I5)");
    }
    uint64_t payload_bytes = record_payload(record);
    if (record_has_streams(record)) {
        QUIRE_TRY(quire_record_drop(set, record));
    }
    QUIRE_TRY(cut(set, &at, 1));
    return super_add(set, -(uint64_t)1, -payload_bytes);
}

/* Pages for one put, append or remove: the path to the root; beside each node of it that a removal turns, which are at
 * most half of them, four more; the node, its neighbours, three new nodes, what these turn, and the super page. */
static uint64_t ordered_reserve(const quire_set *set) {
    const super_page *super;
    uint32_t height = 0;
    if (super_read(&set->view, &super) != QUIRE_OK || height_of(&set->view, super->root, &height) != QUIRE_OK) {
        return 3u * HEIGHT_MAX; /* the write itself will say what is wrong */
    }
    uint64_t all = (uint64_t)super->node_count + 4u, most = 5u * height / 2u + 20u;
    return all < most ? all : most;
}

/* Where lo stands: the first record not below it. QUIRE_E_NOTFOUND if there is none. */
static int range_start(quire_set *set, const uint8_t *lo, size_t lo_bytes, place *at) {
    const node_page *node;
    QUIRE_TRY(locate(&set->view, set, lo_bytes != 0 ? lo : nothing, lo_bytes, at, &node));
    if (at->page != QUIRE_NO_PAGE && at->slot == node->count) {
        place next;
        QUIRE_TRY(place_beside(&set->view, at, true, &next));
        *at = next;
    }
    return at->page != QUIRE_NO_PAGE ? QUIRE_OK : QUIRE_E_NOTFOUND;
}

/* How many records from the place on may go at once: up to hi, and up to the first with streams unless it is the first
 * of all. *payload_bytes: what they hold. */
static int range_width(quire_set *set, const place *at, const uint8_t *hi, size_t hi_bytes, uint32_t *width,
                       uint64_t *payload_bytes) {
    const node_page *node;
    uint32_t end;
    bool found;
    QUIRE_TRY(node_read(&set->view, at->page, &node));
    end = node->count;
    if (hi != NULL) {
        QUIRE_TRY(node_search(&set->view, node, hi, hi_bytes, &end, &found));
    }
    *width = 0;
    *payload_bytes = 0;
    for (uint32_t slot = at->slot; slot < end; slot++) {
        const quire_record *record = node_record(node, quire_view_page_bytes(&set->view), slot);
        if (record == NULL) {
            return corrupt(at->page, "a slot names no record (I5)");
        }
        bool streams = record_has_streams(record);
        if (streams && slot != at->slot) {
            break;
        }
        *payload_bytes += record_payload(record);
        ++*width;
        if (streams) {
            break;
        }
    }
    return QUIRE_OK;
}

/* Removes the first stretch of the range that lies in one node; *width records, 0 when nothing is left. */
static int remove_stretch(quire_set *set, const uint8_t *lo, size_t lo_bytes, const uint8_t *hi, size_t hi_bytes,
                          uint32_t *width) {
    place at;
    uint64_t payload_bytes;
    *width = 0;
    int rc = range_start(set, lo, lo_bytes, &at);
    if (rc != QUIRE_OK) {
        return rc == QUIRE_E_NOTFOUND ? QUIRE_OK : rc;
    }
    uint32_t stretch;
    QUIRE_TRY(range_width(set, &at, hi, hi_bytes, &stretch, &payload_bytes));
    if (stretch == 0) {
        return QUIRE_OK;
    }
    QUIRE_TRY(quire_arena_reserve(set->view.arena, ordered_reserve(set) + quire_record_reserve(set, 0, 0)));
    QUIRE_TRY(place_write(set, &at));
    const quire_record *record = node_record(at.node, quire_view_page_bytes(&set->view), at.slot);
    if (record_has_streams(record)) {
        QUIRE_TRY(quire_record_drop(set, record));
    }
    QUIRE_TRY(cut(set, &at, stretch));
    *width = stretch;
    return super_add(set, -(uint64_t)stretch, -payload_bytes);
}

int quire_ordered_remove_range(quire_set *set, const uint8_t *lo, size_t lo_bytes, const uint8_t *hi, size_t hi_bytes,
                               uint64_t *removed) {
    uint64_t total = 0;
    uint32_t width;
    int rc;
    do {
        rc = remove_stretch(set, lo, lo != NULL ? lo_bytes : 0, hi, hi_bytes, &width);
        total += width;
    } while (rc == QUIRE_OK && width != 0);
    *removed = total;
    return rc;
}

/* ------------------------------------------------------------------------------------------------ reading */

static int record_locate(const quire_view *view, quire_set *live, const uint8_t *key, size_t key_bytes,
                         const quire_record **record, quire_page_id *page) {
    place at;
    const node_page *node;
    QUIRE_TRY(locate(view, live, key_bytes != 0 ? key : nothing, key_bytes, &at, &node));
    if (!at.found) {
        return QUIRE_E_NOTFOUND;
    }
    const quire_record *found = node_record(node, quire_view_page_bytes(view), at.slot);
    if (found == NULL) {
        return corrupt(at.page, "a slot names no record (I5)");
    }
    *record = found;
    *page = at.page;
    return QUIRE_OK;
}

static int ordered_find(const quire_view *view, quire_set *live, const uint8_t *key, size_t key_bytes,
                        const quire_record **record) {
    quire_page_id page;
    return record_locate(view, live, key, key_bytes, record, &page);
}

static int ordered_locate(const quire_view *view, const uint8_t *key, size_t key_bytes, const quire_record **record,
                          quire_page_id *page) {
    return record_locate(view, NULL, key, key_bytes, record, page);
}

static int ordered_count(const quire_view *view, uint64_t *count) {
    const super_page *super;
    QUIRE_TRY(super_read(view, &super));
    *count = super->record_count;
    return QUIRE_OK;
}

/* A position is a gap: next gives the record behind it and moves it there, reverse the one before it. */
static int position_start(const quire_view *view, quire_position *position, bool reverse, const node_page **node) {
    const super_page *super;
    QUIRE_TRY(super_read(view, &super));
    position->page = reverse ? super->last : super->first;
    position->started = true;
    if (position->page == QUIRE_NO_PAGE) {
        position->ended = true;
        return QUIRE_E_NOTFOUND;
    }
    QUIRE_TRY(node_read(view, position->page, node));
    position->slot = reverse ? (*node)->count : 0;
    return QUIRE_OK;
}

static int ordered_next(const quire_view *view, quire_position *position, bool reverse, const quire_record **record) {
    const node_page *node;
    uint32_t page_bytes = quire_view_page_bytes(view);
    if (QUIRE_UNLIKELY(position->ended)) {
        return QUIRE_E_NOTFOUND;
    }
    if (QUIRE_UNLIKELY(!position->started)) {
        QUIRE_TRY(position_start(view, position, reverse, &node));
    } else {
        QUIRE_TRY(node_read(view, position->page, &node));
    }
    if (reverse ? position->slot == 0 : position->slot >= node->count) {
        quire_page_id next;
        QUIRE_TRY(neighbour(view, position->page, !reverse, &next));
        if (next == QUIRE_NO_PAGE) {
            position->ended = true;
            return QUIRE_E_NOTFOUND;
        }
        QUIRE_TRY(node_read(view, next, &node));
        position->page = next;
        position->slot = reverse ? node->count : 0;
    }
    uint32_t slot = reverse ? position->slot - 1 : position->slot;
    const quire_record *found = node_record(node, page_bytes, slot);
    if (QUIRE_UNLIKELY(found == NULL)) {
        return corrupt(position->page, "a slot names no record (I2, I5)");
    }
    uint32_t ahead = reverse ? slot - 8 : slot + 8;
    if (ahead < node->count) {
        __builtin_prefetch((const uint8_t *)node + node_offset(node, ahead));
    }
    position->slot = reverse ? slot : slot + 1;
    *record = found;
    return QUIRE_OK;
}

static int ordered_seek(const quire_view *view, quire_position *position, bool reverse, const uint8_t *key,
                        size_t key_bytes) {
    place at;
    const node_page *node;
    (void)reverse; /* the gap before the first key that is not below key serves both ways */
    QUIRE_TRY(locate(view, NULL, key_bytes != 0 ? key : nothing, key_bytes, &at, &node));
    *position = (quire_position){.page = at.page, .slot = at.slot, .started = true, .ended = at.page == QUIRE_NO_PAGE};
    return QUIRE_OK;
}

static int ordered_page_records(const quire_view *view, quire_page_id id,
                                int (*visit)(void *context, const quire_record *record), void *context) {
    const node_page *node = quire_page_read(view, id);
    if (node == NULL || id >> 31 != 0 || node->magic != NODE_MAGIC) {
        return quire_view_whole(view);
    }
    QUIRE_TRY(node_read(view, id, &node));
    for (uint32_t slot = 0; slot < node->count; slot++) {
        const quire_record *record = node_record(node, quire_view_page_bytes(view), slot);
        if (record == NULL) {
            return corrupt(id, "a slot names no record (I5)");
        }
        QUIRE_TRY(visit(context, record));
    }
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ check */

typedef struct {
    const quire_view *view;
    quire_page_census census;
    quire_buffer previous; /* the key before, in memory of its own */
    bool any;
    uint64_t record_count;
    uint64_t payload_bytes;
    uint32_t node_count;
    quire_page_id first;
    quire_page_id last;
} checker;

/* I1: the record's key is above the one before, which it then becomes. */
static int check_order(checker *state, quire_page_id id, const quire_record *record) {
    quire_buffer key = {0};
    int rc = quire_record_key(state->view, record, &key);
    if (rc == QUIRE_OK && state->any) {
        const quire_buffer *before = &state->previous;
        int order = memcmp(before->bytes, key.bytes, smaller(before->count, key.count));
        if (order > 0 || (order == 0 && before->count >= key.count)) {
            rc = corrupt(id, "keys do not ascend (I1)");
        }
    }
    if (rc == QUIRE_OK) {
        rc = quire_buffer_grow(&state->previous, key.count + 1);
    }
    if (rc == QUIRE_OK) {
        memcpy(state->previous.own, key.count != 0 ? key.bytes : nothing, key.count);
        state->previous.bytes = state->previous.own;
        state->previous.count = key.count;
        state->any = true;
    }
    quire_buffer_free(&key);
    return rc;
}

/* I6 for one slot. */
static int check_head(const node_page *node, quire_page_id id, uint32_t slot, const quire_record *record,
                      const key_start *first) {
    key_start start = record_key_start(record);
    uint32_t prefix = node->prefix_bytes;
    if (prefix > skip_max(&start, HEAD_BYTES) || common_bytes(first, &start, prefix) < prefix) {
        return corrupt(id, "a key does not begin with the node's prefix (I6)");
    }
    if (node->heads[slot] != short_head_of(start.bytes + prefix, start.count - prefix)) {
        return corrupt(id, "a head differs from its key (I6)");
    }
    return QUIRE_OK;
}

static int check_records(checker *state, quire_page_id id, const node_page *node) {
    uint8_t taken[QUIRE_PAGE_BYTES_MAX / 8] = {0}; /* a byte per eight bytes of the page */
    uint32_t page_bytes = quire_view_page_bytes(state->view), total = 0;
    key_start first;
    if (node->count == 0 || !node_first_key(node, page_bytes, &first)) {
        return corrupt(id, "no record in a node (I2)");
    }
    for (uint32_t slot = 0; slot < node->count; slot++) {
        const quire_record *record = node_record(node, page_bytes, slot);
        if (record == NULL) {
            return corrupt(id, "a slot names no record (I5)");
        }
        uint32_t bytes = quire_record_bytes(record), unit = node_offset(node, slot) / 8;
        if (bytes > quire_record_inline_max(page_bytes) || memchr(taken + unit, 1, bytes / 8) != NULL) {
            return corrupt(id, "records overlap or are too long (I5)");
        }
        memset(taken + unit, 1, bytes / 8);
        total += bytes;
        QUIRE_TRY(quire_record_check(state->view, record, quire_census_count, &state->census));
        QUIRE_TRY(check_head(node, id, slot, record, &first));
        QUIRE_TRY(check_order(state, id, record));
        state->payload_bytes += record_payload(record);
        state->record_count++;
    }
    if (total + node->hole_bytes != page_bytes - node->floor) {
        return corrupt(id, "records and holes do not fill the space above floor (I5)");
    }
    return QUIRE_OK;
}

static int check_subtree(checker *state, quire_page_id id, quire_page_id parent, uint32_t height_max,
                         uint32_t *height) {
    const node_page *node;
    uint32_t left, right;
    *height = 0;
    if (id == QUIRE_NO_PAGE) {
        return QUIRE_OK;
    }
    QUIRE_TRY(node_read(state->view, id, &node));
    if (node->parent != parent || node->height == 0 || node->height > height_max) {
        return corrupt(id, "not where its parent says (I3, I4)");
    }
    QUIRE_TRY(quire_census_count(&state->census, id));
    QUIRE_TRY(check_subtree(state, node->left, id, node->height - 1u, &left));
    state->first = state->node_count++ == 0 ? id : state->first;
    state->last = id;
    QUIRE_TRY(check_records(state, id, node));
    QUIRE_TRY(check_subtree(state, node->right, id, node->height - 1u, &right));
    if (left > right + 1 || right > left + 1 || node->height != 1 + (left > right ? left : right)) {
        return corrupt(id, "out of balance (I3)");
    }
    *height = node->height;
    return QUIRE_OK;
}

static int check_tree(checker *state) {
    const super_page *super;
    uint32_t height;
    QUIRE_TRY(super_read(state->view, &super));
    QUIRE_TRY(quire_census_count(&state->census, 0));
    QUIRE_TRY(check_subtree(state, super->root, QUIRE_NO_PAGE, HEIGHT_MAX, &height));
    if (super->first != state->first || super->last != state->last) {
        return corrupt(0, "first or last is not the outermost node (I4)");
    }
    if (super->record_count != state->record_count || super->node_count != state->node_count ||
        super->payload_bytes != state->payload_bytes) {
        return corrupt(0, "counts differ from what the nodes hold (I4)");
    }
    return QUIRE_OK;
}

static int ordered_check(const quire_view *view) {
    checker state = {.view = view, .first = QUIRE_NO_PAGE, .last = QUIRE_NO_PAGE};
    QUIRE_TRY(quire_census_open(view, &state.census));
    int rc = check_tree(&state);
    quire_buffer_free(&state.previous);
    return quire_census_close(&state.census, rc);
}

const quire_kv_ops quire_ordered_ops = {
    .kind = QUIRE_KIND_ORDERED,
    .create = ordered_create,
    .reserve = ordered_reserve,
    .find = ordered_find,
    .locate = ordered_locate,
    .put = ordered_put,
    .remove = ordered_remove,
    .next = ordered_next,
    .seek = ordered_seek,
    .page_records = ordered_page_records,
    .count = ordered_count,
    .check = ordered_check,
};
