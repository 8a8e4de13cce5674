"""Updates without statistics of gradients: SGD, assignment, the frequency estimator, and the user-defined program."""

from __future__ import annotations

from penstock.updates.rule import Array, Ops, Result, Slots, UpdateRule, clip, mix


def sgd(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """``w' = w - lr*g``. No slots. Source: sparse_core_ops_utils.cc; ResourceScatterSub on the CPU."""
    return w - ops.rounded(lr * g), slots


def assign(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """``w' = g``. No slots. Source: the proto's comment. An id that occurs twice gets the sum (or the mean)."""
    return g, slots


def frequency_estimator(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """Estimate the number of steps between two hits of a row: the weights are the average D. Slot: last_hit_step.

    ``d = step - last; c = min(d, max_delta); D' = c if d >= outlier_threshold*D else (1-tau)*D + tau*c;
    last' = step``. The step arrives as the learning rate, exact up to 2**24; the gradient is not used.
    Source: the proto's comment. Doubt: the weight read-out (D/max_delta)**weight_exponent is left to the reader;
    it is not part of the update, and the table contains D.
    """
    (last,) = slots
    tau, max_delta, threshold = rule.numbers(w, "tau", "max_delta", "outlier_threshold")
    distance = lr - last
    capped = clip(ops, distance, None, max_delta)
    outlier = distance >= ops.rounded(threshold * w)
    # tau*c + (1-tau)*D: mix takes the weight of D.
    mean = mix(ops, tau, capped, w)
    return ops.xp.where(outlier, capped, mean), (ops.xp.zeros_like(last) + lr,)


def user_defined_program(ops: Ops, rule: UpdateRule, lr: Array, g: Array, w: Array, slots: Slots) -> Result:
    """Run the caller's elementwise function (gradient, weights, *slots) -> (weights, *slots), which JAX traces.

    A program without slots may return bare weights. Its rounding is unspecified: XLA may fuse its operations.
    """
    assert rule.program is not None  # the configuration gives one
    returned = rule.program(g, w, *slots)
    new = returned if isinstance(returned, tuple | list) else (returned,)
    if len(new) != 1 + rule.num_slots:
        raise ValueError(f"program: expected {1 + rule.num_slots} results (weights, then slots), got {len(new)}")
    arrays = tuple(ops.xp.asarray(values, w.dtype) for values in new)
    for what, values in zip(("weights", *(f"slot {s}" for s in range(rule.num_slots))), arrays, strict=True):
        if values.shape != w.shape:
            raise ValueError(f"program: expected {what} of shape {w.shape}, got {values.shape}")
    return arrays[0], arrays[1:]
