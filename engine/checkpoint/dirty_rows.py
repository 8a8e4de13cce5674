"""Which rows of a table a commit still has to copy, and which have changed since it began: two bits per row.

A commit holds the rows as they were when it began. Copying goes on between steps, so the rows that a step
is about to change and that still wait are asked for first (copy on write). Deltas keep their own, sparse record of
touched rows: touched_rows.py says why, and tests/test_checkpoint_rows.py holds both equal.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.pyx import dirty_bits

Int64 = npt.NDArray[np.int64]

# Marks looked at in one go where few rows wait: a fraction of a millisecond.
LOOKED_AT = 1 << 20


class RowMarks:
    """The marks of one table: a byte per row.

    stride : rows whose ids are so far apart lie next to each other in memory

    num_waiting : rows that the commit under way still has to copy
    """

    def __init__(self, num_rows: int, stride: int = 1) -> None:
        self._marks = np.zeros(num_rows, np.uint8)
        self._stride = self._step = stride
        self._cursor = num_rows
        self.num_waiting = 0

    def change(self, ids: Int64) -> Int64:
        """These distinct rows are about to change, and will be in the next commit. Returns those that wait: no more."""
        waiting = np.empty(len(ids), np.int64)
        found = dirty_bits.change(self._marks, np.ascontiguousarray(ids), waiting)
        self.num_waiting -= found
        return waiting[:found]

    def change_all(self) -> None:
        self._marks |= np.uint8(dirty_bits.CHANGED)

    def begin(self, everything: bool) -> None:
        """A commit begins: the rows changed since the one before it wait, or all."""
        if everything:
            self._marks.fill(dirty_bits.WAITING)
        else:
            self._marks &= np.uint8(dirty_bits.CHANGED)
            self._marks <<= 1
        # Rows are taken as they lie in memory where all of them are, and as their marks lie where few are.
        self._cursor, self._step = 0, self._stride if everything else 1
        self.num_waiting = len(self._marks) if everything else int(np.count_nonzero(self._marks))

    def give_up(self) -> None:
        """No row waits any more, nor is it known which ones have changed."""
        self._marks.fill(0)
        self.num_waiting = 0

    def take_next(self, most: int) -> Int64:
        """Up to so many rows that wait and from now on do not; none, where a look at many marks finds none."""
        if not self.num_waiting:
            return np.zeros(0, np.int64)
        taken = np.empty(most, np.int64)
        found, self._cursor = dirty_bits.take(self._marks, self._cursor, self._step, LOOKED_AT, taken)
        self.num_waiting -= found
        return taken[:found]
