"""Stacks: tables that share arrays, and the place of each in them. No other module knows it.

Tables with one line format that one program updates share arrays: on every device the lines of the first table, then
those of the second, and so on. A step is then one dispatch for all of them. For reads and writes each table is still
separate: a range of lines, none of them shared with another table.

A step's rows are routed to devices once for all tables of a stack (``Stack.deal``), then packed into as many dispatches
as their number requires.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.bridge.programs import BY_ROW
from penstock.bridge.row_format import UNTOUCHED, Line
from penstock.bridge.sharding import LINES, MAX_BUCKET, Layout, Room, bucket
from penstock.errors import ConfigError
from penstock.pyx import partition
from penstock.pyx.id_table import IdTable
from penstock.updates import UpdateRule

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
T = TypeVar("T", bound=np.generic)

# Per device: TensorFlow's limit for the shard of a stack. Stacking saves nothing for larger tables.
MAX_STACK_BYTES = 2 << 30
# The environment variable that disables stacks, for tests, benchmarks and debugging.
STACKS = "PENSTOCK_STACKS"


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


def stacks_wanted() -> bool:
    """Return whether stacks are enabled. Raises ConfigError for a bad value of the environment variable."""
    asked = os.environ.get(STACKS) or "on"
    if asked not in ("on", "off"):
        raise ConfigError(f"{STACKS}: expected one of on, off, got '{asked}'")
    return asked == "on"


def stacked(tables: Sequence[tuple[Layout, UpdateRule, Hashable]]) -> list[list[int]]:
    """Return the groups of tables that share arrays, as lists of ascending indices. First fit, as in TensorFlow.

    tables : layout, rule, and a key of everything else that must be equal
    """
    company_wanted = stacks_wanted()
    stacks: list[tuple[Hashable, list[int]]] = []
    sizes: list[int] = []
    for index, (layout, rule, other) in enumerate(tables):
        company = company_wanted and not _must_be_alone(layout, rule)
        key = (form(layout, rule), rule, other) if company else index
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


class Sent(NamedTuple):
    """Rows for one table of a stack: distinct ids, and float32 (n, dim). member : index of the table in the stack"""

    member: int
    ids: Int64
    rows: Float32


@dataclass(frozen=True)
class Dealt:
    """The destinations of rows, one entry per row, in the order of the Sents.

    devices, lines : int32 (n,), the device and the number of the line on it
    offsets : int64 (n,), where the row begins in the words of its line
    rows : the rows of each Sent, float32 (n_i, dim_i)
    """

    devices: Int32
    lines: Int32
    offsets: Int64
    rows: tuple[Float32, ...]

    def rows_of(self, cut: slice) -> Iterator[tuple[slice, Float32]]:
        """Yield the rows in a cut as (slice of the cut's entries, their rows)."""
        first = 0
        for rows in self.rows:
            start, stop = max(cut.start, first), min(cut.stop, first + len(rows))
            if start < stop:
                yield slice(start - cut.start, stop - cut.start), rows[start - first : stop - first]
            first += len(rows)


@dataclass(frozen=True)
class Packed:
    """Rows of one dispatch; axis 0 is the device.

    lines : int32 (devices, bucket), line numbers, unique; pads lie beyond the device's lines
    words : int32 (devices, bucket, …), the bits of the rows' float32 values, or UNTOUCHED
    counts : int32 (devices,), the number of lines before the pads
    """

    lines: Int32
    words: Int32
    counts: Int32


@dataclass(frozen=True)
class Located:
    """Rows to read; axis 0 is the device.

    rows : int32 (devices, bucket), rows of the device, unique; pads lie beyond its lines
    devices : int32 (n,), the device of every requested row, for ``collect``
    """

    rows: Int32
    devices: Int32

    def collect(self, answers: Float32) -> Float32:
        """Return answers (devices, bucket, …), in padded order, as (n, …) in the order of the requested ids."""
        out = np.empty((len(self.devices), *answers.shape[2:]), answers.dtype)
        for device in range(len(answers)):
            mine = np.flatnonzero(self.devices == device)
            out[mine] = answers[device, : len(mine)]
        return out


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
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Shapes of the arrays, whose first axes are split evenly over the devices."""
        lines = self.num_devices * self.lines_per_device
        return tuple((lines, *shape) for shape, _ in self.line.forms)

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables)

    def locate(self, member: int, ids: Int64) -> Iterator[tuple[slice, Located]]:
        """Yield (cut of ids, Located) for the padded dispatches that read distinct ids of one table."""
        table = self.tables[member]
        devices, rows, _ = table.place(ids)
        rows += np.int32(self.first_lines[member] * table.line.group)
        beyond = self.lines_per_device * table.line.group
        for cut in self.cuts(devices):
            counts = np.bincount(devices[cut], minlength=self.num_devices)
            capacity, nothing = bucket(int(counts.max())), np.empty((len(rows[cut]), 0), np.float32)
            padded, _ = partition.pad(devices[cut], rows[cut], nothing, self.num_devices, capacity, beyond)
            yield cut, Located(padded, devices[cut])

    def deal(self, sent: Sequence[Sent]) -> Dealt:
        """Return the device, the line and the offset in it of rows of several tables."""
        found = [self._deal_one(one.member, one.ids) for one in sent]
        devices, lines, offsets = zip(*found, strict=True)
        return Dealt(_joined(devices), _joined(lines), _joined(offsets), tuple(one.rows for one in sent))

    def _deal_one(self, member: int, ids: Int64) -> tuple[Int32, Int32, Int64]:
        table = self.tables[member]
        devices, places, _ = table.place(ids)
        return (
            devices,
            places // np.int32(table.line.group) + np.int32(self.first_lines[member]),
            table.line.offsets(places),
        )

    def cuts(self, devices: Int32) -> Iterator[slice]:
        """Yield runs of rows that bring at most MAX_BUCKET rows to each device. devices : int32 (n,), of every row"""
        at_once, num_rows = MAX_BUCKET * self.num_devices, len(devices)
        waiting = [slice(start, min(start + at_once, num_rows)) for start in range(0, num_rows, at_once)][::-1]
        while waiting:
            cut = waiting.pop()
            if self.num_devices > 1 and np.bincount(devices[cut]).max() > MAX_BUCKET:
                middle = (cut.start + cut.stop) // 2
                waiting += [slice(middle, cut.stop), slice(cut.start, middle)]
            else:
                yield cut

    def pack(self, dealt: Dealt, cut: slice, room: Room = np.empty) -> Packed:
        """Pack the rows of a cut by devices and lines, padded to a bucket.

        room : creates the arrays of the result: (shape, dtype) → array
        """
        devices, lines = dealt.devices[cut], dealt.lines[cut]
        owners, numbers, which = self._distinct(devices, lines) if self.line.masked else (devices, lines, None)
        counts = np.bincount(owners, minlength=self.num_devices)
        capacity = bucket(int(counts.max(initial=0)), multiple_of(self.line))
        cells = owners.astype(np.int64) * capacity + _ranks(owners, self.num_devices)
        local = room((self.num_devices, capacity), np.int32)
        local[:] = self.lines_per_device + np.arange(capacity, dtype=np.int32)
        local.reshape(-1)[cells] = numbers
        words = room((self.num_devices, capacity, self.line.halves * self.line.width), np.int32)
        self._blank(words, counts)
        cells, flat = cells if which is None else cells[which], words.reshape(-1, words.shape[2])
        for at, rows in dealt.rows_of(cut):
            partition.lay(cells[at], dealt.offsets[cut][at], rows, flat)
        return Packed(local, words, counts.astype(np.int32))

    def _distinct(self, devices: Int32, lines: Int32) -> tuple[Int32, Int32, Int64]:
        """Return the distinct lines by first appearance, as devices and numbers, and each row's index into them."""
        keys = devices.astype(np.int64) * self.lines_per_device + lines
        # insert() numbers lines densely by first appearance: a line is new if its number is the largest so far.
        which = IdTable(len(keys)).insert(keys)
        first = np.ones(len(keys), bool)
        first[1:] = which[1:] > np.maximum.accumulate(which)[:-1]
        return devices[first], lines[first], which

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


def _ranks(owners: Int32, num_owners: int) -> Int64:
    """Return the rank of each element among those of its owner, int64."""
    out = np.empty(len(owners), np.int64)
    for owner in range(num_owners):
        mine = np.flatnonzero(owners == owner)
        out[mine] = np.arange(len(mine))
    return out
