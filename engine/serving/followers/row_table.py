"""The rows of all tables as one Arrow table, for targets that are such tables: ``table``, ``id``, ``row``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.io.list_columns import list_column, row_type
from penstock.model.row_encodings import FLOAT32, ROWS_KEY
from penstock.serving.followers.target import FollowedJob, TableRows

BLOCK_ROWS = 1 << 16


def row_schema(job: FollowedJob, id_type: pa.DataType, fixed: bool) -> pa.Schema:
    """Return the schema. fixed : whether rows may be lists of one size, if all tables have the same dim"""
    row = row_type([form.dim for form in job.tables.values() if fixed], job.rows)
    metadata = {} if job.rows is FLOAT32 else {ROWS_KEY: job.rows.name}
    return pa.schema([("table", pa.utf8()), ("id", id_type), ("row", row)], metadata)


def row_table(tables: Sequence[TableRows], schema: pa.Schema, with_removed: bool = False) -> pa.Table:
    """Return the rows, and ``with_removed`` also removed ids, whose row is null."""
    batches = []
    for rows in tables:
        for part in blocks_of(rows):
            lists = list_column(part.rows, schema.field("row").type)
            batches.append(_batch(rows.table, part.ids, lists, schema))
        if with_removed and len(rows.removed):
            nothing = pa.nulls(len(rows.removed), schema.field("row").type)
            batches.append(_batch(rows.table, rows.removed, nothing, schema))
    return pa.Table.from_batches(batches, schema)


def blocks_of(rows: TableRows) -> Iterator[TableRows]:
    """Yield the rows of a table in blocks, without its removed ids."""
    for first in range(0, len(rows.ids), BLOCK_ROWS):
        block = slice(first, first + BLOCK_ROWS)
        yield TableRows(rows.table, rows.ids[block], rows.rows[block], rows.ids[:0])


def _batch(table: str, ids: npt.NDArray[Any], rows: pa.Array, schema: pa.Schema) -> pa.RecordBatch:
    column = ids.view("uint64" if schema.field("id").type == pa.uint64() else "int64")
    names = pa.DictionaryArray.from_arrays(np.zeros(len(ids), np.int32), pa.array([table], pa.utf8()))
    return pa.RecordBatch.from_arrays([names.cast(pa.utf8()), pa.array(column), rows], schema=schema)
