"""The tables on the devices: created, updated in place, read and written by id.

One of several variants (backends.py) updates a table's arrays (sharding.py): on a CPU in the caller's call
(cpu_ffi.py), else through a dispatcher (xla_tables.py), together with other tables (stacking.py). Callers pass valid
ids, which for apply and write are also distinct.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.bridge import backends, cpu_ffi, programs
from penstock.bridge.dispatcher import Dispatcher
from penstock.bridge.sharding import MAX_BUCKET, NUM_SHARDS, Layout
from penstock.bridge.stacking import Stack
from penstock.bridge.xla_tables import Segments, StagedStack, StagedTable
from penstock.updates import UpdateRule

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


def make_mesh(mesh: Mesh | None = None) -> Mesh:
    """Return a one-axis mesh over the devices of ``mesh`` in its order; None: all local devices."""
    devices = np.asarray(jax.local_devices()) if mesh is None else mesh.devices.reshape(-1)
    return Mesh(devices, (programs.AXIS,))


def check_memory(mesh: Mesh, num_bytes: int) -> None:
    """Raise MemoryError if tables of ``num_bytes`` on CPU devices exceed the host's memory.

    Linux overcommits memory and kills the process when it runs out. An accelerator's allocator raises an error.
    """
    if mesh.devices.flat[0].platform != "cpu" or not hasattr(os, "sysconf"):
        return
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > has:
        raise MemoryError(
            f"the tables with their slots need {num_bytes / 1e9:.1f} GB, this machine has {has / 1e9:.1f} GB"
        )


class DeviceTable:
    """One table's weights and slots.

    mesh : one axis, ``programs.AXIS``
    starts : the initial value of each slot, in slot order; weights are 0 until written
    outside : the mesh of the copies from ``whole``, over the same devices in the same order; None: ``mesh``
    threads : at most this many update one device's rows, on CPUs; 0: all the host has
    variant : of ``backends.VARIANTS``, for tests and benchmarks; None: chosen by devices and rule
    target : the instruction set of the ffi variant, for tests and benchmarks; "": this machine's best
    among : the stack whose arrays it shares; None: separate arrays
    """

    def __init__(
        self,
        mesh: Mesh,
        layout: Layout,
        rule: UpdateRule,
        starts: Sequence[float],
        outside: Mesh | None = None,
        *,
        threads: int = 0,
        variant: str | None = None,
        target: str = "",
        among: cpu_ffi.DirectStack | StagedStack | None = None,
    ) -> None:
        self._mesh, self._outside = mesh, outside or mesh
        self.variant = variant or backends.choose(mesh, layout, rule)
        self.layout = layout = backends.formed(layout, self.variant)
        self._rows: cpu_ffi.DirectTable | StagedTable
        if among is None and self.variant == "ffi":
            among = cpu_ffi.DirectStack(mesh, [layout], [rule], [starts], threads, target)
        elif among is None:
            among = StagedStack(mesh, Stack.of([layout], rule), rule, starts, self.variant, Dispatcher())
        if isinstance(among, cpu_ffi.DirectStack):
            self._rows = cpu_ffi.DirectTable(among, layout)
        else:
            self._rows = StagedTable(among, layout)

    @property
    def num_parts(self) -> int:
        """Number of parts: part 0 is the weights, part 1 + s is slot s."""
        return 1 + self.layout.num_slots

    def pointers(self) -> list[int]:
        """Return the addresses of the shards of the table's arrays, which other tables may share.

        An in-place update never moves a shard; a changed address means that a table was copied.
        """
        self._rows.drain()
        shards = [shard for array in self._rows.arrays for shard in array.addressable_shards]
        return [shard.data.unsafe_buffer_pointer() for shard in shards]

    def apply(self, ids: Int64, grads: Float32, learning_rate: float) -> None:
        """Apply the optimizer once to the rows of distinct ids. grads : float32 (n, dim)

        A non-lazy rule also updates all other rows, with a gradient of 0. The update may still be in flight when the
        call returns; every variant but ffi may read the arguments until ``wait`` has returned.
        """
        self.apply_segments([(ids, grads)], learning_rate)

    def apply_segments(self, segments: Segments, learning_rate: float, step: int = 0, turn: int = 0) -> None:
        """Apply the optimizer once to the ids of several arrays, distinct over all of them.

        step, turn : the number of the step and of the application in it, which key the rounding to bfloat16
        """
        if segments:
            self._rows.apply(segments, learning_rate, step, turn)

    def write(self, ids: Int64, values: Float32, part: int = 0) -> None:
        """Set one part of the rows of distinct ids. values : float32 (n, dim)"""
        self._rows.write(ids, values, part)

    def read(self, ids: Int64, part: int = 0) -> Float32:
        """Return a copy of one part of the rows of ids, which may repeat: float32 (n, dim)."""
        out = np.empty((len(ids), self.layout.dim), np.float32)
        self._rows.read(ids, out, part)
        return out

    @property
    def stride(self) -> int:
        """The distance between the ids of neighbouring rows."""
        return NUM_SHARDS if self.layout.mod else 1

    @property
    def copies_any_number(self) -> bool:
        """Whether ``copy_rows`` takes any number of rows; else each padded number is a separate program."""
        return self.variant == "ffi"

    def copy_rows(self, ids: Int64, out: Float32) -> Callable[[], object]:
        """Start to copy all parts of the rows of distinct ids, as they are now, to ``out``: float32 (parts, n, dim).

        Return a callable that waits for the copy, on any thread. ``out`` may have room for the first ids only. Unless
        ``copies_any_number``, at most MAX_BUCKET ids per device.
        """
        return self._rows.copy_rows(ids, out)

    def stream(self, part: int = 0) -> Iterator[Float32]:
        """Yield one part of the whole table in id order, in blocks of rows, so that no second copy of it exists."""
        for first, count in self._blocks():
            out = np.empty((count, self.layout.dim), np.float32)
            self._rows.read(first, out, part)
            yield out

    def fill(self, draw: Callable[[int, int], Float32]) -> None:
        """Write the weights of every row. draw : (first, count) → float32 (count, dim), in id order"""
        for first, count in self._blocks():
            self._rows.write(first, draw(first, count), 0)

    def whole(self, part: int = 0) -> jax.Array:
        """Return a copy of one part in id order: (vocabulary_size, dim), sharded by row if the mesh divides it."""
        host = np.concatenate(list(self.stream(part)))
        even = self.layout.vocabulary_size % self.layout.num_devices == 0
        spec = PartitionSpec(self._outside.axis_names) if even else PartitionSpec()
        with jax.set_mesh(self._mesh), jax.transfer_guard("allow"):
            copy: jax.Array = jax.device_put(host, NamedSharding(self._outside, spec))
        return copy

    def wait(self) -> None:
        """Block until every dispatch is done. Raises the device's errors."""
        self._rows.wait()

    def warm(self) -> int:
        """Compile the programs of steps, lookups and checkpoints; return their number."""
        return self._rows.warm()

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """Yield consecutive ranges that make up the table, as (first id, number of ids)."""
        at_once = MAX_BUCKET * self.layout.num_devices
        for first in range(0, self.layout.vocabulary_size, at_once):
            yield first, min(at_once, self.layout.vocabulary_size - first)
