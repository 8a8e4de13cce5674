"""One commit on its way to disk, on a thread of its own: records in, a data file and its manifest out.

What waits to be written is bounded: whoever brings more waits. The thread touches no table and takes
no lock but its own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.checkpoint.folder import Commit, DataFile, Folder, new_digest
from penstock.checkpoint.records import MAGIC, Record
from penstock.io import durable

# Copies of rows that wait for the disk: the most memory that saving takes beside the marks.
WAITING_BYTES = 32 << 20


class Late(NamedTuple):
    """A record that is made when its turn has come."""

    num_bytes: int
    record: Callable[[], Record]


class CommitWriter:
    """Writes commit ``draft`` with one more data file, whose records ``put`` brings; ``close`` makes it a commit.

    draft : its files are those before the new one
    keep : commits that stay in the folder when this one is there

    Where writing fails, the next call raises what happened, and the folder is as it was.
    """

    part = ""  # of the rows, as ``DataFile.part`` names it

    def __init__(self, folder: Folder, draft: Commit, keep: int) -> None:
        self._folder, self._draft, self._keep = folder, draft, keep
        self._parent = next((file.digest for file in reversed(draft.files) if file.part == self.part), None)
        begin = Record("begin", {"parent": self._parent})
        self._records: deque[Late | None] = deque([Late(0, lambda: begin)])
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._cancelled = False
        self.commit: Commit | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-checkpoint", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """The commit is on disk, or has failed, which ``result`` says."""
        return not self._thread.is_alive()

    @property
    def has_room(self) -> bool:
        """Whether ``put`` would not wait."""
        return self._waiting_bytes < WAITING_BYTES or self._error is not None

    def put(self, num_bytes: int, record: Callable[[], Record]) -> None:
        """record : called by the writing thread, where it may wait for what a device is about to give"""
        with self._changed:
            self._changed.wait_for(lambda: self.has_room)
            self._raise()
            self._records.append(Late(num_bytes, record))
            self._waiting_bytes += num_bytes
            self._changed.notify_all()

    def close(self) -> None:
        """No more records. The commit is made in the background: ``result`` waits for it."""
        with self._changed:
            self._records += [Late(0, lambda: Record("end")), None]
            self._changed.notify_all()

    def result(self) -> Commit:
        """Wait for the commit."""
        self._thread.join()
        self._raise()
        assert self.commit is not None
        return self.commit

    def cancel(self) -> None:
        """Leave no trace, unless the commit is on disk already."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()
        self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self.commit = self._made()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _made(self) -> Commit:
        commit = self._named((self._written(),))
        self._folder.tidy(self._keep, commit)
        return commit

    def _written(self) -> DataFile:
        """The data file is on disk."""
        number, files = self._draft.number, self._draft.files
        path = self._folder.path / f"{number:08}{self.part}.{'delta' if files else 'base'}"
        digest, num_bytes = new_digest(), 0
        with durable.appearing(path) as file:
            for piece in self._pieces():
                digest.update(piece)
                num_bytes += len(piece)
                file.write(piece)
        return DataFile(path.name, num_bytes, digest.hexdigest(), self._parent)

    def _named(self, last: tuple[DataFile, ...]) -> Commit:
        """The commit is on disk: its manifest is written when all that it names is. last : the new data files"""
        commit = Commit(self._draft.number, (*self._draft.files, *last), self._draft.contents)
        with durable.appearing(self._folder.path / f"{commit.number:08}.commit") as file:
            file.write(commit.encoded())
        return commit

    def _pieces(self) -> Iterator[bytes | memoryview]:
        yield MAGIC
        while (late := self._next()) is not None:
            yield from self._kept(late.record()).pieces()

    def _kept(self, record: Record) -> Record:
        """A record as it is written."""
        return record

    def _next(self) -> Late | None:
        with self._changed:
            self._changed.wait_for(lambda: self._records or self._cancelled)
            if self._cancelled:
                raise InterruptedError("the commit was given up")
            late = self._records.popleft()
            self._waiting_bytes -= late.num_bytes if late else 0
            self._changed.notify_all()
        return late
