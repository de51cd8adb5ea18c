/* xxhash32.c -- see xxhash32.h, which also says what is to be said of Purpose, Layout, Invariants, Ownership, Threads
 * and Errors. */
#include "xxhash32.h"

#include <string.h>

#define PRIME_1 0x9E3779B1u
#define PRIME_2 0x85EBCA77u
#define PRIME_3 0xC2B2AE3Du
#define PRIME_4 0x27D4EB2Fu
#define PRIME_5 0x165667B1u

static uint32_t rotate(uint32_t value, unsigned bits) {
    return value << bits | value >> (32 - bits);
}

static uint32_t word_at(const uint8_t *bytes) {
    uint32_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

uint32_t quire_xxhash32(uint32_t seed, const uint8_t *bytes, size_t count) {
    const uint8_t *end = bytes + count;
    uint32_t hash = seed + PRIME_5;
    if (count >= 16) {
        uint32_t lanes[4] = {seed + PRIME_1 + PRIME_2, seed + PRIME_2, seed, seed - PRIME_1};
        for (; end - bytes >= 16; bytes += 16) {
            for (unsigned i = 0; i < 4; i++) {
                lanes[i] = rotate(lanes[i] + word_at(bytes + 4 * i) * PRIME_2, 13) * PRIME_1;
            }
        }
        hash = rotate(lanes[0], 1) + rotate(lanes[1], 7) + rotate(lanes[2], 12) + rotate(lanes[3], 18);
    }
    hash += (uint32_t)count;
    for (; end - bytes >= 4; bytes += 4) {
        hash = rotate(hash + word_at(bytes) * PRIME_3, 17) * PRIME_4;
    }
    for (; bytes < end; bytes++) {
        hash = rotate(hash + *bytes * PRIME_5, 11) * PRIME_1;
    }
    hash = (hash ^ hash >> 15) * PRIME_2;
    hash = (hash ^ hash >> 13) * PRIME_3;
    return hash ^ hash >> 16;
}
