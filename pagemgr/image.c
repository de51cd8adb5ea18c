/* image.c -- a snapshot written out as a file of its own, and read back.
 *
 * Purpose     An image is a compact arena: the same header and pages, only what the snapshot sees, frames in the order of page ids. So
 *             there is one format for pages at rest.
 *
 * Layout      offset                size
 *             0                     body_bytes  an arena (internal.h): header, then for each set its pages and table nodes, children before
 *                                               parents, then the catalog's; no free frames, meta slot 0, no pins
 *             body_bytes            4 * n       crc32c of each block of 64 KiB of the body (the last may be shorter)
 *             body_bytes + 4 * n    32          footer: magic "QUIREIMG", u32 version, u32 block_bytes, u64 body_bytes,
 *                                               u32 crc32c of the block checksums, u32 crc32c of the footer's first 28 bytes
 *
 * Invariants  I1 the image is written in one pass from front to back, so any sink will do.
 *             I2 nothing of an image is used before all of its checksums have been verified.
 *
 *             I3 a chunk of a mapped image is used only after its own checksums have been verified.
 *
 * Ownership   The caller keeps the snapshot until writing ends. Loading copies; the file is not needed afterwards. A mapped image's
 *             file is kept open by its arena.
 * Threads     Writing: any thread, it only reads a snapshot. Loading: the writer.
 * Errors      CORRUPT names what is wrong with the file; EXISTS, MISMATCH (page size), LIMIT and NOSPACE leave the arena unchanged.
 */
#include "internal.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCK_BYTES 65536u
#define IMAGE_MAGIC "QUIREIMG"

typedef struct {
    char magic[8];
    uint32_t version;
    uint32_t block_bytes;
    uint64_t body_bytes;
    uint32_t blocks_crc;
    uint32_t crc;
} image_footer;
_Static_assert(sizeof(image_footer) == 32, "image footer");

static uint32_t footer_crc(const image_footer *footer) {
    return quire_crc32c(0, footer, offsetof(image_footer, crc));
}

static uint64_t block_count(uint64_t body_bytes) {
    return body_bytes / BLOCK_BYTES + (body_bytes % BLOCK_BYTES != 0);
}

static bool footer_sound(const image_footer *footer, uint64_t file_bytes) {
    return footer->crc == footer_crc(footer) && footer->block_bytes == BLOCK_BYTES && footer->body_bytes < file_bytes &&
           footer->body_bytes >= QUIRE_HEADER_BYTES &&
           footer->body_bytes + block_count(footer->body_bytes) * 4 + sizeof *footer == file_bytes;
}

bool quire_file_is_image(int file, uint64_t file_bytes) {
    image_footer footer;
    return file_bytes > sizeof footer &&
           pread(file, &footer, sizeof footer, (off_t)(file_bytes - sizeof footer)) == (ssize_t)sizeof footer &&
           memcmp(footer.magic, IMAGE_MAGIC, 8) == 0 && footer_sound(&footer, file_bytes);
}

/* ------------------------------------------------------------------------------------------------ writing */

typedef struct {
    quire_sink sink; /* NULL: only count frames and find out where everything will be */
    void *context;
    uint8_t *block;
    size_t block_count; /* bytes in block */
    uint32_t *checksums;
    size_t checksum_count;
    uint64_t *nodes; /* one node under construction per level */
    uint32_t next_frame;
    uint32_t page_bytes;
} image_writer;

static int block_flush(image_writer *writer) {
    if (writer->block_count == 0) {
        return QUIRE_OK;
    }
    writer->checksums[writer->checksum_count++] = quire_crc32c(0, writer->block, writer->block_count);
    size_t count = writer->block_count;
    writer->block_count = 0;
    int rc = writer->sink(writer->context, writer->block, count);
    return rc == 0 ? QUIRE_OK : rc < 0 ? rc : quire_fail(QUIRE_E_IO, "the sink of an image failed with %d", rc);
}

static int body_write(image_writer *writer, const void *bytes, size_t count) {
    for (const uint8_t *from = bytes; count > 0;) {
        size_t part = BLOCK_BYTES - writer->block_count < count ? BLOCK_BYTES - writer->block_count : count;
        memcpy(writer->block + writer->block_count, from, part);
        writer->block_count += part;
        from += part;
        count -= part;
        if (writer->block_count == BLOCK_BYTES) {
            QUIRE_TRY(block_flush(writer));
        }
    }
    return QUIRE_OK;
}

static int frame_write(image_writer *writer, const void *bytes, uint32_t epoch, uint64_t *entry) {
    *entry = (uint64_t)epoch << 32 | writer->next_frame++;
    return writer->sink == NULL ? QUIRE_OK : body_write(writer, bytes, writer->page_bytes);
}

/* Writes the page or subtree that *entry names and makes *entry name it in the image. */
static int entry_write(image_writer *writer, const quire_view *view, uint64_t *entry, uint32_t level) {
    uint32_t frame = QUIRE_ENTRY_FRAME(*entry), entries = writer->page_bytes / 8;
    const void *bytes = frame < view->frame_limit && level <= 8 ? quire_frame(view, frame) : NULL;
    if (bytes == NULL) {
        return quire_fail(QUIRE_E_CORRUPT, "frame %u of the snapshot does not exist", frame);
    }
    if (level == 0) {
        return frame_write(writer, bytes, (uint32_t)(*entry >> 32), entry);
    }
    uint64_t *node = writer->nodes + (size_t)level * entries;
    memcpy(node, bytes, writer->page_bytes);
    for (uint32_t i = 0; i < entries; i++) {
        if ((uint32_t)node[i] != 0) {
            QUIRE_TRY(entry_write(writer, view, &node[i], level - 1));
        }
    }
    return frame_write(writer, node, (uint32_t)(*entry >> 32), entry);
}

static int table_write(image_writer *writer, const quire_view *view, quire_table *table) {
    return (uint32_t)table->root == 0 ? QUIRE_OK : entry_write(writer, view, &table->root, table->depth);
}

typedef struct {
    quire_catalog_entry *entries;
    uint32_t count, capacity;
} entry_list;

typedef struct {
    quire_snap *snap;
    entry_list *list;
} collect_state;

static int collect_entry(void *context, const char *name, uint32_t kind) {
    collect_state *state = context;
    entry_list *list = state->list;
    (void)kind;
    if (list->count == list->capacity) {
        uint32_t capacity = list->capacity * 2 + 16;
        quire_catalog_entry *entries = realloc(list->entries, capacity * sizeof *entries);
        if (entries == NULL) {
            return quire_fail(QUIRE_E_NOMEM, "no memory for the image's catalog");
        }
        list->entries = entries;
        list->capacity = capacity;
    }
    QUIRE_TRY(quire_catalog_find(&state->snap->pin->catalog, name, &list->entries[list->count]));
    list->count++;
    list->entries[list->count - 1].set_id = list->count;
    return QUIRE_OK;
}

/* Writes (or lays out) every set, then the catalog; fills the meta slot. */
static int sets_write(image_writer *writer, const quire_snap *snap, const entry_list *sets, quire_meta *meta) {
    const quire_view *view = &snap->pin->catalog;
    uint32_t per_page = writer->page_bytes / (uint32_t)sizeof(quire_catalog_entry);
    uint32_t page_count = (sets->count + per_page - 1) / per_page, entries = writer->page_bytes / 8;
    uint8_t *pages = calloc(page_count + 1, writer->page_bytes);
    uint64_t *node = calloc(entries, sizeof *node);
    int rc = pages == NULL || node == NULL ? quire_fail(QUIRE_E_NOMEM, "no memory for the image's catalog") : QUIRE_OK;
    for (uint32_t i = 0; i < sets->count && rc == QUIRE_OK; i++) {
        quire_catalog_entry *entry =
            (quire_catalog_entry *)(pages + (size_t)(i / per_page) * writer->page_bytes) + i % per_page;
        *entry = sets->entries[i];
        rc = table_write(writer, view, &entry->table[0]);
        if (rc == QUIRE_OK) {
            rc = table_write(writer, view, &entry->table[1]);
        }
    }
    /* One node of catalog entries is enough for every set an arena can hold, unless pages are tiny. */
    if (rc == QUIRE_OK && page_count > entries) {
        rc = quire_fail(QUIRE_E_FULL, "%u sets are too many for an image with pages of %u bytes", sets->count,
                        writer->page_bytes);
    }
    for (uint32_t i = 0; i < page_count && rc == QUIRE_OK; i++) {
        rc = frame_write(writer, pages + (size_t)i * writer->page_bytes, snap->pin->epoch, &node[i]);
    }
    quire_table catalog = {.depth = 1, .page_limit = page_count, .page_count = page_count};
    if (rc == QUIRE_OK) {
        rc = frame_write(writer, node, snap->pin->epoch, &catalog.root);
    }
    *meta = (quire_meta){
        .epoch = snap->pin->epoch, .frame_limit = writer->next_frame, .catalog = catalog, .set_count = sets->count};
    meta->crc = quire_meta_crc(meta);
    free(pages);
    free(node);
    return rc;
}

static int header_write(image_writer *writer, const quire_snap *snap, const quire_meta *meta, uint32_t header_frames) {
    size_t bytes = (size_t)header_frames * writer->page_bytes;
    quire_header *header = calloc(1, bytes);
    if (header == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for the image's header");
    }
    memcpy(header->magic, QUIRE_MAGIC, 8);
    header->version = QUIRE_FORMAT_VERSION;
    header->page_bytes = writer->page_bytes;
    memcpy(header->identity, snap->arena->header->identity, sizeof header->identity);
    header->crc = quire_crc32c(0, header, 32);
    header->current = (uint64_t)meta->epoch << 1;
    header->synced = header->current;
    header->meta[0] = *meta;
    int rc = body_write(writer, header, bytes);
    free(header);
    return rc;
}

static int trailer_write(image_writer *writer) {
    uint64_t body_bytes = (uint64_t)writer->next_frame * writer->page_bytes;
    QUIRE_TRY(block_flush(writer));
    size_t checksum_bytes = writer->checksum_count * sizeof *writer->checksums;
    image_footer footer = {.magic = IMAGE_MAGIC,
                           .version = QUIRE_FORMAT_VERSION,
                           .block_bytes = BLOCK_BYTES,
                           .body_bytes = body_bytes,
                           .blocks_crc = quire_crc32c(0, writer->checksums, checksum_bytes)};
    footer.crc = footer_crc(&footer);
    int rc = writer->sink(writer->context, writer->checksums, checksum_bytes);
    if (rc == 0) {
        rc = writer->sink(writer->context, &footer, sizeof footer);
    }
    return rc <= 0 ? rc : quire_fail(QUIRE_E_IO, "the sink of an image failed with %d", rc);
}

static int image_write(image_writer *writer, quire_snap *snap, const entry_list *sets, quire_sink sink, void *context) {
    uint32_t header_frames = QUIRE_HEADER_BYTES <= writer->page_bytes ? 1 : QUIRE_HEADER_BYTES / writer->page_bytes;
    quire_meta meta;
    writer->next_frame = header_frames;
    QUIRE_TRY(sets_write(writer, snap, sets, &meta)); /* lay out */
    uint64_t body_bytes = (uint64_t)writer->next_frame * writer->page_bytes;
    writer->checksums = malloc((body_bytes / BLOCK_BYTES + 1) * sizeof *writer->checksums);
    if (writer->checksums == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for the image's checksums");
    }
    writer->sink = sink;
    writer->context = context;
    QUIRE_TRY(header_write(writer, snap, &meta, header_frames));
    writer->next_frame = header_frames;
    QUIRE_TRY(sets_write(writer, snap, sets, &meta));
    return trailer_write(writer);
}

int quire_snap_write(quire_snap *snap, quire_sink sink, void *context) {
    QUIRE_TRY(quire_view_usable(&snap->pin->catalog));
    if (snap->weak) {
        return quire_fail(QUIRE_E_INVALID, "a weak snapshot cannot be written out: its pages may change meanwhile");
    }
    uint32_t page_bytes = snap->arena->page_bytes;
    image_writer writer = {
        .page_bytes = page_bytes, .block = malloc(BLOCK_BYTES), .nodes = malloc(9 * (size_t)page_bytes)};
    entry_list sets = {0};
    collect_state state = {snap, &sets};
    int rc = writer.block == NULL || writer.nodes == NULL ? quire_fail(QUIRE_E_NOMEM, "no memory to write an image")
                                                          : quire_snap_each(snap, collect_entry, &state);
    if (rc == QUIRE_OK) {
        rc = image_write(&writer, snap, &sets, sink, context);
    }
    free(writer.block);
    free(writer.nodes);
    free(writer.checksums);
    free(sets.entries);
    return rc;
}

static int file_sink(void *context, const void *bytes, size_t count) {
    int file = *(int *)context;
    for (const uint8_t *from = bytes; count > 0;) {
        ssize_t written = write(file, from, count);
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written < 0) {
            bool full = errno == ENOSPC || errno == EDQUOT || errno == EFBIG;
            return quire_fail(full ? QUIRE_E_NOSPACE : QUIRE_E_IO, "cannot write an image: %s", strerror(errno));
        }
        from += written;
        count -= (size_t)written;
    }
    return QUIRE_OK;
}

int quire_snap_write_file(quire_snap *snap, const char *path) {
    size_t path_bytes = strlen(path);
    char *temporary = malloc(path_bytes + 32);
    if (temporary == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for a path");
    }
    snprintf(temporary, path_bytes + 32, "%s.%ld.tmp", path, (long)getpid());
    int file = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    int rc = file < 0 ? quire_fail(QUIRE_E_IO, "cannot create %s: %s", temporary, strerror(errno))
                      : quire_snap_write(snap, file_sink, &file);
    if (file >= 0) {
        if (rc == QUIRE_OK && fsync(file) != 0) {
            rc = quire_fail(QUIRE_E_IO, "cannot sync %s: %s", temporary, strerror(errno));
        }
        close(file);
        if (rc == QUIRE_OK && rename(temporary, path) != 0) {
            rc = quire_fail(QUIRE_E_IO, "cannot rename %s to %s: %s", temporary, path, strerror(errno));
        }
        if (rc != QUIRE_OK) {
            unlink(temporary);
        } else {
            rc = quire_folder_sync(path);
        }
    }
    free(temporary);
    return rc;
}

/* ------------------------------------------------------------------------------------------------ loading */

typedef struct image {
    const char *path;
    uint8_t *bytes;
    size_t count;
    uint8_t **chunks;
    const uint64_t *known; /* checksums of blocks that were computed before, each with KNOWN; NULL: of none */
    quire_meta meta;
    quire_view view;
} image;
#define KNOWN ((uint64_t)1 << 32)

static int footer_verify(const image_footer *footer, uint64_t file_bytes, const char *path) {
    if (memcmp(footer->magic, IMAGE_MAGIC, 8) != 0) {
        return quire_fail(QUIRE_E_CORRUPT, "%s does not end as an image does: it is truncated or no image", path);
    }
    if (footer->version != QUIRE_FORMAT_VERSION) {
        return quire_fail(QUIRE_E_VERSION,
                          "%s has format version %u, this build reads version %u: load it with a newer Quire", path,
                          footer->version, QUIRE_FORMAT_VERSION);
    }
    return footer_sound(footer, file_bytes) ? QUIRE_OK : quire_fail(QUIRE_E_CORRUPT, "%s: the footer is damaged", path);
}

static int too_short(const char *path, uint64_t count) {
    return quire_fail(QUIRE_E_CORRUPT, "%s has %" PRIu64 " bytes, less than any image: it is truncated or no image",
                      path, count);
}

static int checksums_verify(const image_footer *footer, const void *checksums, const char *path) {
    return quire_crc32c(0, checksums, block_count(footer->body_bytes) * 4) == footer->blocks_crc
               ? QUIRE_OK
               : quire_fail(QUIRE_E_CORRUPT, "%s: the table of checksums is damaged", path);
}

/* Verifies count bytes of a body, from start, which is where a block begins, to its end or where another begins. known: of image. */
static int blocks_verify(const uint8_t *bytes, uint64_t start, uint64_t count, const uint8_t *checksums,
                         const uint64_t *known, const char *path) {
    for (uint64_t at = 0; at < count; at += BLOCK_BYTES) {
        size_t block_bytes = count - at < BLOCK_BYTES ? (size_t)(count - at) : BLOCK_BYTES;
        uint32_t expected;
        memcpy(&expected, checksums + (start + at) / BLOCK_BYTES * 4, 4);
        uint64_t before = known == NULL || block_bytes < BLOCK_BYTES ? 0 : known[(start + at) / BLOCK_BYTES];
        if ((before & KNOWN ? (uint32_t)before : quire_crc32c(0, bytes + at, block_bytes)) != expected) {
            return quire_fail(QUIRE_E_CORRUPT, "%s: bytes %" PRIu64 " to %" PRIu64 " fail their checksum", path,
                              start + at, start + at + block_bytes);
        }
    }
    return QUIRE_OK;
}

/* What a verified header says; page_bytes: what it must have, 0 for any. */
static int header_verify(const quire_header *header, uint64_t body_bytes, uint32_t page_bytes, const char *path,
                         quire_meta *meta) {
    *meta = header->meta[header->current & 1];
    if (memcmp(header->magic, QUIRE_MAGIC, 8) != 0 || header->crc != quire_crc32c(0, header, 32) ||
        meta->crc != quire_meta_crc(meta) || (uint64_t)meta->frame_limit * header->page_bytes != body_bytes ||
        header->page_bytes < QUIRE_PAGE_BYTES_MIN || header->page_bytes > QUIRE_PAGE_BYTES_MAX ||
        (header->page_bytes & (header->page_bytes - 1)) != 0) {
        return quire_fail(QUIRE_E_CORRUPT, "%s: the header is damaged", path);
    }
    if (page_bytes != 0 && header->page_bytes != page_bytes) {
        return quire_fail(QUIRE_E_MISMATCH, "%s has pages of %u bytes, the arena of %u: load it into an arena like it",
                          path, header->page_bytes, page_bytes);
    }
    return QUIRE_OK;
}

static int image_verify(image *from, uint32_t page_bytes) {
    image_footer footer;
    if (from->count < QUIRE_HEADER_BYTES + sizeof footer) {
        return too_short(from->path, from->count);
    }
    memcpy(&footer, from->bytes + from->count - sizeof footer, sizeof footer);
    QUIRE_TRY(footer_verify(&footer, from->count, from->path));
    const uint8_t *checksums = from->bytes + footer.body_bytes;
    QUIRE_TRY(checksums_verify(&footer, checksums, from->path));
    QUIRE_TRY(blocks_verify(from->bytes, 0, footer.body_bytes, checksums, from->known, from->path));
    return header_verify((const quire_header *)from->bytes, footer.body_bytes, page_bytes, from->path, &from->meta);
}

/* Makes the image's bytes a view, once they are verified. */
static int image_view(image *to, uint32_t page_bytes) {
    QUIRE_TRY(image_verify(to, page_bytes));
    size_t chunk_count = to->count / QUIRE_CHUNK_BYTES + 1;
    to->chunks = malloc(chunk_count * sizeof *to->chunks);
    if (to->chunks == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory to load %s", to->path);
    }
    for (size_t i = 0; i < chunk_count; i++) {
        to->chunks[i] = to->bytes + i * QUIRE_CHUNK_BYTES;
    }
    to->view = (quire_view){.chunks = to->chunks,
                            .frame_limit = to->meta.frame_limit,
                            .epoch = to->meta.epoch,
                            .page_shift = (uint8_t)__builtin_ctz(page_bytes),
                            .chunk_shift = (uint8_t)(__builtin_ctz(QUIRE_CHUNK_BYTES) - __builtin_ctz(page_bytes))};
    to->view.table[0] = to->meta.catalog;
    return QUIRE_OK;
}

static int image_open(image *to, const char *path, uint32_t page_bytes) {
    to->path = path;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    if (file < 0 || fstat(file, &info) != 0) {
        int rc =
            quire_fail(errno == ENOENT ? QUIRE_E_NOTFOUND : QUIRE_E_IO, "cannot open %s: %s", path, strerror(errno));
        if (file >= 0) {
            close(file);
        }
        return rc;
    }
    to->count = (size_t)info.st_size;
    uint8_t *bytes =
        to->count == 0 || !S_ISREG(info.st_mode) ? MAP_FAILED : mmap(NULL, to->count, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (bytes == MAP_FAILED) {
        return quire_fail(QUIRE_E_CORRUPT, "%s is empty or not a regular file", path);
    }
    to->bytes = bytes;
    return image_view(to, page_bytes);
}

static void image_close(image *from) {
    if (from->bytes != NULL) {
        munmap(from->bytes, from->count);
    }
    free(from->chunks);
}

/* Copies the page or subtree that *entry names in the image and makes *entry name the copy. */
static int entry_load(quire_arena *arena, const quire_view *view, uint64_t *entry, uint32_t level) {
    uint32_t source = QUIRE_ENTRY_FRAME(*entry);
    const void *bytes = source < view->frame_limit && level <= 8 ? quire_frame(view, source) : NULL;
    uint32_t frame = bytes == NULL ? 0 : quire_frame_alloc(arena);
    if (frame == 0) { /* a page named twice needs more frames than the image has */
        return quire_fail(QUIRE_E_CORRUPT, "the image's page tables make no sense");
    }
    arena->changed = true;
    arena->dirty_count++;
    *entry = (uint64_t)arena->epoch_writing << 32 | frame;
    quire_view live = quire_arena_view(arena);
    uint64_t *copy = (uint64_t *)quire_frame(&live, frame);
    memcpy(copy, bytes, arena->page_bytes);
    for (uint32_t i = 0; level > 0 && i < arena->page_bytes / 8; i++) {
        if ((uint32_t)copy[i] != 0) {
            QUIRE_TRY(entry_load(arena, view, &copy[i], level - 1));
        }
    }
    return QUIRE_OK;
}

typedef struct {
    quire_arena *arena;
    const image *from;
    bool only_check; /* that no name is taken */
} load_state;

static int load_set(void *context, const quire_catalog_entry *entry) {
    load_state *state = context;
    quire_arena *arena = state->arena;
    if (state->only_check) {
        return quire_set_exists(arena, entry->name)
                   ? quire_fail(QUIRE_E_EXISTS, "there is a set '%s' already: destroy it before loading %s",
                                entry->name, state->from->path)
                   : QUIRE_OK;
    }
    quire_set *set;
    QUIRE_TRY(quire_set_create(arena, entry->name, entry->kind, &set));
    for (unsigned which = 0; which < 2; which++) {
        quire_table table = entry->table[which];
        if ((uint32_t)table.root != 0) {
            QUIRE_TRY(entry_load(arena, &state->from->view, &table.root, table.depth));
        }
        set->view.table[which] = table;
        if (table.depth > arena->depth_max) {
            arena->depth_max = table.depth;
        }
    }
    return QUIRE_OK;
}

static int image_load(quire_arena *arena, const image *from) {
    load_state state = {arena, from, true};
    QUIRE_TRY(quire_catalog_each(&from->view, load_set, &state));
    QUIRE_TRY(quire_frames_reserve(arena, (uint64_t)from->meta.frame_limit + 8 * ((uint64_t)from->meta.set_count + 4)));
    /* Records carry the epochs of their last change: go past them, so that they read as older than what comes now. */
    QUIRE_TRY(quire_arena_seal(arena));
    if (arena->epoch_writing <= from->meta.epoch) {
        arena->epoch_writing = from->meta.epoch + 1;
    }
    state.only_check = false;
    return quire_catalog_each(&from->view, load_set, &state);
}

static int load_checked(quire_arena *arena) {
    return arena->read_only ? quire_fail(QUIRE_E_READONLY, "%s is open read-only", arena->path) : QUIRE_OK;
}

static int load_file(quire_arena *arena, const char *path) {
    QUIRE_TRY(load_checked(arena));
    image from = {0};
    int rc = image_open(&from, path, arena->page_bytes);
    if (rc == QUIRE_OK) {
        rc = image_load(arena, &from);
    }
    image_close(&from);
    return rc;
}

int quire_arena_load_file(quire_arena *arena, const char *path) {
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, load_file(arena, path));
}

static int load_bytes(quire_arena *arena, const void *bytes, size_t count, const char *name) {
    QUIRE_TRY(load_checked(arena));
    if ((uintptr_t)bytes % _Alignof(uint64_t) != 0) {
        return quire_fail(QUIRE_E_INVALID, "%s lies at %p in memory: an image must be aligned for its words", name,
                          bytes);
    }
    image from = {.path = name, .bytes = (uint8_t *)bytes, .count = count}; /* only read */
    int rc = image_view(&from, arena->page_bytes);
    if (rc == QUIRE_OK) {
        rc = image_load(arena, &from);
    }
    free(from.chunks);
    return rc;
}

int quire_arena_load(quire_arena *arena, const void *bytes, size_t count, const char *name) {
    QUIRE_TRY(quire_arena_enter(arena));
    return quire_arena_left(arena, load_bytes(arena, bytes, count, name));
}

/* ------------------------------------------------------------------------------------------------ becoming an arena */

struct quire_image {
    quire_arena *arena;
    uint8_t *bytes;
    uint64_t count;
    uint64_t *known;     /* of each whole block, see image */
    uint32_t page_bytes; /* that it must have; 0: any */
    char *name;
};

void quire_image_cancel(quire_image **image) {
    quire_image *ended = *image;
    *image = NULL;
    if (ended != NULL) {
        if (ended->arena != NULL) {
            quire_arena_free(ended->arena);
        }
        free(ended->known);
        free(ended->name);
        free(ended);
    }
}

int quire_image_begin(const quire_arena_options *options, uint64_t image_bytes, const char *name, quire_image **image) {
    if (options->path != NULL || options->read_only) {
        return quire_fail(QUIRE_E_INVALID, "an image becomes an arena in memory: give no path");
    }
    if (image_bytes < QUIRE_HEADER_BYTES + sizeof(image_footer)) {
        return too_short(name, image_bytes);
    }
    quire_image *begun = calloc(1, sizeof *begun);
    if (begun == NULL || (begun->name = strdup(name)) == NULL ||
        (begun->known = calloc(image_bytes / BLOCK_BYTES + 1, sizeof *begun->known)) == NULL) {
        quire_image_cancel(&begun);
        return quire_fail(QUIRE_E_NOMEM, "no memory to load %s", name);
    }
    begun->count = image_bytes;
    begun->page_bytes = options->page_bytes;
    int rc = quire_arena_new(options, &begun->arena);
    if (rc == QUIRE_OK) {
        rc = quire_arena_room(begun->arena, image_bytes, &begun->bytes);
    }
    if (rc != QUIRE_OK) {
        quire_image_cancel(&begun);
        return rc;
    }
    *image = begun;
    return QUIRE_OK;
}

uint8_t *quire_image_room(quire_image *image) {
    return image->bytes;
}

int quire_image_filled(quire_image *image, uint64_t start, uint64_t count) {
    if (start > image->count || count > image->count - start) {
        return quire_fail(QUIRE_E_INVALID, "bytes %" PRIu64 " to %" PRIu64 " of an image of %" PRIu64 " bytes", start,
                          start + count, image->count);
    }
    /* What is not a whole block of the stretch is left to the end, and so is the body's last, if it is shorter. */
    uint64_t end = (start + count) / BLOCK_BYTES;
    for (uint64_t block = block_count(start); block < end; block++) {
        image->known[block] = KNOWN | quire_crc32c(0, image->bytes + block * BLOCK_BYTES, BLOCK_BYTES);
    }
    return QUIRE_OK;
}

int quire_image_end(quire_image **image, quire_arena **arena) {
    quire_image *ended = *image;
    struct image from = {.path = ended->name, .bytes = ended->bytes, .count = ended->count, .known = ended->known};
    int rc = image_verify(&from, ended->page_bytes);
    if (rc == QUIRE_OK) {
        rc = quire_arena_take(ended->arena, ((const quire_header *)ended->bytes)->page_bytes, &from.meta);
    }
    if (rc == QUIRE_OK) {
        *arena = ended->arena;
        ended->arena = NULL;
    }
    quire_image_cancel(image);
    return rc;
}

/* ------------------------------------------------------------------------------------------------ mapping */

static int bytes_read(const quire_mapped *mapped, void *to, uint64_t count, uint64_t offset) {
    for (uint64_t done = 0; done < count;) {
        ssize_t got = pread(mapped->file, (uint8_t *)to + done, count - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return got < 0 ? quire_fail(QUIRE_E_IO, "cannot read %s: %s", mapped->path, strerror(errno))
                           : quire_fail(QUIRE_E_CORRUPT, "%s is truncated", mapped->path);
        }
        done += (uint64_t)got;
    }
    return QUIRE_OK;
}

static int chunk_verify(const quire_mapped *mapped, uint32_t chunk, const uint8_t *bytes) {
    uint64_t start = (uint64_t)chunk * QUIRE_CHUNK_BYTES, left = mapped->body_bytes - start;
    return blocks_verify(bytes, start, left < QUIRE_CHUNK_BYTES ? left : QUIRE_CHUNK_BYTES,
                         (const uint8_t *)mapped->checksums, NULL, mapped->path);
}

int quire_mapped_chunk(quire_mapped *mapped, uint32_t chunk, uint8_t *base) {
    int rc = QUIRE_OK;
    if (mmap(base, QUIRE_CHUNK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, mapped->file,
             (off_t)chunk * QUIRE_CHUNK_BYTES) == MAP_FAILED) {
        rc = quire_fail(QUIRE_E_NOMEM, "cannot map %u bytes of %s: %s", QUIRE_CHUNK_BYTES, mapped->path,
                        strerror(errno));
    } else {
        rc = chunk_verify(mapped, chunk, base);
    }
    if (rc != QUIRE_OK) {
        (void)mmap(base, QUIRE_CHUNK_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        quire_blame();
        if (mapped->failure == NULL) {
            __atomic_store_n(&mapped->failure, strdup(quire_error_message()), __ATOMIC_RELEASE);
        }
    }
    return rc;
}

int quire_view_whole(const quire_view *view) {
    QUIRE_TRY(quire_weak_failure(view));
    const quire_mapped *mapped = view->arena == NULL ? NULL : view->arena->mapped;
    const char *failure = mapped == NULL ? NULL : __atomic_load_n(&mapped->failure, __ATOMIC_ACQUIRE);
    return failure == NULL ? QUIRE_OK : quire_fail(QUIRE_E_CORRUPT, "%s", failure);
}

void quire_mapped_close(quire_mapped *mapped) {
    if (mapped != NULL) {
        if (mapped->file >= 0) {
            close(mapped->file);
        }
        free(mapped->path);
        free(mapped->checksums);
        free(mapped->failure);
        free(mapped);
    }
}

/* Opens the file and reads what tells of the rest. */
static int mapped_open(quire_mapped *mapped, const char *path) {
    struct stat info;
    image_footer footer;
    mapped->path = strdup(path);
    mapped->file = open(path, O_RDONLY | O_CLOEXEC);
    if (mapped->path == NULL || mapped->file < 0 || fstat(mapped->file, &info) != 0) {
        return mapped->path == NULL ? quire_fail(QUIRE_E_NOMEM, "no memory for a path")
                                    : quire_fail(errno == ENOENT ? QUIRE_E_NOTFOUND : QUIRE_E_IO, "cannot open %s: %s",
                                                 path, strerror(errno));
    }
    uint64_t count = (uint64_t)info.st_size;
    if (!S_ISREG(info.st_mode) || count < QUIRE_HEADER_BYTES + sizeof footer) {
        return too_short(path, S_ISREG(info.st_mode) ? count : 0);
    }
    QUIRE_TRY(bytes_read(mapped, &footer, sizeof footer, count - sizeof footer));
    QUIRE_TRY(footer_verify(&footer, count, path));
    mapped->body_bytes = footer.body_bytes;
    mapped->chunk_limit = (uint32_t)((footer.body_bytes + QUIRE_CHUNK_BYTES - 1) / QUIRE_CHUNK_BYTES);
    uint64_t checksum_bytes = block_count(footer.body_bytes) * 4;
    mapped->checksums = malloc(checksum_bytes);
    if (mapped->checksums == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory for the checksums of %s", path);
    }
    QUIRE_TRY(bytes_read(mapped, mapped->checksums, checksum_bytes, footer.body_bytes));
    return checksums_verify(&footer, mapped->checksums, path);
}

/* The first chunk, whose header is written to, and the last, behind which the arena grows, are memory of its own. */
static int chunk_read(quire_arena *arena, const quire_mapped *mapped, uint32_t chunk) {
    uint64_t start = (uint64_t)chunk * QUIRE_CHUNK_BYTES, left = mapped->body_bytes - start;
    uint8_t *base = arena->chunks[chunk];
    QUIRE_TRY(bytes_read(mapped, base, left < QUIRE_CHUNK_BYTES ? left : QUIRE_CHUNK_BYTES, start));
    return chunk_verify(mapped, chunk, base);
}

static int image_map(quire_arena *arena, uint32_t page_bytes, const char *path) {
    quire_mapped *mapped = calloc(1, sizeof *mapped);
    if (mapped == NULL) {
        return quire_fail(QUIRE_E_NOMEM, "no memory to map %s", path);
    }
    mapped->file = -1;
    arena->mapped = mapped; /* which closes it, whatever happens; no chunk is the file's before its limit is known */
    QUIRE_TRY(mapped_open(mapped, path));
    uint32_t chunk_limit = mapped->chunk_limit;
    mapped->chunk_limit = 0;
    QUIRE_TRY(quire_arena_ends(arena, chunk_limit));
    mapped->chunk_limit = chunk_limit;
    QUIRE_TRY(chunk_read(arena, mapped, 0));
    if (chunk_limit > 1) {
        QUIRE_TRY(chunk_read(arena, mapped, chunk_limit - 1));
    }
    const quire_header *header = (const quire_header *)arena->chunks[0];
    quire_meta meta;
    QUIRE_TRY(header_verify(header, mapped->body_bytes, page_bytes, path, &meta));
    return quire_arena_take(arena, header->page_bytes, &meta);
}

int quire_image_map(const quire_arena_options *options, const char *path, quire_arena **arena) {
    if (options->path != NULL || options->read_only) {
        return quire_fail(QUIRE_E_INVALID, "an image becomes an arena in memory: give no path");
    }
    quire_arena *made;
    QUIRE_TRY(quire_arena_new(options, &made));
    int rc = image_map(made, options->page_bytes, path);
    if (rc != QUIRE_OK) {
        quire_arena_free(made);
        return rc;
    }
    *arena = made;
    return QUIRE_OK;
}
