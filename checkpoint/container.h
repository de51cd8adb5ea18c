/* container.h -- the file that every checkpoint of a store is written in.
 *
 * Purpose     One format for deltas and bases, told from anything else by its first bytes and from a damaged one by its checksums.
 *             Storage and compression are the caller's: these functions turn fields into bytes and back.
 *
 * Layout      docs/format.md, section "Checkpoint files". header, frames, end frame; nothing after it. Little endian.
 *             header  0  8  magic "QUIRECKP"          40  8  operator id
 *                     8  4  format version (1)         48  4  partition id
 *                     12 4  header_bytes               52  4  page_bytes (bases; 0 in deltas)
 *                     16 4  kind (quire_file_kind)     56  2  bytes of store name    58  2  of id
 *                     20 4  flags (QUIRE_FILE_...)     60  2  of parent id           62  2  of codec
 *                     24 8  version                    64     the four strings, zeros up to header_bytes - 4
 *                     32 8  parent version             header_bytes - 4  4  crc32c of all before
 *             frame   0  4  magic "QFRM"    4  4  kind (quire_frame_kind)   8  4  raw_bytes   12 4  stored_bytes
 *                     16 4  crc32c of the stored bytes   20 4  crc32c of bytes 0..19   24  stored bytes
 *             end     a frame whose stored bytes are u64 frames before it, u64 their raw bytes, u64 keys in the state, u64 since (logs; else 0)
 *
 * Invariants  I1 header_bytes is a multiple of 8.   I2 the same fields give the same bytes.
 * Ownership   Everything is the caller's memory; strings of a decoded header point into the header's bytes.
 * Threads     No state: any.
 * Errors      QUIRE_E_CORRUPT for bytes that cannot be right, QUIRE_E_VERSION for a file of a later format.
 */
#ifndef QUIRE_CONTAINER_H
#define QUIRE_CONTAINER_H

#include "../pagemgr/pagemgr.h"

#define QUIRE_FILE_HEADER_BYTES_MIN 72u
#define QUIRE_FILE_HEADER_BYTES_MAX 4096u
#define QUIRE_FRAME_HEADER_BYTES    24u
#define QUIRE_FRAME_END_BYTES       32u
#define QUIRE_FRAME_BYTES_MAX       (1u << 30)

typedef enum {
    QUIRE_FILE_DELTA = 1, /* what changed, as records (delta.h) */
    QUIRE_FILE_BASE = 2,  /* a whole state: an image, or the names of its parts */
    QUIRE_FILE_PAGES = 3, /* what changed, as pages (pages.h) */
    QUIRE_FILE_LOG = 4,   /* what changed and what was written again, as records (cec.h) */
    QUIRE_FILE_PART = 5,  /* a part of a base's image */
} quire_file_kind;
#define QUIRE_FILE_ROW_CHECKSUMS 1u /* each value has four more bytes: the checksum of its key and itself */
typedef enum {
    QUIRE_FRAME_RECORDS = 1,
    QUIRE_FRAME_IMAGE = 2,
    QUIRE_FRAME_END = 3,
    QUIRE_FRAME_PAGES = 4,
    QUIRE_FRAME_PARTS = 5,
} quire_frame_kind;

typedef struct {
    const char *bytes; /* not terminated */
    size_t count;
} quire_text;

typedef struct {
    quire_file_kind kind;
    uint64_t version;
    uint64_t parent_version;
    uint64_t operator_id;
    uint32_t partition_id;
    uint32_t page_bytes;
    uint32_t flags;
    quire_text store_name, id, parent_id, codec;
} quire_file_header;

/* Bytes the header will take, or a negative code. */
int quire_file_header_bytes(const quire_file_header *header);
int quire_file_header_encode(const quire_file_header *header, uint8_t *bytes, size_t capacity);
/* How many bytes the header has that begins with these QUIRE_FILE_HEADER_BYTES_MIN; or a negative code. */
int quire_file_header_peek(const uint8_t *bytes, size_t count);
int quire_file_header_decode(const uint8_t *bytes, size_t count, quire_file_header *header);

typedef struct {
    quire_frame_kind kind;
    uint32_t raw_bytes;
    uint32_t stored_bytes;
    uint32_t crc; /* of the stored bytes */
} quire_frame_header;
int quire_frame_encode(quire_frame_kind kind, uint32_t raw_bytes, const uint8_t *stored, size_t stored_bytes,
                       uint8_t bytes[QUIRE_FRAME_HEADER_BYTES]);
int quire_frame_decode(const uint8_t bytes[QUIRE_FRAME_HEADER_BYTES], quire_frame_header *frame);
int quire_frame_verify(const quire_frame_header *frame, const uint8_t *stored);

typedef struct {
    uint64_t frames;
    uint64_t raw_bytes;
    uint64_t keys;
    uint64_t since; /* of a log: the oldest version that holds the newest trace of a live key; else 0 */
} quire_file_end;
void quire_file_end_encode(const quire_file_end *end, uint8_t bytes[QUIRE_FRAME_END_BYTES]);
int quire_file_end_decode(const uint8_t *bytes, size_t count, quire_file_end *end);

#endif
