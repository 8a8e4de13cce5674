"""The files that a run writes alongside its commits: bad rows and deltas. A commit stores the length of each.

With a checkpoint, a file gets its name only once a commit refers to it: a run that ends before its first commit can be
repeated as if it had never run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.base.filesystem.append_file import IsCommitted
from penstock.io.delta_sink import DeltaWriter
from penstock.io.quarantine import QuarantineWriter

# OpenDeltas: committed state of a delta file, and whether a commit refers to a new one (None: no checkpoint) → writer.
OpenDeltas = Callable[[Mapping[str, Any] | None, IsCommitted], DeltaWriter]
# The kinds of files, by their names in a manifest.
QUARANTINE, DELTAS = "quarantine", "deltas"


class RunFiles:
    """The files of bad rows and of deltas.

    still : returns the context manager in which nothing is committed
    contents : of the last commit, or what ``commit`` has returned

    committed : kind → committed state of the last file of that kind; None: there was none
    bad_rows, deltas : the open files
    """

    def __init__(
        self, still: Callable[[], AbstractContextManager[Any]], contents: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        self._still = still
        self.committed = {kind: contents.get(kind) for kind in (QUARANTINE, DELTAS)}
        self.bad_rows: QuarantineWriter | None = None
        self.deltas: DeltaWriter | None = None

    @property
    def any_new(self) -> bool:
        """Return whether one of the files is new: no commit refers to it yet."""
        return any(file is not None and file.is_new for file in (self.bad_rows, self.deltas))

    def commit(self) -> dict[str, Any]:
        """Flush the files to disk before the commit that refers to them. Return their state for its manifest."""
        for kind, file in ((QUARANTINE, self.bad_rows), (DELTAS, self.deltas)):
            if file is not None:
                self.committed[kind] = file.commit()
        return dict(self.committed)

    @contextmanager
    def open(
        self, quarantine: Path | None, open_deltas: OpenDeltas | None, resume: bool, is_committed: IsCommitted
    ) -> Iterator[None]:
        """Open the files of a run, and close them after the block, in which the run makes its last commit.

        resume : whether to continue the last files from their committed state
        is_committed : returns whether this run has committed yet; None: it has no checkpoint
        """
        if not resume:
            self.committed[QUARANTINE] = None
        deltas, bad_rows = None, None
        with ExitStack() as stack:
            if open_deltas is not None:
                committed = self.committed[DELTAS] if resume else None
                deltas = stack.enter_context(open_deltas(committed, is_committed))
            if quarantine is not None:
                bad_rows = QuarantineWriter(quarantine, self.committed[QUARANTINE], is_committed)
                stack.enter_context(closing(bad_rows))
            self.deltas, self.bad_rows = deltas, bad_rows
            if any((deltas, bad_rows)):
                stack.callback(self._forget)
            yield

    def _forget(self) -> None:
        """Remove the files from later commits. A commit of another thread is over by then, and no longer uses them."""
        with self._still():
            self.bad_rows = self.deltas = None
