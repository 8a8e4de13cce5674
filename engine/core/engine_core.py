"""EngineCore: tables, gate, pipeline, learning rates, and whether a step failed half way; it imports no observer.

``push`` admits a frame, opens the gate and steps the tables, all under the gate's lock, the only lock of an engine.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any, TypeVar
from weakref import ref

import penstock.base.forks as forks
from penstock.base.errors import CapacityError, ConfigError, InputError, PenstockError, StateError, UsageError
from penstock.base.events import report
from penstock.base.integrations import PROCESSES
from penstock.base.threads import ThreadTeam
from penstock.core.frame_limits import FrameLimits
from penstock.core.freshness import Freshness
from penstock.core.gate import Gate
from penstock.core.gradient_norms import StepNorms
from penstock.core.observers import ALL_UNSEEN, Context, Pushed, StepObserver
from penstock.core.pipeline import BadRowsError, Pipeline, store_of
from penstock.core.rounds import Rounds
from penstock.model.config.clipping import check_no_norms
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.frames import MAX_TIME, NO_FRAMES, Frame, FrameRun, Int64
from penstock.model.frozen_tables import without_frozen
from penstock.model.gate_policy import GatePolicy
from penstock.model.learning_rates import LearningRates, Rates
from penstock.model.stats import Counters, TableReport
from penstock.pyx.frame_steps import SMALL_ROWS, FrameSteps
from penstock.rows.derived_slots import DerivedSlots
from penstock.rows.table_set import TableSet

T = TypeVar("T")


class EngineCore:
    """The tables of an engine and the only path of a gradient into them.

    tables : on the devices; pipeline : sums the frames of a step
    reduction : "mean" or "sum"
    policy : what opens the gate

    gate : counts frames and opens; ``gate.still()`` is the lock of the engine
    rates : learning rates of the last run or apply, used by a flush; last_rates : of every tag at the last step
    changed_step : the global step after the last step that changed a row
    clock_offset : the global step less the clock of dynamic tables that count steps; 0 until a rollback
    failed : why the tables cannot change any more: the error of a step that failed half way, or a fork; else None
    is_shared : whether other processes read the rows
    counters : of frames that belong to no run
    freshness : of the frames that steps have applied
    norms, limits : of gradients; None: the configuration has none
    """

    def __init__(
        self,
        config: EmbeddingConfig,
        tables: TableSet,
        pipeline: Pipeline,
        policy: GatePolicy,
        reduction: str,
        seed: int,
    ) -> None:
        self.config, self.tables, self.reduction, self.seed = config, tables, reduction, seed
        self._failure: str | None = None
        self.is_shared = False
        self.rates = self._own_rates = LearningRates(config.num_tags, None, config.schedules)
        self.last_rates: tuple[float, ...] | None = None
        self.changed_step, self.counters, self.freshness = 0, Counters(), Freshness()
        self._frame_steps: dict[str, FrameSteps | None] = {}
        self._observers: list[ref[StepObserver]] = []
        counted = "frames" if policy.workers is None else "turns"
        self.policy = policy
        self.gate = Gate(policy.num_required, max_staleness=policy.max_staleness, counted=counted)
        self.turns = None if policy.workers is None else Rounds(policy, self.gate)
        if self.turns is not None:
            self.gate.waits = self.turns.explain
        self.limits = None if config.limit is None else FrameLimits(config.limit)
        self.norms = None if config.clip is None and self.limits is None else StepNorms(config.clip, pipeline.team)
        # Native code counts no frame by its worker, or by how late it is, and knows no norms.
        self.counts_native = self.turns is None and not policy.max_staleness and self.norms is None
        self.set_clock_offset(0)
        self.pipeline = pipeline

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

    def push(self, run: FrameRun, context: Context) -> Pushed:
        """Push the next frames of a run, as many as may enter together, and step where they open the gate.

        Returns what has happened to them. Raises InputError for a bad row in the next frame: nothing of it has entered.
        """
        if self.counts_native and (plain := run.plain(SMALL_ROWS)) is not None:
            pushed = self.gate.change(self._guarded, self._push_native, plain, context)
            if pushed is not None:
                run.next = max(run.next, pushed.stop)
                return pushed
        frame = self.reduced(run.frame())
        if self.limits is not None:
            frame = frame.audited()
        push = self._push if self.turns is None else self._push_in_turn
        while (pushed := self.gate.change(self._guarded, push, run.alone(frame), context)) is None:
            frame = self.reduced(frame.audited())  # without the lock
        run.next += pushed.stop
        return pushed

    def reduced(self, frame: Frame) -> Frame:
        """Return a frame reduced to the rows of this share, without those of frozen tables.

        Raises InputError for a bad row in any share, and for rows of a table that refuses gradients.
        """
        # Those that are frozen up to a step: ``_trained``, under the lock. A stale frame adds to no sum.
        alone = self.gate.num_required == 1 and (frame.local_step is None or not self.gate.is_stale(frame.local_step))
        held, frozen = self.tables.held, self.tables.frozen
        if not held.is_share or frame.fingerprint is not None:
            return without_frozen(held.reduced(frame, alone), frozen)
        # Every share counts all rows that are dropped, as it counts bad ones.
        whole = without_frozen(frame, frozen)
        part = held.reduced(replace(whole, fingerprint=None), alone)
        return part if whole.fingerprint is None else replace(part, fingerprint=whole.fingerprint)

    def _guarded(
        self, push: Callable[[FrameRun, Context], Pushed | None], run: FrameRun, context: Context
    ) -> Pushed | None:
        """Call a way of pushing, and fail the engine on an error after a frame has begun to enter."""
        before = self._entered
        try:
            return push(run, context)
        except BaseException as error:
            if not self.pipeline.is_whole or self._entered != before:
                self.fail(error)
            raise

    @property
    def _entered(self) -> tuple[int, int]:
        """Return what changes with every frame that enters the sums, or waits for its turn."""
        return self.pipeline.num_added, 0 if self.turns is None else self.turns.num_early

    def _push_native(self, run: FrameRun, context: Context) -> Pushed | None:
        """Push the next plain frames in native code, up to an event. None: none has entered, as the next is an event.

        It is stale, bad or large, its step takes new learning rates, or an observer has to see its step.
        """
        gate, pipeline, native, values = self.gate, self.pipeline, self._native(run.table), context.rates.constant
        if native is None or values is None or gate.is_due():
            return None
        most_steps, most_changes = ALL_UNSEEN
        if self.tables.next_thaw is not None:
            most_steps = self.tables.next_thaw - gate.global_step
        for observer in self.observers:
            steps, changes = observer.most_unseen()
            most_steps, most_changes = min(most_steps, steps), min(most_changes, changes)
        if min(context.most, most_steps, most_changes) <= 0:
            return None
        self.check_ready()
        assert run.blocks is not None
        limits = context.most, most_steps, most_changes, self.tables.rate_of(run.table, values)
        first, pipeline.is_whole = run.next, False
        try:
            num = native.take(run.blocks, run.bounds, run.steps, first, *limits, pipeline.num_added + 1)
        except MemoryError:  # for several frames; nothing has changed
            num = 0
        if not num:
            pipeline.is_whole = True
            return None
        pipeline.added(num, None if run.steps is None else int(run.steps[first + num - 1]))
        gate.count_native(num, native.num_steps)
        pushed, counters = Pushed(run, first, first + num, context), context.counters
        counters.rows, counters.frames = counters.rows + pushed.num_rows, counters.frames + num
        if native.num_steps:
            pushed.changed, pushed.seconds = {run.table: (native,)}, native.seconds
            counters.held_bytes = max(counters.held_bytes, pipeline.nbytes + native.more_bytes)
            counters.steps += native.num_steps
            self.changed_step, self.last_rates = gate.global_step, values
            self._count_not_finite(counters)
        self._notify(pushed)
        return pushed

    def _push(self, run: FrameRun, context: Context) -> Pushed | None:
        """Push the frame of a run of one, which is reduced. None: it has a bad row, and was not audited."""
        gate, frame = self.gate, run.only
        assert frame is not None
        try:
            if gate.is_due():
                self._open_early(context)  # a full table has refused the step
        except CapacityError as error:
            return Pushed(run, 0, 0, context, full=error)
        try:
            values: tuple[float, ...] = ()
            if self.tables.next_thaw is not None:
                frame = self._trained(frame, gate.global_step)
                run = run.alone(frame)
            if gate.is_stale(frame.local_step):
                run = run.alone(frame.audited())  # before it is counted as stale: a rejected frame is not counted
            else:
                self.check_ready()
                if self.limits is not None:
                    frame = self.limits.judge(frame)
                    run = run.alone(frame)
                    if self.limits.leaves_out:
                        return self._left_out(run, context)
                if gate.is_due(1):
                    # Under the gate's lock: another thread's step may fail, and the rates belong to this step.
                    gate.check_may_open()
                    values = context.rates.at(gate.global_step, frame.learning_rates)
            return self._enter(run, values, context)
        except BadRowsError:
            return None

    def _enter(self, run: FrameRun, values: tuple[float, ...], context: Context) -> Pushed:
        """Add the frame of a run of one to the sums, unless it is stale, count it, and step if the gate is due then.

        values : the learning rates of that step. Raises BadRowsError for a bad row of a frame that was not audited
        """
        gate, frame = self.gate, run.only
        assert frame is not None
        is_stale = gate.is_stale(frame.local_step)
        if is_stale:
            gate.count_stale(frame.local_step, frame.contributor)
        else:
            frame = self._added(frame)
            if self.limits is not None:
                self.limits.took(context.counters)
            gate.count_contribution(frame.contributor, frame.local_step)
            context.counters.late += frame.local_step is not None and frame.local_step < gate.global_step
        pushed = Pushed(run.alone(frame), 0, 1, context, is_stale)
        if gate.is_due():
            try:
                self._step(values, pushed)
            except CapacityError as error:
                pushed.full = error  # the frame is in the gate, which did not open
        context.counters.count(frame, not is_stale)
        self._notify(pushed)
        return pushed

    def _left_out(self, run: FrameRun, context: Context) -> Pushed:
        """Count the frame of a run of one, which its contributor's limit leaves out: the gate does not."""
        assert self.limits is not None
        assert run.only is not None
        self.limits.took(context.counters)
        context.counters.count(run.only)
        pushed = Pushed(run, 0, 1, context)
        self._notify(pushed)
        return pushed

    def _added(self, frame: Frame) -> Frame:
        """Add a frame to the sums, without rows at which a sum leaves the finite range. Returns it.

        Raises BadRowsError for a bad row of a frame that was not audited, InputError where such rows are errors.
        """
        while True:
            try:
                self.pipeline.add(frame)
                return frame
            except BadRowsError as error:
                if error.overflows is None:
                    raise
                frame = self.reduced(error.repaired(frame))

    # ---- rounds

    def _push_in_turn(self, run: FrameRun, context: Context) -> Pushed | None:
        """Push the frame of a run of one, which is reduced, in rounds. None: it has to be audited.

        It is counted now, and enters the sums now or in its turn.
        """
        rounds, frame = self.turns, run.only
        assert rounds is not None
        assert frame is not None
        worker, turn, is_stale = rounds.place(frame)  # before anything changes
        step = self.gate.global_step
        if (problem := self._advance(context)) is not None:
            return Pushed(run, 0, 0, context, full=problem)
        if self.gate.global_step != step:
            worker, turn, is_stale = rounds.place(frame)
        frame = self._trained(frame, turn)
        if is_stale:
            frame = frame.audited()  # as in _push
            assert frame.local_step is not None
            self.gate.count_stale(frame.local_step, frame.contributor, turn)
            rounds.warn_of_second(frame, turn)
        else:
            self.check_ready()
            if self.limits is not None:
                frame = self.limits.judge(frame)
            enters = rounds.is_next(worker, turn)
            if enters:
                try:
                    frame = self._added(frame)
                    rounds.enter(worker, turn, frame)
                except BadRowsError:
                    return None
                except InputError:  # a sum is not finite: this ends the step, as if the frame had come early
                    enters = False
            if not enters:
                if frame.audit is not None:
                    try:
                        self.pipeline.check(frame)
                    except BadRowsError:
                        return None
                rounds.wait(worker, turn, frame)
            if self.limits is not None:
                self.limits.took(context.counters)
        pushed = Pushed(run.alone(frame), 0, 1, context, is_stale)
        context.counters.count(frame, not is_stale)
        self._notify(pushed)
        pushed.full = self._advance(context)
        return pushed

    def _advance(self, context: Context) -> PenstockError | None:
        """Take all turns that can be taken, and step where all are. Returns the error that prevents the next one."""
        rounds, gate = self.turns, self.gate
        assert rounds is not None
        try:
            while True:
                if gate.is_due():
                    gate.check_may_open()
                    self._open(self._rates_of_round(context), context)
                elif (frame := rounds.head()) is not None:
                    self._enter_head(frame, context)
                elif rounds.is_absent:
                    rounds.pass_over()
                else:
                    return None
        except PenstockError as error:
            if self._failure is not None:
                raise
            return error

    def _rates_of_round(self, context: Context) -> tuple[float, ...]:
        """Return the rates of a step: those of its frames. One without rows, and so without rates, has those before."""
        assert self.turns is not None
        try:
            return context.rates.at(self.gate.global_step, self.turns.rates)
        except ConfigError:
            if not self.pipeline.is_empty or self.turns.rates is not None:
                raise
            return self.last_rates or (0.0,) * self.config.num_tags

    def _enter_head(self, frame: Frame, context: Context) -> None:
        """Add the frame whose turn it is to the sums. Raises InputError, and changes nothing, if one is not finite."""
        assert self.turns is not None
        try:
            added = self._added(frame)
        except InputError as error:
            raise self.turns.problem(error) from None
        except BaseException as error:
            self.fail(error)
            raise
        context.counters.dropped.update(added.dropped)
        self.turns.enter_head()

    def contributed(self) -> dict[str, int]:
        """Return the frames that the gate holds, by the name of their contributor."""
        with self.gate.still():
            counts = Counter(self.gate.contributed())
            return dict(counts if self.turns is None else counts + Counter(self.turns.early_frames()))

    @property
    def num_pending(self) -> int:
        """Frames that were counted, and that no step has applied."""
        return self.gate.num_accumulated if self.turns is None else self.turns.num_pending

    def take_in(self, frame: Frame, learning_rates: Rates) -> bool:
        """Push one frame that belongs to no run. Returns False if it was stale."""
        self.check_ready()
        given = self._own_rates
        if learning_rates is not None:
            given = LearningRates(self.config.num_tags, learning_rates, self.config.schedules)
        given.complete()
        if self.turns is None:
            self.rates = given
            return not self.push(FrameRun.of(frame), Context(given, self.counters)).check().is_stale
        self.rates = self._own_rates
        with self.gate.still():
            self.turns.check_room(frame)
            if learning_rates is not None:  # those of the step that takes the frame, whichever frame opens the gate
                turn = self.turns.place(frame)[1]
                frame = frame.with_rates(given.at(turn, frame.learning_rates))
            pushed = self.push(FrameRun.of(frame), Context(self._own_rates, self.counters))
            if isinstance(pushed.full, InputError):
                self.turns.refuse_head()  # nobody could take it away
            return not pushed.check().is_stale

    def open_early(self, context: Context) -> Pushed:
        """Open the gate for the buffered frames, if there are any. Raises CapacityError if a table has no room."""
        with self.gate.still():
            self.check_ready()
            if not (self.gate.num_accumulated if self.turns is None else self.turns.num_pending):
                return Pushed(NO_FRAMES, 0, 0, context)
            return self.gate.change(self._open_early, context)

    def _open_early(self, context: Context) -> Pushed:
        gate, rounds = self.gate, self.turns
        self.check_ready()
        if rounds is None:
            gate.check_may_open()
            return self._open(context.rates.at(gate.global_step, self.pipeline.last_rates), context)
        assert rounds.first_step is not None
        if rounds.first_step > gate.global_step:  # no worker has a frame for the steps before
            gate.global_step, gate.num_accumulated = rounds.first_step, 0
            self._thaw()
        gate.check_may_open()
        rates = self._rates_of_round(context)  # before a turn is passed over
        while not gate.is_due():  # the workers without a frame have no turn in this step
            if (frame := rounds.head()) is None:
                rounds.pass_over(counts=rounds.is_absent)
            else:
                self._enter_head(frame, context)
        return self._open(rates, context)

    def _open(self, values: tuple[float, ...], context: Context) -> Pushed:
        """Open the gate without a frame."""
        pushed = Pushed(NO_FRAMES, 0, 0, context)
        with self._whole():
            self._step(values, pushed)
            self._notify(pushed)
        return pushed

    def sharing_errors(self) -> AbstractContextManager[None]:
        """Return a context whose error the other processes of a mesh raise too."""
        return nullcontext()

    def rounds(self, frames: Iterator[T], context: Context) -> Iterator[T]:
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

    def norm_reports(self) -> dict[str, Any]:
        """Return the norms that a Report and metrics have; nothing if the configuration has none. Under the lock"""
        of_tables = {} if self.norms is None else {"gradient_norms": dict(self.norms.of_tables)}
        return of_tables if self.limits is None else {**of_tables, "contributor_norms": self.limits.medians()}

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
        return self._failure or (self._fork_problem if self.is_forked else None)

    @property
    def is_forked(self) -> bool:
        """Return whether this process is a fork of the one that created the engine."""
        return self.gate.process != forks.this_process

    @property
    def _fork_problem(self) -> str:
        """Return why a fork of the engine's process does not change its tables."""
        process = self.gate.process
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
        if self._failure is not None:
            raise StateError(f"an earlier step failed half way ({self._failure}); make a new engine from saved tables")
        if self.gate.process != forks.this_process:
            raise StateError(self._fork_problem)

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

    def _native(self, table: str) -> FrameSteps | None:
        """Return the way of a table's frames without Python; None if there is none, now or ever."""
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
            report("not_finite", table=table, id=key, global_step=self.global_step)
        counters.not_finite += num_rows

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
        if self.turns is not None:
            self.turns.opened()

    @property
    def held_bytes(self) -> int:
        """Bytes of the sums, and of the frames that wait for their turn."""
        return self.pipeline.nbytes + (0 if self.turns is None else self.turns.nbytes)

    def _notify(self, pushed: Pushed) -> None:
        for observer in self.observers:
            observer.pushed(pushed)
        pushed.changed = {}  # the sums' memory is soon reused
        if pushed.seconds and self.tables.dynamic:
            self.tables.dynamic.forget_changes()
        self._thaw()

    # ---- tables that are frozen up to a step

    def _trained(self, frame: Frame, step: int) -> Frame:
        """Return a frame without the rows of tables that are frozen in the step that takes it, and not later."""
        return frame if self.tables.next_thaw is None else without_frozen(frame, self.tables.frozen_before(step))

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


def create_core(
    config: EmbeddingConfig,
    tables: TableSet,
    policy: GatePolicy,
    reduction: str,
    seed: int,
    team: ThreadTeam,
) -> EngineCore:
    """Return the core of an engine: another one where the mesh of its tables spans processes."""
    if policy.workers is not None and tables.held.is_share:
        raise ConfigError("rounds: an engine with a share of the rows takes the frames of its job; use one engine")
    if tables.held.is_share:
        check_no_norms(config.clip, config.limit, "an engine with a share of the rows")
    if tables.processes is not None:
        check_no_norms(config.clip, config.limit, "a mesh of several processes")
    mean = reduction == "mean"
    stores = {name: store_of(spec, mean, is_share=tables.held.is_share) for name, spec in tables.held.specs.items()}
    if tables.processes is None:
        return EngineCore(config, tables, Pipeline(stores, team), policy, reduction, seed)
    create: Callable[..., EngineCore] = import_module(PROCESSES["core"]).create_core
    return create(config, tables, stores, policy, reduction, seed, team)


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
