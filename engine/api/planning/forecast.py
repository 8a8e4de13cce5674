"""The directories and caches of one choice, step by step, and what becomes of keys and rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import penstock.base.interrupts as interrupts
from penstock.api.planning.cached_rows import CachedRows, CacheForecast
from penstock.api.planning.choices import Choice
from penstock.model.config.specs import TableSpec
from penstock.model.frames import Int64
from penstock.model.stats import KeyReport
from penstock.pyx.keys.directory import Directory
from penstock.pyx.keys.directory_plan import Plan
from penstock.pyx.keys.shard_sample import by_shard
from penstock.rows.key_directory import clock_at, key_report, make_directory, no_room, shortage

Run = Callable[[list[Callable[[], bool]]], Any]
MOST_SHARDS, ROWS_PER_SHARD = 1024, 4096
# A standard error from fewer shards says little.
LEAST_SHARD_BITS = 4


class Opening(NamedTuple):
    """The distinct keys of one table in an opening, int64 (n,), and of each its rows and frames, None: not counted."""

    keys: Int64
    rows: Int64 | None
    frames: Int64 | None

    def at(self, positions: Int64) -> Opening:
        """Return the keys at these positions."""
        return Opening(self.keys[positions], *(None if counts is None else counts[positions] for counts in self[1:]))

    def copy(self) -> Opening:
        return Opening(self.keys.copy(), *(None if counts is None else counts.copy() for counts in self[1:]))


class Openings(NamedTuple):
    """What one step opens of every dynamic or cached table.

    tables : of dynamic ones; uses : of cached ones, the ids of each use
    time : the largest of any frame so far, if frames have times
    """

    tables: Mapping[str, Opening]
    step: int
    time: int | None
    uses: Mapping[str, Sequence[Int64]] = MappingProxyType({})

    @property
    def num_keys(self) -> int:
        num_used = sum(len(ids) for uses in self.uses.values() for ids in uses)
        return sum(len(opening.keys) for opening in self.tables.values()) + num_used

    def copy(self) -> Openings:
        """Return openings whose arrays outlive the sums that they were read from."""
        return self._replace(
            tables={name: opening.copy() for name, opening in self.tables.items()},
            uses={name: [ids.copy() for ids in uses] for name, uses in self.uses.items()},
        )


@dataclass(frozen=True)
class Full:
    """A table had no room for new keys, which ends a replay. problem : its message"""

    step: int
    table: str
    problem: str


@dataclass(frozen=True)
class TableForecast:
    """One dynamic table under one choice.

    capacity : rows; share : of the virtual shards, and so of the keys, that were followed; 1: all, and counts are exact
    report : estimates if share is below 1; standard_error : of its counts, by their names; empty if they are exact
    device_bytes : of weights and slots, at least
    """

    capacity: int
    share: float
    report: KeyReport
    device_bytes: int
    standard_error: Mapping[str, float] = field(default_factory=dict)


class Forecast:
    """Follows the keys of all dynamic tables, and the rows of all cached ones, under one choice.

    specs : of the configuration's dynamic and cached tables; sample_bits : by dynamic table
    full : what ended it; None: nothing
    shortage : the first step of which new keys found no room, with their number, as text; None: there was none
    """

    def __init__(
        self, choice: Choice, specs: Mapping[str, TableSpec], sample_bits: Mapping[str, int], seed: int
    ) -> None:
        self.specs = {name: choice.of(spec) for name, spec in specs.items()}
        self.directories = {name: make_directory(self.specs[name], seed, bits) for name, bits in sample_bits.items()}
        self._cached = {
            name: CachedRows(spec, partial(self._rows_of, name))
            for name, spec in self.specs.items()
            if spec.placement.where == "cached"
        }
        self._upcoming: deque[Openings] = deque()
        self._look_ahead = max((rows.forecast.look_ahead for rows in self._cached.values()), default=0)
        self.full: Full | None = None
        self.shortage: str | None = None

    def follow(self, several: Sequence[Openings], to_the_end: bool = False) -> bool:
        """Take several steps, until a table is full. Returns True.

        to_the_end : these are the last; else as many remain as cached tables look ahead to
        """
        if self.full is None:
            self._upcoming.extend(several)
        while len(self._upcoming) > (0 if to_the_end else self._look_ahead) and self.full is None:
            self.step(self._upcoming[0])
            self._upcoming.popleft()
            interrupts.check()
        return True

    def step(self, openings: Openings, run: Run | None = None) -> None:
        """Take a step in all tables, or in none if one is full or was before. run : as for Plan"""
        if self.full is not None:
            return
        for name, rows in self._cached.items():
            rows.foresee(len(self._upcoming), partial(self._upcoming_uses, name))
        self._step_keys(openings, run)
        if self.full is None:
            for name, rows in self._cached.items():
                rows.step(openings.uses.get(name, ()))

    def _step_keys(self, openings: Openings, run: Run | None) -> None:
        step, plans = openings.step, []
        for name, directory in self.directories.items():
            spec, (keys, rows, frames) = self.specs[name], openings.tables[name]
            clock = clock_at(spec, directory, step, openings.time)
            plan = Plan(directory, keys, rows, frames, clock=clock, step=step, run=run)
            plans.append(plan)
            if plan.num_rejected and self.shortage is None:
                self.shortage = f"step {step}: {shortage(directory, plan)}"
            if plan.num_rejected and spec.dynamic is not None and spec.dynamic.on_full == "error":
                for earlier in plans:
                    earlier.cancel()
                self.full = Full(step, name, str(no_room(spec, directory, plan)))
                return
        for plan in plans:
            plan.commit()

    def tables(self) -> dict[str, TableForecast]:
        """Return what has become of the keys of every dynamic table."""
        return {name: _forecast(self.specs[name], directory) for name, directory in self.directories.items()}

    def cached(self) -> dict[str, CacheForecast]:
        """Return what has become of the rows of every cached table."""
        return {name: rows.forecast for name, rows in self._cached.items()}

    def _upcoming_uses(self, name: str, number: int) -> Sequence[Int64]:
        return self._upcoming[number].uses.get(name, ())

    def _rows_of(self, name: str, ids: Int64) -> Int64:
        """Return the rows of ids; of keys those that have one now."""
        if name not in self.directories:
            return ids
        rows = self.directories[name].rows(ids).astype(np.int64)
        return rows[rows >= 0]


def shard_bits(capacity: int) -> int:
    """Return how many bits number the virtual shards of a directory."""
    return max(0, min(MOST_SHARDS, capacity // ROWS_PER_SHARD).bit_length() - 1)


def _forecast(spec: TableSpec, directory: Directory) -> TableForecast:
    num_shards, num_followed = 1 << shard_bits(spec.vocabulary_size), directory.num_shards
    report, scale, error = key_report(directory), num_shards / num_followed, {}
    if scale > 1:
        left_out = np.sqrt(1 - 1 / scale)
        for name, counts in by_shard(directory).items():
            error[name] = float(num_shards * counts.std(ddof=1) / np.sqrt(num_followed) * left_out)
        scaled = {name: round(number * scale) for name, number in vars(report).items() if name != "load"}
        report = replace(report, **scaled)
    return TableForecast(spec.vocabulary_size, 1 / scale, report, spec.weights_bytes + spec.slots_bytes, error)
