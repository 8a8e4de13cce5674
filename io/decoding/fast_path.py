"""Convert batches of plain columns to numpy, with a fraction of the calls of ``rows.decode_rows``.

Plain means one table, int64 ids, float32 gradients in lists of the table's dim, optionally an int64 step, and no
nulls. Most logs are plain; a stream's schema is checked once. Batches that are not plain after
all, including damaged ones, go through ``decode_rows``, which also reports errors.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from penstock.io.decoding.columns import Lists
from penstock.io.decoding.frame_columns import FrameColumns
from penstock.io.decoding.rows import DecodedBatch, RowBatch
from penstock.io.decoding.schema import Roles
from penstock.io.sources.batch import RAISED
from penstock.pyx.arrow_c_data import plain_rows


class PlainColumns:
    """The schema of a stream whose batches may be plain."""

    def __init__(self, roles: Roles, table: str) -> None:
        self._tables, self._width = (table,), roles.gradient.type.list_size
        self._names = roles.id.name, roles.gradient.name, None if roles.step is None else roles.step.name
        self._where: tuple[int, int, int, int] | None = None  # columns and their indices: the same in all batches

    def decode(self, batch: pa.RecordBatch) -> DecodedBatch | None:
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
        ids, values, steps = found
        gradients = Lists(values.reshape(-1), len(ids), self._width, None, None)
        return DecodedBatch(FrameColumns(steps), [RowBatch(len(ids), self._tables, None, ids, ids, None, gradients)])


def plain_columns(roles: Roles, table: str | None, sizes: Mapping[str, tuple[int, int]]) -> PlainColumns | None:
    """Return None if no batch of these roles is plain. table : of rows that name none"""
    if roles.table is not None or roles.contributor is not None or roles.learning_rates is not None or roles.bfloat16:
        return None
    gradient = roles.gradient.type
    numbers = [field.type for field in (roles.id, roles.step) if field is not None]
    if any(kind != pa.int64() for kind in numbers) or not pa.types.is_fixed_size_list(gradient):
        return None
    if gradient.value_type != pa.float32() or table is None or sizes.get(table, (0, -1))[1] != gradient.list_size:
        return None
    return PlainColumns(roles, table)
