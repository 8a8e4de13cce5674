"""The rows of a table that steps touched since the last delta.

Checkpoints track dirty rows too (checkpoint/dirty_rows.py): a byte per row, scanned once per commit, which also records
which rows are not copied yet. A delta may be due after every step, so its cost must follow the number of touched rows
and not the size of the table: ids are kept as lists, and marked per row only after many steps. Several streams of
deltas, each since another step, coexist with one checkpoint. tests/test_dirty_rows.py checks that both agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]

# Merge the ids of several steps at this number, so that memory does not grow with the number of steps.
MERGE_IDS = 1 << 16


class TouchedRows:
    """The distinct ids of one table that steps touched.

    The ids of a few steps are kept as lists, those of many as marks, a byte per row: merging lists would cost more than
    the steps themselves.

    num_ids : number of ids; one that two steps touched may count twice; num_times : the same, but it counts twice
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._held: list[Int64] = []
        self._marks: npt.NDArray[np.bool_] | None = None
        self._num_marked = 0
        self._all = False
        self.num_ids = self.num_times = 0

    def add(self, ids: Int64) -> None:
        if self._all or not len(ids):
            return
        self._held.append(np.array(ids))  # a copy: the ids may be a view of memory that is soon reused
        self.num_ids += len(ids)
        self.num_times += len(ids)
        if self.num_ids - self._num_marked > MERGE_IDS:
            self._mark(self._held)
            self._held, self.num_ids = [], self._num_marked

    def add_all(self) -> None:
        self._all, self._held, self.num_ids = True, [], self._num_rows
        self.num_times += self._num_rows

    def take(self) -> Int64 | range:
        """Return the touched ids in ascending order, and reset them."""
        ids = range(self._num_rows) if self._all else self._distinct()
        if self._marks is not None and self._num_marked:
            self._marks[:] = False
        self._held, self._num_marked, self._all = [], 0, False
        self.num_ids = self.num_times = 0
        return ids

    def _distinct(self) -> Int64:
        if not self._num_marked:
            return np.unique(np.concatenate(self._held))
        return np.flatnonzero(self._mark(self._held))

    def _mark(self, held: Sequence[Int64]) -> npt.NDArray[np.bool_]:
        marks = self._marks = np.zeros(self._num_rows, bool) if self._marks is None else self._marks
        for ids in held:  # the ids of one step are distinct
            self._num_marked += len(ids) - int(np.count_nonzero(marks[ids]))
            marks[ids] = True
        return marks
