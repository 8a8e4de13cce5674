"""The gate of a replay without tables: which frames it would admit, and when it would open."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.core.frame_limits import FrameLimits
from penstock.core.gate import Gate
from penstock.core.pipeline import BadRowsError, Pipeline
from penstock.core.rounds import Rounds
from penstock.model.config.clipping import Limit
from penstock.model.config.specs import TableSpec
from penstock.model.frames import Frame
from penstock.model.frozen_tables import frozen_tables, without_frozen
from penstock.model.gate_policy import GatePolicy
from penstock.model.stats import Counters


class TrialGate:
    """A gate whose sums nobody applies.

    pipeline : sums the frames between two openings; None: nothing does
    on_open : called at every opening, before the sums are dropped
    limit : of the frames of contributors; it needs a pipeline

    turn : the step that takes the last frame that was admitted
    """

    def __init__(
        self,
        policy: GatePolicy,
        pipeline: Pipeline | None,
        on_open: Callable[[], object],
        specs: Sequence[TableSpec] = (),
        limit: Limit | None = None,
    ) -> None:
        self._specs = specs
        self._limits = None if limit is None or pipeline is None else FrameLimits(limit)
        self.gate = Gate(policy.num_required, max_staleness=policy.max_staleness)
        self.turns = None if policy.workers is None else Rounds(policy, self.gate)
        self.pipeline, self._on_open, self.turn = pipeline, on_open, 0

    @property
    def num_pending(self) -> int:
        """Frames that were admitted, and that no opening has taken."""
        return self.gate.num_accumulated if self.turns is None else self.turns.num_pending

    def admit(self, frame: Frame) -> tuple[Frame, bool]:
        """Take one frame; ``open`` must follow. Returns it without bad rows, and whether it was admitted, or stale.

        A frame that the limit leaves out counts as admitted. Raises InputError for a bad row, and for a frame that
        rounds or a frozen table refuse.
        """
        worker, turn, is_stale = 0, self.gate.global_step, self.gate.is_stale(frame.local_step)
        if self.turns is not None:
            worker, turn, is_stale = self.turns.place(frame)
        frame = without_frozen(frame, frozen_tables(self._specs, turn))
        if is_stale:
            if self.pipeline is not None:
                frame = frame.audited()
            self.gate.count_stale(frame.local_step, frame.contributor, turn)
            return frame, False
        if self._limits is not None:
            frame = self._limits.judge(frame.audited())
            if self._limits.leaves_out and self.turns is None:
                self._limits.took(Counters())
                return frame, True
        admitted = self._enter(frame, worker, turn)
        if self._limits is not None:
            self._limits.took(Counters())
        return admitted, True

    def _enter(self, frame: Frame, worker: int, turn: int) -> Frame:
        """Add a frame to the sums, or keep it until its turn. Returns it without bad rows, as it has entered."""
        self.turn = turn
        if self.turns is not None and not self.turns.is_next(worker, turn):
            frame = frame.audited()
            self.turns.wait(worker, turn, frame)
            return frame
        try:
            if self.pipeline is not None:
                self.pipeline.add(frame)
        except BadRowsError as error:
            return self._enter(without_frozen(error.repaired(frame), frozen_tables(self._specs, turn)), worker, turn)
        if self.turns is None:
            self.gate.count_contribution(frame.contributor)
        else:
            self.turns.enter(worker, turn, frame)
        return frame

    def open(self, early: bool = False) -> None:
        """Open the gate as often as it is due. early : then once more, if there is a frame"""
        self._take_turns(False)
        while self.gate.is_due():
            self._open()
            self._take_turns(False)
        if early and self.num_pending:
            if self.turns is not None and (self.turns.first_step or 0) > self.gate.global_step:
                self.gate.global_step, self.gate.num_accumulated = self.turns.first_step or 0, 0
            self._take_turns(True)
            self._open()

    def _open(self) -> None:
        self.gate.check_may_open()
        self._on_open()
        if self.pipeline is not None:
            self.pipeline.drain()
        self.gate.count_opening()
        if self.turns is not None:
            self.turns.opened()

    def _take_turns(self, early: bool) -> None:
        """Take the turns of rounds that can be taken. early : also those of workers without a frame"""
        turns = self.turns
        while turns is not None and not self.gate.is_due():
            if (frame := turns.head()) is not None:
                self._add(frame)
                turns.enter_head()
            elif early or turns.is_absent:
                turns.pass_over(counts=turns.is_absent)
            else:
                return

    def _add(self, frame: Frame) -> None:
        try:
            if self.pipeline is not None:
                self.pipeline.add(frame)
        except BadRowsError as error:
            self._add(error.repaired(frame))
