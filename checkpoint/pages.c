/* pages.c -- changed pages to bytes and back.
 *
 * Purpose     See pages.h.
 * Layout      pages.h.
 * Invariants  I1 a set that was made after `since` is written whole and replaces what the reader has under its name, so that no page of
 *                an earlier set with that name shows through.
 *             I2 free ids are written with their place in the list of free ids, so that a reader's tables are the writer's.
 *             I3 every length and id is checked before it is used.
 * Ownership   A writer's payload buffer is its own.
 * Threads     The arena is entered for the whole of a call.
 * Errors      pages.h.
 */
#include "pages.h"

#include <string.h>

#include "../pagemgr/internal.h"

enum { RECORD_BEGIN = 1, RECORD_SET = 2, RECORD_PAGE = 3, RECORD_FREE = 4 };
#define POINT_BYTES 20u

/* ------------------------------------------------------------------------------------------------ writing */

typedef struct {
    quire_delta_sink sink;
    void *context;
    quire_buffer payload;
    const quire_set *set;
    uint64_t page_count; /* found so far */
} pages_writer;

static int add(pages_writer *writer, const void *bytes, size_t count) {
    size_t needed = writer->payload.count + count;
    if (needed > writer->payload.own_capacity) {
        QUIRE_TRY(quire_buffer_grow(&writer->payload, needed + QUIRE_PAGES_PAYLOAD_BYTES + QUIRE_PAGE_BYTES_MAX));
    }
    memcpy(writer->payload.own + writer->payload.count, bytes, count);
    writer->payload.count = needed;
    return QUIRE_OK;
}

static int add_u8(pages_writer *writer, uint8_t value) {
    return add(writer, &value, 1);
}

static int add_u32(pages_writer *writer, uint32_t value) {
    return add(writer, &value, 4);
}

static int add_name(pages_writer *writer, const char *name) {
    uint16_t count = (uint16_t)strlen(name);
    QUIRE_TRY(add(writer, &count, 2));
    return add(writer, name, count);
}

static int add_point(pages_writer *writer, const quire_point *point) {
    QUIRE_TRY(add(writer, point->identity, sizeof point->identity));
    return add_u32(writer, point->epoch);
}

static int begin_write(pages_writer *writer, quire_arena *arena, uint32_t since) {
    quire_point parent, here, own;
    quire_arena_point(arena, &own);
    here = own;
    here.epoch = since;
    parent = since == arena->origin_epoch ? arena->origin : here;
    /* What a commit will call the state being written. */
    own.epoch = arena->changed ? arena->epoch_writing : arena->epoch_sealed;
    uint32_t sets = 0;
    for (const quire_set *set = arena->sets; set != NULL; set = set->next) {
        sets += !set->gone;
    }
    QUIRE_TRY(add_u8(writer, RECORD_BEGIN));
    QUIRE_TRY(add_point(writer, &parent));
    QUIRE_TRY(add_point(writer, &here));
    QUIRE_TRY(add_point(writer, &own));
    QUIRE_TRY(add_u32(writer, arena->page_bytes));
    QUIRE_TRY(add_u32(writer, sets));
    for (const quire_set *set = arena->sets; set != NULL; set = set->next) {
        if (!set->gone) {
            QUIRE_TRY(add_name(writer, set->name));
        }
    }
    return QUIRE_OK;
}

static int set_begin(pages_writer *writer, bool whole) {
    const quire_set *set = writer->set;
    QUIRE_TRY(add_u8(writer, RECORD_SET));
    QUIRE_TRY(add_u8(writer, whole));
    QUIRE_TRY(add_u8(writer, (uint8_t)set->kind));
    QUIRE_TRY(add_name(writer, set->name));
    for (unsigned which = 0; which < 2; which++) {
        const quire_table *table = &set->view.table[which];
        QUIRE_TRY(add_u32(writer, table->page_limit));
        QUIRE_TRY(add_u32(writer, table->free_head));
        QUIRE_TRY(add_u32(writer, table->page_count));
    }
    return QUIRE_OK;
}

static int payload_flush(pages_writer *writer) {
    if (writer->payload.count == 0) {
        return QUIRE_OK;
    }
    size_t count = writer->payload.count;
    writer->payload.count = 0;
    int rc = writer->sink(writer->context, writer->payload.own, count);
    return rc == 0 ? QUIRE_OK : rc < 0 ? rc : quire_fail(QUIRE_E_IO, "the sink of a payload failed with %d", rc);
}

static int page_write(void *context, quire_page_id id, bool in_use) {
    pages_writer *writer = context;
    const quire_view *view = &writer->set->view;
    if (writer->payload.count >= QUIRE_PAGES_PAYLOAD_BYTES) {
        QUIRE_TRY(payload_flush(writer));
        QUIRE_TRY(set_begin(writer, false));
    }
    QUIRE_TRY(add_u8(writer, in_use ? RECORD_PAGE : RECORD_FREE));
    QUIRE_TRY(add_u32(writer, id));
    if (!in_use) {
        return add_u32(writer, quire_page_next_free(view, id));
    }
    const void *page = quire_page_read(view, id);
    return page == NULL ? quire_fail(QUIRE_E_CORRUPT, "page %u of set '%s' cannot be read", id, writer->set->name)
                        : add(writer, page, quire_view_page_bytes(view));
}

static int page_count(void *context, quire_page_id id, bool in_use) {
    pages_writer *writer = context;
    (void)id;
    writer->page_count += in_use;
    return QUIRE_OK;
}

/* Whether a reader that is at `since` cannot have the set that bears the name now. */
static bool is_newer(const quire_set *set, uint32_t since) {
    return set->epoch_created > since;
}

static int sets_write(pages_writer *writer, quire_arena *arena, uint32_t since) {
    QUIRE_TRY(begin_write(writer, arena, since));
    for (const quire_set *set = arena->sets; set != NULL; set = set->next) {
        if (!set->gone) {
            writer->set = set;
            bool whole = is_newer(set, since);
            QUIRE_TRY(set_begin(writer, whole));
            QUIRE_TRY(quire_view_changed(&set->view, whole ? 0 : since, page_write, writer));
        }
    }
    return payload_flush(writer);
}

int quire_pages_write(quire_arena *arena, uint32_t since, quire_delta_sink sink, void *context) {
    pages_writer writer = {.sink = sink, .context = context};
    QUIRE_TRY(quire_arena_enter(arena));
    int rc = sets_write(&writer, arena, since);
    quire_arena_leave(arena);
    quire_buffer_free(&writer.payload);
    return rc;
}

static int sets_count(pages_writer *writer, quire_arena *arena, uint32_t since) {
    for (const quire_set *set = arena->sets; set != NULL; set = set->next) {
        if (!set->gone) {
            QUIRE_TRY(quire_view_changed(&set->view, is_newer(set, since) ? 0 : since, page_count, writer));
        }
    }
    return QUIRE_OK;
}

int quire_pages_bytes(quire_arena *arena, uint32_t since, uint64_t *bytes) {
    pages_writer writer = {0};
    QUIRE_TRY(quire_arena_enter(arena));
    QUIRE_TRY(quire_arena_left(arena, sets_count(&writer, arena, since)));
    *bytes = writer.page_count * (arena->page_bytes + 5);
    return QUIRE_OK;
}

/* ------------------------------------------------------------------------------------------------ applying */

typedef struct {
    const uint8_t *next;
    const uint8_t *end;
    quire_set *set;
} pages_reader;

static int bad_record(const char *what) {
    return quire_fail(QUIRE_E_CORRUPT, "a record of pages makes no sense: %s", what);
}

static int take(pages_reader *reader, void *to, size_t count) {
    if ((size_t)(reader->end - reader->next) < count) {
        return bad_record("it is longer than what is left");
    }
    memcpy(to, reader->next, count);
    reader->next += count;
    return QUIRE_OK;
}

static int take_name(pages_reader *reader, char name[QUIRE_NAME_BYTES_MAX + 1]) {
    uint16_t count;
    QUIRE_TRY(take(reader, &count, 2));
    if (count == 0 || count > QUIRE_NAME_BYTES_MAX) {
        return bad_record("a set's name is empty or too long");
    }
    QUIRE_TRY(take(reader, name, count));
    name[count] = 0;
    return strlen(name) == count ? QUIRE_OK : bad_record("a set's name has a zero in it");
}

static int take_point(pages_reader *reader, quire_point *point) {
    QUIRE_TRY(take(reader, point->identity, sizeof point->identity));
    return take(reader, &point->epoch, 4);
}

static bool points_equal(const quire_point *one, const quire_point *other) {
    return one->epoch == other->epoch && memcmp(one->identity, other->identity, sizeof one->identity) == 0;
}

/* Destroys every set whose name is not among those of the begin record. */
static int sets_prune(pages_reader *reader, quire_arena *arena, uint32_t names) {
    const uint8_t *first = reader->next;
    char name[QUIRE_NAME_BYTES_MAX + 1];
    for (quire_set *set = arena->sets; set != NULL; set = set->next) {
        bool kept = set->gone;
        reader->next = first;
        for (uint32_t i = 0; i < names && !kept; i++) {
            QUIRE_TRY(take_name(reader, name));
            kept = strcmp(name, set->name) == 0;
        }
        if (!kept) {
            QUIRE_TRY(quire_set_destroy(arena, set->name));
        }
    }
    reader->next = first;
    for (uint32_t i = 0; i < names; i++) {
        QUIRE_TRY(take_name(reader, name));
    }
    return QUIRE_OK;
}

static int begin_apply(pages_reader *reader, quire_arena *arena) {
    quire_point parent, there, own;
    uint32_t page_bytes, names;
    QUIRE_TRY(take_point(reader, &parent));
    QUIRE_TRY(take_point(reader, &there));
    QUIRE_TRY(take_point(reader, &own));
    QUIRE_TRY(take(reader, &page_bytes, 4));
    QUIRE_TRY(take(reader, &names, 4));
    if (page_bytes != arena->page_bytes) {
        return quire_fail(QUIRE_E_MISMATCH, "pages of %u bytes for an arena with pages of %u", page_bytes,
                          arena->page_bytes);
    }
    bool at_origin =
        (points_equal(&parent, &arena->origin) || points_equal(&there, &arena->origin)) &&
        (arena->epoch_committed == arena->origin_epoch || (arena->origin_epoch == 0 && arena->set_count == 0));
    if (!at_origin || arena->changed) {
        return quire_fail(QUIRE_E_MISMATCH,
                          "changed pages can only be put on the state that they were changed in, and this is another");
    }
    /* Records carry the epochs of their last change: go past them, so that they read as older than what comes now. */
    if (own.epoch >= QUIRE_EPOCH_MAX) {
        return bad_record("its epoch is impossible");
    }
    if (arena->epoch_writing <= own.epoch) {
        arena->epoch_writing = own.epoch + 1;
    }
    QUIRE_TRY(sets_prune(reader, arena, names));
    arena->origin = own;
    arena->origin_epoch = arena->epoch_writing;
    arena->changed = true; /* a commit makes it the last one also where no page changed */
    return QUIRE_OK;
}

static int set_apply(pages_reader *reader, quire_arena *arena) {
    uint8_t whole, kind;
    char name[QUIRE_NAME_BYTES_MAX + 1];
    quire_table tables[2] = {{0}};
    QUIRE_TRY(take(reader, &whole, 1));
    QUIRE_TRY(take(reader, &kind, 1));
    QUIRE_TRY(take_name(reader, name));
    for (unsigned which = 0; which < 2; which++) {
        QUIRE_TRY(take(reader, &tables[which].page_limit, 4));
        QUIRE_TRY(take(reader, &tables[which].free_head, 4));
        QUIRE_TRY(take(reader, &tables[which].page_count, 4));
    }
    if (whole && quire_set_exists(arena, name)) {
        QUIRE_TRY(quire_set_destroy(arena, name));
    }
    QUIRE_TRY(whole ? quire_set_create(arena, name, kind, &reader->set)
                    : quire_set_open(arena, name, kind, &reader->set));
    return quire_set_resize(reader->set, tables);
}

static int page_apply(pages_reader *reader, quire_arena *arena, bool in_use) {
    uint32_t id, next = 0;
    if (reader->set == NULL) {
        return bad_record("a page belongs to no set");
    }
    QUIRE_TRY(take(reader, &id, 4));
    if (!in_use) {
        QUIRE_TRY(take(reader, &next, 4));
        return quire_page_install(reader->set, id, NULL, next);
    }
    if ((size_t)(reader->end - reader->next) < arena->page_bytes) {
        return bad_record("a page is longer than what is left");
    }
    const uint8_t *page = reader->next;
    reader->next += arena->page_bytes;
    return quire_page_install(reader->set, id, page, 0);
}

static int record_apply(pages_reader *reader, quire_arena *arena) {
    switch (*reader->next++) {
    case RECORD_BEGIN:
        return begin_apply(reader, arena);
    case RECORD_SET:
        return set_apply(reader, arena);
    case RECORD_PAGE:
        return page_apply(reader, arena, true);
    case RECORD_FREE:
        return page_apply(reader, arena, false);
    default:
        return bad_record("its kind is unknown");
    }
}

int quire_pages_apply(quire_arena *arena, const uint8_t *payload, size_t count) {
    QUIRE_TRY(quire_arena_enter(arena));
    pages_reader reader = {.next = payload, .end = payload + count};
    int rc = QUIRE_OK;
    while (rc == QUIRE_OK && reader.next != reader.end) {
        rc = record_apply(&reader, arena);
    }
    quire_arena_leave(arena);
    if (rc == QUIRE_E_NOTFOUND || rc == QUIRE_E_EXISTS) {
        return bad_record("a set is not as it says");
    }
    return rc;
}
