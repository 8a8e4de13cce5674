"""A rollback of a table whose rows have all changed, alone and with its commit, next to a commit of as many rows.

The case ``rollback`` of ``penstock bench``. Rollbacks go back and forth between two versions that differ in every row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.bench.contestants import Runner
from penstock.bench.penstock_adapter import Ours, Update
from penstock.bench.workloads import Step


class Work(Ours):
    """A side that calls a function. before : called untimed"""

    def __init__(self, work: Callable[[], object], before: Callable[[], object] = lambda: None) -> None:
        self._work, self._before = work, before

    def prepare(self, steps: Sequence[int]) -> None:
        self._before()

    def run(self, steps: Sequence[int]) -> None:
        self._work()


def rollback_sides(step: Step, threads: int, folder: Path) -> dict[str, Runner]:
    """Return the sides, which share an engine. step : changes every row"""
    table = Update(step.workload, "adagrad", [step], threads)
    engine, versions = table.engine, ["before", "after"]
    for version in versions:
        engine.save(folder / "checkpoint")
        engine.tag(version)
        table.run([0])

    def commit() -> None:
        engine.save(folder / "checkpoint")

    def roll_back() -> None:
        versions.reverse()
        engine.rollback(versions[0])

    def roll_back_and_commit() -> None:
        roll_back()
        commit()

    changed = Work(commit, lambda: table.run([0]))
    return {"penstock": Work(roll_back), "with_commit": Work(roll_back_and_commit), "commit": changed}
