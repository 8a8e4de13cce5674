"""The tables on the devices: created, updated in place, read and written by id.

One of several variants (backends.py) updates a table's arrays (sharding.py): in the host's memory in the caller's call
(host_tables.py), else through a dispatcher (xla_tables.py), together with other tables (stacking.py). Callers pass
valid ids, which for apply and write are also distinct.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.bridge import programs
from penstock.bridge.backend_tables import BackendTables
from penstock.bridge.host_tables import HostTables
from penstock.bridge.processes.agreement import Processes
from penstock.bridge.program_cache import compiler_of
from penstock.bridge.sharding import MAX_BUCKET, NUM_SHARDS
from penstock.frames import Float32, Int64


def make_mesh(mesh: Mesh | None = None) -> Mesh:
    """Return a one-axis mesh over the devices of ``mesh`` in its order; None: all local devices."""
    devices = np.asarray(jax.local_devices()) if mesh is None else mesh.devices.reshape(-1)
    return Mesh(devices, (programs.AXIS,))


def processes_of(mesh: Mesh) -> Processes | None:
    """Return the processes that a mesh spans; None: only this one. Raises UsageError."""
    return Processes(mesh) if mesh.is_multi_process else None


def check_memory(placed: Iterable[tuple[Mesh, int]]) -> None:
    """Raise MemoryError if tables on CPU devices exceed the host's memory. placed : the bytes of tables on a mesh

    Linux overcommits memory and kills the process when it runs out. An accelerator's allocator raises an error.
    """
    if not hasattr(os, "sysconf"):
        return
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    on_cpu = [(mesh, num_bytes) for mesh, num_bytes in placed if mesh.devices.flat[0].platform == "cpu"]
    num_bytes = sum(num_bytes * len(mesh.local_devices) // mesh.size for mesh, num_bytes in on_cpu)
    if num_bytes > has:
        raise MemoryError(
            f"the tables with their slots need {num_bytes / 1e9:.1f} GB, this machine has {has / 1e9:.1f} GB"
        )


def prepare_thread() -> None:
    """Put a number on a device. Raises OSError if the process has no file descriptor left.

    A thread's first operation opens /dev/urandom for XLA's random numbers. On a prepared thread a step opens no file,
    so it cannot fail halfway for lack of a descriptor.
    """
    try:
        jax.device_put(np.zeros(1, np.float32)).block_until_ready()
    except (ValueError, RuntimeError) as error:
        if "random_device" not in str(error):
            raise
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from error


class DeviceTable:
    """One table's weights and slots. ``BackendTables`` documents what has no docstring here.

    tables : of one backend, whose arrays contain this table; member : its index there
    user_mesh : the mesh of the copies from ``whole``; None: that of the tables
    """

    def __init__(self, tables: BackendTables, member: int = 0, user_mesh: Mesh | None = None) -> None:
        self._tables, self._member, self._user_mesh = tables, member, user_mesh or tables.mesh
        self.layout = tables.layouts[member]

    @property
    def variant(self) -> str:
        return self._tables.variant

    @property
    def problems(self) -> Sequence[str]:
        return self._tables.problems

    @property
    def compiler(self) -> str:
        """The versions of jax and of the compiler of the programs that update the table."""
        return compiler_of(self._tables.mesh.local_devices[0])

    @property
    def part_dims(self) -> tuple[int, ...]:
        """Floats per row of each part: part 0 is the weights, part 1 + s is slot s."""
        return self.layout.part_dims

    @property
    def arrays(self) -> tuple[Any, ...]:
        return self._tables.arrays

    @property
    def on_host(self) -> tuple[HostTables, int] | None:
        """The tables in the host's memory that this is one of, and its index there; None: it is elsewhere."""
        return (self._tables, self._member) if isinstance(self._tables, HostTables) else None

    def apply(self, ids: Int64, grads: Float32, learning_rate: float) -> None:
        """Apply the optimizer once to the rows of distinct ids. grads : float32 (n, dim)

        A non-lazy rule also updates all other rows, with a gradient of 0. The update may still be in flight when the
        call returns; every variant but host may read the arguments until ``wait`` has returned.
        """
        self._tables.apply([(self._member, [(ids, grads)], learning_rate)])

    def write(self, ids: Int64, values: Float32, part: int = 0) -> None:
        """Set one part of the rows of distinct ids. values : float32 (n, floats of the part)"""
        self._tables.write(self._member, ids, values, part)

    def create_rows(self, ids: Int64, weights: Iterable[Float32]) -> None:
        self._tables.create_rows(self._member, ids, weights)

    def key_by(self, keys: Callable[[Int64], Int64]) -> None:
        self._tables.key_by(self._member, keys)

    def read(self, ids: Int64, part: int = 0) -> Float32:
        """Return a copy of one part of the rows of ids, which may repeat: float32 (n, floats of the part)."""
        out = np.empty((len(ids), self.part_dims[part]), np.float32)
        self._tables.read(self._member, ids, out, part)
        return out

    @property
    def stride(self) -> int:
        """The distance between the ids of neighbouring rows."""
        return NUM_SHARDS if self.layout.mod else 1

    @property
    def copies_any_number(self) -> bool:
        return self._tables.copies_any_number

    def copy_rows(self, ids: Int64, out: Float32) -> Callable[[], object]:
        return self._tables.copy_rows(self._member, ids, out)

    def stream(self, part: int = 0) -> Iterator[Float32]:
        """Yield one part of the whole table in id order, in blocks of rows, so that no second copy of it exists."""
        yield from self._read(0, self.layout.vocabulary_size, part)

    def fill(self, draw: Callable[[int, int], Float32]) -> None:
        """Write the weights of every row. draw : (first, count) → float32 (count, dim), in id order"""
        for first, count in self._blocks(0, self.layout.vocabulary_size):
            self._tables.write(self._member, first, draw(first, count), 0)

    def whole(self, part: int = 0) -> jax.Array:
        """Return a copy of one part in id order: (vocabulary_size, floats), sharded by row if the mesh divides it."""
        rows, floats = self.layout.vocabulary_size, self.part_dims[part]
        spec = PartitionSpec(self._user_mesh.axis_names) if rows % self._user_mesh.size == 0 else PartitionSpec()
        sharding = NamedSharding(self._user_mesh, spec)
        blocks: dict[int, Float32] = {}  # by the first row; every device of this process may want all of them
        with jax.set_mesh(self._tables.mesh), jax.transfer_guard("allow"):
            shards = []
            for device, index in sharding.addressable_devices_indices_map((rows, floats)).items():
                assert index is not None
                first, stop, _ = index[0].indices(rows)
                if first not in blocks:
                    blocks = {first: np.concatenate([*self._read(first, stop, part)])}
                shards.append(jax.device_put(blocks[first], device))
            return jax.make_array_from_single_device_arrays((rows, floats), sharding, shards)

    def wait(self) -> None:
        self._tables.wait()

    def _read(self, first: int, stop: int, part: int) -> Iterator[Float32]:
        """Yield one part of the rows from ``first`` to ``stop`` in id order, in blocks."""
        for start, count in self._blocks(first, stop):
            out = np.empty((count, self.part_dims[part]), np.float32)
            self._tables.read(self._member, start, out, part)
            yield out

    def _blocks(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield consecutive ranges that make up the rows from ``first`` to ``stop``, as (first id, number of ids)."""
        at_once = MAX_BUCKET * self.layout.num_devices
        for start in range(first, stop, at_once):
            yield start, min(at_once, stop - start)
