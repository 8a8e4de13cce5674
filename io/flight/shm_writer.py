"""Memory that a producer and a service on one machine share, which avoids the copies of the network.

The service creates it for one stream and sends its location and a key that the memory contains. A client that finds the
key is on the same machine, and runs as the same user, since the kernel denies access to others. The memory has no name
in any folder: it disappears when both sides have closed it, however they ended. ``shm_ring`` is the producer's side.

The producer alone gives the locations of its batches, and the service does not trust them. It copies everything that it
uses as an index or offset (ids, lengths, everything but values), and reads only the copy, which the producer cannot
change. The values of gradients may be borrowed, that is, read in place: no value can harm a reader, even if it changes.
A reader that reads them twice, to check and then to use them, takes a copy first.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import InputError
from penstock.io.flight.messages import Columns, Place
from penstock.io.sources.batch import arrow_errors
from penstock.io.sources.decompression_limits import Messages

# Only Linux has unnamed memory that another process may open.
try:
    import fcntl

    _SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
except (ImportError, AttributeError):
    _SEALS = 0

NAME = "penstock"
# The key is first; batches and values begin at cache lines.
KEY_BYTES, LINE = 32, 64

Bytes = npt.NDArray[np.uint8]


class Given(NamedTuple):
    """A batch from shared memory. copied : if its values are borrowed, returns the batch with private values"""

    data: pa.RecordBatch
    copied: Callable[[], pa.RecordBatch] | None = None


class Memory:
    """The service's side. Raises OSError if the system does not support it."""

    def __init__(self, num_bytes: int) -> None:
        if not _SEALS:
            raise OSError("this system has no memory that processes share without a name")
        self._num_bytes, self._key = num_bytes, secrets.token_bytes(KEY_BYTES)
        self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, num_bytes)
            os.pwrite(self._fd, self._key, 0)
            # A producer can neither extend it, nor truncate it so that a read would fail.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            # Mapped: half a millisecond less than pread for 5 MB (docs/performance.md). Unmapped when no
            # borrowed values are in use.
            self._bytes: Bytes = np.frombuffer(mmap.mmap(self._fd, num_bytes, prot=mmap.PROT_READ), np.uint8)
        except BaseException:
            os.close(self._fd)
            raise

    def offer(self) -> dict[str, Any]:
        """Return the offer for the producer."""
        return {"pid": os.getpid(), "fd": self._fd, "bytes": self._num_bytes, "key": self._key.hex()}

    def batch(self, place: Place | Columns, schema: pa.Schema, name: str, lend: bool = False) -> Given:
        """Return the batch at a location. Raises InputError. name : of the stream; lend : whether to borrow values"""
        if isinstance(place, Place):
            return Given(self._stream(place, schema, name))
        batch = self._columns(place, schema, name, lend)
        return Given(batch, partial(_with_own_values, batch) if lend else None)

    def close(self) -> None:
        del self._bytes
        os.close(self._fd)

    def _stream(self, place: Place, schema: pa.Schema, name: str) -> pa.RecordBatch:
        """Read an Arrow IPC stream of one batch."""
        body = _copy(self._at(place, name))
        with arrow_errors("no batch in the shared memory", name):
            file = pa.BufferReader(body)
            reader = pa.ipc.open_stream(file)
            if not reader.schema.equals(schema):
                raise InputError("a batch in the shared memory has another schema than its stream", source=name)
            Messages(name).check_next(file)
            try:
                return reader.read_next_batch()
            except StopIteration:
                raise InputError("no batch in the shared memory", source=name) from None

    def _columns(self, columns: Columns, schema: pa.Schema, name: str, lend: bool) -> pa.RecordBatch:
        """Build a batch from the values of its columns; those of lists are read in place if they are borrowed."""
        num_rows, arrays = columns.num_rows, []
        if len(columns.places) != len(schema):
            problem = f"{len(columns.places)} columns in the shared memory, where the stream has {len(schema)}"
            raise InputError(problem, source=name)
        for field, place in zip(schema, columns.places, strict=True):
            width = row_bytes(field.type)
            if not width or num_rows < 1 or place.length != width * num_rows:
                problem = f"{place.length} bytes in the shared memory for {num_rows} rows of {field.type}"
                raise InputError(problem, source=name, column=field.name)
            values = self._at(place, name)
            is_lent = lend and pa.types.is_fixed_size_list(field.type)
            arrays.append(_column(field.type, num_rows, pa.py_buffer(values) if is_lent else _copy(values)))
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _at(self, place: Place, name: str) -> Bytes:
        offset, length = place
        if not (KEY_BYTES <= offset <= self._num_bytes and 0 < length <= self._num_bytes - offset) or offset % LINE:
            raise InputError(
                f"{length} bytes at {offset} of the shared memory, which has {self._num_bytes}", source=name
            )
        return self._bytes[offset : offset + length]


def row_bytes(kind: pa.DataType) -> int | None:
    """Return the bytes per row of a column of numbers or of fixed-size lists of float32; None for any other."""
    if pa.types.is_fixed_size_list(kind):
        return 4 * int(kind.list_size) if kind.value_type == pa.float32() else None
    return kind.bit_width // 8 if pa.types.is_integer(kind) or pa.types.is_floating(kind) else None


def _column(kind: pa.DataType, num_rows: int, values: pa.Buffer) -> pa.Array:
    if not pa.types.is_fixed_size_list(kind):
        return pa.Array.from_buffers(kind, num_rows, [None, values])
    flat = pa.Array.from_buffers(pa.float32(), num_rows * kind.list_size, [None, values])
    return pa.Array.from_buffers(kind, num_rows, [None], children=[flat])


def _with_own_values(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return the same batch with its borrowed values copied."""
    columns = [
        _column(each.type, len(each), _copy(each.values.to_numpy().view(np.uint8)))
        if pa.types.is_fixed_size_list(each.type)
        else each
        for each in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _copy(there: Bytes) -> pa.Buffer:
    body = pa.allocate_buffer(len(there))
    # Not through memoryview, which holds the GIL while it copies.
    np.copyto(np.frombuffer(body, np.uint8), there)
    return body
