"""Batches of plain columns → numpy, with a fraction of the calls that ``decode`` needs.

Plain: one table, int64 ids, float32 gradients in lists of the table's dim, at most an int64 step beside them, no
nulls. Most logs are that, and whether a stream may be is found out once for its schema. What is not plain after
all, damaged columns among it, goes through ``decode``, which also says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from penstock.frames import Rows
from penstock.io.columns import Codes, Float32, Int64
from penstock.io.decode import Broken, Decoded
from penstock.io.parts import RAISED
from penstock.io.schema import Roles


class PlainRows:
    """One batch: a ``decode.Content`` whose every row is a good one, but for ids out of range and values not finite.

    values : float32 (n, dim); decode : the batch the long way, for who looks at single rows
    """

    contributors: tuple[Codes, list[Any]] | None = None
    rates: Float32 | None = None
    no_step: Broken | None = None
    no_rates: Broken | None = None
    _decoded: Decoded | None

    def __init__(
        self, table: str, ids: Int64, values: Float32, steps: Int64 | None, decode: Callable[[], Decoded]
    ) -> None:
        self.num_rows, self.steps = len(ids), steps
        self._table, self._ids, self._values = table, ids, values
        self._decode, self._decoded = decode, None

    @property
    def nbytes(self) -> int:
        return self._values.nbytes

    def by_row(self) -> Decoded:
        if self._decoded is None:
            self._decoded = self._decode()
        return self._decoded

    def truncated(self, units: slice) -> int:
        return 0

    def by_table(self, rows: slice | Int64, sizes: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, Rows]]:
        if not isinstance(rows, slice):
            return self.by_row().by_table(rows, sizes)
        if rows.start == rows.stop:
            return iter(())
        return iter(((self._table, Rows(self._ids[rows], self._values[rows])),))


class PlainColumns:
    """What batches of a schema have in common that may be plain."""

    def __init__(self, roles: Roles, table: str) -> None:
        self._table, self._width = table, roles.gradient.type.list_size
        self._id, self._gradient = roles.id.name, roles.gradient.name
        self._step = None if roles.step is None else roles.step.name

    def decode(self, batch: pa.RecordBatch, long_way: Callable[[], Decoded]) -> PlainRows | None:
        """None where the batch is not plain, or damaged."""
        try:
            ids = _plain(batch, self._id)
            steps = None if self._step is None else _plain(batch, self._step)
            gradient = batch.column(self._gradient)
            gradient.validate(full=True)
            child = gradient.values  # it ignores the slice
            if gradient.null_count or child.null_count or len(gradient) != batch.num_rows:
                return None
            flat = child.to_numpy()
        except RAISED:
            return None
        if ids is None or (steps is None) != (self._step is None) or not flat.flags.aligned:
            return None
        first = gradient.offset * self._width
        values = flat[first : first + len(ids) * self._width].reshape(len(ids), self._width)
        return PlainRows(self._table, ids, values, steps, long_way)


def plain_columns(roles: Roles, table: str | None, sizes: Mapping[str, tuple[int, int]]) -> PlainColumns | None:
    """None where no batch of these roles is plain. table : of rows that do not say theirs"""
    if roles.table is not None or roles.contributor is not None or roles.learning_rates is not None or roles.bfloat16:
        return None
    gradient = roles.gradient.type
    numbers = [field.type for field in (roles.id, roles.step) if field is not None]
    if any(kind != pa.int64() for kind in numbers) or not pa.types.is_fixed_size_list(gradient):
        return None
    if gradient.value_type != pa.float32() or table is None or sizes.get(table, (0, -1))[1] != gradient.list_size:
        return None
    return PlainColumns(roles, table)


def _plain(batch: pa.RecordBatch, name: str) -> Int64 | None:
    """An int64 column; None where it has nulls, another length than the batch, or is not aligned."""
    column = batch.column(name)
    column.validate(full=True)
    if column.null_count or len(column) != batch.num_rows:
        return None
    values: Int64 = column.to_numpy()
    return values if values.flags.aligned else None
