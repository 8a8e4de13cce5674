"""Dirty rows of a table: which rows a commit still has to copy, and which have changed since it began.

A commit contains the rows as they were when it began. Rows are copied between steps, so a step first copies those
pending rows that it is about to change (copy on write). Deltas have a separate, sparse record of touched rows:
touched_rows.py gives the reason, and tests/test_dirty_rows.py checks that both agree.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.pyx import dirty_bits

Int64 = npt.NDArray[np.int64]

# Marks scanned per call if few rows are pending: a fraction of a millisecond.
LOOKED_AT = 1 << 20


class RowMarks:
    """The marks of one table: one byte per row, of which two bits are used, dirty and pending.

    stride : distance between the ids of rows that are adjacent in memory

    num_waiting : pending rows, which the commit in flight still has to copy
    """

    def __init__(self, num_rows: int, stride: int = 1) -> None:
        self._marks = np.zeros(num_rows, np.uint8)
        self._stride = self._step = stride
        self._cursor = num_rows
        self.num_waiting = 0

    def change(self, ids: Int64) -> Int64:
        """Mark rows as dirty before they change, and no longer as pending. Return the ids that were pending.

        ids : int64 (n,), distinct. Raises IndexError for an id outside the table; nothing is marked then.
        """
        waiting = np.empty(len(ids), np.int64)
        found = dirty_bits.change(self._marks, np.ascontiguousarray(ids), waiting)
        self.num_waiting -= found
        return waiting[:found]

    def change_all(self) -> None:
        self._marks |= np.uint8(dirty_bits.CHANGED)

    def begin(self, everything: bool) -> None:
        """Begin a commit: mark all rows as pending, or only those that are dirty since the previous commit."""
        if everything:
            self._marks.fill(dirty_bits.WAITING)
        else:
            self._marks &= np.uint8(dirty_bits.CHANGED)
            self._marks <<= 1
        # A full copy follows the rows in memory; a copy of few rows follows their marks.
        self._cursor, self._step = 0, self._stride if everything else 1
        self.num_waiting = len(self._marks) if everything else int(np.count_nonzero(self._marks))

    def give_up(self) -> None:
        """Clear all marks: no row is pending, and the dirty rows are unknown."""
        self._marks.fill(0)
        self.num_waiting = 0

    def take_next(self, most: int) -> Int64:
        """Return the ids of up to ``most`` pending rows, int64, and mark them as no longer pending.

        A call scans a limited number of marks, so it may return none although rows are pending.
        """
        if not self.num_waiting:
            return np.zeros(0, np.int64)
        taken = np.empty(most, np.int64)
        found, self._cursor = dirty_bits.take(self._marks, self._cursor, self._step, LOOKED_AT, taken)
        self.num_waiting -= found
        return taken[:found]
