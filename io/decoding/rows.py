"""Convert a record batch to numpy: validate every column used before taking a pointer into it.

Also explains why a row is bad. Does not depend on frames, which ``framing`` builds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.config.id_ranges import ANY_UINT64, expected, outside
from penstock.errors import InputError, listed
from penstock.frames import Rows
from penstock.io.decoding.columns import (
    ROWS_OF_A_RUN,
    Bool,
    Codes,
    Float32,
    Gradients,
    Int64,
    Runs,
    coded,
    float_lists,
    integers,
    validated,
)
from penstock.io.decoding.schema import Roles, suggestion
from penstock.io.sources.batch import RAISED
from penstock.io.sources.batch import reason as reason_of

# Why a row is bad; the index is its code, and if several apply, the first one is reported.
REASONS = (
    "",
    "unknown_table",
    "id_null",
    "id_out_of_range",
    "gradient_null",
    "length_mismatch",
    "gradient_not_finite",
)
MAX_TIME = 2**32 - 2
CODE = {reason: code for code, reason in enumerate(REASONS)}


@dataclass(frozen=True)
class Broken:
    """A row whose frame or learning rates are unknown: an error for any value of on_bad_row."""

    row: int
    problem: str
    column: str


class Content(Protocol):
    """One batch as numpy: the columns that delimit frames, one value per row, and its gradient rows."""

    @property
    def steps(self) -> Int64 | None: ...
    @property
    def contributors(self) -> tuple[Codes, list[Any]] | None: ...
    @property
    def rates(self) -> Float32 | None: ...
    @property
    def times(self) -> Int64 | None: ...
    @property
    def no_step(self) -> Broken | None: ...
    @property
    def no_rates(self) -> Broken | None: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def by_table(self, rows: slice | Int64, sizes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, Rows]]: ...
    def by_row(self) -> Decoded: ...
    def truncated(self, units: slice) -> int: ...


@dataclass(eq=False)
class Decoded:
    """One batch's columns as numpy.

    tables : names; codes say which row is of which, -1 for a null. One name and codes None: all rows.
    rates : float32, (n, number of tags), up to the first row that has none
    no_step, no_rates : the first row without; the step before it says nothing of where its frame ends
    examples : of an example stream, whose gradient row each is
    """

    num_rows: int
    tables: tuple[str | None, ...]
    codes: Codes | None
    raw_ids: npt.NDArray[Any]
    ids: Int64
    ids_null: Bool | None
    gradients: Gradients
    steps: Int64 | None
    contributors: tuple[Codes, list[Any]] | None
    rates: Float32 | None
    no_step: Broken | None = None
    no_rates: Broken | None = None
    times: Int64 | None = None  # -1 where it is null or no uint32 below the largest
    examples: Int64 | None = None
    told_runs: Runs | None = None  # of the codes, where they are known to be few

    @property
    def nbytes(self) -> int:
        """Return the size of its gradients."""
        return self.gradients.nbytes

    def by_row(self) -> Decoded:
        return self

    def truncated(self, units: slice) -> int:
        return 0

    def by_table(self, rows: slice | Int64, sizes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, Rows]]:
        """Select rows, which must be good, table by table, each table's in their order."""
        if self.codes is None:
            yield from self._of_table(0, rows, sizes)
            return
        if isinstance(rows, slice):
            if self.runs is not None:
                for start, stop, code in self.runs:
                    run = slice(max(start, rows.start), min(stop, rows.stop))
                    yield from self._of_table(code, run, sizes)
                return
            rows = np.arange(rows.start, rows.stop)
        codes = self.codes[rows]
        if len(self.tables) < 1 << 15:
            codes = codes.astype(np.int16)  # numpy's radix sort
        order = np.argsort(codes, kind="stable")  # each table's rows stay in arrival order
        codes, rows = codes[order], rows[order]
        cuts = np.flatnonzero(np.diff(codes)) + 1
        for of_table in np.split(rows, cuts):
            if len(of_table):
                yield from self._of_table(int(self.codes[of_table[0]]), _as_slice(of_table), sizes)

    def _of_table(
        self, code: int, rows: slice | Int64, sizes: Mapping[str, tuple[int, int]]
    ) -> Iterator[tuple[str, Rows]]:
        ids = self.ids[rows]
        if not len(ids):
            return
        table = self.tables[code]
        assert table is not None  # a row without a table is a bad row
        yield table, Rows(ids, *self.gradients.look(rows, sizes[table][1]))

    @cached_property
    def runs(self) -> Runs | None:
        """Return the runs of rows of one table, (start, stop, code), if they are few; else None."""
        if self.told_runs is not None:
            return self.told_runs
        assert self.codes is not None
        cuts = np.flatnonzero(self.codes[1:] != self.codes[:-1]) + 1
        if len(cuts) > self.num_rows // ROWS_OF_A_RUN:
            return None
        bounds = [0, *cuts.tolist(), self.num_rows] if self.num_rows else [0]
        return [(start, stop, int(self.codes[start])) for start, stop in pairwise(bounds)]

    def table_of(self, row: int) -> str | None:
        code = 0 if self.codes is None else int(self.codes[row])
        return None if code < 0 else self.tables[code]


def _as_slice(rows: Int64) -> slice | Int64:
    """Return neighbouring rows as a slice, which gives a view, not a copy."""
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def decode(
    batch: pa.RecordBatch, roles: Roles, default_table: str | None, num_tags: int | None, place: Mapping[str, Any]
) -> Decoded:
    """Validate the columns used and turn them into numpy. As decode_rows, but a broken row is an error."""
    decoded = decode_rows(batch, roles, default_table, num_tags, place)
    for broken in filter(None, (decoded.no_step, decoded.no_rates)):
        raise InputError(broken.problem, row=broken.row, column=broken.column, **place)
    return decoded


def decode_rows(
    batch: pa.RecordBatch, roles: Roles, default_table: str | None, num_tags: int | None, place: Mapping[str, Any]
) -> Decoded:
    """Validate the columns used and turn them into numpy.

    default_table : of rows that do not say theirs
    num_tags : how many learning rates a row must carry; None does not look at them
    place : source and batch, for messages
    """
    columns, runs = {}, {}
    for name in roles.used:
        columns[name], runs[name] = seen_column(batch, name, place)
    raw_ids, ids_null = integers(columns[roles.id.name])
    told = None if roles.table is None else runs[roles.table.name]
    tables, codes = _tables(columns, roles, default_table, told)
    steps, no_step = steps_of(columns, roles)
    rates, no_rates = rates_of(columns, roles, num_tags)
    return Decoded(
        num_rows=batch.num_rows,
        tables=tables,
        codes=codes,
        raw_ids=raw_ids,
        # Narrowed only for use as an index: errors show ids that do not fit int64 from raw_ids.
        ids=raw_ids.astype(np.int64, copy=False),
        ids_null=ids_null,
        gradients=float_lists(columns[roles.gradient.name], roles.bfloat16, runs[roles.gradient.name]),
        steps=steps,
        contributors=None if roles.contributor is None else coded(columns[roles.contributor.name]),
        rates=rates,
        no_step=no_step,
        no_rates=no_rates,
        told_runs=told,
        times=times_of(columns, roles),
    )


def may_be_bad(decoded: Decoded, sizes: Mapping[str, tuple[int, int]]) -> bool:
    """Return whether a row may be bad, apart from its id's range and values, which the summing kernel checks."""
    gradients = decoded.gradients
    if decoded.ids_null is not None or gradients.null is not None or decoded.raw_ids.dtype == np.uint64:
        return True
    known = [(0, -1) if name is None else sizes.get(name, (0, -1)) for name in decoded.tables]
    dims = [dim for _, dim in known]
    if -1 in dims or any(vocabulary == ANY_UINT64 for vocabulary, _ in known):
        return True
    if decoded.codes is None:
        return not gradients.all_of(dims[0], 0, decoded.num_rows)
    if decoded.runs is not None:
        return any(code < 0 or not gradients.all_of(dims[code], *rows) for *rows, code in decoded.runs)
    if bool((decoded.codes < 0).any()):
        return True
    return bool(gradients.differ_from(np.array(dims, np.int64)[decoded.codes]).any())


def find_bad_rows(decoded: Decoded, sizes: Mapping[str, tuple[int, int]]) -> npt.NDArray[np.uint8] | None:
    """Return the reason code of every row, or None if all are good. sizes : table → (vocabulary_size, dim)."""
    known = [sizes.get(name, (0, -1)) if name is not None else (0, -1) for name in decoded.tables]
    if decoded.codes is None:
        vocabulary, dim = (np.int64(n) for n in known[0])
    else:
        # The last entry stands for code -1, a null.
        lookup = np.array([*known, (0, -1)], np.int64)
        vocabulary, dim = lookup[decoded.codes, 0], lookup[decoded.codes, 1]
    causes = {
        "gradient_not_finite": decoded.gradients.not_finite(),
        "length_mismatch": decoded.gradients.differ_from(dim),
        "gradient_null": decoded.gradients.null,
        "id_out_of_range": outside(decoded.raw_ids, vocabulary),
        "id_null": decoded.ids_null,
        "unknown_table": np.asarray(dim < 0),
    }
    if not any(cause is not None and cause.any() for cause in causes.values()):
        return None
    codes = np.zeros(decoded.num_rows, np.uint8)
    for reason, cause in causes.items():  # the strongest last: it overwrites
        if cause is not None:
            codes[np.broadcast_to(cause, codes.shape)] = CODE[reason]
    return codes


def explain(
    decoded: Decoded, row: int, code: int, sizes: Mapping[str, tuple[int, int]], roles: Roles
) -> tuple[str, str | None]:
    """Explain why a row is bad, as (problem, column name)."""
    reason, table = REASONS[code], decoded.table_of(row)
    if reason == "unknown_table":
        return _unknown_table(table, sizes, roles)
    vocabulary, dim = sizes[table or ""]
    if reason == "id_null":
        return "expected an id, got null", roles.id.name
    if reason == "id_out_of_range":
        wanted = f"{'vocabulary_size' if vocabulary > 0 else 'key_type'} of table '{table}'"
        return f"expected {expected(vocabulary)} ({wanted}), got {decoded.raw_ids[row]}", roles.id.name
    gradients, column = decoded.gradients, roles.gradient.name
    if reason == "gradient_null":
        return f"expected {dim} floats, got null", column
    if reason == "length_mismatch":
        return f"expected {dim} floats (dim of table '{table}'), got {gradients.length(row)}", column
    values = gradients.of_row(row)
    at = int(np.flatnonzero(~np.isfinite(values))[0])
    return f"expected values that are finite as float32, got {values[at]} at position {at}", column


def _unknown_table(table: str | None, sizes: Mapping[str, tuple[int, int]], roles: Roles) -> tuple[str, str | None]:
    near = suggestion(table, sizes) if table is not None else ""
    got = "null" if table is None else f"'{table}'"
    wanted = f"expected a table of the configuration ({listed(sizes)}), got {got}"
    if roles.table is None:
        return f"{wanted} from the schema's metadata, penstock.table{near}", None
    return wanted + near, roles.table.name


def seen_column(batch: pa.RecordBatch, name: str, place: Mapping[str, Any]) -> tuple[pa.Array, Runs | None]:
    """Validate a column; return it and the runs that ``validated`` found. Raises InputError."""
    try:
        column = batch.column(name)
        runs = validated(column)
    except RAISED as error:
        raise InputError(f"corrupt Arrow data: {reason_of(error)}", column=name, **place) from error
    if len(column) != batch.num_rows:
        problem = f"corrupt Arrow data: {len(column)} values in a batch of {batch.num_rows} rows"
        raise InputError(problem, column=name, **place)
    return column, runs


def valid_column(batch: pa.RecordBatch, name: str, place: Mapping[str, Any]) -> pa.Array:
    """Validate a column and return it. Raises InputError."""
    return seen_column(batch, name, place)[0]


def _tables(
    columns: Mapping[str, pa.Array], roles: Roles, default: str | None, runs: Runs | None
) -> tuple[tuple[str | None, ...], Codes | None]:
    if roles.table is None:
        return (roles.default_table or default,), None
    codes, names = coded(columns[roles.table.name], runs)
    if len(names) == 1 and (codes >= 0).all():
        return tuple(names), None
    return tuple(names), codes


def steps_of(columns: Mapping[str, pa.Array], roles: Roles) -> tuple[Int64 | None, Broken | None]:
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


def times_of(columns: Mapping[str, pa.Array], roles: Roles) -> Int64 | None:
    """Return the time of every row, -1 where it is null or outside of 0 to MAX_TIME."""
    if roles.time is None:
        return None
    raw, null = integers(columns[roles.time.name])
    bad = (raw < 0) | (raw > MAX_TIME)
    return np.where(bad if null is None else bad | null, -1, raw).astype(np.int64)


def rates_of(
    columns: Mapping[str, pa.Array], roles: Roles, num_tags: int | None
) -> tuple[Float32 | None, Broken | None]:
    if roles.learning_rates is None or num_tags is None:
        return None, None
    name = roles.learning_rates.name
    lists = float_lists(columns[name])
    bad = np.zeros(lists.num_rows, bool) | lists.differ_from(num_tags)
    for cause in (lists.null, lists.not_finite()):
        bad = bad if cause is None else bad | cause
    if not bad.any():
        return lists.take(slice(0, lists.num_rows), num_tags), None
    row = int(np.argmax(bad))
    if lists.null is not None and lists.null[row]:
        problem = f"expected {num_tags} learning rates, one per tag, got null"
    elif lists.length(row) != num_tags:
        problem = f"expected {num_tags} learning rates, one per tag, got {lists.length(row)}"
    else:
        problem = f"expected finite learning rates, got {lists.of_row(row).tolist()}"
    return lists.take(slice(0, row), num_tags), Broken(row, problem, name)
