/* Loops over gradient rows that are multiplied on the way; beside rows.h, and chosen by machine like those. */
#ifndef PENSTOCK_GAINED_ROWS_H
#define PENSTOCK_GAINED_ROWS_H

#include "vectors.h"

#define ISA(name) name##_any
#include "scaled_row_kernels_body.h"
#undef ISA

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC push_options
#pragma GCC target("avx2")
#define ISA(name) name##_avx2
#include "scaled_row_kernels_body.h"
#undef ISA
#pragma GCC pop_options
#endif

/* sums[order[k]] += gains[k] * rows[k], or a copy of the product to sums[~order[k]] where the id is new; in order.
   Returns whether any product is not finite: it has been added then as well. */
static int fold_gained_f32(float *sums, long dim, const int64_t *order, const float *const *rows, const float *gains,
                           long n) {
    return BEST(fold_gained)(sums, dim, order, rows, gains, n);
}

/* Whether any product of n rows, stride bytes apart, or of those that are listed, with their gains is not finite. */
static int odd_gained_f32(const char *rows, long stride, const int64_t *which, const float *gains, long n, long dim) {
    return BEST(odd_gained)(rows, stride, which, gains, n, dim);
}

#endif
