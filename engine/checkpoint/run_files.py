"""The files that a run writes alongside its commits: bad rows and deltas. A commit stores the length of each.

With a checkpoint, a file gets its name only once a commit refers to it: a run that ends before its first commit can be
repeated as if it had never run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from penstock.io.delta_sink import DeltaWriter
from penstock.io.quarantine import QuarantineWriter

# OpenDeltas: committed state of a delta file, and whether a commit refers to a new one (None: no checkpoint) → writer.
IsCommitted = Callable[[], bool] | None
OpenDeltas = Callable[[Mapping[str, Any] | None, IsCommitted], DeltaWriter]


class RunFiles(NamedTuple):
    """The open files of one run."""

    bad_rows: QuarantineWriter | None
    deltas: DeltaWriter | None

    @property
    def any_new(self) -> bool:
        """Return whether one of the files is new: no commit refers to it yet."""
        return any(file is not None and file.is_new for file in self)


class CountedFiles:
    """The files that the commits of an engine refer to.

    still : returns the context manager in which nothing is committed

    bad_rows, deltas : committed state of the last file of each kind; None: there was none
    """

    def __init__(self, still: Callable[[], AbstractContextManager[Any]]) -> None:
        self._still = still
        self.bad_rows: Mapping[str, int] | None = None
        self.deltas: Mapping[str, Any] | None = None
        self._open = RunFiles(None, None)

    def commit(self) -> dict[str, Any]:
        """Flush the files to disk before the commit that refers to them. Return their state for its manifest."""
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
        is_committed: IsCommitted,
    ) -> Iterator[RunFiles]:
        """Open the files of a run, and close them after the block, in which the run makes its last commit.

        resume : whether to continue the last files from their committed state
        counted : whether commits refer to these files
        is_committed : returns whether this run has committed yet; None: it has no checkpoint
        """
        bad_rows, deltas = (self.bad_rows, self.deltas) if resume else (None, None)
        if counted:
            self.bad_rows = bad_rows
        with ExitStack() as stack:
            files = RunFiles(
                deltas=None if open_deltas is None else stack.enter_context(open_deltas(deltas, is_committed)),
                bad_rows=None
                if quarantine is None
                else stack.enter_context(closing(QuarantineWriter(quarantine, bad_rows, is_committed))),
            )
            if counted:
                self._open = files
                if any(files):
                    stack.callback(self._close, files)
            yield files

    def _close(self, files: RunFiles) -> None:
        """Remove the files from later commits. A commit of another thread is over by then, and no longer uses them."""
        with self._still():
            if self._open is files:
                self._open = RunFiles(None, None)
