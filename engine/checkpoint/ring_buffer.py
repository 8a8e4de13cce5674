"""A ring buffer for rows on their way to disk: one block of memory, lent in pieces and returned in the same order.

Pieces are returned first in, first out, so pieces of any size share the block without a search for gaps. An empty ring
starts over at the front, so most of the time only a small part of the memory is touched.
"""

from __future__ import annotations

from collections import deque

from penstock.frames import Float32


class Ring:
    """A ring buffer. memory : float32, all of it free"""

    def __init__(self, memory: Float32) -> None:
        self._memory = memory
        self._lent: deque[tuple[int, int]] = deque()

    @property
    def num_floats(self) -> int:
        return len(self._memory)

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
