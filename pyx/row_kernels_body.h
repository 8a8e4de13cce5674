/* The loops over gradient rows; included by row_kernels.h once per element type and instruction set, with REAL, its bits
   BITS, NAMED(name), LARGER_64 and so on where a machine has an instruction for it, and WIDEST_SPAN where vectors of
   64 bytes are worth while.

   ALIKE, whatever the instruction set: one IEEE operation per element in the order of the rows. The vectors only
   carry neighbouring columns side by side, which meet nowhere. A scaled row is rounded before it is added, as if the
   product had been written out: setup.py forbids a fused multiply-add. */

/* Unaligned, and of any type: rows lie in Arrow's memory, where an element is aligned to its size and no more. */
#define VECTORS(BYTES)                                                                                                 \
    typedef REAL NAMED(reals##BYTES) __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));           \
    typedef BITS NAMED(bits##BYTES) __attribute__((vector_size(BYTES), aligned(sizeof(REAL)), may_alias));
VECTORS(64)
VECTORS(32)
VECTORS(16)

/* The bits of a magnitude, as integers, are ordered as the magnitudes are: those of finite values, then infinity, then
   NaN. So one maximum says whether all is finite, and how large it is. */
#define MAGNITUDE ((BITS)~(1ull << (8 * sizeof(BITS) - 1)))

typedef struct {
    NAMED(bits64) in64;
    NAMED(bits32) in32;
    NAMED(bits16) in16;
    BITS one;
} NAMED(largest);

#define LARGER(a, b) (((a) & ((a) > (b))) | ((b) & ~((a) > (b))))
#ifndef LARGER_64
#define LARGER_64 LARGER
#endif
#ifndef LARGER_32
#define LARGER_32 LARGER
#endif
#ifndef LARGER_16
#define LARGER_16 LARGER
#endif

/* The largest magnitude; infinite if a value is not finite. */
static inline double NAMED(largest_of)(const NAMED(largest) * largest) {
    BITS bits = largest->one;
    for (size_t e = 0; e < 64 / sizeof(REAL); e++) bits = largest->in64[e] > bits ? largest->in64[e] : bits;
    for (size_t e = 0; e < 32 / sizeof(REAL); e++) bits = largest->in32[e] > bits ? largest->in32[e] : bits;
    for (size_t e = 0; e < 16 / sizeof(REAL); e++) bits = largest->in16[e] > bits ? largest->in16[e] : bits;
    REAL value;
    memcpy(&value, &bits, sizeof(REAL));
    return value == value ? value : HUGE_VAL;
}

/* A product is not finite whenever one of its factors is not (0 * inf is NaN), and neither is a sum. scaled is a literal
   where these loops are used. */
#define SPAN(BYTES, EACH)                                                                                              \
    for (; c + (long)(BYTES / sizeof(REAL)) <= dim; c += BYTES / sizeof(REAL)) {                                       \
        NAMED(reals##BYTES) x = *(const NAMED(reals##BYTES) *)(row + c);                                               \
        if (scaled)                                                                                                    \
            x = x * scale;                                                                                             \
        EACH(BYTES)                                                                                                    \
        NAMED(bits##BYTES) bits = (NAMED(bits##BYTES))x & MAGNITUDE;                                                   \
        largest->in##BYTES = (NAMED(bits##BYTES))LARGER_##BYTES(bits, largest->in##BYTES);                             \
    }

#define ROW_LOOP(EACH, EACH_ONE)                                                                                       \
    long c = 0;                                                                                                        \
    WIDEST_SPAN(EACH)                                                                                                  \
    SPAN(32, EACH)                                                                                                     \
    SPAN(16, EACH)                                                                                                     \
    for (; c < dim; c++) {                                                                                             \
        REAL x = scaled ? row[c] * scale : row[c];                                                                     \
        BITS bits;                                                                                                     \
        EACH_ONE                                                                                                       \
        memcpy(&bits, &x, sizeof bits);                                                                                \
        bits &= MAGNITUDE;                                                                                             \
        largest->one = bits > largest->one ? bits : largest->one;                                                      \
    }

/* A new sum is -0 + x, which is x to the bit (0 + -0 would be +0). No branch: which rows are new cannot be predicted. x
   becomes the sum, so that its magnitude is the one that counts. */
#define ADD(BYTES)                                                                                                     \
    NAMED(bits##BYTES) held = *(const NAMED(bits##BYTES) *)(into + c);                                                 \
    x = (NAMED(reals##BYTES))((held & keep) | minus_zero) + x;                                                         \
    *(NAMED(reals##BYTES) *)(into + c) = x;
#define ADD_ONE into[c] = x = (keep ? into[c] : (REAL)-0.0) + x;
#define NOTHING(BYTES)
#define NOTHING_ONE

static inline __attribute__((always_inline)) void NAMED(fold_row)(REAL *into, const REAL *row, BITS keep, int scaled,
                                                                  REAL scale, long dim, NAMED(largest) * largest) {
    BITS minus_zero = ~keep & (BITS)(1ull << (8 * sizeof(BITS) - 1));
    ROW_LOOP(ADD, ADD_ONE)
}

static inline __attribute__((always_inline)) double NAMED(fold_dim)(REAL *sums, long dim, const uint32_t *slots,
                                                                 const REAL *const *rows, const REAL *scales,
                                                                 int scaled, long n, long ahead) {
    NAMED(largest) largest = {{0}, {0}, {0}, 0};
    const long rows_ahead = rows_in_bytes_ahead(dim * sizeof(REAL)), end = n + ahead;
    for (long k = 0; k < n; k++) {
        if (!scaled && k + rows_ahead < end)
            fetch_for_read(rows[k + rows_ahead], dim * sizeof(REAL));
        if (k + SUMS_AHEAD < end)
            fetch_for_write(sums + (slots[k + SUMS_AHEAD] & ~NEW_ROW) * dim, dim * sizeof(REAL));
        NAMED(fold_row)(sums + (slots[k] & ~NEW_ROW) * dim, rows[k], (BITS)(slots[k] >> 31) - 1, scaled,
                        scaled ? scales[k] : 1, dim, &largest);
    }
    return NAMED(largest_of)(&largest);
}

/* A literal dim lets the compiler unroll a row: the common ones have a loop of their own. */
static inline __attribute__((always_inline)) double NAMED(fold_all)(REAL *sums, long dim, const uint32_t *slots,
                                                                 const REAL *const *rows, const REAL *scales,
                                                                 int scaled, long n, long ahead) {
    switch (dim) {
    case 4: return NAMED(fold_dim)(sums, 4, slots, rows, scales, scaled, n, ahead);
    case 8: return NAMED(fold_dim)(sums, 8, slots, rows, scales, scaled, n, ahead);
    case 16: return NAMED(fold_dim)(sums, 16, slots, rows, scales, scaled, n, ahead);
    case 32: return NAMED(fold_dim)(sums, 32, slots, rows, scales, scaled, n, ahead);
    case 64: return NAMED(fold_dim)(sums, 64, slots, rows, scales, scaled, n, ahead);
    case 128: return NAMED(fold_dim)(sums, 128, slots, rows, scales, scaled, n, ahead);
    default: return NAMED(fold_dim)(sums, dim, slots, rows, scales, scaled, n, ahead);
    }
}

static double NAMED(fold_rows)(REAL *sums, long dim, const uint32_t *slots, const REAL *const *rows, const REAL *scales,
                            long n, long ahead) {
    return scales ? NAMED(fold_all)(sums, dim, slots, rows, scales, 1, n, ahead)
                  : NAMED(fold_all)(sums, dim, slots, rows, NULL, 0, n, ahead);
}

static inline __attribute__((always_inline)) double NAMED(check_all)(const char *rows, long stride,
                                                                  const int64_t *row_index, const REAL *scales,
                                                                  int scaled, long n, long dim) {
    NAMED(largest) all = {{0}, {0}, {0}, 0}, *largest = &all;
    for (long k = 0; k < n; k++) {
        const REAL *row = (const REAL *)(rows + (row_index ? row_index[k] : k) * stride);
        REAL scale = scaled ? scales[k] : 1;
        ROW_LOOP(NOTHING, NOTHING_ONE)
    }
    return NAMED(largest_of)(largest);
}

static double NAMED(largest_rows)(const char *rows, long stride, const int64_t *row_index, const REAL *scales, long n,
                                 long dim) {
    return scales ? NAMED(check_all)(rows, stride, row_index, scales, 1, n, dim)
                  : NAMED(check_all)(rows, stride, row_index, NULL, 0, n, dim);
}

#undef VECTORS
#undef MAGNITUDE
#undef LARGER
#undef LARGER_64
#undef LARGER_32
#undef LARGER_16
#undef SPAN
#undef ROW_LOOP
#undef ADD
#undef ADD_ONE
#undef NOTHING
#undef NOTHING_ONE
#undef REAL
#undef BITS
#undef NAMED
