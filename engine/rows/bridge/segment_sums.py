"""Sums of segments, each in a fixed order. On a GPU by gathers: planned on the host, evaluated on the device.

Elsewhere XLA's scatter adds the values of a segment one by one, in order. For a GPU it becomes a loop of atomic
operations, in no order, and slow where many threads add to one row. But the host knows which values a segment sums:

* Up to MOST_TERMS values are summed from left to right.
* More are divided into runs of RUN values, of which the last may be shorter. A node sums a run, from left to right. The
  nodes of a segment are summed like values, in runs of RUN, and so on, until at most MOST_TERMS remain.

So a segment of any size takes few kernels, and its order depends only on the number of its values. Nodes of all levels
lie in one array, whose size determines those of the levels (``level_sizes``). A CPU takes two to three times as long by
gathers, which read pads and compute every index for each element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from penstock.model.frames import Int64

MOST_TERMS, RUN = 4, 16
# The fewest nodes of the first level, and the part of each level in the one before, at least: so few sizes occur.
FEWEST, LEAST_PART = 8, 8


class Values(NamedTuple):
    """Values to sum. read : indices (n,), or None for all, → values (n, width); number : of all"""

    read: Callable[[jax.Array | None], jax.Array]
    number: int


class SumSizes(NamedTuple):
    """Padded sizes. terms : of a segment; levels : nodes of each level, powers of two, each less than the one before"""

    terms: int = 0
    levels: tuple[int, ...] = ()

    def or_more(self, others: SumSizes) -> SumSizes:
        levels = tuple(map(max, zip_longest(self.levels, others.levels, fillvalue=0)))
        return SumSizes(max(self.terms, others.terms), levels)


def level_sizes(num_nodes: int) -> list[int]:
    """Return the number of nodes of each level: the powers of two whose sum is the number of all nodes."""
    return [1 << bit for bit in reversed(range(num_nodes.bit_length())) if num_nodes >> bit & 1]


def at_least(number: int) -> int:
    """Return the power of two that is at least a positive number."""
    return 1 << (number - 1).bit_length()


# ---- on the host


class SegmentSums(NamedTuple):
    """The sums of one device.

    order : the values, those of a segment together, in their order; levels : of each, (start, stop) of every node in
    the order or in the level before; heights : of each segment, the level that its terms are of, 0: values
    starts, counts : of its terms there
    """

    order: Int64
    levels: list[tuple[Int64, Int64]]
    heights: Int64
    starts: Int64
    counts: Int64

    @classmethod
    def of(cls, segments: npt.NDArray[np.integer], num_segments: int) -> SegmentSums:
        """Return the sums. segments : of each value, its segment"""
        order = np.argsort(segments, kind="stable")
        counts = np.bincount(segments, minlength=num_segments)
        starts, heights, levels = np.cumsum(counts) - counts, np.zeros(num_segments, np.int64), []
        while len(large := np.flatnonzero(counts > MOST_TERMS)):
            runs = -(-counts[large] // RUN)
            before = np.cumsum(runs) - runs
            offsets = RUN * (np.arange(runs.sum()) - np.repeat(before, runs))
            first = np.repeat(starts[large], runs) + offsets
            last = np.minimum(first + RUN, np.repeat(starts[large] + counts[large], runs))
            levels.append((first, last))
            starts[large], counts[large] = before, runs
            heights[large] += 1
        return cls(order, levels, heights, starts, counts)

    @property
    def sizes(self) -> SumSizes:
        """The smallest sizes of the ladder that fit."""
        levels: list[int] = []
        for first, _ in self.levels:
            # A level has less than half the nodes of the one before, for MOST_TERMS are exceeded by one node of RUN.
            levels.append(max(at_least(len(first)), levels[-1] // LEAST_PART if levels else FEWEST))
        return SumSizes(at_least(int(self.counts.max(initial=1))), tuple(levels))

    def padded(
        self, sizes: SumSizes, num_segments: int, num_values: int, segments: Any = None, values: Any = None
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return (terms, nodes), the arguments of ``summed``.

        sizes : none smaller than ``self.sizes``; num_segments, num_values : pads included
        segments, values : their places among all; None: the first
        """
        num_nodes = sum(sizes.levels)
        beyond, ends = num_values + num_nodes, np.cumsum([0, *sizes.levels])
        terms = np.full((num_segments, sizes.terms), beyond, np.int32)
        nodes = np.full((num_nodes, RUN), beyond, np.int32)
        order = self.order if values is None else values[self.order]
        for level, (first, last) in enumerate(self.levels):
            index, within = _ranges(first, last, RUN)
            nodes[ends[level] : ends[level] + len(first)][within] = order[index] if level == 0 else index
        index, within = _ranges(self.starts, self.starts + self.counts, sizes.terms)
        height = np.repeat(self.heights, self.counts)
        of_roots = num_values + ends[np.maximum(height, 1) - 1] + index
        of_roots[height == 0] = order[index[height == 0]]
        by_segment = np.full((len(self.starts), sizes.terms), beyond, np.int32)
        by_segment[within] = of_roots
        terms[slice(len(self.starts)) if segments is None else segments] = by_segment
        return terms, nodes


def _ranges(first: Int64, last: Int64, width: int) -> tuple[Int64, npt.NDArray[np.bool_]]:
    """Return the numbers of every range, one after the other, and where they are in rows of this width."""
    numbers = first[:, None] + np.arange(width)
    within = numbers < last[:, None]
    return numbers[within], within


# ---- on a device


def summed(
    values: Values,
    segments: jax.Array,
    num_segments: int,
    plan: tuple[jax.Array, jax.Array] | None,
    ascending: bool = False,
) -> jax.Array:
    """Return the sum of every segment, (num_segments, width).

    segments : int32 (values,), of every value, pads beyond; ascending : whether they are
    plan : (terms, nodes); None: sum by a scatter
        terms: int32 (num_segments, ·), values, then nodes, counted from the number of values; pads lie beyond
        nodes: int32 (·, RUN), those of level 1 are of values, those of others of nodes of the level before, counted
        from its first; pads lie beyond
    """
    if plan is None:
        return jax.ops.segment_sum(values.read(None), segments, num_segments, indices_are_sorted=ascending)
    terms, nodes = plan
    total, levels = _in_order(values, terms), list(_levels(nodes, values))
    if not levels:
        return total
    # Unsigned: those of values lie beyond.
    return total + _in_order(_values_of(jnp.concatenate(levels)), (terms - values.number).astype(jnp.uint32))


def _levels(nodes: jax.Array, values: Values) -> Iterator[jax.Array]:
    """Yield the sums of the nodes of each level."""
    start = 0
    for size in level_sizes(len(nodes)):
        # Behind a barrier: XLA would compute small levels again for each of their uses.
        sums = jax.lax.optimization_barrier(_in_order(values, nodes[start : start + size]))
        yield sums
        values, start = _values_of(sums), start + size


def _in_order(values: Values, indices: jax.Array) -> jax.Array:
    """Return the sum of the values of each row of indices (n, terms)."""
    size, terms = indices.shape
    flat = indices.reshape(-1)
    parts = jnp.where((flat < values.number)[:, None], values.read(flat), 0.0)
    parts = parts.reshape(size, terms, -1)
    return reduce(jnp.add, (parts[:, term] for term in range(terms)))


def _values_of(array: jax.Array) -> Values:
    return Values(lambda indices: array if indices is None else taken(array, indices), len(array))


def taken(array: jax.Array, indices: jax.Array) -> jax.Array:
    """Return elements of axis 0 of an array, for indices beyond it the last one."""
    return array.at[indices].get(mode="clip", wrap_negative_indices=False)
