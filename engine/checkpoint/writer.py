"""The writer of one commit, on a dedicated thread: takes records, and writes a data file and its manifest.

The writer lends memory for copied rows from a bounded ring buffer (``Ring``): a caller waits for more. The thread
accesses no table, and takes only the writer's lock. Steps share the cores with it, so it works in small pieces, when
the throttle allows it (``Pace``), and starts write-back early, so that no long fsync remains at the end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.checkpoint.parts import ALL_ROWS, PartRows
from penstock.checkpoint.records import MAGIC, Record
from penstock.checkpoint.store import Commit, Folder
from penstock.model.frames import Float32

# The background copies no more rows while this much waits for the disk; a step copies as long as there is room.
BACKGROUND_BYTES = 8 << 20
# Bytes between two checks of the throttle: a fraction of a millisecond of digest and write.
AT_ONCE = 1 << 19


class Queued(NamedTuple):
    """A record to write. wait : waits for the copy of its rows, which lie in the ring buffer; None: there are none"""

    record: Record
    wait: Callable[[], object] | None = None


class CommitWriter:
    """Writes the commit ``draft`` with one more data file. ``put`` adds its records; ``close`` ends them.

    draft : its files are those before the new one
    keep : number of commits to keep in the folder, with this one
    memory : for copies of rows that wait for the disk
    part : the rows that the data file contains
    attempt : of the job that writes the manifest, hexadecimal; None: this writer writes it

    most_floats : that ``room`` may be asked for at a time
    pace : throttles the writing thread

    If writing fails, the next call raises the error, and the folder is unchanged.
    """

    def __init__(
        self,
        folder: Folder,
        draft: Commit,
        keep: int,
        memory: Float32,
        part: PartRows = ALL_ROWS,
        attempt: str | None = None,
    ) -> None:
        self._folder, self._draft, self._keep = folder, draft, keep
        self._part, self._attempt = part, attempt
        self._parent = next((file.digest for file in reversed(draft.files) if file.part == part.name), None)
        self._records: deque[Queued | None] = deque([Queued(Record("begin", {"parent": self._parent}))])
        self._ring, self.most_floats = Ring(memory), len(memory) // 4
        self._changed = threading.Condition()
        self.pace = Pace()
        self._error: BaseException | None = None
        self._cancelled = False
        self.commit: Commit | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-checkpoint", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Return whether the commit is durable or has failed: ``result`` returns it or raises the error."""
        return not self._thread.is_alive()

    @property
    def has_room(self) -> bool:
        """Return whether the background may copy more rows."""
        return self._ring.lent_bytes < BACKGROUND_BYTES or self._error is not None

    def room(self, num_floats: int) -> Float32:
        """Return float32 memory for the rows of the next record that is ``put``. Waits until there is room."""
        with self._changed:
            while True:
                self._raise()
                if (lent := self._ring.lend(num_floats)) is not None:
                    return lent
                self.pace.expedite()
                self._changed.wait()

    def put(self, record: Record, wait: Callable[[], object] | None = None) -> None:
        """Add a record. wait : called by the writing thread if the rows of the record are in memory of ``room``, to
        which they may still be copied from a device"""
        with self._changed:
            self._raise()
            self._records.append(Queued(record, wait))
        self.pace.wake()

    def close(self) -> None:
        """End the records. The commit completes in the background: ``result`` waits for it."""
        with self._changed:
            self._records += [Queued(Record("end")), None]
        self.pace.wake()

    def result(self) -> Commit:
        """Wait for the commit and return it. Raises the error of the writing thread."""
        self.pace.expedite()
        self._thread.join()
        self._raise()
        assert self.commit is not None
        return self.commit

    def cancel(self) -> None:
        """Cancel the commit and remove its files, unless it is durable already."""
        with self._changed:
            self._cancelled = True
        self.pace.expedite()
        self._thread.join()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self.commit = self._written()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _written(self) -> Commit:
        """Write the data file and, unless a job does, the manifest that names it."""
        draft, kind = self._draft, "delta" if self._draft.files else "base"
        name = f"{draft.number:08}{self._part.file_name(self._attempt)}.{kind}"
        file = self._folder.write_data(name, self._parent, self._pieces())
        commit = Commit(draft.number, (*draft.files, file), draft.contents)
        if self._attempt is None:
            self._folder.publish_commit(commit)
            self._folder.tidy(self._keep, commit)
        return commit

    def _pieces(self) -> Iterator[bytes | memoryview]:
        yield MAGIC
        while (queued := self._next()) is not None:
            if queued.wait is not None:
                queued.wait()
            for piece in self._part.with_table_ids(queued.record).pieces():
                for start in range(0, len(piece), AT_ONCE):
                    began = time.thread_time()
                    yield piece[start : start + AT_ONCE]
                    self.pace.add_work(time.thread_time() - began)
            if queued.wait is not None:
                with self._changed:
                    self._ring.take_back()
                    self._changed.notify_all()

    def _next(self) -> Queued | None:
        self.pace.wait_for(lambda: self._records or self._cancelled)
        if self._cancelled:
            raise InterruptedError("the commit was given up")
        return self._records.popleft()


class Pace:
    """A throttle: the time that one thread allows another to work, none at first; ``expedite`` removes the limit.

    If a step uses as many threads as there are cores, another thread delays it, by up to a time slice. Whenever that
    thread wakes, it also takes the interpreter's lock, and the step waits for it. Between two steps some work is
    single-threaded, and writing then costs the steps little. So the writing thread is woken only then, right after a
    step, for a share of the last step's time.

    Each counter is written by one thread only, so no lock is needed, which a descheduled thread could hold.
    """

    def __init__(self) -> None:
        self._allowed_s = self._used_s = 0.0
        self._expedited = False
        self._turn = threading.Event()

    def allow(self, seconds: float) -> None:
        """Allow this much more work, in seconds, and end the expedited time, whose work does not count."""
        if self._expedited:
            self._expedited, self._allowed_s = False, self._used_s
        self._allowed_s += seconds
        self._turn.set()

    def expedite(self) -> None:
        """Allow unlimited work until the next ``allow``: no step runs, or a caller waits for the commit."""
        self._expedited = True
        self._turn.set()

    def add_work(self, seconds: float) -> None:
        """Count seconds of work, and wait until more is allowed. Called by the writing thread."""
        self._used_s += seconds
        self.wait_for(lambda: self._expedited or self._used_s < self._allowed_s)

    def wait_for(self, there: Callable[[], object]) -> None:
        """Wait until ``there`` returns true, checked at every allowance. Called by the writing thread."""
        while not there():
            self._turn.clear()
            # An event between the two checks has set it again.
            if not there():
                self._turn.wait()

    def wake(self) -> None:
        """Wake the writing thread for new work while expedited; otherwise the next allowance wakes it."""
        if self._expedited:
            self._turn.set()


class Ring:
    """A ring buffer for rows on their way to disk: pieces of memory, returned in the order in which they were lent.

    So pieces of any size share the memory without a search for gaps. An empty ring starts over at the front, so most of
    the time only a small part of the memory is touched.
    memory : float32, all of it free
    """

    def __init__(self, memory: Float32) -> None:
        self._memory = memory
        self._lent: deque[tuple[int, int]] = deque()

    @property
    def lent_bytes(self) -> int:
        """Return the bytes in use: those lent, and those that the order of the pieces makes unavailable."""
        try:
            (first, _), (_, end) = self._lent[0], self._lent[-1]
        except IndexError:
            return 0
        return 4 * (end - first if end > first else end - first + len(self._memory))

    def lend(self, num_floats: int) -> Float32 | None:
        """Lend a piece of float32, its contents undefined. Return None if there is no room for it."""
        start = self._start(num_floats)
        if start is None:
            return None
        self._lent.append((start, start + num_floats))
        return self._memory[start : start + num_floats]

    def take_back(self) -> None:
        """Free the piece that was lent first."""
        self._lent.popleft()

    def _start(self, num_floats: int) -> int | None:
        size = len(self._memory)
        if not self._lent:
            return 0 if num_floats <= size else None
        (first, _), (newest, end) = self._lent[0], self._lent[-1]
        if newest < first:  # wrapped around: the front is lent up to end
            return end if end + num_floats <= first else None
        if end + num_floats <= size:
            return end
        return 0 if num_floats <= first else None
