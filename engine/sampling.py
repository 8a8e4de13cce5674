"""Sampled statistics of a run: hot ids, how far rows move, and a history.

Sampling is throttled to 0.15 % of the run's time; its figures of ids and rows are estimates.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from penstock.frames import Coalesced, Float32, Frame, Int64
from penstock.gate import Gate
from penstock.stats import Counters

Read = Callable[[str, Int64], Float32]
KnownAs = Callable[[str, Int64], Int64]

SHARE = 0.0015  # of the time, for sampling
ALLOWANCE_S = 0.005  # in addition, so that short runs are sampled too
SAMPLED_ROWS = 256  # per table and sample, for how far rows move
SAMPLED_IDS = 2048  # per table and sample, for hot ids
KEPT_IDS = 4096  # that have a count at a time
MAX_MOMENTS = 256  # of the history; beyond that, every second one is dropped


@dataclass(frozen=True)
class Moment:
    """One entry of the history of a run.

    seconds : since the run began
    norms : table → L2 norm of a touched row's change in a step, the root mean square over sampled rows; only tables
        sampled since the previous moment
    rates : of every tag at the last opening
    """

    seconds: float
    step: int
    rows: int
    frames: int
    stale: int
    fill: int
    dropped: Mapping[str, int]
    norms: Mapping[str, float]
    rates: tuple[float, ...]


def thinned(moments: Sequence[Moment], most: int) -> list[Moment]:
    """Return at most ``most`` moments, including the last one, with the norms of the dropped ones merged in."""
    stride = -(-len(moments) // most)
    merged = []
    for end in range(len(moments), 0, -max(1, stride)):
        norms: dict[str, float] = {}
        for moment in moments[max(0, end - stride) : end]:
            norms |= moment.norms
        merged.append(replace(moments[end - 1], norms=norms))
    return merged[::-1]


@dataclass
class Hot:
    """The most frequent ids, by sampling: counts of sampled ids, of which the rarest are dropped."""

    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    sampled: int = 0

    def count(self, table: str, ids: Int64, times: Int64 | None = None) -> None:
        """Count sampled ids. times : how many rows each id has, ids being distinct; None: one"""
        several = ids
        if times is None:
            several, times = np.unique(ids, return_counts=True)
        self.sampled += int(times.sum())
        for row_id, n in zip(several.tolist(), times.tolist(), strict=True):
            self.counts[table, row_id] += n
        if len(self.counts) > 2 * KEPT_IDS:
            self.counts = Counter(dict(self.counts.most_common(KEPT_IDS)))

    def most(self, number: int) -> list[tuple[str, int, float]]:
        """Return (table, id, share of the sampled rows), the most frequent first."""
        return [(table, row_id, n / self.sampled) for (table, row_id), n in self.counts.most_common(number)]


class SampleBudget:
    """The time budget of one kind of sample: half of the time that all sampling may take."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began_s, self._spent_s = clock, clock(), 0.0

    def may(self) -> bool:
        """Return whether there is time for a sample. A plain comparison, because every frame and step calls it."""
        return self._spent_s <= (ALLOWANCE_S + SHARE * (self._clock() - self._began_s)) / 2

    @contextmanager
    def look(self) -> Iterator[None]:
        """Charge the time in the context to the budget."""
        started = self._clock()
        yield
        self._spent_s += self._clock() - started


class Probe:
    """Samples hot ids, how far rows move, and the history of a run, within its time budgets.

    read : (table, ids) → their weights, float32 (n, dim)
    known_as : (table, local ids) → the ids that the user knows
    """

    def __init__(
        self, read: Read, clock: Callable[[], float] = time.perf_counter, known_as: KnownAs = lambda _, ids: ids
    ) -> None:
        self._read, self._known_as = read, known_as
        self._for_ids, self._for_rows = SampleBudget(clock), SampleBudget(clock)
        self._rows: dict[str, tuple[Int64, Float32]] = {}
        self._every, self._skipped = 1, 0
        self._rng = np.random.default_rng(0)
        self.hot = Hot()
        self.norms: dict[str, float] = {}
        self.moments: list[Moment] = []

    def before(self, coalesced: Mapping[str, Sequence[Coalesced]]) -> None:
        """Keep copies of some of the rows that a step is about to change."""
        self._rows = {}
        if not self._for_rows.may():
            return
        with self._for_rows.look():
            for name, several in coalesced.items():
                ids = [part for rows in several for part, _ in rows.parts if len(part)]
                if ids:
                    block = ids[int(self._rng.integers(len(ids)))]
                    sample = block[self._random_slice(len(block), SAMPLED_ROWS)].copy()
                    self._rows[name] = sample, self._read(name, sample)

    def after(self) -> None:
        """Compute how far the sampled rows have moved."""
        if not self._rows:
            return
        with self._for_rows.look():
            for name, (ids, rows) in self._rows.items():
                with np.errstate(invalid="ignore"):
                    moved = np.subtract(self._read(name, ids), rows, dtype=np.float64)
                norm = math.sqrt(float(np.square(moved).sum(axis=1).mean()))
                if math.isfinite(norm):  # skip rows that became infinite
                    self.norms[name] = norm
            self._rows = {}

    def sample_ids(self, frame: Frame) -> None:
        if not self._for_ids.may():
            return
        with self._for_ids.look():
            for name, blocks in frame.rows.items():
                if blocks:
                    block = blocks[int(self._rng.integers(len(blocks)))]
                    indices = self._random_slice(len(block.ids), SAMPLED_IDS)
                    times = None if block.counts is None else block.counts[indices]
                    self.hot.count(name, self._known_as(name, block.ids[indices].copy()), times)

    def note(self, seconds: float, counters: Counters, gate: Gate, rates: Sequence[float]) -> None:
        """Append a moment to the history, or skip it: a long run records every second, fourth, eighth … frame."""
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        if len(self.moments) >= MAX_MOMENTS:
            self.moments = thinned(self.moments, MAX_MOMENTS // 2)
            self._every *= 2
        counted = (seconds, gate.global_step, counters.rows, counters.frames, counters.stale, gate.num_accumulated)
        self.moments.append(Moment(*counted, dict(counters.dropped), self.norms, tuple(rates)))
        self.norms = {}

    def _random_slice(self, num: int, most: int) -> slice:
        """Return which of ``num`` ids to sample: at most so many, at equal strides."""
        stride = -(-num // most)
        start = int(self._rng.integers(stride)) if stride > 1 else 0
        return slice(start, None, max(1, stride))
