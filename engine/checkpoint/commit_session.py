"""Commits to one folder during training: when a commit begins, and when its rows are copied.

A run (run_commits.py) and a service (service/sequencer.py) commit through this class. Rows are copied between frames
and, while no frame arrives, by a background thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock.base.validation import INT64_MAX
from penstock.checkpoint.incremental import Saver
from penstock.core.engine_core import EngineCore
from penstock.core.freshness import COMMIT

# Pause between two checks of the thread whether frames arrive.
PAUSE_S = 0.01


class CommitListener:
    """Is notified of commits, under the gate's lock except for ``commit_failed``."""

    def commit_begins(self) -> None:
        """A commit of the current state begins."""

    def commit_is_on_disk(self) -> None:
        """The commit that began last is durable."""

    def commit_failed(self, error: BaseException) -> None:
        """The thread failed to write a commit, and has ended."""


class CommitSession:
    """Commits an engine through a saver until it is closed.

    saver : open
    every : steps between two commits; None: only on request

    has_changes : whether the positions count a frame that no commit contains, or the tables are those of no commit
    """

    def __init__(self, core: EngineCore, saver: Saver, every: int | None, listener: CommitListener) -> None:
        self._core, self._saver, self._every, self._listener = core, saver, every, listener
        self._step = core.global_step  # of the last commit begun
        self.has_changes = saver.last is None or saver.has_new_tables
        self._asked = False
        self._num_frames = 0
        self._closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._copy_while_idle, name="penstock-pace", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            with core.gate.still():
                saver.close()
            raise

    # ---- under the gate's lock

    @property
    def is_due(self) -> bool:
        """Return whether ``every`` steps have passed since the last commit began."""
        return self._every is not None and self._core.global_step - self._step >= self._every

    @property
    def most_unseen(self) -> int:
        """Return how many steps may pass before frames are counted one by one again, up to the next commit."""
        if self._asked or self._saver.is_busy:
            return 0
        return INT64_MAX if self._every is None else self._every - (self._core.global_step - self._step)

    @property
    def may_begin(self) -> bool:
        """Return whether a commit can begin without waiting for one in flight."""
        return not self._saver.is_busy

    @property
    def has_stepped(self) -> bool:
        """Return whether a step has changed the tables since the last commit began."""
        return self._core.global_step != self._step

    def frame_counted(self, num_frames: int = 1) -> None:
        """Record that frames were applied and that the positions count them."""
        self.has_changes = True
        self._num_frames += num_frames

    def ask(self, again: bool = False) -> bool:
        """Request a commit of the current state. Return False if all of it is durable already.

        again : commit once more even if the commit in flight contains everything, so that the caller can wait for one
        """
        if not self.has_changes and not self._saver.is_busy:
            return False
        self._asked = self._asked or self.has_changes or again
        self._wake.set()
        return True

    def begin(self) -> None:
        """Begin a commit of the current state."""
        self._listener.commit_begins()
        self._saver.begin()
        self._core.freshness.begins(COMMIT)
        self._step, self.has_changes, self._asked = self._core.global_step, False, False
        self._wake.set()

    def advance(self, idle: bool = False) -> None:
        """Begin the requested commit, if any, and copy some rows. idle : whether frames have stopped arriving"""
        if self._asked and not self._saver.is_busy:
            self.begin()
        self._notified(lambda: self._saver.advance(idle))

    def finish(self, again: bool) -> None:
        """Wait for the commit in flight. again : then commit the current state and wait for that too"""
        self._notified(self._saver.finish)
        if again:
            self._core.tables.wait()
            self.begin()
            self._notified(self._saver.finish)

    def commit_start(self) -> None:
        """Commit the state that the session starts with, and wait until it is durable."""
        with self._core.gate.still():
            self.finish(again=True)

    def close(self) -> None:
        """Stop committing, and unlock the folder."""
        self._closed = True
        self._wake.set()
        self._saver.close()

    # ---- without the lock

    def end(self) -> None:
        """Commit everything that no commit contains yet, and close."""
        try:
            with self._core.gate.still():
                self._closed = True
                self.finish(self.has_changes)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close, and wait for the background thread."""
        with self._core.gate.still():
            self.close()
        self._thread.join()

    # ---- inside

    def _notified(self, write: Callable[[], None]) -> None:
        was_busy = self._saver.is_busy
        write()
        if was_busy and not self._saver.is_busy:
            self._core.freshness.ends(COMMIT)
            self._listener.commit_is_on_disk()

    def _copy_while_idle(self) -> None:
        seen = 0
        try:
            while True:
                self._wake.wait()
                with self._core.gate.still():
                    if self._closed:
                        return
                    # If no frame has arrived since the last check, copying may take longer.
                    self.advance(idle=self._num_frames == seen)
                    seen = self._num_frames
                    if not self._saver.is_busy and not self._asked:
                        self._wake.clear()
                # Frames can take the gate's lock meanwhile.
                time.sleep(PAUSE_S)
        except BaseException as error:
            self._listener.commit_failed(error)
