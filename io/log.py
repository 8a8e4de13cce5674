"""Write penstock's log: an Arrow IPC stream with checksums of every byte before the end marker.

``sources.checksums`` describes the checksums. ``sources.ipc_stream`` reads logs like any other stream.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from penstock.base.errors import UsageError, UsageTypeError
from penstock.base.filesystem import atomic_files
from penstock.io.arrow_output import ArrowOutput
from penstock.io.sources.checksums import (
    BATCH_KEY,
    CLOSED_KEY,
    CRC_KEY,
    LOG_KEY,
    PREFIX,
    VERSION,
    crc_of,
    digits_of,
    find_digits,
)
from penstock.io.sources.schema_changes import conformed, difference


class LogWriter:
    """Writes a log batch by batch; a context manager. Without ``close``, or after an error, the log is incomplete.

    Parameters
    ----------
    target : str, path or binary file
        A path, whose file appears under its name only when the log is complete and durable, or an open binary file,
        which stays open; without ``close``, readers report the log as truncated.
    schema : pyarrow.Schema
        Of every batch.
    after : mapping of str to int, or None
        The ``state`` of a log that was not closed, whose bytes ``target`` contains, to continue it.

    Raises
    ------
    OSError
        If the target cannot be written; after an error the writer writes nothing more.

    Examples
    --------
    >>> import pyarrow as pa
    >>> import penstock as ps
    >>> from penstock.io.log import LogWriter
    >>> batch = pa.record_batch({"id": [5, 3], "gradient": [[1.0, 2.0], [2.0, 2.0]]})
    >>> with LogWriter("monday.arrows", batch.schema) as log:
    ...     log.write(batch)
    >>> table = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.25), name="user")
    >>> report = ps.Engine(ps.EmbeddingConfig.from_tables([table])).run("monday.arrows")
    >>> report.rows, report.verified
    (2, True)
    """

    def __init__(
        self, target: str | os.PathLike[str] | Any, schema: pa.Schema, after: Mapping[str, int] | None = None
    ) -> None:
        self.schema = schema_of_log(schema)
        self._open = True
        state = after or {"batches": 0, "bytes": 0, "crc": 0}
        self.num_batches, self._num_bytes, self._crc = state["batches"], state["bytes"], state["crc"]
        self._in_file = len(self.schema.serialize()) if self._num_bytes else 0  # of Arrow's next output
        # A placeholder for the digits until they are known; no content of a batch can be mistaken for it.
        self._token = os.urandom(4).hex().encode()
        self._pending = ArrowOutput()
        self._empty = [column.combine_chunks() for column in self.schema.empty_table().columns]
        self._writer = pa.ipc.new_stream(self._pending, self.schema)
        self._new_file = atomic_files.File(Path(target)) if isinstance(target, str | os.PathLike) else None
        self._file: Any = self._new_file or target

    @property
    def state(self) -> dict[str, int]:
        """Return how far the log has come, as plain numbers."""
        return {"batches": self.num_batches, "bytes": self._num_bytes, "crc": self._crc}

    def write(self, batch: pa.RecordBatch) -> None:
        """Write one batch with its checksum.

        Parameters
        ----------
        batch : pyarrow.RecordBatch
            Of the log's schema; the columns may be in another order.

        Raises
        ------
        UsageError
            If the batch has another schema, or the log is closed.
        OSError
            If the target cannot be written.
        """
        if not self._open:
            raise UsageError("the log is closed")
        if not isinstance(batch, pa.RecordBatch):
            self._give_up()
            raise UsageTypeError(f"expected a pyarrow.RecordBatch, got {type(batch).__name__}")
        fitting = conformed(batch, self.schema)
        if fitting is None:
            self._give_up()
            problem = difference(batch, self.schema)
            raise UsageError(f"batch {self.num_batches} of the log has another schema than the log: {problem}")
        self._write(fitting, {})
        self.num_batches += 1
        # An empty column with another dictionary would write that dictionary too.
        for index, column in enumerate(fitting.columns):
            if pa.types.is_dictionary(column.type):
                self._empty[index] = column.slice(0, 0)

    def close(self) -> None:
        """Write the closing record and the end marker; for a path, sync the file and give it its name.

        Raises
        ------
        OSError
            If the target cannot be written.
        """
        if not self._open:
            return
        last = pa.RecordBatch.from_arrays(self._empty, schema=self.schema)
        self._write(last, {CLOSED_KEY: str(self.num_batches)})
        try:
            self._writer.close()
            for piece in self._pending.take():
                _write_all(self._file, piece)
            self._file.flush()
            if self._new_file is not None:
                self._new_file.finish()
        except BaseException:
            self._give_up()
            raise
        self._open = False

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._give_up()

    def _write(self, batch: pa.RecordBatch, extra: dict[bytes, str]) -> None:
        try:
            metadata = {BATCH_KEY: str(self.num_batches), CRC_KEY: PREFIX + self._token, **extra}
            self._writer.write_batch(batch, custom_metadata=metadata)
            pieces = _without(self._in_file, self._pending.take())
            self._in_file = 0
            number, offset = find_digits(pieces, self._token)
            self._crc = crc_of(pieces, number, offset, self._crc)
            digits = digits_of(self._crc)
            whole = bytearray(pieces[number])
            whole[offset : offset + len(digits)] = digits
            pieces[number] = whole
            if find_digits(pieces, digits) != (number, offset):  # once in 2^32, if a dictionary is full of checksums
                raise UsageError(f"batch {self.num_batches} of the log contains the digits of its checksum")
            for piece in pieces:
                _write_all(self._file, piece)
                self._num_bytes += len(piece)
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        if self._open and self._new_file is not None:
            self._new_file.give_up()
        self._open = False


def schema_of_log(schema: pa.Schema) -> pa.Schema:
    """Return the schema of a log of such batches, with the mark of a log."""
    return schema.with_metadata({**(schema.metadata or {}), LOG_KEY: VERSION})


def _without(num_bytes: int, pieces: list[Any]) -> list[Any]:
    """Return all pieces without the first bytes."""
    while num_bytes:
        first = memoryview(pieces[0])
        pieces[:1] = [first[num_bytes:]] if len(first) > num_bytes else []
        num_bytes -= min(num_bytes, len(first))
    return pieces


def _write_all(file: Any, data: Any) -> None:
    """Write all bytes: an unbuffered file may write fewer than given."""
    rest = memoryview(data)
    while len(rest):
        done = file.write(rest)
        rest = rest[len(rest) if done is None else done :]
