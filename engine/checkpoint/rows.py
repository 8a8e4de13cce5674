"""Which rows of a table a commit still has to copy, and which have changed since it began: two bits per row.

A commit holds the rows as they were when it began. Copying goes on between steps, so the rows that a step
is about to change and that still wait are asked for first (copy on write).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

CHANGED, WAITING = np.uint8(1), np.uint8(2)

# Marks looked at in one go where few rows wait.
_SCANNED = 1 << 18


class RowMarks:
    """The marks of one table: a byte per row."""

    def __init__(self, num_rows: int) -> None:
        self._marks = np.zeros(num_rows, np.uint8)
        self._cursor = num_rows  # no row before it waits
        self.num_waiting = 0

    def change(self, ids: Int64) -> None:
        """These rows will be in the next commit."""
        self._marks[ids] |= CHANGED

    def change_all(self) -> None:
        self._marks |= CHANGED

    def begin(self, everything: bool) -> None:
        """A commit begins: the rows changed since the one before it wait, or all."""
        if everything:
            self._marks.fill(WAITING)
        else:
            self._marks &= CHANGED
            self._marks <<= 1
        self._cursor = 0
        self.num_waiting = len(self._marks) if everything else int(np.count_nonzero(self._marks))

    def give_up(self) -> None:
        """No row waits any more, nor is it known which ones have changed."""
        self._marks.fill(0)
        self.num_waiting = 0

    def take_among(self, ids: Int64) -> Int64:
        """Which of these distinct ids wait: ascending, and from now on they do not."""
        if not self.num_waiting:
            return ids[:0]
        waiting = np.sort(ids[(self._marks[ids] & WAITING) != 0])
        return self._taken(waiting)

    def take_next(self, most: int) -> Int64:
        """Up to so many rows that wait, ascending; empty when none is left."""
        while self.num_waiting:
            ahead = self._marks[self._cursor : self._cursor + max(most, _SCANNED)]
            found = np.flatnonzero(ahead & WAITING)
            if len(found):
                ids = self._cursor + found[:most]
                self._cursor = int(ids[-1]) + 1
                return self._taken(ids)
            self._cursor += len(ahead)
        return np.zeros(0, np.int64)

    def _taken(self, ids: Int64) -> Int64:
        self._marks[ids] &= CHANGED
        self.num_waiting -= len(ids)
        return ids
