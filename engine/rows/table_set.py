"""The tables of one engine, by name: creates and updates them, and reads, sets and hashes their rows.

Maps the configuration's tables, slots and initializers to the bridge's device tables. Independent of
gradient sources, the gate and the order of frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from penstock.base.errors import UsageError, listed
from penstock.base.threads import ThreadTeam
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.id_ranges import valid_ids
from penstock.model.config.specs import WEIGHTS, TableSpec
from penstock.model.frames import Coalesced, Float32, Int64
from penstock.model.frozen_tables import check_no_until_step, frozen_tables
from penstock.model.stats import CacheReport
from penstock.model.updates import Ops, quantize
from penstock.model.updates.rule import Rate
from penstock.pyx.accumulator import Accumulator
from penstock.pyx.frame_steps import FrameSteps
from penstock.pyx.gate_counts import GateCounts
from penstock.rows.arguments import checked_parts
from penstock.rows.bridge.backend_tables import BackendTables
from penstock.rows.bridge.backends import check_placed, create_placed, layouts_of, reasons_for_xla
from penstock.rows.bridge.cached_tables import CachedTables
from penstock.rows.bridge.device_tables import DeviceTable
from penstock.rows.bridge.devices import AnyMesh
from penstock.rows.bridge.host_tables import Allocate, HostTables
from penstock.rows.bridge.mesh_selection import make_mesh, processes_of
from penstock.rows.dynamic_table import DynamicTable, TableKeys
from penstock.rows.held_rows import HeldRows
from penstock.rows.initial_vectors import VectorFile, file_of
from penstock.rows.key_directory import bytes_of_directories
from penstock.rows.state_hash import KeyArrays, state_hash
from penstock.rows.table_programs import TablePrograms, Variant, preferred


class TableSet:
    """Weights and slots of every table of a configuration.

    mesh : the devices; None: the default mesh. Rows of a table whose placement is "host" are in the host's memory
    seed : of the initializers
    team : the threads that update rows in the host's memory, or lay them out for the devices
    share : (rank, count): hold only the rows of share ``rank`` of ``count``; None: hold all rows
    variant : as ``Engine`` takes it
    allocate : the memory of tables on the host; None: anonymous

    specs : name → the spec of the whole table
    dynamic : name → DynamicTable, of the tables that are dynamic
    held : which rows of the tables this set holds
    processes : the processes that the mesh spans; None: only this one
    programs : the programs that update the tables
    notes : why XLA's update tables of the host, and which loaded slots are initial ones, a sentence each
    frozen : the tables that are never trained, as ``frozen_tables`` returns them
    next_thaw : the step from which on the next frozen table is trained; None: there is none
    vector_files : name → the file that a table starts from
    cached : name → CachedTables, of the tables whose placement is "cached"
    """

    def __init__(
        self,
        config: EmbeddingConfig,
        mesh: AnyMesh | None,
        seed: int,
        team: ThreadTeam,
        share: tuple[int, int] | None = None,
        variant: Variant = "auto",
        allocate: Allocate | None = None,
    ) -> None:
        self._config = config
        self.specs = {spec.name: spec for spec in config.tables}
        self._waiting = {
            name: spec.until_step
            for name, spec in self.specs.items()
            if not spec.trainable and spec.until_step is not None
        }
        mod = config.sharding_strategy == "MOD"
        self.held = HeldRows(self.specs, mod, seed, share)
        devices = make_mesh(mesh)
        self.devices, self.processes = tuple(devices.devices.flat), processes_of(devices)
        self._check_process()
        specs = self.held.specs
        layouts = layouts_of(specs, devices, mod, self.held.among)
        dynamic_specs = [(spec, 0) for spec in self.specs.values() if spec.dynamic]
        directories = bytes_of_directories(dynamic_specs, 1 if share is None else share[1])
        check_placed(specs, layouts, devices, directories)
        if self._waiting:  # the room for their slots, too
            trained = {name: config.at_step(step).table(name) for name, step in self._waiting.items()}
            later = {**specs, **trained}
            check_placed(later, layouts_of(later, devices, mod, self.held.among), devices, directories)
        preference = preferred(self.specs, variant)

        def create(names: Sequence[str]) -> tuple[list[BackendTables], dict[str, CachedTables]]:
            chosen = {name: specs[name] for name in names}
            layouts = layouts_of(chosen, devices, mod, self.held.among)
            return create_placed(chosen, layouts, devices, team, preference, self.processes, allocate)

        # Each of those that get slots later has arrays of its own, which are replaced then.
        self._create = create
        self._groups, self.cached = create([name for name in specs if name not in self._waiting])
        for name in self._waiting:
            groups, cached = create([name])
            self._groups += groups
            self.cached |= cached
        self._note_groups()
        members = [(group, member) for group in self._groups for member in range(len(group.layouts))]
        created = {group.layouts[member].name: DeviceTable(group, member, mesh or devices) for group, member in members}
        self._tables = {name: created[name] for name in self.specs}
        self.programs = TablePrograms(self._tables)
        self.notes = reasons_for_xla(specs, layouts, devices, self.programs.variants)
        # Who restores a commit compares them with those of the commit.
        self.vector_files = self._vector_files()
        self.frozen = frozen_tables(self.specs.values())
        self.dynamic = TableKeys(
            {
                name: DynamicTable(spec, created[name], seed, team.run, share or (0, 1))
                for name, spec in self.specs.items()
                if spec.dynamic
            }
        )
        for name in self.specs:
            if name not in self.dynamic:
                self._tables[name].fill(self.held.start_of(name))

    def _vector_files(self) -> dict[str, VectorFile]:
        """Return name → the file that a table starts from, of equal contents in all processes. Raises InputError."""
        with nullcontext() if self.processes is None else self.processes.sharing_errors():
            files = {name: file for name, spec in self.specs.items() if (file := file_of(spec)) is not None}
        if files and self.processes is not None:
            self.processes.agree(f"Engine(…), initial vectors {[file.digest for file in files.values()]}")
        return files

    def _note_groups(self) -> None:
        self._members = [(group, [self.specs[layout.name] for layout in group.layouts]) for group in self._groups]
        # Updates of tables that a step does not touch: they have no gradients, and non-lazy optimizers change all rows.
        self._empty_updates = {
            name: (Coalesced.of_no_rows(spec.dim),) for name, spec in self.specs.items() if spec.rule.non_lazy
        }
        self.next_thaw = min(self._waiting.values(), default=None)

    # ---- tables that are frozen up to a step

    def frozen_before(self, step: int) -> dict[str, bool]:
        """Return the tables that are frozen in a step and trained later, as ``frozen_tables`` does."""
        return {name: self.specs[name].refuses_gradients for name, until in self._waiting.items() if step < until}

    def thaw(self, step: int) -> list[TableSpec]:
        """Let the tables whose ``until_step`` has come train: give their rows new slots. Returns their specs."""
        names = [name for name, until in self._waiting.items() if until <= step]
        config = self._config.at_step(step)
        for name in names:
            del self._waiting[name]
            self.specs[name] = self.held.specs[name] = config.table(name)
            before, ((backend,), cached) = self._tables[name].backend, self._create([name])
            self._tables[name].move(backend)
            self._groups[self._groups.index(before)] = backend
            self.cached |= cached
            if name in self.dynamic:
                self.dynamic[name].has_slots(self.specs[name])
        self._note_groups()
        return [self.specs[name] for name in names]

    @property
    def are_on_host(self) -> bool:
        """Return whether all rows are in the host's memory, which no thread of a device has to copy from."""
        return all(table.on_host is not None for table in self._tables.values())

    def _check_process(self) -> None:
        """Raise UsageError for a share, or a dynamic or host-placed table, if the mesh spans several processes."""
        if self.held.is_share:
            check_no_until_step(self.specs.values(), "an engine with a share of the rows")
        if self.processes is None:
            return
        check_no_until_step(self.specs.values(), "a mesh of several processes")
        if self.held.is_share:
            raise UsageError(f"share: the mesh spans {self.processes.count} processes; give one or the other")
        for name, spec in self.specs.items():
            if (placement := spec.placement.where) != "device":
                raise UsageError(
                    f"table '{name}' has the placement {placement.upper()}, and the mesh spans {self.processes.count} "
                    "processes: create the engine on the devices of one process, or place the table on DEVICE"
                )
            if spec.dynamic is not None:
                raise UsageError(
                    f"table '{name}' is dynamic, and the mesh spans {self.processes.count} processes: create the "
                    "engine on the devices of one process, or number its keys below a vocabulary_size"
                )

    def apply(self, coalesced: Mapping[str, list[Coalesced]], rates: tuple[float, ...], step: int) -> bool:
        """Apply one step: update every table's coalesced rows by its optimizer.

        coalesced : table → its gradients of the opening: one Coalesced, or one per frame without accumulation
        rates : the learning rate of each tag; step : the number of the step
        Returns whether any table changed.
        """
        changed = False
        if self.dynamic:
            self.dynamic.carry_out()
            changed = self.dynamic.have_lost()
        for group, specs in self._members:
            # applications[i] has the i-th update of each table of the group.
            applications: list[list[tuple[int, Sequence[Any], Rate]]] = []
            for member, spec in enumerate(specs):
                name, rate = spec.name, spec.rule.rate_at(self.rate_of(spec.name, rates), step)
                table_updates: Sequence[Coalesced] = coalesced.get(name, ()) or self._empty_updates.get(name, ())
                for number, rows in enumerate(table_updates):
                    if number == len(applications):
                        applications.append([])
                    applications[number].append((member, rows.summed, rate))
                    changed = changed or rows.num_ids > 0 or name in self._empty_updates
            for number, updates in enumerate(applications):
                group.apply(updates, step, number)
        return changed

    def take_not_finite(self) -> tuple[int, str, int] | None:
        """Return how many rows updates have made infinite or NaN since the last call, and table and id of the first.

        Only of tables in the host's memory. A row counts once, until it is written. None: none
        """
        total, first = 0, None
        for group in self._groups:
            if isinstance(group, HostTables) and (result := group.take_not_finite()) is not None:
                num_rows, member, row = result
                name, total = group.layouts[member].name, total + num_rows
                if first is None:
                    first = name, self._id_at(name, row)
        return None if first is None else (total, *first)

    def _id_at(self, name: str, row: int) -> int:
        """Return the id that the user knows of a local row."""
        if name not in self.dynamic:
            return int(self.held.ids(name, np.array([row]))[0])
        key, settings = int(self.dynamic[name].directory.keys(np.array([row]))[0]), self.specs[name].dynamic
        return key % 2**64 if settings is not None and settings.key_type == "uint64" else key

    def frame_steps(self, name: str, gate: GateCounts, sums: Accumulator, mean: bool) -> FrameSteps | None:
        """Return the way of a table's frames without Python; None if there is none, or a step concerns other tables, or
        has another rate than the one before.

        gate, sums : which the frames enter; mean : divide sums by the number of frames
        """
        spec = self.specs[name]
        if self.dynamic or self.held.is_share or self._empty_updates or not spec.accumulate or spec.rule.counts_steps:
            return None
        if not self.specs[name].trainable:
            return None
        for group, specs in self._members:
            if isinstance(group, HostTables) and spec in specs:
                return group.frame_steps(specs.index(spec), gate, sums, mean)
        return None

    def rate_of(self, name: str, rates: Sequence[float]) -> float:
        """Return the learning rate of a table. rates : of each tag"""
        spec = self.specs[name]
        rate = spec.learning_rate if spec.tag is None else rates[spec.tag]
        assert rate is not None  # a valid configuration has one or the other
        return rate

    def start_counting(self) -> None:
        """Reset the counts of the keys of dynamic tables, and of the rows that cached tables moved."""
        self.dynamic.start_counting()
        for table in self.cached.values():
            table.start_counting()

    def cache_reports(self) -> dict[str, CacheReport]:
        """Return the name of each cached table → the rows that its updates moved since ``start_counting``."""
        reports = {}
        for name, table in self.cached.items():
            moved, num_bytes = table.moved, self.specs[name].row_bytes
            moved_bytes = (moved.up + moved.down) * num_bytes
            places = table.cache.num_places
            reports[name] = CacheReport(places, moved.hits, moved.up, moved.down, moved_bytes, 1000 * moved.waited_s)
        return reports

    def foresee(self, name: str, rows: Int64) -> None:
        """Announce one more use of a cached table: an application of its optimizer, after those announced before.

        rows : the local rows that it updates, distinct, int64 (n,)
        Announcements decide which rows stay on the devices, and change no bit. So uses may remain unannounced.
        """
        self.cached[name].cache.foresee(rows)

    def forget_foreseen(self) -> None:
        """Withdraw the announcements of uses that have not happened yet, of all cached tables."""
        for table in self.cached.values():
            table.cache.forget()

    def warm(self) -> int:
        """Compile the programs of steps, lookups and checkpoints ahead of time; return how many there are."""
        return sum(group.warm() for group in self._groups)

    def wait(self) -> None:
        """Block until every update that was dispatched is complete. Raises the errors of updates."""
        for group in self._groups:
            group.wait()

    # ---- by id

    def table(self, name: str) -> DeviceTable:
        """Return a table on the devices. Raises UsageError for a name missing from the configuration."""
        if not isinstance(name, str) or name not in self._tables:
            raise UsageError(f"no table '{name}' in the configuration ({listed(self._tables)})")
        return self._tables[name]

    def parts(self, name: str) -> dict[str, int]:
        """Map names to parts of the device table: the weights first, then the slots in TensorFlow's order."""
        self.table(name)
        return {key: part for part, key in enumerate([WEIGHTS, *(slot for slot, _ in self.specs[name].slots)])}

    def lookup(self, name: str, ids: Int64, forward: bool) -> Float32:
        """Return the weights of ids, float32 (n, dim); ids may repeat.

        ids : as ``valid_ids`` returns them
        forward : return them as a forward pass sees them: quantized, if the table has a simulated quantization
        """
        rows = (self.dynamic.get(name) or self.table(name)).read(ids)
        return self.seen(name, rows) if forward else rows

    def seen(self, name: str, rows: Float32) -> Float32:
        """Return rows as a forward pass sees them."""
        quantization = self.specs[name].quantization
        if quantization is None:
            return rows
        quantized = quantize(Ops(np), rows, quantization.num_buckets, quantization.lower, quantization.upper)
        return np.asarray(quantized, np.float32)

    def whole_table(self, name: str) -> DeviceTable:
        """Return a static table that this set holds whole. Raises UsageError for a dynamic table, and for a share."""
        table = self.table(name)
        if name in self.dynamic:
            raise UsageError(f"table '{name}' is dynamic: its rows are read by key, with keys() and lookup()")
        self.held.check_whole(name)
        return table

    def view(self, name: str) -> Float32:
        """Return the weights of a table in the host's memory without a copy. Raises UsageError if it cannot."""
        table = self.whole_table(name)
        on_host, layout = table.on_host, table.layout
        if on_host is None:
            raise UsageError(f"table '{name}' is not in the host's memory; copy it, with table() or lookup()")
        if layout.mod or layout.num_devices > 1:
            order = "by MOD sharding" if layout.mod else f"in {layout.num_devices} parts"
            raise UsageError(
                f"table '{name}' lies {order}, not in the order of its ids; copy it, with table() or lookup()"
            )
        tables, member = on_host
        return tables.view(member)

    def dynamic_table(self, name: str) -> DynamicTable:
        """Return a dynamic table. Raises UsageError for a static table."""
        self.table(name)
        if name not in self.dynamic:
            raise UsageError(f"table '{name}' is not dynamic: its ids are all below {self.specs[name].vocabulary_size}")
        return self.dynamic[name]

    def retrieve(self, name: str) -> dict[str, Float32]:
        """Return a table's weights and slots by name, float32 (vocabulary_size, floats per row) in id order."""
        table = self.whole_table(name)
        return {key: np.concatenate(list(table.stream(part))) for key, part in self.parts(name).items()}

    def checked_parameters(
        self, name: str, rows: Any, ids: Any, slots: Mapping[str, Any]
    ) -> tuple[Int64, dict[int, Float32]]:
        """Return the arguments of ``Engine.load_parameters`` as those of ``set_rows``. Raises UsageError.

        They are local rows, int64 (n,), or the keys of a dynamic table; and part → float32 (n, floats of the part).
        """
        table, parts = self.table(name), self.parts(name)
        if ids is None and name in self.dynamic:
            raise UsageError(f"table '{name}' is dynamic: name the keys of the rows, with ids=")
        if ids is None:
            self.whole_table(name)
        row_ids = np.arange(table.layout.vocabulary_size) if ids is None else self.valid_ids(name, ids)
        if ids is not None and len(np.unique(row_ids)) != len(row_ids):
            raise UsageError(f"table '{name}': an id occurs twice in ids")
        return row_ids, checked_parts(name, list(parts), {WEIGHTS: rows, **slots}, len(row_ids), table.part_dims)

    def set_rows(self, name: str, ids: Int64, values: Mapping[int, Float32]) -> Int64:
        """Set rows of a table. Returns their local rows, int64 (n,).

        ids : local rows, or the keys of a dynamic table, int64 (n,)
        values : part → float32 (n, floats of the part); as ``checked_parameters`` returns them

        Raises CapacityError if a dynamic table has no room; nothing has changed then.
        """
        if name in self.dynamic:
            ids = self.dynamic[name].admit(ids)
        self.set_stored_rows(name, ids, values)
        return ids

    def set_stored_rows(self, name: str, rows: Int64, values: Mapping[int, Float32]) -> None:
        """Set local rows of a table, int64 (n,). values : as in ``set_rows``"""
        for part, block in values.items():
            self.table(name).write(rows, np.ascontiguousarray(block), part)

    def hash(self, global_step: int) -> str:
        """Return the SHA-256 (hex) of all tables in order of name, and of the step; see ``Engine.state_hash``."""

        def stream(name: str, part: int) -> Iterable[Float32]:
            return (self.dynamic.get(name) or self.table(name)).stream(part)

        self.held.check_all("the state hash")
        return state_hash(self.specs, global_step, stream, lambda name: self.dynamic[name].key_arrays())

    def rows_in_hash_order(self, name: str) -> tuple[Int64, KeyArrays]:
        """Return the local rows of a dynamic table in the order of the state hash, int64 (n,), and its key arrays."""
        state = self.dynamic[name].directory.state(expired=False)
        return state["row"].astype(np.int64), self.dynamic[name].key_arrays()

    def read_rows(self, name: str, part: int, rows: Int64) -> Float32:
        """Return one part of local rows, float32 (n, floats of the part)."""
        return self.table(name).read(rows, part)

    def valid_ids(self, name: str, ids: Any) -> Int64:
        """Return the local rows of ids, int64 (n,); the keys of a dynamic table are returned as int64.

        Raises UsageError for an id outside the table, or of another share.
        """
        self.table(name)
        size = self.specs[name].vocabulary_size
        valid = valid_ids(name, ids, self.dynamic[name].id_range if name in self.dynamic else size)
        return self.held.located(name, valid, ids)
