/* What the loops over ids and gradient rows share: neighbouring columns side by side, and the instruction sets. */
#ifndef PENSTOCK_VECTORS_H
#define PENSTOCK_VECTORS_H

#include <stdint.h>
#include <stddef.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define PENSTOCK_X86
#endif

/* The instruction sets that the loops are compiled for, the least first; bits do not depend on the set. */
enum { BASELINE, AVX2, AVX512 };

static inline int best_isa(void) {
#ifdef PENSTOCK_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) return AVX512;
    if (__builtin_cpu_supports("avx2")) return AVX2;
#endif
    return BASELINE;
}

/* Call the function of a set that this machine has. */
#ifdef PENSTOCK_X86
#define CALL_BEST(isa, name, ...) \
    ((isa) == AVX512 ? name##_avx512(__VA_ARGS__) : (isa) == AVX2 ? name##_avx2(__VA_ARGS__) : name##_any(__VA_ARGS__))
#else
#define CALL_BEST(isa, name, ...) ((void)(isa), name##_any(__VA_ARGS__))
#endif

enum {
    MOST_AHEAD = 64, /* rows that a loop is given beyond those that it folds, to ask for their memory */
    SUMS_AHEAD = 40  /* sums whose memory is asked for before it is needed: no cache holds those of a large table */
};

/* Gradients are read once, in the order in which they lie but for the rows of other parts. The processor's prefetcher
   stops at every page and starts anew, so what comes BYTES_AHEAD is asked for by hand, and into the first-level cache:
   the hint that passes by the caches halves the speed (docs/decisions/sums.md). */
#define BYTES_AHEAD 5120

static inline __attribute__((always_inline)) long rows_in_bytes_ahead(size_t row_bytes) {
    long rows = BYTES_AHEAD / row_bytes;
    return rows < 4 ? 4 : rows > MOST_AHEAD ? MOST_AHEAD : rows;
}

static inline __attribute__((always_inline)) void fetch_for_read(const void *from, size_t num_bytes) {
    for (size_t offset = 0; offset < num_bytes && offset < 512; offset += 64)
        __builtin_prefetch((const char *)from + offset);
}

static inline __attribute__((always_inline)) void fetch_for_write(const void *from, size_t num_bytes) {
    /* Four lines: what is longer is found by the machine's own prefetcher. */
    for (size_t offset = 0; offset < num_bytes && offset < 256; offset += 64)
        __builtin_prefetch((const char *)from + offset, 1);
}

#endif
