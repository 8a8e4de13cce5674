"""Incremental commits during training: rows are copied in small blocks between steps and written in the background.

One commit is in flight at a time. It is a snapshot of the state when it began: the small parts (gate, position,
counters) are copied at once, rows later, and rows that a step is about to change before that step (dirty_rows.py).
Memory: one byte per row, and the blocks that wait for the disk (writer.py). An optimizer that changes every row in
every step leaves no time for that: its tables are copied completely before the next step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.checkpoint.dirty_rows import RowMarks
from penstock.checkpoint.parts import ALL_ROWS, PartRows
from penstock.checkpoint.records import Record
from penstock.checkpoint.store import REPEATS, Commit, Folder
from penstock.checkpoint.writer import CommitWriter
from penstock.core.observers import ALL_UNSEEN, EVERY_STEP, Pushed, StepObserver, Stepped, Unseen
from penstock.model.frames import Float32, Int64
from penstock.model.options import KEEP

if TYPE_CHECKING:
    from penstock.model.config.specs import TableSpec
    from penstock.rows.bridge.device_tables import DeviceTable

# Approximate size of a block of rows: the longest copy that a step may have to wait for.
BLOCK_BYTES = 1 << 18
# Capacity of the ring buffer for copied rows that wait for the disk: ROOM_BYTES, or ROOM_FRACTION of the tables if that
# is more, but at most MOST_ROOM_BYTES.
ROOM_BYTES, MOST_ROOM_BYTES = 32 << 20, 256 << 20
ROOM_FRACTION = 0.04
# Blocks copied per call while no frame arrives.
BLOCKS_WHEN_IDLE = 16
# The most rows that one dispatch copies from a device, however narrow they are.
MOST_ROWS = 1 << 15
# The fraction of the time between two steps allowed for copying, and for hashing and writing.
COPYING_FRACTION = WRITING_FRACTION = 0.15
NO_MEMORY = np.empty(0, np.float32)


class Saved(NamedTuple):
    """One table as the saver sees it. all_change : whether every step changes every row"""

    table: DeviceTable
    num_rows: int
    all_change: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all parts."""
        return 4 * sum(self.table.part_dims)

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return min(self.num_rows, MOST_ROWS, max(1, BLOCK_BYTES // self.row_bytes))


class CommitContents(NamedTuple):
    """The contents of a commit apart from rows: plain data for the manifest, records for the data file."""

    plain: Mapping[str, Any]
    records: Sequence[Record]


class Saver(StepObserver):
    """Writes commits of some tables into a folder, and tracks the dirty rows since the last one, as an observer.

    describe : returns the rest of the state; called when a commit begins
    last : the newest commit, which the tables are equal to except for the dirty rows; None: there is none
    delta : whether the next commit may be a delta to it
    timed : context manager around work that a step has to wait for
    part : the rows that the tables have
    in_use : whether a run or a service commits with it; it is not replaced until it is closed
    on_durable : called with the step of every commit that has become durable
    has_new_tables : whether the tables are others than those of ``last``, and no commit has them yet

    Call every method under the gate's lock, and commit only between ``open`` and ``close``.
    """

    needs_all_rows = True

    def __init__(
        self,
        folder: Folder,
        tables: dict[str, Saved],
        describe: Callable[[], CommitContents],
        last: Commit | None = None,
        delta: bool = True,
        timed: Callable[[], AbstractContextManager[Any]] = nullcontext,
        part: PartRows = ALL_ROWS,
        on_durable: Callable[[int], None] = lambda step: None,
    ) -> None:
        self._on_durable = on_durable
        self.folder, self._tables, self._describe, self._timed, self._part = folder, tables, describe, timed, part
        self._attempt: str | None = None
        self._marks = {name: RowMarks(saved.num_rows, saved.table.stride) for name, saved in tables.items()}
        self._memory = NO_MEMORY
        self._writer: CommitWriter | None = None
        self._closed = False  # whether the writer has every row of the commit in flight
        self._spent_s = self._began_s = self._advanced_s = 0.0
        self._keep, self._next_number = KEEP, 1
        self._delta = delta and last is not None
        self.last, self.in_use = last, False
        self._rolled_back_to: Commit | None = None  # which the tables are equal to except for the dirty rows
        self._before_open: Commit | None = None
        self.has_new_tables = False
        self._has_new_form = False  # since the last commit began

    def is_for(self, folder: Folder) -> bool:
        """Return whether a folder is this saver's and its newest commit is ``last``."""
        if folder.files.identity() != self.folder.files.identity():
            return False
        newest, last = folder.newest(), self.last
        if newest is None or last is None:
            return newest is last
        # With other files, another run's commit of the same number was copied over this one.
        return (newest.number, newest.files) == (last.number, last.files)

    def open(self, keep: int = KEEP) -> None:
        """Lock the folder, and allocate the ring buffer. keep : number of commits to keep in the folder

        Raises UsageError if another writer has locked the folder.
        """
        self.folder.lock()
        try:
            self.folder.tidy()
            next_number = self.folder.next_number()
            self._allocate()
        except BaseException:
            self.folder.unlock()
            raise
        self._keep, self._next_number = keep, next_number
        self._before_open = self.last

    def has_committed(self) -> bool:
        """Return whether a commit is durable since the last ``open``."""
        return self.last is not self._before_open

    @property
    def is_busy(self) -> bool:
        """Return whether a commit is in flight."""
        return self._writer is not None

    def before_step(self, coalesced: Stepped) -> None:
        """Copy the pending rows that a step changes."""
        if not self.is_busy:
            return
        began = time.perf_counter()
        with self._timed():
            for name, saved in self._tables.items():
                if saved.all_change:
                    self._copy_all(name)
                for rows in coalesced.get(name, ()):
                    for part in rows.summed:
                        self._put(name, self._marks[name].change(part.ids))
        # ``advance`` need not copy these rows any more, so this time counts against its fraction.
        self._spent_s += time.perf_counter() - began

    def most_unseen(self) -> Unseen:
        """Return none while a commit is in flight: every step copies its pending rows first."""
        return EVERY_STEP if self.is_busy else ALL_UNSEEN

    def pushed(self, pushed: Pushed) -> None:
        """Mark rows as dirty."""
        if not pushed.seconds:
            return
        for name, saved in self._tables.items():
            if saved.all_change:
                self._marks[name].change_all()
            for rows in pushed.changed.get(name, ()):
                self._marks[name].change(rows.ids)

    def before_load(self) -> None:
        """Copy all pending rows, and mark all rows as dirty: unknown rows are about to change."""
        for name, marks in self._marks.items():
            self._copy_all(name)
            marks.change_all()

    def thawed(self, specs: Sequence[TableSpec]) -> None:
        """Write all rows with the next commit: no file has the new slots, or rows of this form."""
        for spec in specs:
            self._tables[spec.name] = self._tables[spec.name]._replace(all_change=spec.rule.non_lazy)
        self._has_new_form = True

    def rolled_back(self, commit: Commit) -> None:
        """Let the next commit follow an older one, whose rows the tables have got again, all of them, in a load."""
        for marks in self._marks.values():
            marks.give_up()
        self._rolled_back_to = commit

    def begin(self) -> None:
        """Begin a commit of the current state. Waits for the one in flight."""
        self.finish()
        last = self.last if self._delta else None
        if (older := self._rolled_back_to) is not None:
            last, self._rolled_back_to = (older if self.folder.has_files(older) else None), None
        if self._has_new_form:
            last, self._has_new_form = None, False
            if len(self._memory):
                self._memory = NO_MEMORY
                self._allocate()
        files = last.chain if last is not None and (last.may_grow or not self._is_dirty) else ()
        contents = self._describe()
        for marks in self._marks.values():
            marks.begin(everything=not files)
        draft = Commit(self._next_number, files, contents.plain)
        if files and self.last is not None and self._repeats(draft, self.last):
            draft = replace(draft, contents={**draft.contents, REPEATS: True})
        self._next_number += 1
        self._writer = CommitWriter(self.folder, draft, self._keep, self._memory, self._part, self._attempt)
        self._closed, self._spent_s, self._began_s = False, 0.0, time.perf_counter()
        self._advanced_s = self._began_s
        for record in contents.records:
            self._writer.put(record)

    def advance(self, idle: bool = False) -> None:
        """Copy a block of rows, if time and the disk allow. Raises OSError if the commit in flight cannot be written.

        idle : whether frames have stopped arriving; then copy several blocks
        """
        if self._writer is None:
            return
        now = time.perf_counter()
        if idle or self._spent_s <= COPYING_FRACTION * (now - self._began_s):
            for _ in range(BLOCKS_WHEN_IDLE if idle else 1):
                if not self._closed and self._writer.has_room:
                    self._copy_next()
            self._spent_s += time.perf_counter() - now
        # Last, so that the writer works between the steps.
        if idle:
            self._writer.pace.expedite()
        else:
            self._writer.pace.allow(WRITING_FRACTION * (now - self._advanced_s))
        self._advanced_s = now
        if self._writer.done:
            self.finish()

    def finish(self) -> None:
        """Wait until the commit in flight is durable. Raises OSError if it cannot be written."""
        if self._writer is None:
            return
        try:
            while not self._closed:
                self._copy_next()
            self.last, self._delta = self._writer.result(), True
            self.has_new_tables = False
            self._on_durable(self.last.step)
        except BaseException:
            self._give_up()
            raise
        self._writer = None

    def commit(self) -> None:
        """Commit the current state, and wait until it is durable."""
        self.begin()
        self.finish()

    def write_part(self, number: int, attempt: str) -> Commit:
        """Write the data file of commit ``number`` of a job, which locks the folder and writes the manifest.

        attempt : of the job, hexadecimal: names the file, so that no other attempt writes it
        """
        self._next_number, self._attempt = number, attempt
        self._allocate()
        try:
            self.commit()
        finally:
            self._memory = NO_MEMORY
        assert self.last is not None
        return self.last

    def close(self) -> None:
        """Cancel the commit in flight, release the memory, and unlock the folder."""
        if self._writer is not None:
            self._give_up()
        self._memory = NO_MEMORY
        self.folder.unlock()
        self.in_use = False

    def _allocate(self) -> None:
        """Allocate the pages now: 4 MB of new pages delay a step by 7 ms on a virtual machine, more than the copy."""
        if not len(self._memory):
            table_bytes = sum(saved.num_rows * saved.row_bytes for saved in self._tables.values())
            widest_row = max((saved.row_bytes for saved in self._tables.values()), default=0)
            self._memory = np.full(ring_bytes(table_bytes, widest_row) // 4, 0.0, np.float32)

    @property
    def _is_dirty(self) -> bool:
        return any(marks.is_dirty for marks in self._marks.values())

    def _repeats(self, draft: Commit, last: Commit) -> bool:
        """Return whether a commit of all rows, whose rows are marked as pending, has the state of the last one."""
        changed = any(marks.num_waiting for marks in self._marks.values())
        return not changed and last.parts == ("",) and draft.has_state_of(last)

    def _give_up(self) -> None:
        assert self._writer is not None
        self._writer.cancel()
        for marks in self._marks.values():
            marks.give_up()
        self._writer, self._delta, self._rolled_back_to = None, False, None

    def _copy_next(self) -> None:
        """Copy the next block of pending rows; if there is none, close the commit."""
        assert self._writer is not None
        for name, marks in self._marks.items():
            if marks.num_waiting:
                self._put(name, marks.take_next(self._tables[name].block_rows))
                return
        self._closed = True
        self._writer.close()

    def _copy_all(self, name: str) -> None:
        while self._marks[name].num_waiting:
            self._put(name, self._marks[name].take_next(self._tables[name].block_rows))

    def _put(self, name: str, ids: Int64) -> None:
        """Copy rows to the writer, in blocks. They are no longer marked as pending."""
        saved, start = self._tables[name], 0
        while start < len(ids):
            assert self._writer is not None  # else no row would be pending
            at_once = saved.block_rows
            if saved.table.backend.copies_any_number:
                at_once = max(at_once, 4 * self._writer.most_floats // saved.row_bytes)
            block = ids[start : start + at_once]
            room = self._writer.room(len(block) * saved.row_bytes // 4)
            self._writer.put(*_copied(name, saved, block, room))
            start += at_once


def ring_bytes(table_bytes: int, widest_row: int) -> int:
    """Return the bytes of the ring buffer for tables. table_bytes : of all rows; widest_row : bytes of the largest"""
    most = max(ROOM_BYTES, min(int(ROOM_FRACTION * table_bytes), MOST_ROOM_BYTES))
    # At least two rows fit, however wide they are; and no commit copies more than the tables.
    return max(min(most, 2 * table_bytes), 2 * widest_row)


def _copied(name: str, saved: Saved, ids: Int64, room: Float32) -> tuple[Record, Callable[[], object]]:
    """Start a copy of the current rows into ``room``. Return its record, and a function that waits for the copy."""
    rows = room.reshape(len(ids), -1)
    wait = saved.table.copy_rows(ids if saved.table.backend.copies_any_number else _padded(saved, ids), rows)
    header = {"table": name, "dims": saved.table.part_dims}
    step = int(ids[1]) - int(ids[0]) if len(ids) > 1 else 1
    if step > 0 and (np.diff(ids) == step).all():
        return Record("rows", {**header, "first": int(ids[0]), "step": step}, {"rows": rows}), wait
    return Record("rows", header, {"rows": rows, "ids": ids}), wait


def _padded(saved: Saved, ids: Int64) -> Int64:
    """Pad ids to the size of a block: each number of rows needs a program, whose compilation outlasts many steps."""
    lacking = saved.block_rows - len(ids)
    return np.concatenate([ids, np.setdiff1d(np.arange(len(ids) + lacking), ids)[:lacking]]) if lacking else ids
