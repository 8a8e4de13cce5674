/* The loops over gained rows; included by gained_rows.h once per instruction set, with ISA(name) and the target set.

   ALIKE, whatever the instruction set: per element one product, rounded to float32, and one sum, as if the product had
   been written out and added then. No machine that has a fused multiply-add may use it here: setup.py forbids it.
   A product is not finite whenever its gradient or its gain is not (0 * inf is NaN), so one look sees all three. */

typedef struct {
    bits8_t wide;
    bits4_t half;
    int one;
} ISA(odd_gained_t);

#define GAINED(V, N, BITS, ODD)                                                                                        \
    {                                                                                                                  \
        V x = *(const V *)(row + c) * gain;                                                                            \
        if (into && add)                                                                                               \
            *(V *)(into + c) = *(const V *)(into + c) + x;                                                             \
        else if (into)                                                                                                 \
            *(V *)(into + c) = x;                                                                                      \
        ODD |= (BITS)(x - x);                                                                                          \
        c += N;                                                                                                        \
    }

/* One row; into and add are literals where this is called, so that no branch is left in the loop. */
static inline __attribute__((always_inline)) void ISA(gained_row)(float *into, int add, const float *row, float gain,
                                                                  long dim, ISA(odd_gained_t) * odd) {
    long c = 0;
    while (c + 8 <= dim)
        GAINED(floats8_t, 8, bits8_t, odd->wide)
    if (c + 4 <= dim)
        GAINED(floats4_t, 4, bits4_t, odd->half)
    while (c < dim) {
        float x = row[c] * gain;
        if (into)
            into[c] = add ? into[c] + x : x;
        odd->one |= (x - x) != 0;
        c++;
    }
}

static inline int ISA(any_odd_gained)(const ISA(odd_gained_t) * odd) {
    int any = odd->one;
    for (int e = 0; e < 8; e++)
        any |= odd->wide[e] != 0;
    for (int e = 0; e < 4; e++)
        any |= odd->half[e] != 0;
    return any;
}

static inline __attribute__((always_inline)) int ISA(fold_gained_dim)(float *sums, long dim, const int64_t *order,
                                                                      const float *const *rows, const float *gains,
                                                                      long n) {
    ISA(odd_gained_t) odd = {{0}, {0}, 0};
    for (long k = 0; k < n; k++) {
        if (k + ROWS_AHEAD < n) {
            int64_t next = order[k + ROWS_AHEAD];
            if (next >= 0)
                fetch_for_write(sums + next * dim, dim * sizeof(float));
        }
        /* The first is a copy of its product: 0 + -0 would be +0. */
        if (order[k] < 0)
            ISA(gained_row)(sums + ~order[k] * dim, 0, rows[k], gains[k], dim, &odd);
        else
            ISA(gained_row)(sums + order[k] * dim, 1, rows[k], gains[k], dim, &odd);
    }
    return ISA(any_odd_gained)(&odd);
}

/* A literal dim lets the compiler unroll a row: the common ones have a loop of their own. */
static int ISA(fold_gained)(float *sums, long dim, const int64_t *order, const float *const *rows, const float *gains,
                            long n) {
    switch (dim) {
    case 8: return ISA(fold_gained_dim)(sums, 8, order, rows, gains, n);
    case 16: return ISA(fold_gained_dim)(sums, 16, order, rows, gains, n);
    case 32: return ISA(fold_gained_dim)(sums, 32, order, rows, gains, n);
    case 64: return ISA(fold_gained_dim)(sums, 64, order, rows, gains, n);
    case 128: return ISA(fold_gained_dim)(sums, 128, order, rows, gains, n);
    default: return ISA(fold_gained_dim)(sums, dim, order, rows, gains, n);
    }
}

static int ISA(odd_gained)(const char *rows, long stride, const int64_t *which, const float *gains, long n, long dim) {
    ISA(odd_gained_t) odd = {{0}, {0}, 0};
    for (long k = 0; k < n; k++)
        ISA(gained_row)(NULL, 0, (const float *)(rows + (which ? which[k] : k) * stride), gains[k], dim, &odd);
    return ISA(any_odd_gained)(&odd);
}

#undef GAINED
