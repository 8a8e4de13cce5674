/* The rows of a frame, by the part of their table that owns the id: each row is looked at once, however many parts there
   are. Rows are split stripe by stripe, so that threads share nothing: count the rows of each part, then scatter. */
#ifndef PENSTOCK_ROW_SPLIT_H
#define PENSTOCK_ROW_SPLIT_H

#include "vectors.h"

enum {
    NEIGHBOUR_BITS = 9, /* 512 ids, whose bits are in one cache line, are of one part: no two threads write such a line */
    SPLIT_BLOCK = 512   /* rows whose parts are computed in one go */
};

/* The sign bit: whether an id is negative or above last. No branch, so that the compiler can vectorise it. */
static inline __attribute__((always_inline)) uint64_t outside_loop(const int64_t *ids, long n, uint64_t last) {
    uint64_t signs = 0;
    for (long i = 0; i < n; i++) signs |= (uint64_t)ids[i] | (last - (uint64_t)ids[i]);
    return signs;
}

/* No 64-bit multiplication, so that the compiler can vectorise it. shift: 32 - log2(parts), of 2 parts at least; wide: ids
   may be any int64, else they fit 32 bits. */
static inline __attribute__((always_inline)) void parts_of(const int64_t *ids, long n, int shift, int wide,
                                                           uint32_t *parts) {
    for (long i = 0; i < n; i++) {
        uint32_t block = (uint32_t)ids[i] >> NEIGHBOUR_BITS;
        if (wide) block = (uint32_t)((uint64_t)ids[i] >> NEIGHBOUR_BITS ^ (uint64_t)ids[i] >> (NEIGHBOUR_BITS + 32));
        parts[i] = block * 0x9e3779b1u >> shift;
    }
}

/* counts[p]: grows by the rows of part p. */
static inline __attribute__((always_inline)) void count_loop(const int64_t *ids, long n, int shift, int wide,
                                                             uint32_t *counts) {
    uint32_t parts[SPLIT_BLOCK];
    for (; n > 0; ids += SPLIT_BLOCK, n -= SPLIT_BLOCK) {
        long block = n < SPLIT_BLOCK ? n : SPLIT_BLOCK;
        parts_of(ids, block, shift, wide, parts);
#pragma GCC unroll 4
        for (long i = 0; i < block; i++) counts[parts[i]]++;
    }
}

/* at[p]: where the next row of part p goes, IN and OUT. An id goes into wide_ids, or where that is NULL into slots; into
   to_scales, unless NULL, the factor of each row. row_index, scales: NULL where there are none. The flags are literals
   where this loop is used. */
static inline __attribute__((always_inline)) void scatter_loop(const int64_t *ids, long n, int shift, const char *rows,
                                                               long stride, const int64_t *row_index, const float *scales,
                                                               uint32_t *at, int64_t *wide_ids, uint32_t *slots,
                                                               const char **to_rows, float *to_scales, int is_wide,
                                                               int is_indexed, int is_scaled) {
    uint32_t parts[SPLIT_BLOCK];
    for (long begin = 0; begin < n; begin += SPLIT_BLOCK) {
        long block = n - begin < SPLIT_BLOCK ? n - begin : SPLIT_BLOCK;
        parts_of(ids + begin, block, shift, is_wide, parts);
#pragma GCC unroll 4
        for (long i = 0; i < block; i++) {
            uint32_t place = at[parts[i]]++;
            if (is_wide)
                wide_ids[place] = ids[begin + i];
            else
                slots[place] = (uint32_t)ids[begin + i];
            to_rows[place] = rows + (is_indexed ? row_index[begin + i] : begin + i) * stride;
            if (is_scaled) to_scales[place] = scales ? scales[begin + i] : 1;
        }
    }
}

#define SPLIT_ARGUMENTS                                                                                                \
    const int64_t *ids, long n, int shift, const char *rows, long stride, const int64_t *row_index,                    \
        const float *scales, uint32_t *at, int64_t *wide_ids, uint32_t *slots, const char **to_rows, float *to_scales
#define SCATTER(is_wide, is_indexed, is_scaled)                                                                        \
    scatter_loop(ids, n, shift, rows, stride, row_index, scales, at, wide_ids, slots, to_rows, to_scales, is_wide,     \
                 is_indexed, is_scaled)

static inline __attribute__((always_inline)) void scatter_all(SPLIT_ARGUMENTS) {
    if (to_scales || row_index)
        SCATTER(wide_ids != NULL, row_index != NULL, to_scales != NULL);
    else if (wide_ids)
        SCATTER(1, 0, 0);
    else
        SCATTER(0, 0, 0);
}

#define SPLIT_LOOPS(ISA, TARGET)                                                                                       \
    TARGET static uint64_t signs_outside##ISA(const int64_t *ids, long n, uint64_t last) {                             \
        return outside_loop(ids, n, last);                                                                             \
    }                                                                                                                  \
    TARGET static void count_rows_of_parts##ISA(const int64_t *ids, long n, int shift, int wide, uint32_t *counts) {   \
        if (wide)                                                                                                      \
            count_loop(ids, n, shift, 1, counts);                                                                      \
        else                                                                                                           \
            count_loop(ids, n, shift, 0, counts);                                                                      \
    }                                                                                                                  \
    TARGET static void scatter_rows##ISA(SPLIT_ARGUMENTS) {                                                            \
        scatter_all(ids, n, shift, rows, stride, row_index, scales, at, wide_ids, slots, to_rows, to_scales);          \
    }

SPLIT_LOOPS(_any, )
#ifdef PENSTOCK_X86
SPLIT_LOOPS(_avx2, __attribute__((target("avx2"))))
SPLIT_LOOPS(_avx512, __attribute__((target("avx512f,avx512vl,avx512dq"))))
#endif
#undef SCATTER
#undef SPLIT_ARGUMENTS
#undef SPLIT_LOOPS

#define signs_outside(isa, ...) CALL_BEST(isa, signs_outside, __VA_ARGS__)
#define count_rows_of_parts(isa, ...) CALL_BEST(isa, count_rows_of_parts, __VA_ARGS__)
#define scatter_rows(isa, ...) CALL_BEST(isa, scatter_rows, __VA_ARGS__)

#endif
