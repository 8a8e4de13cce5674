"""A sink for Arrow's writers that buffers their output until it is written elsewhere."""

from __future__ import annotations

from typing import Any


class ArrowOutput:
    """A binary file in memory. Keeps the buffers that Arrow writes, without a copy, until ``take``."""

    closed = False

    def __init__(self) -> None:
        self._pieces: list[Any] = []

    def write(self, data: Any) -> int:
        self._pieces.append(data)
        return len(data)

    def take(self) -> list[Any]:
        """Return everything written since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def flush(self) -> None:
        """Do nothing: ``take`` empties the buffer."""

    def close(self) -> None:
        """Do nothing: Arrow closes its sinks, and ``take`` follows."""
