"""The update equations, each defined once, over arrays of any namespace (numpy or jax.numpy).

NumPy runs them as the oracle, JAX traces them for the device. This package does not depend on tables,
ids, devices or jax: an update takes rows and returns rows, elementwise (row_wise_adagrad: row by row).
rule.py has the operations that the equations use; docs/optimizers.md describes the differences from
Keras and torch.

An update of a touched row consists of these steps (TensorFlow, optimization_parameters.proto and the decoupled weight
decay it refers to): clip the gradient → decay the weight → the optimizer's update → clip the
weight. Slots are never clipped. Doubts: the order is not public beyond those comments; the
documentation of TensorFlow's SGD class multiplies the weight by the decay factor, which would set
the table to zero within a few steps, so penstock uses w - d*w of the referenced extension.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.updates.adagrad import adagrad, adagrad_momentum, bounded_adagrad, proximal_adagrad, row_wise_adagrad
from penstock.updates.moments import adadelta, adam, centered_rms_prop, lion, momentum, rms_prop
from penstock.updates.optax_transforms import OptaxRule, from_optax
from penstock.updates.plain import assign, frequency_estimator, sgd, user_defined_program
from penstock.updates.proximal import ftrl, online_yogi, proximal_yogi
from penstock.updates.rule import Array, Ops, Result, Slots, UpdateRule, clip

__all__ = ["UPDATES", "Ops", "OptaxRule", "UpdateRule", "clip", "from_optax", "quantize", "update"]

Equation = Callable[[Ops, UpdateRule, Array, Array, Array, Slots], Result]

# By the member of OptimizationParameters.parameters; mdl_adagrad_light and frequency_aware_adagrad have no
# public formula.
UPDATES: dict[str, Equation] = {
    "stochastic_gradient_descent": sgd,
    "adagrad": adagrad,
    "adagrad_momentum": adagrad_momentum,
    "bounded_adagrad": bounded_adagrad,
    "proximal_adagrad": proximal_adagrad,
    "row_wise_adagrad": row_wise_adagrad,
    "ftrl": ftrl,
    "adam": adam,
    "momentum": momentum,
    "lion": lion,
    "rms_prop": rms_prop,
    "centered_rms_prop": centered_rms_prop,
    "adadelta": adadelta,
    "online_yogi": online_yogi,
    "proximal_yogi": proximal_yogi,
    "frequency_estimator": frequency_estimator,
    "assign": assign,
    "user_defined_program": user_defined_program,
}


def update(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """Apply one optimizer step to touched rows.

    lr : scalar of w's dtype
    g, w, every slot : one float dtype, shape (..., dim); slots of a rule with ``row_slots``: (..., 1)
    Returns the new weights and the new slots, of the same shapes and dtype.
    """
    g = clip(ops, g, rule.gradient_min, rule.gradient_max)
    if rule.weight_decay:
        decay = w.dtype.type(rule.weight_decay)
        w = w - ops.rounded((ops.rounded(decay * lr) if rule.decay_times_learning_rate else decay) * w)
    w, slots = UPDATES[rule.algorithm](ops, rule, lr, g, w, slots)
    return clip(ops, w, rule.weight_min, rule.weight_max), slots


def quantize(ops: Ops, values: Array, num_buckets: int, lower: float, upper: float) -> Array:
    """Quantize rows as a forward pass with simulated quantization reads them; the table does not change.

    ``x = clip(values, lower, upper); q = (upper - lower)/(num_buckets - 1); floor((x - lower)/q + 0.5)*q + lower``:
    halves round up, and equal limits give NaN. Source: simulated_quantization in the proto's comments.
    """
    number = values.dtype.type
    low, high = number(lower), number(upper)
    quantum = (high - low) / number(num_buckets - 1)
    levels = ops.xp.floor((clip(ops, values, low, high) - low) / ops.rounded(quantum) + number(0.5))
    return ops.rounded(levels * quantum) + low
