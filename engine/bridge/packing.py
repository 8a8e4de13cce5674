"""The rows of a step in host memory, as the programs take them: by device and by line, padded to a bucket.

Rows are routed to devices once for all tables of a stack, then packed into as many dispatches as their number requires.
Native code does both, ranges of rows and devices at a time, on all threads of a ``ThreadTeam``.

Where a row is narrower than its line and all tables of a stack have one dim, rows are sent compact: one after the
other, those of a line together, each with a mark of one byte (partition.BEGINS). The device spreads them into lines
(``programs.spreading``). Else whole lines are sent. SparseCores take rows by their numbers, in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.bridge.row_format import UNTOUCHED
from penstock.bridge.sharding import GROWTH, LINES, MAX_BUCKET_BY_ROW, NUM_SHARDS, Room, bucket
from penstock.bridge.stacking import MemberRows, Stack, multiple_of
from penstock.frames import Float32, Int32, Int64, UInt32
from penstock.pyx import partition
from penstock.threads import ThreadTeam

UInt8 = npt.NDArray[np.uint8]
T = TypeVar("T", bound=np.generic)
R = TypeVar("R")

# Rows that one task routes.
AT_ONCE = 32_768


class Routing(NamedTuple):
    """The destinations of rows, one entry per row, in the order of the MemberRows.

    devices, lines, places : int32 (n,), the device, the line on it, and the place among the rows of the line
    offsets : int32 (n,), where the row begins in the words of its line
    order : int32 (n,), the entries by device; starts : int64 (devices + 1,), where those of each begin
    rows : the rows of each MemberRows, float32 (n_i, dim_i)
    keys : uint32 (n,), of the rounding to bfloat16; None: without. A table that is rounded has a stack for itself
    """

    devices: Int32
    lines: Int32
    places: Int32
    offsets: Int32
    order: Int32
    starts: Int64
    rows: tuple[Float32, ...]
    keys: UInt32 | None

    @property
    def by_device(self) -> list[Int32]:
        """The entries of each device."""
        return [self.order[start:stop] for start, stop in zip(self.starts[:-1], self.starts[1:], strict=True)]


class Packed(NamedTuple):
    """Rows of one dispatch; axis 0 is the device.

    lines : int32 (devices, bucket), line numbers, or by row those of rows, unique; pads lie beyond the device's lines
    words : int32 (devices, …), the bits of the rows' float32 values: of lines (bucket, …), or UNTOUCHED; of rows that
        are compact or sent by number, ``bucket`` of them, in blocks of 128 words
    counts : int32 (devices,), the number of lines before the pads
    marks : uint8 (devices, bucket), of compact rows; else None
    keys : uint32, of the rounding to bfloat16, of the rows of each line (devices, bucket, group), 0 for rows without a
        gradient; or of compact rows (devices, bucket); or None
    cells : int64 (n,), the line of each row, or the place of each compact row, among those of all devices; None without
        keys, unless the caller decides the capacity
    """

    lines: Int32
    words: Int32
    counts: Int32
    marks: UInt8 | None
    keys: UInt32 | None
    cells: Int64 | None

    @property
    def arguments(self) -> list[npt.NDArray[Any]]:
        """Those of a program, in its order."""
        return [array for array in self[:5] if array is not None]


class Packer:
    """Packs rows of the tables of a stack. team : the threads that do; by_row : send rows by their numbers"""

    def __init__(self, stack: Stack, team: ThreadTeam, by_row: bool = False) -> None:
        self._stack, self._team, self._by_row = stack, team, by_row
        self._compact, self._largest = stack.compact and not by_row, MAX_BUCKET_BY_ROW if by_row else stack.largest
        self._shares_lines = not by_row and any(table.line.group > 1 for table in stack.tables)
        self._leaves_gaps = any(table.dim < stack.line.halves * stack.line.width for table in stack.tables)

    def route(self, tables: Sequence[MemberRows]) -> Routing:
        """Return the destinations of rows of several tables."""
        num_rows = sum(len(table.ids) for table in tables)
        devices, lines, places = (np.empty(num_rows, np.int32) for _ in range(3))
        offsets = np.zeros(num_rows, np.int32)
        tasks: list[Callable[[], None]] = []
        first = 0
        for table in tables:
            for start in range(0, len(table.ids), AT_ONCE):
                ids = table.ids[start : start + AT_ONCE]
                span = slice(first + start, first + start + len(ids))
                out = devices[span], lines[span], places[span], offsets[span]
                tasks.append(partial(self._destinations, table.member, ids, *out))
            first += len(table.ids)
        self._run(tasks)
        order, starts = partition.by_device(devices, self._stack.num_devices)
        keys = [table.keys for table in tables if table.keys is not None]
        rows = tuple(table.rows for table in tables)
        return Routing(devices, lines, places, offsets, order, starts, rows, _joined(keys) if keys else None)

    def _destinations(
        self, member: int, ids: Int64, devices: Int32, lines: Int32, places: Int32, offsets: Int32
    ) -> None:
        table, first_line = self._stack.tables[member], self._stack.first_lines[member]
        shards = (table.vocabulary_size, NUM_SHARDS, table.mod, table.shards_per_device, table.rows_per_shard)
        if self._by_row:  # a row for each line
            partition.destinations(ids, *shards, 1, first_line * table.line.group, devices, lines, places)
            return
        partition.destinations(ids, *shards, table.line.group, first_line, devices, lines, places)
        if table.line.group > 1 and not self._compact:
            np.take(
                table.line.offsets(np.arange(table.line.group, dtype=np.int32)).astype(np.int32), places, out=offsets
            )

    def slices(self, routing: Routing) -> Iterator[list[Int32]]:
        """Yield the entries of each device that one dispatch may update, until they have been all."""
        each, most = routing.by_device, self._largest
        for start in range(0, max(map(len, each)), most):
            yield [entries[start : start + most] for entries in each]

    def capacity(self, rows: int, growth: float = GROWTH) -> int:
        """Return the rows or lines per device of the dispatch of ``rows``: a bucket."""
        return bucket(rows, multiple_of(self._stack.line), growth, self._largest)

    def pack(
        self,
        routing: Routing,
        entries: Sequence[Int32],
        room: Room = np.empty,
        growth: float = GROWTH,
        capacity: int | None = None,
    ) -> Packed:
        """Pack entries of each device, padded to a bucket.

        room : creates the arrays of the result: (shape, dtype) → array; growth : of the buckets
        capacity : lines per device, if the caller decides it
        """
        stack = self._stack
        numbered = self._run([partial(self._numbered, routing.lines, part) for part in entries])
        most = max(len(part if self._compact else lines) for part, (_, lines, _) in zip(entries, numbered, strict=True))
        cells = np.empty(len(routing.lines), np.int64) if routing.keys is not None or capacity else None
        capacity = capacity or self.capacity(most, growth)
        devices = len(entries)
        lines = room((devices, capacity), np.int32)
        lines[:] = stack.lines_per_device + np.arange(capacity, dtype=np.int32)
        counts = np.array([len(distinct) for _, distinct, _ in numbered], np.int32)
        marks = keys = None
        if self._compact or self._by_row:
            words = room((devices, capacity * stack.line.dim // LINES, LINES), np.int32)
            marks = room((devices, capacity), np.uint8) if self._compact else None
        else:
            words = room((devices, capacity, stack.line.halves * stack.line.width), np.int32)
        tasks = []
        for device, (part, numbering) in enumerate(zip(entries, numbered, strict=True)):
            room_of = lines[device], words[device], None if marks is None else marks[device]
            tasks.append(partial(self._lay, routing, part, numbering, *room_of, cells, device * capacity))
        self._run(tasks)
        if routing.keys is not None and cells is not None:
            which = np.concatenate(entries)
            keys = room((devices, capacity, *([] if self._compact else [stack.line.group])), np.uint32)
            keys.fill(0)
            if self._compact:
                keys.reshape(-1)[cells[which]] = routing.keys[which]
            else:
                keys.reshape(-1, stack.line.group)[cells[which], routing.places[which]] = routing.keys[which]
        return Packed(lines, words, counts, marks, keys, cells)

    def _run(self, tasks: Sequence[Callable[[], R]]) -> list[R]:
        """Return the results of tasks, in their order."""
        results: dict[int, R] = {}

        def run(number: int) -> bool:
            results[number] = tasks[number]()
            return True

        self._team.run([partial(run, number) for number in range(len(tasks))])
        return [results[number] for number in range(len(tasks))]

    def _numbered(self, lines: Int32, entries: Int32) -> tuple[Int32, Int32, Int32]:
        """Return ``partition.number`` of one device's entries; where no rows share a line, they are their lines."""
        if self._shares_lines:
            return partition.number(entries, lines)
        numbers = np.arange(len(entries), dtype=np.int32)
        return numbers, lines[entries], np.ones(len(entries), np.int32)

    def _lay(
        self,
        routing: Routing,
        entries: Int32,
        numbered: tuple[Int32, Int32, Int32],
        lines: Int32,
        words: Int32,
        marks: UInt8 | None,
        cells: Int64 | None,
        first_cell: int,
    ) -> None:
        """Lay one device's rows into its part of the result."""
        numbers, distinct, counts = numbered
        lines[: len(distinct)] = distinct
        if self._by_row:
            words = words.reshape(-1, self._stack.line.dim)
        if marks is None:
            blank = UNTOUCHED if self._stack.line.masked else 0
            words[0 if self._leaves_gaps and not self._by_row else len(distinct) :] = blank
            positions = numbers
        else:
            begins = np.cumsum(counts, dtype=np.int32) - counts
            next_of, positions = begins.copy(), np.empty(len(entries), np.int32)
            marks[len(entries) :] = 0
        first = 0
        ends = np.searchsorted(entries, np.cumsum([len(rows) for rows in routing.rows]))
        for start, end, rows in zip([0, *ends[:-1]], ends, routing.rows, strict=True):
            part, part_numbers = entries[start:end], numbers[start:end]
            if marks is None:
                partition.lay_lines(part, part_numbers, routing.offsets, first, rows, words)
            else:
                compact = words.reshape(-1, self._stack.line.dim)
                partition.lay_rows(
                    part, part_numbers, routing.places, first, rows, next_of, compact, marks, positions[start:end]
                )
            first += len(rows)
        if marks is not None:
            marks[begins] |= partition.BEGINS
            marks[len(entries) :] = partition.BEGINS  # pads: each the first row of a line beyond the device's
        if cells is not None:
            cells[entries] = positions + np.int64(first_cell)


def _joined(arrays: Sequence[npt.NDArray[T]]) -> npt.NDArray[T]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
