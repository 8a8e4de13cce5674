"""Commits to one folder while frames enter: when one begins, and how its rows are copied.

A run (run_session.py) and a service (service/sequencer.py) commit through this class. Rows are copied between frames
and, while no frame arrives, by a small thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from penstock.checkpoint.incremental import Saver
from penstock.core import EngineCore

# Between two looks of the thread at whether frames arrive.
PAUSE_S = 0.01


class CommitListener:
    """Is notified of commits: under the gate's lock, except for ``commit_failed``."""

    def commit_begins(self) -> None:
        """A commit of the state as it is now begins."""

    def commit_is_on_disk(self) -> None:
        """The commit that began last is durable."""

    def commit_failed(self, error: BaseException) -> None:
        """The thread could not write a commit, and has ended."""


class CommitSession:
    """Commits an engine through a saver until it is closed.

    saver : open (``Saves.opened``)
    every : steps between two commits; None: only on request
    prepare : called once on the thread that copies

    has_news : whether a frame was counted that no commit contains
    """

    def __init__(
        self,
        core: EngineCore,
        saver: Saver,
        every: int | None,
        listener: CommitListener,
        prepare: Callable[[], object] = lambda: None,
    ) -> None:
        self._core, self._saver, self._every, self._listener, self._prepare = core, saver, every, listener, prepare
        self._step = core.global_step  # of the last commit begun
        self.has_news = saver.last is None
        self._asked = False
        self._num_frames = 0
        self._closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._copy_while_idle, name="penstock-pace", daemon=True)
        self._thread.start()

    # ---- under the gate's lock

    @property
    def is_due(self) -> bool:
        """Whether ``every`` steps have passed since the last commit began."""
        return self._every is not None and self._core.global_step - self._step >= self._every

    @property
    def may_begin(self) -> bool:
        """Whether no commit is in flight that another one would have to wait for."""
        return self._saver.may_begin

    @property
    def has_stepped(self) -> bool:
        """Whether the tables have changed by a step since the last commit began."""
        return self._core.global_step != self._step

    def frame_counted(self) -> None:
        """A frame is in the tables, and the positions count it."""
        self.has_news = True
        self._num_frames += 1

    def ask(self, again: bool = False) -> bool:
        """Commit the present state soon. False where all of it is on disk already.

        again : one more commit even where the one in flight contains everything, so that there is one to wait for
        """
        if not self.has_news and not self._saver.is_busy:
            return False
        self._asked = self._asked or self.has_news or again
        self._wake.set()
        return True

    def begin(self) -> None:
        """Begin a commit of the present state."""
        self._listener.commit_begins()
        self._saver.begin()
        self._step, self.has_news, self._asked = self._core.global_step, False, False
        self._wake.set()

    def advance(self, idle: bool = False) -> None:
        """Begin the commit that was asked for, and copy some rows. idle : no frame seems to arrive for a while"""
        if self._asked and not self._saver.is_busy:
            self.begin()
        self._notified(lambda: self._saver.advance(idle))

    def finish(self, again: bool) -> None:
        """Wait for the commit in flight. again : and then for one of the present state"""
        self._notified(self._saver.finish)
        if again:
            self._core.tables.wait()
            self.begin()
            self._notified(self._saver.finish)

    def close(self) -> None:
        """Commit nothing any more, and unlock the folder."""
        self._closed = True
        self._wake.set()
        self._saver.close()

    # ---- without the lock

    def end(self) -> None:
        """Commit everything that no commit contains, and close."""
        try:
            with self._core.gate.still():
                self._closed = True
                try:
                    self.finish(self.has_news)
                finally:
                    self.close()
        finally:
            self.join()

    def join(self) -> None:
        """Wait for the thread, after ``close``."""
        self._thread.join()

    # ---- inside

    def _notified(self, write: Callable[[], None]) -> None:
        was_busy = self._saver.is_busy
        write()
        if was_busy and not self._saver.is_busy:
            self._listener.commit_is_on_disk()

    def _copy_while_idle(self) -> None:
        seen = 0
        try:
            self._prepare()
            while True:
                self._wake.wait()
                with self._core.gate.still():
                    if self._closed:
                        return
                    # No frame since the last look: copying may take the time.
                    self.advance(idle=self._num_frames == seen)
                    seen = self._num_frames
                    if not self._saver.is_busy and not self._asked:
                        self._wake.clear()
                # Frames get the gate's lock in between.
                time.sleep(PAUSE_S)
        except BaseException as error:
            self._listener.commit_failed(error)
