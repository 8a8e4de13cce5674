"""Norms of gradients, each one float that depends on no order, and the clipping of the sums of a step to them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from penstock.model.config.clipping import Clip
from penstock.model.frames import Coalesced, Float32, Float64
from penstock.model.stats import Counters
from penstock.pyx.norms import NUM_EXPONENTS, add_exactly, row_squares

# As torch's clip_grad_norm_ adds to a norm before it divides by it.
EPSILON = 1e-6
_EXPONENT_OF_LIMBS = -1075  # of the lowest bit of the limbs of exponent 0


def squares_of(rows: Float32) -> Float64:
    """Return the sum of squares of every row, float64 (n,), which depends on the row alone. rows : float32 (n, dim)"""
    squares = np.empty(len(rows))
    row_squares(rows, squares)
    return squares


def norm_of(squares: Iterable[Float64]) -> float:
    """Return the root of the sum of sums of squares, which is exact, and then rounded: it depends on no order."""
    limbs = np.zeros((NUM_EXPONENTS, 2), np.uint64)
    for values in squares:
        add_exactly(values, limbs)
    used = np.flatnonzero(limbs.any(axis=1)).tolist()
    if not used:
        return 0.0
    least, total = used[0], 0
    for exponent in used:
        low, high = limbs[exponent].tolist()
        total += (low + (high << 32)) << (exponent - least)
    return math.sqrt(math.ldexp(float(total), least + _EXPONENT_OF_LIMBS))


def clip_step(coalesced: Mapping[str, Sequence[Coalesced]], clip: Clip, counters: Counters) -> None:
    """Scale the sums of a step down to norms, in place, and count what was scaled."""
    blocks = [part.sums for rows in coalesced.values() for each in rows for part in each.summed]
    squares = [squares_of(sums) for sums in blocks]
    if clip.row_norm is not None:
        for number, (sums, of_rows) in enumerate(zip(blocks, squares, strict=True)):
            norms = np.sqrt(of_rows)
            large = np.flatnonzero(norms > clip.row_norm)
            if len(large):
                sums[large] *= (clip.row_norm / (norms[large] + EPSILON)).astype(np.float32)[:, None]
                squares[number] = squares_of(sums)
                counters.clipped_rows += len(large)
    if clip.global_norm is not None and (norm := norm_of(squares)) > clip.global_norm:
        scale = np.float32(clip.global_norm / (norm + EPSILON))
        for sums in blocks:
            sums *= scale
        counters.clipped_steps += 1
