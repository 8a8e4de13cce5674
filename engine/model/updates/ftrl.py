"""FTRL and the two Yogi optimizers, which solve a regularised problem for each weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import InitVar
from typing import ClassVar

import numpy as np

from penstock.model.updates.optimizer_class import (
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Clip,
    KeywordOptimizer,
    LearningRate,
    Optimizer,
    Range,
    SlotFunction,
    optimizer_class,
    ranges,
)
from penstock.model.updates.rule import Array, Ops, Result, Slots, UpdateRule, clip, inverse, mix, root, shrink, square

__all__ = ["FTRL", "OnlineYogi", "ProximalYogi"]


@optimizer_class
class FTRL(Optimizer):
    """FTRL-proximal: solve a regularized problem for each weight in each step.

    Parameters
    ----------
    learning_rate_power : float
        ``-p`` of the equation; lint recommends at most 0. -0.5 is the square root.
    l1_regularization_strength, l2_regularization_strength : float
        Strengths of regularization; lint recommends at least 0. l1 sets weights to exactly 0.
    beta : float
        Added to the root of the accumulator; lint recommends at least 0.
    initial_accumulator_value : float
        Initial value of the slot ``accumulators``; above 0.
    multiply_linear_by_learning_rate : bool
        Keep the slot ``linears`` scaled by the learning rate.
    allow_zero_accumulator : bool
        Kept for the proto; accumulators of 0 work with and without it.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    ``p = -learning_rate_power; a' = a + g²; z' = z + g - (a'^p - a^p)*w/lr;
    w' = (clamp(z', -l1, l1) - z')/((a'^p + beta)/lr + 2*l2)``. Slots: accumulators (a), linears (z, from 0).

    References
    ----------
    ``tf.tpu.experimental.embedding.FTRL``

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.FTRL(0.1, l1_regularization_strength=1.0), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.21193126, 0.89321274]], dtype=float32)
    """

    parameters_field = "ftrl"
    zero_is_no_op = divides_by_rate = True
    slot_names = ("accumulators", "linears")
    derived_slot = "linears"
    first_slot_argument = "initial_accumulator_value"
    attribute_of: ClassVar[Mapping[str, str]] = {
        "l1": "l1_regularization_strength",
        "l2": "l2_regularization_strength",
        "lr_power": "learning_rate_power",
        "multiply_linear_by_lr": "multiply_linear_by_learning_rate",
    }
    not_in_equation = frozenset({"allow_zero_accumulator"})
    limits = ranges(initial_accumulator_value=POSITIVE)
    advised = ranges(
        l1_regularization_strength=NOT_NEGATIVE,
        l2_regularization_strength=NOT_NEGATIVE,
        beta=NOT_NEGATIVE,
        learning_rate_power=Range(-math.inf, math.nextafter(0, 1), False, "at most 0"),
    )

    learning_rate: LearningRate = 0.001
    learning_rate_power: float = -0.5
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    beta: float = 0.0
    initial_accumulator_value: float = 0.1
    use_gradient_accumulation: bool = True
    clip_weight_min: float | None = None
    clip_weight_max: float | None = None
    weight_decay_factor: float | None = None
    multiply_weight_decay_factor_by_learning_rate: bool | None = None
    slot_variable_creation_fn: SlotFunction = None
    clipvalue: InitVar[Clip] = None
    multiply_linear_by_learning_rate: bool = False
    allow_zero_accumulator: bool = False
    low_dimensional_packing_status: bool | int = False

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # lr_power = -0.5 is a square root, others need pow. With multiply_linear_by_lr, z is lr times as large.
        # Source: sparse_core_ops_utils.cc; ResourceSparseApplyFtrl on the CPU (beta through l2 + beta/(2*lr)).
        a, z = slots
        lr_power, beta = rule.numbers(w, "lr_power", "beta")
        before, after = _power(ops, a, -lr_power), _power(ops, a + square(ops, g), -lr_power)
        a = a + square(ops, g)
        times_lr = rule.flag("multiply_linear_by_lr")
        if times_lr:
            z = z + (ops.rounded(lr * g) - ops.rounded((after - before) * w))
        else:
            per_lr = inverse(ops, lr)
            z = z + (g - ops.rounded(ops.rounded((after - before) * per_lr) * w))
        return _solve(ops, *_problem(ops, rule, lr, after + beta, times_lr), w, z), (a, z)

    @staticmethod
    def derived(rule: UpdateRule, lr: Array, w: Array, slots: Slots) -> tuple[Array, Array]:
        ops = Ops(np)
        lr_power, l1, l2, beta = rule.numbers(w, "lr_power", "l1", "l2", "beta")
        times_lr = rule.flag("multiply_linear_by_lr")
        if times_lr and not l1 and not l2:
            lr = w.dtype.type(1)  # the linear slot does not depend on the rate
        return _keeping(*_problem(ops, rule, lr, _power(ops, slots[0], -lr_power) + beta, times_lr), w)


@optimizer_class
class OnlineYogi(KeywordOptimizer):
    """FTRL (power -0.5) whose accumulator is Yogi's second moment.

    Parameters
    ----------
    l1, l2 : float
        Strengths of regularization, at least 0.
    beta2 : float
        Decay of the second moment, at least 0 and below 1.
    initial_v_value : float
        Initial value of the slot ``vs``, at least 0.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    ``v' = v + (1-beta2)*sign(g² - v)*g²``; the step is FTRL's. Slots: vs (v), linears (from 0). The device's formula is
    not public. Defaults: those of the paper (0.01, 0.999).

    References
    ----------
    Comments of ``OnlineYogiParameters`` in TensorFlow's ``optimization_parameters.proto``; Zaheer et al., NeurIPS 2018.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.OnlineYogi(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[-0.15666899,  0.639593  ]], dtype=float32)
    """

    parameters_field = "online_yogi"
    doubt = "only the paper and comments on its fields are public"
    divides_by_rate = True
    slot_names = ("vs", "linears")
    derived_slot = "linears"
    first_slot_argument = "initial_v_value"
    limits = ranges(l1=NOT_NEGATIVE, l2=NOT_NEGATIVE, initial_v_value=NOT_NEGATIVE, beta2=SHARE)

    learning_rate: LearningRate = 0.01
    l1: float = 0.0
    l2: float = 0.0
    beta2: float = 0.999
    initial_v_value: float = 0.1

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # Doubt: the formula is not public; this is FTRL with lr_power = -0.5, beta = 0 and Yogi's moment.
        v, z = slots
        before, v = root(ops, v), _yogi_moment(ops, rule.number(w, "beta2"), v, g)
        after = root(ops, v)
        per_lr = inverse(ops, lr)
        z = z + (g - ops.rounded(ops.rounded((after - before) * per_lr) * w))
        return _solve(ops, *_problem(ops, rule, lr, after), w, z), (v, z)

    @staticmethod
    def derived(rule: UpdateRule, lr: Array, w: Array, slots: Slots) -> tuple[Array, Array]:
        ops = Ops(np)
        return _keeping(*_problem(ops, rule, lr, root(ops, slots[0])), w)


@optimizer_class
class ProximalYogi(KeywordOptimizer):
    """Yogi with a proximal step for l1 and l2 regularization.

    Parameters
    ----------
    beta1, beta2 : float
        Decays of the first and the second moment, each at least 0 and below 1.
    epsilon : float
        Added to the root of the second moment; above 0.
    l1, l2 : float
        Strengths of regularization, at least 0.
    initial_v_value : float
        Initial value of the slot ``v``, at least 0.

    See Also
    --------
    penstock.updates.Optimizer : ``learning_rate`` and the other arguments of all optimizers.

    Notes
    -----
    ``m' = beta1*m + (1-beta1)*g; v' = v + (1-beta2)*sign(g² - v)*g²; e = lr/(sqrt(v') + epsilon); p = w - e*m'``;
    ``w' = sign(p)*max(|p| - e*l1, 0)/(1 + e*l2)``. Slots: v, m (from 0), the second moment first. The device's formula
    is not public. Defaults: those of TensorFlow 1's ProximalYogiParameters.

    References
    ----------
    Comments of ``ProximalYogiParameters`` in TensorFlow's ``optimization_parameters.proto``.

    Examples
    --------
    >>> import penstock as ps
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.ProximalYogi(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.apply({"user": ([5], [[0.5, -2.0]])})
    True
    >>> engine.lookup("user", [5])
    array([[0.98425806, 1.0618256 ]], dtype=float32)
    """

    parameters_field = "proximal_yogi"
    doubt = "only the paper and comments on its fields are public"
    slot_names = ("v", "m")
    first_slot_argument = "initial_v_value"
    limits = ranges(
        epsilon=POSITIVE, l1=NOT_NEGATIVE, l2=NOT_NEGATIVE, initial_v_value=NOT_NEGATIVE, beta1=SHARE, beta2=SHARE
    )

    learning_rate: LearningRate = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-3
    l1: float = 0.0
    l2: float = 0.0
    initial_v_value: float = 0.1

    @staticmethod
    def equation(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
        # Source: TensorFlow Addons' Yogi, without its bias correction. Doubt: the formula on the device is not public.
        v, m = slots
        beta1, beta2, epsilon = rule.numbers(w, "beta1", "beta2", "epsilon")
        m = mix(ops, beta1, m, g)
        v = _yogi_moment(ops, beta2, v, g)
        rate = ops.rounded(lr / ops.rounded(root(ops, v) + epsilon))
        return shrink(ops, rule, rate, w - ops.rounded(rate * m)), (v, m)


def _yogi_moment(ops: Ops, beta2: Array, v: Array, g: Array) -> Array:
    """Move v towards g² by a share of g²: ``v + (1-beta2)*sign(g² - v)*g²``."""
    squared = square(ops, g)
    step = ops.rounded((v.dtype.type(1) - beta2) * squared)
    return ops.xp.where(squared > v, v + step, ops.xp.where(squared < v, v - step, v))


def _power(ops: Ops, a: Array, power: Array) -> Array:
    return root(ops, a) if power == 0.5 else ops.rounded(ops.xp.power(a, power))


def _problem(ops: Ops, rule: UpdateRule, lr: Array, scale: Array, times_lr: bool = False) -> tuple[Array | None, Array]:
    """Return the limit and q of ``_solve``. scale : the power of the accumulator, plus beta; times_lr : so is z"""
    l1, l2 = rule.numbers(scale, "l1", "l2")
    if times_lr:
        return l1 * lr if l1 else None, scale + ops.rounded(2 * l2 * lr)
    return l1 or None, ops.rounded(scale * inverse(ops, lr)) + 2 * l2


def _keeping(limit: Array | None, q: Array, w: Array) -> tuple[Array, Array]:
    """Return the z that ``_solve`` turns into w again, and where q and w determine it.

    q is rounded as the equation rounds it, and all else is in float64, so w changes by at most a rounding of z and one
    of the division. float32 holds z to half an ulp of itself, which a large limit makes more than one of ``w*q``.
    """
    wide = w.astype(np.float64)
    with np.errstate(all="ignore"):
        z = (-wide * q - np.sign(wide) * (limit or 0.0)).astype(w.dtype)
    return z, np.isfinite(z) & (q > 0)


def _solve(ops: Ops, limit: Array | None, q: Array, w: Array, z: Array) -> Array:
    """``(clamp(z, -limit, limit) - z)/q``. If q is 0 (no gradient yet, no l2, no beta), keep the weight.

    limit : None if there is no l1: the numerator is then exactly -z, while 0 - z would be +0 for a z of 0
    """
    numerator = -z if limit is None else clip(ops, z, -limit, limit) - z
    unseen = q == 0
    return ops.xp.where(unseen, w, numerator / ops.rounded(ops.xp.where(unseen, z.dtype.type(1), q)))
