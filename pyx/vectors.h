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
