"""Dispatch from host to device: a thread, a ring buffer of host arenas, and backpressure. Device tables need it.

A step passes three stages. The caller coalesces step t+2, a thread lays out step t+1 in an arena and dispatches it,
and the device runs step t. A full queue or ring blocks the stage before it, so memory is bounded whichever is slow.

A device may read an arena until its step is done. On a CPU the program reads the arena itself, because jax.device_put
aliases aligned memory regardless of its arguments. So an arena is reused only after its fence, an output of that step.
"""

from __future__ import annotations

import atexit
import math
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from penstock.base.threads import ThreadTeam

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


class Dispatch:
    """Work for the dispatching thread. error : what it raised, once it has ended

    No Future and no Event: an interrupt of a thread that waits can leave their locks held. No SimpleQueue either: of
    two threads that wait in its ``get(timeout)``, the one without the item may wait for ever, where its time is over
    when it notices (CPython 3.11 computes a negative timeout, which means none).
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._has_ended = work, False
        self.error: BaseException | None = None
        self._running = Lock()
        self._running.acquire()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
        self._has_ended = True
        self._running.release()

    def wait(self) -> None:
        """Block until the work has ended; several threads may wait."""
        while not self._has_ended:
            if self._running.acquire(timeout=0.1):  # else it runs, or another thread has it, perhaps for ever
                self._running.release()

    def result(self) -> None:
        """Block until the work has ended. Raises its error."""
        self.wait()
        if self.error is not None:
            raise self.error


class Dispatcher:
    """Runs the dispatches of a set of tables in order on a dedicated thread. One caller at a time.

    team : the threads that lay out the rows of a dispatch

    The call that waits for a dispatch raises its error, and so does every later call: the tables are lost, because the
    failed dispatch had their arrays donated.
    """

    def __init__(self, team: ThreadTeam) -> None:
        self.team = team
        self._ring = deque(Arena() for _ in range(RING))
        self._waiting: deque[Dispatch] = deque()
        self._error: BaseException | None = None
        self._queue: SimpleQueue[Dispatch | None] = SimpleQueue()
        Thread(target=_run_all, args=(self._queue,), name="penstock dispatch", daemon=True).start()
        weakref.finalize(self, self._queue.put, None).atexit = False
        _dispatchers.add(self)

    def arena(self) -> Arena:
        """Return the least recently used arena, emptied."""
        arena = self._ring[0]
        arena.begin()
        self._ring.rotate(-1)
        return arena

    def submit(self, reader: str, work: Callable[[], None]) -> Dispatch:
        """Queue ``work`` for the thread, after everything submitted before. Block while the queue is full.

        Return its dispatch, whose error may be that of an earlier one.
        """
        while len(self._waiting) >= AHEAD:
            self._waiting[0].wait()  # an interrupt leaves it there
            self._waiting.popleft()
        self._check()
        dispatch = Dispatch(partial(self._unless_failed, reader, work))
        self._queue.put(dispatch)  # first: what is in ``_waiting`` is certain to run
        self._waiting.append(dispatch)
        return dispatch

    def drain(self) -> None:
        """Block until everything submitted is dispatched. A read of the tables then runs after it on the device."""
        last = Dispatch(lambda: None)  # also behind one that an interrupt has kept out of ``_waiting``
        self._queue.put(last)
        last.wait()
        self._waiting.clear()
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

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


def _run_all(queue: SimpleQueue[Dispatch | None]) -> None:
    while (dispatch := queue.get()) is not None:
        dispatch.run()
        del dispatch  # its work refers to the dispatcher, which ends with its last reference


_dispatchers: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


@atexit.register  # jax has registered before: this runs before jax closes its devices, and no thread uses them then
def _drain_all() -> None:
    for dispatcher in list(_dispatchers):
        with suppress(Exception):
            dispatcher.drain()


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
