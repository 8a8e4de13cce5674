/* Loops over gradient rows in C, because only C gives one function per instruction set: the Cython around them is
   compiled for any machine of its kind, and the best set that this machine has is chosen when it runs. */
#ifndef PENSTOCK_ROWS_H
#define PENSTOCK_ROWS_H

#include "vectors.h"

#define ISA(name) name##_any
#include "row_kernels_body.h"
#undef ISA

#if defined(__x86_64__) && defined(__GNUC__)
#pragma GCC push_options
#pragma GCC target("avx2")
#define ISA(name) name##_avx2
#include "row_kernels_body.h"
#undef ISA
#pragma GCC pop_options
#endif

/* sums[order[k]] += rows[k], or a copy to sums[~order[k]] where the id is new; in order. scales[k] multiplies row k
   first; NULL: no factor. Returns whether any value added is not finite: it has been added then as well. */
static inline int fold_rows_f32(float *sums, long dim, const int64_t *order, const float *const *rows,
                                const float *scales, long n) {
    return BEST(fold_rows_f32)(sums, dim, order, rows, scales, n);
}

static inline int fold_rows_f64(double *sums, long dim, const int64_t *order, const double *const *rows, long n) {
    return BEST(fold_rows_f64)(sums, dim, order, rows, NULL, n);
}

/* Whether any value of n rows, stride bytes apart, or of those that are listed, is not finite; scales as above. */
static inline int nonfinite_rows_f32(const char *rows, long stride, const int64_t *row_index, const float *scales,
                                     long n, long dim) {
    return BEST(nonfinite_rows_f32)(rows, stride, row_index, scales, n, dim);
}

static inline int nonfinite_rows_f64(const char *rows, long stride, const int64_t *row_index, long n, long dim) {
    return BEST(nonfinite_rows_f64)(rows, stride, row_index, NULL, n, dim);
}

#endif
