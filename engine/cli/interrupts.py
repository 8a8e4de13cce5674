"""SIGINT and SIGTERM end a run between two frames, never inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
Handler = Callable[[int, FrameType | None], None]


class Interrupts:
    """While entered, a signal raises KeyboardInterrupt at once, or at the end of the shielded part it fell into.

    Python hears signals in the main thread only: entered in another one, this does nothing.

    at_once : the process is to end without waiting for its threads
    """

    def __init__(self) -> None:
        self.at_once = False
        self._shielded = self._waiting = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def shield(self) -> Iterator[None]:
        """What is inside is done whole."""
        self._shielded = True
        try:
            yield
        finally:
            self._shielded = False
        if self._waiting:
            raise KeyboardInterrupt

    def leave_at_once(self) -> None:
        """When the command is done, wait for nobody: gRPC would wait for callers who do not leave, for ever."""
        self.at_once = True

    def ignore(self) -> None:
        """From here on, also after the exit: the process is ending, and a second Ctrl-C must not garble that."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._waiting = True
        if not self._shielded:
            raise KeyboardInterrupt


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """While in here the signals go to a handler of the command's own. In another thread than the main one: nothing."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in SIGNALS if main}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
