"""Which tables share arrays, and where in them each lies. Nothing else knows.

Tables whose lines have one form, and that one program updates alike, share arrays: on every device the lines of the
first, then those of the second, and so on. A step is then one dispatch for all of them. A table stays a table for
whoever reads or writes its rows: a range of lines, which begins with one of its own.

Rows on their way to a device are dealt once for all tables of a stack (``Stack.deal``), then packed in as many
dispatches as their number asks for.
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

# Of one device: TensorFlow's limit for the shard of a stack. A table as large as that gains nothing from company.
MAX_STACK_BYTES = 2 << 30
# For whom it concerns: tests, benches, and who doubts that a stack changes nothing.
STACKS = "PENSTOCK_STACKS"


def form(layout: Layout, rule: UpdateRule) -> Line:
    """The line as steps see it. Where rows share lines and a rule works element by element, the width alone counts."""
    if layout.lanes == 1 or rule.algorithm in BY_ROW or _must_be_alone(layout, rule):
        return layout.line
    return Line(layout.line.width, layout.num_slots, layout.lanes, halved=layout.halved)


def _must_be_alone(layout: Layout, rule: UpdateRule) -> bool:
    """Rounding to 16 bits is keyed by table and id; and where every row moves, a dispatch is nothing beside that."""
    return layout.bfloat16 or rule.non_lazy


def stacks_wanted() -> bool:
    """Whether tables may share arrays at all."""
    asked = os.environ.get(STACKS) or "on"
    if asked not in ("on", "off"):
        raise ConfigError(f"{STACKS}: expected one of on, off, got '{asked}'")
    return asked == "on"


def stacked(tables: Sequence[tuple[Layout, UpdateRule, Hashable]]) -> list[list[int]]:
    """Which of these tables share arrays: lists of their indices, tables in order. First fit, as TensorFlow has it.

    tables : layout, rule, and whatever else must be equal
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
    """Rows for one table of a stack: distinct ids, and float32 (n, dim). member : which of the stack's tables"""

    member: int
    ids: Int64
    rows: Float32


@dataclass(frozen=True)
class Dealt:
    """Where rows go, one entry per row, those of each Sent after those of the one before.

    devices, lines : int32 (n,), the device and the number of its line
    offsets : int64 (n,), where the row begins among the words that go to its line
    rows : the rows themselves, (n_i, dim_i) each
    """

    devices: Int32
    lines: Int32
    offsets: Int64
    rows: tuple[Float32, ...]

    def rows_of(self, cut: slice) -> Iterator[tuple[slice, Float32]]:
        """What lies in a cut: (which of the cut's entries, their rows)."""
        first = 0
        for rows in self.rows:
            start, stop = max(cut.start, first), min(cut.stop, first + len(rows))
            if start < stop:
                yield slice(start - cut.start, stop - cut.start), rows[start - first : stop - first]
            first += len(rows)


@dataclass(frozen=True)
class Packed:
    """Rows of one dispatch; axis 0 is the device.

    lines : int32 (devices, bucket), numbers of lines, unique; pads lie beyond the device's lines
    words : int32 (devices, bucket, …), the bits of the rows' float32 values, or UNTOUCHED
    counts : int32 (devices,), how many are no pads; those come first
    """

    lines: Int32
    words: Int32
    counts: Int32


@dataclass(frozen=True)
class Located:
    """Rows to be read; axis 0 is the device.

    rows : int32 (devices, bucket), rows of the device, unique; pads lie beyond its lines
    devices : int32 (n,), the device of every row that came in, to find answers again
    """

    rows: Int32
    devices: Int32

    def collect(self, answers: Float32) -> Float32:
        """Answers (devices, bucket, …) in padded order → (n, …) in the order the ids came in."""
        out = np.empty((len(self.devices), *answers.shape[2:]), answers.dtype)
        for device in range(len(answers)):
            mine = np.flatnonzero(self.devices == device)
            out[mine] = answers[device, : len(mine)]
        return out


@dataclass(frozen=True)
class Stack:
    """Tables in the same arrays. line : their form"""

    tables: tuple[Layout, ...]
    line: Line

    @classmethod
    def of(cls, tables: Sequence[Layout], rule: UpdateRule) -> Stack:
        """Tables that ``stacked`` puts together, or any one."""
        line = form(tables[0], rule)
        assert all(form(table, rule) == line for table in tables)
        return cls(tuple(tables), line)

    @property
    def num_devices(self) -> int:
        return self.tables[0].num_devices

    @cached_property
    def first_lines(self) -> tuple[int, ...]:
        """Where the lines of each table begin, on every device; at last, how many lines there are."""
        return tuple(accumulate((table.lines_per_device for table in self.tables), initial=0))

    @property
    def lines_per_device(self) -> int:
        return self.first_lines[-1]

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Of the arrays, whose first axes are cut evenly over the devices."""
        lines = self.num_devices * self.lines_per_device
        return tuple((lines, *shape) for shape, _ in self.line.forms)

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self.tables)

    def locate(self, member: int, ids: Int64) -> Iterator[tuple[slice, Located]]:
        """Where to read distinct ids of one table, in as many dispatches as their number asks for, each padded."""
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
        """Find the device, the line and the place in it of rows of several tables."""
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
        """Runs of rows of which no device gets more than one dispatch may bring. devices : of every row"""
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
        """A cut of what was dealt, by devices and lines, padded to a bucket.

        room : makes the arrays that are handed over: (shape, dtype) → array
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
        """The distinct lines by first appearance, as devices and numbers; and which of them each row is in."""
        keys = devices.astype(np.int64) * self.lines_per_device + lines
        # Dense numbers by first appearance: a line is new where its number is the largest so far.
        which = IdTable(len(keys)).insert(keys)
        first = np.ones(len(keys), bool)
        first[1:] = which[1:] > np.maximum.accumulate(which)[:-1]
        return devices[first], lines[first], which

    def _blank(self, words: Int32, counts: Int64) -> None:
        """Words that say that nothing comes; where a line is one row, only pads have any: a gradient of 0."""
        if self.line.masked:
            words.fill(UNTOUCHED)
            return
        for device, count in enumerate(counts):
            words[device, count:] = 0


def multiple_of(line: Line) -> int:
    """What the number of lines that a dispatch brings is a multiple of: a kernel takes so many at once."""
    return LINES if line.masked else 8


def _joined(arrays: Sequence[npt.NDArray[T]]) -> npt.NDArray[T]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _ranks(owners: Int32, num_owners: int) -> Int64:
    """The how-manieth each is of its owner's."""
    out = np.empty(len(owners), np.int64)
    for owner in range(num_owners):
        mine = np.flatnonzero(owners == owner)
        out[mine] = np.arange(len(mine))
    return out
