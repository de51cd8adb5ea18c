/* crc32c.c -- CRC-32C (Castagnoli), by the processor's instruction where it has one.
 *
 * Purpose     Checksums of headers, image blocks and checkpoint blocks.
 * Layout      polynomial 0x1EDC6F41 reflected; a checksum starts at 0 and may be continued by passing the last result.
 * Invariants  I1 both implementations give the same result.
 * Ownership   none.    Threads  pure.    Errors  none.
 */
#include "internal.h"

#include <string.h>

static uint32_t table_step(uint32_t crc, const uint8_t *bytes, size_t count) {
    static uint32_t table[256];
    static uint32_t ready;
    if (!__atomic_load_n(&ready, __ATOMIC_ACQUIRE)) {
        /* Racing threads compute the same numbers; relaxed stores keep that well defined. */
        for (uint32_t i = 0; i < 256; i++) {
            uint32_t value = i;
            for (int bit = 0; bit < 8; bit++) {
                value = value & 1 ? value >> 1 ^ 0x82F63B78u : value >> 1;
            }
            __atomic_store_n(&table[i], value, __ATOMIC_RELAXED);
        }
        __atomic_store_n(&ready, 1, __ATOMIC_RELEASE);
    }
    for (size_t i = 0; i < count; i++) {
        crc = crc >> 8 ^ __atomic_load_n(&table[(crc ^ bytes[i]) & 0xFF], __ATOMIC_RELAXED);
    }
    return crc;
}

#if defined(__x86_64__)
#include <nmmintrin.h>
__attribute__((target("sse4.2"))) static uint32_t hardware_step(uint32_t crc, const uint8_t *bytes, size_t count) {
    uint64_t wide = crc;
    for (; count >= 8; count -= 8, bytes += 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    crc = (uint32_t)wide;
    for (; count > 0; count--, bytes++) {
        crc = _mm_crc32_u8(crc, *bytes);
    }
    return crc;
}
static bool hardware_has(void) {
    return __builtin_cpu_supports("sse4.2");
}
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
static uint32_t hardware_step(uint32_t crc, const uint8_t *bytes, size_t count) {
    for (; count >= 8; count -= 8, bytes += 8) {
        uint64_t word;
        memcpy(&word, bytes, 8);
        crc = __crc32cd(crc, word);
    }
    for (; count > 0; count--, bytes++) {
        crc = __crc32cb(crc, *bytes);
    }
    return crc;
}
static bool hardware_has(void) {
    return true;
}
#else
#define hardware_step table_step
static bool hardware_has(void) {
    return false;
}
#endif

uint32_t quire_crc32c(uint32_t crc, const void *bytes, size_t count) {
    return ~(hardware_has() ? hardware_step(~crc, bytes, count) : table_step(~crc, bytes, count));
}
