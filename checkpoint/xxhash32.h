/* xxhash32.h -- XXH32, the checksum in the lz4 streams that the JVM reads and writes (checkpoint/codecs.py).
 *
 * Purpose     Spark's lz4 library refuses a block without it, and Python would compute it for longer than all else takes.
 * Layout      The published XXH32: four lanes over stripes of 16 bytes, the rest word by word, then byte by byte.
 * Invariants  None; the bytes are read once.
 * Ownership   Nothing is kept.
 * Threads     Any.
 * Errors      None.
 */
#ifndef QUIRE_XXHASH32_H
#define QUIRE_XXHASH32_H

#include <stddef.h>
#include <stdint.h>

uint32_t quire_xxhash32(uint32_t seed, const uint8_t *bytes, size_t count);

#endif
