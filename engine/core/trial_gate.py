"""The gate of a replay without tables: which frames it would admit, and when it would open."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.gate import Gate
from penstock.core.pipeline import BadRowsError, Pipeline
from penstock.model.frames import Frame


class TrialGate:
    """A gate whose sums nobody applies.

    pipeline : sums the frames between two openings; None: nothing does
    on_open : called at every opening, before the sums are dropped
    """

    def __init__(self, num_required: int, pipeline: Pipeline | None, on_open: Callable[[], object]) -> None:
        self.gate, self.pipeline, self._on_open = Gate(num_required), pipeline, on_open

    def admit(self, frame: Frame) -> tuple[Frame, bool]:
        """Take one frame; ``open`` must follow. Returns it without bad rows, and whether it was admitted, or stale.

        Raises InputError for a bad row.
        """
        if self.gate.is_stale(frame.local_step):
            if self.pipeline is not None:
                frame = frame.audited()
            self.gate.count_stale(frame.local_step, frame.contributor)
            return frame, False
        try:
            if self.pipeline is not None:
                self.pipeline.add(frame)
        except BadRowsError as error:
            return self.admit(error.repaired(frame))
        self.gate.count_contribution(frame.contributor)
        return frame, True

    def open(self, early: bool = False) -> None:
        """Open the gate if it is due. early : also if it only has a frame"""
        if self.gate.num_accumulated if early else self.gate.is_due():
            self.gate.check_may_open()
            self._on_open()
            if self.pipeline is not None:
                self.pipeline.drain()
            self.gate.count_opening()
