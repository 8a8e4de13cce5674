/* Loops that lay out rows for devices: divisions by numbers that stay the same, and copies of rows to their cells. */
#ifndef PENSTOCK_ROW_LAYOUT_H
#define PENSTOCK_ROW_LAYOUT_H

#include <stdint.h>
#include <string.h>

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
    long num_devices, first_cell, num_cells;
    const int32_t *offsets; /* bytes, by place; NULL: a cell has one row */
    long num_offsets;
} Cells;

static inline __attribute__((always_inline)) long lay_some(const Cells *to, const char *rows, long num_bytes, long n,
                                                           const int32_t *devices, const int32_t *cells,
                                                           const int32_t *lines, const int32_t *places) {
    for (long i = 0; i < n; i++) {
        long cell = (long)cells[i] - to->first_cell, device = devices[i];
        if ((uint64_t)cell >= (uint64_t)to->num_cells)
            continue;
        if ((uint64_t)device >= (uint64_t)to->num_devices)
            return i;
        char *words = to->words + device * to->device_bytes + cell * to->cell_bytes;
        if (to->lines != NULL)
            to->lines[device * to->num_cells + cell] = lines[i];
        if (to->offsets != NULL) {
            if ((uint64_t)places[i] >= (uint64_t)to->num_offsets)
                return i;
            words += to->offsets[places[i]];
        }
        memcpy(words, rows + i * num_bytes, num_bytes);
    }
    return -1;
}

/* Copy n rows to those of their cells that are among num_cells from first_cell on. A literal size lets the compiler copy
   a row without a call. Returns a row whose device or place does not exist, or -1. */
static inline long lay_all(const Cells *to, const char *rows, long num_bytes, long n, const int32_t *devices,
                           const int32_t *cells, const int32_t *lines, const int32_t *places) {
    switch (num_bytes) {
    case 32: return lay_some(to, rows, 32, n, devices, cells, lines, places);
    case 64: return lay_some(to, rows, 64, n, devices, cells, lines, places);
    case 128: return lay_some(to, rows, 128, n, devices, cells, lines, places);
    case 256: return lay_some(to, rows, 256, n, devices, cells, lines, places);
    case 512: return lay_some(to, rows, 512, n, devices, cells, lines, places);
    default: return lay_some(to, rows, num_bytes, n, devices, cells, lines, places);
    }
}

#endif
