"""What the service takes at most, so that no caller can take its memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import InputError, ServiceError

# Below this a batch that waits stays a view of its message.
WORTH_COPYING = 1 << 16


@dataclass(frozen=True)
class Limits:
    """calls : at once, of every kind
    connections : at once; beyond it those without a call in progress are closed
    idle_s : how long a connection may stay without a call
    message_bytes : of one record batch
    queued_rows, queued_bytes : of frames that are not whole yet, over all streams
    memory_bytes : that producers on this machine may share with the service, all together
    producers : names that positions are kept for
    delta_bytes : of the last deltas, kept for readers
    rows_asked : ids of one call for rows
    """

    calls: int = 256
    connections: int = 1024
    idle_s: float = 300.0
    message_bytes: int = 64 << 20
    queued_rows: int = 1 << 22
    queued_bytes: int = 1 << 30
    memory_bytes: int = 256 << 20
    producers: int = 10_000
    delta_bytes: int = 256 << 20
    rows_asked: int = 1 << 16


class Budget:
    """What all streams have together: rows, or bytes, that wait in unfinished frames, or the bytes of shared memory."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self.num_taken = 0

    def change(self, by: int) -> bool:
        """Take or give back; False where there is no room, and nothing is taken."""
        with self._lock:
            if by > 0 and self.num_taken + by > self._most:
                return False
            self.num_taken += by
            return True


class Queue:
    """One stream's share of the budgets: the rows of the frame that is not whole yet, and the bytes they keep.

    name : of the stream, for errors
    """

    def __init__(self, limits: Limits, rows: Budget, held: Budget, name: str) -> None:
        self._limits, self._rows, self._held, self._name = limits, rows, held, name
        self._num_batches = 0
        self._last = (0, 0)  # of the last batch, the rows and bytes that may be of a frame that goes on
        self.num_rows = self.num_bytes = 0

    def admit(self, batch: pa.RecordBatch, used: Sequence[str], waits: bool) -> pa.RecordBatch:
        """A batch has come. Returns its columns that are used.

        waits : its rows may be of a frame that goes on. Raises InputError where the batch or its frame is larger than
        any may be, ServiceError where the service is full now.
        """
        # Sizes of the buffers as they came: nbytes would follow offsets that nobody has checked yet.
        size, most = batch.get_total_buffer_size(), self._limits.message_bytes
        if size > most:
            raise self._too_large(f"a batch of {size:,} bytes; this service takes {most:,} at most (--max-message)")
        most = self._limits.queued_rows
        if self.num_rows + batch.num_rows > most:
            raise self._too_large(f"a frame of more than {most:,} rows; this service takes no more (--max-queued-rows)")
        if len(used) < batch.num_columns:
            batch = batch.select(used)
        num_bytes = 0
        if waits:
            batch, num_bytes = _compact(batch)
        most = self._limits.queued_bytes
        if self.num_bytes + num_bytes > most:
            raise self._too_large(f"a frame of more than {most:,} bytes; this service takes no more (--queued-memory)")
        if not self._rows.change(batch.num_rows):
            raise self._full(f"{self._rows.num_taken:,} rows", "--max-queued-rows")
        self.num_rows += batch.num_rows
        if not self._held.change(num_bytes):
            raise self._full(f"{self._held.num_taken:,} bytes", "--queued-memory")
        self.num_bytes += num_bytes
        self._last = (batch.num_rows, num_bytes) if waits else (0, 0)
        self._num_batches += 1
        return batch

    def frame_taken(self) -> None:
        """A frame that the last batch completed is in: at most that batch's rows are of another one."""
        self._keep(*self._last)

    def clear(self) -> None:
        """Nothing waits."""
        self._keep(0, 0)

    def _keep(self, num_rows: int, num_bytes: int) -> None:
        self._rows.change(num_rows - self.num_rows)
        self._held.change(num_bytes - self.num_bytes)
        self.num_rows, self.num_bytes = num_rows, num_bytes

    def _too_large(self, problem: str) -> InputError:
        return InputError(f"{problem}: send smaller ones", source=self._name, batch=self._num_batches)

    def _full(self, waiting: str, flag: str) -> ServiceError:
        return ServiceError(f"{self._name}: {waiting} wait in unfinished frames of all producers ({flag}): try again")


def _compact(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
    """The batch, in memory of its own where it is the smaller part of what it keeps; and how many bytes it keeps.

    A column is a view of its whole message, so that one row keeps also the columns that nobody reads.
    """
    held, used = _held_bytes(batch), batch.get_total_buffer_size()
    if held < WORTH_COPYING or 2 * used > held:
        return batch, held
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:  # the decoder reports it better
        return batch, held
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    copy = sink.getvalue()
    return pa.ipc.open_stream(copy).read_next_batch(), copy.size


def _held_bytes(batch: pa.RecordBatch) -> int:
    """Of the memory that a batch's buffers are views of."""
    found: dict[int, int] = {}
    for buffer in (buffer for column in batch.columns for buffer in column.buffers() if buffer is not None):
        while buffer.parent is not None:
            buffer = buffer.parent
        found[buffer.address] = int(buffer.size)
    # Dictionaries are not among them, and lie in messages of their own.
    return max(sum(found.values()), int(batch.get_total_buffer_size()))
