"""Dirty rows of a table: those that changed since the last commit (RowMarks), or since the last delta (TouchedRows).

A commit contains the rows as they were when it began. Rows are copied between steps, so a step first copies those
pending rows that it is about to change (copy on write). A byte per row records which rows are dirty and which are
pending; it is scanned once per commit.

A delta may be due after every step, so its cost must follow the number of touched rows and not the size of the table:
ids are kept as lists, and marked per row only after many steps. Several streams of deltas, each since another step,
coexist with one checkpoint. tests/checkpoint/test_dirty_rows.py checks that both agree.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.model.frames import Int64
from penstock.pyx import dirty_bits

# Marks scanned per call if few rows are pending: a fraction of a millisecond.
LOOKED_AT = 1 << 20
# Merge the ids of several steps at this number, so that memory does not grow with the number of steps.
MERGE_IDS = 1 << 16


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
        num_changed = dirty_bits.change(self._marks, np.ascontiguousarray(ids), waiting)
        self.num_waiting -= num_changed
        return waiting[:num_changed]

    @property
    def is_dirty(self) -> bool:
        """Return whether a row is dirty. Scans the marks."""
        return bool((self._marks & np.uint8(dirty_bits.CHANGED)).any())

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
        num_taken, self._cursor = dirty_bits.take(self._marks, self._cursor, self._step, LOOKED_AT, taken)
        self.num_waiting -= num_taken
        return taken[:num_taken]


class TouchedRows:
    """The distinct ids of one table that steps touched.

    The ids of a few steps are kept as lists, those of many as marks, a byte per row: merging lists would cost more than
    the steps themselves.

    num_ids : number of ids; one that two steps touched may count twice; num_changes : the same, but it counts twice
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._reset()

    def _reset(self) -> None:
        self._held: list[Int64] = []
        self._marks: npt.NDArray[np.bool_] | None = None
        self._num_marked = 0
        self._all = False
        self.num_ids = self.num_changes = 0

    def add(self, ids: Int64) -> None:
        if self._all or not len(ids):
            return
        self._held.append(np.array(ids))  # a copy: the ids may be a view of memory that is soon reused
        self.num_ids += len(ids)
        self.num_changes += len(ids)
        if self.num_ids - self._num_marked > MERGE_IDS:
            self._mark()
            self.num_ids = self._num_marked

    def add_all(self) -> None:
        self._all, self._held, self.num_ids = True, [], self._num_rows
        self.num_changes += self._num_rows

    def take(self) -> Int64 | range:
        """Return the touched ids in ascending order, and reset them."""
        ids: Int64 | range = range(self._num_rows)
        if not self._all:
            ids = np.unique(np.concatenate(self._held)) if self._marks is None else np.flatnonzero(self._mark())
        self._reset()
        return ids

    def _mark(self) -> npt.NDArray[np.bool_]:
        marks = self._marks = np.zeros(self._num_rows, bool) if self._marks is None else self._marks
        for ids in self._held:
            fresh = np.unique(ids[~marks[ids]])  # those of several steps may occur twice
            self._num_marked += len(fresh)
            marks[fresh] = True
        self._held = []
        return marks


class TouchedKeys:
    """The distinct keys of one dynamic table that steps changed or removed.

    num_ids : number of keys; one that two steps changed may count twice; num_changes : the same, but it counts twice
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._held: list[Int64] = []
        self._num_merged = self.num_ids = self.num_changes = 0

    def add(self, keys: Int64) -> None:
        """Add the changes of a step. keys : int64 (n,), kept by reference"""
        if not len(keys):
            return
        self._held.append(keys)
        self.num_ids += len(keys)
        self.num_changes += len(keys)
        if self.num_ids - self._num_merged > max(MERGE_IDS, self._num_merged):
            self._held = [np.unique(np.concatenate(self._held))]
            self._num_merged = self.num_ids = len(self._held[0])

    def take(self) -> Int64:
        """Return the keys, each once, and reset them."""
        keys = np.unique(np.concatenate([np.zeros(0, np.int64), *self._held]))
        self._reset()
        return keys
