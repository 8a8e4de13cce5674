"""The tables of one engine, by name: create, update, look up, load, hash and write them.

Maps the configuration's tables, slots and initializers to the bridge's device tables. Independent of
gradient sources, the gate and the order of frames.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.config.specs import TableSpec
from penstock.errors import UsageError, listed
from penstock.frames import Array, Coalesced, Float32, Int64
from penstock.tables.dynamic_table import DynamicTable, valid_ids
from penstock.tables.initializers import start_of
from penstock.tables.key_directory import bytes_of_directories
from penstock.tables.orbax import WEIGHTS
from penstock.tables.table_io import write_tables
from penstock.tables.table_keys import TableKeys
from penstock.updates import Ops, quantize
from penstock.validation import MASKED, is_masked

if TYPE_CHECKING:
    import jax

    from penstock.bridge.device_tables import DeviceTable


class Configured(Protocol):
    """The part of a configuration that tables are created from."""

    @property
    def tables(self) -> tuple[TableSpec, ...]: ...

    @property
    def sharding_strategy(self) -> str: ...


class TableSet:
    """Weights and slots of every table of a configuration, on the devices of a mesh. Loads jax.

    mesh : None: the default mesh; seed : of the initializers
    threads : number of threads that update the rows of one CPU device; 0: as many as XLA has
    """

    is_share = False  # whether this process holds only a share of tables that span processes

    def __init__(self, config: Configured, mesh: jax.sharding.Mesh | None, seed: int, threads: int = 0) -> None:
        from penstock.bridge import backends
        from penstock.bridge.device_tables import DeviceTable, check_memory, make_mesh
        from penstock.bridge.sharding import Layout, TableDefinition

        self.specs = {spec.name: spec for spec in config.tables}
        # The empty update of a table that a step does not touch: non-lazy optimizers still move its rows.
        self._of_no_rows = {
            name: (Coalesced.of_no_rows(spec.dim),) for name, spec in self.specs.items() if spec.rule.non_lazy
        }
        user_mesh, mesh = mesh, make_mesh(mesh)
        self.devices = tuple(mesh.devices.flat)
        check_memory(mesh, sum(spec.weights_bytes + spec.slots_bytes for spec in self.specs.values()))
        lanes = backends.lanes(mesh)
        layouts = {
            name: Layout(
                name,
                spec.vocabulary_size,
                spec.dim,
                len(spec.slots),
                mesh.size,
                config.sharding_strategy == "MOD",
                lanes,
                bfloat16=spec.storage_dtype == "bfloat16",
                among=self.among(name),
                row_slots=spec.rule.row_slots,
            )
            for name, spec in self.specs.items()
        }
        directories = bytes_of_directories([(spec, 0) for spec in self.specs.values() if spec.dynamic])
        check_memory(mesh, sum(layout.nbytes for layout in layouts.values()) + directories)
        definitions = [
            TableDefinition(
                layouts[name], spec.rule, tuple(start for _, start in spec.slots), (spec.tag, spec.learning_rate)
            )
            for name, spec in self.specs.items()
        ]
        self._groups = backends.create_tables(mesh, definitions, threads)
        created: dict[str, DeviceTable] = {}
        for group in self._groups:
            for member, layout in enumerate(group.layouts):
                created[layout.name] = DeviceTable(group, member, user_mesh)
        self._tables = {name: created[name] for name in self.specs}
        self.dynamic = TableKeys(
            {name: DynamicTable(spec, created[name], seed) for name, spec in self.specs.items() if spec.dynamic}
        )
        for name, spec in self.specs.items():
            if name not in self.dynamic:
                self._tables[name].fill(self.start_of(spec, seed))

    def table(self, name: str) -> DeviceTable:
        """Return a table on the devices. Raises UsageError for a name missing from the configuration."""
        if not isinstance(name, str) or name not in self._tables:
            raise UsageError(f"no table '{name}' in the configuration ({listed(self._tables)})")
        return self._tables[name]

    @property
    def held(self) -> Mapping[str, TableSpec]:
        """The specs of the tables as this process holds them: whole tables."""
        return self.specs

    def start_of(self, spec: TableSpec, seed: int) -> Callable[[int, int], Float32]:
        """Return the initializer of a table in ``held``: (first, count) → rows."""
        return start_of(spec, seed)

    def among(self, name: str) -> tuple[int, int]:
        """Return which rows of the table this process holds: (first row, stride)."""
        return 0, 1

    def share_of(self, name: str, sums: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return this process's share of the accumulated sums of all processes (``TableStore.get_state``)."""
        return sums

    def parts(self, name: str) -> dict[str, int]:
        """Map names to parts of the device table: the weights first, then the slots in TensorFlow's order."""
        self.table(name)
        return {key: part for part, key in enumerate([WEIGHTS, *(slot for slot, _ in self.specs[name].slots)])}

    def apply(self, coalesced: Mapping[str, list[Coalesced]], rates: tuple[float, ...], step: int) -> None:
        """Apply one step: update every table's coalesced rows by its optimizer.

        coalesced : by table; rates : one learning rate per tag; step : the number of the step
        """
        if self.dynamic:
            self.dynamic.carry_out()
        for group in self._groups:
            applications: list[list[tuple[int, Sequence[Any], float]]] = []
            for member, layout in enumerate(group.layouts):
                several = coalesced.get(layout.name)
                if several is None:
                    continue
                for number, rows in enumerate(several or self._of_no_rows.get(layout.name, ())):
                    if number == len(applications):
                        applications.append([])
                    applications[number].append((member, rows.summed, self._rate(layout.name, rates)))
            for number, updates in enumerate(applications):
                group.apply(updates, step, number)

    def _rate(self, name: str, rates: tuple[float, ...]) -> float:
        spec = self.specs[name]
        rate = rates[spec.tag] if spec.tag is not None else spec.learning_rate
        assert rate is not None  # a valid configuration has one or the other
        return rate

    def warm(self) -> int:
        """Compile the programs of steps, lookups and checkpoints ahead of time; return their number."""
        return sum(group.warm() for group in self._groups)

    def touches(self, coalesced: Mapping[str, list[Coalesced]]) -> bool:
        """Return whether a step with these rows changes any table."""
        return self.dynamic.have_lost() or any(
            self.specs[name].rule.non_lazy or any(rows.num_ids for rows in several)
            for name, several in coalesced.items()
        )

    def prepare_thread(self) -> None:
        """Allocate the file descriptors that steps on this thread need; call it once per thread.

        Raises OSError if no descriptor is left.
        """
        from penstock.bridge.device_tables import prepare_thread

        prepare_thread()

    def wait(self) -> None:
        """Block until the devices are done. Raises their errors."""
        for table in self._tables.values():
            table.wait()

    def lookup(self, name: str, ids: Int64, forward: bool) -> Float32:
        """Return the weights of ids, float32 (n, dim); ids may repeat.

        ids : as ``valid_ids`` returns them
        forward : return them as a forward pass sees them, that is, quantized where the table is
        """
        rows = (self.dynamic.get(name) or self.table(name)).read(ids)
        seen = self.specs[name].quantization if forward else None
        if seen is None:
            return rows
        return np.asarray(quantize(Ops(np), rows, seen.num_buckets, seen.lower, seen.upper), np.float32)

    def whole(self, name: str) -> DeviceTable:
        """Return a table on the devices whose rows are all of its ids. Raises UsageError for a dynamic table."""
        table = self.table(name)
        if name in self.dynamic:
            raise UsageError(f"table '{name}' is dynamic: its rows are read by key, with keys() and lookup()")
        return table

    def dynamic_table(self, name: str) -> DynamicTable:
        """Return a dynamic table. Raises UsageError for another one."""
        self.table(name)
        if name not in self.dynamic:
            raise UsageError(f"table '{name}' is not dynamic: its ids are all below {self.specs[name].vocabulary_size}")
        return self.dynamic[name]

    def retrieve(self, name: str) -> dict[str, Float32]:
        """Return a table's weights and slots by name, float32 (vocabulary_size, floats per row) in id order."""
        table = self.whole(name)
        return {key: np.concatenate(list(table.stream(part))) for key, part in self.parts(name).items()}

    def checked(self, name: str, rows: Any, ids: Any, slots: Mapping[str, Any]) -> tuple[Int64, dict[int, Float32]]:
        """Return the arguments of ``load_parameters`` as ids and part → values. Raises UsageError."""
        table, parts = self.table(name), self.parts(name)
        if set(slots) != set(parts) - {WEIGHTS}:
            wanted = ", ".join(list(parts)[1:]) or "none"
            raise UsageError(f"table '{name}': expected the slots {wanted}; got {', '.join(slots) or 'none'}")
        if ids is None and name in self.dynamic:
            raise UsageError(f"table '{name}' is dynamic: name the keys of the rows, with ids=")
        where = np.arange(table.layout.vocabulary_size) if ids is None else self.valid_ids(name, ids)
        if ids is not None and len(np.unique(where)) != len(where):
            raise UsageError(f"table '{name}': an id occurs twice in ids")
        values = {}
        for key, given in {WEIGHTS: rows, **slots}.items():
            shape = (len(where), table.part_dims[parts[key]])
            if is_masked(given):
                raise UsageError(f"table '{name}', {key}: {MASKED}")
            try:
                value = np.array(given, np.float32, order="C")
            except (TypeError, ValueError) as error:
                raise UsageError(f"table '{name}', {key}: expected floats of shape {shape}: {error}") from None
            if value.shape != shape:
                raise UsageError(f"table '{name}', {key}: expected shape {shape}, got {value.shape}")
            values[parts[key]] = value
        return where, values

    def set_rows(self, name: str, ids: Int64, values: Mapping[int, Float32]) -> None:
        """Set rows of a table. values : part → float32 rows, as ``checked`` returns them

        Raises CapacityError if a dynamic table has no room; nothing has changed then.
        """
        if name in self.dynamic:
            ids = self.dynamic[name].admit(ids)
        self.set_stored_rows(name, ids, values)

    def set_stored_rows(self, name: str, rows: Int64, values: Mapping[int, Float32]) -> None:
        """Set rows of a table by their numbers: their ids, unless the table is dynamic."""
        for part, block in values.items():
            self.table(name).write(rows, np.ascontiguousarray(block), part)

    def hash(self, global_step: int) -> str:
        """Return the SHA-256 (hex) of all tables, in order of name, and the step; see ``Engine.state_hash``."""
        digest = hashlib.sha256()
        for name, table in sorted(self._tables.items()):
            digest.update(name.encode() + b"\0" + struct.pack("<qq", table.layout.vocabulary_size, table.layout.dim))
            for part in range(len(table.part_dims)):
                for block in (self.dynamic.get(name) or table).stream(part):
                    digest.update(_as_stored(block, table.layout.bfloat16 and part == 0).data)
            if name in self.dynamic:
                self.dynamic[name].hash_keys(digest)
        digest.update(struct.pack("<q", global_step))
        return digest.hexdigest()

    def write(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write one Parquet file per table, all of them or none; return their paths."""
        return write_tables(self, directory)

    def valid_ids(self, name: str, ids: Any) -> Int64:
        """Return ids as int64, shape (n,). Raises UsageError for an id outside the table."""
        size = self.table(name).layout.vocabulary_size
        return valid_ids(name, ids, self.dynamic[name].id_range if name in self.dynamic else size)


def _as_stored(block: Float32, bfloat16: bool) -> Array:
    """Return rows as they are stored, little-endian: float32, or the upper 16 bits of each float32 for bfloat16."""
    if not bfloat16:
        return np.ascontiguousarray(block, "<f4")
    return (block.view(np.uint32) >> np.uint32(16)).astype("<u2")
