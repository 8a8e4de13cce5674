"""Stacks: tables that share arrays, and the place of each in them. No other module knows it.

Tables with one line format that one program updates share arrays: on every device the lines of the first table, then
those of the second, and so on. A step is then one dispatch for all of them. For reads and writes each table is still
separate: a range of lines, none of them shared with another table.

A step's rows are routed to devices once for all tables of a stack (``Stack.route``), then packed into as many
dispatches as their number requires.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.bridge.programs import BY_ROW
from penstock.bridge.row_format import UNTOUCHED, Line
from penstock.bridge.sharding import (
    GROWTH,
    LINES,
    MAX_BUCKET,
    READ_GROWTH,
    READ_ROWS,
    Layout,
    Room,
    TableDefinition,
    bucket,
)
from penstock.pyx import partition
from penstock.pyx.id_table import IdTable
from penstock.updates import UpdateRule

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt32 = npt.NDArray[np.uint32]
Float32 = npt.NDArray[np.float32]
T = TypeVar("T", bound=np.generic)

# Per device: TensorFlow's limit for the shard of a stack. Stacking saves nothing for larger tables.
MAX_STACK_BYTES = 2 << 30


def form(layout: Layout, rule: UpdateRule) -> Line:
    """Return the line format for steps. If rows share lines and a rule is element-wise, only the width matters."""
    if layout.lanes == 1 or rule.algorithm in BY_ROW or _must_be_alone(layout, rule):
        return layout.line
    return Line(layout.line.width, layout.num_slots, layout.lanes, halved=layout.halved)


def _must_be_alone(layout: Layout, rule: UpdateRule) -> bool:
    """Return whether a table must not be stacked.

    Rounding to bfloat16 is keyed by table and id; a non-lazy rule updates every row, so saved dispatches do not matter.
    """
    return layout.bfloat16 or rule.non_lazy


def stacked(tables: Sequence[TableDefinition]) -> list[list[int]]:
    """Return the groups of tables that share arrays, as lists of ascending indices. First fit, as in TensorFlow."""
    stacks: list[tuple[Hashable, list[int]]] = []
    sizes: list[int] = []
    for index, (layout, rule, starts, rate) in enumerate(tables):
        key = index if _must_be_alone(layout, rule) else (form(layout, rule), rule, starts, rate)
        size = layout.nbytes // layout.num_devices
        fits = (s for s, (k, _) in enumerate(stacks) if k == key and sizes[s] + size <= MAX_STACK_BYTES)
        at = next(fits, None)
        if at is None:
            at = len(stacks)
            stacks.append((key, []))
            sizes.append(0)
        stacks[at][1].append(index)
        sizes[at] += size
    return [members for _, members in stacks]


class TableRows(NamedTuple):
    """Rows for one table of a stack: distinct ids, and float32 (n, dim).

    member : index of the table in the stack; keys : uint32 (n,), of the rounding to bfloat16; None: without
    """

    member: int
    ids: Int64
    rows: Float32
    keys: UInt32 | None = None


class Routing(NamedTuple):
    """The destinations of rows, one entry per row, in the order of the TableRows.

    devices, lines : int32 (n,), the device and the number of the line on it
    offsets : int64 (n,), where the row begins in the words of its line
    rows : the rows of each TableRows, float32 (n_i, dim_i)
    keys : uint32 (n,), of the rounding to bfloat16; None: without. A table that is rounded has a stack for itself
    """

    devices: Int32
    lines: Int32
    offsets: Int64
    rows: tuple[Float32, ...]
    keys: UInt32 | None

    def rows_in(self, some: slice) -> Iterator[tuple[slice, Float32]]:
        """Yield the rows in a slice of the entries, as (slice relative to it, their rows)."""
        first = 0
        for rows in self.rows:
            start, stop = max(some.start, first), min(some.stop, first + len(rows))
            if start < stop:
                yield slice(start - some.start, stop - some.start), rows[start - first : stop - first]
            first += len(rows)


class Packed(NamedTuple):
    """Rows of one dispatch; axis 0 is the device.

    lines : int32 (devices, bucket), line numbers, unique; pads lie beyond the device's lines
    words : int32 (devices, bucket, …), the bits of the rows' float32 values, or UNTOUCHED
    counts : int32 (devices,), the number of lines before the pads
    keys : uint32 (devices, bucket, rows of a line), of the rounding to bfloat16, 0 for rows without a gradient; or None
    cells : int64 (n,), the line of each row, among those of all devices
    """

    lines: Int32
    words: Int32
    counts: Int32
    keys: UInt32 | None
    cells: Int64


@dataclass(frozen=True)
class Stack:
    """Tables in the same arrays. line : their line format for steps"""

    tables: tuple[Layout, ...]
    line: Line

    @classmethod
    def of(cls, tables: Sequence[Layout], rule: UpdateRule) -> Stack:
        """Return a stack of tables that ``stacked`` groups, or of any one table."""
        line = form(tables[0], rule)
        assert all(form(table, rule) == line for table in tables)
        return cls(tuple(tables), line)

    @property
    def num_devices(self) -> int:
        return self.tables[0].num_devices

    @cached_property
    def first_lines(self) -> tuple[int, ...]:
        """The first line of each table on every device, then the number of lines."""
        return tuple(accumulate((table.lines_per_device for table in self.tables), initial=0))

    @property
    def lines_per_device(self) -> int:
        return self.first_lines[-1]

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays, whose first axes are split evenly over the devices."""
        return tuple(shape for shape, _ in self.line.arrays(self.num_devices * self.lines_per_device))

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables)

    def locate(self, member: int, ids: Int64) -> Iterator[tuple[slice, Int32, Int64]]:
        """Yield the padded dispatches that read distinct ids of one table, each as

        slice of the ids, rows int32 (devices, bucket) of each device, unique, with pads beyond its lines, and the place
        of each requested row in the flattened (devices, bucket), int64 (n,)
        """
        table = self.tables[member]
        devices, rows = self.rows_of(member, ids)
        beyond = self.lines_per_device * table.line.group
        for some in self.slices(devices):
            padded, cells, _ = self.padded(devices[some], rows[some], beyond, READ_ROWS, growth=READ_GROWTH)
            yield some, padded, cells

    def rows_of(self, member: int, ids: Int64) -> tuple[Int32, Int32]:
        """Return the device of each id of a table, and its row there, counted as rows of that table's lines."""
        table = self.tables[member]
        devices, rows = table.place(ids)
        rows += np.int32(self.first_lines[member] * table.line.group)
        return devices, rows

    def route(self, tables: Sequence[TableRows]) -> Routing:
        """Return the device, the line and the offset in it of rows of several tables."""
        devices, lines, offsets = zip(*[self._destinations(one.member, one.ids) for one in tables], strict=True)
        keys = [one.keys for one in tables if one.keys is not None]
        rows = tuple(one.rows for one in tables)
        return Routing(_joined(devices), _joined(lines), _joined(offsets), rows, _joined(keys) if keys else None)

    def _destinations(self, member: int, ids: Int64) -> tuple[Int32, Int32, Int64]:
        table = self.tables[member]
        devices, rows = table.place(ids)
        lines = rows // np.int32(table.line.group) + np.int32(self.first_lines[member])
        return devices, lines, table.line.offsets(rows)

    def slices(self, devices: Int32) -> Iterator[slice]:
        """Yield slices that bring at most MAX_BUCKET rows to each device. devices : int32 (n,), of every row"""
        at_once, num_rows = MAX_BUCKET * self.num_devices, len(devices)
        waiting = [slice(start, min(start + at_once, num_rows)) for start in range(0, num_rows, at_once)][::-1]
        while waiting:
            some = waiting.pop()
            if self.num_devices > 1 and np.bincount(devices[some]).max() > MAX_BUCKET:
                middle = (some.start + some.stop) // 2
                waiting += [slice(middle, some.stop), slice(some.start, middle)]
            else:
                yield some

    def pack(
        self, routing: Routing, some: slice, room: Room = np.empty, growth: float = GROWTH, capacity: int | None = None
    ) -> Packed:
        """Pack the rows of a slice by devices and lines, padded to a bucket.

        room : creates the arrays of the result: (shape, dtype) → array; growth : of the buckets
        capacity : lines per device, if the caller decides it
        """
        devices, lines, line_of_row = routing.devices[some], routing.lines[some], None
        if self.line.masked:
            devices, lines, line_of_row = self._distinct(devices, lines)
        multiple = multiple_of(self.line)
        padded, cells, counts = self.padded(devices, lines, self.lines_per_device, multiple, room, growth, capacity)
        words = room((*padded.shape, self.line.halves * self.line.width), np.int32)
        self._blank(words, counts)
        cells, flat = cells if line_of_row is None else cells[line_of_row], words.reshape(-1, words.shape[2])
        for at, rows in routing.rows_in(some):
            partition.lay(cells[at], routing.offsets[some][at], rows, flat)
        keys = None
        if routing.keys is not None:
            keys = room((*padded.shape, self.line.group), np.uint32)
            keys.fill(0)
            keys.reshape(-1, self.line.group)[cells, self.line.inside(routing.offsets[some])] = routing.keys[some]
        return Packed(padded, words, counts.astype(np.int32), keys, cells)

    def padded(
        self,
        devices: Int32,
        numbers: Int32,
        beyond: int,
        multiple: int,
        room: Room = np.empty,
        growth: float = GROWTH,
        capacity: int | None = None,
    ) -> tuple[Int32, Int64, Int64]:
        """Distribute numbers to the devices, in order.

        beyond : the first pad; multiple : the unit of the bucket; growth : from one bucket to the next
        capacity : of every device; None: a bucket
        Returns the numbers int32 (devices, bucket), the place of each in it, flattened, and the count of each device.
        """
        counts = np.bincount(devices, minlength=self.num_devices)
        capacity = capacity or bucket(int(counts.max(initial=0)), multiple, growth)
        # NumPy sorts 16 bits in linear time; there are at most NUM_SHARDS devices.
        order = np.argsort(devices.astype(np.int16), kind="stable")
        cells = np.empty(len(devices), np.int64)
        first_cells = np.arange(self.num_devices) * capacity - (np.cumsum(counts) - counts)
        cells[order] = np.arange(len(devices)) + np.repeat(first_cells, counts)
        padded: Int32 = room((self.num_devices, capacity), np.int32)
        padded[:] = beyond + np.arange(capacity, dtype=np.int32)
        padded.reshape(-1)[cells] = numbers
        return padded, cells, counts

    def _distinct(self, devices: Int32, lines: Int32) -> tuple[Int32, Int32, Int64]:
        """Return the distinct lines by first appearance, as devices and numbers, and each row's index into them."""
        keys = devices.astype(np.int64) * self.lines_per_device + lines
        # insert() numbers lines densely by first appearance: a line is new if its number is the largest so far.
        line_of_row = IdTable(len(keys)).insert(keys)
        first = np.ones(len(keys), bool)
        first[1:] = line_of_row[1:] > np.maximum.accumulate(line_of_row)[:-1]
        return devices[first], lines[first], line_of_row

    def _blank(self, words: Int32, counts: Int64) -> None:
        """Fill words with UNTOUCHED; if a line is one row, only those of pads, with a gradient of 0."""
        if self.line.masked:
            words.fill(UNTOUCHED)
            return
        for device, count in enumerate(counts):
            words[device, count:] = 0


def multiple_of(line: Line) -> int:
    """Return the unit of the number of lines per dispatch; where rows share lines, the block size of a kernel."""
    return LINES if line.masked else 8


def _joined(arrays: Sequence[npt.NDArray[T]]) -> npt.NDArray[T]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
