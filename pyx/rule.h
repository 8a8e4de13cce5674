/* What a rule is given: by update.pyx, which chooses it, to the kernels, which call it. */
#ifndef PENSTOCK_RULE_H
#define PENSTOCK_RULE_H

#include <stdint.h>

/* The fixed part of a rule, and the rates of the step. Limits that are off are infinite. */
typedef struct {
    float lr;
    float gradient_min, gradient_max, weight_min, weight_max;
    float weight_decay;
    float momentum, exponent, beta, beta1, beta2, rho, epsilon, lr_power, l1, l2;
    float max_var_update, max_accumulator, tau, max_delta, outlier_threshold;
    float of_mean, of_root; /* factors of the first moment and of the root of the second, of the step */
    int decay_times_learning_rate, use_nesterov, use_sum_inside_sqrt, update_accumulator_first;
    int multiply_linear_by_lr;
} Rule;

/* Rows to update: rows[i] is dim weights, then each slot, of dim floats, the last ones of one; grads[i] is its gradient. The memory of a
   row is asked for `ahead` rows early; num_known rows are listed, of which those after num_rows are updated later. */
typedef struct {
    float *const *rows;
    const float *const *grads;
    int64_t num_rows, num_known, dim, ahead;
    int64_t row_bytes;
} Batch;

typedef void (*UpdateRows)(const Rule *, const Batch *);

#endif
