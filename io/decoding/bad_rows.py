"""The contents of a quarantine: one Arrow batch per frame, with each bad row as in the source and the reason.

Defines columns and types only. ``row_checks`` finds bad rows; ``quarantine`` writes them.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from penstock.io.decoding.columns import Int64, Lists
from penstock.io.decoding.row_checks import REASONS
from penstock.io.decoding.rows import RowBatch, SampleGradients
from penstock.io.decoding.source_batch import BadRows, SourceBatch
from penstock.io.sources.batch import arrow_errors

MARK = b"penstock.quarantine"
# Column, its type, and what it has (docs/formats.md). None is called ``step``: a repaired row is applied in the run
# that reads it, and is never stale.
COLUMNS = (
    ("source", pa.utf8(), "as in error messages"),
    ("batch", pa.int64(), "record batch in the source, from 0; null for a source without record batches (Parquet)"),
    ("row_index", pa.int64(), "row in that batch (for Parquet, in the file), from 0"),
    ("table", pa.utf8(), "as in the source, even if no table has that name; null where it was null"),
    ("id", pa.int64(), "as in the source; null where it was null or does not fit int64"),
    ("id_text", pa.utf8(), "an id that does not fit int64 (of a uint64 column), in decimal; else null"),
    ("origin_step", pa.int64(), "the frame's step; null where the source has no `step`"),
    ("reason", pa.utf8(), f"one of {', '.join(f'`{reason}`' for reason in REASONS if reason)}"),
    (
        "gradient",
        pa.list_(pa.float32()),
        "as in the source: any length, nulls, NaN; float64 values are converted: 1e300 becomes infinite",
    ),
)
SCHEMA = pa.schema([(name, kind) for name, kind, _ in COLUMNS], metadata={MARK: b"1"})
_ROWS_AT_ONCE = 1 << 12  # so that the values of one block fit 32-bit offsets


def is_quarantine(schema: pa.Schema) -> bool:
    """Return whether a schema is that of a quarantine, even if another program has rewritten it."""
    names: list[str] = schema.names
    return {"row_index", "origin_step"} <= set(names) and names.count("reason") == 1


def reasons_of(batch: pa.RecordBatch, source: str) -> dict[str, int]:
    """Count the rows of a quarantine by reason, for any type that another program gave the column."""
    with arrow_errors("corrupt Arrow data", source):
        column = batch.column("reason")
        column.validate(full=True)
        return {str(entry["values"]): entry["counts"] for entry in column.cast(pa.utf8()).value_counts().to_pylist()}


def quarantined(batch: SourceBatch, bad: BadRows) -> list[pa.RecordBatch]:
    """Return the bad rows of a batch, in order."""
    with arrow_errors("bad rows cannot be quarantined", batch.raw.source, batch.raw.index):
        blocks = range(0, len(bad.rows), _ROWS_AT_ONCE)
        return [_block(batch, bad.take(slice(first, first + _ROWS_AT_ONCE))) for first in blocks]


def _block(batch: SourceBatch, bad: BadRows) -> pa.RecordBatch:
    order = np.argsort(bad.numbers, kind="stable")
    parts = [_part(batch, number, bad.take(np.flatnonzero(bad.numbers == number))) for number in np.unique(bad.numbers)]
    return pa.concat_batches(parts).take(pa.array(np.argsort(order)))


def _part(batch: SourceBatch, number: int, bad: BadRows) -> pa.RecordBatch:
    """number : of the RowBatch that all of the rows belong to"""
    decoded, origin, roles = batch.content.row_batches[number], batch.raw, batch.roles
    rows, num_rows, steps = bad.rows, len(bad.rows), batch.content.frame_columns.steps
    source_rows, _ = decoded.origins(rows)
    ids, texts = _ids(decoded, rows)
    columns = [
        pa.repeat(origin.source.encode("utf-8", "backslashreplace").decode(), num_rows),
        pa.array([origin.index] * num_rows, pa.int64()),
        pa.array(source_rows if origin.index is not None else origin.first_row + source_rows, pa.int64()),
        _tables(decoded, rows),
        ids,
        texts,
        pa.nulls(num_rows, pa.int64()) if steps is None else pa.array(steps[source_rows]),
        pa.array(REASONS, pa.utf8()).take(pa.array(bad.codes)),
        _source_gradients(origin.data.column(roles.gradient.name), rows, roles.bfloat16)
        if decoded.examples is None
        else _computed_gradients(decoded.gradients, rows),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _ids(decoded: RowBatch, rows: Int64) -> tuple[pa.Array, pa.Array]:
    """Return the ids as int64; ids that do not fit are null, and also returned as text."""
    raw = decoded.raw_ids[rows]
    missing = np.zeros(len(rows), bool) if decoded.ids_null is None else decoded.ids_null[rows]
    beyond = np.asarray(raw > 2**63 - 1, bool) & ~missing
    texts = pa.array([str(key) if too_large else None for key, too_large in zip(raw, beyond, strict=True)], pa.utf8())
    return pa.array(decoded.ids[rows], pa.int64(), mask=missing | beyond), texts


def _tables(decoded: RowBatch, rows: Int64) -> pa.Array:
    names = pa.array(decoded.tables, pa.utf8())
    codes = np.zeros(len(rows), np.int64) if decoded.codes is None else decoded.codes[rows]
    return names.take(pa.array(codes, mask=codes < 0))


def _computed_gradients(gradients: Lists | SampleGradients, rows: Int64) -> pa.Array:
    """Return a lookup's gradient in an example stream, its sample's times its gain, so that it can be repaired."""
    null = gradients.null
    values = [None if null is not None and null[row] else gradients.of_row(row) for row in rows.tolist()]
    return pa.array(values, pa.list_(pa.float32()))


def _source_gradients(column: pa.Array, rows: Int64, bfloat16: bool) -> pa.Array:
    """Convert to float32, of any length, with nulls."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    selected = column.take(pa.array(rows))
    if not bfloat16:
        return selected.cast(pa.list_(pa.float32()))
    lists = selected.cast(pa.list_(pa.uint16()))
    holes = lists.values.is_null().to_numpy(zero_copy_only=False)
    values = (lists.values.fill_null(0).to_numpy().astype(np.uint32) << np.uint32(16)).view(np.float32)
    return pa.ListArray.from_arrays(lists.offsets, pa.array(values, mask=holes), mask=lists.is_null())
