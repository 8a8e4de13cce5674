"""SIGINT and SIGTERM end a run between two frames, never inside one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """While entered, a signal raises KeyboardInterrupt at once, or at the end of the shielded part it fell into."""

    def __init__(self) -> None:
        self._shielded = self._waiting = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
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

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._waiting = True
        if not self._shielded:
            raise KeyboardInterrupt
