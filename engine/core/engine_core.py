"""EngineCore: how frames enter the sums, and open the gate.

``push`` admits a frame, opens the gate and steps the tables, all under the gate's lock. In turns: rounds_core.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from penstock.base.errors import CapacityError
from penstock.core.frame_limits import FrameLimits
from penstock.core.gate import Gate
from penstock.core.gradient_norms import StepNorms
from penstock.core.observed_tables import ObservedTables
from penstock.core.observers import ALL_UNSEEN, Context, Pushed
from penstock.core.pipeline import BadRowsError, Pipeline
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.frames import NO_FRAMES, Frame, FrameRun
from penstock.model.frozen_tables import without_frozen
from penstock.model.gate_policy import GatePolicy
from penstock.model.learning_rates import LearningRates, Rates
from penstock.model.stats import Counters
from penstock.pyx.frame_steps import SMALL_ROWS
from penstock.rows.table_set import TableSet

T = TypeVar("T")


class EngineCore(ObservedTables):
    """The tables of an engine and the only path of a gradient into them.

    policy : what opens the gate

    counters : of frames that belong to no run
    limits : of the norms of frames; None: the configuration has none
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
        self.policy, self.seed, self.counters = policy, seed, Counters()
        self.limits = None if config.limit is None else FrameLimits(config.limit)
        norms = None if config.clip is None and self.limits is None else StepNorms(config.clip, pipeline.team)
        # Native code counts no frame by its worker, or by how late it is, and knows no norms.
        self.counts_native = policy.workers is None and not policy.max_staleness and norms is None
        counted = "frames" if policy.workers is None else "turns"
        gate = Gate(policy.num_required, max_staleness=policy.max_staleness, counted=counted)
        super().__init__(config, tables, pipeline, gate, norms, reduction)
        self._own_rates = self.rates

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
        while (pushed := self.gate.change(self._guarded, self._push, run.alone(frame), context)) is None:
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
    def _entered(self) -> tuple[int, ...]:
        """Return what changes with every frame that enters the sums, or waits for its turn."""
        return (self.pipeline.num_added,)

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

    def _trained(self, frame: Frame, step: int) -> Frame:
        """Return a frame without the rows of tables that are frozen in the step that takes it, and not later."""
        return frame if self.tables.next_thaw is None else without_frozen(frame, self.tables.frozen_before(step))

    def contributed(self) -> dict[str, int]:
        """Return the frames that the gate holds, by the name of their contributor."""
        return self.gate.contributed()

    def take_in(self, frame: Frame, learning_rates: Rates) -> bool:
        """Push one frame that belongs to no run. Returns False if it was stale."""
        self.check_ready()
        self.rates = self._rates_of(learning_rates)
        return not self.push(FrameRun.of(frame), Context(self.rates, self.counters)).check().is_stale

    def _rates_of(self, learning_rates: Rates) -> LearningRates:
        """Return the learning rates of a frame that belongs to no run. learning_rates : None: the configuration's"""
        given = self._own_rates
        if learning_rates is not None:
            given = LearningRates(self.config.num_tags, learning_rates, self.config.schedules)
        given.complete()
        return given

    def open_early(self, context: Context) -> Pushed:
        """Open the gate for the buffered frames, if there are any. Raises CapacityError if a table has no room."""
        with self.gate.still():
            self.check_ready()
            if not self.num_pending:
                return Pushed(NO_FRAMES, 0, 0, context)
            return self.gate.change(self._open_early, context)

    def _open_early(self, context: Context) -> Pushed:
        self.check_ready()
        self.gate.check_may_open()
        return self._open(context.rates.at(self.global_step, self.pipeline.last_rates), context)

    def rounds(self, frames: Iterator[T], context: Context) -> Iterator[T]:
        """Return the frames of a run, each of which the caller pushes, with the rounds of other processes."""
        return frames

    def norm_reports(self) -> dict[str, Any]:
        """Return the norms that a Report and metrics have; nothing if the configuration has none. Under the lock"""
        of_tables = {} if self.norms is None else {"gradient_norms": dict(self.norms.of_tables)}
        return of_tables if self.limits is None else {**of_tables, "contributor_norms": self.limits.medians()}
