"""Stacks: tables that share arrays, and the place of each in them. No other module knows it.

Tables with one line format that one program updates share arrays: on every device the lines of the first table, then
those of the second, and so on. A step is then one dispatch for all of them. For reads and writes each table is still
separate: a range of lines, none of them shared with another table.

packing.py routes the rows of a step to devices and packs them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from penstock.model.frames import Float32, Int32, Int64, UInt32
from penstock.model.updates import UpdateRule
from penstock.pyx import partition
from penstock.rows.bridge.row_format import BY_ROW, Line
from penstock.rows.bridge.sharding import (
    GROWTH,
    LINES,
    MAX_BUCKET,
    READ_GROWTH,
    READ_ROWS,
    WRITE_GROWTH,
    Layout,
    TableDefinition,
    bucket,
    largest_bucket,
)

# Per device: TensorFlow's limit for the shard of a stack. Stacking saves nothing for larger tables.
MAX_STACK_BYTES = 2 << 30
# Rows of a line that the mark of a compact row can tell apart.
MOST_MARKED = 128


def form(layout: Layout, rule: UpdateRule) -> Line:
    """Return the line format for steps. If rows share lines and a rule is element-wise, only the width matters."""
    if layout.lanes == 1 or layout.by_row or rule.algorithm in BY_ROW or _must_be_alone(layout, rule):
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
        key = index if _must_be_alone(layout, rule) else (form(layout, rule), layout.by_row, rule, starts, rate)
        size = layout.nbytes // layout.num_devices
        fits = (s for s, (k, _) in enumerate(stacks) if k == key and sizes[s] + size <= MAX_STACK_BYTES)
        number = next(fits, None)
        if number is None:
            number = len(stacks)
            stacks.append((key, []))
            sizes.append(0)
        stacks[number][1].append(index)
        sizes[number] += size
    return [members for _, members in stacks]


class MemberRows(NamedTuple):
    """Rows for one table of a stack: distinct ids, and float32 (n, dim).

    member : index of the table in the stack; keys : uint32 (n,), of the rounding to bfloat16; None: without
    """

    member: int
    ids: Int64
    rows: Float32
    keys: UInt32 | None = None


@dataclass(frozen=True)
class Stack:
    """Tables in the same arrays.

    line : their line format for steps
    compact : whether rows are sent without the rest of their lines (packing.py)
    largest : the most rows, or lines, per device that one dispatch updates
    moving : whether steps also write and read rows
    """

    tables: tuple[Layout, ...]
    line: Line
    compact: bool = False
    largest: int = MAX_BUCKET
    moving: bool = False

    @classmethod
    def of(
        cls,
        tables: Sequence[Layout],
        rule: UpdateRule,
        compact: bool = True,
        platform: str = "cpu",
        moving: bool = False,
    ) -> Stack:
        """Return a stack of tables that ``stacked`` groups, or of any one table.

        compact : send rows compact if all have one dim, less than their lines have; platform : of the devices
        moving : whether steps also write and read rows
        """
        line, own = form(tables[0], rule), tables[0].line
        assert all(form(table, rule) == line for table in tables)
        compact = compact and all(table.line == own for table in tables)
        if compact and own.halves * own.width > own.dim and own.group <= MOST_MARKED:
            return cls(tuple(tables), own, True, largest_bucket(platform, own), moving)
        return cls(tuple(tables), line, False, largest_bucket(platform, line), moving)

    def growth(self, program: str) -> float:
        """Return the growth of the sizes of "apply", "write" or "read". Pads of moving rows would cross to devices and
        back at every step."""
        return GROWTH if self.moving else {"write": WRITE_GROWTH, "read": READ_GROWTH}.get(program, GROWTH)

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

    def locate(self, member: int, ids: Int64) -> Iterator[tuple[slice, Int32, Int64]]:
        """Yield the padded dispatches that read distinct ids of one table, each as

        slice of the ids, rows int32 (devices, bucket) of each device, unique, with pads beyond its lines, and the place
        of each requested row in the flattened (devices, bucket), int64 (n,)
        """
        table = self.tables[member]
        devices, rows = self.rows_of(member, ids)
        beyond = self.lines_per_device * table.line.group
        for span in self.slices(devices):
            most = int(np.bincount(devices[span]).max(initial=0))
            capacity = bucket(most, READ_ROWS, self.growth("read"))
            yield span, *self.padded(devices[span], rows[span], beyond, capacity)

    def rows_of(self, member: int, ids: Int64) -> tuple[Int32, Int32]:
        """Return the device of each id of a table, and its row there, counted as rows of that table's lines."""
        table = self.tables[member]
        devices, rows = table.locate(ids)
        return devices, rows + np.int32(self.first_lines[member] * table.line.group)

    def slices(self, devices: Int32) -> Iterator[slice]:
        """Yield slices that bring at most MAX_BUCKET rows to each device. devices : int32 (n,), of every row"""
        at_once, num_rows = MAX_BUCKET * self.num_devices, len(devices)
        waiting = [slice(start, min(start + at_once, num_rows)) for start in range(0, num_rows, at_once)][::-1]
        while waiting:
            span = waiting.pop()
            if self.num_devices > 1 and np.bincount(devices[span]).max() > MAX_BUCKET:
                middle = (span.start + span.stop) // 2
                waiting += [slice(middle, span.stop), slice(span.start, middle)]
            else:
                yield span

    def padded(self, devices: Int32, numbers: Int32, beyond: int, capacity: int) -> tuple[Int32, Int64]:
        """Distribute numbers to the devices, in order. beyond : the first pad; capacity : of every device

        Returns the numbers int32 (devices, capacity), and the place of each in it, flattened.
        """
        places = np.empty(len(devices), np.int32)
        partition.order(devices, 0, np.zeros(self.num_devices, np.int64), places, None, None)
        cells = devices * np.int64(capacity) + places
        padded = np.empty((self.num_devices, capacity), np.int32)
        padded[:] = beyond + np.arange(capacity, dtype=np.int32)
        padded.reshape(-1)[cells] = numbers
        return padded, cells


def multiple_of(line: Line) -> int:
    """Return the unit of the number of lines per dispatch; where rows share lines, the block size of a kernel."""
    return LINES if line.masked else 8
