"""All optimizers: a class declares arguments, slots, ranges and equation, over arrays of any namespace.

NumPy runs the equations as the oracle, JAX traces them for the device. This package does not depend on tables,
ids, devices or jax: an update takes rows and returns rows, elementwise (with slots of one number per row: row by row).
rule.py has the operations that the equations use; docs/optimizers.md describes the differences from
Keras and torch.

An update of a touched row consists of these steps (TensorFlow, optimization_parameters.proto and the decoupled weight
decay it refers to): clip the gradient → decay the weight → the optimizer's update → clip the
weight. Slots are never clipped. Doubts: the order is not public beyond those comments; the
documentation of TensorFlow's SGD class multiplies the weight by the decay factor, which would set
the table to zero within a few steps, so penstock uses w - d*w of the referenced extension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from penstock.model.updates import adagrad_family, ftrl, moments, stateless
from penstock.model.updates.adagrad_family import *  # noqa: F403 (the classes that the module lists)
from penstock.model.updates.ftrl import *  # noqa: F403
from penstock.model.updates.moments import *  # noqa: F403
from penstock.model.updates.optax_transforms import OptaxRule, from_optax
from penstock.model.updates.optimizer_class import (
    OPTIMIZERS,
    OWN_FIELDS,
    DynamicLearningRate,
    Equation,
    LearningRate,
    Optimizer,
)
from penstock.model.updates.rule import ROW_SLOTS, Array, Ops, Result, Slots, UpdateRule, clip, float32
from penstock.model.updates.stateless import *  # noqa: F403
from penstock.model.updates.stateless import UserDefinedProgram

__all__ = ["OPTIMIZERS", "OWN_OPTIMIZERS", "UPDATES", "WITHOUT_FORMULA", "DynamicLearningRate", "LearningRate", "Ops"]
__all__ += ["OptaxRule", "Optimizer", "UpdateRule", "clip", "from_optax", "quantize", "update", "update_rule"]
__all__ += adagrad_family.__all__ + ftrl.__all__ + moments.__all__ + stateless.__all__

UPDATES: Mapping[str, Equation] = MappingProxyType(
    {field: optimizer.equation for field, optimizer in OPTIMIZERS.items() if optimizer.has_formula()}
)
"""Every equation by the member of ``OptimizationParameters.parameters``."""

WITHOUT_FORMULA = OPTIMIZERS.keys() - UPDATES.keys()
"""Optimizers that can be loaded, kept and saved but not run: how they update is not public."""

OWN_OPTIMIZERS = OPTIMIZERS.keys() & OWN_FIELDS
"""Those that TensorFlow's message has no member for."""


_OF_ROWS = {optimizer.__name__: ROW_SLOTS.get(field, 0) for field, optimizer in OPTIMIZERS.items()}


def row_slots_of(class_name: str) -> int:
    """Return how many slots of an optimizer, the last ones, have one number per row. class_name : of its class"""
    return _OF_ROWS.get(class_name, 0)


def update_rule(optimizer: Optimizer) -> UpdateRule:
    """Return the constant part of the optimizer's update, with numbers in float32; equal rules share compiled code.

    Parameters
    ----------
    optimizer : Optimizer
        Of any class.

    Returns
    -------
    UpdateRule

    Examples
    --------
    >>> import penstock as ps
    >>> ps.updates.update_rule(ps.SGD(0.1)) == ps.updates.update_rule(ps.SGD(0.5))  # the rate is an argument
    True
    """
    decay = float32(optimizer.weight_decay_factor or 0.0)
    switches = optimizer.fields()
    hyper = {
        name: bool(value) if switches[name] else float32(value)
        for name, value in optimizer.proto_values().items()
        if name not in optimizer.not_in_equation
    }
    return UpdateRule(
        algorithm=optimizer.parameters_field,
        num_slots=len(optimizer.slots()),
        hyper=tuple(sorted(hyper.items())),
        gradient_min=_bound(optimizer.clip_gradient_min, -math.inf),
        gradient_max=_bound(optimizer.clip_gradient_max, math.inf),
        weight_decay=decay,
        decay_times_learning_rate=bool(decay and optimizer.multiply_weight_decay_factor_by_learning_rate),
        weight_min=_bound(optimizer.clip_weight_min, -math.inf),
        weight_max=_bound(optimizer.clip_weight_max, math.inf),
        non_lazy=optimizer.non_lazy,
        program=optimizer.program if isinstance(optimizer, UserDefinedProgram) else None,
    )


def update(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """Return the weights and slots of touched rows after one optimizer step.

    Parameters
    ----------
    ops : Ops
        The array namespace.
    rule : UpdateRule
        The constants of the update.
    lr : scalar, or array of shape (3,)
        ``rate_at`` of the rule, of w's dtype.
    g, w : array, shape (..., dim)
        Gradients and weights, of one float dtype.
    slots : tuple of array
        Each of w's shape; the last ``row_slots`` of them: (..., 1).

    Returns
    -------
    weights : array
        Of the same shape and dtype.
    slots : tuple of array
        Of the same shapes and dtype.

    Examples
    --------
    >>> import numpy as np
    >>> import penstock as ps
    >>> rule = ps.updates.update_rule(ps.Adagrad(0.1))
    >>> g, w, a = np.float32([[0.5, -2.0]]), np.float32([[1.0, 1.0]]), np.float32([[0.1, 0.1]])
    >>> ps.updates.update(ps.updates.Ops(np), rule, np.float32(0.1), g, w, (a,))
    (array([[0.91548455, 1.098773  ]], dtype=float32), (array([[0.35, 4.1 ]], dtype=float32),))
    """
    g = clip(ops, g, rule.gradient_min, rule.gradient_max)
    if rule.weight_decay:
        decay = w.dtype.type(rule.weight_decay)
        rate = lr[0] if rule.is_corrected else lr
        w = w - ops.rounded((ops.rounded(decay * rate) if rule.decay_times_learning_rate else decay) * w)
    w, slots = UPDATES[rule.algorithm](ops, rule, lr, g, w, slots)
    return clip(ops, w, rule.weight_min, rule.weight_max), slots


def quantize(ops: Ops, values: Array, num_buckets: int, lower: float, upper: float) -> Array:
    """Return rows as a forward pass with simulated quantization reads them; the table does not change.

    Parameters
    ----------
    ops : Ops
        The array namespace.
    values : array
        Rows, of one float dtype.
    num_buckets : int
        Number of levels, at least 2.
    lower, upper : float
        The lowest and the highest level.

    Returns
    -------
    array
        Of the same shape and dtype.

    Notes
    -----
    ``x = clip(values, lower, upper); q = (upper - lower)/(num_buckets - 1); floor((x - lower)/q + 0.5)*q + lower``:
    halves round up, and equal limits give NaN.

    References
    ----------
    ``simulated_quantization`` in the comments of TensorFlow's ``optimization_parameters.proto``

    Examples
    --------
    >>> import numpy as np
    >>> import penstock as ps
    >>> ps.updates.quantize(ps.updates.Ops(np), np.float32([-2.0, 0.3, 0.8]), 5, -1.0, 1.0)
    array([-1. ,  0.5,  1. ], dtype=float32)
    """
    number = values.dtype.type
    low, high = number(lower), number(upper)
    quantum = (high - low) / number(num_buckets - 1)
    levels = ops.xp.floor((clip(ops, values, low, high) - low) / ops.rounded(quantum) + number(0.5))
    return ops.rounded(levels * quantum) + low


def _bound(value: float | None, open_side: float) -> float | None:
    """Return a clip bound in float32, None if it clips nothing: such a bound costs nothing and equals an absent one."""
    if value is None or float32(value) == open_side:
        return None
    return float32(value)
