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

from penstock.base.threads import ThreadTeam
from penstock.model.frames import Int32, Int64, UInt32
from penstock.pyx import partition
from penstock.rows.bridge.row_format import UNTOUCHED
from penstock.rows.bridge.sharding import GROWTH, LINES, MAX_BUCKET, Layout, Room, bucket
from penstock.rows.bridge.stacking import MemberRows, Stack, multiple_of

UInt8 = npt.NDArray[np.uint8]
R = TypeVar("R")

# Rows that one task routes.
AT_ONCE = 32_768
# Rows of at least so many bytes, of a dispatch of at least so many, are written past the caches, which would not hold
# them until they are sent. Shorter rows are laid out faster through the caches (bench/results/attempts-2026-11-28.md).
STREAMED_ROW, STREAMED_BYTES = 512, 1 << 21


class RowBlock(NamedTuple):
    """Neighbouring rows that one task routes and lays out.

    rows : their range among all rows; table : whose they are; own : their range among its rows
    """

    rows: slice
    table: MemberRows
    own: slice


class Routing(NamedTuple):
    """The destinations of rows, one entry per row, in the order of the MemberRows.

    devices, lines : int32 (n,), the device, and the line on it; by row: the number of the row on it
    places : int32 (n,), the place among the rows of the line; None where a line has one row
    cells : int32 (n,), the number among the rows of the device
    entries : int32 (n,), the rows by device; None where a line has one row
    blocks : of all rows
    firsts : int64 (blocks + 1, devices), how many rows each device has before a block
    """

    devices: Int32
    lines: Int32
    places: Int32 | None
    cells: Int32
    entries: Int32 | None
    blocks: Sequence[RowBlock]
    firsts: Int64

    @property
    def counts(self) -> Int64:
        """The rows of each device, int64 (devices,)."""
        counts: Int64 = self.firsts[-1]
        return counts


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
        self._compact = stack.compact and not by_row
        self._shares_lines = not by_row and any(table.line.group > 1 for table in stack.tables)
        line = stack.line.halves * stack.line.width
        self._width = stack.line.dim if by_row or self._compact else line
        self._leaves_gaps = any(table.dim < self._width for table in stack.tables)
        self._offsets = [self._offsets_of(table) for table in stack.tables]

    def _offsets_of(self, table: Layout) -> Int32 | None:
        """Return where the rows of a line begin in it, by their place; None: at 0."""
        if self._compact or not self._shares_lines:
            return None
        return table.line.offsets(np.arange(table.line.group, dtype=np.int32)).astype(np.int32)

    def route(self, tables: Sequence[MemberRows]) -> Routing:
        """Return the destinations of rows of several tables."""
        blocks: list[RowBlock] = []
        num_rows = 0
        for table in tables:
            for start in range(0, len(table.ids), AT_ONCE):
                own = slice(start, min(start + AT_ONCE, len(table.ids)))
                blocks.append(RowBlock(slice(num_rows + own.start, num_rows + own.stop), table, own))
            num_rows += len(table.ids)
        devices, lines, cells = (np.empty(num_rows, np.int32) for _ in range(3))
        places = entries = starts = None
        firsts = np.zeros((len(blocks) + 1, self._stack.num_devices), np.int64)
        if self._shares_lines:
            places, entries = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32)
        self._run(
            [
                partial(self._destinations, block, devices, lines, places, counts)
                for block, counts in zip(blocks, firsts[1:], strict=True)
            ]
        )
        np.cumsum(firsts, axis=0, out=firsts)
        if entries is not None:
            starts = np.cumsum(firsts[-1]) - firsts[-1]
        self._run(
            [
                partial(partition.order, devices[rows], rows.start, before.copy(), cells[rows], starts, entries)
                for (rows, _, _), before in zip(blocks, firsts[:-1], strict=True)
            ]
        )
        return Routing(devices, lines, places, cells, entries, blocks, firsts)

    def _destinations(self, block: RowBlock, devices: Int32, lines: Int32, places: Int32 | None, counts: Int64) -> None:
        rows, (member, ids, *_), own = block
        table, first = self._stack.tables[member], self._stack.first_lines[member]
        group = table.line.group
        if self._by_row:  # a row for each line
            group, first = 1, first * group
        out = devices[rows], lines[rows], None if places is None else places[rows], counts
        partition.destinations(ids[own], *table.shards, group, first, *out)

    def slices(self, routing: Routing, largest: int) -> Iterator[slice]:
        """Yield the rows of each device that one dispatch updates, ranges of ``cells``, until they have been all.

        largest : the most rows per device and dispatch
        """
        for start in range(0, int(routing.counts.max()), largest):
            yield slice(start, start + largest)

    def capacity(self, rows: int, largest: int, growth: float = GROWTH) -> int:
        """Return the rows or lines per device of the dispatch of ``rows``: a bucket."""
        return bucket(rows, multiple_of(self._stack.line), growth, largest)

    def pack(
        self,
        routing: Routing,
        span: slice | None = None,
        room: Room = np.empty,
        growth: float = GROWTH,
        capacity: int | None = None,
        largest: int = MAX_BUCKET,
    ) -> Packed:
        """Pack rows of each device, padded to a bucket. The words of pads are undefined.

        span : the rows of each device, as ``slices`` yields it; None: all
        room : creates the arrays of the result: (shape, dtype) → array; growth : of the buckets
        capacity : lines per device, if the caller decides it; largest : bucket
        """
        stack, devices = self._stack, len(routing.counts)
        start, end = (0, int(routing.counts.max())) if span is None else (span.start, span.stop)
        sizes = np.clip(routing.counts - start, 0, end - start)
        cells, distinct, entries = routing.cells, [], []
        if routing.entries is not None:
            begins = np.cumsum(routing.counts) - routing.counts + start
            entries = [routing.entries[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
            # Rows of other dispatches have none of the cells.
            cells = np.full(len(cells), -1, np.int32) if sizes.sum() < len(cells) else np.empty_like(cells)
            distinct = self._run([partial(partition.number, part, routing.lines, cells) for part in entries])
        counts = np.array([len(lines) for lines in distinct], np.int32) if distinct else sizes.astype(np.int32)
        keys = [block.table.keys[block.own] for block in routing.blocks if block.table.keys is not None]
        wants_cells = bool(keys) or capacity is not None
        capacity = capacity or self.capacity(int((sizes if self._compact else counts).max()), largest, growth)
        lines = room((devices, capacity), np.int32)
        marks = None
        if self._compact or self._by_row:
            words = room((devices, capacity * self._width // LINES, LINES), np.int32)
            marks = room((devices, capacity), np.uint8) if self._compact else None
        else:
            words = room((devices, capacity, self._width), np.int32)
        rows = words.reshape(devices, capacity, self._width)
        tasks: list[Callable[[], None]] = []
        for device, count in enumerate(counts.tolist()):
            lines[device, count:] = np.arange(stack.lines_per_device + count, stack.lines_per_device + capacity)
            if distinct:
                lines[device, :count] = distinct[device]
            if marks is not None and routing.places is not None:
                tasks.append(partial(partition.group, entries[device], count, routing.places, cells, marks[device]))
            elif marks is not None:
                marks[device] = partition.BEGINS
            elif self._leaves_gaps:
                tasks.append(partial(rows[device, :count].fill, UNTOUCHED if stack.line.masked else 0))
        self._run(tasks)
        first = 0 if distinct else start  # of the cells
        laid = partial(self._lay, routing, cells, first, rows, None if distinct else lines)
        self._run(
            [
                partial(laid, block)
                for block, before, after in zip(routing.blocks, routing.firsts[:-1], routing.firsts[1:], strict=True)
                if ((before < end) & (after > start)).any()
            ]
        )
        all_cells = routing.devices * np.int64(capacity) + cells - first if wants_cells else None
        of_rows = self._keys(routing, np.concatenate(keys), cells - first, capacity, room) if keys else None
        return Packed(lines, words, counts, marks, of_rows, all_cells)

    def _lay(
        self, routing: Routing, cells: Int32, first: int, words: Int32, out_lines: Int32 | None, block: RowBlock
    ) -> None:
        """Copy the rows of a block to their cells."""
        rows, (member, _, values, *_), own = block
        offsets = self._offsets[member]
        partition.lay(
            routing.devices[rows],
            cells[rows],
            first,
            values[own],
            words,
            None if offsets is None or routing.places is None else routing.places[rows],
            offsets,
            None if out_lines is None else routing.lines[rows],
            out_lines,
            values.shape[1] * 4 >= STREAMED_ROW and words.nbytes >= STREAMED_BYTES,
        )

    def _keys(self, routing: Routing, keys: UInt32, cells: Int32, capacity: int, room: Room) -> UInt32:
        """Return the keys of the rows of a dispatch, as ``Packed`` has them. cells : the others' are none of them"""
        group = 1 if self._compact else self._stack.line.group
        packed: UInt32 = room((len(routing.counts), capacity, *([] if self._compact else [group])), np.uint32)
        packed.fill(0)
        here = (cells >= 0) & (cells < capacity)
        places = 0 if self._compact or routing.places is None else routing.places[here]
        packed.reshape(-1, group)[routing.devices[here] * np.int64(capacity) + cells[here], places] = keys[here]
        return packed

    def _run(self, tasks: Sequence[Callable[[], R]]) -> list[R]:
        """Return the results of tasks, in their order."""
        if len(tasks) == 1:
            return [tasks[0]()]
        results: dict[int, R] = {}

        def run(number: int) -> bool:
            results[number] = tasks[number]()
            return True

        self._team.run([partial(run, number) for number in range(len(tasks))])
        return [results[number] for number in range(len(tasks))]
