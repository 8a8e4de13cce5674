"""EngineCore: tables, gate, pipeline, learning rates, and whether a step failed half way; it imports no observer.

``push`` admits a frame, opens the gate and steps the tables, all under the gate's lock, the only lock of an engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, TypeVar
from weakref import ref

import penstock.forks as forks
from penstock.config.embedding import EmbeddingConfig
from penstock.errors import CapacityError, ConfigError, StateError, UsageError
from penstock.events import report
from penstock.frames import MAX_TIME, Coalesced, Frame, FrameRun, Int64, as_run
from penstock.gate import Gate
from penstock.integrations import PROCESSES
from penstock.learning_rates import LearningRates, Rates
from penstock.pipeline import BadRowsError, Pipeline, store_of
from penstock.pyx.frame_steps import SMALL_ROWS, FrameSteps
from penstock.stats import Counters, TableReport
from penstock.tables.table_set import TableSet
from penstock.threads import ThreadTeam
from penstock.validation import INT64_MAX

T = TypeVar("T")
Stepped = Mapping[str, Sequence[Coalesced]]

# What ``StepObserver.most_unseen`` returns: steps, and changes of rows.
NONE, UNLIMITED = (0, 0), (INT64_MAX, INT64_MAX)


@dataclass(eq=False)  # not frozen: as Frame
class Passed:
    """Frames of a run that have entered the gate together, and the steps in which it opened.

    first, stop : the numbers of the frames in the run
    ids : int64, those of every step, one step after the other; seconds : of every step
    counters : of the run that the frames belong to
    """

    run: FrameRun
    first: int
    stop: int
    ids: Int64
    seconds: Sequence[float]
    counters: Counters

    @property
    def num_rows(self) -> int:
        return int(self.run.bounds[self.stop] - self.run.bounds[self.first])


class StepObserver:
    """Receives a notification of everything that changes a core's tables. Every method runs under the gate's lock.

    An error raised here after a frame has begun to enter fails the engine, as an error of the step does.
    """

    needs_all_rows = False  # that a step changes, not only those of this process's frames

    def frame_applied(self, frame: Frame, admitted: bool, counters: Counters) -> None:
        """Handle a frame that has entered the gate or was stale; positions count it from now on.

        frame : without its dropped rows; counters : of the run that the frame belongs to
        """

    def most_unseen(self) -> tuple[int, int]:
        """Return how many steps, and changes of rows, may pass that only ``frames_passed`` reports."""
        return NONE

    def frames_passed(self, passed: Passed) -> None:
        """Handle admitted frames and completed steps, in place of every other method."""

    def before_step(self, coalesced: Stepped) -> None:
        """Prepare for a step that changes these rows, and all rows of tables whose optimizer is not lazy."""

    def after_step(self, coalesced: Stepped) -> None:
        """Handle a completed step; the global step is not incremented yet."""

    def core_failed(self, error: BaseException) -> None:
        """Handle an error after which the core refuses further steps: one of them has failed half way."""

    def before_load(self) -> None:
        """Prepare for a load, which may set any rows."""

    def load_refused(self) -> None:
        """Handle a load that had no room, and has changed nothing."""

    def loaded(self, name: str, ids: Int64 | None) -> None:
        """Handle a load that has set rows of a table. ids : int64, shape (n,); None: all rows"""


class EngineCore:
    """The tables of an engine and the only path of a gradient into them.

    tables : on the devices; pipeline : sums the frames of a step
    reduction : "mean" or "sum"
    num_required : frames that open the gate; None: the configuration's, else 1

    gate : counts frames and opens; ``gate.still()`` is the lock of the engine
    rates : learning rates of the last run or apply, used by a flush; last_rates : of every tag at the last step
    changed_step : the global step after the last step that changed a row
    clock_offset : the global step less the clock of dynamic tables that count steps; 0 until a rollback
    failed : why the tables cannot change any more: the error of a step that failed half way, or a fork; else None
    is_shared : whether other processes read the rows
    counters : of frames that belong to no run
    """

    def __init__(
        self,
        config: EmbeddingConfig,
        tables: TableSet,
        pipeline: Pipeline,
        num_required: int | None,
        reduction: str,
        seed: int,
    ) -> None:
        self.config, self.tables, self.reduction, self.seed = config, tables, reduction, seed
        self._failure: str | None = None
        self.is_shared = False
        self.rates = self._own_rates = LearningRates(config.num_tags, None, config.schedules)
        self.last_rates: tuple[float, ...] | None = None
        self.changed_step, self.counters = 0, Counters()
        self._frame_steps: dict[str, FrameSteps | None] = {}
        self._observers: list[ref[StepObserver]] = []
        self.gate = Gate(config.gate_num_required or 1 if num_required is None else num_required)
        self.gate.open_into(self._step)
        self.set_clock_offset(0)
        self.pipeline = pipeline
        # Of the next step: the learning rate of every tag, and the counters of its run.
        self._opening: tuple[tuple[float, ...], Counters] = ((), self.counters)

    # ---- observers

    def observe(self, observer: StepObserver) -> None:
        """Register an observer, without keeping it alive. The last is called first before a step, and last after it."""
        with self.gate.still():
            self._observers = [*(get for get in self._observers if get() is not None), ref(observer)]

    @property
    def observers(self) -> list[StepObserver]:
        """The observers still alive, in the order of registration."""
        return [observer for get in self._observers if (observer := get()) is not None]

    # ---- frames

    @property
    def global_step(self) -> int:
        return self.gate.global_step

    def push(self, frame: Frame, rates: LearningRates, counters: Counters) -> tuple[Frame, bool]:
        """Push one frame, and step if that opens the gate. Returns it without bad rows, and whether it was admitted."""
        if (
            frame.num_rows <= SMALL_ROWS
            and (run := as_run(frame)) is not None
            and self.push_run(run, rates, counters, 1)
        ):
            return frame, True
        frame, began = self.reduced(frame), False

        def begin() -> None:
            # Under the gate's lock: another thread's step may fail, and the rates belong to this step.
            nonlocal began
            opens = self.gate.is_due(1)
            if opens:
                self.gate.check_may_open()
            self.check_ready()
            self._opening = rates.at(self.global_step, frame.learning_rates) if opens else (), counters
            began = True

        def audit() -> None:
            # Before the frame is counted as stale: a rejected frame is not counted.
            nonlocal frame
            frame = frame.audited()

        full: CapacityError | None = None
        try:
            with self.gate.still():
                if self.gate.is_due():
                    self.open_early(rates, counters)  # a full table has refused the step
                add = partial(self.pipeline.add, frame, begin)
                try:
                    admitted = self.gate.admit(frame.local_step, add, frame.contributor, audit)
                except CapacityError as error:
                    admitted, full = True, error  # the frame is in the gate, which did not open
                except BadRowsError as error:
                    if error.overflows is None:
                        raise
                    began = False
                    # Under the lock, for the same sums.
                    return self.push(error.repaired(frame), rates, counters)
                counters.count(frame, admitted)
                for observer in self.observers:
                    observer.frame_applied(frame, admitted, counters)
        except BadRowsError:
            pass
        except BaseException as error:
            if began:
                self.fail(error)
            raise
        else:
            if full is None:
                return frame, admitted
            raise full
        return self.push(frame.audited(), rates, counters)

    def reduced(self, frame: Frame) -> Frame:
        """Return a frame reduced to the rows of this share. Raises InputError for a bad row in any share."""
        # A stale frame adds to no sum.
        alone = self.gate.num_required == 1 and (frame.local_step is None or not self.gate.is_stale(frame.local_step))
        return self.tables.held.reduced(frame, alone)

    def push_run(self, run: FrameRun, rates: LearningRates, counters: Counters, most: int) -> int:
        """Push the next frames of a run in native code, up to an event. Returns how many entered the gate.

        0: the next frame is an event, and needs ``push``: it is stale, bad or large, its step takes new learning rates,
        or an observer has to see it. most : frames at most
        """
        began = False

        def take() -> int:
            nonlocal began
            began = True
            assert native is not None
            num = self.pipeline.add_run(native, run, most, most_steps, most_changes, rate)
            began = num > 0
            return num

        try:
            with self.gate.still():
                native, values = self._native(run), rates.constant
                if native is None or values is None or self.gate.is_due():
                    return 0
                observers, (most_steps, most_changes) = self.observers, UNLIMITED
                for observer in observers:
                    steps, changes = observer.most_unseen()
                    most_steps, most_changes = min(most_steps, steps), min(most_changes, changes)
                if min(most, most_steps, most_changes) <= 0:
                    return 0
                self.check_ready()
                rate = self.tables.rate_of(run.table, values)
                if not (num := self.gate.admit_run(take)):
                    return 0
                passed = Passed(run, run.next, run.next + num, native.ids, native.seconds, counters)
                counters.count_run(passed.num_rows, num, native.num_steps)
                if native.num_steps:
                    counters.held_bytes = max(counters.held_bytes, self.pipeline.nbytes + native.more_bytes)
                    self.changed_step, self.last_rates = self.global_step, values
                    self._count_not_finite(counters)
                for observer in observers:
                    observer.frames_passed(passed)
                run.next = passed.stop
                return num
        except BaseException as error:
            if began:
                self.fail(error)
            raise

    def take_in(self, frame: Frame, learning_rates: Rates) -> bool:
        """Push one frame that belongs to no run. Returns False if it was stale."""
        self.check_ready()
        rates = self._own_rates
        if learning_rates is not None:
            rates = LearningRates(self.config.num_tags, learning_rates, self.config.schedules)
        self.rates = rates.complete()
        return self.push(frame, rates, self.counters)[1]

    def open_early(self, rates: LearningRates, counters: Counters) -> bool:
        """Open the gate for the buffered frames. Returns False if there are none. Raises CapacityError, as ``push``."""
        with self.gate.still():
            self.check_ready()
            if not self.gate.num_accumulated:
                return False
            self.gate.check_may_open()
            self._opening = rates.at(self.global_step, self.pipeline.last_rates), counters
            with self._whole():
                return self.gate.open_early()

    def sharing_errors(self) -> AbstractContextManager[None]:
        """Return a context whose error the other processes of a mesh raise too."""
        return nullcontext()

    def rounds(self, frames: Iterator[T], rates: LearningRates, counters: Counters) -> Iterator[T]:
        """Return the frames of a run, each of which the caller pushes, with the rounds of other processes."""
        return frames

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

    # ---- tables

    @contextmanager
    def still(self) -> Iterator[None]:
        """Keep frames out and tables unchanged while in the context. Raises StateError as ``check_whole``."""
        with self.gate.still():
            self.check_whole()
            yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep tables unchanged while their rows are read on the host. Raises StateError as ``check_readable``."""
        with self.gate.still() if self.is_forked else self.still():
            self.check_readable()
            yield

    def load(self, write: Callable[[], object], ids: Mapping[str, Int64 | None]) -> None:
        """Set rows of tables. write : sets them; if it raises, the engine fails; ids : of each table, None: all"""
        with self.still(), self._whole():
            for observer in reversed(self.observers):
                observer.before_load()
            try:
                write()
            except CapacityError:
                for observer in self.observers:
                    observer.load_refused()
                raise
            for observer in self.observers:
                for name, of_table in ids.items():
                    observer.loaded(name, of_table)
            self.tables.dynamic.forget_changes()

    def roll_back(self, replace: Callable[[], Mapping[str, Int64]], clock_offset: int, time: int | None) -> int:
        """Step forward to another state of the tables, and drop the frames in the gate. Returns their number.

        replace : replaces rows and keys, and returns the ids of the changed ones; if it raises, the engine fails
        clock_offset, time : of the other state, at the next step
        """
        with self.still():
            gate = self.gate
            state, num_frames = gate.get_state(), gate.num_accumulated
            stepped = {**state, "global_step": gate.global_step + 1, "num_accumulated": 0, "contributors": []}
            gate.set_state(stepped, self.pipeline.drain)
            with self._whole():
                for observer in reversed(self.observers):
                    observer.before_load()
                self.pipeline.time = time
                self.set_clock_offset(clock_offset)
                changed = replace()
                if any(len(ids) for ids in changed.values()):
                    self.changed_step = gate.global_step
                for observer in self.observers:
                    for name, ids in changed.items():
                        observer.loaded(name, ids)
                self.tables.dynamic.forget_changes()
        return num_frames

    def set_clock_offset(self, offset: int) -> None:
        """Set ``clock_offset``, before the step that it applies to."""
        self.clock_offset = offset
        if self.tables.dynamic:
            self.gate.steps = range(offset, offset + MAX_TIME + 1)

    def wait(self) -> None:
        """Wait until the devices are done, and raise their errors."""
        with self.still(), self._whole():
            self.tables.wait()

    # ---- failure

    def fail(self, error: BaseException) -> None:
        """Mark the engine as failed: its tables are no longer those of a whole step."""
        if self.is_forked:
            return
        self._failure = f"{type(error).__name__}: {error}"
        for observer in self.observers:
            observer.core_failed(error)

    @property
    def failed(self) -> str | None:
        return self._failure or self._fork_problem

    @property
    def is_forked(self) -> bool:
        """Return whether this process is a fork of the one that created the engine."""
        return self.gate.process != forks.this_process

    @property
    def _fork_problem(self) -> str | None:
        """Return why a fork of the engine's process does not change its tables; None in that process."""
        process = self.gate.process
        if not self.is_forked:
            return None
        if self.is_shared:
            return (
                f"process {process} shares the tables of this engine, and this process is a fork of it; read them with "
                "penstock.Reader, or make a new engine"
            )
        return (
            f"process {process} has the tables of this engine, and this process is a fork of it, which may only look "
            "up rows on the host, as they were at the fork; change and save them there, or make a new engine"
        )

    def check_whole(self) -> None:
        """Raise StateError after a step that failed half way, and in a fork of the process of the engine."""
        if self._failure is None and self.gate.process == forks.this_process:
            return
        if self._failure is not None:
            raise StateError(f"an earlier step failed half way ({self._failure}); make a new engine from saved tables")
        if problem := self._fork_problem:
            raise StateError(problem)

    def check_readable(self) -> None:
        """Raise StateError as ``check_whole``; a fork may read rows on the host, if no step was in progress then."""
        if self._failure is not None or self.is_shared or self.gate.is_torn or not self.tables.are_on_host:
            self.check_whole()

    def check_ready(self) -> None:
        """Raise StateError after a failed step, or ConfigError if the configuration refuses updates."""
        self.check_whole()
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

    def _native(self, run: FrameRun) -> FrameSteps | None:
        """Return the way of the next frames of a run without Python; None if there is none, now or ever."""
        table = run.table
        if run.bounds[run.next + 1] - run.bounds[run.next] > SMALL_ROWS:
            return None
        if table not in self._frame_steps:
            sums = self.pipeline.stores[table].accumulator
            self._frame_steps[table] = self.tables.frame_steps(table, self.gate, sums, self.reduction == "mean")
        return self._frame_steps[table] if not self.gate.num_accumulated or self.pipeline.has_only(table) else None

    # ---- the step

    def _count_not_finite(self, counters: Counters) -> None:
        """Count the rows that a step has made infinite or NaN, and log the first one of the run."""
        result = self.tables.take_not_finite()
        if result is None:
            return
        num_rows, table, key = result
        if not counters.not_finite:
            counters.first_not_finite = f"table '{table}', id {key}"
            report(logging.WARNING, "not_finite", table=table, id=key, global_step=self.global_step)
        counters.not_finite += num_rows

    def _step(self, _: int) -> None:
        rates, counters = self._opening
        counters.held_bytes = max(counters.held_bytes, self.pipeline.nbytes)
        step, observers, dynamic = self.gate.global_step, self.observers, self.tables.dynamic
        if dynamic:
            clock = step - self.clock_offset
            dynamic.plan(lambda name: self.pipeline.stores[name].look(), clock, self.pipeline.time)
        coalesced = dynamic.with_rows(self.pipeline.drain()) if dynamic else self.pipeline.drain()
        for observer in reversed(observers):
            observer.before_step(coalesced)
        if self.tables.apply(coalesced, rates, step):
            self.changed_step = step + 1
        self._count_not_finite(counters)
        for observer in observers:
            observer.after_step(coalesced)
        if dynamic:
            dynamic.forget_changes()
        self.last_rates, counters.steps = rates, counters.steps + 1


def create_core(
    config: EmbeddingConfig,
    tables: TableSet,
    num_required: int | None,
    reduction: str,
    seed: int,
    team: ThreadTeam,
) -> EngineCore:
    """Return the core of an engine: another one where the mesh of its tables spans processes."""
    mean = reduction == "mean"
    stores = {name: store_of(spec, mean, is_share=tables.held.is_share) for name, spec in tables.held.specs.items()}
    if tables.processes is None:
        return EngineCore(config, tables, Pipeline(stores, team), num_required, reduction, seed)
    create: Callable[..., EngineCore] = import_module(PROCESSES["core"]).create_core
    return create(config, tables, stores, num_required, reduction, seed, team)


def checked_reduction(config: Any, mesh: Any, reduction: str | None) -> str:
    """Return the given reduction, else the configuration's, else "mean". Raises ConfigError or UsageError."""
    if not isinstance(config, EmbeddingConfig):
        raise ConfigError(f"config: expected an EmbeddingConfig, got {type(config).__name__}")
    if mesh is not None and not hasattr(mesh, "devices"):
        raise UsageError(f"mesh: expected a jax.sharding.Mesh, got {type(mesh).__name__}")
    reduction = reduction or config.gate_reduction or "mean"
    if reduction not in ("mean", "sum"):
        raise UsageError(f"reduction: expected 'mean' or 'sum', got '{reduction}'")
    return reduction
