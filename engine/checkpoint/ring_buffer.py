"""Memory for rows on their way to disk: one block, lent piece by piece and given back in the order it was lent.

What is lent first is wanted back first, so pieces of any size share the block without gaps to look for; and
where nothing is lent it begins at the front again, so that most of the time little of it is ever touched.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]


class Ring:
    """num_floats : the most that may be lent at a time. ``touch`` it before use; ``let_go`` gives the memory back."""

    def __init__(self, num_floats: int) -> None:
        self.num_floats = num_floats
        self._memory = np.empty(0, np.float32)
        self._lent: deque[tuple[int, int]] = deque()

    def touch(self) -> None:
        """Have the system's memory now: 4 MB of new pages cost a step 7 ms on a virtual machine, more than the copy."""
        if not len(self._memory):
            self._memory = np.full(self.num_floats, 0.0, np.float32)

    def let_go(self) -> None:
        self._memory = np.empty(0, np.float32)

    @property
    def lent_bytes(self) -> int:
        """What is lent, with what its order keeps from being lent."""
        try:
            (first, _), (_, end) = self._lent[0], self._lent[-1]
        except IndexError:
            return 0
        return 4 * (end - first if end > first else end - first + len(self._memory))

    def lend(self, num_floats: int) -> Float32 | None:
        """A piece, its contents undefined; None while there is no room for it."""
        start = self._start(num_floats)
        if start is None:
            return None
        self._lent.append((start, start + num_floats))
        return self._memory[start : start + num_floats]

    def take_back(self) -> None:
        """The piece that was lent first is free again."""
        self._lent.popleft()

    def take_all_back(self) -> None:
        self._lent.clear()

    def _start(self, num_floats: int) -> int | None:
        size = len(self._memory)
        if not self._lent:
            return 0 if num_floats <= size else None
        (first, _), (newest, end) = self._lent[0], self._lent[-1]
        if newest < first:  # the front is lent again, up to end
            return end if end + num_floats <= first else None
        if end + num_floats <= size:
            return end
        return 0 if num_floats <= first else None
