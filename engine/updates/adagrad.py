"""Adagrad and its relatives: one accumulator of squared gradients divides the step. See ``update`` for the frame."""

from __future__ import annotations

from penstock.updates.proximal import shrink
from penstock.updates.rule import Array, Ops, Result, Slots, UpdateRule, clip, mix, root, square


def adagrad(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """``a' = a + g²; w' = w - lr*g/sqrt(a')``. Slot: accumulators.

    There is no epsilon: the caller must start with a > 0. Source: sparse_core_ops_utils.cc;
    ResourceSparseApplyAdagrad (update_slots=true) on the CPU.
    """
    (a,) = slots
    a = a + square(ops, g)
    return w - lr * g / root(ops, a), (a,)


def adagrad_momentum(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """``s = g*(a'+epsilon)^(-1/exponent); m' = momentum*m + s; w' = w - lr*m'``. Slots: accumulators, momenta.

    ``a' = a + g²`` where beta2 is 1, else ``beta2*a + (1-beta2)*g²``; with use_nesterov
    ``w' = w - lr*(momentum*m' + s)``. An exponent of 2 is a square root, others need pow.
    Source: sparse_core_ops_utils.cc, both versions. Doubt: the proto's comment accumulates the factor without g
    in m and multiplies by g at the end; this function follows the source.
    """
    a, m = slots
    momentum, exponent, beta2, epsilon = rule.numbers(w, "momentum", "exponent", "beta2", "epsilon")
    a = a + square(ops, g) if beta2 == 1 else mix(ops, beta2, a, square(ops, g))
    if exponent == 2:
        s = g / root(ops, a + epsilon)
    else:
        s = ops.rounded(g * ops.rounded(ops.xp.power(a + epsilon, w.dtype.type(-1) / exponent)))
    m = ops.rounded(momentum * m) + s
    step = ops.rounded(momentum * m) + s if rule.flag("use_nesterov") else m
    return w - ops.rounded(lr * step), (a, m)


def bounded_adagrad(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """``a' = min(a + g², max_accumulator); w' = w - clamp(lr*g/sqrt(a' or a), ±max_var_update)``. Slot: accumulators.

    The divisor is a' with update_accumulator_first, else the previous a; 0 disables a limit.
    Source: the proto's field comments only. Doubts: whether max_var_update bounds the step or the gradient (the
    comment says gradient, the name says update of the variable: the step is bounded here), and whether the cap
    comes before the division (it does here: a' is one value).
    """
    (before,) = slots
    max_update, max_accumulator = rule.numbers(w, "max_var_update", "max_accumulator")
    a = before + square(ops, g)
    if max_accumulator > 0:
        a = clip(ops, a, None, max_accumulator)
    step = lr * g / root(ops, a if rule.flag("update_accumulator_first") else before)
    if max_update > 0:
        step = clip(ops, step, -max_update, max_update)
    return w - step, (a,)


def proximal_adagrad(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """``a' = a + g²; e = lr/sqrt(a'); p = w - e*g; w' = sign(p)*max(|p| - e*l1, 0)/(1 + e*l2)``. Slot: accumulators.

    Source: the proto names the CPU kernel (ResourceSparseApplyProximalAdagrad).
    """
    (a,) = slots
    a = a + square(ops, g)
    rate = ops.rounded(lr / root(ops, a))
    return shrink(ops, rule, rate, w - ops.rounded(rate * g)), (a,)


def row_wise_adagrad(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """``a' = a + mean(g²) over the row; w' = w - lr*g/sqrt(a')``. Slot: accumulators, one per row: (..., 1).

    TensorFlow does not have this optimizer; most production systems train with it (FBGEMM's
    EXACT_ROWWISE_ADAGRAD, which adds an epsilon outside the root; as in ``adagrad``, there is none here).
    """
    (a,) = slots
    share = g.dtype.type(1) / g.dtype.type(g.shape[-1])
    a = a + ops.rounded(_row_sum(ops, square(ops, g)) * share)
    # XLA multiplies by the inverse of a divisor that is a broadcast; this one depends on g, but only where g is NaN.
    wide = ops.xp.where(ops.xp.isnan(g), g, a)
    return w - lr * g / root(ops, wide), (a,)


def _row_sum(ops: Ops, values: Array) -> Array:
    """Sum squares over the last axis and keep it: add halves until one is left, an order that every backend keeps.

    An odd middle stays: a zero is added to it, which changes no square.
    """
    while (width := values.shape[-1]) > 1:
        half, odd = width // 2, width % 2
        upper = values[..., half + odd :]
        if odd:
            upper = ops.xp.pad(upper, [(0, 0)] * (upper.ndim - 1) + [(0, 1)])
        values = values[..., : half + odd] + upper
    return values
