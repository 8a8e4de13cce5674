"""Plain batches, converted with a fraction of the calls of ``rows.decode_rows``."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from penstock.config.id_ranges import ANY_UINT64
from penstock.io.decoding.columns import Lists
from penstock.io.decoding.frame_columns import FrameColumns
from penstock.io.decoding.rows import DecodedBatch, RowBatch
from penstock.io.decoding.schema import Roles
from penstock.io.sources.batch import RAISED
from penstock.pyx.arrow_c_data import plain_rows


class PlainColumns:
    """Converts plain batches; a stream's schema is checked once.

    Plain: one table, int64 ids, float32 gradients in lists of the table's dim, if they are read, maybe an int64 step,
    no nulls. Most logs are. ``decode_rows`` takes batches that are not plain after all or damaged, and reports errors.
    """

    def __init__(self, roles: Roles, table: str) -> None:
        self._tables, self._width = (table,), 0 if roles.ids_only else roles.gradient.type.list_size
        gradient = None if roles.ids_only else roles.gradient.name
        self._names = roles.id.name, gradient, None if roles.step is None else roles.step.name
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
    return PlainColumns(roles, table)
