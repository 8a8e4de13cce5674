/* The loops over gradient rows; included by row_kernels.h once per element type and instruction set, with REAL, its bits
   BITS, NAMED(name), and WIDEST_SPAN where vectors of 64 bytes are worth while.

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

typedef struct {
    NAMED(bits64) in64;
    NAMED(bits32) in32;
    NAMED(bits16) in16;
    int one;
} NAMED(nonfinite);

static inline int NAMED(any_nonfinite)(const NAMED(nonfinite) * nonfinite) {
    BITS any = nonfinite->one;
    for (size_t e = 0; e < 64 / sizeof(REAL); e++) any |= nonfinite->in64[e];
    for (size_t e = 0; e < 32 / sizeof(REAL); e++) any |= nonfinite->in32[e];
    for (size_t e = 0; e < 16 / sizeof(REAL); e++) any |= nonfinite->in16[e];
    return any != 0;
}

/* x - x is +0 for every finite x and NaN for the others, so the union of its bits is 0 while all is finite. A product
   is not finite whenever one of its factors is not (0 * inf is NaN). scaled is a literal where these loops are used. */
#define SPAN(BYTES, EACH)                                                                                              \
    for (; c + (long)(BYTES / sizeof(REAL)) <= dim; c += BYTES / sizeof(REAL)) {                                       \
        NAMED(reals##BYTES) x = *(const NAMED(reals##BYTES) *)(row + c);                                               \
        if (scaled)                                                                                                    \
            x = x * scale;                                                                                             \
        EACH(BYTES)                                                                                                    \
        nonfinite->in##BYTES |= (NAMED(bits##BYTES))(x - x);                                                           \
    }

#define ROW_LOOP(EACH, EACH_ONE)                                                                                       \
    long c = 0;                                                                                                        \
    WIDEST_SPAN(EACH)                                                                                                  \
    SPAN(32, EACH)                                                                                                     \
    SPAN(16, EACH)                                                                                                     \
    for (; c < dim; c++) {                                                                                             \
        REAL x = scaled ? row[c] * scale : row[c];                                                                     \
        EACH_ONE                                                                                                       \
        nonfinite->one |= (x - x) != 0;                                                                                \
    }

/* A new sum is -0 + x, which is x to the bit (0 + -0 would be +0). No branch: which rows are new cannot be predicted. */
#define ADD(BYTES)                                                                                                     \
    NAMED(bits##BYTES) held = *(const NAMED(bits##BYTES) *)(into + c);                                                 \
    *(NAMED(reals##BYTES) *)(into + c) = (NAMED(reals##BYTES))((held & keep) | minus_zero) + x;
#define ADD_ONE into[c] = (keep ? into[c] : (REAL)-0.0) + x;
#define NOTHING(BYTES)
#define NOTHING_ONE

static inline __attribute__((always_inline)) void NAMED(fold_row)(REAL *into, const REAL *row, BITS keep, int scaled,
                                                                  REAL scale, long dim, NAMED(nonfinite) * nonfinite) {
    BITS minus_zero = ~keep & (BITS)(1ull << (8 * sizeof(BITS) - 1));
    ROW_LOOP(ADD, ADD_ONE)
}

static inline __attribute__((always_inline)) int NAMED(fold_dim)(REAL *sums, long dim, const uint32_t *slots,
                                                                 const REAL *const *rows, const REAL *scales,
                                                                 int scaled, long n, long ahead) {
    NAMED(nonfinite) nonfinite = {{0}, {0}, {0}, 0};
    const long rows_ahead = rows_in_bytes_ahead(dim * sizeof(REAL)), end = n + ahead;
    for (long k = 0; k < n; k++) {
        if (!scaled && k + rows_ahead < end)
            fetch_for_read(rows[k + rows_ahead], dim * sizeof(REAL));
        if (k + SUMS_AHEAD < end)
            fetch_for_write(sums + (slots[k + SUMS_AHEAD] & ~NEW_ROW) * dim, dim * sizeof(REAL));
        NAMED(fold_row)(sums + (slots[k] & ~NEW_ROW) * dim, rows[k], (BITS)(slots[k] >> 31) - 1, scaled,
                        scaled ? scales[k] : 1, dim, &nonfinite);
    }
    return NAMED(any_nonfinite)(&nonfinite);
}

/* A literal dim lets the compiler unroll a row: the common ones have a loop of their own. */
static inline __attribute__((always_inline)) int NAMED(fold_all)(REAL *sums, long dim, const uint32_t *slots,
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

static int NAMED(fold_rows)(REAL *sums, long dim, const uint32_t *slots, const REAL *const *rows, const REAL *scales,
                            long n, long ahead) {
    return scales ? NAMED(fold_all)(sums, dim, slots, rows, scales, 1, n, ahead)
                  : NAMED(fold_all)(sums, dim, slots, rows, NULL, 0, n, ahead);
}

static inline __attribute__((always_inline)) int NAMED(check_all)(const char *rows, long stride,
                                                                  const int64_t *row_index, const REAL *scales,
                                                                  int scaled, long n, long dim) {
    NAMED(nonfinite) any = {{0}, {0}, {0}, 0}, *nonfinite = &any;
    for (long k = 0; k < n; k++) {
        const REAL *row = (const REAL *)(rows + (row_index ? row_index[k] : k) * stride);
        REAL scale = scaled ? scales[k] : 1;
        ROW_LOOP(NOTHING, NOTHING_ONE)
    }
    return NAMED(any_nonfinite)(nonfinite);
}

static int NAMED(nonfinite_rows)(const char *rows, long stride, const int64_t *row_index, const REAL *scales, long n,
                                 long dim) {
    return scales ? NAMED(check_all)(rows, stride, row_index, scales, 1, n, dim)
                  : NAMED(check_all)(rows, stride, row_index, NULL, 0, n, dim);
}

#undef VECTORS
#undef SPAN
#undef ROW_LOOP
#undef ADD
#undef ADD_ONE
#undef NOTHING
#undef NOTHING_ONE
#undef REAL
#undef BITS
#undef NAMED
