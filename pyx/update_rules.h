/* The loops over rows around the update equations, one per rule and instruction set, and the table of them. */
#ifndef PENSTOCK_UPDATE_RULES_H
#define PENSTOCK_UPDATE_RULES_H

#include "update_equations.h"
#include "vectors.h"

/* Ask for the cache lines of the row that comes `ahead` rows later, to write. */
INLINE void prefetch_row(const Batch *b, int64_t i) {
    if (i < b->num_known) {
        const char *row = (const char *)b->rows[i];
        for (int64_t offset = 0; offset < b->row_bytes; offset += 64) __builtin_prefetch(row + offset, 1);
        /* A row that is no whole number of lines may end in one line more. */
        if (b->row_bytes & 63) __builtin_prefetch(row + b->row_bytes - 1, 1);
    }
}

/* One loop over rows per rule and target. slots is a constant, so that the branches on it go away; where dim is a multiple
   of 16, the compiler sees it, and leaves out what follows the last vector. */
#define ELEMENTWISE(rule, slots, target, attributes)                                            \
    attributes INLINE void rule##_rows_##target(const Rule *constants, const Batch *b,          \
                                                const int64_t dim) {                            \
        const Rule r = *constants;                                                              \
        for (int64_t i = 0; i < b->num_rows; i++) {                                             \
            const float *g = b->grads[i];                                                       \
            float *w = b->rows[i], *s0 = w + dim, *s1 = s0 + dim, *s2 = s1 + dim;               \
            prefetch_row(b, i + b->ahead);                                                      \
            NO_OVERLAP                                                                          \
            for (int64_t c = 0; c < dim; c++) {                                                 \
                Element e = {decayed(&r, w[c]), slots > 0 ? s0[c] : 0, slots > 1 ? s1[c] : 0,   \
                             slots > 2 ? s2[c] : 0};                                            \
                e = rule(&r, clipped_gradient(&r, g[c]), e);                                    \
                w[c] = clipped_weight(&r, e.w);                                                 \
                if (slots > 0) s0[c] = e.s0;                                                    \
                if (slots > 1) s1[c] = e.s1;                                                    \
                if (slots > 2) s2[c] = e.s2;                                                    \
            }                                                                                   \
        }                                                                                       \
    }                                                                                           \
    attributes static void rule##_##target(const Rule *constants, const Batch *b) {             \
        if (b->dim % 16 == 0)                                                                   \
            rule##_rows_##target(constants, b, b->dim / 16 * 16);                               \
        else                                                                                    \
            rule##_rows_##target(constants, b, b->dim);                                         \
    }

#define ROW_WISE(rule, slots, target, attributes)                                               \
    attributes static void rule##_##target(const Rule *constants, const Batch *b) {             \
        const Rule r = *constants;                                                              \
        for (int64_t i = 0; i < b->num_rows; i++) {                                             \
            prefetch_row(b, i + b->ahead);                                                      \
            rule##_row(&r, b->grads[i], b->rows[i], b->dim);                                    \
        }                                                                                       \
    }

/* Every rule: how its loop is made, its name, its number of slots. */
#define RULES(X, Y, target, attributes)            \
    X(sgd, 0, target, attributes)                  \
    X(assign, 0, target, attributes)               \
    X(adagrad, 1, target, attributes)              \
    X(adagrad_momentum, 2, target, attributes)     \
    X(adagrad_momentum_pow, 2, target, attributes) \
    X(bounded_adagrad, 1, target, attributes)      \
    X(proximal_adagrad, 1, target, attributes)     \
    X(ftrl, 2, target, attributes)                 \
    X(ftrl_pow, 2, target, attributes)             \
    X(adam, 2, target, attributes)                 \
    X(momentum, 1, target, attributes)             \
    X(lion, 1, target, attributes)                 \
    X(rms_prop, 2, target, attributes)             \
    X(centered_rms_prop, 3, target, attributes)    \
    X(adadelta, 2, target, attributes)             \
    X(online_yogi, 2, target, attributes)          \
    X(proximal_yogi, 2, target, attributes)        \
    X(frequency_estimator, 1, target, attributes)  \
    X(torch_adagrad, 1, target, attributes)        \
    Y(row_wise_adagrad, 1, target, attributes)     \
    Y(partial_row_wise_adam, 2, target, attributes)

#define ENTRY(rule, slots, target, attributes) {#rule, slots, 0, rule##_##target},
#define ROW_WISE_ENTRY(rule, slots, target, attributes) {#rule, slots, 1, rule##_##target},

typedef struct {
    const char *name;
    int num_slots;
    int row_slots; /* how many slots, the last ones, are one float per row; the others are as wide as the row */
    UpdateRows run;
} RuleEntry;

enum { NUM_RULES = 21 };

RULES(ELEMENTWISE, ROW_WISE, baseline, )
static const RuleEntry rules_baseline[NUM_RULES] = {RULES(ENTRY, ROW_WISE_ENTRY, baseline, )};

#ifdef PENSTOCK_X86
#define FOR_AVX2 __attribute__((target("avx2")))
#define FOR_AVX512 __attribute__((target("avx512f,avx512vl,avx512dq,prefer-vector-width=512")))
RULES(ELEMENTWISE, ROW_WISE, avx2, FOR_AVX2)
RULES(ELEMENTWISE, ROW_WISE, avx512, FOR_AVX512)
static const RuleEntry rules_avx2[NUM_RULES] = {RULES(ENTRY, ROW_WISE_ENTRY, avx2, )};
static const RuleEntry rules_avx512[NUM_RULES] = {RULES(ENTRY, ROW_WISE_ENTRY, avx512, )};
#endif

/* The rules compiled for an instruction set of this machine (vectors.h). */
static inline const RuleEntry *rules_of_isa(int isa) {
#ifdef PENSTOCK_X86
    if (isa == AVX512) return rules_avx512;
    if (isa == AVX2) return rules_avx2;
#endif
    return rules_baseline;
}

#endif
