"""The loop: a frame in, and when the gate opens a step out. No I/O, no clock, no jax.

Frame → gate → stores → at an opening: Coalesced of every table to ``step``, a callable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from penstock.arguments import whole
from penstock.frames import Coalesced, Frame
from penstock.gate import Gate
from penstock.stats import Contributor, Counters
from penstock.store import TableStore, run_in

Step = Callable[[Mapping[str, list[Coalesced]], tuple[float, ...]], None]
Begin = Callable[[Frame, bool], tuple[float, ...]]


class FrameGate(Gate):
    """The engine's gate: what producers in other threads hold on to.

    push : takes gradients, local_step, contributor and learning_rates as ``Engine.apply`` does
    """

    def __init__(self, num_required: int, push: Callable[..., bool]) -> None:
        super().__init__(num_required)
        self._push = push

    def push(
        self,
        gradients: Mapping[str, tuple[Any, Any]],
        local_step: int | None = None,
        contributor: Contributor = None,
        learning_rates: Any = None,
    ) -> bool:
        """Take in one frame, from any thread, also while the engine runs. False where it was stale.

        Validated before the gate's lock is asked for; admission, sums and the step happen under it, so that
        the frames of all threads form one order. Arguments and errors: ``Engine.apply``.
        """
        return self._push(gradients, local_step=local_step, contributor=contributor, learning_rates=learning_rates)


def num_threads(threads: int | None) -> int:
    """None: as many as this process may use."""
    if threads is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return whole("threads", threads, 1)


class Pipeline:
    """Everything between a source of frames and the device.

    step : called at an opening with what every table coalesced and the learning rate of every tag,
        after the gate's contents were taken and before the step counts up
    threads : tables are coalesced side by side, and large blocks in parts; results do not depend on it

    Any number of threads may push: what they do in here happens under the gate's lock.
    """

    def __init__(self, gate: Gate, stores: Mapping[str, TableStore], step: Step, threads: int | None = None) -> None:
        self.gate = gate
        self.stores = stores
        self._step = step
        self._threads = num_threads(threads)
        self._tables_pool = ThreadPoolExecutor(self._threads, "penstock-table") if self._threads > 1 else None
        self._parts_pool = ThreadPoolExecutor(self._threads, "penstock-part") if self._threads > 1 else None
        self.last: Frame | None = None  # the last one admitted, without its rows
        self._num_admitted = 0
        self._opening: tuple[tuple[float, ...], Counters] = ((), Counters())  # rates, and whom the step counts for
        gate.open_into(self._open)

    def push(self, frame: Frame, begin: Begin, counters: Counters) -> bool:
        """Take one frame in, and step if that opens the gate. False where it was stale: dropped whole, counted.

        begin : called when the frame is not stale, before anything of it is taken in, with whether it opens
            the gate: then it gives the learning rate of every tag
        """
        with self.gate.still():
            counters.count(frame)
        admitted = self.gate.admit(frame.local_step, lambda: self._add(frame, begin, counters), frame.contributor)
        if not admitted:
            with self.gate.still():
                counters.stale += 1
        return admitted

    def flush(self, begin: Begin, counters: Counters) -> bool:
        """Open the gate for what it holds. False where it holds nothing, or others queue for it."""
        with self.gate.still():
            if self.last is None or not self.gate.num_accumulated:
                return False
            self._opening = begin(self.last, True), counters
            future = self.gate.take(1, self._open)
        if future.cancel():
            return False
        future.result()
        return True

    def get_state(self) -> dict[str, Any]:
        """What is behind the gate beside the stores, as plain data: frames admitted, what counts of the last one."""
        last = self.last and [self.last.local_step, self.last.contributor, self.last.learning_rates]
        return {"num_admitted": self._num_admitted, "last": last}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take up what ``get_state`` gave, or its copy through JSON."""
        self._num_admitted = int(state["num_admitted"])
        self.last = None
        if state["last"] is not None:
            step, contributor, rates = state["last"]
            self.last = Frame({}, 0, step, contributor, None if rates is None else tuple(rates))

    def close(self) -> None:
        for pool in (self._tables_pool, self._parts_pool):
            if pool is not None:
                pool.shutdown()

    def _add(self, frame: Frame, begin: Begin, counters: Counters) -> None:
        required = self.gate.num_required
        self._opening = begin(frame, required is not None and self.gate.num_accumulated + 1 >= required), counters
        self._num_admitted += 1
        self.last = frame_without_rows(frame)
        run = run_in(self._tables_pool if len(frame.rows) > 1 else None)
        run_parts = run_in(self._parts_pool)
        run(
            partial(self.stores[table].add, blocks, self._num_admitted, self._threads, run_parts)
            for table, blocks in sorted(frame.rows.items(), key=lambda of: -sum(len(b.ids) for b in of[1]))
        )

    def _open(self, _: int) -> None:
        rates, counters = self._opening
        held = sum(store.nbytes for store in self.stores.values())
        counters.held_bytes = max(counters.held_bytes, held)
        self._step({name: store.drain() for name, store in self.stores.items()}, rates)
        counters.steps += 1


def frame_without_rows(frame: Frame) -> Frame:
    """What of a frame outlives it: not the rows, they may hold a whole batch in memory."""
    return Frame({}, 0, frame.local_step, frame.contributor, frame.learning_rates, {}, frame.source)
