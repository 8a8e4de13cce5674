"""The commits of one run: the frames to skip, the position of the applied ones, and when to commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from penstock.base.validation import INT64_MAX
from penstock.checkpoint.commit_session import CommitListener, CommitSession
from penstock.checkpoint.incremental import Saver
from penstock.checkpoint.source_positions import Positions
from penstock.core.engine_core import EngineCore
from penstock.io.decoding.reader import FrameReader
from penstock.io.run_files import RunFiles
from penstock.io.sources.seekable_source import SeekableSource
from penstock.model.frames import Frame, FrameRun, Position
from penstock.model.stats import Counters


class RunCommits(CommitListener):
    """The position and the commits of one run.

    saver : of its commits; None: it does not commit
    start : the frames to skip, because the checkpoint contains them; positions : of this run, none counted yet
    every : steps between two commits; None: only at the end
    files : of bad rows and of deltas
    may_commit : called before each commit

    commits : whether it commits; num_skipped : number of frames to skip
    failed : whether a commit or a bad row could not be written; do not try again
    """

    def __init__(
        self,
        core: EngineCore,
        saver: Saver | None,
        reader: FrameReader,
        counters: Counters,
        start: Positions,
        positions: Positions,
        every: int | None,
        files: RunFiles,
        may_commit: Callable[[], bool],
    ) -> None:
        self._core, self._reader, self._start = core, reader, start
        self.counters, self.positions, self._every = counters, positions, every
        self.files, self._may_commit = files, may_commit
        self.commits = saver is not None
        self._error: BaseException | None = None  # of counting a frame, or of the background thread
        # The positions of the sources in the commit in flight, and in a durable one that no source knows of yet.
        self._promised: list[Position | None] = []
        self._durable: list[Position | None] = []
        self.num_skipped = start.num_frames
        self.failed = False
        # Last: an error before it would leave its thread running, and what the thread reports would be lost.
        self._commits = None if saver is None else CommitSession(core, saver, every, self)

    def skip(self, frames: Iterator[tuple[int, Frame]], limit: int | None) -> None:
        """Advance the reader's frames to the first one to apply. limit : of all frames, skipped ones included

        Raises UsageError and StateError.
        """
        self._start.check_limit(limit)
        self._start.skip(frames, self.positions)
        if self.num_skipped:
            self._reader.first_bad.clear()  # an earlier run reported the bad rows of skipped frames

    def remaining(self, limit: int | None) -> int | None:
        """Return a limit of all frames without those that sources which seek leave out."""
        return None if limit is None else max(limit - (self.num_skipped - self._start.num_to_read), 0)

    def pass_over(self, number: int, run: FrameRun) -> None:
        """Count the position of a void frame of source ``number``."""
        with self._core.gate.still():
            self.counters.dropped.update(run.frame().dropped)
            self.count(number, run, 0, 1, False)
            self.check()

    def idle(self) -> None:
        """Begin a commit of what was applied, if no frame arrives at the moment."""
        commits = self._commits
        try:
            with self._core.gate.still():
                self.check()
                if commits is None or self._every is None or not commits.has_changes or not commits.may_begin:
                    return
                if self._may_commit():
                    commits.begin()
        except BaseException:
            self.failed = True
            raise
        self._acknowledge()

    def count(self, number: int, run: FrameRun, first: int, stop: int, is_stale: bool) -> None:
        """Count frames that have entered the gate, or were stale, in the position. Call it under the same gate lock.

        number : of their source; first, stop : the frames, by their numbers in a run
        ``check`` raises its error later: the frames have been applied. Nothing is committed from then on.
        """
        try:
            if self.files.bad_rows is not None:
                self.files.bad_rows.append(() if run.blocks is not None else run.frame_at(first).bad_rows)
            source = self._reader.sources[number]
            creation = source.creation if isinstance(source, SeekableSource) else None
            self.positions.count(number, run, first, stop, is_stale, creation)
            if self._commits is not None:
                self._commits.frame_counted(stop - first)
        except BaseException as error:
            self.failed, self._error = True, error
            self.positions.uncounted = f"{type(error).__name__}: {error}".removesuffix(": ")

    @property
    def most_unseen(self) -> int:
        """Return how many steps may pass before ``advance`` has something to do."""
        return INT64_MAX if self._commits is None else self._commits.most_unseen

    def advance(self) -> None:
        """Begin a commit if one is due, and copy some rows."""
        try:
            if self._commits is None:  # only this thread counts frames
                self.check()
                return
            with self._core.gate.still():
                self.check()
                if self._commits.is_due and self._commits.may_begin and self._may_commit():
                    self._commits.begin()
                self._commits.advance()
        except BaseException:
            self.failed = True
            raise
        self._acknowledge()

    def end(self, completed: bool = True) -> None:
        """Commit everything that was applied, unless ``may_commit`` returns False: then keep the previous commit.

        ``may_commit`` is called under the gate's lock, as the commit begins, so no other thread can step in between.
        completed : whether the run ended without an error; then also commit for the sake of a new file
        """
        commits = self._commits
        if commits is None:
            return
        try:
            with self._core.gate.still():
                self.check()
                is_needed = commits.has_changes or (completed and self.files.any_new) or commits.has_stepped
                commits.finish(is_needed and self._may_commit())
        except BaseException:
            self.failed = True
            raise
        self._acknowledge()
        for source in self._reader.sources:
            if isinstance(source, SeekableSource):
                source.close()

    def close(self) -> None:
        """Stop committing, and wait for the background thread."""
        if self._commits is not None and not self._core.failure.is_forked:
            self._commits.abandon()

    def commit_begins(self) -> None:
        self._promised = [entry.position for entry in self.positions.entries]

    def commit_is_on_disk(self) -> None:
        self._durable = self._promised

    def commit_failed(self, error: BaseException) -> None:
        self._error = error

    def _acknowledge(self) -> None:
        """Report to the sources what is durable. Call it on the thread that reads them."""
        durable, self._durable = self._durable, []
        for source, position in zip(self._reader.sources, durable, strict=False):
            if position and isinstance(source, SeekableSource):
                source.acknowledge(position)

    def check(self) -> None:
        """Raise the error of an earlier ``count``, or of the background thread, and StateError in a fork."""
        if self._core.failure.is_forked:
            self._core.failure.check_whole()
        if self._error is not None:
            raise self._error
