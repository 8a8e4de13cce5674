"""The mapping from logical to physical rows: the device of an id's row, and its number there.

The logical table is (vocabulary_size, dim), with slots of the same shape or of one number per row. The configuration's
strategy assigns rows to a fixed number of virtual shards, and devices hold contiguous runs of shards. Any number of
devices up to NUM_SHARDS works, and a row's number inside its shard never depends on that number.

A device's rows lie in lines of ``group`` rows (row_format.py describes them). On a CPU or GPU a line is one row, with
weights and slots side by side, so that one gather fetches both. On a TPU a line is as wide as the vector registers.
Slots of one number per row follow the others, on a CPU or GPU; on a TPU they lie apart from the lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.errors import ConfigError
from penstock.model.frames import Int32, Int64
from penstock.model.updates import UpdateRule
from penstock.pyx import partition
from penstock.rows.bridge.row_format import Line
from penstock.rows.bridge.stochastic_rounding import RowIds

Room = Callable[[tuple[int, ...], Any], npt.NDArray[Any]]  # creates an array: (shape, dtype) → array

# Enough to load a thousand devices evenly; costs at most this many padding rows per table.
NUM_SHARDS = 1024

# Rows or lines per device and dispatch: XLA's staging of a scatter grows with them (67 MB at 65,536 rows on TPU).
MAX_BUCKET = 32_768
# The same by a kernel, which stages nothing.
MAX_BUCKET_OF_KERNELS = 131_072
# On a GPU a dispatch of few rows costs more than its rows. An update stages its lines once, in at most so many bytes.
STAGED_ON_GPU, MAX_BUCKET_ON_GPU = 512 << 20, 1 << 20
# How much larger each bucket is than the one before. Writes have fewer buckets: the number of new rows of a dynamic
# table varies from step to step, and compiling a program takes longer than copying pads.
GROWTH, WRITE_GROWTH = 1.5, 4.0
# Reads have three sizes: this many rows, and twice its growth.
READ_ROWS, READ_GROWTH = 512, 8.0
# Where rows share lines, the number of lines per dispatch is a multiple of this, the block size of a kernel.
LINES = 128
# A TPU's tables have a multiple of this many lines per device, those of a tile: XLA gathers from an array of one strip
# as from a matrix, whose tiles hold so many lines. Only for whole tiles are these the same bytes, else it copies them.
TILE_LINES = 8


def bucket(num_rows: int, multiple: int = 8, growth: float = GROWTH, largest: int = MAX_BUCKET) -> int:
    """Return the padded number of rows: steps of ×``growth`` in units of ``multiple``, so that few serve all sizes.

    largest : the last step, a multiple of ``multiple``; more rows than that are padded by the same steps
    """
    size = multiple
    while size < num_rows:
        size = math.ceil(size * growth / multiple) * multiple
    return min(size, largest) if num_rows <= largest else size


def buckets(most: int, multiple: int = 8, growth: float = GROWTH, largest: int = MAX_BUCKET) -> list[int]:
    """Return the bucket sizes in ascending order, up to one that fits ``most`` rows."""
    sizes = [bucket(1, multiple, growth, largest)]
    while sizes[-1] < most:
        sizes.append(bucket(sizes[-1] + 1, multiple, growth, largest))
    return sizes


def largest_bucket(platform: str, line: Line) -> int:
    """Return the most rows or lines per device that one dispatch updates.

    platform : of jax's devices; line : of the step
    """
    if platform != "gpu":
        return MAX_BUCKET
    staged = STAGED_ON_GPU // line.nbytes(1) // MAX_BUCKET * MAX_BUCKET
    return min(max(staged, MAX_BUCKET), MAX_BUCKET_ON_GPU)


@dataclass(frozen=True)
class Layout:
    """The placement of one table's rows on the devices.

    mod : MOD sharding; else DIV; both as in TensorFlow's shape util
    lanes : a line's width is a multiple of this many elements: 128 on TPU, else 1
    bfloat16 : weights are stored in 16 bits, those of two rows per word; slots stay float32
    halved : as in row_format.py, for tables that XLA updates
    by_row : steps take rows by number, not lines, for the variant sparsecore
    row_slots : how many slots, the last ones, have one number per row; the others have the shape of the weights
    among : (first, stride): the table is every stride-th row, from ``first`` on, of a larger one, whose ids key the
        rounding to bfloat16
    drawn_as : the name that keys this rounding; "": the table's
    Raises ConfigError for too many devices, or more rows per device than 32-bit row numbers can count.
    """

    name: str
    vocabulary_size: int
    dim: int
    num_slots: int
    num_devices: int
    mod: bool
    lanes: int = 1
    bfloat16: bool = False
    halved: bool = False
    by_row: bool = False
    among: tuple[int, int] = (0, 1)
    row_slots: int = 0
    drawn_as: str = ""

    def __post_init__(self) -> None:
        if self.num_devices > NUM_SHARDS:
            raise ConfigError(f"{self.num_devices} devices: at most {NUM_SHARDS} can share a table")
        if self.rows_per_device + 2 * max(MAX_BUCKET * self.line.group, MAX_BUCKET_ON_GPU) >= 2**31:
            raise ConfigError(
                f"table '{self.name}': {self.rows_per_device} rows per device do not fit 32-bit row numbers; "
                "use more devices"
            )

    @property
    def rows_per_shard(self) -> int:
        return -(-self.vocabulary_size // NUM_SHARDS)

    @property
    def shards_per_device(self) -> int:
        return -(-NUM_SHARDS // self.num_devices)

    @property
    def shards(self) -> tuple[int, int, bool, int, int]:
        """The vocabulary's size, its shards, and where rows lie in them, as ``pyx.partition`` takes them."""
        return self.vocabulary_size, NUM_SHARDS, self.mod, self.shards_per_device, self.rows_per_shard

    @property
    def rows_per_device(self) -> int:
        return self.shards_per_device * self.rows_per_shard

    @property
    def lines_per_device(self) -> int:
        multiple = 1 if self.lanes == 1 else TILE_LINES
        return -(-self.rows_per_device // (self.line.group * multiple)) * multiple

    @cached_property
    def line(self) -> Line:
        """The line format that programs are compiled for. Only bfloat16 needs the ids of rows; others can share it."""
        row_ids = RowIds(*self.shards, self.among) if self.bfloat16 else None
        return Line(self.dim, self.num_slots, self.lanes, row_ids, self.halved, self.row_slots)

    @property
    def unit(self) -> int:
        """The rows of what a step addresses: of a line, or one."""
        return 1 if self.by_row else self.line.group

    @property
    def part_dims(self) -> tuple[int, ...]:
        """Floats per row of the weights, then of each slot."""
        return (self.dim,) * (1 + self.num_slots - self.row_slots) + (1,) * self.row_slots

    @property
    def nbytes(self) -> int:
        return self.line.nbytes(self.num_devices * self.lines_per_device)

    def ids(self, rows: Int64) -> Int64:
        """Return the ids that key the rounding of rows to bfloat16."""
        first, stride = self.among
        return first + stride * rows

    def locate(self, ids: Int64) -> tuple[Int32, Int32]:
        """Return the device of every id, and its row there."""
        devices, rows = np.empty(len(ids), np.int32), np.empty(len(ids), np.int32)
        counts = np.zeros(self.num_devices, np.int64)
        partition.destinations(ids, *self.shards, 1, 0, devices, rows, None, counts)
        return devices, rows

    def id_at(self, device: int, row: int) -> int:
        """Return the id of a row of a device, the inverse of ``locate``; of a table on the host."""
        if not self.mod and self.num_devices == 1:
            return row
        return int(RowIds(*self.shards).numbers(np, device, row))


class TableDefinition(NamedTuple):
    """A table to create. starts : of its slots; rate : identifies its learning rate, equal if shared"""

    layout: Layout
    rule: UpdateRule
    starts: tuple[float, ...]
    rate: Hashable = None
