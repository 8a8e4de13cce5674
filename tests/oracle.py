"""A plain NumPy update engine, one row at a time, written apart from the engine: nothing of penstock is used."""

import numpy as np


def coalesce(frames, reduction):
    """frames: lists of (id, float32 row) in arrival order → {id: gradient}, left fold from a copy of the first."""
    sums, held = {}, {}
    for rows in frames:
        for i, g in rows:
            sums[i] = sums[i] + g if i in sums else np.array(g, np.float32)
        for i in {i for i, _ in rows}:
            held[i] = held.get(i, 0) + 1
    return {i: s / np.float32(held[i]) if reduction == "mean" else s for i, s in sums.items()}


def adagrad_step(weights, accumulators, gradients, lr):
    """In place, float32. Returns {id: |update|} for the error measure."""
    updates = {}
    for i, g in gradients.items():
        accumulators[i] = accumulators[i] + g * g
        update = np.float32(lr) * g / np.sqrt(accumulators[i])
        weights[i] = weights[i] - update
        updates[i] = np.abs(update)
    return updates


def ulps(got, wanted, scale):
    """|got - wanted| in units of the last place of ``scale``."""
    return np.abs(got.astype(np.float64) - wanted) / np.spacing(np.abs(scale).astype(np.float32))
