"""The commits of one run: the frames to skip, the position of the applied ones, and when to commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from typing import Protocol

from penstock.checkpoint.commit_session import CommitListener, CommitSession
from penstock.checkpoint.incremental import Saver
from penstock.checkpoint.run_files import RunFiles
from penstock.checkpoint.source_positions import Positions
from penstock.core import EngineCore
from penstock.errors import UsageError
from penstock.frames import Frame
from penstock.io.decoding.reader import FrameReader
from penstock.stats import Counters


class Spoken(Protocol):
    """The owner of the positions that a run updates. positions : of the run that commits describe"""

    positions: Positions

    def speaks_of(self, run: Run | None) -> bool: ...


class Run(CommitListener):
    """The position and the commits of one run.

    skipped : frames skipped because the checkpoint contains them
    files : of bad rows and of deltas
    failed : whether a commit or a bad row could not be written; do not try again
    """

    def __init__(
        self,
        saves: Spoken,
        core: EngineCore,
        saver: Saver | None,
        reader: FrameReader,
        known: Positions,
        met: Positions,
        every: int | None,
        files: RunFiles,
        has_new_files: bool,
        may_commit: Callable[[], bool],
        counters: Counters,
    ) -> None:
        self._saves, self._core, self._reader = saves, core, reader
        self.counters = counters
        self.files, self._has_new_files, self.may_commit = files, has_new_files, may_commit
        self._known, self._met = known, met
        self.check_stale = met.check_stale
        self._source: int | None = None  # of the last frame
        self._pushed: tuple[Frame, bool] | None = None  # applied or stale, and not counted by a position yet
        self._commits = None if saver is None else CommitSession(core, saver, every, self)
        self._error: BaseException | None = None  # of the background thread
        self.skipped = known.num_frames
        self.failed = False
        if not known.num_frames and saves.speaks_of(self):
            saves.positions = met

    @property
    def commits(self) -> bool:
        return self._commits is not None

    def frames(self, limit: int | None) -> Iterator[Frame]:
        """Yield the frames to apply. limit : of all frames, skipped ones included. Raises UsageError and StateError."""
        if limit is not None and limit < self.skipped:
            raise UsageError(f"limit: the checkpoint holds {self.skipped} frames already, which is more than {limit}")
        with closing(self._reader.numbered()) as numbered:
            # The bad rows of skipped frames were reported by an earlier run.
            forget = self._reader.first_bad.clear
            for number, frame in self._known.rest(islice(numbered, limit), self._met, forget):
                self._source = number
                yield frame

    def took(self, frame: Frame) -> None:
        """Count a frame that was applied or was stale, begin a commit if one is due, and copy some rows."""
        try:
            with self._core.gate.still():
                self.count()
                if self._commits is None:
                    return
                self._raise()
                if self._commits.is_due and self._commits.may_begin and self.may_commit():
                    self._commits.begin()
                self._commits.advance()
        except BaseException:
            self.failed = True
            raise

    def pushed(self, frame: Frame, admitted: bool) -> None:
        """Record that a frame entered the gate, or was stale. Call it under the same gate lock."""
        self._pushed = frame, admitted

    def count(self) -> None:
        """Count the pushed frame in the position: a save before ``took`` then contains both. Under the gate's lock."""
        if self._pushed is None:
            return
        assert self._source is not None
        frame, admitted = self._pushed
        try:
            if self.files.bad_rows is not None:
                self.files.bad_rows.append(frame.bad_rows)
            self._met.took(self._source, frame, admitted)
        except BaseException:
            self.failed = True  # no position counts a frame that was applied, so nothing may be committed any more
            raise
        self._pushed = None
        if self._commits is not None:
            self._commits.frame_counted()
        if self._saves.speaks_of(self):
            self._saves.positions = self._met

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
                self._raise()
                news = commits.has_news or (completed and self._has_new_files) or commits.has_stepped
                commits.finish(news and self.may_commit())
        except BaseException:
            self.failed = True
            raise

    def close(self) -> None:
        """Stop committing. Under the gate's lock."""
        if self._commits is not None:
            self._commits.close()

    def join(self) -> None:
        """Wait for the background thread of this run, after ``close``."""
        if self._commits is not None:
            self._commits.join()

    def commit_failed(self, error: BaseException) -> None:
        self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
