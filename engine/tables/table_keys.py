"""The dynamic tables of an engine: what a step decides about the keys of all of them, and their counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from penstock.frames import Coalesced, Int64
from penstock.stats import KeyReport
from penstock.tables.dynamic_table import DynamicTable
from penstock.tables.initializers import Run

Look = Callable[[str], tuple[list[Coalesced], Int64 | None]]
_ROWS_AT_ONCE = 1 << 16


class TableKeys(dict[str, DynamicTable]):
    """The dynamic tables of one engine by name; it may have none."""

    # ---- a step or a load

    def plan(self, look: Look, step: int, time: int | None) -> None:
        """Decide which keys get and lose rows in a step. look : ``TableStore.look`` of a table

        time : the largest of any frame so far, if frames have times. Raises CapacityError; nothing has changed then.
        """
        try:
            for name, table in self.items():
                table.plan(*look(name), table.clock_at(step, time), step)
        except BaseException:
            for table in self.values():
                table.drop_plan()
            raise

    def with_rows(self, coalesced: dict[str, list[Coalesced]]) -> dict[str, list[Coalesced]]:
        """Return the sums of the planned step by row, where they were by key."""
        for name, table in self.items():
            coalesced[name] = table.with_rows(coalesced[name])
        return coalesced

    def carry_out(self) -> None:
        """Carry the plans out: new keys get their initial rows. The updates of the step follow."""
        for table in self.values():
            table.carry_out()

    def have_lost(self) -> bool:
        """Return whether the step or load has removed a key."""
        return any(table.num_removed for table in self.values())

    def forget_changes(self) -> None:
        """End a step or a load."""
        for table in self.values():
            table.forget_changes()

    def run_on(self, run: Run) -> None:
        """Use these threads. run : runs tasks"""
        for table in self.values():
            table.run = run

    # ---- counts

    def start_counting(self) -> None:
        """Reset the counts of the previous run."""
        for table in self.values():
            table.start_counting()

    def expired_waiting(self, still: Callable[[], AbstractContextManager[object]]) -> dict[str, int]:
        """Return how many expired keys of every table still have a row, for which all entries are read.

        still : keeps frames out while some shards are read
        """
        counts = dict.fromkeys(self, 0)
        for name, table in self.items():
            directory = table.directory
            at_once = max(1, _ROWS_AT_ONCE * directory.num_shards // directory.capacity)
            for first in range(0, directory.num_shards, at_once):
                with still():
                    counts[name] += directory.num_expired_waiting(first, at_once)
        return counts

    def reports(self, expired_waiting: Mapping[str, int]) -> dict[str, KeyReport]:
        """Return the keys of every table now, and what became of keys since ``start_counting``."""
        return {name: table.report(expired_waiting[name]) for name, table in self.items()}
