"""One commit on its way to disk, on a thread of its own: records in, a data file and its manifest out.

Rows are copied into memory that the writer lends (ring.py), which is bounded: whoever wants more waits. The
thread touches no table and takes no lock but its own. Steps share the cores with it, so it works in small pieces,
when it is allowed to (pace.py), and has the system write along, so that no long fsync is left for the end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.checkpoint.digests import DIGESTS, VERSION
from penstock.checkpoint.records import MAGIC, Record
from penstock.checkpoint.ring_buffer import Ring
from penstock.checkpoint.store import Commit, DataFile, Folder
from penstock.checkpoint.throttle import Pace
from penstock.io.storage import atomic_files

Float32 = npt.NDArray[np.float32]

# What may wait for the disk and the background still copies more; a step copies on, as long as there is room.
BACKGROUND_BYTES = 8 << 20
# Bytes between two looks at whether to go on: a fraction of a millisecond of digest and write.
AT_ONCE = 1 << 19


class Late(NamedTuple):
    """A record that is made when its turn has come. lent : its rows lie in the ring"""

    record: Callable[[], Record]
    lent: bool = False


class CommitWriter:
    """Writes commit ``draft`` with one more data file, whose records ``put`` brings; ``close`` makes it a commit.

    draft : its files are those before the new one
    keep : commits that stay in the folder when this one is there
    ring : memory for copies of rows that wait for the disk; nothing is lent

    Where writing fails, the next call raises what happened, and the folder is as it was.
    """

    part = ""  # of the rows, as ``DataFile.part`` names it

    def __init__(self, folder: Folder, draft: Commit, keep: int, ring: Ring) -> None:
        self._folder, self._draft, self._keep = folder, draft, keep
        self._parent = next((file.digest for file in reversed(draft.files) if file.part == self.part), None)
        begin = Record("begin", {"parent": self._parent})
        self._records: deque[Late | None] = deque([Late(lambda: begin)])
        self._ring = ring
        self._changed = threading.Condition()
        self._pace = Pace()
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
        """Whether the background may copy more."""
        return self._ring.lent_bytes < BACKGROUND_BYTES or self._error is not None

    @property
    def most_floats(self) -> int:
        """What ``room`` may be asked for at a time."""
        return self._ring.num_floats // 4

    def hurry(self) -> None:
        """There is no step that the writer could be in the way of."""
        self._pace.hurry()

    def allow(self, seconds: float) -> None:
        """A step has ended, and before the next one so much may be worked."""
        self._pace.allow(seconds)

    def room(self, num_floats: int) -> Float32:
        """Memory for the rows of the next record that is ``put``; waits until there is some."""
        with self._changed:
            while True:
                self._raise()
                if (lent := self._ring.lend(num_floats)) is not None:
                    return lent
                self._pace.hurry()
                self._changed.wait()

    def put(self, record: Callable[[], Record], lent: bool = False) -> None:
        """record : called by the writing thread, where it may wait for what a device is about to give"""
        with self._changed:
            self._raise()
            self._records.append(Late(record, lent))
        self._pace.tell()

    def close(self) -> None:
        """No more records. The commit is made in the background: ``result`` waits for it."""
        with self._changed:
            self._records += [Late(lambda: Record("end")), None]
        self._pace.tell()

    def result(self) -> Commit:
        """Wait for the commit."""
        self._pace.hurry()
        self._thread.join()
        self._raise()
        assert self.commit is not None
        return self.commit

    def cancel(self) -> None:
        """Leave no trace, unless the commit is on disk already."""
        with self._changed:
            self._cancelled = True
        self._pace.hurry()
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
        digest, num_bytes = DIGESTS[VERSION](), 0
        with atomic_files.appearing(path) as file:
            for piece in self._pieces():
                began = time.thread_time()
                digest.update(piece)
                num_bytes += len(piece)
                file.write(piece)
                file.write_along()
                self._pace.worked(time.thread_time() - began)
        return DataFile(path.name, num_bytes, digest.hexdigest(), self._parent)

    def _named(self, last: tuple[DataFile, ...]) -> Commit:
        """The commit is on disk: its manifest is written when all that it names is. last : the new data files"""
        commit = Commit(self._draft.number, (*self._draft.files, *last), self._draft.contents)
        with atomic_files.appearing(self._folder.path / f"{commit.number:08}.commit") as file:
            file.write(commit.encoded())
        return commit

    def _pieces(self) -> Iterator[bytes | memoryview]:
        yield MAGIC
        while (late := self._next()) is not None:
            for piece in self._kept(late.record()).pieces():
                for start in range(0, len(piece), AT_ONCE):
                    yield piece[start : start + AT_ONCE]
            if late.lent:
                with self._changed:
                    self._ring.take_back()
                    self._changed.notify_all()

    def _kept(self, record: Record) -> Record:
        """A record as it is written."""
        return record

    def _next(self) -> Late | None:
        self._pace.wait_for(lambda: self._records or self._cancelled)
        if self._cancelled:
            raise InterruptedError("the commit was given up")
        return self._records.popleft()
