/* sequence.c -- records in order of position, in a doubly linked list of pages.
 *
 * Purpose     Carries out sequence.h: constant time at both ends, with pages given back as they empty, so that a queue
 *             takes the room of what is in it; and access by position through an index that lives in memory only.
 *
 * Layout      super page (page 0)                      node page
 *             0   4  0                                 0   4  previous node, QUIRE_NO_PAGE at the head
 *             4   4  magic "QSEQ"                      4   4  magic "QNOD"
 *             8   8  records                           8   4  next node, QUIRE_NO_PAGE at the tail
 *             16  4  head node                         12  2  first slot in use
 *             20  4  tail node                         14  2  slots in use
 *             24  4  nodes                             16  4  low: no record starts below it
 *             28  4  0                                 20  4  bytes of records
 *                                                      24  2n slots: offset of a record in the page
 *             Records (record.h, with an empty key) are placed downwards from the page's end; those taken leave holes
 *             until the node is packed. Slots before the first in use are what was taken at the front.
 *
 * Invariants  I1 previous and next agree, from head to tail; both are QUIRE_NO_PAGE when there is no node.
 *             I2 a node has at least one record; the super page's counts are the sums over the nodes.
 *             I3 slots end at or before low; records lie between low and the page's end and do not overlap.
 *             I4 bytes of records is the sum of their sizes.
 *             I5 a record's key is empty and its value a single one.
 *             I6 the index, where there is one, lists the nodes in order with their record counts.
 *             I7 nodes keep their order, and records keep theirs and their stamps when they move to another node;
 *                differences rely on it.
 *
 * Ownership   The writer's index hangs on quire_set.cache and is dropped when the set's generation moves; a snapshot's
 *             handle makes one of its own, which never changes once made, and frees it when closed.
 * Threads     As kv.h. A snapshot's index is published with one compare-and-swap.
 * Errors      As kv.h. No memory for the index is no error: positions are then found by walking. The removal of several
 *             records that fails for want of memory (only long values can bring that about) has removed those before
 *             the one it stopped at.
 */
#include "sequence.h"

#include <inttypes.h>
#include <stdlib.h>

#include "kv_internal.h"

#define SUPER_PAGE  0u
#define SUPER_MAGIC 0x51455351u /* "QSEQ" */
#define NODE_MAGIC  0x444F4E51u /* "QNOD" */
/* Super page, node, its two neighbours, a new node, and the neighbour's neighbour when nodes are joined. */
#define PAGES_TOUCHED    6u
#define NOWHERE          SIZE_MAX
#define RECORD_BYTES_MAX 8192u /* quire_record_inline_max of the largest page */
/* A removal of more records than this does without the index rather than take node after node out of it. */
#define REMOVE_WITH_INDEX_MAX 4096u

typedef struct {
    uint32_t zero;
    uint32_t magic;
    uint64_t count;
    quire_page_id head;
    quire_page_id tail;
    uint32_t node_count;
    uint32_t reserved;
} super_page;
_Static_assert(sizeof(super_page) == 32, "super page");

typedef struct {
    quire_page_id previous;
    uint32_t magic;
    quire_page_id next;
    uint16_t first;
    uint16_t count;
    uint32_t low;
    uint32_t live;
    uint16_t slots[];
} node_page;
_Static_assert(sizeof(node_page) == 24, "node header");
#define NODE_BYTES ((uint32_t)sizeof(node_page))
#define SLOT_BYTES ((uint32_t)sizeof(uint16_t))

typedef struct {
    int64_t start; /* position of its first record, less that of entry 0's: only differences mean something */
    quire_page_id page;
    uint32_t count;
} index_entry;

/* The nodes in order. Entries lie from first on, so that nodes come and go at the front without moving the others. */
typedef struct {
    uint32_t generation;
    size_t first, count, capacity;
    size_t summed; /* entries whose start is right */
    index_entry *entries;
} page_index;

struct quire_sequence {
    quire_handle at;
    page_index *index; /* of a snapshot; NULL until needed */
};

struct quire_sequence_cursor {
    quire_snap *snap; /* NULL: the view belongs to the handle's snapshot */
    quire_view view;
    quire_page_id page;
    uint32_t slot;
    uint64_t left;
    bool reverse;
    quire_buffer scratch;
};

/* Where a record is, or would be inserted. */
typedef struct {
    quire_page_id page;
    uint32_t slot;
    size_t entry; /* its node's place in the index; NOWHERE if there is no index */
} place;

/* ------------------------------------------------------------------------------------------------ reading pages */

static int node_broken(quire_page_id id, const char *what) {
    return quire_fail(QUIRE_E_CORRUPT, "node %" PRIu32 " of a sequence: %s", id, what);
}

static int super_read(const quire_view *view, const super_page **super) {
    const super_page *page = quire_page_read(view, SUPER_PAGE);
    if (page == NULL || page->magic != SUPER_MAGIC || page->zero != 0) {
        return quire_fail(QUIRE_E_CORRUPT, "page %u is not the super page of a sequence", SUPER_PAGE);
    }
    if ((page->count == 0) != (page->head == QUIRE_NO_PAGE) || (page->count == 0) != (page->tail == QUIRE_NO_PAGE) ||
        page->node_count > view->table[0].page_count) {
        return quire_fail(QUIRE_E_CORRUPT,
                          "a sequence claims %" PRIu64 " records in %" PRIu32 " nodes from %" PRIu32 " to %" PRIu32,
                          page->count, page->node_count, page->head, page->tail);
    }
    *super = page;
    return QUIRE_OK;
}

static uint32_t slots_end(const node_page *node) {
    return NODE_BYTES + SLOT_BYTES * ((uint32_t)node->first + node->count);
}

static bool node_sane(const node_page *node, uint32_t page_bytes) {
    return node->magic == NODE_MAGIC && node->low <= page_bytes && node->low % 8 == 0 && slots_end(node) <= node->low &&
           node->live <= page_bytes - node->low;
}

static int node_read(const quire_view *view, quire_page_id id, const node_page **node) {
    const node_page *page = id >> 31 != 0 ? NULL : quire_page_read(view, id);
    if (page == NULL || !node_sane(page, quire_view_page_bytes(view)) || page->count == 0) {
        return node_broken(id, "not in use, or its header makes no sense (I3)");
    }
    *node = page;
    return QUIRE_OK;
}

/* For writing; the header is sane. */
static int node_write(quire_set *set, quire_page_id id, node_page **node) {
    node_page *page = id >> 31 != 0 ? NULL : quire_page_write(set, id);
    if (page == NULL || !node_sane(page, quire_view_page_bytes(&set->view))) {
        return node_broken(id, "not in use, or its header makes no sense (I3)");
    }
    *node = page;
    return QUIRE_OK;
}

/* The record in a slot that is in use; NULL if it does not lie where records lie. */
static const quire_record *record_at(const node_page *node, uint32_t page_bytes, uint32_t slot) {
    uint32_t offset = node->slots[node->first + slot];
    if (offset < node->low || !quire_record_fits((const uint8_t *)node, page_bytes, offset)) {
        return NULL;
    }
    return (const quire_record *)((const uint8_t *)node + offset);
}

static int record_read(const quire_view *view, quire_page_id id, uint32_t slot, const quire_record **record) {
    const node_page *node;
    QUIRE_TRY(node_read(view, id, &node));
    const quire_record *found = slot < node->count ? record_at(node, quire_view_page_bytes(view), slot) : NULL;
    if (found == NULL) {
        return node_broken(id, "a slot is missing or leads nowhere (I3)");
    }
    *record = found;
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ changing one node */

/* Bytes that packing the node would add to what can be used without it. */
static uint32_t node_reclaimable(const node_page *node, uint32_t page_bytes) {
    return page_bytes - node->low - node->live + SLOT_BYTES * node->first;
}

/* Whether one more record fits as things lie. A slot before the first is as good as one behind the last. */
static bool node_has_room(const node_page *node, uint32_t record_bytes) {
    uint32_t end = slots_end(node) + (node->first == 0 ? SLOT_BYTES : 0);
    return end + record_bytes <= node->low;
}

/* Bytes a packed node with these contents takes. */
static uint32_t packed_bytes(uint32_t slot_count, uint32_t live) {
    return ((NODE_BYTES + SLOT_BYTES * slot_count + 7u) & ~7u) + live;
}

static void node_reset(node_page *node, uint32_t page_bytes) {
    node->magic = NODE_MAGIC;
    node->first = 0;
    node->count = 0;
    node->low = page_bytes;
    node->live = 0;
}

/* Places an image; the slot is the caller's to set. */
static uint16_t node_place(node_page *node, const uint8_t *image, uint32_t record_bytes) {
    node->low -= record_bytes;
    node->live += record_bytes;
    memcpy((uint8_t *)node + node->low, image, record_bytes);
    return (uint16_t)node->low;
}

/* All slots lead to records, and I4 holds: then contents can be moved with no further look. */
static bool node_is_whole(const node_page *node, uint32_t page_bytes) {
    uint32_t sum = 0;
    for (uint32_t slot = 0; slot < node->count; slot++) {
        const quire_record *record = record_at(node, page_bytes, slot);
        if (record == NULL) {
            return false;
        }
        sum += quire_record_bytes(record);
        if (sum > node->live) {
            return false;
        }
    }
    return sum == node->live;
}

/* Copies slots from..to of another node behind the last; there is room, and the source is whole. */
static void node_copy_slots(node_page *node, const node_page *source, uint32_t from, uint32_t to) {
    for (uint32_t slot = from; slot < to; slot++) {
        const uint8_t *image = (const uint8_t *)source + source->slots[source->first + slot];
        uint32_t record_bytes = quire_record_bytes((const quire_record *)image);
        node->slots[node->first + node->count] = node_place(node, image, record_bytes);
        node->count++;
    }
}

/* Where a packed node is to be cut so that both parts leave room for a record of any size. */
static uint32_t node_middle(const node_page *node) {
    uint32_t total = node->live + SLOT_BYTES * node->count;
    uint32_t before = 0;
    uint32_t slot = 0;
    for (; slot + 1 < node->count; slot++) {
        const uint8_t *image = (const uint8_t *)node + node->slots[node->first + slot];
        uint32_t bytes = quire_record_bytes((const quire_record *)image) + SLOT_BYTES;
        if (2 * before + bytes > total) { /* the middle lies in the first half of this record */
            break;
        }
        before += bytes;
    }
    return slot == 0 ? 1 : slot;
}

/* Closes the holes; with other given, moves the second half there. */
static __attribute__((noinline)) int node_pack(node_page *node, uint32_t page_bytes, node_page *other) {
    _Alignas(8) uint8_t bytes[QUIRE_PAGE_BYTES_MAX];
    const node_page *copy = (const node_page *)bytes;
    if (!node_is_whole(node, page_bytes)) {
        return quire_fail(QUIRE_E_CORRUPT, "a node of a sequence has broken slots (I3, I4)");
    }
    memcpy(bytes, node, page_bytes);
    uint32_t end = other == NULL ? copy->count : node_middle(copy);
    node_reset(node, page_bytes);
    node_copy_slots(node, copy, 0, end);
    if (other != NULL) {
        node_copy_slots(other, copy, end, copy->count);
    }
    return QUIRE_OK;
}

/* Opens a gap of one slot at slot; there is room for it. */
static void slots_open(node_page *node, uint32_t slot, uint32_t room_end) {
    uint16_t *slots = node->slots + node->first;
    if (node->first == 0 && slot == 0 && node->count > 8) {
        /* Added at the front, where there is no slot: make several, so that not every such record moves them all. */
        uint32_t spare = (room_end - slots_end(node)) / SLOT_BYTES / 2;
        uint32_t shift = spare < node->count ? spare : node->count;
        memmove(slots + shift, slots, SLOT_BYTES * (size_t)node->count);
        node->first = (uint16_t)shift;
    }
    bool at_front = node->first > 0 && (slot < node->count / 2u || slots_end(node) + SLOT_BYTES > room_end);
    slots = node->slots + node->first;
    if (at_front) {
        memmove(slots - 1, slots, SLOT_BYTES * (size_t)slot);
        node->first--;
    } else {
        memmove(slots + slot + 1, slots + slot, SLOT_BYTES * (size_t)(node->count - slot));
    }
    node->count++;
}

/* There is room (node_has_room). */
static void node_insert(node_page *node, uint32_t slot, const uint8_t *image, uint32_t record_bytes) {
    uint16_t offset = node_place(node, image, record_bytes);
    slots_open(node, slot, node->low);
    node->slots[node->first + slot] = offset;
}

/* Takes slots from..to out; their records become holes. */
static int node_take(node_page *node, uint32_t page_bytes, uint32_t from, uint32_t to) {
    uint32_t bytes = 0;
    for (uint32_t slot = from; slot < to; slot++) {
        const quire_record *record = record_at(node, page_bytes, slot);
        bytes += record == NULL ? page_bytes : quire_record_bytes(record);
        if (bytes > node->live) {
            return quire_fail(QUIRE_E_CORRUPT, "a node of a sequence has broken slots (I3, I4)");
        }
    }
    uint16_t *slots = node->slots + node->first;
    node->live -= bytes;
    if (from < node->count - to) {
        memmove(slots + (to - from), slots, SLOT_BYTES * (size_t)from);
        node->first = (uint16_t)(node->first + (to - from));
    } else {
        memmove(slots + from, slots + to, SLOT_BYTES * (size_t)(node->count - to));
    }
    node->count = (uint16_t)(node->count - (to - from));
    if (node->count == 0) {
        node_reset(node, page_bytes);
    }
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ the index */

static void index_free(void *cache) {
    page_index *index = cache;
    if (index != NULL) {
        free(index->entries);
        free(index);
    }
}

static index_entry *entry_of(page_index *index, size_t entry) {
    return index->entries + index->first + entry;
}

static void index_forget_sums(page_index *index, size_t entry) {
    if (index->summed > entry) {
        index->summed = entry;
    }
}

/* Room for one more entry at either end; false if there is no memory. */
static bool index_make_room(page_index *index) {
    if (index->first > 0 && index->first + index->count < index->capacity) {
        return true;
    }
    size_t capacity = index->count + index->count / 2 + 64;
    index_entry *entries = malloc(capacity * sizeof *entries);
    if (entries == NULL) {
        return false;
    }
    size_t first = (capacity - index->count) / 2;
    if (index->count != 0) {
        memcpy(entries + first, index->entries + index->first, index->count * sizeof *entries);
    }
    free(index->entries);
    index->entries = entries;
    index->first = first;
    index->capacity = capacity;
    return true;
}

static bool index_insert(page_index *index, size_t entry, quire_page_id page, uint32_t count) {
    if (!index_make_room(index)) {
        return false;
    }
    index_entry added = {.page = page, .count = count};
    if (entry == 0 && index->count != 0) {
        added.start = entry_of(index, 0)->start - count;
        index->first--;
        index->summed += index->summed > 0;
    } else {
        index_entry *at = entry_of(index, entry);
        memmove(at + 1, at, (index->count - entry) * sizeof *at);
        index_forget_sums(index, entry);
    }
    index->count++;
    *entry_of(index, entry) = added;
    return true;
}

static void index_remove(page_index *index, size_t entry) {
    if (entry == 0) {
        index->first++;
        index->summed -= index->summed > 0;
    } else {
        index_entry *at = entry_of(index, entry);
        memmove(at, at + 1, (index->count - entry - 1) * sizeof *at);
        index_forget_sums(index, entry);
    }
    index->count--;
}

/* The nodes from head to tail; NULL without a message if memory is short, with one in *rc if a node is damaged. */
static page_index *index_build(const quire_view *view, const super_page *super, int *rc) {
    page_index *index = calloc(1, sizeof *index);
    quire_page_id id = super->head;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < super->node_count && index != NULL; i++) {
        const node_page *node = NULL;
        *rc = node_read(view, id, &node);
        if (*rc != QUIRE_OK || !index_insert(index, i, id, node->count)) {
            index_free(index);
            return NULL;
        }
        sum += node->count;
        id = node->next;
    }
    if (index != NULL && (sum != super->count || id != QUIRE_NO_PAGE)) {
        *rc = quire_fail(QUIRE_E_CORRUPT, "the nodes of a sequence hold %" PRIu64 " records, not %" PRIu64 " (I2)", sum,
                         super->count);
        index_free(index);
        return NULL;
    }
    return index;
}

/* Works out starts until one lies behind the target, or for all. */
static void index_sum(page_index *index, int64_t target) {
    if (index->summed == 0) {
        entry_of(index, 0)->start = 0;
        index->summed = 1;
    }
    for (; index->summed < index->count; index->summed++) {
        const index_entry *last = entry_of(index, index->summed - 1);
        int64_t start = last->start + last->count;
        if (start > target) {
            return;
        }
        entry_of(index, index->summed)->start = start;
    }
}

/* The entry that holds a position; the index is not empty and its starts reach that far. */
static size_t index_search(page_index *index, uint64_t position) {
    int64_t target = entry_of(index, 0)->start + (int64_t)position;
    size_t low = 0;
    size_t high = index->summed;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (entry_of(index, middle)->start <= target) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* The writer's index if there is a valid one. */
static page_index *index_of(quire_set *set) {
    page_index *index = set->cache;
    return index != NULL && index->generation == set->generation ? index : NULL;
}

static void index_drop(quire_set *set) {
    index_free(set->cache);
    set->cache = NULL;
}

/* The writer's index, made if need be; NULL if it cannot be. */
static page_index *index_for_writer(quire_set *set, const super_page *super, int *rc) {
    page_index *index = index_of(set);
    if (index == NULL) {
        index_drop(set);
        index = index_build(&set->view, super, rc);
        if (index != NULL) {
            index->generation = set->generation;
            set->cache = index;
            set->cache_free = index_free;
        }
    }
    return index;
}

/* A snapshot's: several threads may get here at once; one of them wins, and nothing changes afterwards. */
static page_index *index_for_reader(quire_sequence *sequence, const super_page *super, int *rc) {
    page_index *index = __atomic_load_n(&sequence->index, __ATOMIC_ACQUIRE);
    if (index != NULL) {
        return index;
    }
    page_index *made = index_build(&sequence->at.view, super, rc);
    if (made == NULL) {
        return NULL;
    }
    index_sum(made, INT64_MAX);
    if (!__atomic_compare_exchange_n(&sequence->index, &index, made, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        index_free(made);
        return index;
    }
    return made;
}

/* The node of a place has gained or lost records. What happens in the first node moves no other. */
static void index_count_moved(quire_set *set, size_t entry, int32_t change) {
    page_index *index = index_of(set);
    if (index == NULL || entry >= index->count) {
        return;
    }
    index_entry *at = entry_of(index, entry);
    at->count = (uint32_t)((int64_t)at->count + change);
    if (entry == 0) {
        at->start -= change;
    } else {
        index_forget_sums(index, entry + 1);
    }
}

static void index_node_added(quire_set *set, size_t entry, quire_page_id page, uint32_t count) {
    page_index *index = index_of(set);
    if (index != NULL && (entry > index->count || !index_insert(index, entry, page, count))) {
        index_drop(set);
    }
}

static void index_node_gone(quire_set *set, size_t entry) {
    page_index *index = index_of(set);
    if (index != NULL && entry < index->count) {
        index_remove(index, entry);
    }
}

/* ------------------------------------------------------------------------------------------------ finding a place */

/* Without an index: from the end that is nearer. */
static int locate_by_walk(const quire_view *view, const super_page *super, uint64_t position, place *found) {
    bool forward = position <= super->count / 2;
    uint64_t left = forward ? position : super->count - 1 - position;
    quire_page_id id = forward ? super->head : super->tail;
    for (uint32_t i = 0; i < super->node_count; i++) {
        const node_page *node;
        QUIRE_TRY(node_read(view, id, &node));
        if (left < node->count) {
            uint32_t slot = forward ? (uint32_t)left : node->count - 1 - (uint32_t)left;
            *found = (place){.page = id, .slot = slot, .entry = NOWHERE};
            return QUIRE_OK;
        }
        left -= node->count;
        id = forward ? node->next : node->previous;
    }
    return quire_fail(QUIRE_E_CORRUPT, "a sequence of %" PRIu64 " records ends before position %" PRIu64 " (I2)",
                      super->count, position);
}

/* In the head or tail node; QUIRE_E_NOTFOUND if it is in neither. */
static int locate_at_ends(quire_sequence *sequence, const super_page *super, uint64_t position, place *found) {
    const quire_view *view = quire_handle_view(&sequence->at);
    page_index *index = sequence->at.set != NULL ? index_of(sequence->at.set) : NULL;
    const node_page *node;
    QUIRE_TRY(node_read(view, super->head, &node));
    if (position < node->count) {
        *found = (place){.page = super->head, .slot = (uint32_t)position, .entry = index == NULL ? NOWHERE : 0};
        return QUIRE_OK;
    }
    QUIRE_TRY(node_read(view, super->tail, &node));
    uint64_t from_end = super->count - position;
    if (from_end > node->count) {
        return QUIRE_E_NOTFOUND;
    }
    *found = (place){.page = super->tail,
                     .slot = node->count - (uint32_t)from_end,
                     .entry = index == NULL ? NOWHERE : index->count - 1};
    return QUIRE_OK;
}

/* Where the record at a position below the count is. */
static int locate(quire_sequence *sequence, const super_page *super, uint64_t position, place *found) {
    const quire_view *view = quire_handle_view(&sequence->at);
    int rc = locate_at_ends(sequence, super, position, found);
    if (rc != QUIRE_E_NOTFOUND) {
        return rc;
    }
    rc = QUIRE_OK;
    page_index *index = sequence->at.set != NULL ? index_for_writer(sequence->at.set, super, &rc)
                                                 : index_for_reader(sequence, super, &rc);
    QUIRE_TRY(rc);
    if (index == NULL || index->count == 0) {
        return locate_by_walk(view, super, position, found);
    }
    if (sequence->at.set != NULL) {
        int64_t base = index->summed == 0 ? 0 : entry_of(index, 0)->start;
        index_sum(index, base + (int64_t)position);
    }
    size_t entry = index_search(index, position);
    const index_entry *at = entry_of(index, entry);
    int64_t slot = entry_of(index, 0)->start + (int64_t)position - at->start;
    if (slot < 0 || slot >= (int64_t)at->count) {
        return quire_fail(QUIRE_E_CORRUPT, "position %" PRIu64 " is in no node of its sequence (I2)", position);
    }
    *found = (place){.page = at->page, .slot = (uint32_t)slot, .entry = entry};
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ changing the list */

static int super_write(quire_set *set, super_page **super) {
    const super_page *page;
    QUIRE_TRY(super_read(&set->view, &page));
    *super = quire_page_write(set, SUPER_PAGE);
    return *super != NULL ? QUIRE_OK : quire_fail(QUIRE_E_CORRUPT, "the super page of a sequence is not in use");
}

/* Makes one node follow another; either may be none. */
static int join(quire_set *set, super_page *super, quire_page_id left, quire_page_id right) {
    node_page *node;
    if (left == QUIRE_NO_PAGE) {
        super->head = right;
    } else {
        QUIRE_TRY(node_write(set, left, &node));
        node->next = right;
    }
    if (right == QUIRE_NO_PAGE) {
        super->tail = left;
    } else {
        QUIRE_TRY(node_write(set, right, &node));
        node->previous = left;
    }
    return QUIRE_OK;
}

/* An empty node between two that are there, or at an end. */
static int node_create(quire_set *set, super_page *super, quire_page_id left, quire_page_id right, quire_page_id *id,
                       node_page **node) {
    void *page;
    QUIRE_TRY(quire_page_alloc(set, 0, id, &page));
    *node = page;
    node_reset(*node, quire_view_page_bytes(&set->view));
    super->node_count++;
    (*node)->previous = left;
    (*node)->next = right;
    QUIRE_TRY(join(set, super, left, *id));
    return join(set, super, *id, right);
}

static int node_destroy(quire_set *set, super_page *super, quire_page_id id, size_t entry) {
    const node_page *node = quire_page_read(&set->view, id);
    if (node == NULL || super->node_count == 0) {
        return node_broken(id, "not in use");
    }
    QUIRE_TRY(join(set, super, node->previous, node->next));
    super->node_count--;
    index_node_gone(set, entry);
    return quire_page_free(set, id);
}

/* Whether one more record goes into the node, packed where that pays for the work. */
static bool node_can_take(const node_page *node, uint32_t page_bytes, uint32_t record_bytes) {
    return node_has_room(node, record_bytes) ||
           (node_reclaimable(node, page_bytes) >= page_bytes / 8 &&
            packed_bytes(node->count + 1u, node->live + record_bytes) <= page_bytes);
}

/* Inserts where node_can_take said yes. */
static int insert_and_count(quire_set *set, const place *at, const uint8_t *image, uint32_t record_bytes) {
    node_page *node;
    QUIRE_TRY(node_write(set, at->page, &node));
    if (!node_has_room(node, record_bytes)) {
        QUIRE_TRY(node_pack(node, quire_view_page_bytes(&set->view), NULL));
    }
    node_insert(node, at->slot, image, record_bytes);
    index_count_moved(set, at->entry, 1);
    return QUIRE_OK;
}

/* A full node and a place at one of its ends: to the neighbour there if it can take it, else to a new node between. */
static int insert_beside(quire_set *set, super_page *super, const node_page *node, const place *at,
                         const uint8_t *image, uint32_t record_bytes) {
    bool before = at->slot == 0;
    quire_page_id neighbour = before ? node->previous : node->next;
    if (neighbour != QUIRE_NO_PAGE) {
        const node_page *other;
        QUIRE_TRY(node_read(&set->view, neighbour, &other));
        if (node_can_take(other, quire_view_page_bytes(&set->view), record_bytes)) {
            place there = {.page = neighbour, .slot = before ? other->count : 0, .entry = NOWHERE};
            if (at->entry != NOWHERE) {
                there.entry = before ? at->entry - 1 : at->entry + 1;
            }
            return insert_and_count(set, &there, image, record_bytes);
        }
    }
    quire_page_id id;
    node_page *made;
    QUIRE_TRY(node_create(set, super, before ? neighbour : at->page, before ? at->page : neighbour, &id, &made));
    node_insert(made, 0, image, record_bytes);
    index_node_added(set, before || at->entry == NOWHERE ? at->entry : at->entry + 1, id, 1);
    return QUIRE_OK;
}

/* A full node and a place inside it: cut in two. */
static int insert_and_split(quire_set *set, super_page *super, const place *at, const uint8_t *image,
                            uint32_t record_bytes) {
    quire_page_id id;
    node_page *node;
    node_page *made;
    QUIRE_TRY(node_write(set, at->page, &node));
    uint32_t count_before = node->count;
    QUIRE_TRY(node_create(set, super, at->page, node->next, &id, &made));
    QUIRE_TRY(node_pack(node, quire_view_page_bytes(&set->view), made));
    index_count_moved(set, at->entry, (int32_t)node->count - (int32_t)count_before);
    index_node_added(set, at->entry == NOWHERE ? NOWHERE : at->entry + 1, id, made->count);
    bool left = at->slot <= node->count;
    place there = {.page = left ? at->page : id,
                   .slot = left ? at->slot : at->slot - node->count,
                   .entry = left || at->entry == NOWHERE ? at->entry : at->entry + 1};
    if (!node_has_room(left ? node : made, record_bytes)) {
        return node_broken(there.page, "no room after it was cut in two (I3)");
    }
    return insert_and_count(set, &there, image, record_bytes);
}

/* Puts a composed record before the place; the super page's count is the caller's. */
static int insert_image(quire_set *set, super_page *super, const place *at, const uint8_t *image,
                        uint32_t record_bytes) {
    const node_page *node = quire_page_read(&set->view, at->page);
    if (node == NULL || !node_sane(node, quire_view_page_bytes(&set->view)) || at->slot > node->count) {
        return node_broken(at->page, "fewer records than its sequence has there (I2)");
    }
    if (node_can_take(node, quire_view_page_bytes(&set->view), record_bytes)) {
        return insert_and_count(set, at, image, record_bytes);
    }
    if (at->slot == 0 || at->slot == node->count) {
        return insert_beside(set, super, node, at, image, record_bytes);
    }
    return insert_and_split(set, super, at, image, record_bytes);
}

/* Moves the right node's records into the left one, if both together leave a quarter of a page free. */
static int join_if_small(quire_set *set, super_page *super, quire_page_id left, quire_page_id right, size_t left_entry,
                         bool *joined) {
    uint32_t page_bytes = quire_view_page_bytes(&set->view);
    const node_page *from;
    const node_page *into;
    QUIRE_TRY(node_read(&set->view, left, &into));
    QUIRE_TRY(node_read(&set->view, right, &from));
    uint32_t count = (uint32_t)into->count + from->count;
    *joined = packed_bytes(count, into->live + from->live) <= page_bytes / 4 * 3;
    if (!*joined) {
        return QUIRE_OK;
    }
    if (into->next != right || from->previous != left || !node_is_whole(from, page_bytes)) {
        return node_broken(right, "broken links or slots (I1, I3, I4)");
    }
    node_page *node;
    QUIRE_TRY(node_write(set, left, &node));
    QUIRE_TRY(node_pack(node, page_bytes, NULL));
    node_copy_slots(node, from, 0, from->count);
    index_count_moved(set, left_entry, from->count);
    return node_destroy(set, super, right, left_entry == NOWHERE ? NOWHERE : left_entry + 1);
}

/* After records were taken from a node: joins it to a neighbour if it has become small. */
static int tidy(quire_set *set, super_page *super, quire_page_id id, size_t entry) {
    const node_page *node;
    QUIRE_TRY(node_read(&set->view, id, &node));
    if (packed_bytes(node->count, node->live) > quire_view_page_bytes(&set->view) / 4) {
        return QUIRE_OK;
    }
    bool joined = false;
    quire_page_id previous = node->previous;
    if (node->next != QUIRE_NO_PAGE) {
        QUIRE_TRY(join_if_small(set, super, id, node->next, entry, &joined));
    }
    if (!joined && previous != QUIRE_NO_PAGE) {
        QUIRE_TRY(join_if_small(set, super, previous, id, entry == NOWHERE ? NOWHERE : entry - 1, &joined));
    }
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ handles */

static int sequence_create(quire_set *set) {
    quire_page_id id;
    void *page;
    QUIRE_TRY(quire_page_alloc(set, 0, &id, &page));
    if (id != SUPER_PAGE) {
        return quire_fail(QUIRE_E_CORRUPT, "the first page of an empty set is %" PRIu32 ", not %u", id, SUPER_PAGE);
    }
    *(super_page *)page = (super_page){.magic = SUPER_MAGIC, .head = QUIRE_NO_PAGE, .tail = QUIRE_NO_PAGE};
    return QUIRE_OK;
}

static int handle_new(quire_sequence **sequence) {
    *sequence = calloc(1, sizeof **sequence);
    return *sequence != NULL ? QUIRE_OK
                             : quire_fail(QUIRE_E_NOMEM, "no memory for a handle of %zu bytes", sizeof **sequence);
}

int quire_sequence_open(quire_arena *arena, const char *name, quire_sequence **sequence) {
    quire_sequence *made = NULL;
    QUIRE_TRY(handle_new(&made));
    int rc = quire_handle_open(arena, name, QUIRE_KIND_SEQUENCE, sequence_create, &made->at);
    if (rc != QUIRE_OK) {
        free(made);
        return rc;
    }
    *sequence = made;
    return QUIRE_OK;
}

int quire_sequence_open_snap(quire_snap *snap, const char *name, quire_sequence **sequence) {
    quire_sequence *made = NULL;
    QUIRE_TRY(handle_new(&made));
    int rc = quire_snap_view(snap, name, QUIRE_KIND_SEQUENCE, &made->at.view);
    if (rc != QUIRE_OK) {
        free(made);
        return rc;
    }
    *sequence = made;
    return QUIRE_OK;
}

void quire_sequence_close(quire_sequence *sequence) {
    if (sequence != NULL) {
        index_free(sequence->index);
        free(sequence);
    }
}

int quire_sequence_count(quire_sequence *sequence, uint64_t *count) {
    const super_page *super;
    QUIRE_TRY(quire_handle_enter(&sequence->at));
    int rc = super_read(quire_handle_view(&sequence->at), &super);
    if (rc == QUIRE_OK) {
        rc = quire_record_count_check(quire_handle_view(&sequence->at), super->count);
    }
    if (rc == QUIRE_OK) {
        *count = super->count;
    }
    quire_handle_leave(&sequence->at);
    return rc;
}

/* ------------------------------------------------------------------------------------------------ by position */

static int get_entered(quire_sequence *sequence, uint64_t index, quire_buffer *value) {
    const quire_view *view = quire_handle_view(&sequence->at);
    const super_page *super;
    const quire_record *record = NULL;
    place at;
    QUIRE_TRY(super_read(view, &super));
    if (index >= super->count) {
        return quire_fail(QUIRE_E_NOTFOUND, "index %" PRIu64 " of a sequence of %" PRIu64, index, super->count);
    }
    QUIRE_TRY(locate(sequence, super, index, &at));
    QUIRE_TRY(record_read(view, at.page, at.slot, &record));
    QUIRE_TRY(quire_record_value(view, record, value));
    return sequence->at.set == NULL ? QUIRE_OK : quire_buffer_keep(value);
}

int quire_sequence_get(quire_sequence *sequence, uint64_t index, quire_buffer *value) {
    QUIRE_TRY(quire_handle_enter(&sequence->at));
    int rc = get_entered(sequence, index, value);
    quire_handle_leave(&sequence->at);
    return rc;
}

/* Pages for one change. A stream's are looked after by record.c. */
static int make_sure(quire_set *set, size_t value_bytes) {
    if (set->view.table[0].page_count >= QUIRE_PAGE_COUNT_MAX - 1) {
        return quire_fail(QUIRE_E_FULL, "the sequence has %" PRIu32 " pages, as many as there can be",
                          set->view.table[0].page_count);
    }
    /* Twice, so that what reaches the limit leaves room for a removal. */
    return quire_arena_reserve(set->view.arena, 2 * PAGES_TOUCHED + quire_record_reserve(set, 0, value_bytes));
}

static int set_entered(quire_sequence *sequence, uint64_t index, const uint8_t *value, size_t value_bytes) {
    _Alignas(8) uint8_t image[RECORD_BYTES_MAX];
    quire_set *set = sequence->at.set;
    uint32_t page_bytes = quire_view_page_bytes(&set->view);
    uint32_t record_bytes = 0;
    const super_page *super;
    const quire_record *old = NULL;
    place at;
    QUIRE_TRY(super_read(&set->view, &super));
    if (index >= super->count) {
        return quire_fail(QUIRE_E_NOTFOUND, "index %" PRIu64 " of a sequence of %" PRIu64, index, super->count);
    }
    QUIRE_TRY(locate(sequence, super, index, &at));
    QUIRE_TRY(record_read(&set->view, at.page, at.slot, &old));
    uint32_t old_bytes = quire_record_bytes(old);
    QUIRE_TRY(make_sure(set, value_bytes));
    QUIRE_TRY(quire_record_compose(set, old, NULL, 0, value, value_bytes, image, &record_bytes));
    node_page *node;
    QUIRE_TRY(node_write(set, at.page, &node));
    if (record_bytes <= old_bytes && old_bytes <= node->live) {
        memcpy((uint8_t *)node + node->slots[node->first + at.slot], image, record_bytes);
        node->live -= old_bytes - record_bytes;
        return QUIRE_OK;
    }
    super_page *super_written;
    QUIRE_TRY(super_write(set, &super_written));
    QUIRE_TRY(node_take(node, page_bytes, at.slot, at.slot + 1));
    index_count_moved(set, at.entry, -1);
    return insert_image(set, super_written, &at, image, record_bytes);
}

int quire_sequence_set(quire_sequence *sequence, uint64_t index, const uint8_t *value, size_t value_bytes) {
    QUIRE_TRY(quire_argument_check("value", &value, value_bytes));
    QUIRE_TRY(quire_handle_enter_write(&sequence->at));
    int rc = set_entered(sequence, index, value, value_bytes);
    quire_handle_leave(&sequence->at);
    return rc;
}

/* The place before which a record of this index goes; there is at least one node. */
static int locate_insertion(quire_sequence *sequence, const super_page *super, uint64_t index, place *at) {
    if (index < super->count) {
        return locate(sequence, super, index, at);
    }
    const node_page *tail;
    const page_index *known = index_of(sequence->at.set);
    QUIRE_TRY(node_read(&sequence->at.set->view, super->tail, &tail));
    *at = (place){.page = super->tail, .slot = tail->count, .entry = known == NULL ? NOWHERE : known->count - 1};
    return QUIRE_OK;
}

static int insert_first(quire_set *set, super_page *super, const uint8_t *image, uint32_t record_bytes) {
    quire_page_id id;
    node_page *node;
    QUIRE_TRY(node_create(set, super, QUIRE_NO_PAGE, QUIRE_NO_PAGE, &id, &node));
    node_insert(node, 0, image, record_bytes);
    index_node_added(set, 0, id, 1);
    return QUIRE_OK;
}

static int insert_entered(quire_sequence *sequence, uint64_t index, const uint8_t *value, size_t value_bytes) {
    _Alignas(8) uint8_t image[RECORD_BYTES_MAX];
    quire_set *set = sequence->at.set;
    uint32_t record_bytes = 0;
    super_page *super;
    place at = {.entry = NOWHERE};
    QUIRE_TRY(make_sure(set, value_bytes));
    QUIRE_TRY(super_write(set, &super));
    if (index > super->count) {
        return quire_fail(QUIRE_E_INVALID, "index %" PRIu64 " lies beyond the end of a sequence of %" PRIu64, index,
                          super->count);
    }
    if (super->count != 0) {
        QUIRE_TRY(locate_insertion(sequence, super, index, &at));
    }
    QUIRE_TRY(quire_record_compose(set, NULL, NULL, 0, value, value_bytes, image, &record_bytes));
    QUIRE_TRY(super->count == 0 ? insert_first(set, super, image, record_bytes)
                                : insert_image(set, super, &at, image, record_bytes));
    super->count++;
    return QUIRE_OK;
}

int quire_sequence_insert(quire_sequence *sequence, uint64_t index, const uint8_t *value, size_t value_bytes) {
    QUIRE_TRY(quire_argument_check("value", &value, value_bytes));
    QUIRE_TRY(quire_handle_enter_write(&sequence->at));
    int rc = insert_entered(sequence, index, value, value_bytes);
    quire_handle_leave(&sequence->at);
    return rc;
}

int quire_sequence_extend(quire_sequence *sequence, const quire_rows *rows, int64_t *done) {
    quire_rows checked;
    *done = 0;
    QUIRE_TRY(quire_rows_open("rows", rows, false, &checked));
    QUIRE_TRY(quire_handle_enter_write(&sequence->at));
    int rc = QUIRE_OK;
    int64_t row = 0;
    for (; row < checked.row_count; row++) {
        size_t value_bytes;
        const super_page *super;
        const uint8_t *value = quire_rows_at(&checked, row, &value_bytes);
        rc = super_read(&sequence->at.set->view, &super);
        if (rc == QUIRE_OK) {
            rc = insert_entered(sequence, super->count, value, value_bytes);
        }
        if (rc != QUIRE_OK) {
            rc = quire_fail_at_row(rc, row);
            break;
        }
    }
    quire_handle_leave(&sequence->at);
    *done = row;
    return rc;
}

/* Releases the streams of slots from on, up to end, and gives the slot it got to. */
static int drop_records(quire_set *set, quire_page_id id, uint32_t from, uint32_t end, uint32_t *reached) {
    int rc = QUIRE_OK;
    uint32_t slot = from;
    for (; slot < end && rc == QUIRE_OK; slot++) {
        const quire_record *record = NULL;
        rc = record_read(&set->view, id, slot, &record);
        if (rc == QUIRE_OK) {
            rc = quire_record_drop(set, record);
        }
    }
    *reached = rc == QUIRE_OK ? slot : slot - 1;
    return rc;
}

/* Removes up to count records that lie in one node, from the place on; *removed how many. An empty node goes too. */
static int remove_in_node(quire_set *set, const place *at, uint64_t count, uint64_t *removed) {
    super_page *super;
    node_page *node;
    uint32_t reached;
    QUIRE_TRY(quire_arena_reserve(set->view.arena, PAGES_TOUCHED + quire_record_reserve(set, 0, 0)));
    QUIRE_TRY(super_write(set, &super));
    QUIRE_TRY(node_write(set, at->page, &node));
    uint64_t here = at->slot < node->count ? node->count - at->slot : 0;
    if (here == 0 || here > super->count) {
        return node_broken(at->page, "not as many records as its sequence has there (I2)");
    }
    uint32_t end = at->slot + (uint32_t)(count < here ? count : here);
    int rc = drop_records(set, at->page, at->slot, end, &reached);
    uint32_t taken = reached - at->slot;
    QUIRE_TRY(node_take(node, quire_view_page_bytes(&set->view), at->slot, reached));
    super->count -= taken;
    index_count_moved(set, at->entry, -(int32_t)taken);
    if (node->count == 0) {
        QUIRE_TRY(node_destroy(set, super, at->page, at->entry));
    }
    *removed = taken;
    return rc;
}

/* Node after node; *last is the last one that was touched and is still there. */
static int remove_nodes(quire_set *set, place at, uint64_t count, place *last) {
    while (count > 0) {
        const node_page *node;
        uint64_t removed = 0;
        QUIRE_TRY(node_read(&set->view, at.page, &node));
        quire_page_id next = node->next;
        bool stays = at.slot > 0 || count < node->count;
        QUIRE_TRY(remove_in_node(set, &at, count, &removed));
        if (stays) {
            *last = at;
            at.entry += at.entry != NOWHERE;
        }
        count -= removed;
        at.page = next;
        at.slot = 0;
    }
    return QUIRE_OK;
}

static int remove_entered(quire_sequence *sequence, uint64_t index, uint64_t count) {
    quire_set *set = sequence->at.set;
    const super_page *super;
    place at;
    place last = {.page = QUIRE_NO_PAGE};
    QUIRE_TRY(super_read(&set->view, &super));
    if (index > super->count || count > super->count - index) {
        return quire_fail(QUIRE_E_INVALID,
                          "%" PRIu64 " records from %" PRIu64 " on are more than the %" PRIu64 " there are", count,
                          index, super->count);
    }
    if (count == 0) {
        return QUIRE_OK;
    }
    QUIRE_TRY(locate(sequence, super, index, &at));
    if (count > REMOVE_WITH_INDEX_MAX && at.entry != 0) {
        index_drop(set);
        at.entry = NOWHERE;
    }
    QUIRE_TRY(remove_nodes(set, at, count, &last));
    if (last.page == QUIRE_NO_PAGE) {
        return QUIRE_OK;
    }
    super_page *super_written;
    QUIRE_TRY(quire_arena_reserve(set->view.arena, PAGES_TOUCHED));
    QUIRE_TRY(super_write(set, &super_written));
    return tidy(set, super_written, last.page, last.entry);
}

int quire_sequence_remove(quire_sequence *sequence, uint64_t index, uint64_t count) {
    QUIRE_TRY(quire_handle_enter_write(&sequence->at));
    int rc = remove_entered(sequence, index, count);
    quire_handle_leave(&sequence->at);
    return rc;
}

int quire_sequence_clear(quire_sequence *sequence) {
    QUIRE_TRY(quire_handle_enter_write(&sequence->at));
    int rc = quire_handle_clear(&sequence->at, sequence_create);
    quire_handle_leave(&sequence->at);
    return rc;
}

/* ------------------------------------------------------------------------------------------------ cursors */

/* An index beyond the end is the end: nothing lies behind it, and the last record before it. */
static int cursor_start(quire_sequence *sequence, uint64_t index, quire_sequence_cursor *cursor) {
    const super_page *super;
    place at;
    QUIRE_TRY(super_read(quire_handle_view(&sequence->at), &super));
    if (super->count == 0 || (index >= super->count && !cursor->reverse)) {
        return QUIRE_OK;
    }
    index = index < super->count ? index : super->count - 1;
    QUIRE_TRY(locate(sequence, super, index, &at));
    cursor->page = at.page;
    cursor->slot = at.slot;
    cursor->left = cursor->reverse ? index + 1 : super->count - index;
    return QUIRE_OK;
}

int quire_sequence_cursor_open(quire_sequence *sequence, uint64_t index, bool reverse, quire_sequence_cursor **cursor) {
    quire_sequence_cursor *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for a cursor of %zu bytes", sizeof *made);
    }
    made->reverse = reverse;
    int rc = quire_handle_enter(&sequence->at);
    if (rc == QUIRE_OK) {
        rc = cursor_start(sequence, index, made);
        if (rc == QUIRE_OK) {
            rc = quire_handle_pin(&sequence->at, &made->snap, &made->view);
        }
        quire_handle_leave(&sequence->at);
    }
    if (rc != QUIRE_OK) {
        quire_sequence_cursor_close(made);
        return rc;
    }
    *cursor = made;
    return QUIRE_OK;
}

void quire_sequence_cursor_close(quire_sequence_cursor *cursor) {
    if (cursor == NULL) {
        return;
    }
    if (cursor->snap != NULL) {
        quire_snap_release(cursor->snap);
    }
    quire_buffer_free(&cursor->scratch);
    free(cursor);
}

/* The record at the cursor, which then moves on. */
static int cursor_step(quire_sequence_cursor *cursor, const quire_record **record) {
    if (cursor->left == 0) {
        return QUIRE_E_NOTFOUND;
    }
    const node_page *node;
    QUIRE_TRY(node_read(&cursor->view, cursor->page, &node));
    *record = cursor->slot < node->count ? record_at(node, quire_view_page_bytes(&cursor->view), cursor->slot) : NULL;
    if (*record == NULL) {
        return node_broken(cursor->page, "a slot is missing or leads nowhere (I3)");
    }
    cursor->left--;
    if (cursor->left == 0) {
        return QUIRE_OK;
    }
    bool last = cursor->reverse ? cursor->slot == 0 : cursor->slot + 1 == node->count;
    if (!last) {
        cursor->slot += cursor->reverse ? UINT32_MAX : 1;
        return QUIRE_OK;
    }
    cursor->page = cursor->reverse ? node->previous : node->next;
    QUIRE_TRY(node_read(&cursor->view, cursor->page, &node));
    cursor->slot = cursor->reverse ? node->count - 1u : 0;
    return QUIRE_OK;
}

int quire_sequence_cursor_next(quire_sequence_cursor *cursor, quire_buffer *value) {
    const quire_record *record = NULL;
    QUIRE_TRY(quire_view_usable(&cursor->view));
    QUIRE_TRY(cursor_step(cursor, &record));
    return quire_record_value(&cursor->view, record, value);
}

int quire_sequence_cursor_next_many(quire_sequence_cursor *cursor, int64_t row_count, size_t bytes_max,
                                    quire_column *values, int64_t *rows) {
    QUIRE_TRY(quire_view_usable(&cursor->view));
    int64_t row = 0;
    size_t bytes = 0;
    while (row < row_count && bytes <= bytes_max && cursor->left > 0) {
        const quire_record *record = NULL;
        QUIRE_TRY(cursor_step(cursor, &record));
        QUIRE_TRY(quire_record_value(&cursor->view, record, &cursor->scratch));
        QUIRE_TRY(quire_column_add(values, cursor->scratch.bytes, cursor->scratch.count));
        bytes += cursor->scratch.count;
        row++;
    }
    *rows = row;
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ differences */

/* Node by node from the head. */
typedef struct {
    const quire_view *view; /* NULL: there is nothing */
    const super_page *super;
    quire_page_id page; /* QUIRE_NO_PAGE: behind the last */
    uint32_t slot;
    uint32_t nodes_left; /* that there may be; fewer links than that are followed, also where they run in a circle */
} node_walk;

/* A page that both states have with the same frame is a *shared* node: its records are the same, and so are its links. Nodes never change their
 * order, so each list is runs of shared nodes, the same in both, with nodes between that are its own. There, a record whose stamp is not
 * newer than the older state stands in the older one, too, and in the same order; all others are new. */
typedef struct {
    node_walk newer, older;
    uint32_t since;         /* epoch of the older state */
    uint64_t nodes_changed; /* nodes of the newer list that are not shared and not yet walked */
    quire_page_id last_shared;
    uint64_t nodes_behind;   /* behind last_shared, none of them shared */
    uint64_t records_behind; /* in these */
    uint64_t position;       /* in the newer list: where the splice at hand begins */
    uint64_t count;          /* records of the older list with the splices so far */
    uint64_t removed;        /* by the splice at hand */
    uint64_t value_count;    /* added by it */
    quire_buffer values;     /* own holds these */
    quire_buffer value;
    quire_splice_visit visit;
    void *context;
} splicing;

static int lists_differ(void) {
    return quire_fail(QUIRE_E_CORRUPT, "two states of a sequence have the same nodes in another order (I1)");
}

static bool is_shared(const splicing *s, quire_page_id id) {
    if (s->older.view == NULL || id >> 31 != 0) {
        return false;
    }
    uint64_t entry = quire_page_entry(s->newer.view, id);
    return entry != 0 && entry == quire_page_entry(s->older.view, id);
}

static int walk_open(node_walk *walk, const quire_view *view) {
    walk->page = QUIRE_NO_PAGE;
    if (view == NULL) {
        return QUIRE_OK;
    }
    QUIRE_TRY(super_read(view, &walk->super));
    walk->view = view;
    walk->page = walk->super->head;
    walk->nodes_left = walk->super->node_count;
    return QUIRE_OK;
}

static uint64_t walk_count(const node_walk *walk) {
    return walk->view == NULL ? 0 : walk->super->count;
}

/* From one node to the next. */
static int walk_on(node_walk *walk, const node_page *node) {
    if (walk->nodes_left == 0) {
        return node_broken(walk->page, "more nodes than its sequence has (I2)");
    }
    walk->nodes_left--;
    walk->page = node->next;
    walk->slot = 0;
    return QUIRE_OK;
}

/* The splice at hand is whole, if there is one. */
static int splice_end(splicing *s) {
    if (s->removed == 0 && s->value_count == 0) {
        return QUIRE_OK;
    }
    if (s->position > s->count || s->removed > s->count - s->position) {
        return lists_differ();
    }
    quire_splice splice = {.position = s->position,
                           .removed = s->removed,
                           .behind = s->count - s->position - s->removed,
                           .values = s->values.own,
                           .values_bytes = s->values.count,
                           .value_count = s->value_count};
    s->position += s->value_count;
    s->count += s->value_count - s->removed;
    s->removed = 0;
    s->value_count = 0;
    s->values.count = 0;
    return s->visit(s->context, &splice);
}

static int splice_add(splicing *s, const quire_record *record) {
    QUIRE_TRY(quire_record_value(s->newer.view, record, &s->value));
    uint32_t value_bytes = (uint32_t)s->value.count;
    size_t at = s->values.count;
    size_t needed = at + sizeof value_bytes + value_bytes;
    if (needed > s->values.own_capacity) {
        QUIRE_TRY(quire_buffer_grow(&s->values, needed + needed / 2));
    }
    memcpy(s->values.own + at, &value_bytes, sizeof value_bytes);
    if (value_bytes != 0) {
        memcpy(s->values.own + at + sizeof value_bytes, s->value.bytes, value_bytes);
    }
    s->values.count = needed;
    s->value_count++;
    return needed < QUIRE_SPLICE_BYTES ? QUIRE_OK : splice_end(s);
}

/* The older record that comes next before a shared node, NULL: none. */
static int older_peek(splicing *s, const quire_record **record) {
    node_walk *walk = &s->older;
    *record = NULL;
    while (walk->page != QUIRE_NO_PAGE && (walk->slot != 0 || !is_shared(s, walk->page))) {
        const node_page *node;
        QUIRE_TRY(node_read(walk->view, walk->page, &node));
        if (walk->slot < node->count) {
            return record_read(walk->view, walk->page, walk->slot, record);
        }
        QUIRE_TRY(walk_on(walk, node));
    }
    return QUIRE_OK;
}

/* Removes older records up to one that is the same as a record of the newer list; *found false: there was none, and all are removed. A
 * stream is one record's, so records with the same reference to one have the same value. */
static int older_find(splicing *s, const quire_record *newer, bool *found) {
    const quire_record *older;
    for (;;) {
        QUIRE_TRY(older_peek(s, &older));
        if (older == NULL) {
            *found = false;
            return QUIRE_OK;
        }
        s->older.slot++;
        uint32_t record_bytes = quire_record_bytes(newer);
        if (record_bytes == quire_record_bytes(older) && memcmp(newer, older, record_bytes) == 0) {
            *found = true;
            return QUIRE_OK;
        }
        s->removed++;
    }
}

static int splice_record(splicing *s, const quire_record *record) {
    bool found = false;
    if (record->stamp <= s->since) {
        QUIRE_TRY(older_find(s, record, &found));
    }
    if (!found) {
        return splice_add(s, record);
    }
    QUIRE_TRY(splice_end(s));
    s->position++;
    return QUIRE_OK;
}

/* A node of the newer list alone. */
static int splice_node(splicing *s, const node_page *node) {
    uint32_t page_bytes = quire_view_page_bytes(s->newer.view);
    for (uint32_t slot = 0; slot < node->count; slot++) {
        const quire_record *record = record_at(node, page_bytes, slot);
        if (record == NULL) {
            return node_broken(s->newer.page, "a slot leads nowhere (I3)");
        }
        QUIRE_TRY(splice_record(s, record));
    }
    s->nodes_changed -= s->nodes_changed > 0;
    return walk_on(&s->newer, node);
}

/* What is left of the older list before a shared node or the end, which is where it must be then. */
static int older_remove_to(splicing *s, quire_page_id page) {
    const quire_record *record;
    for (;;) {
        QUIRE_TRY(older_peek(s, &record));
        if (record == NULL) {
            return s->older.page == page ? splice_end(s) : lists_differ();
        }
        s->older.slot++;
        s->removed++;
    }
}

/* Over a shared node, and over all up to the last one if only shared nodes lie between. */
static int skip_shared(splicing *s) {
    const node_page *node;
    QUIRE_TRY(older_remove_to(s, s->newer.page));
    if (s->nodes_changed > s->nodes_behind) {
        QUIRE_TRY(node_read(s->newer.view, s->newer.page, &node));
        s->position += node->count;
    } else {
        uint64_t position = walk_count(&s->newer) - s->records_behind;
        QUIRE_TRY(node_read(s->newer.view, s->last_shared, &node));
        if (s->records_behind > walk_count(&s->newer) || position < s->position) {
            return lists_differ();
        }
        s->position = position;
    }
    QUIRE_TRY(walk_on(&s->older, node));
    return walk_on(&s->newer, node);
}

static int count_changed_node(void *context, quire_page_id id, bool in_use) {
    splicing *s = context;
    if (in_use && id >> 31 == 0 && !is_shared(s, id)) {
        const node_page *node = quire_page_read(s->newer.view, id);
        s->nodes_changed += node != NULL && node->magic == NODE_MAGIC;
    }
    return QUIRE_OK;
}

/* Backwards from the tail to the last shared node, so that what only grew or shrank at its ends is not walked. */
static int find_last_shared(splicing *s) {
    quire_page_id id = s->newer.super->tail;
    while (id != QUIRE_NO_PAGE && !is_shared(s, id)) {
        const node_page *node;
        QUIRE_TRY(node_read(s->newer.view, id, &node));
        if (s->nodes_behind == s->newer.super->node_count) {
            return node_broken(id, "more nodes than its sequence has (I2)");
        }
        s->nodes_behind++;
        s->records_behind += node->count;
        id = node->previous;
    }
    s->last_shared = id;
    return QUIRE_OK;
}

static int splicing_run(splicing *s, const quire_view *newer, const quire_view *older) {
    QUIRE_TRY(walk_open(&s->newer, newer));
    QUIRE_TRY(walk_open(&s->older, older));
    s->count = walk_count(&s->older);
    if (older != NULL) {
        QUIRE_TRY(quire_view_changed(newer, s->since, count_changed_node, s));
        QUIRE_TRY(quire_view_whole(newer));
        QUIRE_TRY(find_last_shared(s));
    }
    while (s->newer.page != QUIRE_NO_PAGE) {
        if (is_shared(s, s->newer.page)) {
            QUIRE_TRY(skip_shared(s));
            continue;
        }
        const node_page *node;
        QUIRE_TRY(node_read(newer, s->newer.page, &node));
        QUIRE_TRY(splice_node(s, node));
    }
    QUIRE_TRY(older_remove_to(s, QUIRE_NO_PAGE));
    return s->count == walk_count(&s->newer) && s->position == s->count ? QUIRE_OK : lists_differ();
}

int quire_sequence_changes(quire_sequence *newer, quire_sequence *older, quire_splice_visit visit, void *context) {
    splicing s = {.visit = visit, .context = context};
    quire_view *before = older == NULL ? NULL : &older->at.view;
    if (before != NULL && (older->at.set != NULL || before->arena != quire_handle_view(&newer->at)->arena)) {
        return quire_fail(QUIRE_E_INVALID,
                          "the older state must be a snapshot's sequence, of the same arena as the newer");
    }
    if (before != NULL) {
        QUIRE_TRY(quire_view_usable(before));
        s.since = before->epoch;
    }
    quire_snap *snap = NULL;
    quire_view view = {0};
    QUIRE_TRY(quire_handle_enter(&newer->at));
    int rc = quire_handle_pin(&newer->at, &snap, &view);
    quire_handle_leave(&newer->at);
    QUIRE_TRY(rc);
    if (before != NULL) {
        rc = quire_view_comes_from(&view, before);
    }
    if (rc == QUIRE_OK) {
        rc = splicing_run(&s, &view, before);
    }
    quire_buffer_free(&s.values);
    quire_buffer_free(&s.value);
    if (snap != NULL) {
        quire_snap_release(snap);
    }
    return rc;
}

/* ------------------------------------------------------------------------------------------------ check */

/* Marks the record's eighths of the page's bytes; false if one was marked before. */
static bool mark_record(uint8_t *marks, uint32_t offset, uint32_t record_bytes) {
    for (uint32_t unit = offset / 8; unit < (offset + record_bytes) / 8; unit++) {
        uint8_t bit = (uint8_t)(1u << (unit & 7));
        if ((marks[unit >> 3] & bit) != 0) {
            return false;
        }
        marks[unit >> 3] |= bit;
    }
    return true;
}

static int check_node(const quire_view *view, quire_page_id id, const node_page *node, quire_page_census *census) {
    uint8_t marks[QUIRE_PAGE_BYTES_MAX / 64] = {0};
    uint32_t live = 0;
    for (uint32_t slot = 0; slot < node->count; slot++) {
        const quire_record *record = record_at(node, quire_view_page_bytes(view), slot);
        if (record == NULL) {
            return node_broken(id, "a slot leads nowhere (I3)");
        }
        uint32_t record_bytes = quire_record_bytes(record);
        if (!mark_record(marks, node->slots[node->first + slot], record_bytes)) {
            return node_broken(id, "two records overlap (I3)");
        }
        QUIRE_TRY(quire_record_check(view, record, quire_census_count, census));
        if (record->key_word != 0 || quire_record_form(record) > QUIRE_VALUE_STREAM) {
            return node_broken(id, "a record with a key, or with several values (I5)");
        }
        live += record_bytes;
    }
    return live == node->live ? QUIRE_OK : node_broken(id, "its records have not the size it says (I4)");
}

static int check_list(const quire_view *view, quire_page_census *census) {
    const super_page *super;
    QUIRE_TRY(super_read(view, &super));
    QUIRE_TRY(quire_census_count(census, SUPER_PAGE));
    quire_page_id previous = QUIRE_NO_PAGE;
    quire_page_id id = super->head;
    uint64_t count = 0;
    uint32_t node_count = 0;
    while (id != QUIRE_NO_PAGE) {
        const node_page *node;
        QUIRE_TRY(quire_census_count(census, id));
        QUIRE_TRY(node_read(view, id, &node));
        if (node->previous != previous) {
            return node_broken(id, "the link to the previous node is wrong (I1)");
        }
        QUIRE_TRY(check_node(view, id, node, census));
        count += node->count;
        node_count++;
        previous = id;
        id = node->next;
    }
    if (super->tail != previous || super->count != count || super->node_count != node_count) {
        return quire_fail(QUIRE_E_CORRUPT,
                          "a sequence says %" PRIu64 " records in %" PRIu32 " nodes up to %" PRIu32 ", but has %" PRIu64
                          " in %" PRIu32 " up to %" PRIu32 " (I1, I2)",
                          super->count, super->node_count, super->tail, count, node_count, previous);
    }
    return QUIRE_OK;
}

/* I6: the writer's index against the list, which has been checked. */
static int check_index(const quire_view *view, page_index *index) {
    int64_t start = index->count == 0 ? 0 : entry_of(index, 0)->start;
    const super_page *super;
    QUIRE_TRY(super_read(view, &super));
    quire_page_id id = super->head;
    for (size_t i = 0; i < index->count; i++) {
        const index_entry *entry = entry_of(index, i);
        const node_page *node;
        QUIRE_TRY(node_read(view, id, &node));
        if (entry->page != id || entry->count != node->count || (i < index->summed && entry->start != start)) {
            return node_broken(id, "the index in memory does not agree with it (I6)");
        }
        start += node->count;
        id = node->next;
    }
    return id == QUIRE_NO_PAGE ? QUIRE_OK : node_broken(id, "the index in memory does not know it (I6)");
}

static int check_entered(quire_sequence *sequence) {
    const quire_view *view = quire_handle_view(&sequence->at);
    quire_page_census census;
    QUIRE_TRY(quire_census_open(view, &census));
    QUIRE_TRY(quire_census_close(&census, check_list(view, &census)));
    page_index *index = sequence->at.set != NULL ? index_of(sequence->at.set) : NULL;
    return index == NULL ? QUIRE_OK : check_index(view, index);
}

int quire_sequence_check(quire_sequence *sequence) {
    QUIRE_TRY(quire_handle_enter(&sequence->at));
    int rc = check_entered(sequence);
    quire_handle_leave(&sequence->at);
    return rc;
}
