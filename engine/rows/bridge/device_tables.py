"""The tables on the devices: created, updated in place, read and written by id.

One of several variants (backends.py) updates a table's arrays (sharding.py): in the host's memory in the caller's call
(host_tables.py), else through a dispatcher (xla_tables.py), together with other tables (stacking.py). Callers pass
valid ids, which for apply and write are also distinct.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from penstock.model.frames import Float32, Int64
from penstock.model.updates.rule import Rate
from penstock.rows.bridge.backend_tables import BackendTables
from penstock.rows.bridge.devices import AnyMesh
from penstock.rows.bridge.host_tables import HostTables
from penstock.rows.bridge.mesh_selection import on_jax
from penstock.rows.bridge.sharding import MAX_BUCKET, NUM_SHARDS

if TYPE_CHECKING:
    import jax


class DeviceTable:
    """One table's weights and slots. ``BackendTables`` documents what has no docstring here.

    backend : the tables whose arrays contain this one; member : its index there
    user_mesh : the mesh of the copies from ``whole``; None: that of the tables
    """

    def __init__(self, backend: BackendTables, member: int = 0, user_mesh: AnyMesh | None = None) -> None:
        self.backend, self._member, self._user_mesh = backend, member, user_mesh or backend.mesh
        self.layout = backend.layouts[member]

    @property
    def part_dims(self) -> tuple[int, ...]:
        """Floats per row of each part: part 0 is the weights, part 1 + s is slot s."""
        return self.layout.part_dims

    @property
    def on_host(self) -> tuple[HostTables, int] | None:
        """The tables in the host's memory that this is one of, and its index there; None: it is elsewhere."""
        return (self.backend, self._member) if isinstance(self.backend, HostTables) else None

    def move(self, backend: BackendTables) -> None:
        """Move the weights to other tables, with other slots. backend : new ones, of one member"""
        before = DeviceTable(self.backend, self._member, self._user_mesh)
        self.backend, self._member, self.layout = backend, 0, backend.layouts[0]
        self.fill(before.read)

    def apply(self, ids: Int64, grads: Float32, learning_rate: Rate) -> None:
        """Apply the optimizer once to the rows of distinct ids. grads : float32 (n, dim)

        A non-lazy rule also updates all other rows, with a gradient of 0. The update may still be in flight when the
        call returns; every variant but host may read the arguments until ``wait`` has returned.
        """
        self.backend.apply([(self._member, [(ids, grads)], learning_rate)])

    def write(self, ids: Int64, values: Float32, part: int = 0) -> None:
        """Set one part of the rows of distinct ids. values : float32 (n, floats of the part)"""
        self.backend.write(self._member, ids, values, part)

    def create_rows(self, ids: Int64, weights: Iterable[Float32]) -> None:
        self.backend.create_rows(self._member, ids, weights)

    def key_by(self, keys: Callable[[Int64], Int64]) -> None:
        self.backend.key_by(self._member, keys)

    def read(self, ids: Int64, part: int = 0) -> Float32:
        """Return a copy of one part of the rows of ids, which may repeat: float32 (n, floats of the part)."""
        out = np.empty((len(ids), self.part_dims[part]), np.float32)
        self.backend.read(self._member, ids, out, part)
        return out

    @property
    def stride(self) -> int:
        """The distance between the ids of neighbouring rows."""
        return NUM_SHARDS if self.layout.mod else 1

    def copy_rows(self, ids: Int64, out: Float32) -> Callable[[], object]:
        return self.backend.copy_rows(self._member, ids, out)

    def stream(self, part: int = 0) -> Iterator[Float32]:
        """Yield one part of the whole table in id order, in blocks of rows, so that no second copy of it exists."""
        yield from self._read(0, self.layout.vocabulary_size, part)

    def fill(self, draw: Callable[[Int64], Float32]) -> None:
        """Write the weights of every row. draw : ids → float32 (n, dim)"""
        for first, count in self._blocks(0, self.layout.vocabulary_size):
            self.backend.write(self._member, first, draw(np.arange(first, first + count)), 0)

    def whole(self, part: int = 0) -> jax.Array:
        """Return a copy of one part in id order: (vocabulary_size, floats), sharded by row if the mesh divides it."""
        mesh = on_jax(self._user_mesh)
        from penstock.rows.bridge.jax_devices import whole_array

        def read(first: int, stop: int) -> Float32:
            return np.concatenate([*self._read(first, stop, part)])

        return whole_array(mesh, self.layout.vocabulary_size, self.part_dims[part], read)

    def wait(self) -> None:
        self.backend.wait()

    def _read(self, first: int, stop: int, part: int) -> Iterator[Float32]:
        """Yield one part of the rows from ``first`` to ``stop`` in id order, in blocks."""
        for start, count in self._blocks(first, stop):
            out = np.empty((count, self.part_dims[part]), np.float32)
            self.backend.read(self._member, start, out, part)
            yield out

    def _blocks(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield consecutive ranges that make up the rows from ``first`` to ``stop``, as (first id, number of ids)."""
        at_once = MAX_BUCKET * self.layout.num_devices
        for start in range(first, stop, at_once):
            yield start, min(at_once, stop - start)
