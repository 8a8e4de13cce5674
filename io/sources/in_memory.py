"""Convert objects to parts: readers, Arrow C stream producers, datasets and queries, iterables of batches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from penstock.base.errors import InputError, PenstockError
from penstock.io.sources.batch import Batch, Batches, Part, arrow_errors, end_of_frame, input_error
from penstock.io.sources.schema_changes import conformed, difference

_FAILED = "the stream failed"


def reader_of_capsule(source: Any, name: str) -> pa.RecordBatchReader:
    """Return a reader over any object with ``__arrow_c_stream__``."""
    try:
        return pa.RecordBatchReader.from_stream(source)
    except Exception as error:  # of any library, which runs a query here
        raise input_error(error, "no stream of record batches", name) from error


def parts_of_reader(reader: pa.RecordBatchReader, name: str) -> Generator[Part, None, None]:
    """Yield one part, or none for columns of nulls without rows: what pandas makes of lists of which none is left."""
    if any(pa.types.is_null(kind) for kind in reader.schema.types):
        with arrow_errors(_FAILED, name):
            first = next((batch for batch in reader if batch.num_rows), None)
        if first is None:
            return
        reader = pa.RecordBatchReader.from_batches(reader.schema, chain([first], reader))
    yield stream_part(reader, name, has_boundaries=False)


def stream_part(reader: pa.RecordBatchReader, name: str, has_boundaries: bool) -> Part:
    """Return the remaining batches of a reader as a part."""
    has_metadata = isinstance(reader, pa.ipc.RecordBatchStreamReader)  # the only kind of reader with custom metadata

    def next_batch() -> Any:
        return reader.read_next_batch_with_custom_metadata() if has_metadata else (reader.read_next_batch(), None)

    def batches(columns: list[str]) -> Batches:
        first_row = index = 0
        while True:
            try:
                with arrow_errors(_FAILED, name, index):
                    batch, metadata = next_batch()
            except StopIteration:
                return
            yield Batch(name, batch, index, first_row, *end_of_frame(metadata, name, index))
            index, first_row = index + 1, first_row + batch.num_rows

    with arrow_errors(_FAILED, name):
        return Part(name, reader.schema, has_boundaries, batches, container="Arrow stream")


def scan_of(source: Any) -> Callable[[str], Part] | None:
    """Return the function that converts a dataset, a scanner or a lazy frame, with its name, to a part, else None.

    Only the needed columns of datasets and lazy frames are read.
    """
    # Slow to load; the owner of a dataset has loaded it. While another thread loads it, it may lack the classes.
    module = sys.modules.get("pyarrow.dataset")
    scanner: Any = getattr(module, "Scanner", ())
    dataset: Any = getattr(module, "Dataset", ())
    if isinstance(source, scanner):
        return lambda name: scanned_part(name, source.projected_schema, lambda columns: source.to_reader())
    if isinstance(source, dataset):
        return lambda name: scanned_part(name, source.schema, lambda columns: source.scanner(columns).to_reader())
    if all(callable(getattr(source, method, None)) for method in ("collect", "collect_schema", "head", "select")):
        return lambda name: _lazy_frame_part(source, name)
    return None


def _lazy_frame_part(source: Any, name: str) -> Part:
    """Convert a query that becomes Arrow data when collected, such as ``polars.LazyFrame``."""
    with _query_errors(name):
        nothing = source.head(0)
        # In pieces as it is evaluated, if these are Arrow data (polars 2).
        in_pieces = hasattr(nothing, "collect_batches") and hasattr(nothing.collect_batches(), "__arrow_c_stream__")
        schema = pa.RecordBatchReader.from_stream(_collected(nothing, in_pieces)).schema
    return scanned_part(name, schema, lambda columns: _collected(source.select(columns), in_pieces))


def _collected(query: Any, in_pieces: bool) -> Any:
    result = query.collect_batches() if in_pieces else query.collect()
    if not hasattr(result, "__arrow_c_stream__"):
        raise TypeError(f"collect() gave {type(result).__name__}, which has no __arrow_c_stream__")
    return result


def scanned_part(name: str, schema: pa.Schema, scan: Callable[[list[str]], Any]) -> Part:
    """scan : columns → object with ``__arrow_c_stream__``; the scan chooses its batches, so they delimit no frames"""

    def batches(columns: list[str]) -> Batches:
        with _query_errors(name):
            reader = pa.RecordBatchReader.from_stream(scan(columns))
        yield from stream_part(reader, name, has_boundaries=False).batches(columns)

    return Part(name, schema, False, batches, container="query")


@contextmanager
def _query_errors(name: str) -> Iterator[None]:
    """Convert the errors of libraries to InputError, with their first paragraph."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        raise InputError(f"the query failed: {str(error).strip().split(chr(10) * 2)[0]}", source=name) from error


def parts_of_batches(batches: Iterable[Any], name: str) -> Generator[Part, None, None]:
    """Yield one part, or none if there is no batch and hence no schema."""
    incoming = iter(batches)
    first = next(incoming, None)
    if first is None:
        return
    _check_batch(first, name, 0)
    schema = first.schema

    def read(columns: list[str]) -> Batches:
        yield Batch(name, first, 0, 0)
        first_row = first.num_rows
        for index, batch in enumerate(incoming, 1):
            _check_batch(batch, name, index)
            fitting = conformed(batch, schema, columns)
            if fitting is None:
                raise InputError(difference(batch, schema), source=name, batch=index)
            yield Batch(name, fitting, index, first_row)
            first_row += fitting.num_rows

    yield Part(name, schema, True, read, container="record batches")


def _check_batch(batch: Any, name: str, index: int) -> None:
    if not isinstance(batch, pa.RecordBatch):
        raise InputError(f"expected a pyarrow.RecordBatch, got {type(batch).__name__}", source=name, batch=index)
