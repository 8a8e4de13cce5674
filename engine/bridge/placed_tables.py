"""The creation of an engine's tables where the configuration places them.

On the devices; in the host's memory; or there, with places on the devices for some of their rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from penstock.bridge.backend_tables import BackendTables
from penstock.bridge.backends import create_tables, lanes, possible
from penstock.bridge.cached_tables import CachedTables
from penstock.bridge.device_tables import check_memory
from penstock.bridge.dispatcher import Dispatcher
from penstock.bridge.processes.agreement import Processes
from penstock.bridge.programs import AXIS
from penstock.bridge.row_cache import RowCache
from penstock.bridge.sharding import Layout, TableDefinition
from penstock.config.specs import TableSpec
from penstock.errors import ConfigError

Specs = Mapping[str, TableSpec]


class Meshes(NamedTuple):
    """The devices of an engine, and the host itself; the devices again if no table is in its memory."""

    devices: Mesh
    host: Mesh

    def of_table(self, spec: TableSpec) -> Mesh:
        """Return the devices that have all rows of a table."""
        return self.devices if spec.placement.where == "device" else self.host


def meshes_for(specs: Specs, devices: Mesh) -> Meshes:
    """Return the meshes of tables. Raises ConfigError if one is on the host and jax may not use its CPU."""
    if all(spec.placement.where == "device" for spec in specs.values()):
        return Meshes(devices, devices)
    try:
        return Meshes(devices, Mesh(np.asarray(jax.local_devices(backend="cpu")[:1]), (AXIS,)))
    except RuntimeError as error:
        raise ConfigError(
            "the placements HOST and CACHED need jax's platform cpu, and JAX_PLATFORMS is "
            f"'{os.environ.get('JAX_PLATFORMS')}'; add ',cpu' to it, or unset it"
        ) from error


def layouts_of(specs: Specs, meshes: Meshes, mod: bool, among: Callable[[str], tuple[int, int]]) -> dict[str, Layout]:
    """Return the layout of every table. mod, among : as ``Layout`` has them

    Raises MemoryError if not even the rows fit, before the errors of a layout.
    """
    check_memory([(meshes.of_table(spec), spec.weights_bytes + spec.slots_bytes) for spec in specs.values()])
    device_lanes = lanes(meshes.devices)
    return {
        name: Layout(
            name,
            spec.vocabulary_size,
            spec.dim,
            len(spec.slots),
            meshes.of_table(spec).size,
            mod,
            device_lanes if spec.placement.where == "device" else 1,
            bfloat16=spec.storage_dtype == "bfloat16",
            among=among(name),
            row_slots=spec.rule.row_slots,
        )
        for name, spec in specs.items()
    }


def check_placed(specs: Specs, layouts: Mapping[str, Layout], meshes: Meshes, directories: int) -> None:
    """Raise MemoryError if tables, caches and directories do not fit. directories : bytes of those of dynamic tables"""
    needed = [(meshes.devices, directories)]
    for name, spec in specs.items():
        needed.append((meshes.of_table(spec), layouts[name].nbytes))
        if spec.placement.where == "cached":
            needed.append((meshes.devices, places_layout(layouts[name], spec.places, meshes.devices).nbytes))
            needed.append((meshes.host, spec.cache_bytes))
    check_memory(needed)


def create_placed(
    specs: Specs,
    layouts: Mapping[str, Layout],
    meshes: Meshes,
    threads: int,
    preferred: Mapping[str, str],
    processes: Processes | None,
) -> tuple[list[BackendTables], dict[str, CachedTables]]:
    """Create tables, with weights of 0. Returns all, of which some are stacks, and the cached ones by name.

    threads, preferred, processes : as for ``create_tables``
    """
    on_devices: list[TableDefinition] = []
    on_host: list[TableDefinition] = []
    cached: dict[str, CachedTables] = {}
    dispatcher = Dispatcher(threads)  # of all caches
    for name, spec in specs.items():
        starts = tuple(start for _, start in spec.slots)
        definition = TableDefinition(layouts[name], spec.rule, starts, (spec.tag, spec.learning_rate))
        if spec.placement.where == "cached":
            cache = RowCache(spec.vocabulary_size, spec.places, is_tolerant=spec.dynamic is not None)
            (of_host,) = create_on_host(meshes.host, [definition], threads)
            places = definition._replace(layout=places_layout(layouts[name], spec.places, meshes.devices))
            (of_device,) = create_tables(
                meshes.devices, [places], threads, preferred=preferred, dispatcher=dispatcher, moving=True
            )
            cached[name] = CachedTables(of_host, of_device, cache)
        else:
            (on_devices if spec.placement.where == "device" else on_host).append(definition)
    # The devices first: they update their tables while the host updates its own.
    created = create_tables(meshes.devices, on_devices, threads, preferred=preferred, processes=processes)
    return [*created, *cached.values(), *create_on_host(meshes.host, on_host, threads)], cached


def create_on_host(mesh: Mesh, definitions: Sequence[TableDefinition], threads: int) -> list[BackendTables]:
    """Create tables in the host's memory, by the variant that suits each: an override is for devices."""
    by_variant: dict[str, list[TableDefinition]] = {"ffi": [], "xla": []}
    for definition in definitions:
        variant = next(name for name in by_variant if possible(name, mesh, definition.layout, definition.rule))
        by_variant[variant].append(definition)
    return [table for variant, group in by_variant.items() for table in create_tables(mesh, group, threads, variant)]


def places_layout(layout: Layout, places: int, mesh: Mesh) -> Layout:
    """Return the layout of the places on the devices for a table on the host.

    With MOD sharding each 1024 successive places use all devices evenly; the first rows take the first places.
    """
    return replace(
        layout, vocabulary_size=places, num_devices=mesh.size, mod=True, lanes=lanes(mesh), among=(0, 1), halved=False
    )
