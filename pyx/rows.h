/* Loops over gradient rows in C, because only C gives one function per instruction set: the Cython around them is
   compiled for any machine of its kind, and the best set that this machine has is chosen when it runs. */
#ifndef PENSTOCK_ROWS_H
#define PENSTOCK_ROWS_H

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

#define ISA(name) name##_any
#include "rows_body.h"
#undef ISA

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC push_options
#pragma GCC target("avx2")
#define ISA(name) name##_avx2
#include "rows_body.h"
#undef ISA
#pragma GCC pop_options
#define BEST(name) (__builtin_cpu_supports("avx2") ? name##_avx2 : name##_any)
#else
#define BEST(name) name##_any
#endif

/* sums[order[k]] += rows[k], or a copy to sums[~order[k]] where the id is new; in order. Returns whether any value of
   rows is not finite: it has been added then as well. */
static int fold_rows_f32(float *sums, long dim, const int64_t *order, const float *const *rows, long n) {
    return BEST(fold_rows_f32)(sums, dim, order, rows, n);
}

static int fold_rows_f64(double *sums, long dim, const int64_t *order, const double *const *rows, long n) {
    return BEST(fold_rows_f64)(sums, dim, order, rows, n);
}

/* Whether any value of n rows, stride bytes apart, or of those that are listed, is not finite. */
static int odd_rows_f32(const char *rows, long stride, const int64_t *which, long n, long dim) {
    return BEST(odd_rows_f32)(rows, stride, which, n, dim);
}

static int odd_rows_f64(const char *rows, long stride, const int64_t *which, long n, long dim) {
    return BEST(odd_rows_f64)(rows, stride, which, n, dim);
}

#endif
