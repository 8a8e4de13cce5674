"""Norms of gradients, each one float that depends on no order, and the clipping of the sums of a step to them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain

import numpy as np
import numpy.typing as npt

from penstock.base.threads import ThreadTeam
from penstock.model.config.clipping import Clip
from penstock.model.frames import Coalesced, Float32, Float64
from penstock.model.stats import Counters
from penstock.pyx.norms import NUM_EXPONENTS, add_exactly, clip_rows, row_squares

Limbs = npt.NDArray[np.uint64]
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
    limbs = _no_limbs()
    for values in squares:
        add_exactly(values, limbs)
    return _norm_of_limbs(limbs)


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
        row_norm = None if self._clip is None else self._clip.row_norm
        tasks = {
            name: [task for sums in several for task in _tasks_of(sums, row_norm)] for name, several in blocks.items()
        }
        self._run(list(chain(*tasks.values())))
        self.of_tables = {
            name: _norm_of_limbs(_sum(task.before for task in several)) for name, several in tasks.items()
        }
        if self._clip is None:
            return
        counters.clipped_rows += sum(task.num_clipped for task in chain(*tasks.values()))
        if (most := self._clip.global_norm) is not None:
            norm = _norm_of_limbs(_sum(task.after for task in chain(*tasks.values())))
            if norm > most:
                scale = np.float32(most / (norm + EPSILON))
                for sums in chain(*blocks.values()):
                    sums *= scale
                counters.clipped_steps += 1

    def _run(self, tasks: list[_NormTask]) -> None:
        if len(tasks) > 1 and self._team.threads > 1:
            with suppress(MemoryError):  # a thread found none for its own call
                self._team.run([task.run for task in tasks])
        for task in tasks:
            if not task.is_done:
                task.run()


class _NormTask:
    """Some rows of a step: the sum of their squares, exactly, and the rows scaled down to a norm, if it is given.

    rows : float32 (n, dim), scaled in place
    before, after : limbs of the squares of the rows as they were, and scaled; num_clipped : rows that were scaled
    """

    def __init__(self, rows: Float32, most: float | None) -> None:
        self._rows, self._most = rows, most
        self.before = self.after = _no_limbs()
        self._of_scaled = self.after if most is None else _no_limbs()
        self._squares = np.empty(len(rows))
        self.num_clipped, self.is_done = 0, False

    def run(self) -> bool:
        row_squares(self._rows, self._squares)
        add_exactly(self._squares, self.before)
        if self._most is not None:
            self.num_clipped = clip_rows(self._rows, self._squares, self._most, EPSILON)
            if self.num_clipped:
                add_exactly(self._squares, self._of_scaled)
                self.after = self._of_scaled
        self.is_done = True
        return True


def _tasks_of(sums: Float32, most: float | None) -> list[_NormTask]:
    size = max(1, FLOATS_PER_TASK // sums.shape[1])
    return [_NormTask(sums[first : first + size], most) for first in range(0, len(sums), size)]


def _no_limbs() -> Limbs:
    return np.zeros((NUM_EXPONENTS, 2), np.uint64)


def _sum(several: Iterable[Limbs]) -> Limbs:
    """Return the sum of limbs, of at most 2^32 values in all."""
    total = _no_limbs()
    for limbs in several:
        total += limbs
    return total


def _norm_of_limbs(limbs: Limbs) -> float:
    used = np.flatnonzero(limbs.any(axis=1)).tolist()
    if not used:
        return 0.0
    least, total = used[0], 0
    for exponent in used:
        low, high = limbs[exponent].tolist()
        total += (low + (high << 32)) << (exponent - least)
    return math.sqrt(math.ldexp(float(total), least + _EXPONENT_OF_LIMBS))
