"""From host to device: who prepares what, in which memory, and how far the host may be ahead.

Three take part. The caller coalesces step t+2, a thread lays step t+1 out in an arena and dispatches it, the device
runs step t. A full queue or a full ring makes the one before it wait, so that memory is bounded whoever is slow.

A device may read an arena until its step is done (on a CPU it is the arena that a program reads: jax.device_put
aliases aligned memory whatever it is told), so an arena is used again only behind its fence, an output of that step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

# Arenas: one being filled, one on its way, one being read.
RING = 3
# Steps of a table that wait for the thread, beside the one that it is at.
AHEAD = 2
# What the thread's work is called in a trace of JAX's profiler.
DISPATCH = "penstock dispatch"
# What jax and the DMA engines behind it like best.
ALIGNMENT = 64


class Arena:
    """Host memory for what one dispatch hands over. Grows to what was asked of it, once its reader is done."""

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        self._wanted = 0
        self._fence: jax.Array | None = None
        self._reader = ""

    def room(self, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
        """An uninitialised array, 64-byte aligned, until the arena is begun again."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        start, self._wanted = self._wanted, _aligned(self._wanted + num_bytes)
        if self._wanted > len(self._memory):
            return np.empty(shape, dtype)  # this once; the arena grows when it is begun
        array: npt.NDArray[Any] = self._memory[start : start + num_bytes].view(dtype).reshape(shape)
        return array

    def begin(self) -> None:
        """Empty the arena, when whoever reads it is done. Raises what went wrong there."""
        self.wait()
        if self._wanted > len(self._memory):
            block = np.empty(self._wanted + ALIGNMENT, np.uint8)
            offset = -block.ctypes.data % ALIGNMENT
            self._memory = block[offset : offset + self._wanted]
        self._wanted = 0

    def read_by(self, reader: str, fence: jax.Array) -> None:
        """A dispatch reads the arena until its fence is there. reader : names it where it fails"""
        self._reader, self._fence = reader, fence

    def wait(self) -> None:
        fence, self._fence = self._fence, None
        if fence is not None:
            named(self._reader, fence.block_until_ready)


class Dispatcher:
    """Runs the dispatches of some tables in order, on a thread of its own. One caller at a time.

    An error comes out of the call that waits for it, and of every call after that: the tables are lost, because a
    dispatch that failed had them donated.
    """

    def __init__(self) -> None:
        self._ring = deque(Arena() for _ in range(RING))
        self._waiting: deque[Future[None]] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self._error: BaseException | None = None

    def arena(self) -> Arena:
        """The arena that has been in use longest, empty."""
        arena = self._ring[0]
        arena.begin()
        self._ring.rotate(-1)
        return arena

    def submit(self, reader: str, work: Callable[[], None]) -> None:
        """Let the thread do ``work`` behind all that was submitted before; wait where the queue is full."""
        while len(self._waiting) >= AHEAD:
            self._settle(self._waiting.popleft())
        self._check()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "penstock dispatch")
        self._waiting.append(self._thread.submit(self._unless_failed, reader, work))

    def drain(self) -> None:
        """All that was submitted has been dispatched: tables may be read, behind it on the device."""
        while self._waiting:
            self._settle(self._waiting.popleft())
        self._check()

    def wait(self) -> None:
        """All that was submitted is done."""
        self.drain()
        try:
            for arena in self._ring:
                arena.wait()
        except BaseException as error:
            self._error = error
            raise

    def _unless_failed(self, reader: str, work: Callable[[], None]) -> None:
        """What follows a failed dispatch is not tried: it would meet arrays that are gone."""
        self._check()
        try:
            with jax.profiler.TraceAnnotation(DISPATCH, work=reader):
                named(reader, work)
        except BaseException as error:
            self._error = self._error or error
            raise

    def _settle(self, future: Future[None]) -> None:
        future.exception()  # kept in _error, which _check raises

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


def named(reader: str, work: Callable[[], Any]) -> None:
    """Do ``work``; an error of the device says whose work it was."""
    try:
        work()
    except jax.errors.JaxRuntimeError as error:
        if str(error).startswith(("table '", "tables '")):
            raise
        raise jax.errors.JaxRuntimeError(f"{reader}: {error}") from error


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
