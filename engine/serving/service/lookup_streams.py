"""Lookups over DoExchange: requests with ids of several tables in, their rows out, on the thread of each call.

A bad request is answered with its error, and the stream continues; columns of other types end it. No lock is held
while a message is read or written, so a slow reader delays no other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.api.engine import Engine
from penstock.api.live_reads import LiveReads
from penstock.base.errors import ConfigError, InputError, ReadTimeoutError, ServiceError, UsageError, listed
from penstock.io.list_columns import list_column, list_type
from penstock.model.frames import Float32
from penstock.model.version import LookupResult, Version
from penstock.serving.flight.messages import DIMS, MAX_METADATA_BYTES, as_flight, decoded, encoded, schema_of
from penstock.serving.service.connections import Call
from penstock.serving.service.limits import Limits
from penstock.serving.service.sequencer import Sequencer
from penstock.serving.shared.table_reader import Reader

Ids = npt.NDArray[Any]
# How long a consistent request waits if it does not say.
TIMEOUT_MS = 1000
OTHER_TABLES = "the service has other tables now; look the rows up again"
# The columns of requests, as penstock's client sends them.
REQUEST_SCHEMA = pa.schema([("table", pa.dictionary(pa.int32(), pa.utf8())), ("ids", pa.int64())])


def request_schema(dims: Mapping[str, int]) -> pa.Schema:
    """Return the schema of requests, with the tables in its metadata. dims : by table"""
    return REQUEST_SCHEMA.with_metadata({DIMS: encoded(dims)})


class EngineRows:
    """The rows of an engine: of tables on the host without a lock, else between two steps, under the gate's lock.

    The first lookup decides which: without any, steps need not count the pages that they write.
    """

    def __init__(self, engine: Engine, sequencer: Sequencer) -> None:
        self._engine, self._sequencer = engine, sequencer
        self.dims = {name: spec.dim for name, spec in engine.core.tables.specs.items()}

    @cached_property
    def _reads(self) -> LiveReads | None:
        try:
            return self._engine.reads
        except (ConfigError, UsageError):  # not all tables are on the host
            return None

    @property
    def is_ending(self) -> bool:
        return self._sequencer.is_closing

    def look_up(self, ids: Mapping[str, Ids], consistent: bool, timeout_ms: int) -> LookupResult:
        """Return the rows, in the order of ``ids``. Several threads call it.

        consistent : whether all rows must be of one step; timeout_ms : how long to wait for it
        Raises UsageError for an id outside its table.
        """
        if self._reads is None:
            rows = self._engine.lookup(ids)
        else:
            rows = self._reads.lookup(ids, consistent=consistent, timeout_ms=timeout_ms)
        streams = self._sequencer.streams
        rows.durable_step = streams.durable_step if streams.is_durable else None
        return rows


class ReplicaRows:
    """The rows of shared files. is_ending : whether lookups end now"""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.is_ending = False

    @property
    def dims(self) -> Mapping[str, int]:
        return {layout.name: layout.dim for layout in self.reader.layouts}

    def look_up(self, ids: Mapping[str, Ids], consistent: bool, timeout_ms: int) -> LookupResult:
        return self.reader.lookup(ids, consistent=consistent, timeout_ms=timeout_ms)


class Lookup(NamedTuple):
    """One request. ids : by table

    indices : of these ids, table after table, in the request; None: they are in order
    """

    ids: Mapping[str, Ids]
    indices: npt.NDArray[np.intp] | None


class LookupCounts:
    """Counts the answered requests of all streams, and their rows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_lookups = self._num_rows = 0

    def add(self, num_rows: int) -> None:
        with self._lock:
            self._num_lookups += 1
            self._num_rows += num_rows

    def as_dict(self) -> dict[str, int]:
        with self._lock:
            return {"lookups": self._num_lookups, "looked_up_rows": self._num_rows}


class LookupAnswers:
    """Answers the lookups of one stream. counts : of all streams"""

    def __init__(self, rows: EngineRows | ReplicaRows, limits: Limits, counts: LookupCounts) -> None:
        self._rows, self._limits, self._counts, self._dims = rows, limits, counts, rows.dims
        self._row = list_type(self._dims.values())
        self._schema = pa.schema([("row", self._row)], {DIMS: encoded(self._dims)})
        self._columns: tuple[str, ...] = ()  # of the requests

    def answer_all(self, reader: Any, writer: Any, call: Call) -> None:
        """Answer all requests of a call.

        Raises InputError if the columns are others, ServiceError if the service ends.
        """
        self._columns = checked_columns(schema_of(reader, "lookups"), self._dims)
        writer.begin(self._schema)
        for chunk in _chunks(reader, call):
            if self._rows.is_ending:
                raise ServiceError("the service is ending; look the rows up again later")
            if self._rows.dims != self._dims:
                raise ServiceError(OTHER_TABLES)
            if chunk.data is not None:
                writer.write_with_metadata(*self._answer(chunk))

    def _answer(self, chunk: Any) -> tuple[pa.RecordBatch, bytes]:
        try:
            options = _options(chunk.app_metadata)
            lookup = self._parsed(chunk.data)
            size = 4 * sum(len(ids) * self._dims.get(table, 0) for table, ids in lookup.ids.items())
            if size > self._limits.message_bytes:
                most = f"this service sends {self._limits.message_bytes:,} at most in one answer (--max-message)"
                raise InputError(f"rows of {size:,} bytes; {most}: send fewer ids")
            rows = self._rows.look_up(lookup.ids, *options)
        except (InputError, UsageError, ReadTimeoutError) as error:
            kind = "ReadTimeoutError" if isinstance(error, ReadTimeoutError) else "InputError"
            problem = {"kind": kind, "message": str(as_flight(error))}
            return pa.RecordBatch.from_pylist([], self._schema), encoded({"error": problem})
        if any(matrix.shape[1] != self._dims[name] for name, matrix in rows.items()):  # they have changed meanwhile
            raise ServiceError(OTHER_TABLES)
        self._counts.add(chunk.data.num_rows)
        column = self._column(list(rows.values()))
        if lookup.indices is not None:
            column = column.take(pa.array(np.argsort(lookup.indices)))
        return pa.RecordBatch.from_arrays([column], schema=self._schema), _metadata(rows.version, rows.durable_step)

    def _parsed(self, batch: pa.RecordBatch) -> Lookup:
        """Return a request. Raises InputError."""
        size, most = batch.get_total_buffer_size(), self._limits.message_bytes
        if size > most:
            raise InputError(f"a request of {size:,} bytes; this service takes {most:,} at most (--max-message)")
        if batch.num_rows > self._limits.rows_asked:
            raise InputError(f"{batch.num_rows:,} ids in one request; send {self._limits.rows_asked:,} at most")
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise InputError(f"the request is damaged: {error}") from None
        columns = {name: batch.column(name) for name in self._columns}
        for name, column in columns.items():
            if column.null_count:
                row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
                raise InputError("expected a value, got null", row=row, column=name)
        ids = columns["ids"].to_numpy()
        if "table" not in columns:
            return Lookup(dict.fromkeys(self._dims, ids), None)
        return _by_table(columns["table"], ids)

    def _column(self, rows: list[Float32]) -> pa.Array:
        """Return the rows of several tables as one column."""
        if len(rows) == 1:
            return list_column(rows[0], self._row)
        flat = np.concatenate([np.zeros(0, np.float32), *(matrix.reshape(-1) for matrix in rows)])
        dims = np.repeat([matrix.shape[1] for matrix in rows], [len(matrix) for matrix in rows])
        return list_column(flat, self._row, dims)


def checked_columns(schema: pa.Schema, tables: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns of requests among those of a stream. Raises InputError if one lacks, or is of another type."""
    names = schema.names
    needed = ("table", "ids") if len(tables) != 1 else ("ids",)
    for name in needed:
        if names.count(name) != 1:
            raise InputError(f"lookups: expected the columns table and ids, got {listed(names) or 'none'}")
    if names.count("table") > 1:
        raise InputError(f"lookups: expected one column table, got {listed(names)}")
    kind = schema.field("ids").type
    if kind not in (pa.int64(), pa.uint64()):
        raise InputError(f"expected int64 or uint64, got {kind}", column="ids")
    if "table" in names:
        kind = schema.field("table").type
        text = kind.value_type if pa.types.is_dictionary(kind) else kind
        if text not in (pa.utf8(), pa.large_utf8(), pa.string_view()):
            raise InputError(f"expected utf8, or a dictionary of utf8, got {kind}", column="table")
    return tuple(name for name in ("table", "ids") if name in names)


def _chunks(reader: Any, call: Call) -> Iterator[Any]:
    while True:
        call.idle_since_s = time.monotonic()
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            return
        finally:
            call.idle_since_s = None
        yield chunk


@lru_cache(maxsize=8)
def _metadata(version: Version, durable_step: int | None) -> bytes:
    """Return the metadata of an answer: between two steps, that of all answers is the same."""
    return encoded({"version": str(version), "durable_step": durable_step})


def _options(metadata: Any) -> tuple[bool, int]:
    """Parse the metadata of a request: whether it is consistent, and its time limit in ms. Raises UsageError."""
    if metadata is None or not len(metadata):
        return False, TIMEOUT_MS
    if len(metadata) > MAX_METADATA_BYTES:
        raise UsageError(f"the request's metadata: {len(metadata):,} bytes; expected {MAX_METADATA_BYTES:,} at most")
    return _parsed_options(metadata.to_pybytes())


@lru_cache(maxsize=8)
def _parsed_options(metadata: bytes) -> tuple[bool, int]:
    """Parse options: those of most requests are the same."""
    options = decoded(metadata, "the request's metadata")
    consistent, timeout_ms = options.get("consistent", False), options.get("timeout_ms", TIMEOUT_MS)
    if type(consistent) is not bool:
        raise UsageError(f"consistent: expected true or false, got {str(consistent)[:50]!r}")
    if type(timeout_ms) is not int or not 0 <= timeout_ms < 2**31:
        raise UsageError(f"timeout_ms: expected a whole number from 0 to {2**31 - 1}, got {str(timeout_ms)[:50]!r}")
    return consistent, timeout_ms


def _by_table(names: pa.Array, ids: Ids) -> Lookup:
    """Return the ids by table, of the column with their tables."""
    column = names if isinstance(names, pa.DictionaryArray) else names.dictionary_encode()
    if len(column.dictionary) == 1 and len(ids):
        return Lookup({column.dictionary[0].as_py(): ids}, None)
    used, codes = np.unique(column.indices.to_numpy(), return_inverse=True)
    tables = [column.dictionary[number].as_py() for number in used.tolist()]
    distinct = list(dict.fromkeys(tables))
    if len(distinct) < len(tables):  # the dictionary repeats a name
        numbers = {table: number for number, table in enumerate(distinct)}
        codes = np.array([numbers[table] for table in tables])[codes]
    indices = None
    if (np.diff(codes) < 0).any():
        indices = np.argsort(codes, kind="stable")
        ids, codes = ids[indices], codes[indices]
    ends = np.searchsorted(codes, np.arange(len(distinct) + 1)).tolist()
    return Lookup(
        {table: ids[begin:end] for table, (begin, end) in zip(distinct, pairwise(ends), strict=True)}, indices
    )
