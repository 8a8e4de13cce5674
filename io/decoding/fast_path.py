"""Convert batches of plain columns to numpy, with a fraction of the calls of ``rows.decode``.

Plain means one table, int64 ids, float32 gradients in lists of the table's dim, optionally an int64 step, and no
nulls. Most logs are plain; a stream's schema is checked once. Batches that are not plain after
all, including damaged ones, go through ``decode``, which also reports errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from penstock.config.id_ranges import ANY_UINT64
from penstock.frames import Rows
from penstock.io.decoding.columns import Codes, Float32, Int64
from penstock.io.decoding.rows import Broken, Decoded
from penstock.io.decoding.schema import Roles
from penstock.io.sources.batch import RAISED
from penstock.pyx.arrow_c_data import plain_rows


class PlainRows:
    """One batch: a ``rows.Content`` whose rows are good, except for ids out of range and values that are not finite.

    values : float32 (n, dim); decode : decodes the batch in full, for access to single rows
    """

    contributors: tuple[Codes, list[Any]] | None = None
    rates: Float32 | None = None
    times: Int64 | None = None
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
    """The schema of a stream whose batches may be plain."""

    def __init__(self, roles: Roles, table: str) -> None:
        self._table, self._width = table, roles.gradient.type.list_size
        self._names = roles.id.name, roles.gradient.name, None if roles.step is None else roles.step.name
        self._where: tuple[int, int, int, int] | None = None  # columns and their indices: the same in all batches

    def decode(self, batch: pa.RecordBatch, long_way: Callable[[], Decoded]) -> PlainRows | None:
        """Decode a batch; None if it is not plain, or damaged."""
        if self._where is None:
            at = [-1 if name is None else batch.schema.get_field_index(name) for name in self._names]
            self._where = batch.num_columns, at[0], at[1], at[2]
        try:
            # Not in full: numbers need no more validation, and other columns are unused.
            batch.validate()
            found = plain_rows(batch.__arrow_c_array__()[1], *self._where, self._width)
        except RAISED:
            return None
        if found is None or (found[2] is None) != (self._names[2] is None):
            return None
        return PlainRows(self._table, *found, long_way)


def plain_columns(roles: Roles, table: str | None, sizes: Mapping[str, tuple[int, int]]) -> PlainColumns | None:
    """Return None if no batch of these roles is plain. table : of rows that name none"""
    if roles.table is not None or roles.contributor is not None or roles.learning_rates is not None or roles.bfloat16:
        return None
    if roles.time is not None:
        return None
    gradient = roles.gradient.type
    numbers = [field.type for field in (roles.id, roles.step) if field is not None]
    if any(kind != pa.int64() for kind in numbers) or not pa.types.is_fixed_size_list(gradient):
        return None
    vocabulary_size, dim = sizes.get(table or "", (0, -1))
    if gradient.value_type != pa.float32() or dim != gradient.list_size or vocabulary_size == ANY_UINT64:
        return None
    assert table is not None
    return PlainColumns(roles, table)
