"""Combiners: looked-up rows → activations, and gradients of activations → gradients of rows. NumPy only.

A lookup is one id that one sample names. Its gain is what its row is multiplied by on the way out, and the sample's
gradient on the way back: weight times the combiner's scale of the sample, each rounded to float32, as TensorFlow's
SparseCore preprocessing has it. Twins in ``penstock.pyx.reference``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Index = npt.NDArray[Any]  # of any integer type


@dataclass(frozen=True)
class Lookups:
    """What one feature looks up for one batch.

    ids : int64, shape (n,); samples : int64, shape (n,), ascending: whose lookup it is
    gains : float32, shape (n,); None: all are 1
    truncated : ids beyond a sequence's length, left out
    """

    ids: Int64
    samples: Int64
    gains: Float32 | None
    truncated: int = 0


def gains(samples: Index, weights: Float32 | None, num_samples: int, combiner: str) -> Float32 | None:
    """The gain of every lookup; None where all are 1.

    samples : shape (n,), ascending; weights : float32, shape (n,), None: all 1; combiner : sum, mean or sqrtn
    A sample whose weights (mean) or squared weights (sqrtn) sum to zero gets the scale 0, and never NaN.
    """
    if combiner == "sum":
        return weights
    ones = np.ones(len(samples), np.float32) if weights is None else weights
    totals = np.zeros(num_samples, np.float32)
    # Infinite and NaN weights are told by who reads them; here they only must not warn.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        # add.at folds from the left; bincount would sum in float64 and reduceat in pairs.
        np.add.at(totals, samples, ones if combiner == "mean" else ones * ones)
        divisors = totals if combiner == "mean" else np.sqrt(totals)
        scales = np.where(totals == 0, np.float32(0), np.float32(1) / divisors)
        scaled: Float32 = ones * scales[samples]
    return scaled


def combine(rows: Float32, samples: Index, by: Float32 | None, num_samples: int) -> Float32:
    """Activations: of every sample the sum of its rows times their gains, in order, in float32.

    rows : float32, shape (n, dim); by : gains, shape (n,) or None
    Returns float32 (num_samples, dim), zeros for a sample that looks nothing up.
    """
    out = np.zeros((num_samples, rows.shape[1]), np.float32)
    np.add.at(out, samples, rows if by is None else rows * by[:, None])
    return out


def row_gradients(gradients: Float32, samples: Index, by: Float32 | None) -> Float32:
    """The gradient of every looked-up row: its sample's, times its gain. float32 (n, dim).

    gradients : float32, shape (num_samples, dim)
    """
    taken: Float32 = np.take(gradients, samples, axis=0)
    if by is not None:
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is told by who reads it
            taken *= by[:, None]
    return taken
