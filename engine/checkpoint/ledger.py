"""What an engine has applied and written besides its tables: commits record it, and a resumed run continues it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.checkpoint.source_positions import Positions
from penstock.checkpoint.table_changes import TableChange, changes_in
from penstock.io.run_files import RunFiles
from penstock.model.stats import Counters


class Ledger:
    """The frames, counts, files and changes of tables of an engine. ``CheckpointSession`` owns it; others read it.

    files : of the last run; positions : of that run in its sources
    changes : of the tables, so far
    """

    def __init__(self, files: RunFiles, counters: Counters) -> None:
        self.files, self.positions = files, Positions()
        self.changes: list[TableChange] = []
        self._before, self.counters = Counters(), counters

    @property
    def totals(self) -> Counters:
        """Return the counters of all runs, with those before the checkpoint that this engine was restored from."""
        return self._before.plus(self.counters)

    def count_into(self, counters: Counters) -> None:
        """Count into these counters from now on: the totals are those so far plus these."""
        self._before, self.counters = self.totals, counters

    def change(self, trained: Sequence[str], step: int) -> TableChange:
        """Record tables that are trained from a step on."""
        number = self.changes[-1].number + 1 if self.changes else 1
        self.changes.append(TableChange(number, step, trained=trained))
        return self.changes[-1]

    def resume(self, contents: Mapping[str, Any], change: TableChange | None, adds_rows: bool, step: int) -> None:
        """Continue from the contents of a commit.

        change : of its tables since then; adds_rows : whether its readers lack rows of the tables
        step : the global step
        """
        self.positions, self.changes = Positions.from_state(contents["positions"]), changes_in(contents)
        self._before = Counters.from_state(contents["counters"])
        if self.positions.lineage is not None:  # the steps to come are an epoch: the commit may not be the newest one
            self.positions.lineage = self.positions.lineage.started(step, change is not None or adds_rows)
        if change is not None:
            self.changes.append(change)
            self.positions.forget_tables()
