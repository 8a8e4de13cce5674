"""What a client receives from a service: its status, deltas and tables, and how they are read from their streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.flight as flight

import penstock.base.interrupts as interrupts
from penstock.base.errors import ServiceError, UsageError, short
from penstock.base.html_tables import html_table
from penstock.io.list_columns import row_values
from penstock.model.frames import Array
from penstock.model.row_encodings import FLOAT32, ROWS_KEY, RowEncoding
from penstock.model.version import Version
from penstock.serving.flight.messages import VERSION, decoded

# What a notebook shows of a delta: its first rows, without the columns that every row repeats.
SHOWN_ROWS, REPEATED = 5, ("step", "parent", "checksum", "rows_left")


class Status(dict[str, Any]):
    """What a service reports of itself, as plain data (docs/serve.md).

    Attributes
    ----------
    version : Version
        Of its tables.
    frame_times : dict of str to int
        "row", "delta" and "commit" → the largest time of the frames in the rows that are looked up, in published
        deltas and in the last commit, in seconds. Those that are unknown are missing.
    """

    @property
    def version(self) -> Version:
        return Version(self["version"])

    @property
    def frame_times(self) -> dict[str, int]:
        times = self.get("frame_times")
        return {name: each for name, each in times.items() if type(each) is int} if isinstance(times, dict) else {}


class Delta(NamedTuple):
    """One delta of all tables (docs/deltas.md).

    Attributes
    ----------
    since : int
        The step of the previous delta.
    version : Version
        Of the tables with this one.
    batches : tuple of pyarrow.RecordBatch
        The changed rows.
    """

    since: int
    version: Version
    batches: tuple[pa.RecordBatch, ...]

    def _repr_html_(self) -> str:
        """Return two tables for notebooks: the changed rows of each table as a count, and the first of them."""
        counts: Counter[str] = Counter()
        for batch in self.batches:
            counts.update({pair["values"]: pair["counts"] for pair in batch["table"].value_counts().to_pylist()})
        rows = (row for batch in self.batches for row in batch.slice(0, SHOWN_ROWS).to_pylist())
        names = [name for name in self.batches[0].schema.names if name not in REPEATED] if self.batches else []
        first = [[str(row[name]) if name == "id" else row[name] for name in names] for row in islice(rows, SHOWN_ROWS)]
        head = ("Delta: version", "since step", "changed rows")
        return html_table(head, [(self.version, self.since, counts)]) + html_table(names, first)


class TableAt(NamedTuple):
    """A table at one step.

    Attributes
    ----------
    rows : numpy.ndarray
        float32, shape (vocabulary_size, dim); of a dynamic table (n, dim). Encoded rows: uint8, shape (…, bytes).
    version : Version
        Of the rows, for ``Client.deltas``.
    keys : numpy.ndarray or None
        Of a dynamic table, the keys of the rows, ascending: int64 or uint64, shape (n,). Expired keys are among them
        until their sweep.
    last : numpy.ndarray or None
        int64, shape (n,), the clock when each key occurred last, if the service runs with ``--delta-last``.
    clock : int or None
        Of a dynamic table.
    """

    rows: Array
    version: Version
    keys: npt.NDArray[Any] | None = None
    last: npt.NDArray[np.int64] | None = None
    clock: int | None = None


def deltas_of(reader: flight.FlightStreamReader) -> Iterator[Delta]:
    """Yield the deltas of a stream, which ends with the generator."""
    try:
        version = Version(reader.schema.metadata[VERSION].decode())
        batches: list[pa.RecordBatch] = []
        for chunk in reader:
            batches.append(chunk.data)
            if not chunk.data.column("rows_left")[-1].as_py():
                since, step = (chunk.data.column(name)[0].as_py() for name in ("parent", "step"))
                yield Delta(since, version.at(step), tuple(batches))
                batches = []
    finally:
        reader.cancel()


def table_of(reader: flight.FlightStreamReader, place: str) -> TableAt:
    """Return the table of a stream. Raises ServiceError, which names ``place``, if it ends before.

    A table with all ids below its vocabulary_size has first each row, then those that changed.
    """
    is_dynamic = b"penstock.key_type" in (reader.schema.metadata or {})
    batches: list[pa.RecordBatch] = []
    rows: Array | None = None  # of a table of all ids, once it has each
    for chunk in reader:
        interrupts.check()
        metadata = decoded(chunk.app_metadata, "a table's metadata")
        is_end = "version" in metadata
        if not is_dynamic and rows is None and (is_end or metadata["changed"]):
            rows = np.concatenate([_matrix(batch["row"]) for batch in batches])
            batches.clear()
        if is_end and rows is None:
            return _keyed(pa.Table.from_batches(batches, reader.schema), metadata)
        if is_end and rows is not None:
            return TableAt(rows, Version(metadata["version"]))
        if rows is not None:
            rows[chunk.data["id"].to_numpy()] = _matrix(chunk.data["row"])
            continue
        if metadata.get("full_copy"):
            batches.clear()
        batches.append(chunk.data)
    raise ServiceError(f"{place} ended before its last row")


def _keyed(table: pa.Table, end: Mapping[str, Any]) -> TableAt:
    """Return a dynamic table: of each key the last row counts, and a null one removes it."""
    keys, rows = table["id"].to_numpy(), table["row"]
    keys, from_end = np.unique(keys[::-1], return_index=True)
    newest = table.num_rows - 1 - from_end
    present = np.asarray(rows.is_valid())[newest]
    present_rows = pa.array(newest[present])
    matrix = _matrix(rows.take(present_rows).combine_chunks())
    last = table["last"].take(present_rows).to_numpy() if "last" in table.schema.names else None
    return TableAt(matrix, Version(end["version"]), keys[present], last, end["clock"])


def _matrix(rows: pa.Array) -> Array:
    """Return a column of rows as float32 (n, dim), of encoded ones as uint8 (n, bytes)."""
    is_bytes = pa.types.is_fixed_size_binary(rows.type)
    return row_values(rows, rows.type.byte_width if is_bytes else rows.type.list_size)


def check_encoding(schema: pa.Schema, rows: RowEncoding, place: str) -> None:
    """Raise UsageError if a service has sent rows in another encoding than it was asked for."""
    sent = (schema.metadata or {}).get(ROWS_KEY, FLOAT32.name.encode()).decode(errors="replace")
    if sent != rows.name:
        raise UsageError(f"{place}: expected rows of {rows.name}, got {short(sent)}; the service runs another version")
