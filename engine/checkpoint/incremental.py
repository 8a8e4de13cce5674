"""Saves while steps go on: rows are copied out in small blocks between steps, written in the background.

One commit is under way at a time. It holds everything as it was when it began: what is small (gate,
position, counters) is taken at once, rows are copied later, and those that a step is about to change
before it (rows.py). Memory: one byte per row, and the blocks that wait for the disk (writer.py). Optimizers
that change every row at every step leave nothing to go on beside: their tables are copied whole before the
next step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.checkpoint.digests import VERSION
from penstock.checkpoint.dirty_rows import RowMarks
from penstock.checkpoint.records import Record
from penstock.checkpoint.ring_buffer import Ring
from penstock.checkpoint.store import Commit, Folder
from penstock.checkpoint.writer import CommitWriter

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

# Rows are copied in blocks of about so many bytes: what a step may have to wait for.
BLOCK_BYTES = 1 << 18
# Copies of rows that wait for the disk: the memory that saving takes beside the marks is this much, or this share of
# the tables where that is more, but no more than that.
ROOM_BYTES, MOST_ROOM_BYTES = 32 << 20, 256 << 20
ROOM_SHARE = 0.04
# Blocks copied at a time where no frame comes in.
BLOCKS_WHEN_IDLE = 16
# However narrow the rows are: what one dispatch may bring from a device.
MOST_ROWS = 1 << 15
# The share of the time between two steps that copying may take, and that hashing and writing may.
SHARE = WRITING_SHARE = 0.15
# A chain longer than this, or deltas larger than their base, and the next commit is a new base.
MAX_DELTAS = 64
KEEP = 3


class Table(Protocol):
    """What is asked of a table on the devices."""

    @property
    def num_parts(self) -> int: ...

    @property
    def stride(self) -> int: ...

    @property
    def copies_any_number(self) -> bool: ...

    def copy_rows(self, ids: Int64, out: Float32) -> Callable[[], object]: ...


class Saved(NamedTuple):
    """One table as the saver sees it. all_change : every step changes every row."""

    table: Table
    num_rows: int
    dim: int
    all_change: bool


class Contents(NamedTuple):
    """What a commit holds beside rows: plain data for the manifest, records for the data file."""

    plain: Mapping[str, Any]
    records: Sequence[Record]


class Saver:
    """Writes commits of some tables into a folder, and knows which rows have changed since the last one.

    describe : the rest of the state, asked for when a commit begins
    last : the newest commit, which the tables are equal to but for the rows told of; None: there is none
    delta : whether the next commit may be a delta to it
    in_use : a run or a service commits with it; no other may take its place until it is closed

    Every method is called with the gate still. What commits is called between ``open`` and ``close``.
    """

    def __init__(
        self,
        folder: Folder,
        tables: Mapping[str, Saved],
        describe: Callable[[], Contents],
        last: Commit | None = None,
        delta: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.folder, self._tables, self._describe, self._clock = folder, tables, describe, clock
        self._marks = {name: RowMarks(saved.num_rows, saved.table.stride) for name, saved in tables.items()}
        self._ring = _ring_for(list(tables.values()))
        self._writer: CommitWriter | None = None
        self._closed = False  # every row of the commit under way is with the writer
        self._spent_s = self._began_s = self._advanced_s = 0.0
        self._keep, self._next_number = KEEP, 1
        self._delta = delta and last is not None
        self.last, self.in_use = last, False

    def is_for(self, folder: Folder) -> bool:
        """This folder is the saver's, and its newest commit the one the tables come from."""
        return (
            folder.path.is_dir()
            and self.folder.path.is_dir()
            and folder.path.samefile(self.folder.path)
            and folder.numbers()[-1:] == ([self.last.number] if self.last else [])
            # Not another run's commit of the same number, copied over ours.
            and (self.last is None or folder.load(self.last.number).files == self.last.files)
        )

    def open(self, keep: int = KEEP) -> None:
        """Keep other writers out of the folder. keep : commits that stay."""
        self.folder.lock()
        try:
            numbers = self.folder.numbers()
            self.folder.tidy(max(keep, len(numbers)))
        except BaseException:
            self.folder.unlock()
            raise
        self._ring.touch()
        self._keep, self._next_number = keep, numbers[-1] + 1 if numbers else 1

    @property
    def is_busy(self) -> bool:
        """A commit is under way."""
        return self._writer is not None

    @property
    def may_begin(self) -> bool:
        """Another commit need not wait for one that is under way."""
        return not self.is_busy

    def before_step(self, touched: Mapping[str, Sequence[Int64]]) -> None:
        """A step is about to change these rows: lists of distinct ids."""
        began = self._clock()
        for name, saved in self._tables.items():
            marks = self._marks[name]
            if saved.all_change:
                self._copy_all(name)
                marks.change_all()
            for ids in touched.get(name, ()):
                self._put(name, marks.change(ids))
        # Rows copied here need not be copied in the background, which waits as long.
        self._spent_s += self._clock() - began

    def before_any_change(self) -> None:
        """Something is about to change rows nobody told of."""
        for name, marks in self._marks.items():
            self._copy_all(name)
            marks.change_all()

    def begin(self) -> None:
        """Begin a commit of what is now. Waits for the one under way."""
        self.finish()
        files = self.last.files if self.last is not None and self._delta and _may_grow(self.last) else ()
        contents = self._describe()
        for marks in self._marks.values():
            marks.begin(everything=not files)
        draft = Commit(self._next_number, tuple(files), contents.plain)
        self._next_number += 1
        self._writer = self._new_writer(draft)
        self._closed, self._spent_s, self._began_s = False, 0.0, self._clock()
        self._advanced_s = self._began_s
        for record in contents.records:
            self._writer.put(partial(_itself, record))

    def advance(self, idle: bool = False) -> None:
        """Copy a block, where time and the disk allow. Raises OSError where the commit under way cannot be written.

        idle : no step comes for a while, as it seems
        """
        if self._writer is None:
            return
        now = self._clock()
        if idle or self._spent_s <= SHARE * (now - self._began_s):
            for _ in range(BLOCKS_WHEN_IDLE if idle else 1):
                if not self._closed and self._writer.has_room:
                    self._copy_next()
            self._spent_s += self._clock() - now
        # Last, so that it falls between the steps.
        if idle:
            self._writer.hurry()
        else:
            self._writer.allow(WRITING_SHARE * (now - self._advanced_s))
        self._advanced_s = now
        if self._writer.done:
            self.finish()

    def finish(self) -> None:
        """The commit under way is on disk."""
        if self._writer is None:
            return
        try:
            while not self._closed:
                self._copy_next()
            self.last, self._delta = self._writer.result(), True
        except BaseException:
            self._give_up()
            raise
        self._writer = None

    def commit(self) -> None:
        """Commit what is now, and wait for it."""
        self.begin()
        self.finish()

    def close(self) -> None:
        """Give up what is under way, and let others write to the folder."""
        if self._writer is not None:
            self._give_up()
        self._ring.let_go()
        self.folder.unlock()
        self.in_use = False

    def _new_writer(self, draft: Commit) -> CommitWriter:
        return CommitWriter(self.folder, draft, self._keep, self._ring)

    def _give_up(self) -> None:
        assert self._writer is not None
        self._writer.cancel()
        self._ring.take_all_back()
        for marks in self._marks.values():
            marks.give_up()
        self._writer, self._delta = None, False

    def _copy_next(self) -> None:
        """The next block of rows that wait; where there is none, the commit has all its records."""
        assert self._writer is not None
        for name, marks in self._marks.items():
            if marks.num_waiting:
                self._put(name, marks.take_next(_rows_at_once(self._tables[name])))
                return
        self._closed = True
        self._writer.close()

    def _copy_all(self, name: str) -> None:
        while self._marks[name].num_waiting:
            self._put(name, self._marks[name].take_next(_rows_at_once(self._tables[name])))

    def _put(self, name: str, ids: Int64) -> None:
        """Copy rows, which no longer wait, to the writer, in blocks."""
        saved, start = self._tables[name], 0
        while start < len(ids):
            assert self._writer is not None  # else no row would wait
            at_once = _rows_at_once(saved)
            if saved.table.copies_any_number:
                at_once = max(at_once, 4 * self._writer.most_floats // _row_bytes(saved))
            block = ids[start : start + at_once]
            room = self._writer.room(len(block) * _row_bytes(saved) // 4)
            self._writer.put(_copied(name, saved, block, room), lent=True)
            start += at_once


def _ring_for(tables: Sequence[Saved]) -> Ring:
    row_bytes = [_row_bytes(saved) for saved in tables]
    table_bytes = sum(saved.num_rows * each for saved, each in zip(tables, row_bytes, strict=True))
    most = max(ROOM_BYTES, min(int(ROOM_SHARE * table_bytes), MOST_ROOM_BYTES))
    # However wide a row is, two of them find room; and no commit copies more than the tables.
    return Ring(max(min(most, 2 * table_bytes), 2 * max(row_bytes, default=0)) // 4)


def _row_bytes(saved: Saved) -> int:
    return 4 * saved.dim * saved.table.num_parts


def _rows_at_once(saved: Saved) -> int:
    return min(saved.num_rows, MOST_ROWS, max(1, BLOCK_BYTES // _row_bytes(saved)))


def _copied(name: str, saved: Saved, ids: Int64, room: Float32) -> Callable[[], Record]:
    """The rows of these ids as they are now, into the room; what waits for their copy and makes a record of it."""
    values = room.reshape(saved.table.num_parts, len(ids), saved.dim)
    wait = saved.table.copy_rows(ids if saved.table.copies_any_number else _with_others(saved, ids), values)
    step = int(ids[1]) - int(ids[0]) if len(ids) > 1 else 1
    about: dict[str, Any] = {"table": name}
    arrays: dict[str, npt.NDArray[Any]] = {"values": values}
    if step > 0 and (np.diff(ids) == step).all():
        about |= {"first": int(ids[0]), "step": step}
    else:
        arrays["ids"] = ids

    def record() -> Record:
        wait()
        return Record("rows", about, arrays)

    return record


def _with_others(saved: Saved, ids: Int64) -> Int64:
    """As many ids as a block has: each number of rows is a program, which takes longer to compile than many steps."""
    lacking = _rows_at_once(saved) - len(ids)
    return np.concatenate([ids, np.setdiff1d(np.arange(len(ids) + lacking), ids)[:lacking]]) if lacking else ids


def _itself(record: Record) -> Record:
    return record


def _may_grow(last: Commit) -> bool:
    """Another delta may follow it: its chain is not too long, and has the format's current digests."""
    bases = [file for file in last.files if file.parent is None]
    deltas = [file for file in last.files if file.parent is not None]
    size, grown = (sum(file.num_bytes for file in files) for files in (bases, deltas))
    return last.version == VERSION and len(deltas) < MAX_DELTAS * len(bases) and grown <= size
