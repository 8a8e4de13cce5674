"""The update equations, each stated once, over arrays of any namespace (numpy or jax.numpy).

NumPy runs them as the oracle, JAX traces them for the device. Nothing here knows about tables,
ids or devices: an update takes rows and gives rows, elementwise. No jax is imported here.

One touched row goes through (TensorFlow, optimization_parameters.proto; fact order 2.6 of the
proto's comments): clip the gradient → decay the weight → the optimizer's update → clip the
weight. Slots are never clipped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Array = Any  # numpy.ndarray or jax.Array: the namespace is an argument
Slots = tuple[Array, ...]


@dataclass(frozen=True)
class Ops:
    """What the equations are written with.

    xp : numpy or jax.numpy
    rounded : a product that goes into a sum passes through it, and so does a divisor. NumPy rounds it
        anyway; a compiler would fuse it into the sum (FMA) or turn the division into a multiplication,
        and give other bits on other machines.
    """

    xp: ModuleType
    rounded: Callable[[Array], Array] = lambda x: x


@dataclass(frozen=True)
class UpdateRule:
    """Everything about an update that is fixed for a table: hashable, so that programs can be shared.

    algorithm : the member of ``OptimizationParameters.parameters`` it stands for
    num_slots : state arrays beside the weights, in TensorFlow's load/retrieve order
    hyper : (name, value) of the optimizer's own parameters, by the names of its proto message; numbers are
        rounded to float32, as the proto carries them
    gradient_min, gradient_max : clip of the coalesced gradient; None leaves that side open
    weight_decay : factor d of ``w - d*w``, applied before the update; 0 is off
    decay_times_learning_rate : d becomes ``weight_decay * lr``
    weight_min, weight_max : clip of the updated weight; None leaves that side open
    non_lazy : every row is updated in each step, with a gradient of 0 where none came
    program : of user_defined_program: (gradient, weights, *slots) -> (weights, *slots)
    """

    algorithm: str
    num_slots: int
    hyper: tuple[tuple[str, float | bool], ...] = ()
    gradient_min: float | None = None
    gradient_max: float | None = None
    weight_decay: float = 0.0
    decay_times_learning_rate: bool = False
    weight_min: float | None = None
    weight_max: float | None = None
    non_lazy: bool = False
    program: Callable[..., Any] | None = None


def sgd(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> tuple[Array, Slots]:
    """``w' = w - lr*g``. Source: sparse_core_ops_utils.cc; ResourceScatterSub on the CPU."""
    return w - ops.rounded(lr * g), slots


def adagrad(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> tuple[Array, Slots]:
    """``a' = a + g²; w' = w - lr*g/sqrt(a')``, no epsilon: a > 0 is the caller's to start with.

    Source: sparse_core_ops_utils.cc; ResourceSparseApplyAdagrad (update_slots=true) on the CPU.
    """
    (accumulators,) = slots
    accumulators = accumulators + ops.rounded(g * g)
    return w - lr * g / ops.rounded(ops.xp.sqrt(accumulators)), (accumulators,)


UPDATES: dict[str, Callable[..., tuple[Array, Slots]]] = {
    "stochastic_gradient_descent": sgd,
    "adagrad": adagrad,
}


def clip(ops: Ops, values: Array, lower: float | None, upper: float | None) -> Array:
    """``min(max(values, lower), upper)``, in that order: reversed limits give ``upper``."""
    if lower is not None:
        values = ops.xp.maximum(values, values.dtype.type(lower))
    if upper is not None:
        values = ops.xp.minimum(values, values.dtype.type(upper))
    return values


def update(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> tuple[Array, Slots]:
    """One optimizer application to rows that were touched.

    lr : scalar of w's dtype
    g, w, every slot : one float dtype, shape (..., dim)
    Returns the new weights and the new slots, the same shapes and dtype.
    """
    g = clip(ops, g, rule.gradient_min, rule.gradient_max)
    if rule.weight_decay:
        decay = w.dtype.type(rule.weight_decay)
        w = w - ops.rounded((decay * lr if rule.decay_times_learning_rate else decay) * w)
    w, slots = UPDATES[rule.algorithm](ops, rule, lr, g, w, slots)
    return clip(ops, w, rule.weight_min, rule.weight_max), slots
