"""The files that a run writes alongside its commits: bad rows and deltas. A commit says how far each has come.

With a checkpoint a file gets its name only where a commit counts it: a run that ends before its first commit is
repeated as if it had not been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from penstock.io.storage.delta_sink import DeltaWriter
from penstock.io.storage.quarantine import QuarantineWriter

# What a checkpoint counts of a file of deltas, and whether it counts a new one (None: there is no checkpoint) → writer.
IsCounted = Callable[[], bool] | None
OpenDeltas = Callable[[Mapping[str, Any] | None, IsCounted], DeltaWriter]


class RunFiles(NamedTuple):
    """Those of one run, open."""

    bad_rows: QuarantineWriter | None
    deltas: DeltaWriter | None

    @property
    def any_new(self) -> bool:
        """Whether there is one that no commit counts yet."""
        return any(file is not None and file.is_new for file in self)


class CountedFiles:
    """What the commits of an engine count.

    bad_rows, deltas : what the last file of each kind committed; None: there was none
    """

    def __init__(self) -> None:
        self.bad_rows: Mapping[str, int] | None = None
        self.deltas: Mapping[str, Any] | None = None
        self._open = RunFiles(None, None)

    def commit(self) -> dict[str, Any]:
        """Everything written so far is on disk, before the commit that says so. Returns what it says."""
        if self._open.bad_rows is not None:
            self.bad_rows = self._open.bad_rows.commit()
        if self._open.deltas is not None:
            self.deltas = self._open.deltas.commit()
        return {"quarantine": self.bad_rows, "deltas": self.deltas}

    @contextmanager
    def opened(
        self,
        quarantine: Path | None,
        open_deltas: OpenDeltas | None,
        resume: bool,
        counted: bool,
        is_counted: IsCounted,
    ) -> Iterator[RunFiles]:
        """The files of a run: closed when this ends, after its last commit.

        resume : go on with what the last ones committed
        counted : commits are to count them
        is_counted : whether a commit of this run does; None: it has no checkpoint
        """
        bad_rows, deltas = (self.bad_rows, self.deltas) if resume else (None, None)
        if counted:
            self.bad_rows = bad_rows
        with ExitStack() as stack:
            files = RunFiles(
                deltas=None if open_deltas is None else stack.enter_context(open_deltas(deltas, is_counted)),
                bad_rows=None
                if quarantine is None
                else stack.enter_context(closing(QuarantineWriter(quarantine, bad_rows, is_counted))),
            )
            if counted:
                self._open = files
                stack.callback(self._close, files)
            yield files

    def _close(self, files: RunFiles) -> None:
        """Commits count them no more."""
        if self._open is files:
            self._open = RunFiles(None, None)
