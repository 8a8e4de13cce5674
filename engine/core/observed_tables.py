"""ObservedTables: the tables of an engine, and all that changes them, which observers see; it imports no observer.

Steps, loads, rollbacks and thaws, under the gate's lock, the only lock of an engine. How frames enter: engine_core.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from weakref import ref

from penstock.base.errors import CapacityError, ConfigError
from penstock.base.events import report
from penstock.core.failure import Failure
from penstock.core.freshness import Freshness
from penstock.core.gate import Gate
from penstock.core.gradient_norms import StepNorms
from penstock.core.observers import Context, Pushed, StepObserver
from penstock.core.pipeline import Pipeline
from penstock.core.rounds import Rounds
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.frames import MAX_TIME, NO_FRAMES, Int64
from penstock.model.learning_rates import LearningRates
from penstock.model.stats import Counters, TableReport
from penstock.pyx.frame_steps import FrameSteps
from penstock.rows.derived_slots import DerivedSlots
from penstock.rows.table_set import TableSet


class ObservedTables:
    """Tables, the sums of their next step, and what has happened to them.

    tables : on the devices; pipeline : sums the frames of a step
    gate : counts frames and opens; ``gate.still()`` is the lock of the engine
    norms : of gradients; None: the configuration has none
    reduction : "mean" or "sum"

    turns : of the workers; None: frames enter as they arrive
    failure : why the tables cannot change any more
    rates : learning rates of the last run or apply, used by a flush; last_rates : of every tag at the last step
    changed_step : the global step after the last step that changed a row
    clock_offset : the global step less the clock of dynamic tables that count steps; 0 until a rollback
    freshness : of the frames that steps have applied
    """

    def __init__(
        self,
        config: EmbeddingConfig,
        tables: TableSet,
        pipeline: Pipeline,
        gate: Gate,
        norms: StepNorms | None,
        reduction: str,
    ) -> None:
        self.config, self.tables, self.pipeline, self.reduction = config, tables, pipeline, reduction
        self.gate, self.norms = gate, norms
        self.turns: Rounds | None = None
        self.failure = Failure(gate, tables)
        self.rates = LearningRates(config.num_tags, None, config.schedules)
        self.last_rates: tuple[float, ...] | None = None
        self.changed_step, self.freshness = 0, Freshness()
        self._frame_steps: dict[str, FrameSteps | None] = {}
        self._observers: list[ref[StepObserver]] = []
        self.set_clock_offset(0)

    @property
    def global_step(self) -> int:
        return self.gate.global_step

    @property
    def num_pending(self) -> int:
        """Frames that were counted, and that no step has applied."""
        return self.gate.num_accumulated

    # ---- observers

    def observe(self, observer: StepObserver) -> None:
        """Register an observer, without keeping it alive. The last is called first before a step, and last after it."""
        with self.gate.still():
            self._observers = [*(get for get in self._observers if get() is not None), ref(observer)]

    @property
    def observers(self) -> list[StepObserver]:
        """The observers still alive, in the order of registration."""
        return [observer for get in self._observers if (observer := get()) is not None]

    # ---- the step

    def _open(self, values: tuple[float, ...], context: Context) -> Pushed:
        """Open the gate without a frame."""
        pushed = Pushed(NO_FRAMES, 0, 0, context)
        with self._whole():
            self._step(values, pushed)
            self._notify(pushed)
        return pushed

    def _step(self, rates: tuple[float, ...], pushed: Pushed) -> None:
        """Update the tables by the buffered frames, and count the opening of the gate."""
        self.gate.check_may_open()
        counters, step, dynamic = pushed.context.counters, self.gate.global_step, self.tables.dynamic
        counters.held_bytes = max(counters.held_bytes, self.held_bytes)
        if dynamic:
            clock = step - self.clock_offset
            dynamic.plan(lambda name: self.pipeline.stores[name].look(), clock, self.pipeline.time)
        coalesced = dynamic.with_rows(self.pipeline.drain()) if dynamic else self.pipeline.drain()
        if self.norms is not None:
            self.norms.clip(coalesced, counters)
        for observer in reversed(self.observers):
            observer.before_step(coalesced)
        began_s = time.perf_counter()
        if self.tables.apply(coalesced, rates, step):
            self.changed_step = step + 1
        self._count_not_finite(counters)
        pushed.seconds = (time.perf_counter() - began_s,)
        pushed.changed = coalesced
        self.last_rates, counters.steps = rates, counters.steps + 1
        self.gate.count_opening()
        if (times := self.pipeline.frame_times) is not None:
            self.pipeline.frame_times = None
            assert self.pipeline.time is not None
            self.freshness.stepped(times, self.pipeline.time)

    def _count_not_finite(self, counters: Counters) -> None:
        """Count the rows that a step has made infinite or NaN, and log the first one of the run."""
        result = self.tables.take_not_finite()
        if result is None:
            return
        num_rows, table, key = result
        if not counters.not_finite:
            counters.first_not_finite = f"table '{table}', id {key}"
            report("not_finite", table=table, id=key, global_step=self.global_step)
        counters.not_finite += num_rows

    def _native(self, table: str) -> FrameSteps | None:
        """Return the way of a table's frames without Python; None if there is none, now or ever."""
        if table not in self._frame_steps:
            sums = self.pipeline.stores[table].accumulator
            self._frame_steps[table] = self.tables.frame_steps(table, self.gate, sums, self.reduction == "mean")
        return self._frame_steps[table] if not self.gate.num_accumulated or self.pipeline.has_only(table) else None

    @property
    def held_bytes(self) -> int:
        """Bytes of the sums, and of the frames that wait for their turn."""
        return self.pipeline.nbytes

    def _notify(self, pushed: Pushed) -> None:
        for observer in self.observers:
            observer.pushed(pushed)
        pushed.changed = {}  # the sums' memory is soon reused
        if pushed.seconds and self.tables.dynamic:
            self.tables.dynamic.forget_changes()
        self._thaw()

    # ---- other changes

    def load(self, write: Callable[[], Mapping[str, Int64 | None]]) -> None:
        """Set rows of tables.

        write : sets them, and returns the ids by table, None: all; if it raises, the engine fails
        """
        with self.still(), self._whole():
            for observer in reversed(self.observers):
                observer.before_load()
            try:
                changed = write()
            except CapacityError:
                for observer in self.observers:
                    observer.load_refused()
                raise
            for observer in self.observers:
                for name, ids in changed.items():
                    observer.loaded(name, ids)
            self.tables.dynamic.forget_changes()

    def roll_back(self, replace: Callable[[], Mapping[str, Int64]], clock_offset: int, time: int | None) -> int:
        """Step forward to another state of the tables, and drop the frames in the gate. Returns their number.

        replace : replaces rows and keys, and returns the ids of the changed ones; if it raises, the engine fails
        clock_offset, time : of the other state, at the next step
        """
        with self.still():
            gate = self.gate
            state, num_frames = gate.get_state(), self.num_pending
            stepped = {**state, "global_step": gate.global_step + 1, "num_accumulated": 0, "contributors": []}
            gate.set_state(stepped, self.pipeline.drain)
            if self.turns is not None:
                self.turns.drop()

            def write() -> Mapping[str, Int64]:
                self.pipeline.time, self.pipeline.frame_times = time, None
                self.freshness.set_back(time)
                self.set_clock_offset(clock_offset)
                changed = replace()
                if any(len(ids) for ids in changed.values()):
                    self.changed_step = gate.global_step
                return changed

            self.load(write)
            self._thaw()
        return num_frames

    def set_clock_offset(self, offset: int) -> None:
        """Set ``clock_offset``, before the step that it applies to."""
        self.clock_offset = offset
        if self.tables.dynamic:
            self.gate.steps = range(offset, offset + MAX_TIME + 1)

    def _thaw(self) -> None:
        """Let tables train whose step has come."""
        due = self.tables.next_thaw
        if due is None or self.global_step < due:
            return
        step = self.global_step
        with self._whole():
            for observer in reversed(self.observers):
                observer.before_load()
            specs = self.tables.thaw(step)
            self._frame_steps.clear()
            if names := [spec.name for spec in specs if spec.optimizer.derived_slot]:
                derived = DerivedSlots(self.tables, self.rates.expected(step, self.last_rates))
                for name in names:
                    derived.derive_all(name)
                derived.warn()
            self.config = self.config.at_step(step)
            for observer in self.observers:
                observer.thawed(specs)

    # ---- keeping still

    @contextmanager
    def still(self) -> Iterator[None]:
        """Keep frames out and tables unchanged while in the context. Raises StateError as ``check_whole``."""
        with self.gate.still():
            self.failure.check_whole()
            yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep tables unchanged while their rows are read on the host. Raises StateError as ``check_readable``."""
        with self.gate.still() if self.failure.is_forked else self.still():
            self.failure.check_readable()
            yield

    def sharing_errors(self) -> AbstractContextManager[None]:
        """Return a context whose error the other processes of a mesh raise too."""
        return nullcontext()

    def wait(self) -> None:
        """Wait until the devices are done, and raise their errors."""
        with self.still(), self._whole():
            self.tables.wait()

    # ---- failure

    def fail(self, error: BaseException) -> None:
        """Mark the engine as failed: its tables are no longer those of a whole step."""
        if self.failure.is_forked:
            return
        self.failure.error = f"{type(error).__name__}: {error}"
        for observer in self.observers:
            observer.core_failed(error)

    def check_ready(self) -> None:
        """Raise StateError after a failed step, or ConfigError if the configuration refuses updates."""
        self.failure.check_whole()
        if self.config.mode == "INFERENCE":
            raise ConfigError("the configuration's mode is INFERENCE, which refuses updates; use TRAINING")

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Fail the engine on an error in the context."""
        try:
            yield
        except CapacityError:
            raise  # nothing has changed
        except BaseException as error:
            self.fail(error)
            raise

    # ---- reports

    def start_counting(self) -> None:
        """Reset the counts of rows and distinct ids of every table."""
        with self.still():
            for store in self.pipeline.stores.values():
                store.start_counting()
            self.tables.start_counting()

    def expired_waiting(self) -> dict[str, int]:
        """Return how many expired keys every dynamic table has. Frames enter meanwhile if the lock is not held."""
        return self.tables.dynamic.expired_waiting(self.gate.still)

    def table_reports(self, waiting: Mapping[str, int] | None = None) -> dict[str, TableReport]:
        """Return the rows and ids that entered every table since ``start_counting``. waiting : counted before"""
        stores = self.pipeline.stores.items()
        with self.gate.still():  # else a step on another thread is between its plan and its changes
            keys = self.tables.dynamic.reports(self.expired_waiting() if waiting is None else waiting)
            caches = self.tables.cache_reports()
        distinct = {name: None if name in keys else store.accumulator.num_distinct for name, store in stores}
        return {n: TableReport(store.num_rows, distinct[n], keys.get(n), caches.get(n)) for n, store in stores}
