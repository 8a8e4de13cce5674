"""Limits of the service, which bound the memory that callers can use."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from penstock.base.errors import InputError, ServiceError

# A queued batch below this size, in bytes, remains a view of its message.
WORTH_COPYING = 1 << 16


@dataclass(frozen=True)
class Limits:
    """Maxima of the service.

    calls : concurrent calls of all kinds
    connections : open connections; above it those without a call in progress are closed
    idle_s : how long a connection may stay without a call
    message_bytes : of one record batch, also of the rows of one lookup
    queued_rows, queued_bytes : of unfinished frames, over all streams
    producers : names whose positions are stored
    delta_bytes : of the deltas retained for readers
    rows_asked : ids in one lookup
    """

    calls: int = 256
    connections: int = 1024
    idle_s: float = 300.0
    message_bytes: int = 64 << 20
    queued_rows: int = 1 << 22
    queued_bytes: int = 1 << 30
    producers: int = 10_000
    delta_bytes: int = 256 << 20
    rows_asked: int = 1 << 16


class Budget:
    """The rows of all streams in unfinished frames, and the bytes that they keep in memory."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._lock = threading.Lock()
        self.num_rows = self.num_bytes = 0

    def change(self, num_rows: int, num_bytes: int) -> str | None:
        """Take rows and bytes, or release them if negative. Return the problem, and take nothing, if one is used up."""
        with self._lock:
            if num_rows > 0 and self.num_rows + num_rows > self.limits.queued_rows:
                used, flag = f"{self.num_rows:,} rows", "--max-queued-rows"
            elif num_bytes > 0 and self.num_bytes + num_bytes > self.limits.queued_bytes:
                used, flag = f"{self.num_bytes:,} bytes", "--queued-memory"
            else:
                self.num_rows += num_rows
                self.num_bytes += num_bytes
                return None
        return f"{used} wait in unfinished frames of all producers ({flag}): try again"


class Queue:
    """One stream's share of the budget: the rows of its unfinished frame, and the bytes that these keep in memory.

    name : of the stream, for errors
    """

    def __init__(self, budget: Budget, name: str) -> None:
        self._budget, self._limits, self.name = budget, budget.limits, name
        self._num_batches = 0
        self._last = (0, 0)  # rows and bytes of the last batch that may belong to an unfinished frame
        self.num_rows = self.num_bytes = 0

    def admit(self, batch: pa.RecordBatch, used: Sequence[str], waits: bool) -> pa.RecordBatch:
        """Take an incoming batch from the budgets, and return it with the used columns only.

        waits : whether its rows may belong to an unfinished frame. Raises InputError if the batch or its frame exceeds
        a limit, ServiceError if the service is full at the moment.
        """
        # Sizes of the received buffers: nbytes would follow offsets that are not validated yet.
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
        if problem := self._budget.change(batch.num_rows, num_bytes):
            raise ServiceError(f"{self.name}: {problem}")
        self.num_rows += batch.num_rows
        self.num_bytes += num_bytes
        self._last = (batch.num_rows, num_bytes) if waits else (0, 0)
        self._num_batches += 1
        return batch

    def frame_applied(self) -> None:
        """Release the rows of a completed frame, except those of the last batch: it may begin another frame."""
        self._keep(*self._last)

    def clear(self) -> None:
        """Release all rows and bytes."""
        self._keep(0, 0)

    def _keep(self, num_rows: int, num_bytes: int) -> None:
        self._budget.change(num_rows - self.num_rows, num_bytes - self.num_bytes)
        self.num_rows, self.num_bytes = num_rows, num_bytes

    def _too_large(self, problem: str) -> InputError:
        return InputError(f"{problem}: send smaller ones", source=self.name, batch=self._num_batches)


def _compact(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
    """Return a batch and the bytes that it keeps in memory, copied if it uses less than half of these.

    A column is a view of its whole message, so even one row keeps the unused columns in memory.
    """
    held, used = _held_bytes(batch), batch.get_total_buffer_size()
    if held < WORTH_COPYING or 2 * used > held:
        return batch, held
    try:
        batch.validate(full=True)
    except pa.ArrowInvalid:  # the decoder reports it with more detail
        return batch, held
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    copy = sink.getvalue()
    return pa.ipc.open_stream(copy).read_next_batch(), copy.size


def _held_bytes(batch: pa.RecordBatch) -> int:
    """Return the bytes of the memory that a batch's buffers are views of."""
    sizes: dict[int, int] = {}
    for buffer in (buffer for column in batch.columns for buffer in column.buffers() if buffer is not None):
        while buffer.parent is not None:
            buffer = buffer.parent
        sizes[buffer.address] = int(buffer.size)
    # Dictionaries are not included: they are in separate messages.
    return max(sum(sizes.values()), int(batch.get_total_buffer_size()))
