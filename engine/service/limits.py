"""What the service takes at most, so that no caller can take its memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import InputError, ServiceError


@dataclass(frozen=True)
class Limits:
    """calls : at once, of every kind
    connections : at once; beyond it those without a call in progress are closed
    idle_s : how long a connection may stay without a call
    message_bytes : of one record batch
    queued_rows : of frames that are not whole yet, over all streams
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
    memory_bytes: int = 256 << 20
    producers: int = 10_000
    delta_bytes: int = 256 << 20
    rows_asked: int = 1 << 16


class Budget:
    """What all streams have together: the rows that wait in unfinished frames, or the bytes of shared memory."""

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
    """One stream's share of the budget: the rows of the frame that is not whole yet.

    name : of the stream, for errors
    """

    def __init__(self, limits: Limits, budget: Budget, name: str) -> None:
        self._limits, self._budget, self._name = limits, budget, name
        self._num_batches = 0
        self.num_rows = 0

    def admit(self, batch: pa.RecordBatch) -> None:
        """A batch has come. Raises InputError where it or its frame is larger than any may be, ServiceError where the
        service is full now."""
        # Sizes of the buffers as they came: nbytes would follow offsets that nobody has checked yet.
        size, most = batch.get_total_buffer_size(), self._limits.message_bytes
        if size > most:
            raise self._too_large(f"a batch of {size:,} bytes; this service takes {most:,} at most (--max-message)")
        most = self._limits.queued_rows
        if self.num_rows + batch.num_rows > most:
            raise self._too_large(f"a frame of more than {most:,} rows; this service takes no more (--max-queued-rows)")
        if not self._budget.change(batch.num_rows):
            raise ServiceError(
                f"{self._name}: {self._budget.num_taken:,} rows wait in unfinished frames of all producers "
                "(--max-queued-rows): try again"
            )
        self.num_rows += batch.num_rows
        self._num_batches += 1

    def keep(self, num_rows: int) -> None:
        """Only so many rows wait now: the others are in whole frames, which were taken."""
        self._budget.change(num_rows - self.num_rows)
        self.num_rows = num_rows

    def _too_large(self, problem: str) -> InputError:
        return InputError(f"{problem}: send smaller ones", source=self._name, batch=self._num_batches)
