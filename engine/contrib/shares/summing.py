"""Sums of the rows of one frame per id, before they are sent: a left fold in arrival order, as behind a gate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.model.config.specs import TableSpec
from penstock.model.frames import Frame, Rows
from penstock.pyx.accumulator import Accumulator
from penstock.pyx.frame_accumulate import Intake


class FrameSums:
    """Sums frames one by one. This changes no bit if every frame opens the gate, where sums begin anew."""

    def __init__(self, specs: Iterable[TableSpec]) -> None:
        self._intake = Intake()
        self._accumulators = {
            spec.name: Accumulator(
                spec.dim,
                vocabulary_size=spec.vocabulary_size if spec.dynamic is None else None,
                count=False,
                count_rows=True,
            )
            for spec in specs
        }

    def of(self, frame: Frame) -> Mapping[str, tuple[Rows, ...]]:
        """Return the rows of a valid frame, each id once, with the number of raw rows that it is the sum of."""
        intake, tables = self._intake, list(frame.rows)
        intake.begin([self._accumulators[table] for table in tables], [frame.rows[table] for table in tables], 0)
        intake.add(strict=False)
        intake.work()
        intake.end()
        drained = {table: self._accumulators[table].drain() for table in tables}
        return {
            table: tuple(Rows(part.ids, part.sums, counts=part.rows) for part in parts)
            for table, parts in drained.items()
        }
