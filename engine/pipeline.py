"""The loop: a frame in, and when the gate opens a step out. No I/O, no clock, no jax.

Frame → gate → stores → at an opening: Coalesced of every table to ``step``, a callable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from penstock.errors import StateError
from penstock.frames import Coalesced, Frame, Rows
from penstock.gate import Gate
from penstock.pyx.frame_accumulate import Intake, bytes_held
from penstock.stats import Contributor, Counters, Stale
from penstock.table_accumulator import TableStore
from penstock.threads import ThreadTeam

Step = Callable[[Mapping[str, list[Coalesced]], tuple[float, ...]], None]
Begin = Callable[[Frame, bool], tuple[float, ...]]
# What of a frame outlives it: step, contributor, learning rates, source.
_Last = tuple[int | None, Contributor, tuple[float, ...] | None, str]

# Below this many rows a second thread costs more than it saves.
ROWS_WORTH_SPLITTING = 1 << 14


class FrameGate:
    """The gate of an engine as its producers see it: frames enter, nobody takes.

    push : takes gradients, local_step, contributor and learning_rates as ``Engine.apply`` does
    """

    def __init__(self, gate: Gate, push: Callable[..., bool]) -> None:
        self._gate, self._push = gate, push

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

    def take(self, *_: Any, **__: Any) -> NoReturn:
        """Raise StateError: the gate's contents belong to the tables, and a taker would count a step that is none."""
        raise StateError(
            "an engine's gate opens into its tables, for nobody else: Engine.flush opens it early, and a "
            "SparseConditionalAccumulator is for takers"
        )

    @property
    def num_required(self) -> int | None:
        """Frames that open the gate."""
        return self._gate.num_required

    @property
    def num_accumulated(self) -> int:
        """Frames admitted since the gate last opened."""
        return self._gate.num_accumulated

    @property
    def global_step(self) -> int:
        """How often the gate has opened, or what ``set_global_step`` set."""
        return self._gate.global_step

    @property
    def stale(self) -> Stale:
        """Frames refused as stale, by contributor and by lateness: a copy."""
        return self._gate.stale

    def is_stale(self, local_step: int | None) -> bool:
        """Whether a frame of this step would be refused; one without a step never is."""
        return self._gate.is_stale(local_step)

    def set_global_step(self, global_step: int) -> None:
        """Set the step to any int64, also a smaller one. Frames already admitted stay."""
        self._gate.set_global_step(global_step)

    def still(self) -> AbstractContextManager[Any]:
        """Keep frames from entering and the gate from opening."""
        return self._gate.still()

    def explain(self) -> str:
        """How many frames the gate has and needs, in one line."""
        return self._gate.explain()

    def get_state(self) -> dict[str, Any]:
        """Counts and step as plain data."""
        return self._gate.get_state()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.explain()})"


class BadRowsError(Exception):
    """A frame that was not audited holds a bad row. Nothing of it was taken in: audit it, and push the audited one."""


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
        self._crew = ThreadTeam(threads)
        self._intake = Intake()
        self._accumulators = [store.accumulator for store in stores.values()]
        self._apart = [table for table, store in stores.items() if not store.accumulates]
        self._most_parts = 1 << self._crew.threads.bit_length() - 1  # a power of two
        self._last: _Last | None = None  # of the last one admitted
        self._num_admitted = 0
        self._opening: tuple[tuple[float, ...], Counters] = ((), Counters())  # rates, and whom the step counts for
        gate.open_into(self._open)

    def push(self, frame: Frame, begin: Begin, counters: Counters) -> tuple[Frame, bool]:
        """Take one frame in, and step if that opens the gate. Where it was stale it is dropped whole, and counted.

        Returns the frame, audited where it was stale, and whether it was taken in.

        begin : called when the frame is not stale, before anything of it is taken in, with whether it opens
            the gate: then it gives the learning rate of every tag
        Raises BadRowsError for a frame that was not audited.
        """

        def audit() -> None:
            # Before it is counted as stale: a frame that is refused is not.
            nonlocal frame
            frame = frame.audited()

        contributor = frame.contributor
        admitted = self.gate.admit(frame.local_step, lambda: self._add(frame, begin, counters), contributor, audit)
        with self.gate.still():
            counters.count(frame, admitted)
        return frame, admitted

    def flush(self, begin: Begin, counters: Counters) -> bool:
        """Open the gate for what it holds. False where it holds nothing, or others queue for it."""
        with self.gate.still():
            if self._last is None or not self.gate.num_accumulated:
                return False
            self.gate.check_may_open()
            step, contributor, rates, source = self._last
            self._opening = begin(Frame({}, 0, step, contributor, rates, source=source), True), counters
            future = self.gate.take(1, self._open)
        if future.cancel():
            return False
        future.result()
        return True

    def get_state(self) -> dict[str, Any]:
        """What is behind the gate beside the stores, as plain data: frames admitted, what counts of the last one."""
        return {"num_admitted": self._num_admitted, "last": self._last and list(self._last[:3])}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take up what ``get_state`` gave, or its copy through JSON."""
        self._num_admitted = int(state["num_admitted"])
        self._last = None
        if state["last"] is not None:
            step, contributor, rates = state["last"]
            self._last = step, contributor, None if rates is None else tuple(rates), ""

    def close(self) -> None:
        self._crew.close()

    def _add(self, frame: Frame, begin: Begin, counters: Counters) -> None:
        intake, rows = self._intake, frame.rows
        tables, parts, total = list(rows), None, 0
        for blocks in rows.values():
            for block in blocks:
                total += len(block.ids)
        alone = total < ROWS_WORTH_SPLITTING
        if not alone:
            tables, parts = self._split(rows, total)
        stores = [self.stores[table] for table in tables]
        vacant = intake.begin(
            [store.accumulator for store in stores], [rows[table] for table in tables], self._num_admitted + 1, parts
        )
        try:
            if frame.audit is not None and not vacant:
                self._check(alone)
            required = self.gate.num_required
            opens = required is not None and self.gate.num_accumulated + 1 >= required
            if opens:
                self.gate.check_may_open()
            opening = begin(frame, opens), counters
            num_tasks = intake.add()
        except BaseException:
            intake.cancel()
            raise
        if not self._work(num_tasks, alone):
            # Where a frame before it is held, its rows have been looked at above.
            assert vacant
            intake.undo()
            raise BadRowsError
        intake.end()
        for table in self._apart:
            if table in rows:
                self.stores[table].end()
        self._opening = opening
        self._num_admitted += 1
        # Not the frame: its rows may hold a whole batch in memory.
        self._last = frame.local_step, frame.contributor, frame.learning_rates, frame.source

    def _split(self, rows: Mapping[str, Sequence[Rows]], total: int) -> tuple[list[str], list[int]]:
        """The tables of a frame, and into how many tasks each is split: one, unless it would keep the others waiting.

        The largest first, so that no thread begins with a large table when the others are done.
        """
        num_rows = {table: sum([len(block.ids) for block in blocks]) for table, blocks in rows.items()}
        tables = sorted(num_rows, key=num_rows.__getitem__, reverse=True)
        most = self._most_parts
        large = [n >= ROWS_WORTH_SPLITTING and n * most > total for n in map(num_rows.__getitem__, tables)]
        return tables, [most if one else 1 for one in large]

    def _check(self, alone: bool) -> None:
        """What is added to sums that are held cannot be taken back: look first."""
        if not self._work(self._intake.check(1 if alone else self._crew.threads), alone):
            raise BadRowsError

    def _work(self, num_tasks: int, alone: bool) -> bool:
        """What the intake has shared out. alone : on this thread. False where a row is bad."""
        if alone:
            return self._intake.work()
        return self._crew.run([self._intake.work] * min(num_tasks, self._crew.threads))

    def _open(self, _: int) -> None:
        rates, counters = self._opening
        stores = self.stores
        held = bytes_held(self._accumulators) + sum([stores[table].nbytes_apart for table in self._apart])
        counters.held_bytes = max(counters.held_bytes, held)
        self._step({name: store.drain() for name, store in stores.items()}, rates)
        counters.steps += 1
