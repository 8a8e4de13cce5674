"""The tables of one engine, by name: create and update them; ``tables_by_id`` reads and writes them.

Maps the configuration's tables, slots and initializers to the bridge's device tables. Independent of
gradient sources, the gate and the order of frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.config.specs import TableSpec
from penstock.errors import UsageError
from penstock.frames import Array, Coalesced, Float32, Frame, Int64
from penstock.row_cache import RowCache
from penstock.stats import CacheReport
from penstock.tables.dynamic_table import DynamicTable
from penstock.tables.initializers import start_of
from penstock.tables.key_directory import bytes_of_directories
from penstock.tables.shares import Share, checked_share, reduced, shares_of
from penstock.tables.table_keys import TableKeys
from penstock.tables.table_programs import TablePrograms, Variant, preferred
from penstock.tables.tables_by_id import TablesById

if TYPE_CHECKING:
    import jax

    from penstock.bridge.device_tables import Tables


class Configured(Protocol):
    """The part of a configuration that tables are created from."""

    @property
    def tables(self) -> tuple[TableSpec, ...]: ...

    @property
    def sharding_strategy(self) -> str: ...


class TableSet(TablesById):
    """Weights and slots of every table of a configuration, on the devices of a mesh. Loads jax.

    mesh : None: the default mesh; a table whose placement is "host" is on no device of it; seed : of the initializers
    threads : number of threads that update the rows of one CPU device; 0: as many as XLA has
    share : (rank, count): only the rows of one of ``count`` shares; None: all rows
    variant : as ``Engine`` takes it

    programs : those that update the tables; cached : the tables whose placement is cached
    """

    is_share = False  # whether only a share of the rows is here

    def __init__(
        self,
        config: Configured,
        mesh: jax.sharding.Mesh | None,
        seed: int,
        threads: int = 0,
        share: tuple[int, int] | None = None,
        variant: Variant = "auto",
    ) -> None:
        from penstock.bridge import backends
        from penstock.bridge.device_tables import DeviceTable, check_memory, make_mesh, processes_of
        from penstock.bridge.sharding import Layout, TableDefinition

        self.specs = {spec.name: spec for spec in config.tables}
        mod = config.sharding_strategy == "MOD"
        if share is not None:
            self.is_share, self.shares = True, shares_of(config.tables, mod, seed, *checked_share(share))
        # The empty update of a table that a step does not touch: non-lazy optimizers still move its rows.
        self._of_no_rows = {
            name: (Coalesced.of_no_rows(spec.dim),) for name, spec in self.specs.items() if spec.rule.non_lazy
        }
        user_mesh, mesh = mesh, make_mesh(mesh)
        self.processes = processes_of(mesh)
        self._check_process()
        self.devices = tuple(mesh.devices.flat)
        on_host = {name for name, spec in self.specs.items() if spec.placement.where != "device"}
        places = {name: spec.places for name, spec in self.specs_here.items() if spec.placement.where == "cached"}
        host = backends.host_mesh() if on_host else mesh
        meshes = {name: host if name in on_host else mesh for name in self.specs}
        check_memory([(meshes[name], spec.weights_bytes + spec.slots_bytes) for name, spec in self.specs_here.items()])
        lanes = backends.lanes(mesh)
        layouts = {
            name: Layout(
                name,
                spec.vocabulary_size,
                spec.dim,
                len(spec.slots),
                meshes[name].size,
                mod,
                1 if name in on_host else lanes,
                bfloat16=spec.storage_dtype == "bfloat16",
                among=self.among(name),
                row_slots=spec.rule.row_slots,
            )
            for name, spec in self.specs_here.items()
        }
        directories = bytes_of_directories(
            [(spec, 0) for spec in self.specs.values() if spec.dynamic], 1 if share is None else share[1]
        )
        caches = [(mesh, backends.places_layout(layouts[name], size, mesh).nbytes) for name, size in places.items()]
        tables = [(meshes[name], layout.nbytes) for name, layout in layouts.items()]
        caches += [(host, spec.cache_bytes) for spec in self.specs_here.values()]
        check_memory([(mesh, directories), *tables, *caches])
        definitions = {
            name: TableDefinition(
                layouts[name], spec.rule, tuple(start for _, start in spec.slots), (spec.tag, spec.learning_rate)
            )
            for name, spec in self.specs.items()
        }
        on_devices = [definition for name, definition in definitions.items() if name not in on_host]
        variants = preferred(self.specs, variant)
        cached = [
            (definitions[name], RowCache(layouts[name].vocabulary_size, n, is_tolerant=bool(self.specs[name].dynamic)))
            for name, n in places.items()
        ]
        self.cached = dict(zip(places, backends.create_cached(mesh, host, cached, threads, variants), strict=True))
        host_definitions = [definition for name, definition in definitions.items() if name in on_host - places.keys()]
        # The devices first: they update their tables while the host updates its own.
        self._groups: list[Tables] = [
            *backends.create_tables(mesh, on_devices, threads, preferred=variants, processes=self.processes),
            *self.cached.values(),
            *backends.create_on_host(host, host_definitions, threads),
        ]
        created: dict[str, DeviceTable] = {}
        for group in self._groups:
            for member, layout in enumerate(group.layouts):
                created[layout.name] = DeviceTable(group, member, user_mesh or mesh)
        self._tables = {name: created[name] for name in self.specs}
        self.programs = TablePrograms(self._tables)
        self._members = [(group, [self.specs[layout.name] for layout in group.layouts]) for group in self._groups]
        self.dynamic = TableKeys(
            {
                name: DynamicTable(spec, created[name], seed, share or (0, 1))
                for name, spec in self.specs.items()
                if spec.dynamic
            }
        )
        for name, spec in self.specs.items():
            if name not in self.dynamic:
                self._tables[name].fill(self.start_of(spec, seed))

    def _check_process(self) -> None:
        """Raise UsageError for what a mesh over several processes does not have: dynamic tables, shares, placements."""
        if self.processes is None:
            return
        if self.is_share:
            raise UsageError(f"share: the mesh spans {self.processes.count} processes; give one or the other")
        dynamic = [name for name, spec in self.specs.items() if spec.dynamic is not None]
        placed = [(name, place) for name, spec in self.specs.items() if (place := spec.placement.where) != "device"]
        for name, place in placed:
            raise UsageError(
                f"table '{name}' has the placement {place.upper()}, and the mesh spans {self.processes.count} "
                "processes: create the engine on the devices of one process, or place the table on DEVICE"
            )
        if dynamic:
            raise UsageError(
                f"table '{dynamic[0]}' is dynamic, and the mesh spans {self.processes.count} processes: create the "
                "engine on the devices of one process, or number its keys below a vocabulary_size"
            )

    @property
    def specs_here(self) -> Mapping[str, TableSpec]:
        """The specs of the tables with as many rows as are here."""
        rows = {name: share.held_rows for name, share in self.shares.items()}
        return {n: replace(spec, vocabulary_size=rows.get(n, spec.vocabulary_size)) for n, spec in self.specs.items()}

    def start_of(self, spec: TableSpec, seed: int) -> Callable[[int, int], Float32]:
        """Return the initializer of the rows of a table that are here: (first, count) → rows."""
        share = self.shares.get(spec.name)
        return share.initializer(start_of(spec, seed)) if isinstance(share, Share) else start_of(spec, seed)

    def among(self, name: str) -> tuple[int, int]:
        """Return which rows of the table are here: (first row, stride)."""
        share = self.shares.get(name)
        return (share.ids(0), share.stride) if isinstance(share, Share) else (0, 1)

    def reduced(self, frame: Frame) -> Frame:
        """Return a frame reduced to the rows that are here, by their numbers; a reduced one as it is."""
        return reduced(frame, self.shares) if self.shares and frame.fingerprint is None else frame

    def share_of(self, name: str, sums: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the part of this share of the accumulated sums of all (``TableStore.get_state``).

        Of several frames, also those that have no row here; of sums, none if none are here.
        """
        if name not in self.shares:
            return sums
        part: dict[str, Array] = {}
        for number in {key.partition(".")[0] for key in sums}:
            places, numbers = self.shares[name].select(np.ascontiguousarray(sums[f"{number}.ids"]))
            if len(places) or not self.specs[name].accumulate:
                of_frame = {key: array for key, array in sums.items() if key.startswith(f"{number}.")}
                part |= {key: array[places] for key, array in of_frame.items()} | {f"{number}.ids": numbers}
        return part

    def apply(self, coalesced: Mapping[str, list[Coalesced]], rates: tuple[float, ...], step: int) -> bool:
        """Apply one step: update every table's coalesced rows by its optimizer.

        coalesced : by table; rates : one learning rate per tag; step : the number of the step
        Returns whether it changed a table.
        """
        changed = False
        if self.dynamic:
            self.dynamic.carry_out()
            changed = self.dynamic.have_lost()
        for group, specs in self._members:
            applications: list[list[tuple[int, Sequence[Any], float]]] = []
            for member, spec in enumerate(specs):
                name, rate = spec.name, spec.learning_rate if spec.tag is None else rates[spec.tag]
                assert rate is not None  # a valid configuration has one or the other
                several: Sequence[Coalesced] = coalesced.get(name, ()) or self._of_no_rows.get(name, ())
                for number, rows in enumerate(several):
                    if number == len(applications):
                        applications.append([])
                    applications[number].append((member, rows.summed, rate))
                    changed = changed or rows.num_ids > 0 or name in self._of_no_rows
            for number, updates in enumerate(applications):
                group.apply(updates, step, number)
        return changed

    def start_counting(self) -> None:
        """Reset the counts of keys and of moved rows."""
        self.dynamic.start_counting()
        for table in self.cached.values():
            table.start_counting()

    def cache_reports(self) -> dict[str, CacheReport]:
        """Return what updates have moved since ``start_counting``, by cached table."""
        reports = {}
        for name, table in self.cached.items():
            moved, num_bytes = table.moved, self.specs[name].row_bytes
            moved_bytes = (moved.up + moved.down) * num_bytes
            places = table.cache.num_places
            reports[name] = CacheReport(places, moved.hits, moved.up, moved.down, moved_bytes, 1000 * moved.waited_s)
        return reports

    def foresee(self, name: str, rows: Int64) -> None:
        """Announce the next use of a cached table that is not announced yet: one application of its optimizer.

        rows : their numbers here, distinct, int64 (n,)
        A use may come that was not announced: the bits do not depend on it, only which rows stay on the devices.
        """
        self.cached[name].cache.foresee(rows)

    def forget_foreseen(self) -> None:
        """Withdraw all announcements that are not used yet."""
        for table in self.cached.values():
            table.cache.forget()

    def warm(self) -> int:
        """Compile the programs of steps, lookups and checkpoints ahead of time; return their number."""
        return sum(group.warm() for group in self._groups)

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
