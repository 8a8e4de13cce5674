/* The loops over gradient rows; included by rows.h once per instruction set, with ISA(name) and the target set.

   ALIKE, whatever the instruction set: one IEEE operation per element in the order of the rows. The vectors only
   carry neighbouring columns side by side, which meet nowhere. */

/* ---- one row, of a type T in vectors V of N elements and halves H, whose bits are vectors I and J

   x - x is +0 for every finite x and NaN for the others, so the union of its bits is 0 while all is finite. */
#define ROW_LOOP(T, V, I, N, H, J, EACH)                                                                               \
    long c = 0;                                                                                                        \
    for (; c + N <= dim; c += N) {                                                                                     \
        V x = *(const V *)(row + c);                                                                                   \
        EACH(V)                                                                                                        \
        odd->wide |= (I)(x - x);                                                                                       \
    }                                                                                                                  \
    if (c + N / 2 <= dim) {                                                                                            \
        H x = *(const H *)(row + c);                                                                                   \
        EACH(H)                                                                                                        \
        odd->half |= (J)(x - x);                                                                                       \
        c += N / 2;                                                                                                    \
    }                                                                                                                  \
    for (; c < dim; c++) {                                                                                             \
        T x = row[c];                                                                                                  \
        EACH(T)                                                                                                        \
        odd->one |= (x - x) != 0;                                                                                      \
    }

#define COPY_ONE(T) *(T *)(into + c) = x;
#define ADD_ONE(T) *(T *)(into + c) = *(const T *)(into + c) + x;
#define NOTHING(T)

#define DEFINE_FOLD(SUFFIX, T, V, I, N, H, J)                                                                          \
    typedef struct {                                                                                                   \
        I wide;                                                                                                        \
        J half;                                                                                                        \
        int one;                                                                                                       \
    } ISA(odd_##SUFFIX);                                                                                               \
    static inline int ISA(any_odd_##SUFFIX)(const ISA(odd_##SUFFIX) * odd) {                                           \
        int any = odd->one;                                                                                            \
        for (int e = 0; e < N; e++)                                                                                    \
            any |= odd->wide[e] != 0;                                                                                  \
        for (int e = 0; e < N / 2; e++)                                                                                \
            any |= odd->half[e] != 0;                                                                                  \
        return any;                                                                                                    \
    }                                                                                                                  \
    static inline __attribute__((always_inline)) void ISA(copy_row_##SUFFIX)(T *into, const T *row, long dim,          \
                                                                            ISA(odd_##SUFFIX) * odd) {                 \
        ROW_LOOP(T, V, I, N, H, J, COPY_ONE)                                                                           \
    }                                                                                                                  \
    static inline __attribute__((always_inline)) void ISA(add_row_##SUFFIX)(T *into, const T *row, long dim,           \
                                                                           ISA(odd_##SUFFIX) * odd) {                  \
        ROW_LOOP(T, V, I, N, H, J, ADD_ONE)                                                                            \
    }                                                                                                                  \
    static inline __attribute__((always_inline)) int ISA(fold_dim_##SUFFIX)(                                           \
        T *sums, long dim, const int64_t *order, const T *const *rows, long n) {                                       \
        ISA(odd_##SUFFIX) odd = {{0}, {0}, 0};                                                                         \
        for (long k = 0; k < n; k++) {                                                                                 \
            if (k + rows_in_bytes_ahead(dim * sizeof(T)) < n)                                                          \
                fetch_for_read(rows[k + rows_in_bytes_ahead(dim * sizeof(T))], dim * sizeof(T));                       \
            if (k + ROWS_AHEAD < n) {                                                                                  \
                int64_t next = order[k + ROWS_AHEAD];                                                                  \
                if (next >= 0)                                                                                         \
                    fetch_for_write(sums + next * dim, dim * sizeof(T));                                               \
            }                                                                                                          \
            if (order[k] < 0)                                                                                          \
                ISA(copy_row_##SUFFIX)(sums + ~order[k] * dim, rows[k], dim, &odd);                                    \
            else                                                                                                       \
                ISA(add_row_##SUFFIX)(sums + order[k] * dim, rows[k], dim, &odd);                                      \
        }                                                                                                              \
        return ISA(any_odd_##SUFFIX)(&odd);                                                                            \
    }                                                                                                                  \
    /* A literal dim lets the compiler unroll a row: the common ones have a loop of their own. */                      \
    static int ISA(fold_rows_##SUFFIX)(T * sums, long dim, const int64_t *order, const T *const *rows, long n) {       \
        switch (dim) {                                                                                                 \
        case 4: return ISA(fold_dim_##SUFFIX)(sums, 4, order, rows, n);                                                \
        case 8: return ISA(fold_dim_##SUFFIX)(sums, 8, order, rows, n);                                                \
        case 16: return ISA(fold_dim_##SUFFIX)(sums, 16, order, rows, n);                                              \
        case 32: return ISA(fold_dim_##SUFFIX)(sums, 32, order, rows, n);                                              \
        case 64: return ISA(fold_dim_##SUFFIX)(sums, 64, order, rows, n);                                              \
        case 128: return ISA(fold_dim_##SUFFIX)(sums, 128, order, rows, n);                                            \
        default: return ISA(fold_dim_##SUFFIX)(sums, dim, order, rows, n);                                             \
        }                                                                                                              \
    }                                                                                                                  \
    static int ISA(odd_rows_##SUFFIX)(const char *rows, long stride, const int64_t *which, long n, long dim) {         \
        ISA(odd_##SUFFIX) any = {{0}, {0}, 0}, *odd = &any;                                                            \
        for (long k = 0; k < n; k++) {                                                                                 \
            const T *row = (const T *)(rows + (which ? which[k] : k) * stride);                                        \
            ROW_LOOP(T, V, I, N, H, J, NOTHING)                                                                        \
        }                                                                                                              \
        return ISA(any_odd_##SUFFIX)(odd);                                                                             \
    }

DEFINE_FOLD(f32, float, floats8_t, bits8_t, 8, floats4_t, bits4_t)
DEFINE_FOLD(f64, double, doubles4_t, longs4_t, 4, doubles2_t, longs2_t)

#undef ROW_LOOP
#undef COPY_ONE
#undef ADD_ONE
#undef NOTHING
#undef DEFINE_FOLD
