"""Norms of gradients, each one float that depends on no order, and the clipping of the sums of a step to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, pairwise

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
            name: [_NormTask(rows, row_norm) for sums in several for rows in self._divided(sums)]
            for name, several in blocks.items()
        }
        every = list(chain(*tasks.values()))
        self._run(task.measure for task in every)
        self.of_tables = {
            name: _norm_of_limbs(_sum(task.before for task in several)) for name, several in tasks.items()
        }
        if self._clip is None:
            return
        counters.clipped_rows += sum(task.num_clipped for task in every)
        if (most := self._clip.global_norm) is not None:
            norm = _norm_of_limbs(_sum(task.after for task in every))
            if norm > most:
                scale = np.float32(most / (norm + EPSILON))
                self._run(partial(task.scale, scale) for task in every)
                counters.clipped_steps += 1

    def _divided(self, sums: Float32) -> Iterator[Float32]:
        """Yield the rows in a few spans for each thread, none of them small."""
        count = min(4 * self._team.threads, max(1, sums.size // FLOATS_PER_TASK))
        bounds = [len(sums) * number // count for number in range(count + 1)]
        return (sums[first:end] for first, end in pairwise(bounds))

    def _run(self, calls: Iterable[Callable[[], None]]) -> None:
        """Call all, each once: a thread that finds no memory for its own call leaves the rest to this one."""
        left = dict(enumerate(calls))

        def run(number: int) -> bool:
            left[number]()
            del left[number]
            return True

        if len(left) > 1 and self._team.threads > 1:
            with suppress(MemoryError):
                self._team.run([partial(run, number) for number in left])
        for number in list(left):
            run(number)


class _NormTask:
    """Some rows of a step: the sum of their squares, exactly, and the rows scaled down to a norm, if it is given.

    rows : float32 (n, dim), scaled in place
    before, after : limbs of the squares of the rows as they were, and scaled; num_clipped : rows that were scaled
    """

    def __init__(self, rows: Float32, most: float | None) -> None:
        self._rows, self._most = rows, most
        self.before = _no_limbs()
        self.after = self.before if most is None else _no_limbs()
        self._squares = np.empty(min(len(rows), max(1, FLOATS_PER_TASK // rows.shape[1])))
        self.num_clipped = 0

    def measure(self) -> None:
        size = max(1, FLOATS_PER_TASK // self._rows.shape[1])  # rows that are still in the cache when they are scaled
        for first in range(0, len(self._rows), size):
            rows, squares = self._rows[first : first + size], self._squares[: len(self._rows) - first][:size]
            row_squares(rows, squares)
            add_exactly(squares, self.before)
            if self._most is not None:
                self.num_clipped += clip_rows(rows, squares, self._most, EPSILON)
                add_exactly(squares, self.after)

    def scale(self, scale: np.float32) -> None:
        self._rows *= scale


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
