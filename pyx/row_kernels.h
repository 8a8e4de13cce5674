/* Loops over gradient rows in C, because only C gives one function per instruction set: the Cython around them is
   compiled for any machine of its kind, and the set is chosen when it runs. */
#ifndef PENSTOCK_ROWS_H
#define PENSTOCK_ROWS_H

#include "vectors.h"
#include <math.h>
#include <string.h>

#define NEW_ROW 0x80000000u /* of a slot: its sum begins with this row */

/* Magnitudes of float32 compared by one instruction, which GCC uses only if it is asked for by name; Clang does not know
   the names here. */
#if defined(PENSTOCK_X86) && !defined(__clang__)
#include <immintrin.h>
#define MAX_64(a, b) _mm512_max_epi32((__m512i)(a), (__m512i)(b))
#define MAX_32(a, b) _mm256_max_epi32((__m256i)(a), (__m256i)(b))
#define MAX_16(a, b) _mm_max_epi32((__m128i)(a), (__m128i)(b))
#else
#define MAX_64 LARGER
#define MAX_32 LARGER
#define MAX_16 LARGER
#endif

#define WIDEST_SPAN(EACH)
#define REAL float
#define BITS int32_t
#define NAMED(name) name##_f32_any
#include "row_kernels_body.h"
#define REAL double
#define BITS int64_t
#define NAMED(name) name##_f64_any
#include "row_kernels_body.h"

#ifdef PENSTOCK_X86
#pragma GCC push_options
#pragma GCC target("avx2")
#define REAL float
#define BITS int32_t
#define NAMED(name) name##_f32_avx2
#define LARGER_32 MAX_32
#define LARGER_16 MAX_16
#include "row_kernels_body.h"
#define REAL double
#define BITS int64_t
#define NAMED(name) name##_f64_avx2
#include "row_kernels_body.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq")
#undef WIDEST_SPAN
#define WIDEST_SPAN(EACH) SPAN(64, EACH)
#define REAL float
#define BITS int32_t
#define NAMED(name) name##_f32_avx512
#define LARGER_64 MAX_64
#define LARGER_32 MAX_32
#define LARGER_16 MAX_16
#include "row_kernels_body.h"
#define REAL double
#define BITS int64_t
#define NAMED(name) name##_f64_avx512
#include "row_kernels_body.h"
#pragma GCC pop_options
#endif
#undef WIDEST_SPAN

/* sums[slots[k]] += rows[k], in order; where a slot is marked NEW_ROW, its sum begins. scales[k] multiplies row k first;
   NULL: no factor. ahead: how many more slots and rows follow these n, only to ask for their memory. Returns the largest
   magnitude of a sum after any of the rows; infinite if one was not finite. */
#define fold_rows_f32(isa, ...) CALL_BEST(isa, fold_rows_f32, __VA_ARGS__)
#define fold_rows_f64(isa, ...) CALL_BEST(isa, fold_rows_f64, __VA_ARGS__)

/* The largest magnitude in n rows, stride bytes apart, or in those that are listed; infinite if a value is not finite;
   scales as above. */
#define largest_rows_f32(isa, ...) CALL_BEST(isa, largest_rows_f32, __VA_ARGS__)
#define largest_rows_f64(isa, ...) CALL_BEST(isa, largest_rows_f64, __VA_ARGS__)

#endif
