"""A closer look at what flows: which ids are hot, how far rows move, and how it all went over time.

It looks only while it has spent less than 0.15 % of the time, so that a run does not notice; what it says of
ids and rows is sampled.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from penstock.frames import Coalesced, Frame
from penstock.gate import Gate
from penstock.stats import Counters

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Stepped = Mapping[str, Sequence[Coalesced]]
Read = Callable[[str, Int64], Float32]
KnownAs = Callable[[str, Int64], Int64]

SHARE = 0.0015  # of the time, for looking closer
ALLOWANCE_S = 0.005  # and so much at the start, so that short runs are seen, too
SAMPLED_ROWS = 256  # that a look measures the movement of, per table
SAMPLED_IDS = 2048  # that a look counts, per table
KEPT_IDS = 4096  # that are counted at a time
MAX_MOMENTS = 256  # of the history; beyond, every second one is forgotten


@dataclass(frozen=True)
class Moment:
    """How far a run was at one moment.

    norms : table → by how much a row that a step touched moved, the root of the mean square over sampled rows; of
        tables that were looked at since the moment before
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
    """At most so many of them, the last one included; what the others say of norms is kept."""
    stride = -(-len(moments) // most)
    kept = []
    for end in range(len(moments), 0, -max(1, stride)):
        norms: dict[str, float] = {}
        for moment in moments[max(0, end - stride) : end]:
            norms |= moment.norms
        kept.append(replace(moments[end - 1], norms=norms))
    return kept[::-1]


@dataclass
class Hot:
    """Which ids come most often, by sampling: counts of the ids seen, of which the rarest are forgotten."""

    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    sampled: int = 0

    def count(self, table: str, ids: Int64) -> None:
        several, times = np.unique(ids, return_counts=True)
        self.sampled += len(ids)
        for one, n in zip(several.tolist(), times.tolist(), strict=True):
            self.counts[table, one] += n
        if len(self.counts) > 2 * KEPT_IDS:
            self.counts = Counter(dict(self.counts.most_common(KEPT_IDS)))

    def most(self, number: int) -> list[tuple[str, int, float]]:
        """(table, id, share of the sampled rows), the most frequent first."""
        return [(table, one, n / self.sampled) for (table, one), n in self.counts.most_common(number)]


class Budget:
    """Says whether there is time for a look: half of what all looks may take."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began_s, self._spent_s = clock, clock(), 0.0

    def may(self) -> bool:
        """Asked for every frame and step, and mostly answered no: hence a comparison, and not a ``with``."""
        return self._spent_s <= (ALLOWANCE_S + SHARE * (self._clock() - self._began_s)) / 2

    @contextmanager
    def look(self) -> Iterator[None]:
        """What is done in here is timed."""
        started = self._clock()
        yield
        self._spent_s += self._clock() - started


class Probe:
    """A closer look, in so little of the time that a run does not notice: hot ids, how far rows move, history.

    read : (table, ids) → their weights
    known_as : (table, ids) → as whoever looks knows them
    """

    def __init__(
        self, read: Read, clock: Callable[[], float] = time.perf_counter, known_as: KnownAs = lambda _, ids: ids
    ) -> None:
        self._read, self._known_as = read, known_as
        self._for_ids, self._for_rows = Budget(clock), Budget(clock)
        self._rows: dict[str, tuple[Int64, Float32]] = {}
        self._every, self._skipped = 1, 0
        self._rng = np.random.default_rng(0)
        self.hot = Hot()
        self.norms: dict[str, float] = {}
        self.moments: list[Moment] = []

    def before(self, coalesced: Stepped) -> None:
        """Remember some of the rows that a step is about to change."""
        self._rows = {}
        if not self._for_rows.may():
            return
        with self._for_rows.look():
            for name, several in coalesced.items():
                ids = [part for rows in several for part, _ in rows.parts if len(part)]
                if ids:
                    some = self._some(ids[int(self._rng.integers(len(ids)))], SAMPLED_ROWS)
                    self._rows[name] = some, self._read(name, some)

    def after(self) -> None:
        """How far they have moved."""
        if not self._rows:
            return
        with self._for_rows.look():
            for name, (ids, rows) in self._rows.items():
                with np.errstate(invalid="ignore"):
                    moved = np.subtract(self._read(name, ids), rows, dtype=np.float64)
                norm = math.sqrt(float(np.square(moved).sum(axis=1).mean()))
                if math.isfinite(norm):  # a row that has become infinite has moved by no number
                    self.norms[name] = norm
            self._rows = {}

    def took(self, frame: Frame) -> None:
        if not self._for_ids.may():
            return
        with self._for_ids.look():
            for name, blocks in frame.rows.items():
                if blocks:
                    ids = blocks[int(self._rng.integers(len(blocks)))].ids
                    self.hot.count(name, self._known_as(name, self._some(ids, SAMPLED_IDS)))

    def note(self, seconds: float, of: Counters, gate: Gate, rates: Sequence[float]) -> None:
        """One more moment of the history, or none: of a long run every second, fourth, eighth … frame is noted."""
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        if len(self.moments) >= MAX_MOMENTS:
            self.moments = thinned(self.moments, MAX_MOMENTS // 2)
            self._every *= 2
        counted = (seconds, gate.global_step, of.rows, of.frames, of.stale, gate.num_accumulated)
        self.moments.append(Moment(*counted, dict(of.dropped), self.norms, tuple(rates)))
        self.norms = {}

    def _some(self, ids: Int64, most: int) -> Int64:
        """At most so many of the ids, evenly from all over: a copy."""
        stride = -(-len(ids) // most)
        start = int(self._rng.integers(stride)) if stride > 1 else 0
        return ids[start :: max(1, stride)].copy()
