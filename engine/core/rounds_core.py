"""RoundsCore: how frames enter in rounds, now or in the turn of their worker."""

from __future__ import annotations

from collections import Counter

from penstock.base.errors import ConfigError, InputError, PenstockError
from penstock.core.engine_core import EngineCore
from penstock.core.observers import Context, Pushed
from penstock.core.pipeline import BadRowsError, Pipeline
from penstock.core.rounds import Rounds
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.frames import Frame, FrameRun
from penstock.model.gate_policy import GatePolicy
from penstock.model.learning_rates import Rates
from penstock.rows.table_set import TableSet


class RoundsCore(EngineCore):
    """The core of an engine with rounds, whose gate counts turns."""

    turns: Rounds

    def __init__(
        self,
        config: EmbeddingConfig,
        tables: TableSet,
        pipeline: Pipeline,
        policy: GatePolicy,
        reduction: str,
        seed: int,
    ) -> None:
        super().__init__(config, tables, pipeline, policy, reduction, seed)
        self.turns = Rounds(policy, self.gate)
        self.gate.waits = self.turns.explain
        self._is_stuck = True  # whether turns may be left that could be taken, since a step was refused

    def _push(self, run: FrameRun, context: Context) -> Pushed | None:
        """Push the frame of a run of one, which is reduced, in rounds. None: it has to be audited.

        It is counted now, and enters the sums now or in its turn.
        """
        rounds, frame = self.turns, run.only
        assert frame is not None
        worker, turn, is_stale = rounds.place(frame)  # before anything changes
        if self._is_stuck:
            step = self.gate.global_step
            if (problem := self._advance(context)) is not None:
                return Pushed(run, 0, 0, context, full=problem)
            if self.gate.global_step != step:
                worker, turn, is_stale = rounds.place(frame)
        frame = self._trained(frame, turn)
        if is_stale:
            frame = frame.audited()  # as in EngineCore._push
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
        self._is_stuck = True
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
                    self._is_stuck = False
                    return None
        except PenstockError as error:
            if self.failure.error is not None:
                raise
            return error

    def _rates_of_round(self, context: Context) -> tuple[float, ...]:
        """Return the rates of a step: those of its frames. One without rows, and so without rates, has those before."""
        try:
            return context.rates.at(self.gate.global_step, self.turns.rates)
        except ConfigError:
            if not self.pipeline.is_empty or self.turns.rates is not None:
                raise
            return self.last_rates or (0.0,) * self.config.num_tags

    def _enter_head(self, frame: Frame, context: Context) -> None:
        """Add the frame whose turn it is to the sums. Raises InputError, and changes nothing, if one is not finite."""
        try:
            added = self._added(frame)
        except InputError as error:
            raise self.turns.problem(error) from None
        except BaseException as error:
            self.fail(error)
            raise
        if added.dropped:
            context.counters.dropped.update(added.dropped)
        self.turns.enter_head()

    def contributed(self) -> dict[str, int]:
        with self.gate.still():
            return dict(Counter(super().contributed()) + Counter(self.turns.early_frames()))

    @property
    def num_pending(self) -> int:
        return self.turns.num_pending

    @property
    def held_bytes(self) -> int:
        return super().held_bytes + self.turns.nbytes

    @property
    def _entered(self) -> tuple[int, ...]:
        return self.pipeline.num_added, self.turns.num_early

    def take_in(self, frame: Frame, learning_rates: Rates) -> bool:
        self.check_ready()
        given = self._rates_of(learning_rates)
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

    def _open_early(self, context: Context) -> Pushed:
        gate, rounds = self.gate, self.turns
        self.check_ready()
        self._is_stuck = True  # those of the steps after this one
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

    def _step(self, rates: tuple[float, ...], pushed: Pushed) -> None:
        super()._step(rates, pushed)
        self.turns.opened()
