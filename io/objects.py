"""Objects in memory → parts: readers, producers of the Arrow C stream interface, iterables of record batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from penstock.errors import InputError
from penstock.io.parts import Batch, Batches, Part, arrow_errors, ends_frame

_FAILED = "the stream failed"


def reader_of_capsule(source: Any, name: str) -> pa.RecordBatchReader:
    """A reader over anything with ``__arrow_c_stream__``."""
    with arrow_errors("no stream of record batches", name):
        return pa.RecordBatchReader.from_stream(source)


def stream_part(reader: pa.RecordBatchReader, name: str, has_boundaries: bool) -> Part:
    """What is left of a reader."""
    next_batch = _next_of(reader)

    def batches(columns: list[str]) -> Batches:
        first_row = index = 0
        while True:
            try:
                with arrow_errors(_FAILED, name, index):
                    batch, metadata = next_batch()
            except StopIteration:
                return
            yield Batch(batch, index, first_row, ends_frame(metadata))
            index, first_row = index + 1, first_row + batch.num_rows

    with arrow_errors(_FAILED, name):
        return Part(name, reader.schema, has_boundaries, batches, container="Arrow stream")


def _next_of(reader: pa.RecordBatchReader) -> Callable[[], tuple[pa.RecordBatch, Any]]:
    if isinstance(reader, pa.ipc.RecordBatchStreamReader):  # the only kind that knows of custom metadata
        return lambda: tuple(reader.read_next_batch_with_custom_metadata())
    return lambda: (reader.read_next_batch(), None)


def parts_of_batches(batches: Iterable[Any], name: str) -> Generator[Part, None, None]:
    """One part, or none where there is no batch to tell the schema."""
    incoming = iter(batches)
    first = next(incoming, None)
    if first is None:
        return
    _check_batch(first, name, 0)

    def read(columns: list[str]) -> Batches:
        yield Batch(first, 0, 0)
        first_row = first.num_rows
        for index, batch in enumerate(incoming, 1):
            _check_batch(batch, name, index)
            if not batch.schema.equals(first.schema):
                changed = f"the schema changed: expected {_one_line(first.schema)}; got {_one_line(batch.schema)}"
                raise InputError(changed, source=name, batch=index)
            yield Batch(batch, index, first_row)
            first_row += batch.num_rows

    yield Part(name, first.schema, True, read, container="record batches")


def _check_batch(batch: Any, name: str, index: int) -> None:
    if not isinstance(batch, pa.RecordBatch):
        raise InputError(f"expected a pyarrow.RecordBatch, got {type(batch).__name__}", source=name, batch=index)


def _one_line(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name}: {f.type}{'' if f.nullable else ' not null'}" for f in schema)
