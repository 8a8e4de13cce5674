"""The gate of a replay with the rows that wait behind it, and no tables: what every opening will contain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from penstock.base.threads import ThreadTeam
from penstock.core.gate import Gate
from penstock.core.pipeline import BadRowsError, Pipeline, TableStore
from penstock.model.frames import Frame


class IdGate:
    """A gate over a pipeline.

    stores : by table, of no floats where only ids are read
    opened : called at every opening, before the pipeline is drained
    """

    def __init__(
        self, stores: Mapping[str, TableStore], num_required: int, threads: int | None, opened: Callable[[], None]
    ) -> None:
        self.pipeline = Pipeline(stores, ThreadTeam(threads))
        self.gate = Gate(num_required)
        self.gate.open_into(self._open)
        self._opened = opened

    def push(self, frame: Frame) -> tuple[Frame, bool]:
        """Push one frame. Returns it without bad rows, and whether it was admitted.

        Raises InputError for a bad row.
        """

        if self.gate.is_stale(frame.local_step):
            frame = frame.audited()
        try:
            admitted = self.gate.admit(frame.local_step, partial(self.pipeline.add, frame), frame.contributor)
        except BadRowsError as error:
            return self.push(error.repaired(frame))
        return frame, admitted

    def _open(self, _: int) -> None:
        self._opened()
        self.pipeline.drain()
