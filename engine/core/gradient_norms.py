"""Norms of gradients, each one float that depends on no order, and the clipping of the sums of a step to them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain

import numpy as np

from penstock.base.threads import ThreadTeam
from penstock.model.config.clipping import Clip
from penstock.model.frames import Coalesced, Float32, Float64
from penstock.model.stats import Counters
from penstock.pyx.norms import NUM_EXPONENTS, add_exactly, row_squares

# As torch's clip_grad_norm_ adds to a norm before it divides by it.
EPSILON = 1e-6
FLOATS_PER_TASK = 1 << 18
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


class StepNorms:
    """The norms of the gradients of steps, which are scaled down to those of a clip.

    team : sums the squares of many rows
    of_tables : table → norm of its gradients in the last step, before they are scaled down
    """

    def __init__(self, clip: Clip | None, team: ThreadTeam) -> None:
        self._clip, self._team = clip, team
        self.of_tables: dict[str, float] = {}

    def clip(self, coalesced: Mapping[str, Sequence[Coalesced]], counters: Counters) -> None:
        """Scale the sums of a step down, in place, and count what was scaled."""
        blocks = {name: [part.sums for each in rows for part in each.summed] for name, rows in coalesced.items()}
        squares = {name: [self._squares_of(sums) for sums in several] for name, several in blocks.items()}
        self.of_tables = {name: norm_of(several) for name, several in squares.items()}
        if self._clip is None:
            return
        if (most := self._clip.row_norm) is not None:
            for name, several in blocks.items():
                for number, sums in enumerate(several):
                    num_clipped = _clip_rows(sums, np.sqrt(squares[name][number]), most)
                    if num_clipped:
                        squares[name][number] = self._squares_of(sums)
                        counters.clipped_rows += num_clipped
        if (most := self._clip.global_norm) is not None and (norm := norm_of(chain(*squares.values()))) > most:
            scale = np.float32(most / (norm + EPSILON))
            for sums in chain(*blocks.values()):
                sums *= scale
            counters.clipped_steps += 1

    def _squares_of(self, sums: Float32) -> Float64:
        """Return what ``squares_of`` does, of parts of the rows on several threads."""
        num_rows, size = len(sums), max(1, FLOATS_PER_TASK // sums.shape[1])
        if num_rows <= size or self._team.threads == 1:
            return squares_of(sums)
        squares = np.empty(num_rows)

        def add(first: int) -> bool:
            row_squares(sums[first : first + size], squares[first : first + size])
            return True

        try:
            self._team.run([partial(add, first) for first in range(0, num_rows, size)])
        except MemoryError:  # a thread found none for its own call
            row_squares(sums, squares)
        return squares


def _clip_rows(sums: Float32, norms: Float64, most: float) -> int:
    """Scale rows down to a norm, and return how many. norms : of the rows, float64 (n,)"""
    large = np.flatnonzero(norms > most)
    if len(large):
        sums[large] *= (most / (norms[large] + EPSILON)).astype(np.float32)[:, None]
    return len(large)
