"""The producer's side of shared memory (see ``shm_writer``): a ring buffer whose space the service releases.

A batch of numbers without nulls is written as its values, column by column; any other one as an Arrow IPC stream.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.io.flight.messages import Columns, Place
from penstock.io.flight.shm_writer import KEY_BYTES, LINE, NAME, Bytes, row_bytes

# Smaller batches go with their message: copies are not their main cost (docs/performance.md).
WORTH_SHARING_BYTES = 1 << 18
# So that the metadata with their locations stays short.
MOST_COLUMNS = 32


class Stream:
    """Any batch, to be written as an Arrow IPC stream with schema and dictionaries."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch
        sink = pa.MockOutputStream()
        self._write(sink)
        self.size = int(sink.size())

    def put(self, memory: Bytes, offset: int) -> Place:
        self._write(pa.FixedSizeBufferWriter(pa.py_buffer(memory[offset : offset + self.size])))
        return Place(offset, self.size)

    def _write(self, sink: pa.NativeFile) -> None:
        with pa.ipc.new_stream(sink, self._batch.schema) as writer:
            writer.write_batch(self._batch)


class Values:
    """A batch whose columns are numbers without nulls: the number of rows, and every column's values."""

    def __init__(self, num_rows: int, columns: list[Bytes]) -> None:
        self._num_rows, self._columns = num_rows, columns
        self.size = sum([_lines(len(values)) for values in columns])

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> Values | None:
        """Return None for any other batch."""
        if batch.num_columns > MOST_COLUMNS:
            return None
        columns = [_values(column) for column in batch.columns]
        whole = [values for values in columns if values is not None]
        return cls(batch.num_rows, whole) if len(whole) == len(columns) else None

    def put(self, memory: Bytes, offset: int) -> Columns:
        places = []
        for values in self._columns:
            np.copyto(memory[offset : offset + len(values)], values)  # without the GIL
            places.append(Place(offset, len(values)))
            offset += _lines(len(values))
        return Columns(self._num_rows, tuple(places))


class Room:
    """The memory of one stream, as its producer writes to it."""

    def __init__(self, memory: mmap.mmap, num_bytes: int) -> None:
        self._bytes: Bytes = np.frombuffer(memory, np.uint8)
        self._end = num_bytes
        self._held: deque[int] = deque()  # offsets of batches that the service has not released, oldest first
        self._next = LINE
        self._num_taken = 0

    @classmethod
    def found(cls, offer: Mapping[str, Any]) -> Room | None:
        """Map the memory that a service offers; None if it is inaccessible or that of another machine."""
        try:
            pid, fd, num_bytes = (int(offer[word]) for word in ("pid", "fd", "bytes"))
            path = f"/proc/{pid}/fd/{fd}"
            # Any other file there is not even opened.
            if not os.readlink(path).startswith(f"/memfd:{NAME} ") or num_bytes <= LINE:
                return None
            with open(path, "r+b", buffering=0) as file:
                memory = mmap.mmap(file.fileno(), num_bytes)
            if not secrets.compare_digest(memory[:KEY_BYTES], bytes.fromhex(offer["key"])):
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return cls(memory, num_bytes)

    def parcel(self, batch: pa.RecordBatch) -> Values | Stream | None:
        """Prepare a batch; None if it does not go through shared memory."""
        if batch.nbytes < WORTH_SHARING_BYTES:
            return None
        parcel = Values.of(batch) or Stream(batch)
        return parcel if parcel.size <= self._end - LINE else None

    def has(self, size: int) -> bool:
        """Return whether so many bytes are free now."""
        return self._begin(size) is not None

    def put(self, parcel: Values | Stream) -> Columns | Place:
        """Write a batch into free space."""
        offset = self._begin(parcel.size)
        assert offset is not None
        place = parcel.put(self._bytes, offset)
        self._held.append(offset)
        self._next = offset + _lines(parcel.size)
        return place

    def taken(self, count: int) -> None:
        """Record the number of batches of this stream that the service has released."""
        while self._held and self._num_taken < count:
            self._held.popleft()
            self._num_taken += 1

    def _begin(self, size: int) -> int | None:
        """Return an offset for so many bytes. The bytes in use form a range that may wrap around the end."""
        if not self._held:
            return LINE
        oldest = self._held[0]
        if self._next <= oldest:
            return self._next if self._next + size <= oldest else None
        if self._next + size <= self._end:
            return self._next
        return LINE if LINE + size <= oldest else None


def _values(column: pa.Array) -> Bytes | None:
    """Return a column's values if it has no other relevant buffer."""
    kind = column.type
    if not row_bytes(kind) or column.null_count:
        return None
    if not pa.types.is_fixed_size_list(kind):
        values: Bytes = column.to_numpy()
        return values.view(np.uint8)
    flat, width = column.values, kind.list_size  # which ignores the slice
    if flat.null_count:
        return None
    first = column.offset * width
    values = flat.to_numpy()[first : first + len(column) * width]
    return values.view(np.uint8)


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE
