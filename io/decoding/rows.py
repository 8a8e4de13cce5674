"""Batches of gradient rows as numpy, and the conversion of plain batches, with a fraction of the calls of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.io.decoding.columns import (
    ROWS_OF_A_RUN,
    Bool,
    Codes,
    Float32,
    Int64,
    Lists,
    Look,
    Runs,
)
from penstock.io.decoding.frame_columns import FrameColumns
from penstock.io.decoding.schema import Roles
from penstock.io.sources.batch import RAISED, PlainRoles
from penstock.model.combiners import not_finite
from penstock.model.config.id_ranges import ANY_INT64, ANY_UINT64
from penstock.model.frames import Rows
from penstock.pyx.buffer_pool import Pool
from penstock.pyx.gradient_blocks import GradientBlocks
from penstock.pyx.plain_batches import PlainRows, plain_rows

Selected = Iterator[tuple[str, slice | Int64, Rows]]


@dataclass(eq=False)
class Examples:
    """The examples whose lookups the rows of a table are: example by example, then feature by feature.

    lengths : int64, shape (features, examples), rows of each of the table's features
    columns : int64, the numbers of their columns among those in use
    """

    lengths: Int64
    columns: Int64

    @cached_property
    def ends(self) -> Int64:
        """Return int64, shape (examples + 1,), the rows before each example."""
        return np.concatenate([[0], np.cumsum(self.lengths.sum(axis=0))])

    def origins(self, rows: Int64) -> tuple[Int64, Int64]:
        """Return the example of each row, and the number of its feature's column."""
        examples = np.searchsorted(self.ends, rows, side="right") - 1
        before = np.cumsum(self.lengths[:, examples], axis=0)
        return examples, self.columns[(before <= rows - self.ends[examples]).sum(axis=0)]


@dataclass(eq=False)
class SampleGradients:
    """The gradient of each row of an example stream, computed on demand; has the methods of ``Lists``.

    gradients : float32, shape (m, dim); samples : int64, shape (n,), the one of each row
    gains : float32, shape (n,), its factor, None: all 1; null : shape (n,), rows without a gradient, None: none
    """

    gradients: Float32
    samples: Int64
    gains: Float32 | None
    null: Bool | None

    def look(self, rows: slice | Int64, dim: int) -> Look:
        return self.gradients, self.samples[rows], None if self.gains is None else self.gains[rows]

    def of_row(self, row: int) -> Float32:
        return Rows(self.samples, self.gradients, self.samples, self.gains).gradient(row)

    def length(self, row: int) -> int:
        return int(self.gradients.shape[1])

    def differ_from(self, dim: int | np.int64 | Int64) -> Bool:
        return np.asarray(False)  # an example whose gradient has another length stops the reading

    def not_finite(self) -> Bool | None:
        mask = not_finite(self.gradients, self.samples, self.gains)
        return mask if mask.any() else None


@dataclass(eq=False)
class RowBatch:
    """Gradient rows of a batch as numpy.

    tables : names; codes say which row is of which, -1 for a null. One name and codes None: all rows.
    ids : raw_ids as int64; one that does not fit is negative
    examples : of an example stream, whose batches have a RowBatch for each table
    """

    num_rows: int
    tables: tuple[str | None, ...]
    codes: Codes | None
    raw_ids: npt.NDArray[Any]
    ids: Int64
    ids_null: Bool | None
    gradients: Lists | SampleGradients
    examples: Examples | None = None

    def span(self, start: int, stop: int) -> slice:
        """Return the gradient rows of some neighbouring rows of the source."""
        if self.examples is None:
            return slice(start, stop)
        return slice(int(self.examples.ends[start]), int(self.examples.ends[stop]))

    def origins(self, rows: Int64) -> tuple[Int64, Int64]:
        """Return the source's row of each gradient row, and the number of its column."""
        return (rows, np.zeros_like(rows)) if self.examples is None else self.examples.origins(rows)

    def may_be_bad(self, sizes: Mapping[str, tuple[int, int]]) -> bool:
        """Return whether a row may be bad, apart from its id's range and values, which the summing kernel checks."""
        if self.ids_null is not None or self.gradients.null is not None:
            return True
        of_tables = [(0, -1) if name is None else sizes.get(name, (0, -1)) for name in self.tables]
        dims = [dim for _, dim in of_tables]
        # The kernel takes any int64 for a key of a dynamic table.
        signed = self.raw_ids.dtype.kind == "i"
        if -1 in dims or not all(size > 0 or (size == ANY_INT64 and signed) for size, _ in of_tables):
            return True
        # The last entry stands for code -1, a null.
        dim = dims[0] if self.codes is None else np.array([*dims, -1], np.int64)[self.codes]
        return bool(self.gradients.differ_from(dim).any())

    def by_table(self, rows: slice | Int64, sizes: Mapping[str, tuple[int, int]]) -> Selected:
        """Select rows, which must be good, as (table, which, rows), table by table, each table's in their order."""
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

    def _of_table(self, code: int, rows: slice | Int64, sizes: Mapping[str, tuple[int, int]]) -> Selected:
        ids = self.ids[rows]
        if not len(ids):
            return
        table = self.tables[code]
        assert table is not None  # a row without a table is a bad row
        yield table, rows, Rows(ids, *self.gradients.look(rows, sizes[table][1]))

    @cached_property
    def runs(self) -> Runs | None:
        """Return the runs of rows of one table, (start, stop, code), if they are few; else None."""
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


@dataclass(eq=False)
class DecodedBatch:
    """A batch as numpy: the columns that delimit frames, and its gradient rows.

    truncated : int64, of an example stream: the ids dropped from each example; None: none
    """

    frame_columns: FrameColumns
    row_batches: Sequence[RowBatch]
    truncated: Int64 | None = None

    def may_be_bad(self, sizes: Mapping[str, tuple[int, int]]) -> bool:
        return any(rows.may_be_bad(sizes) for rows in self.row_batches)


class PlainColumns:
    """Reads plain batches in place; a stream's schema is checked once.

    Plain: one table, int64 ids, float32 gradients in lists of the table's dim, if they are read, maybe an int64 step,
    no nulls. Most logs are. ``decode_rows`` takes batches that are not plain after all or damaged, and reports errors.

    roles : the columns
    """

    def __init__(self, roles: PlainRoles) -> None:
        self.roles = roles
        self._indices: tuple[int, int, int, int] | None = None  # columns and their indices: the same in all batches
        self._pool = Pool()

    def read(self, batch: pa.RecordBatch) -> PlainRows | None:
        """Return the rows of a batch; None if it is not plain, or damaged."""
        if self._indices is None:
            names = self.roles.id, self.roles.gradient, self.roles.step
            indices = [-1 if name is None else batch.schema.get_field_index(name) for name in names]
            self._indices = batch.num_columns, indices[0], indices[1], indices[2]
        try:
            # Not in full: numbers need no more validation, and other columns are unused.
            batch.validate()
            rows = plain_rows(batch.__arrow_c_array__()[1], self._pool, *self._indices, self.roles.width)
        except RAISED:
            return None
        return None if rows is None or (rows.steps is None) != (self.roles.step is None) else rows


def rows_of(blocks: GradientBlocks, number: int, are_own: bool = False) -> Rows:
    """Return the rows of a block as read-only views. are_own : as ``Rows.is_own``"""
    ids, values, num_rows = blocks.addresses(number)
    grads = np.empty((num_rows, 0), np.float32)
    if blocks.dim:
        memory = pa.foreign_buffer(values, 4 * blocks.dim * num_rows, blocks)
        grads = np.frombuffer(memory, np.float32).reshape(num_rows, blocks.dim)
    return Rows(np.frombuffer(pa.foreign_buffer(ids, 8 * num_rows, blocks), np.int64), grads, is_own=are_own)


def plain_columns(
    roles: Roles, table: str | None, sizes: Mapping[str, tuple[int, int]], most_rows: int = 1, ends_frames: bool = False
) -> PlainColumns | None:
    """Return None if no batch of these roles is plain.

    table : of rows that name none; most_rows, ends_frames : as in ``PlainRoles``
    """
    others = (roles.table, roles.contributor, roles.learning_rates, roles.time)
    if roles.bfloat16 or any(field is not None for field in others):
        return None
    gradient, (vocabulary_size, dim) = roles.gradient.type, sizes.get(table or "", (0, -1))
    numbers = [field.type for field in (roles.id, roles.step) if field is not None]
    if any(kind != pa.int64() for kind in numbers) or vocabulary_size == ANY_UINT64 or dim < 0:
        return None
    if not roles.ids_only and not pa.types.is_fixed_size_list(gradient):
        return None
    if not roles.ids_only and (gradient.value_type != pa.float32() or dim != gradient.list_size):
        return None
    assert table is not None
    names = None if roles.ids_only else roles.gradient.name, None if roles.step is None else roles.step.name
    width = 0 if roles.ids_only else gradient.list_size
    return PlainColumns(PlainRoles(table, roles.id.name, *names, width, most_rows, ends_frames))
