"""The tables on the devices: made, updated in place, read and written by id.

A table's arrays (layout.py) are updated by one of several variants (variants.py): where the host is the device, in
the caller's own call (direct.py), else behind a dispatcher (staged.py), together with other tables (stacks.py). Ids
that come in are valid and, for apply and write, distinct: the rooms before this one have seen to it.
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


class DeviceTable:
    """One table's weights and slots.

    mesh : one axis, ``programs.AXIS``
    starts : the value that each slot begins with, in slot order; weights begin at 0 until written
    outside : the mesh that copies are given out on, over the same devices in the same order
    threads : that update one device's rows at most, where the host is the device; 0: all it has
    variant : of ``variants.VARIANTS``, for tests and benches; None: what suits the devices and the rule
    target : the instruction set of the ffi variant, for tests and benches; "": this machine's best
    among : the tables whose arrays it shares; None: it has its own
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
        """Weights and slots: part 0 is the weights, part 1 + s is slot s."""
        return 1 + self.layout.num_slots

    def pointers(self) -> list[int]:
        """Addresses of the shards of its arrays, which other tables may share.

        An update in place never moves one; a move means that a table was copied.
        """
        self._rows.drain()
        shards = [shard for array in self._rows.arrays for shard in array.addressable_shards]
        return [shard.data.unsafe_buffer_pointer() for shard in shards]

    def apply(self, ids: Int64, grads: Float32, learning_rate: float) -> None:
        """One optimizer application to the rows of distinct ids. grads : float32 (n, dim).

        Where the rule is not lazy all other rows are updated too, with a gradient of 0. What the call started may
        still run when it returns, and with every variant but ffi the arrays are read until ``wait`` has returned.
        """
        self.apply_segments([(ids, grads)], learning_rate)

    def apply_segments(self, segments: Segments, learning_rate: float, step: int = 0, turn: int = 0) -> None:
        """``apply`` to the ids of several arrays at once, distinct over all of them: one optimizer application.

        step, turn : which step, and which application of it, this is: rounding to 16 bits depends on them
        """
        if segments:
            self._rows.apply(segments, learning_rate, step, turn)

    def write(self, ids: Int64, values: Float32, part: int = 0) -> None:
        """Set one part of the rows of distinct ids. values : float32 (n, dim)."""
        self._rows.write(ids, values, part)

    def read(self, ids: Int64, part: int = 0) -> Float32:
        """One part of the rows of any ids, repeats included. Returns float32 (n, dim), a copy."""
        out = np.empty((len(ids), self.layout.dim), np.float32)
        self._rows.read(ids, out, part)
        return out

    @property
    def stride(self) -> int:
        """Rows whose ids are so far apart lie next to each other."""
        return NUM_SHARDS if self.layout.mod else 1

    @property
    def copies_any_number(self) -> bool:
        """Whether ``copy_rows`` takes as many rows as one likes; else every number of them is a program of its own."""
        return self.variant == "ffi"

    def copy_rows(self, ids: Int64, out: Float32) -> Callable[[], object]:
        """All parts of the rows of distinct ids as they are now, into float32 (parts, n, dim).

        Returns what waits until they are there, in whatever thread. out may have room for the first ids only. Where
        ``copies_any_number`` is not so: at most MAX_BUCKET per device.
        """
        return self._rows.copy_rows(ids, out)

    def stream(self, part: int = 0) -> Iterator[Float32]:
        """One part of the whole table in id order, in blocks of rows: never a second copy of the table."""
        for first, count in self._blocks():
            out = np.empty((count, self.layout.dim), np.float32)
            self._rows.read(first, out, part)
            yield out

    def fill(self, draw: Callable[[int, int], Float32]) -> None:
        """Write the weights of every row: ``draw(first, count)`` gives float32 (count, dim) in id order."""
        for first, count in self._blocks():
            self._rows.write(first, draw(first, count), 0)

    def whole(self, part: int = 0) -> jax.Array:
        """A copy of one part in id order: (vocabulary_size, dim), row-sharded where the mesh divides it."""
        host = np.concatenate(list(self.stream(part)))
        even = self.layout.vocabulary_size % self.layout.num_devices == 0
        spec = PartitionSpec(self._outside.axis_names) if even else PartitionSpec()
        with jax.set_mesh(self._mesh), jax.transfer_guard("allow"):
            copy: jax.Array = jax.device_put(host, NamedSharding(self._outside, spec))
        return copy

    def wait(self) -> None:
        """Block until every dispatch is done; an error of the device comes out here."""
        self._rows.wait()

    def warm(self) -> int:
        """Compile what a step, a lookup or a checkpoint may ask for. Returns how many programs there are."""
        return self._rows.warm()

    def _blocks(self) -> Iterator[tuple[int, int]]:
        """(first id, how many) of consecutive ranges that make up the table."""
        at_once = MAX_BUCKET * self.layout.num_devices
        for first in range(0, self.layout.vocabulary_size, at_once):
            yield first, min(at_once, self.layout.vocabulary_size - first)
