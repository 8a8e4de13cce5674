/* What the loops over gradient rows share: neighbouring columns side by side, and the best instruction set there is. */
#ifndef PENSTOCK_VECTORS_H
#define PENSTOCK_VECTORS_H

#include <stdint.h>
#include <stddef.h>

/* Unaligned, and of any type: rows lie in Arrow's memory, where a float is aligned to 4 bytes and no more. */
typedef float floats8_t __attribute__((vector_size(32), aligned(4), may_alias));
typedef float floats4_t __attribute__((vector_size(16), aligned(4), may_alias));
typedef double doubles4_t __attribute__((vector_size(32), aligned(8), may_alias));
typedef double doubles2_t __attribute__((vector_size(16), aligned(8), may_alias));
typedef int32_t bits8_t __attribute__((vector_size(32)));
typedef int32_t bits4_t __attribute__((vector_size(16)));
typedef int64_t longs4_t __attribute__((vector_size(32)));
typedef int64_t longs2_t __attribute__((vector_size(16)));

#define ROWS_AHEAD 16 /* sums whose memory is asked for before it is needed: no cache holds those of a large table */

/* Gradients are read once, in the order in which they lie but for the rows of other parts. The processor's prefetcher
   stops at every page and starts anew, so what comes BYTES_AHEAD is asked for by hand, and into the first-level cache:
   the hint that passes by the caches halves the speed (docs/decisions/gradient_prefetch.md). */
#define BYTES_AHEAD 2048

static inline __attribute__((always_inline)) long rows_in_bytes_ahead(size_t row_bytes) {
    long rows = BYTES_AHEAD / row_bytes;
    return rows < 4 ? 4 : rows > 64 ? 64 : rows;
}

static inline __attribute__((always_inline)) void fetch_for_read(const void *from, size_t num_bytes) {
    for (size_t at = 0; at < num_bytes && at < 512; at += 64)
        __builtin_prefetch((const char *)from + at);
}

static inline __attribute__((always_inline)) void fetch_for_write(const void *from, size_t num_bytes) {
    /* Four lines: what is longer is found by the machine's own prefetcher. */
    for (size_t at = 0; at < num_bytes && at < 256; at += 64)
        __builtin_prefetch((const char *)from + at, 1);
}

/* The function of the best set that this machine has; both are made of one body. */
#if defined(__x86_64__) && defined(__GNUC__)
#define BEST(name) (__builtin_cpu_supports("avx2") ? name##_avx2 : name##_any)
#else
#define BEST(name) name##_any
#endif

#endif
