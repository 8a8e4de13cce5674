/* The loops over gradient rows; included by row_kernels.h once per instruction set, with ISA(name) and the target set.

   ALIKE, whatever the instruction set: one IEEE operation per element in the order of the rows. The vectors only
   carry neighbouring columns side by side, which meet nowhere. A scaled row is rounded before it is added, as if the
   product had been written out: setup.py forbids a fused multiply-add. */

/* ---- one row, of a type T in vectors V of N elements and halves H, whose bits are vectors I and J

   x - x is +0 for every finite x and NaN for the others, so the union of its bits is 0 while all is finite. A product
   is not finite whenever one of its factors is not (0 * inf is NaN). scaled is a literal where these loops are used. */
#define ROW_LOOP(T, V, I, N, H, J, EACH)                                                                               \
    long c = 0;                                                                                                        \
    for (; c + N <= dim; c += N) {                                                                                     \
        V x = *(const V *)(row + c);                                                                                   \
        if (scaled)                                                                                                    \
            x = x * scale;                                                                                             \
        EACH(V)                                                                                                        \
        nonfinite->wide |= (I)(x - x);                                                                                 \
    }                                                                                                                  \
    if (c + N / 2 <= dim) {                                                                                            \
        H x = *(const H *)(row + c);                                                                                   \
        if (scaled)                                                                                                    \
            x = x * scale;                                                                                             \
        EACH(H)                                                                                                        \
        nonfinite->half |= (J)(x - x);                                                                                 \
        c += N / 2;                                                                                                    \
    }                                                                                                                  \
    for (; c < dim; c++) {                                                                                             \
        T x = scaled ? row[c] * scale : row[c];                                                                        \
        EACH(T)                                                                                                        \
        nonfinite->one |= (x - x) != 0;                                                                                \
    }

#define COPY_ONE(T) *(T *)(into + c) = x;
#define ADD_ONE(T) *(T *)(into + c) = *(const T *)(into + c) + x;
#define NOTHING(T)

#define DEFINE_FOLD(SUFFIX, T, V, I, N, H, J)                                                                          \
    typedef struct {                                                                                                   \
        I wide;                                                                                                        \
        J half;                                                                                                        \
        int one;                                                                                                       \
    } ISA(nonfinite_##SUFFIX);                                                                                         \
    static inline int ISA(any_nonfinite_##SUFFIX)(const ISA(nonfinite_##SUFFIX) * nonfinite) {                         \
        int any = nonfinite->one;                                                                                      \
        for (int e = 0; e < N; e++)                                                                                    \
            any |= nonfinite->wide[e] != 0;                                                                            \
        for (int e = 0; e < N / 2; e++)                                                                                \
            any |= nonfinite->half[e] != 0;                                                                            \
        return any;                                                                                                    \
    }                                                                                                                  \
    /* The first row of an id is a copy: 0 + -0 would be +0. */                                                        \
    static inline __attribute__((always_inline)) void ISA(copy_row_##SUFFIX)(                                          \
        T *into, const T *row, int scaled, T scale, long dim, ISA(nonfinite_##SUFFIX) * nonfinite) {                   \
        ROW_LOOP(T, V, I, N, H, J, COPY_ONE)                                                                           \
    }                                                                                                                  \
    static inline __attribute__((always_inline)) void ISA(add_row_##SUFFIX)(                                           \
        T *into, const T *row, int scaled, T scale, long dim, ISA(nonfinite_##SUFFIX) * nonfinite) {                   \
        ROW_LOOP(T, V, I, N, H, J, ADD_ONE)                                                                            \
    }                                                                                                                  \
    static inline __attribute__((always_inline)) int ISA(fold_dim_##SUFFIX)(                                           \
        T *sums, long dim, const int64_t *order, const T *const *rows, const T *scales, int scaled, long n) {          \
        ISA(nonfinite_##SUFFIX) nonfinite = {{0}, {0}, 0};                                                             \
        for (long k = 0; k < n; k++) {                                                                                 \
            T scale = scaled ? scales[k] : 1;                                                                          \
            if (!scaled && k + rows_in_bytes_ahead(dim * sizeof(T)) < n)                                               \
                fetch_for_read(rows[k + rows_in_bytes_ahead(dim * sizeof(T))], dim * sizeof(T));                       \
            if (k + ROWS_AHEAD < n) {                                                                                  \
                int64_t next = order[k + ROWS_AHEAD];                                                                  \
                if (next >= 0)                                                                                         \
                    fetch_for_write(sums + next * dim, dim * sizeof(T));                                               \
            }                                                                                                          \
            if (order[k] < 0)                                                                                          \
                ISA(copy_row_##SUFFIX)(sums + ~order[k] * dim, rows[k], scaled, scale, dim, &nonfinite);               \
            else                                                                                                       \
                ISA(add_row_##SUFFIX)(sums + order[k] * dim, rows[k], scaled, scale, dim, &nonfinite);                 \
        }                                                                                                              \
        return ISA(any_nonfinite_##SUFFIX)(&nonfinite);                                                                \
    }                                                                                                                  \
    /* A literal dim lets the compiler unroll a row: the common ones have a loop of their own. */                      \
    static inline __attribute__((always_inline)) int ISA(fold_all_##SUFFIX)(                                           \
        T *sums, long dim, const int64_t *order, const T *const *rows, const T *scales, int scaled, long n) {          \
        switch (dim) {                                                                                                 \
        case 4: return ISA(fold_dim_##SUFFIX)(sums, 4, order, rows, scales, scaled, n);                                \
        case 8: return ISA(fold_dim_##SUFFIX)(sums, 8, order, rows, scales, scaled, n);                                \
        case 16: return ISA(fold_dim_##SUFFIX)(sums, 16, order, rows, scales, scaled, n);                              \
        case 32: return ISA(fold_dim_##SUFFIX)(sums, 32, order, rows, scales, scaled, n);                              \
        case 64: return ISA(fold_dim_##SUFFIX)(sums, 64, order, rows, scales, scaled, n);                              \
        case 128: return ISA(fold_dim_##SUFFIX)(sums, 128, order, rows, scales, scaled, n);                            \
        default: return ISA(fold_dim_##SUFFIX)(sums, dim, order, rows, scales, scaled, n);                             \
        }                                                                                                              \
    }                                                                                                                  \
    static int ISA(fold_rows_##SUFFIX)(T * sums, long dim, const int64_t *order, const T *const *rows, const T *scales,\
                                       long n) {                                                                       \
        return scales ? ISA(fold_all_##SUFFIX)(sums, dim, order, rows, scales, 1, n)                                   \
                      : ISA(fold_all_##SUFFIX)(sums, dim, order, rows, NULL, 0, n);                                    \
    }                                                                                                                  \
    static inline __attribute__((always_inline)) int ISA(check_all_##SUFFIX)(                                          \
        const char *rows, long stride, const int64_t *row_index, const T *scales, int scaled, long n, long dim) {      \
        ISA(nonfinite_##SUFFIX) any = {{0}, {0}, 0}, *nonfinite = &any;                                                \
        for (long k = 0; k < n; k++) {                                                                                 \
            const T *row = (const T *)(rows + (row_index ? row_index[k] : k) * stride);                                \
            T scale = scaled ? scales[k] : 1;                                                                          \
            ROW_LOOP(T, V, I, N, H, J, NOTHING)                                                                        \
        }                                                                                                              \
        return ISA(any_nonfinite_##SUFFIX)(nonfinite);                                                                 \
    }                                                                                                                  \
    static int ISA(nonfinite_rows_##SUFFIX)(const char *rows, long stride, const int64_t *row_index, const T *scales,  \
                                            long n, long dim) {                                                        \
        return scales ? ISA(check_all_##SUFFIX)(rows, stride, row_index, scales, 1, n, dim)                            \
                      : ISA(check_all_##SUFFIX)(rows, stride, row_index, NULL, 0, n, dim);                             \
    }

DEFINE_FOLD(f32, float, floats8_t, bits8_t, 8, floats4_t, bits4_t)
DEFINE_FOLD(f64, double, doubles4_t, longs4_t, 4, doubles2_t, longs2_t)

#undef ROW_LOOP
#undef COPY_ONE
#undef ADD_ONE
#undef NOTHING
#undef DEFINE_FOLD
