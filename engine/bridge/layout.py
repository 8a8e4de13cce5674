"""Logical ↔ physical: which device holds an id's row, and at which place. Nothing else knows.

The logical table is (vocabulary_size, dim) with slots of the same shape. Physically it is one
array, float32[devices * rows_per_device, 1 + num_slots, dim], so that a row's weights and slots
lie side by side and one gather brings both. Rows belong to a fixed number of virtual shards, by
the configuration's strategy, and shards to devices in contiguous runs: any number of devices up to
NUM_SHARDS works, and a row's place inside its shard never depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.pyx import partition

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

# Enough that a thousand devices are loaded evenly; costs at most this many padding rows per table.
NUM_SHARDS = 1024

# Rows per device and dispatch: XLA's staging of a scatter grows with them (67 MB at 65,536 rows on TPU).
MAX_BUCKET = 32_768

# Dispatches of a table that may be under way: the host's arrays that they read are alive until they have run.
MAX_IN_FLIGHT = 4


def bucket(num_rows: int) -> int:
    """The padded number of rows: a ladder of ×1.5 in multiples of 8, so that few programs serve all sizes."""
    size = 8
    while size < num_rows:
        size = -(-size * 3 // 16) * 8
    return min(size, MAX_BUCKET) if num_rows <= MAX_BUCKET else size


@dataclass(frozen=True)
class Layout:
    """Where the rows of one table live. mod: MOD sharding; else DIV (fact sheet of TensorFlow's shape util)."""

    name: str
    vocabulary_size: int
    dim: int
    num_slots: int
    num_devices: int
    mod: bool

    def __post_init__(self) -> None:
        if self.num_devices > NUM_SHARDS:
            raise ConfigError(f"{self.num_devices} devices: at most {NUM_SHARDS} can share a table")
        if self.rows_per_device + 2 * MAX_BUCKET >= 2**31:
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
    def rows_per_device(self) -> int:
        return self.shards_per_device * self.rows_per_shard

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the physical array; its first axis is cut evenly over the devices."""
        return self.num_devices * self.rows_per_device, 1 + self.num_slots, self.dim

    @property
    def nbytes(self) -> int:
        rows, parts, dim = self.shape
        return 4 * rows * parts * dim

    def place(self, ids: Int64) -> tuple[Int32, Int32, Int64]:
        """The device of every id, its row there, and how many rows each device has."""
        return partition.place(
            ids,
            self.vocabulary_size,
            NUM_SHARDS,
            self.mod,
            self.shards_per_device,
            self.rows_per_shard,
            self.num_devices,
        )

    def partition(self, ids: Int64, rows: Float32) -> Partitioned:
        """Deal distinct ids and their rows (n, dim) to the devices, padded to a bucket."""
        devices, places, counts = self.place(ids)
        capacity = bucket(int(counts.max(initial=0)))
        local, padded = partition.pad(devices, places, rows, self.num_devices, capacity, self.rows_per_device)
        return Partitioned(local, padded, devices)


@dataclass(frozen=True)
class Partitioned:
    """Rows on their way to the devices; axis 0 is the device.

    rows : int32 (devices, bucket), row numbers, unique; pads lie beyond the device's rows
    values : float32 (devices, bucket, dim)
    devices : int32 (n,), the device of every row that came in, to find answers again
    """

    rows: Int32
    values: Float32
    devices: Int32

    def collect(self, answers: Float32) -> Float32:
        """Answers (devices, bucket, …) in padded order → (n, …) in the order the ids came in."""
        out = np.empty((len(self.devices), *answers.shape[2:]), answers.dtype)
        for device in range(len(answers)):
            mine = np.flatnonzero(self.devices == device)
            out[mine] = answers[device, : len(mine)]
        return out
