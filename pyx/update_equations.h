/* The update equations of engine/updates, element by element.
 *
 * Same operations in the same order as there, where sources and doubts stand; the C is a transcript. The
 * file is compiled with -ffp-contract=off, and only IEEE add, multiply, divide and square root take part
 * (pow in the two rules named *_pow), so that every vector width gives the bits that NumPy gives; which
 * of two NaNs comes out of an operation is the one thing that may differ.
 */
#ifndef PENSTOCK_UPDATE_EQUATIONS_H
#define PENSTOCK_UPDATE_EQUATIONS_H

#include <math.h>

#include "rule.h"

#define INLINE static inline __attribute__((always_inline))

/* Rows of one table differ in nothing: an element's loop may be vectorised without looking for overlaps. */
#if defined(__clang__)
#define NO_OVERLAP _Pragma("clang loop vectorize(assume_safety)")
#else
#define NO_OVERLAP _Pragma("GCC ivdep")
#endif

typedef struct {
    float w, s0, s1, s2;
} Element;

/* Comparisons, not fminf: a NaN stays, and of two zeros the first stays. */
INLINE float at_least(float x, float limit) { return x < limit ? limit : x; }
INLINE float at_most(float x, float limit) { return x > limit ? limit : x; }
INLINE float sign_of(float x) { return x > 0 ? 1.0f : (x < 0 ? -1.0f : 0.0f); }
INLINE float mix(float keep, float old, float fresh) { return keep * old + (1.0f - keep) * fresh; }

INLINE Element sgd(const Rule *r, float g, Element e) {
    e.w = e.w - r->lr * g;
    return e;
}

INLINE Element assign(const Rule *r, float g, Element e) {
    (void)r;
    e.w = g;
    return e;
}

INLINE Element adagrad(const Rule *r, float g, Element e) {
    e.s0 = e.s0 + g * g;
    e.w = e.w - r->lr * g / sqrtf(e.s0);
    return e;
}

INLINE Element torch_adagrad(const Rule *r, float g, Element e) {
    e.s0 = e.s0 + g * g;
    e.w = e.w - r->lr * g / (sqrtf(e.s0) + r->epsilon);
    return e;
}

INLINE Element adagrad_momentum_with(const Rule *r, float g, Element e, int pow) {
    float s, step;
    e.s0 = r->beta2 == 1 ? e.s0 + g * g : mix(r->beta2, e.s0, g * g);
    s = pow ? g * powf(e.s0 + r->epsilon, -1.0f / r->exponent) : g / sqrtf(e.s0 + r->epsilon);
    e.s1 = r->momentum * e.s1 + s;
    step = r->use_nesterov ? r->momentum * e.s1 + s : e.s1;
    e.w = e.w - r->lr * step;
    return e;
}

INLINE Element adagrad_momentum(const Rule *r, float g, Element e) { return adagrad_momentum_with(r, g, e, 0); }
INLINE Element adagrad_momentum_pow(const Rule *r, float g, Element e) { return adagrad_momentum_with(r, g, e, 1); }

INLINE Element bounded_adagrad(const Rule *r, float g, Element e) {
    float a = e.s0 + g * g, step;
    a = r->max_accumulator > 0 ? at_most(a, r->max_accumulator) : a;
    step = r->lr * g / sqrtf(r->update_accumulator_first ? a : e.s0);
    step = r->max_var_update > 0 ? at_most(at_least(step, -r->max_var_update), r->max_var_update) : step;
    e.s0 = a;
    e.w = e.w - step;
    return e;
}

/* The proximal step of l1 and l2. */
INLINE float shrink(const Rule *r, float rate, float p) {
    float held = sign_of(p) * at_least(fabsf(p) - rate * r->l1, 0.0f);
    p = r->l1 != 0 ? held : p;
    return r->l2 != 0 ? p / (1.0f + rate * r->l2) : p;
}

INLINE Element proximal_adagrad(const Rule *r, float g, Element e) {
    float rate;
    e.s0 = e.s0 + g * g;
    rate = r->lr / sqrtf(e.s0);
    e.w = shrink(r, rate, e.w - rate * g);
    return e;
}

/* (clamp(z, -limit, limit) - z)/q; without a limit -z/q, since 0 - z would be +0 for a z of 0. */
INLINE float solve(int limited, float limit, float q, float w, float z) {
    float numerator = limited ? at_most(at_least(z, -limit), limit) - z : -z;
    return q == 0 ? w : numerator / (q == 0 ? 1.0f : q);
}

/* before, after: the accumulator's power before and after the step. */
INLINE Element ftrl_with(const Rule *r, float g, Element e, float before, float after) {
    float limit, q;
    if (r->multiply_linear_by_lr) {
        e.s1 = e.s1 + (r->lr * g - (after - before) * e.w);
        q = after + r->beta + 2.0f * r->l2 * r->lr;
        limit = r->l1 * r->lr;
    } else {
        float per_lr = 1.0f / r->lr;
        e.s1 = e.s1 + (g - (after - before) * per_lr * e.w);
        q = (after + r->beta) * per_lr + 2.0f * r->l2;
        limit = r->l1;
    }
    e.w = solve(r->l1 != 0, limit, q, e.w, e.s1);
    return e;
}

INLINE Element ftrl(const Rule *r, float g, Element e) {
    float before = sqrtf(e.s0);
    e.s0 = e.s0 + g * g;
    return ftrl_with(r, g, e, before, sqrtf(e.s0));
}

INLINE Element ftrl_pow(const Rule *r, float g, Element e) {
    float before = powf(e.s0, -r->lr_power);
    e.s0 = e.s0 + g * g;
    return ftrl_with(r, g, e, before, powf(e.s0, -r->lr_power));
}

INLINE Element adam(const Rule *r, float g, Element e) {
    float divisor;
    e.s0 = mix(r->beta1, e.s0, g);
    e.s1 = mix(r->beta2, e.s1, g * g);
    divisor = r->use_sum_inside_sqrt ? sqrtf(e.s1 + r->epsilon * r->epsilon) : sqrtf(e.s1) + r->epsilon;
    e.w = e.w - r->lr * e.s0 / divisor;
    return e;
}

INLINE Element momentum(const Rule *r, float g, Element e) {
    float step;
    e.s0 = r->momentum * e.s0 + g;
    step = r->use_nesterov ? g + r->momentum * e.s0 : e.s0;
    e.w = e.w - r->lr * step;
    return e;
}

INLINE Element lion(const Rule *r, float g, Element e) {
    e.w = e.w - r->lr * sign_of(mix(r->beta1, e.s0, g));
    e.s0 = mix(r->beta2, e.s0, g);
    return e;
}

INLINE Element rms_prop(const Rule *r, float g, Element e) {
    e.s0 = mix(r->rho, e.s0, g * g);
    e.s1 = r->momentum * e.s1 + r->lr * g / sqrtf(e.s0 + r->epsilon);
    e.w = e.w - e.s1;
    return e;
}

INLINE Element centered_rms_prop(const Rule *r, float g, Element e) {
    float deviation;
    e.s0 = mix(r->rho, e.s0, g * g);
    e.s2 = mix(r->rho, e.s2, g);
    deviation = (e.s0 - e.s2 * e.s2) + r->epsilon;
    deviation = deviation > 0 ? deviation : r->epsilon;
    e.s1 = r->momentum * e.s1 + r->lr * g / sqrtf(deviation);
    e.w = e.w - e.s1;
    return e;
}

INLINE Element adadelta(const Rule *r, float g, Element e) {
    float u;
    e.s0 = mix(r->rho, e.s0, g * g);
    u = g * sqrtf(e.s1 + r->epsilon) / sqrtf(e.s0 + r->epsilon);
    e.w = e.w - r->lr * u;
    e.s1 = mix(r->rho, e.s1, u * u);
    return e;
}

INLINE float yogi_moment(float beta2, float v, float g) {
    float squared = g * g, step = (1.0f - beta2) * squared;
    return squared > v ? v + step : (squared < v ? v - step : v);
}

INLINE Element online_yogi(const Rule *r, float g, Element e) {
    float before = sqrtf(e.s0), per_lr = 1.0f / r->lr, after;
    e.s0 = yogi_moment(r->beta2, e.s0, g);
    after = sqrtf(e.s0);
    e.s1 = e.s1 + (g - (after - before) * per_lr * e.w);
    e.w = solve(r->l1 != 0, r->l1, after * per_lr + 2.0f * r->l2, e.w, e.s1);
    return e;
}

INLINE Element proximal_yogi(const Rule *r, float g, Element e) {
    float rate;
    e.s1 = mix(r->beta1, e.s1, g);
    e.s0 = yogi_moment(r->beta2, e.s0, g);
    rate = r->lr / (sqrtf(e.s0) + r->epsilon);
    e.w = shrink(r, rate, e.w - rate * e.s1);
    return e;
}

INLINE Element frequency_estimator(const Rule *r, float g, Element e) {
    float distance = r->lr - e.s0, capped = at_most(distance, r->max_delta);
    (void)g;
    e.w = distance >= r->outlier_threshold * e.w ? capped : mix(r->tau, capped, e.w);
    e.s0 = 0.0f + r->lr;
    return e;
}

INLINE float decayed(const Rule *r, float w) {
    float share = r->decay_times_learning_rate ? r->weight_decay * r->lr : r->weight_decay;
    return r->weight_decay != 0 ? w - share * w : w;
}

INLINE float clipped_gradient(const Rule *r, float g) { return at_most(at_least(g, r->gradient_min), r->gradient_max); }
INLINE float clipped_weight(const Rule *r, float w) { return at_most(at_least(w, r->weight_min), r->weight_max); }

/* The widest row whose squares are summed on the stack of whatever thread runs it. */
enum { MAX_SUMMED_DIM = 4096 };

/* The mean of a row's squares. Halves are added to halves until one is left: the order of Ops.row_mean in
 * model/updates/rule.py. */
INLINE float mean_of_squares(const Rule *r, const float *g, int64_t dim) {
    float sums[MAX_SUMMED_DIM], share = 1.0f / (float)dim;
    int64_t c, half, width;
    sums[0] = 0; /* the compiler does not know that dim is above 0 */
    for (c = 0; c < dim; c++) {
        float clipped = clipped_gradient(r, g[c]);
        sums[c] = clipped * clipped;
    }
    for (width = dim; width > 1; width -= half) {
        half = width / 2;
        NO_OVERLAP
        for (c = 0; c < half; c++) sums[c] = sums[c] + sums[width - half + c];
    }
    return sums[0] * share;
}

/* The accumulator is one float, behind the weights. */
INLINE void row_wise_adagrad_row(const Rule *r, const float *g, float *w, int64_t dim) {
    float divisor;
    w[dim] = w[dim] + mean_of_squares(r, g, dim);
    divisor = sqrtf(w[dim]);
    divisor = r->epsilon != 0 ? divisor + r->epsilon : divisor;
    NO_OVERLAP
    for (int64_t c = 0; c < dim; c++)
        w[c] = clipped_weight(r, decayed(r, w[c]) - r->lr * clipped_gradient(r, g[c]) / divisor);
}

/* Behind the weights are the first moments, then the second, one float. */
INLINE void partial_row_wise_adam_row(const Rule *r, const float *g, float *w, int64_t dim) {
    float *m = w + dim, *v = m + dim, divisor;
    *v = mix(r->beta2, *v, mean_of_squares(r, g, dim));
    divisor = sqrtf(*v) * r->of_root + r->epsilon;
    NO_OVERLAP
    for (int64_t c = 0; c < dim; c++) {
        m[c] = mix(r->beta1, m[c], clipped_gradient(r, g[c]));
        w[c] = clipped_weight(r, decayed(r, w[c]) - r->lr * (m[c] * r->of_mean) / divisor);
    }
}

#endif
