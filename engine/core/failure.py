"""Failure: why the tables of an engine can change no more, and who may still read them."""

from __future__ import annotations

import penstock.base.forks as forks
from penstock.base.errors import StateError
from penstock.core.gate import Gate
from penstock.rows.table_set import TableSet


class Failure:
    """Whether an engine has failed: a step failed half way, or this process is a fork of the engine's.

    error : of the step; None: none has failed
    is_shared : whether other processes read the rows
    """

    def __init__(self, gate: Gate, tables: TableSet) -> None:
        self._gate, self._tables = gate, tables
        self.error: str | None = None
        self.is_shared = False

    @property
    def reason(self) -> str | None:
        """Why the tables cannot change any more; None: they can."""
        return self.error or (self._fork_problem if self.is_forked else None)

    @property
    def is_forked(self) -> bool:
        """Return whether this process is a fork of the one that created the engine."""
        return self._gate.process != forks.this_process

    @property
    def _fork_problem(self) -> str:
        """Return why a fork of the engine's process does not change its tables."""
        process = self._gate.process
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
        if self.error is not None:
            raise StateError(f"an earlier step failed half way ({self.error}); make a new engine from saved tables")
        if self._gate.process != forks.this_process:
            raise StateError(self._fork_problem)

    def check_readable(self) -> None:
        """Raise StateError as ``check_whole``; a fork may read rows on the host, if no step was in progress then."""
        if self.error is not None or self.is_shared or self._gate.is_torn or not self._tables.are_on_host:
            self.check_whole()
