"""Convert a batch of gradient rows to numpy: validate every column used before taking a pointer into it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from penstock.io.decoding.columns import Codes, Lists, coded, float_lists
from penstock.io.decoding.frame_columns import frame_columns
from penstock.io.decoding.rows import DecodedBatch, RowBatch
from penstock.io.decoding.schema import Roles
from penstock.io.decoding.string_ids import ids_of
from penstock.io.sources.batch import Batch, arrow_errors


def decode_rows(batch: Batch, roles: Roles, default_table: str | None, num_tags: int | None) -> DecodedBatch:
    """Validate the columns used and turn them into numpy. Raises InputError for damaged columns.

    default_table : of rows that do not say theirs
    num_tags : how many learning rates a row must carry; None does not look at them
    """
    columns = {name: valid_column(batch, name) for name in roles.names}
    raw_ids, ids_null = ids_of(columns[roles.id.name])
    tables, codes = _tables(columns, roles, default_table)
    rows = RowBatch(
        num_rows=batch.data.num_rows,
        tables=tables,
        codes=codes,
        raw_ids=raw_ids,
        ids=raw_ids.astype(np.int64, copy=False),
        ids_null=ids_null,
        gradients=Lists(np.empty(0, np.float32), len(raw_ids), 0, None, None)
        if roles.ids_only
        else float_lists(columns[roles.gradient.name], roles.bfloat16),
    )
    return DecodedBatch(frame_columns(columns, roles, num_tags), [rows])


def valid_column(batch: Batch, name: str) -> pa.Array:
    """Return a column, validated. Raises InputError."""
    with arrow_errors("corrupt Arrow data", batch.source, batch.index, name):
        column = batch.data.column(name)
        column.validate(full=True)
        if len(column) != batch.data.num_rows:
            raise ValueError(f"{len(column)} values in a batch of {batch.data.num_rows} rows")
    return column


def _tables(
    columns: Mapping[str, pa.Array], roles: Roles, default: str | None
) -> tuple[tuple[str | None, ...], Codes | None]:
    if roles.table is None:
        return (default,), None
    codes, names = coded(columns[roles.table.name])
    if len(names) == 1 and (codes >= 0).all():
        return tuple(names), None
    return tuple(names), codes
