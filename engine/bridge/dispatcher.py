"""Dispatch from host to device: a thread and a team that lays out rows, a ring buffer of host arenas, and backpressure.

A step passes three stages. The caller coalesces step t+2, a thread lays out step t+1 in an arena and dispatches it,
and the device runs step t. A full queue or ring blocks the stage before it, so memory is bounded whichever is slow.

A device may read an arena until its step is done. On a CPU the program reads the arena itself, because jax.device_put
aliases aligned memory regardless of its arguments. So an arena is reused only after its fence, an output of that step.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np
import numpy.typing as npt

T = TypeVar("T")

# Arenas: one being filled, one in flight, one being read.
RING = 3
# Steps that may be queued or running on the thread before the caller blocks.
AHEAD = 2
# The name of the thread's work in a trace of JAX's profiler.
DISPATCH = "penstock dispatch"
# Bytes; the alignment that suits jax and DMA engines.
ALIGNMENT = 64


class Arena:
    """Host memory for the arrays of one dispatch. ``begin`` grows it to the size last requested."""

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0
        self._fence: jax.Array | None = None
        self._reader = ""

    def room(self, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
        """Return an uninitialized array, valid until the next ``begin``; 64-byte aligned if it fits the arena."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        start, self._used = self._used, _aligned(self._used + num_bytes)
        if self._used > len(self._memory):
            return np.empty(shape, dtype)  # does not fit; the next begin() grows the arena
        array: npt.NDArray[Any] = self._memory[start : start + num_bytes].view(dtype).reshape(shape)
        return array

    def begin(self) -> None:
        """Wait until the arena's reader is done, then empty the arena. Raises the reader's error."""
        self.wait()
        if self._used > len(self._memory):
            block = np.empty(self._used + ALIGNMENT, np.uint8)
            offset = -block.ctypes.data % ALIGNMENT
            self._memory = block[offset : offset + self._used]
        self._used = 0

    def read_by(self, reader: str, fence: jax.Array) -> None:
        """Record the dispatch that reads the arena until its fence is ready. reader : its name in errors"""
        self._reader, self._fence = reader, fence

    def wait(self) -> None:
        fence, self._fence = self._fence, None
        if fence is not None:
            named(self._reader, fence.block_until_ready)


class LayoutTeam:
    """Runs tasks that release the GIL. threads : at most this many at a time; 0: all CPUs of this process"""

    def __init__(self, threads: int = 0) -> None:
        self._threads = threads or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [0])
        self._pool: ThreadPoolExecutor | None = None

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        """Return the results of all tasks, in their order."""
        if self._threads == 1 or len(tasks) < 2:
            return [task() for task in tasks]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "penstock layout")
        return [future.result() for future in [self._pool.submit(task) for task in tasks]]


class Dispatcher:
    """Runs the dispatches of a set of tables in order on a dedicated thread. One caller at a time.

    team : the threads that lay out the rows of a dispatch

    The call that waits for a dispatch raises its error, and so does every later call: the tables are lost, because the
    failed dispatch had their arrays donated.
    """

    def __init__(self, threads: int = 0) -> None:
        self.team = LayoutTeam(threads)
        self._ring = deque(Arena() for _ in range(RING))
        self._waiting: deque[Future[None]] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self._error: BaseException | None = None

    def arena(self) -> Arena:
        """Return the least recently used arena, emptied."""
        arena = self._ring[0]
        arena.begin()
        self._ring.rotate(-1)
        return arena

    def submit(self, reader: str, work: Callable[[], None]) -> Future[None]:
        """Queue ``work`` for the thread, after everything submitted before. Block while the queue is full.

        Return its future, which also raises the error of an earlier dispatch.
        """
        while len(self._waiting) >= AHEAD:
            self._settle(self._waiting.popleft())
        self._check()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "penstock dispatch")
        future = self._thread.submit(self._unless_failed, reader, work)
        self._waiting.append(future)
        return future

    def drain(self) -> None:
        """Block until everything submitted is dispatched. A read of the tables then runs after it on the device."""
        while self._waiting:
            self._settle(self._waiting.popleft())
        self._check()

    def wait(self) -> None:
        """Block until everything submitted is done."""
        self.drain()
        try:
            for arena in self._ring:
                arena.wait()
        except BaseException as error:
            self._error = error
            raise

    def _unless_failed(self, reader: str, work: Callable[[], None]) -> None:
        """Run ``work`` unless an earlier dispatch failed, after which the tables' arrays no longer exist."""
        self._check()
        try:
            with jax.profiler.TraceAnnotation(DISPATCH, work=reader):
                named(reader, work)
        except BaseException as error:
            self._error = self._error or error
            raise

    def _settle(self, future: Future[None]) -> None:
        future.exception()  # recorded in _error, which _check raises

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


def named(reader: str, work: Callable[[], Any]) -> None:
    """Run ``work``. Prefix a device error with the name of its reader."""
    try:
        work()
    except jax.errors.JaxRuntimeError as error:
        if str(error).startswith(("table '", "tables '")):
            raise
        raise jax.errors.JaxRuntimeError(f"{reader}: {error}") from error


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
