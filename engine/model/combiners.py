"""Combiners: looked-up rows → activations, and gradients of activations → gradients of rows.

A lookup is one id of one sample. Its gain multiplies its row in the forward pass and the sample's gradient in the
backward pass: weight times the combiner's scale of the sample, each rounded to float32, as in TensorFlow's SparseCore
preprocessing. The gradients of rows are never materialized: ``penstock.pyx.row_sums`` computes each while it sums.
The NumPy references are in ``tests/support/reference.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.model.frames import Float32, Int64
from penstock.pyx.row_sums import combine as add_rows

Bool = npt.NDArray[np.bool_]
Index = npt.NDArray[Any]  # of any integer type

_FLOATS_AT_ONCE = 1 << 16
_LAST_WHOLE = 1 << 24  # a float32 that counts by ones saturates here


@dataclass(frozen=True)
class Lookups:
    """The lookups of one feature for one batch.

    ids : int64, shape (n,); samples : int64, shape (n,), ascending: the sample of each lookup
    gains : float32, shape (n,); None: all are 1
    truncated : number of ids dropped because they were beyond the sequence length
    """

    ids: Int64
    samples: Int64
    gains: Float32 | None
    truncated: int = 0


def gains(samples: Index, weights: Float32 | None, num_samples: int, combiner: str) -> Float32 | None:
    """Return the gain of every lookup, float32 of shape (n,); None if all are 1.

    samples : shape (n,), ascending; weights : float32, shape (n,), None: all 1; combiner : sum, mean or sqrtn
    A sample whose weights (mean) or squared weights (sqrtn) sum to zero gets scale 0, never NaN. If a sum is so small
    that its reciprocal is infinite, the weights are divided by the sum instead.
    """
    if combiner == "sum":
        return weights
    # The reader of the weights reports infinite and NaN values; here they must only not warn.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        totals = _totals(samples, weights, num_samples, combiner)
        divisors = totals if combiner == "mean" else np.sqrt(totals)
        scales = np.where(totals == 0, np.float32(0), np.float32(1) / divisors)
        scaled: Float32 = scales[samples]
        if weights is None:
            return scaled
        weighted: Float32 = weights * scaled
        if not np.isfinite(scales).all():
            weighted = np.where(np.isfinite(scaled), weighted, weights / divisors[samples])
    return weighted


def _totals(samples: Index, weights: Float32 | None, num_samples: int, combiner: str) -> Float32:
    """Return each sample's sum of weights (mean) or of squared weights (sqrtn): a left fold in float32."""
    if weights is None:
        return np.minimum(np.bincount(samples, minlength=num_samples), _LAST_WHOLE).astype(np.float32)
    totals = np.zeros(num_samples, np.float32)
    # add.at folds from the left; bincount would sum in float64 and reduceat in pairs.
    np.add.at(totals, samples, weights if combiner == "mean" else weights * weights)
    return totals


def combine(rows: Float32, samples: Index, by: Float32 | None, num_samples: int, which: Index | None = None) -> Float32:
    """Return activations: each sample's rows times their gains, summed in order in float32.

    rows : float32, shape (r, dim); which : shape (n,), the row of every lookup; None: all rows in order
    samples : shape (n,); by : gains, shape (n,) or None
    Returns float32 (num_samples, dim), zeros for a sample without lookups.
    """
    out = np.zeros((num_samples, rows.shape[1]), np.float32)
    indices = None if which is None else which.astype(np.int64, copy=False)
    add_rows(np.ascontiguousarray(rows), indices, samples.astype(np.int64, copy=False), by, out)
    return out


def not_finite(gradients: Float32, samples: Index, by: Float32 | None) -> Bool:
    """Return a bool mask (n,) of the lookups whose gradient (the sample's times the gain) has a value not finite.

    gradients : float32, shape (num_samples, dim); materialized one block at a time
    """
    at_once = max(_FLOATS_AT_ONCE // gradients.shape[1], 1)
    mask = np.zeros(len(samples), bool)
    for start in range(0, len(samples), at_once):
        block = slice(start, start + at_once)
        rows = np.take(gradients, samples[block], axis=0)
        if by is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                rows *= by[block, None]
        mask[block] = ~np.isfinite(rows).all(axis=1)
    return mask
