"""The tables on the devices: made, updated in place, read and written by id.

One array per table (layout.py), touched only through the programs (programs.py). Ids that come in
are valid and, for apply and write, distinct: the rooms before this one have seen to it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.bridge import programs
from penstock.bridge.layout import MAX_BUCKET, Layout, Partitioned
from penstock.updates import UpdateRule

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

# Dispatches that may be under way: their staging arrays are alive until they have run.
MAX_IN_FLIGHT = 4


def make_mesh(mesh: Mesh | None = None) -> Mesh:
    """A one-axis mesh over the devices of ``mesh`` in its order; None: all local devices."""
    devices = np.asarray(jax.local_devices()) if mesh is None else mesh.devices.reshape(-1)
    return Mesh(devices, (programs.AXIS,))


def check_memory(mesh: Mesh, num_bytes: int) -> None:
    """Raise MemoryError where tables of so many bytes cannot fit the host that is their device.

    Linux promises memory that it has not, and kills the process when the promise is called in.
    An accelerator's own allocator says no by itself.
    """
    if mesh.devices.flat[0].platform != "cpu" or not hasattr(os, "sysconf"):
        return
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > has:
        raise MemoryError(
            f"the tables with their slots need {num_bytes / 1e9:.1f} GB, this machine has {has / 1e9:.1f} GB"
        )


P = ParamSpec("P")
R = TypeVar("R")


def _at_home(method: Callable[Concatenate[DeviceTable, P], R]) -> Callable[Concatenate[DeviceTable, P], R]:
    """Run on the table's own mesh, whatever mesh or transfer guard the caller has set for its own programs."""

    @wraps(method)
    def run(self: DeviceTable, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with jax.set_mesh(self._mesh), jax.transfer_guard("allow"):
            return method(self, *args, **kwargs)

    return run


class DeviceTable:
    """One table's weights and slots.

    mesh : one axis, ``programs.AXIS``
    starts : the value that each slot begins with, in slot order; weights begin at 0 until written
    outside : the mesh that copies are given out on, over the same devices in the same order
    """

    def __init__(
        self, mesh: Mesh, layout: Layout, rule: UpdateRule, starts: Sequence[float], outside: Mesh | None = None
    ) -> None:
        self._mesh, self._outside = mesh, outside or mesh
        with jax.set_mesh(mesh), jax.transfer_guard("allow"):
            self._make(layout, rule, starts)

    def _make(self, layout: Layout, rule: UpdateRule, starts: Sequence[float]) -> None:
        programs.check_program(layout.name, rule, layout.dim)
        self.layout = layout
        mesh = self._mesh
        self._apply = programs.apply(mesh, rule)
        self._sweep = programs.sweep(mesh, rule) if rule.non_lazy else None
        self._write = programs.write(mesh)
        self._read = programs.read(mesh)
        self._copy_rows = programs.copy_rows(mesh)
        self._array: jax.Array = programs.create(mesh, layout.shape, (0.0, *starts))()
        self._fences: deque[jax.Array] = deque()

    @property
    def num_parts(self) -> int:
        """Weights and slots: part 0 is the weights, part 1 + s is slot s."""
        return 1 + self.layout.num_slots

    def pointers(self) -> list[int]:
        """Addresses of the shards. An update in place never moves one; a move means that a table was copied."""
        return [shard.data.unsafe_buffer_pointer() for shard in self._array.addressable_shards]

    @_at_home
    def apply(self, ids: Int64, grads: Float32, learning_rate: float) -> None:
        """One optimizer application to the rows of distinct ids. grads : float32 (n, dim).

        Where the rule is not lazy all other rows are updated too, with a gradient of 0.
        """
        lr = np.float32(learning_rate)
        blocks: Iterable[Partitioned] = (self.layout.partition(ids[p], grads[p]) for p in self._slices(len(ids)))
        if self._sweep is not None:
            blocks = list(blocks)
            self._sweep_around(blocks, lr)
        for block in blocks:
            self._array, fence = self._apply(self._array, block.rows, block.values, lr, np.int32(0))
            self._wait_behind(fence)

    @_at_home
    def write(self, ids: Int64, values: Float32, part: int = 0) -> None:
        """Set one part of the rows of distinct ids. values : float32 (n, dim)."""
        for cut in self._slices(len(ids)):
            block = self.layout.partition(ids[cut], values[cut])
            self._array, fence = self._write(self._array, block.rows, block.values, np.int32(part))
            self._wait_behind(fence)

    @_at_home
    def read(self, ids: Int64, part: int = 0) -> Float32:
        """One part of the rows of any ids, repeats included. Returns float32 (n, dim), a copy."""
        distinct, back = np.unique(ids, return_inverse=True)
        if len(distinct) == len(ids):
            distinct, back = ids, np.arange(0)
        out = np.empty((len(distinct), self.layout.dim), np.float32)
        for cut in self._slices(len(distinct)):
            block = self.layout.partition(distinct[cut], np.empty((len(distinct[cut]), 0), np.float32))
            answers = np.asarray(self._read(self._array, block.rows, np.int32(part)))
            out[cut] = block.collect(answers)
        return out[back] if len(back) else out

    @_at_home
    def copy_rows(self, ids: Int64) -> Callable[[], Float32]:
        """All parts of the rows of distinct ids as they are now; at most MAX_BUCKET per device.

        Returns what waits for the copy, in whatever thread: float32 (n, parts, dim). Here nothing waits: the copy is
        under way behind the updates that are, and before those that come.
        """
        block = self.layout.partition(ids, np.empty((len(ids), 0), np.float32))
        answers = self._copy_rows(self._array, block.rows)

        def wait() -> Float32:
            with jax.transfer_guard("allow"):
                return block.collect(np.asarray(answers))

        return wait

    def stream(self, part: int = 0) -> Iterator[Float32]:
        """One part of the whole table in id order, in blocks of rows: never a second copy of the table."""
        for cut in self._slices(self.layout.vocabulary_size):
            yield self.read(np.arange(cut.start, cut.stop), part)

    def fill(self, draw: Callable[[int, int], Float32]) -> None:
        """Write the weights of every row: ``draw(first, count)`` gives float32 (count, dim) in id order."""
        for cut in self._slices(self.layout.vocabulary_size):
            self.write(np.arange(cut.start, cut.stop), draw(cut.start, cut.stop - cut.start))

    @_at_home
    def whole(self, part: int = 0) -> jax.Array:
        """A copy of one part in id order: (vocabulary_size, dim), row-sharded where the mesh divides it."""
        host = np.concatenate(list(self.stream(part)))
        even = self.layout.vocabulary_size % self.layout.num_devices == 0
        spec = PartitionSpec(self._outside.axis_names) if even else PartitionSpec()
        copy: jax.Array = jax.device_put(host, NamedSharding(self._outside, spec))
        return copy

    def wait(self) -> None:
        """Block until every dispatch is done; an error of the device comes out here."""
        while self._fences:
            self._fences.popleft().block_until_ready()

    def _sweep_around(self, blocks: Iterable[Partitioned], lr: np.float32) -> None:
        """Update every row that is in none of the blocks."""
        assert self._sweep is not None
        touched = programs.no_rows(self._mesh, self.layout.shape[0])()
        mark = programs.mark(self._mesh)
        for block in blocks:
            touched = mark(touched, block.rows)
        self._array, fence = self._sweep(self._array, touched, lr, np.int32(0))
        self._wait_behind(fence)

    def _wait_behind(self, fence: jax.Array) -> None:
        self._fences.append(fence)
        while len(self._fences) > MAX_IN_FLIGHT:
            self._fences.popleft().block_until_ready()

    def _slices(self, num_rows: int) -> Iterator[slice]:
        at_once = MAX_BUCKET * self.layout.num_devices
        for start in range(0, num_rows, at_once):
            yield slice(start, min(start + at_once, num_rows))
