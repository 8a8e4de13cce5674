"""Convert a producer's frames, record batches and tables of any library: check them and split them into messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.base.errors import InputError, UsageTypeError
from penstock.io.sources.batch import arrow_errors, data_bytes
from penstock.io.sources.schema_changes import conformed, difference


class ArrowStream(Protocol):
    """Record batches and tables of pyarrow, frames of polars, and other libraries' tables."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


Frame: TypeAlias = ArrowStream | Sequence[ArrowStream]

# The size of one message: the service reads one while the producer writes the next.
MESSAGE_BYTES = 2 << 20

_EXPECTED = "expected a frame: a record batch or table with rows, or a list of them"
_COMPARABLE = "cast it to integers or strings first"
# A frame is a run of rows that have one value of each.
_KEYS = ("step", "contributor")


def frames_of(frames: Iterable[Frame] | ArrowStream) -> Iterable[Frame]:
    """Yield frames; split a single table where its step or contributor changes, as a source is.

    Raises UsageTypeError for anything but frames or a table.
    """
    if hasattr(frames, "__arrow_c_stream__") and not isinstance(frames, pa.RecordBatchReader):
        return _frames_in(_table(frames))
    if isinstance(frames, Iterable):
        return frames
    hint = "; collect() it first" if hasattr(frames, "collect") else ""
    raise UsageTypeError(
        f"frames: expected an iterable of record batches or tables, or one table, got {type(frames).__name__}{hint}"
    )


def _frames_in(table: pa.Table) -> Iterator[pa.Table]:
    if not table.num_rows:
        return
    begins = np.zeros(table.num_rows, np.bool_)
    begins[0] = True
    for column in _keys(table.schema):
        with arrow_errors(_COMPARABLE, "<table>", column=column):
            codes = _codes(table.column(column))
        begins[1:] |= codes[1:] != codes[:-1]
    starts = np.flatnonzero(begins).tolist()
    for start, stop in zip(starts, [*starts[1:], table.num_rows], strict=True):
        yield table.slice(start, stop - start)


def _codes(values: pa.ChunkedArray) -> Any:
    """Return integers that are equal where the values are."""
    coded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    indices = [chunk.indices.cast(pa.int64()).fill_null(-1) for chunk in coded.unify_dictionaries().chunks]
    return pa.chunked_array(indices).to_numpy()


def batches_of(frame: Frame, is_empty: bool = False) -> list[pa.RecordBatch]:
    """Return the record batches of one frame, which has rows or not. Raises InputError if it is not one."""
    parts = [frame] if hasattr(frame, "__arrow_c_stream__") or not isinstance(frame, Iterable) else list(frame)
    batches = [batch for part in parts for batch in _batches(part)]
    if not batches or any(batch.num_rows for batch in batches) is is_empty:
        raise InputError("expected a frame without rows, whose step is given" if is_empty else _EXPECTED)
    _check_one_frame(batches)
    return batches


def _batches(part: Any) -> list[pa.RecordBatch]:
    return [part] if isinstance(part, pa.RecordBatch) else list(_table(part).to_batches())


def _table(source: Any) -> pa.Table:
    if isinstance(source, pa.Table):
        return source
    if not hasattr(source, "__arrow_c_stream__"):
        raise InputError(f"{_EXPECTED}, got {type(source).__name__}")
    with arrow_errors(_EXPECTED, f"<{type(source).__name__}>"):
        return pa.RecordBatchReader.from_stream(source).read_all()


def _check_one_frame(batches: Sequence[pa.RecordBatch]) -> None:
    """Refuse a change of step or contributor: the service would split the frame there, and count more frames."""
    for column in _keys(batches[0].schema):
        seen = pa.chunked_array([batch.column(column) for batch in batches])
        with arrow_errors(_COMPARABLE, "<frame>", column=column):
            is_one_frame = len(pc.unique(seen)) <= 1
        if not is_one_frame:
            raise InputError("expected one frame: all its rows have one value", column=column)


def _keys(schema: pa.Schema) -> list[str]:
    """Return the columns that delimit frames. Raises InputError if two have one name."""
    for column in _KEYS:
        if (number := schema.names.count(column)) > 1:
            raise InputError(f"{number} columns have this name; keep one", column=column)
    return [column for column in _KEYS if column in schema.names]


def with_schema(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> list[pa.RecordBatch]:
    """Return batches with the columns of earlier frames. Raises InputError if that would lose something."""
    fitting = []
    for batch in batches:
        if (converted := conformed(batch, schema)) is None:
            raise InputError(f"{difference(batch, schema)}; or take another producer")
        fitting.append(converted)
    return fitting


def copied(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch in other memory: a program may write to the arrays of a frame that it has sent."""
    return pa.concat_batches([batch, batch.slice(0, 0)])  # of one batch alone it is no copy


def split_batch(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split batches into slices of one message each."""
    rows = max(1, batch.num_rows * MESSAGE_BYTES // max(1, data_bytes(batch)))
    for first in range(0, batch.num_rows, rows):
        yield batch.slice(first, rows)
