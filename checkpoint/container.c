/* container.c -- headers and frames of checkpoint files, to bytes and back.
 *
 * Purpose     See container.h.
 * Layout      container.h.
 * Invariants  I1 what decode accepts, encode has written, or something with the same fields and checksums.
 * Ownership   The caller's memory throughout.
 * Threads     No state.
 * Errors      The message says what was found; the caller adds the file's name.
 */
#include "container.h"

#include <inttypes.h>
#include <string.h>

#include "../pagemgr/internal.h"

#define FILE_MAGIC   "QUIRECKP"
#define FILE_VERSION 1u
#define FRAME_MAGIC  0x4D524651u /* "QFRM" */

typedef struct {
    char magic[8];
    uint32_t version;
    uint32_t header_bytes;
    uint32_t kind;
    uint32_t flags;
    uint64_t state_version;
    uint64_t parent_version;
    uint64_t operator_id;
    uint32_t partition_id;
    uint32_t page_bytes;
    uint16_t text_bytes[4];
} file_header;
_Static_assert(sizeof(file_header) == 64, "file header");
_Static_assert(QUIRE_FILE_HEADER_BYTES_MIN == sizeof(file_header) + 8, "file header with nothing in it");

typedef struct {
    uint32_t magic;
    uint32_t kind;
    uint32_t raw_bytes;
    uint32_t stored_bytes;
    uint32_t stored_crc;
    uint32_t crc;
} frame_header;
_Static_assert(sizeof(frame_header) == QUIRE_FRAME_HEADER_BYTES, "frame header");

static const quire_text *header_text(const quire_file_header *header, unsigned which) {
    const quire_text *texts[] = {&header->store_name, &header->id, &header->parent_id, &header->codec};
    return texts[which];
}

int quire_file_header_bytes(const quire_file_header *header) {
    size_t count = sizeof(file_header) + 4;
    for (unsigned i = 0; i < 4; i++) {
        count += header_text(header, i)->count;
    }
    count = (count + 7) & ~(size_t)7;
    if (count > QUIRE_FILE_HEADER_BYTES_MAX) {
        return quire_fail(QUIRE_E_INVALID,
                          "the names in a checkpoint file's header take %zu bytes; at most %u are allowed", count,
                          QUIRE_FILE_HEADER_BYTES_MAX);
    }
    return (int)count;
}

int quire_file_header_encode(const quire_file_header *header, uint8_t *bytes, size_t capacity) {
    int count = quire_file_header_bytes(header);
    if (count < 0) {
        return count;
    }
    if (capacity < (size_t)count) {
        return quire_fail(QUIRE_E_INVALID, "a checkpoint file's header needs %d bytes, there are %zu", count, capacity);
    }
    memset(bytes, 0, (size_t)count);
    file_header fixed = {.version = FILE_VERSION,
                         .header_bytes = (uint32_t)count,
                         .kind = header->kind,
                         .flags = header->flags,
                         .state_version = header->version,
                         .parent_version = header->parent_version,
                         .operator_id = header->operator_id,
                         .partition_id = header->partition_id,
                         .page_bytes = header->page_bytes};
    memcpy(fixed.magic, FILE_MAGIC, 8);
    size_t at = sizeof fixed;
    for (unsigned i = 0; i < 4; i++) {
        const quire_text *text = header_text(header, i);
        fixed.text_bytes[i] = (uint16_t)text->count;
        if (text->count != 0) {
            memcpy(bytes + at, text->bytes, text->count);
        }
        at += text->count;
    }
    memcpy(bytes, &fixed, sizeof fixed);
    uint32_t crc = quire_crc32c(0, bytes, (size_t)count - 4);
    memcpy(bytes + count - 4, &crc, 4);
    return QUIRE_OK;
}

int quire_file_header_peek(const uint8_t *bytes, size_t count) {
    file_header fixed;
    if (count < QUIRE_FILE_HEADER_BYTES_MIN) {
        return quire_fail(QUIRE_E_CORRUPT, "it has %zu bytes, less than the header of a checkpoint file", count);
    }
    memcpy(&fixed, bytes, sizeof fixed);
    if (memcmp(fixed.magic, FILE_MAGIC, 8) != 0) {
        return quire_fail(QUIRE_E_CORRUPT, "it does not begin as a checkpoint file does");
    }
    if (fixed.version != FILE_VERSION) {
        return quire_fail(QUIRE_E_VERSION,
                          "it has format version %" PRIu32 ", this build reads version %u: use a newer Quire",
                          fixed.version, FILE_VERSION);
    }
    if (fixed.header_bytes < QUIRE_FILE_HEADER_BYTES_MIN || fixed.header_bytes > QUIRE_FILE_HEADER_BYTES_MAX ||
        fixed.header_bytes % 8 != 0) {
        return quire_fail(QUIRE_E_CORRUPT, "its header is said to have %" PRIu32 " bytes", fixed.header_bytes);
    }
    return (int)fixed.header_bytes;
}

int quire_file_header_decode(const uint8_t *bytes, size_t count, quire_file_header *header) {
    int header_bytes = quire_file_header_peek(bytes, count);
    if (header_bytes < 0) {
        return header_bytes;
    }
    uint32_t crc;
    file_header fixed;
    memcpy(&fixed, bytes, sizeof fixed);
    if ((size_t)header_bytes > count) {
        return quire_fail(QUIRE_E_CORRUPT, "it ends within its header");
    }
    memcpy(&crc, bytes + header_bytes - 4, 4);
    if (crc != quire_crc32c(0, bytes, (size_t)header_bytes - 4)) {
        return quire_fail(QUIRE_E_CORRUPT, "its header fails its checksum");
    }
    size_t at = sizeof fixed, end = (size_t)header_bytes - 4;
    quire_text texts[4];
    for (unsigned i = 0; i < 4; i++) {
        if (fixed.text_bytes[i] > end - at) {
            return quire_fail(QUIRE_E_CORRUPT, "the names in its header do not fit in it");
        }
        texts[i] = (quire_text){(const char *)bytes + at, fixed.text_bytes[i]};
        at += fixed.text_bytes[i];
    }
    if ((fixed.flags & ~QUIRE_FILE_ROW_CHECKSUMS) != 0) {
        return quire_fail(QUIRE_E_VERSION, "it has flags %" PRIx32 ", this build knows %x: use a newer Quire",
                          fixed.flags, QUIRE_FILE_ROW_CHECKSUMS);
    }
    if (fixed.kind < QUIRE_FILE_DELTA || fixed.kind > QUIRE_FILE_PART) {
        return quire_fail(QUIRE_E_CORRUPT, "its kind is %" PRIu32 "; 1 (delta) to 5 (part) are known", fixed.kind);
    }
    *header = (quire_file_header){.kind = (quire_file_kind)fixed.kind,
                                  .version = fixed.state_version,
                                  .parent_version = fixed.parent_version,
                                  .operator_id = fixed.operator_id,
                                  .partition_id = fixed.partition_id,
                                  .page_bytes = fixed.page_bytes,
                                  .flags = fixed.flags,
                                  .store_name = texts[0],
                                  .id = texts[1],
                                  .parent_id = texts[2],
                                  .codec = texts[3]};
    return QUIRE_OK;
}

int quire_frame_encode(quire_frame_kind kind, uint32_t raw_bytes, const uint8_t *stored, size_t stored_bytes,
                       uint8_t bytes[QUIRE_FRAME_HEADER_BYTES]) {
    if (raw_bytes > QUIRE_FRAME_BYTES_MAX || stored_bytes > QUIRE_FRAME_BYTES_MAX) {
        return quire_fail(QUIRE_E_INVALID, "a frame of %" PRIu32 " bytes, %zu stored; at most %u are allowed",
                          raw_bytes, stored_bytes, QUIRE_FRAME_BYTES_MAX);
    }
    frame_header frame = {.magic = FRAME_MAGIC,
                          .kind = kind,
                          .raw_bytes = raw_bytes,
                          .stored_bytes = (uint32_t)stored_bytes,
                          .stored_crc = quire_crc32c(0, stored, stored_bytes)};
    frame.crc = quire_crc32c(0, &frame, offsetof(frame_header, crc));
    memcpy(bytes, &frame, sizeof frame);
    return QUIRE_OK;
}

int quire_frame_decode(const uint8_t bytes[QUIRE_FRAME_HEADER_BYTES], quire_frame_header *frame) {
    frame_header fixed;
    memcpy(&fixed, bytes, sizeof fixed);
    if (fixed.magic != FRAME_MAGIC || fixed.crc != quire_crc32c(0, &fixed, offsetof(frame_header, crc)) ||
        fixed.kind < QUIRE_FRAME_RECORDS || fixed.kind > QUIRE_FRAME_PARTS || fixed.raw_bytes > QUIRE_FRAME_BYTES_MAX ||
        fixed.stored_bytes > QUIRE_FRAME_BYTES_MAX) {
        return quire_fail(QUIRE_E_CORRUPT, "the header of a frame is damaged");
    }
    *frame = (quire_frame_header){(quire_frame_kind)fixed.kind, fixed.raw_bytes, fixed.stored_bytes, fixed.stored_crc};
    return QUIRE_OK;
}

int quire_frame_verify(const quire_frame_header *frame, const uint8_t *stored) {
    return quire_crc32c(0, stored, frame->stored_bytes) == frame->crc
               ? QUIRE_OK
               : quire_fail(QUIRE_E_CORRUPT, "a frame of %" PRIu32 " bytes fails its checksum", frame->stored_bytes);
}

void quire_file_end_encode(const quire_file_end *end, uint8_t bytes[QUIRE_FRAME_END_BYTES]) {
    uint64_t words[4] = {end->frames, end->raw_bytes, end->keys, end->since};
    memcpy(bytes, words, sizeof words);
}

int quire_file_end_decode(const uint8_t *bytes, size_t count, quire_file_end *end) {
    uint64_t words[4];
    if (count != sizeof words) {
        return quire_fail(QUIRE_E_CORRUPT, "the end frame has %zu bytes, not %zu", count, sizeof words);
    }
    memcpy(words, bytes, sizeof words);
    *end = (quire_file_end){words[0], words[1], words[2], words[3]};
    return QUIRE_OK;
}
