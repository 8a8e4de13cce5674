"""The columns that delimit or describe frames: ``step``, ``contributor``, ``learning_rates`` and ``time``, per row.

A row of an example stream is an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.io.decoding.columns import Codes, Float32, Int64, coded, float_lists, integers
from penstock.io.decoding.schema import Roles
from penstock.io.sources.batch import Batch
from penstock.model.frames import MAX_TIME

Key = tuple[int | None, Any]  # step, contributor


@dataclass(frozen=True)
class Broken:
    """A row whose frame or learning rates are unknown: an error for any value of on_bad_row."""

    row: int
    problem: str
    column: str


@dataclass(eq=False)  # not frozen, like all per-batch objects: frames.py gives the reason
class FrameColumns:
    """Steps, contributors and learning rates as numpy; None where the stream has no such column.

    rates : float32, (n, number of tags), up to the first row that has none
    no_step, no_rates : the first row without; the step before it says nothing of where its frame ends
    times : -1 where it is null or outside of 0 to MAX_TIME
    """

    steps: Int64 | None = None
    contributors: tuple[Codes, list[Any]] | None = None
    rates: Float32 | None = None
    no_step: Broken | None = None
    no_rates: Broken | None = None
    times: Int64 | None = None

    def runs(self, batch: Batch) -> Iterator[tuple[int, int, Key]]:
        """Yield the runs of equal (step, contributor): (start, stop, key). Raises InputError at a row without a step.

        batch : these are columns of, with a row at least
        """
        end = batch.data.num_rows if self.no_step is None else self.no_step.row
        columns = (self.steps, self.contributors and self.contributors[0])
        changes = [codes[1:end] != codes[:end][:-1] for codes in columns if codes is not None]
        cuts = (reduce(np.logical_or, changes).nonzero()[0] + 1).tolist() if changes else []
        for start, stop in pairwise([0, *cuts, end]):
            if start < stop:
                yield start, stop, self._key(start)
        if self.no_step is not None:
            raise batch.error(self.no_step.row, self.no_step.problem, self.no_step.column)

    def _key(self, row: int) -> Key:
        step = None if self.steps is None else int(self.steps[row])
        if self.contributors is None:
            return step, None
        codes, values = self.contributors
        return step, values[codes[row]] if codes[row] >= 0 else None


def frame_columns(columns: Mapping[str, pa.Array], roles: Roles, num_tags: int | None) -> FrameColumns:
    """Read validated columns. num_tags : learning rates that a row must carry; None does not look at them"""
    steps, no_step = _steps(columns, roles)
    rates, no_rates = _rates(columns, roles, num_tags)
    contributors = None if roles.contributor is None else coded(columns[roles.contributor.name])
    return FrameColumns(steps, contributors, rates, no_step, no_rates, _times(columns, roles))


def _times(columns: Mapping[str, pa.Array], roles: Roles) -> Int64 | None:
    """Return the time of every row, -1 where it is null or outside of 0 to MAX_TIME."""
    if roles.time is None:
        return None
    raw, null = integers(columns[roles.time.name])
    bad = (raw < 0) | (raw > MAX_TIME)
    return np.where(bad if null is None else bad | null, -1, raw).astype(np.int64)


def _steps(columns: Mapping[str, pa.Array], roles: Roles) -> tuple[Int64 | None, Broken | None]:
    """Return the step of every row, and the first row without one."""
    if roles.step is None:
        return None, None
    raw, null = integers(columns[roles.step.name])
    steps = raw.astype(np.int64, copy=False)
    bad = np.zeros(len(raw), bool) if null is None else null
    if raw.dtype == np.uint64:
        bad = bad | (raw > np.uint64(2**63 - 1))
    if not bad.any():
        return steps, None
    row = int(np.argmax(bad))
    problem = "expected a step, got null" if null is not None and null[row] else f"expected an int64, got {raw[row]}"
    return steps, Broken(row, problem, roles.step.name)


def _rates(columns: Mapping[str, pa.Array], roles: Roles, num_tags: int | None) -> tuple[Float32 | None, Broken | None]:
    """Return the learning rates of every row up to the first without, and that row."""
    if roles.learning_rates is None or num_tags is None:
        return None, None
    name = roles.learning_rates.name
    lists = float_lists(columns[name])
    row = lists.first_unlike(num_tags)
    if row is None:
        return lists.take(slice(0, lists.num_rows), num_tags), None
    if lists.null is not None and lists.null[row]:
        problem = f"expected {num_tags} learning rates, one per tag, got null"
    elif lists.length(row) != num_tags:
        problem = f"expected {num_tags} learning rates, one per tag, got {lists.length(row)}"
    else:
        problem = f"expected finite learning rates, got {lists.of_row(row).tolist()}"
    return lists.take(slice(0, row), num_tags), Broken(row, problem, name)
