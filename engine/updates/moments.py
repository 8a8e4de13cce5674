"""Optimizers that keep moving averages of gradients: momentum, Adam, Lion, RMSProp, Adadelta.

None corrects the bias of its averages: as with TPU embedding, the caller does so through the learning rate.
"""

from __future__ import annotations

from penstock.updates.rule import Array, Ops, Result, Slots, UpdateRule, mix, root, sign, square


def momentum(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """``m' = momentum*m + g; w' = w - lr*m'``; with use_nesterov ``w' = w - lr*(g + momentum*m')``. Slot: momenta.

    Source: the proto names the CPU kernel (ResourceSparseApplyMomentum).
    """
    (m,) = slots
    decay = rule.number(w, "momentum")
    m = ops.rounded(decay * m) + g
    step = g + ops.rounded(decay * m) if rule.flag("use_nesterov") else m
    return w - ops.rounded(lr * step), (m,)


def adam(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """``m' = beta1*m + (1-beta1)*g; v' = beta2*v + (1-beta2)*g²; w' = w - lr*m'/(sqrt(v') + epsilon)``.

    With use_sum_inside_sqrt ``w' = w - lr*m'/sqrt(v' + epsilon²)``. Slots: momenta, velocities.
    No bias correction: set the learning rate to ``lr*sqrt(1-beta2^t)/(1-beta1^t)``.
    Source: sparse_core_ops_utils.cc; ResourceApplyAdam on the CPU with beta powers of 0 (the first form).
    """
    m, v = slots
    beta1, beta2, epsilon = rule.numbers(w, "beta1", "beta2", "epsilon")
    m = mix(ops, beta1, m, g)
    v = mix(ops, beta2, v, square(ops, g))
    if rule.flag("use_sum_inside_sqrt"):
        divisor = root(ops, v + epsilon * epsilon)
    else:
        divisor = ops.rounded(root(ops, v) + epsilon)
    return w - ops.rounded(lr * m) / divisor, (m, v)


def lion(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """``u = beta1*m + (1-beta1)*g; w' = w - lr*sign(u); m' = beta2*m + (1-beta2)*g``, sign(0) = 0. Slot: momenta.

    Source: the newest proto's comment, which names Keras' Lion; recorded from that.
    """
    (m,) = slots
    beta1, beta2 = rule.numbers(w, "beta1", "beta2")
    step = sign(ops, mix(ops, beta1, m, g))
    return w - ops.rounded(lr * step), (mix(ops, beta2, m, g),)


def rms_prop(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """``ms' = rho*ms + (1-rho)*g²; mom' = momentum*mom + lr*g/sqrt(ms' + epsilon); w' = w - mom'``. Slots: ms, mom.

    Source: the proto names the CPU kernel (ResourceSparseApplyRMSProp).
    """
    ms, mom = slots
    rho, decay, epsilon = rule.numbers(w, "rho", "momentum", "epsilon")
    ms = mix(ops, rho, ms, square(ops, g))
    mom = ops.rounded(decay * mom) + ops.rounded(lr * g) / root(ops, ms + epsilon)
    return w - mom, (ms, mom)


def centered_rms_prop(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """RMSProp that divides by the deviation, ``sqrt(ms' - mg'² + epsilon)``. Slots: ms, mom, mg.

    ``mg' = rho*mg + (1-rho)*g``; ms', mom' and w' as in ``rms_prop``.
    Source: the proto names the CPU kernel (ResourceSparseApplyCenteredRMSProp). If rounding leaves nothing
    positive under the root, where the kernel returns NaN, this function uses epsilon alone.
    """
    ms, mom, mg = slots
    rho, decay, epsilon = rule.numbers(w, "rho", "momentum", "epsilon")
    ms = mix(ops, rho, ms, square(ops, g))
    mg = mix(ops, rho, mg, g)
    deviation = (ms - square(ops, mg)) + epsilon
    deviation = ops.xp.where(deviation > 0, deviation, epsilon)
    mom = ops.rounded(decay * mom) + ops.rounded(lr * g) / root(ops, deviation)
    return w - mom, (ms, mom, mg)


def adadelta(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """``a' = rho*a + (1-rho)*g²; u = g*sqrt(d + epsilon)/sqrt(a' + epsilon); d' = rho*d + (1-rho)*u²; w' = w - lr*u``.

    Slots: accumulators (a), updates (d). Source: the proto names the CPU kernel (ResourceSparseApplyAdadelta).
    """
    a, d = slots
    rho, epsilon = rule.numbers(w, "rho", "epsilon")
    a = mix(ops, rho, a, square(ops, g))
    u = ops.rounded(ops.rounded(g * root(ops, d + epsilon)) / root(ops, a + epsilon))
    return w - ops.rounded(lr * u), (a, mix(ops, rho, d, square(ops, u)))
