"""Sampled statistics of a run: hot ids, how far rows move, and its moments.

Sampling rows is throttled to 0.15 % of the run's time, and sampling ids by its number of samples. Both are estimates.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from penstock.core.gate import Gate
from penstock.model.frames import Coalesced, Float32, Float64, Frame, Int64, Rows
from penstock.model.stats import Counters
from penstock.rows.table_set import TableSet

FRACTION = 0.0015  # of the time, for sampling rows
ALLOWANCE_S = 0.005  # in addition, so that short runs are sampled too
SAMPLED_ROWS = 256  # per table and sample, for how far rows move
SAMPLED_IDS = 512  # per sample, of all tables of a frame, for hot ids
MAX_SAMPLES = 64  # of hot ids, kept at a time
MAX_TABLES, IDS_PER_TABLE = 8, 5  # whose hot ids are listed, the tables with the most rows first
MAX_MOMENTS = 256  # of a run; beyond that, every second one is dropped


@dataclass(frozen=True)
class Moment:
    """The numbers of a run after one of its frames.

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


class IdSample(NamedTuple):
    """Some of the ids of one frame.

    frame : its number in the run, from 1
    tables : name → (ids, how many rows each is of)
    """

    frame: int
    tables: Mapping[str, tuple[Int64, Float64]]


class SampledTable(NamedTuple):
    """The sampled ids of one table, each once. times : how often each was sampled; rows : estimated, of each"""

    ids: Int64
    times: Int64
    rows: Float64


class Hot:
    """The most frequent ids, by samples of every n-th frame: they are spread over the whole run.

    Above MAX_SAMPLES, n doubles and every second sample is dropped. A sample takes about 10 µs, as the ids are counted
    on request, and a run of a million frames takes about 500 of them.
    """

    def __init__(self) -> None:
        self.samples: list[IdSample] = []
        self._every, self._num_frames = 1, 0

    def is_due(self) -> bool:
        """Count a frame. Return whether it is one to sample."""
        self._num_frames += 1
        return self._num_frames % self._every == 0

    def add(self, tables: Mapping[str, tuple[Int64, Float64]]) -> None:
        """Add the sample of the frame that is due."""
        self.samples.append(IdSample(self._num_frames, tables))
        if len(self.samples) > MAX_SAMPLES:
            self._every *= 2
            self.samples = [sample for sample in self.samples if sample.frame % self._every == 0]

    @property
    def sampled(self) -> int:
        """Return the number of sampled rows."""
        return sum(len(ids) for sample in self.samples for ids, _ in sample.tables.values())


def tables_of(samples: Sequence[IdSample]) -> dict[str, SampledTable]:
    """Return the sampled ids by table, the table with the most rows first."""
    parts: dict[str, list[tuple[Int64, Float64]]] = {}
    for sample in samples:
        for name, part in sample.tables.items():
            parts.setdefault(name, []).append(part)
    tables = {}
    for name, several in parts.items():
        sampled_ids, rows = (np.concatenate(column) for column in zip(*several, strict=True))
        ids, indices, times = np.unique(sampled_ids, return_inverse=True, return_counts=True)
        tables[name] = SampledTable(ids, times, np.bincount(indices, rows, len(ids)).astype(np.float64))
    return dict(sorted(tables.items(), key=lambda item: -item[1].rows.sum()))


def hot_ids(samples: Sequence[IdSample]) -> list[tuple[str, int, float]]:
    """Return (table, id, fraction of the table's rows): the most frequent ids of each table."""
    return [
        (name, int(table.ids[index]), float(table.rows[index] / table.rows.sum()))
        for name, table in list(tables_of(samples).items())[:MAX_TABLES]
        for index in np.argsort(-table.rows, kind="stable")[:IDS_PER_TABLE].tolist()
    ]


class Probe:
    """Samples hot ids, how far rows move, and moments of a run."""

    def __init__(self, tables: TableSet) -> None:
        self._tables = tables
        self._began_s, self._spent_s = time.perf_counter(), 0.0  # for sampling rows
        self._rows: dict[str, tuple[Int64, Float32]] = {}
        self._every, self._skipped = 1, 0
        self._rng = np.random.default_rng(0)
        self.hot = Hot()
        self.norms: dict[str, float] = {}
        self.update_norms: dict[str, float] = {}  # the last ones of all tables
        self.moments: list[Moment] = []

    def before(self, coalesced: Mapping[str, Sequence[Coalesced]]) -> None:
        """Keep copies of some of the rows that a step is about to change."""
        self._rows = {}
        # A plain comparison, because every step calls it.
        if self._spent_s > ALLOWANCE_S + FRACTION * (time.perf_counter() - self._began_s):
            return
        with self._sampling():
            for name, several in coalesced.items():
                ids = [part for rows in several for part, _ in rows.parts if len(part)]
                if ids:
                    block = ids[int(self._rng.integers(len(ids)))]
                    sample = block[self._random_slice(len(block), SAMPLED_ROWS)].copy()
                    self._rows[name] = sample, self._tables.table(name).read(sample)

    def after(self) -> None:
        """Compute how far the sampled rows have moved."""
        if not self._rows:
            return
        with self._sampling():
            for name, (ids, rows) in self._rows.items():
                with np.errstate(invalid="ignore"):
                    moved = np.subtract(self._tables.table(name).read(ids), rows, dtype=np.float64)
                norm = math.sqrt(float(np.square(moved).sum(axis=1).mean()))
                if math.isfinite(norm):  # skip rows that became infinite
                    self.norms[name] = self.update_norms[name] = norm
            self._rows = {}

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """Count the time in the context as that of sampling rows."""
        started = time.perf_counter()
        yield
        self._spent_s += time.perf_counter() - started

    def sample_ids(self, frame: Frame) -> None:
        if self.hot.is_due():
            num_ids = max(1, SAMPLED_IDS // max(1, len(frame.rows)))
            self.hot.add({name: self._sampled(name, blocks, num_ids) for name, blocks in frame.rows.items() if blocks})

    def _sampled(self, name: str, blocks: Sequence[Rows], most: int) -> tuple[Int64, Float64]:
        """Return some of the ids of one table, and how many rows each is of."""
        ends = np.cumsum([len(block.ids) for block in blocks])
        # A block in proportion to its size, so that no row is more likely than another.
        block = blocks[int(np.searchsorted(ends, self._rng.integers(ends[-1]), "right"))] if ends[-1] else blocks[0]
        indices = self._random_slice(len(block.ids), most)
        ids = self._tables.held.ids(name, block.ids[indices].copy())
        rows = np.ones(len(ids)) if block.counts is None else block.counts[indices].astype(np.float64)
        return ids, rows * (ends[-1] / max(1, len(ids)))

    def note(self, seconds: float, counters: Counters, gate: Gate, rates: Sequence[float]) -> None:
        """Append a moment, or skip it: a long run records every second, fourth, eighth … frame."""
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
