"""A ring buffer for rows on their way to disk: one block of memory, lent in pieces and returned in the same order.

Pieces are returned first in, first out, so pieces of any size share the block without a search for gaps. An empty ring
starts over at the front, so most of the time only a small part of the memory is touched.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from penstock.frames import Float32


class Ring:
    """A ring buffer of float32. Call ``touch`` before use; ``release`` frees the memory. num_floats : its capacity"""

    def __init__(self, num_floats: int) -> None:
        self.num_floats = num_floats
        self._memory = np.empty(0, np.float32)
        self._lent: deque[tuple[int, int]] = deque()

    def touch(self) -> None:
        """Allocate the pages now: 4 MB of new pages delay a step by 7 ms on a virtual machine, more than the copy."""
        if not len(self._memory):
            self._memory = np.full(self.num_floats, 0.0, np.float32)

    def release(self) -> None:
        self._memory = np.empty(0, np.float32)

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

    def take_all_back(self) -> None:
        self._lent.clear()

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
