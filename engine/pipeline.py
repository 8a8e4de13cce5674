"""The loop: a frame in, and when the gate opens a step out. No I/O, no clock, no jax.

Frame → gate → stores → at an opening: Coalesced of every table to ``step``, a callable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from penstock.errors import UsageError
from penstock.frames import Coalesced, Frame
from penstock.gate import Gate
from penstock.stats import Counters
from penstock.store import TableStore, run_in

Step = Callable[[Mapping[str, list[Coalesced]], tuple[float, ...]], None]


def num_threads(threads: int | None) -> int:
    """None: as many as this process may use."""
    if threads is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads < 1:
        raise UsageError(f"threads: expected at least 1, got {threads}")
    return threads


class Pipeline:
    """Everything between a source of frames and the device.

    step : called at an opening with what every table coalesced and the learning rate of every tag,
        after the gate's contents were taken and before the step counts up
    threads : tables are coalesced side by side, and large blocks in parts; results do not depend on it
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
        self.counters = Counters()

    def opens_with(self, frame: Frame) -> bool:
        """Whether pushing the frame would open the gate: its learning rates are then needed."""
        if self.gate.is_stale(frame.local_step):
            return False
        return self.gate.num_accumulated + 1 >= self.gate.num_required

    def push(self, frame: Frame, rates: tuple[float, ...]) -> bool:
        """Take one frame in, and step if that opens the gate. False where it was stale: dropped whole, counted.

        rates : one per tag, where the frame opens the gate
        """
        self.counters.count(frame)
        if not self.gate.admit(frame.local_step):
            self.counters.stale += 1
            return False
        self._num_admitted += 1
        self.last = frame_without_rows(frame)
        run = run_in(self._tables_pool if len(frame.rows) > 1 else None)
        run_parts = run_in(self._parts_pool)
        run(
            partial(self.stores[table].add, blocks, self._num_admitted, self._threads, run_parts)
            for table, blocks in sorted(frame.rows.items(), key=lambda of: -sum(len(b.ids) for b in of[1]))
        )
        if self.gate.is_open:
            self._open(rates)
        return True

    def flush(self, rates: tuple[float, ...]) -> None:
        """Open the gate for what it holds."""
        self._open(rates)

    def close(self) -> None:
        for pool in (self._tables_pool, self._parts_pool):
            if pool is not None:
                pool.shutdown()

    def _open(self, rates: tuple[float, ...]) -> None:
        held = sum(store.nbytes for store in self.stores.values())
        self.counters.held_bytes = max(self.counters.held_bytes, held)
        self._step({name: store.drain() for name, store in self.stores.items()}, rates)
        self.gate.pass_through()
        self.counters.steps += 1


def frame_without_rows(frame: Frame) -> Frame:
    """What of a frame outlives it: not the rows, they may hold a whole batch in memory."""
    return Frame({}, 0, frame.local_step, frame.contributor, frame.learning_rates, {}, frame.source)
