"""The check of a side's first step: sampled rows against the equations in float64.

Every side starts from the same constant weights and slots (contestants.py), so checking one step needs no copy of a
table. Sums of up to 10^5 float32 gradients depend on their order: the tolerance allows for it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.bench.contestants import ACCUMULATOR, BETA1, BETA2, EPSILON, RATE, WEIGHT, Side
from penstock.bench.distributions import Int64
from penstock.bench.workloads import Step

Float64 = npt.NDArray[np.float64]

SAMPLED_ROWS = 2000  # of each table
# Relative to the larger of a number's change and a hundredth of the rate.
TOLERANCE = 1e-3
# Share of the sampled numbers that may be off: an optimizer that divides by a gradient's size magnifies the float32
# rounding of a sum near zero. One wrong row of 2000 exceeds it.
OUTLIERS = 2e-4


def wrong(side: Side, kind: str, step: Step, corrects_bias: bool = False) -> str | None:
    """Return the error of the side after it has run ``step`` and nothing else; None if its result is right."""
    for table, (ids, grads) in step.parts.items():
        sample = np.unique(np.random.default_rng(1).choice(ids, SAMPLED_ROWS))
        wanted = expected(kind, float64_sums(ids, grads, sample), corrects_bias)
        got = side.read_rows(table, sample)
        if got.shape != wanted.shape:
            return f"table {table}: expected shape {wanted.shape}, got {got.shape}"
        scale = np.maximum(np.abs(wanted - (0.0 if kind == "coalesce" else WEIGHT)), RATE * 1e-2)
        off = ~(np.abs(got - wanted) <= TOLERANCE * scale)
        if off.sum() > max(2, OUTLIERS * off.size):
            row, column = np.argwhere(off)[0]
            return (
                f"table {table}: {int(off.any(axis=1).sum())} of {len(sample)} sampled rows differ; id {sample[row]}, "
                f"column {column}: expected {wanted[row, column]:.9g}, got {got[row, column]:.9g}"
            )
    return None


def float64_sums(ids: Int64, grads: npt.NDArray[np.float32], sample: Int64) -> Float64:
    """Return the gradient of every sampled id (ascending), summed in float64: shape (len(sample), dim)."""
    positions = np.minimum(np.searchsorted(sample, ids), len(sample) - 1)
    rows = np.flatnonzero(sample[positions] == ids)
    rows = rows[np.argsort(positions[rows], kind="stable")]
    starts = np.searchsorted(positions[rows], np.arange(len(sample)))
    sums: Float64 = np.add.reduceat(grads[rows].astype(np.float64), starts, axis=0)
    return sums


def expected(kind: str, g: Float64, corrects_bias: bool = False) -> Float64:
    """Return the sums (coalesce), or the weights after one step with gradient sums ``g`` from the initial state."""
    if kind in ("coalesce", "sgd"):
        return g if kind == "coalesce" else WEIGHT - RATE * g
    if kind == "adam":
        rate = RATE * np.sqrt(1 - BETA2) / (1 - BETA1) if corrects_bias else RATE
        moment: Float64 = (1 - BETA1) * g / (np.sqrt((1 - BETA2) * g * g) + EPSILON)
        return WEIGHT - rate * moment
    square = (g * g).mean(axis=1, keepdims=True) if kind == "rowwise_adagrad" else g * g
    root: Float64 = np.sqrt(ACCUMULATOR + square)
    if kind == "ftrl":
        linear: Float64 = g - (root - np.sqrt(ACCUMULATOR)) / RATE * WEIGHT
        return -linear * RATE / root
    return WEIGHT - RATE * g / root  # adagrad, row-wise adagrad, replay
