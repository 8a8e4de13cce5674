/* Squares of rows, and rows scaled down to a norm: in C for one function per instruction set, as in row_kernels.h. */
#ifndef PENSTOCK_ROW_NORMS_H
#define PENSTOCK_ROW_NORMS_H

#include "vectors.h"
#include <math.h>

typedef float floats8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef double doubles8 __attribute__((vector_size(64)));

/* ALIKE, whatever the instruction set: element j is in sum j % 8, and the eight are added in pairs. The square of a
   float32 is exact. */
#define ROW_NORMS(isa, TARGET)                                                                                         \
    TARGET static double square_of_##isa(const float *row, long dim) {                                                 \
        doubles8 sums = {0};                                                                                           \
        long j = 0;                                                                                                    \
        for (; j + 8 <= dim; j += 8) {                                                                                 \
            doubles8 values = __builtin_convertvector(*(const floats8 *)(row + j), doubles8);                          \
            sums += values * values;                                                                                   \
        }                                                                                                              \
        for (long k = 0; k < dim - j; k++) sums[k] += (double)row[j + k] * row[j + k];                                 \
        return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));              \
    }                                                                                                                  \
    TARGET static void squares_of_rows_##isa(const float *rows, long n, long dim, double *out) {                       \
        for (long i = 0; i < n; i++) out[i] = square_of_##isa(rows + i * dim, dim);                                    \
    }                                                                                                                  \
    TARGET static long scale_rows_##isa(float *rows, long n, long dim, double most, double epsilon, double *squares) { \
        long count = 0;                                                                                                \
        for (long i = 0; i < n; i++) {                                                                                 \
            double norm = sqrt(squares[i]);                                                                            \
            if (norm > most) {                                                                                         \
                float *row = rows + i * dim, scale = (float)(most / (norm + epsilon));                                 \
                for (long j = 0; j < dim; j++) row[j] *= scale;                                                        \
                squares[i] = square_of_##isa(row, dim);                                                                \
                count++;                                                                                               \
            }                                                                                                          \
        }                                                                                                              \
        return count;                                                                                                  \
    }

ROW_NORMS(any, )
#ifdef PENSTOCK_X86
ROW_NORMS(avx2, __attribute__((target("avx2"))))
ROW_NORMS(avx512, __attribute__((target("avx512f,avx512vl,avx512dq"))))
#endif

#define squares_of_rows(isa, ...) CALL_BEST(isa, squares_of_rows, __VA_ARGS__)
#define scale_rows(isa, ...) CALL_BEST(isa, scale_rows, __VA_ARGS__)

#endif
