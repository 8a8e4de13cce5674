"""The saving side of a service: commits while frames come from several hands, and no source ends.

A commit begins every so many steps, or when somebody waits for one; rows are copied between frames
and, where none comes, by a small thread. What it holds is told when it is on disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from penstock.checkpoint.incremental import KEEP, Saver
from penstock.checkpoint.run_session import PAUSE_S
from penstock.checkpoint.session import Saves
from penstock.checkpoint.store import Folder
from penstock.core import EngineCore
from penstock.io.storage.descriptors import reserve


class Listener(Protocol):
    """Who hears of commits. All but ``save_failed`` under the gate's lock."""

    def commit_begins(self) -> None: ...

    def commit_is_on_disk(self) -> None: ...

    def save_failed(self, error: BaseException) -> None: ...


class LiveSaves:
    """Commits an engine to a folder until it is closed.

    every : steps between two commits; None: only when asked
    """

    def __init__(
        self, core: EngineCore, saves: Saves, folder: Folder, every: int | None, resume: bool, listener: Listener
    ) -> None:
        folder.check_place(resume)
        self._core, self._every, self._listener = core, every, listener
        with core.gate.still():
            self._saver: Saver = saves.opened(folder, KEEP)
        self._step = core.global_step  # of the last commit begun
        self._news = self._saver.last is None  # something that no commit has
        self._asked = False
        self._num_taken = 0
        self._closed = False
        self._wake = threading.Event()
        self._pace = threading.Thread(target=self._keep_pace, name="penstock-pace", daemon=True)
        self._pace.start()

    def took(self) -> None:
        """A frame has been applied. Under the gate's lock."""
        self._news = True
        self._num_taken += 1
        if self._every is not None and self._core.global_step - self._step >= self._every:
            self._asked = True
        self._advance()

    def ask(self, again: bool = False) -> bool:
        """Commit soon what is now. False where everything is on disk already. Under the gate's lock.

        again : one more commit even where the one under way holds everything, so that there is one to wait for
        """
        if not self._news and not self._saver.is_busy:
            return False
        self._asked = self._asked or self._news or again
        self._wake.set()
        return True

    def end(self) -> None:
        """Commit what is not on disk, and let the folder go."""
        with self._core.gate.still():
            self._closed = True
            self._wake.set()
            try:
                self._finish()
                if self._news:
                    self._core.tables.wait()
                    self._begin()
                    self._finish()
            finally:
                self._saver.close()
        self._pace.join()

    def give_up(self) -> None:
        """Nothing is committed any more."""
        with self._core.gate.still():
            self._closed = True
            self._saver.close()
        self._wake.set()

    def _begin(self) -> None:
        self._listener.commit_begins()
        self._saver.begin()
        self._step, self._news, self._asked = self._core.global_step, False, False

    def _advance(self, idle: bool = False) -> None:
        if self._asked and not self._saver.is_busy:
            self._begin()
            self._wake.set()
        self._watched(lambda: self._saver.advance(idle))

    def _finish(self) -> None:
        self._watched(self._saver.finish)

    def _watched(self, go_on: Callable[[], None]) -> None:
        """Tell where a commit has reached the disk meanwhile."""
        busy = self._saver.is_busy
        go_on()
        if busy and not self._saver.is_busy:
            self._listener.commit_is_on_disk()

    def _keep_pace(self) -> None:
        """Copying goes on where no frame comes in for a while, too."""
        seen = 0
        try:
            reserve.open(self._core.tables.prepare_thread)
            while True:
                self._wake.wait()
                with self._core.gate.still():
                    if self._closed:
                        return
                    # Nothing came in since the last look: the disk may have the time.
                    self._advance(idle=self._num_taken == seen)
                    seen = self._num_taken
                    if not self._saver.is_busy and not self._asked:
                        self._wake.clear()
                # Frames get the gate's lock in between.
                time.sleep(PAUSE_S)
        except BaseException as error:
            self._listener.save_failed(error)
