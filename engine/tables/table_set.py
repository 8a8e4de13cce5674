"""The tables of one engine, by name: create and update them; ``tables_by_id`` reads and writes them.

Maps the configuration's tables, slots and initializers to the bridge's device tables. Independent of
gradient sources, the gate and the order of frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.config.embedding import EmbeddingConfig
from penstock.config.specs import TableSpec
from penstock.errors import UsageError
from penstock.frames import Array, Coalesced, Float32, Frame, Int64
from penstock.stats import CacheReport
from penstock.tables.dynamic_table import DynamicTable, TableKeys
from penstock.tables.initializers import start_of
from penstock.tables.key_directory import bytes_of_directories
from penstock.tables.shares import Share, checked_share, reduced, shares_of
from penstock.tables.table_programs import TablePrograms, Variant, preferred
from penstock.tables.tables_by_id import TablesById

if TYPE_CHECKING:
    import jax


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
        config: EmbeddingConfig,
        mesh: jax.sharding.Mesh | None,
        seed: int,
        threads: int = 0,
        share: tuple[int, int] | None = None,
        variant: Variant = "auto",
    ) -> None:
        from penstock.bridge.backends import check_placed, create_placed, layouts_of, meshes_for
        from penstock.bridge.device_tables import DeviceTable, make_mesh, processes_of

        self.specs = {spec.name: spec for spec in config.tables}
        mod = config.sharding_strategy == "MOD"
        if share is not None:
            self.is_share, self.shares = True, shares_of(config.tables, mod, seed, *checked_share(share))
        devices = make_mesh(mesh)
        self.devices, self.processes = tuple(devices.devices.flat), processes_of(devices)
        self._check_process()
        held, meshes = self.held, meshes_for(self.specs, devices)
        layouts = layouts_of(held, meshes, mod, self.among)
        check_placed(held, layouts, meshes, self._directory_bytes(share))
        preference = preferred(self.specs, variant)
        self._groups, self.cached = create_placed(held, layouts, meshes, threads, preference, self.processes)
        members = [(group, member) for group in self._groups for member in range(len(group.layouts))]
        created = {group.layouts[member].name: DeviceTable(group, member, mesh or devices) for group, member in members}
        self._tables = {name: created[name] for name in self.specs}
        self.programs = TablePrograms(self._tables)
        self._members = [(group, [self.specs[layout.name] for layout in group.layouts]) for group in self._groups]
        # The empty update of a table that a step does not touch: non-lazy optimizers still move its rows.
        self._of_no_rows = {
            name: (Coalesced.of_no_rows(spec.dim),) for name, spec in self.specs.items() if spec.rule.non_lazy
        }
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

    def _directory_bytes(self, share: tuple[int, int] | None) -> int:
        dynamic = [(spec, 0) for spec in self.specs.values() if spec.dynamic]
        return bytes_of_directories(dynamic, 1 if share is None else share[1])

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
    def held(self) -> Mapping[str, TableSpec]:
        """The specs of the tables with as many rows as are here."""
        rows = {name: share.held_rows for name, share in self.shares.items()}
        return {n: replace(spec, vocabulary_size=rows.get(n, spec.vocabulary_size)) for n, spec in self.specs.items()}

    def start_of(self, spec: TableSpec, seed: int) -> Callable[[int, int], Float32]:
        """Return the initializer of the rows of a table that are here: (first, count) → rows."""
        share = self.shares.get(spec.name)
        return share.drawn(start_of(spec, seed)) if isinstance(share, Share) else start_of(spec, seed)

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
