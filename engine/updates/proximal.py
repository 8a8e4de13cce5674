"""FTRL and the Yogi optimizers: a regularised problem is solved for each weight. See ``update`` for the frame."""

from __future__ import annotations

from penstock.updates.rule import Array, Ops, Result, Slots, UpdateRule, clip, inverse, mix, root, sign, square


def ftrl(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """FTRL-proximal. Slots: accumulators, linears.

    ``p = -lr_power; a' = a + g²; D = a'^p - a^p``, then
    ``z' = z + g - D*w/lr; q = (a'^p + beta)/lr + 2*l2; w' = (clamp(z', -l1, l1) - z')/q``; or, with
    multiply_linear_by_lr, where z is lr times as large and a rate of 0 is valid,
    ``z' = z + lr*g - D*w; q = a'^p + beta + 2*lr*l2; w' = (clamp(z', -lr*l1, lr*l1) - z')/q``.
    lr_power = -0.5 is a square root, others need pow.
    Source: sparse_core_ops_utils.cc; ResourceSparseApplyFtrl on the CPU (beta through l2 + beta/(2*lr)).
    """
    a, z = slots
    lr_power, l1, l2, beta = rule.numbers(w, "lr_power", "l1", "l2", "beta")
    before, after = _power(ops, a, -lr_power), _power(ops, a + square(ops, g), -lr_power)
    a = a + square(ops, g)
    if rule.flag("multiply_linear_by_lr"):
        z = z + (ops.rounded(lr * g) - ops.rounded((after - before) * w))
        q = after + beta + ops.rounded(2 * l2 * lr)
        limit = l1 * lr if l1 else None
    else:
        per_lr = inverse(ops, lr)
        z = z + (g - ops.rounded(ops.rounded((after - before) * per_lr) * w))
        q = ops.rounded((after + beta) * per_lr) + 2 * l2
        limit = l1 or None
    return _solve(ops, limit, q, w, z), (a, z)


def online_yogi(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """FTRL whose accumulator is Yogi's second moment. Slots: vs, linears.

    ``v' = v - (1-beta2)*sign(v - g²)*g²; z' = z + g - (sqrt(v') - sqrt(v))*w/lr; q = sqrt(v')/lr + 2*l2;
    w' = (clamp(z', -l1, l1) - z')/q``.
    Source: the proto's comments (Yogi "plus FTRL extensions", l1 and l2 as in FTRL) and Zaheer et al., NeurIPS
    2018. Doubt: the formula is not public; this is ``ftrl`` with lr_power = -0.5, beta = 0 and Yogi's moment.
    """
    v, z = slots
    l1, l2, beta2 = rule.numbers(w, "l1", "l2", "beta2")
    before, v = root(ops, v), _yogi_moment(ops, beta2, v, g)
    after = root(ops, v)
    per_lr = inverse(ops, lr)
    z = z + (g - ops.rounded(ops.rounded((after - before) * per_lr) * w))
    q = ops.rounded(after * per_lr) + 2 * l2
    return _solve(ops, l1 or None, q, w, z), (v, z)


def proximal_yogi(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """Yogi with a proximal step. Slots: v, m (the second moment comes first).

    ``m' = beta1*m + (1-beta1)*g; v' = v + (1-beta2)*sign(g² - v)*g²; e = lr/(sqrt(v') + epsilon); p = w - e*m';
    w' = sign(p)*max(|p| - e*l1, 0)/(1 + e*l2)``.
    Source: the proto's comments; TensorFlow Addons' Yogi, without its bias correction. Doubt: the formula on the
    device is not public.
    """
    v, m = slots
    beta1, beta2, epsilon = rule.numbers(w, "beta1", "beta2", "epsilon")
    m = mix(ops, beta1, m, g)
    v = _yogi_moment(ops, beta2, v, g)
    rate = ops.rounded(lr / ops.rounded(root(ops, v) + epsilon))
    return shrink(ops, rule, rate, w - ops.rounded(rate * m)), (v, m)


def shrink(ops: Ops, rule: UpdateRule, rate: Array, p: Array) -> Array:
    """``sign(p)*max(|p| - rate*l1, 0)/(1 + rate*l2)``: the proximal step of l1 and l2, elementwise."""
    l1, l2 = rule.numbers(p, "l1", "l2")
    if l1:
        left = ops.xp.abs(p) - ops.rounded(rate * l1)
        p = sign(ops, p) * clip(ops, left, 0.0, None)
    return p / ops.rounded(1 + ops.rounded(rate * l2)) if l2 else p


def _yogi_moment(ops: Ops, beta2: Array, v: Array, g: Array) -> Array:
    """Move v towards g² by a share of g²: ``v + (1-beta2)*sign(g² - v)*g²``."""
    squared = square(ops, g)
    step = ops.rounded((v.dtype.type(1) - beta2) * squared)
    return ops.xp.where(squared > v, v + step, ops.xp.where(squared < v, v - step, v))


def _power(ops: Ops, a: Array, power: Array) -> Array:
    return root(ops, a) if power == 0.5 else ops.rounded(ops.xp.power(a, power))


def _solve(ops: Ops, limit: Array | None, q: Array, w: Array, z: Array) -> Array:
    """``(clamp(z, -limit, limit) - z)/q``. If q is 0 (no gradient yet, no l2, no beta), keep the weight.

    limit : None if there is no l1: the numerator is then exactly -z, while 0 - z would be +0 for a z of 0
    """
    numerator = -z if limit is None else clip(ops, z, -limit, limit) - z
    unseen = q == 0
    return ops.xp.where(unseen, w, numerator / ops.rounded(ops.xp.where(unseen, z.dtype.type(1), q)))
