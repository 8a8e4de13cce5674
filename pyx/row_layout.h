/* Loops that lay out rows for devices: divisions by numbers that stay the same, and copies of rows to their cells. */
#ifndef PENSTOCK_ROW_LAYOUT_H
#define PENSTOCK_ROW_LAYOUT_H

#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* A divisor, at least 1. A 64-bit division takes 40 cycles and more on many processors, and a row needs three. */
typedef struct {
    uint64_t number, factor;
} Divisor;

static inline Divisor divisor_of(uint64_t number) { return (Divisor){number, UINT64_MAX / number}; }

/* number / by: factor is at most 1 below 2^64 / by, so the product is the quotient or 1 less, for every number. */
static inline uint64_t divided(uint64_t number, Divisor by) {
    uint64_t quotient = (uint64_t)((unsigned __int128)number * by.factor >> 64);
    return quotient + (number - quotient * by.number >= by.number);
}

/* Where rows go: to a cell of their device's, and there to the offset of their place. */
typedef struct {
    char *words;
    long cell_bytes, device_bytes;
    int32_t *lines; /* (devices, num_cells): OUT the line of each cell; NULL: not wanted */
    long first_cell, num_cells;
    const int32_t *offsets; /* bytes, by place; NULL: a cell has one row */
    long num_offsets;
} Cells;

/* streams: past the caches, in whole cache lines */
static inline __attribute__((always_inline)) void copy_row(char *to, const char *row, long num_bytes, int streams) {
#ifdef __SSE2__
    if (streams) {
        for (long b = 0; b < num_bytes; b += 16)
            _mm_stream_si128((__m128i *)(to + b), _mm_loadu_si128((const __m128i *)(row + b)));
        return;
    }
#endif
    memcpy(to, row, num_bytes);
}

static inline __attribute__((always_inline)) void lay_some(const Cells *to, const char *rows, long num_bytes, long n,
                                                           const int32_t *devices, const int32_t *cells,
                                                           const int32_t *lines, const int32_t *places, int streams) {
    for (long i = 0; i < n; i++) {
        long cell = (long)cells[i] - to->first_cell, device = devices[i];
        if ((uint64_t)cell >= (uint64_t)to->num_cells)
            continue;
        char *words = to->words + device * to->device_bytes + cell * to->cell_bytes;
        if (to->lines != NULL)
            to->lines[device * to->num_cells + cell] = lines[i];
        if (to->offsets != NULL)
            words += to->offsets[places[i]];
        copy_row(words, rows + i * num_bytes, num_bytes, streams);
    }
}

/* Copy n rows to those of their cells that are among num_cells from first_cell on. A literal size lets the compiler copy
   a row without a call. streams: write past the caches, if cells and rows are whole cache lines; part of one, written
   alone, would cost more than it saves. */
static inline void lay_all(const Cells *to, const char *rows, long num_bytes, long n, const int32_t *devices,
                           const int32_t *cells, const int32_t *lines, const int32_t *places, int streams) {
#define LAY(bytes, past) lay_some(to, rows, bytes, n, devices, cells, lines, places, past)
#ifdef __SSE2__
    uintptr_t bits = (uintptr_t)to->words | (uintptr_t)to->cell_bytes | (uintptr_t)num_bytes;
    for (long i = 0; i < to->num_offsets; i++) bits |= (uintptr_t)to->offsets[i];
    if (streams && bits % 64 == 0) {
        num_bytes == 128 ? LAY(128, 1) : num_bytes == 512 ? LAY(512, 1) : LAY(num_bytes, 1);
        _mm_sfence();
        return;
    }
#endif
    switch (num_bytes) {
    case 32: LAY(32, 0); break;
    case 64: LAY(64, 0); break;
    case 128: LAY(128, 0); break;
    case 256: LAY(256, 0); break;
    case 512: LAY(512, 0); break;
    default: LAY(num_bytes, 0);
    }
#undef LAY
}

#endif
