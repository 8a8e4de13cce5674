"""The backends of tables: which variant updates a table's rows, in which line format, and the creation of tables.

The environment decides, else the caller, else the platform. A TPU's tables use our kernel once it has passed a canary
on this machine (pallas/canary.py), and XLA's programs until then.

| variant | where | implementation |
|---|---|---|
| host | CPU of one process, one row per line | penstock's memory and kernels, pyx/update.pyx (host_tables.py) |
| xla | everywhere; the oracle | XLA's gather and scatter (xla_tables.py, programs.py) |
| pallas | TPU; elsewhere interpreted, for tests | the same with a kernel for the TensorCore (pallas/tensorcore.py) |
| sparsecore | TPU with SparseCores, on request; else as pallas | with a kernel for them (pallas/sparsecore.py) |
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType

from penstock.base.errors import CapacityError, ConfigError, short
from penstock.base.integrations import KERNELS, PROCESSES
from penstock.base.threads import ThreadTeam
from penstock.model.config.specs import TableSpec
from penstock.model.updates import UpdateRule
from penstock.rows.bridge import host_tables
from penstock.rows.bridge.backend_tables import BackendTables, quoted
from penstock.rows.bridge.cached_tables import CachedTables
from penstock.rows.bridge.devices import HOST, AnyMesh, check_memory, platform
from penstock.rows.bridge.host_tables import Allocate, HostTables
from penstock.rows.bridge.mesh_selection import ProcessGroup, on_jax
from penstock.rows.bridge.row_cache import RowCache
from penstock.rows.bridge.row_format import WITHOUT_KERNEL
from penstock.rows.bridge.sharding import Layout, TableDefinition
from penstock.rows.bridge.stacking import form, stacked
from penstock.rows.bridge.variants import VARIANTS, kernel

Specs = Mapping[str, TableSpec]
FORMS = {"plain": 1, "tiled": 128}
# Environment variables that override variant, layout and sums, or disable stacks, for tests, benchmarks and debugging.
VARIANT, FORM, STACKS, SUMS = "PENSTOCK_VARIANT", "PENSTOCK_LAYOUT", "PENSTOCK_STACKS", "PENSTOCK_SUMS"


def create_tables(
    mesh: AnyMesh,
    definitions: Sequence[TableDefinition],
    team: ThreadTeam,
    variant: str | None = None,
    preferred: Mapping[str, str] = MappingProxyType({}),
    processes: ProcessGroup | None = None,
    moving: bool = False,
    allocate: Allocate | None = None,
) -> list[BackendTables]:
    """Create tables on the devices of a mesh, with weights of 0; those that share arrays are one object.

    mesh : one axis, ``devices.AXIS``
    team : the threads that lay out rows, or update those in the host's memory
    variant : for tests and benchmarks; None: chosen for each table by ``choose``
    preferred : table → the variant that the caller prefers
    processes : that the mesh spans; None: only this one
    moving : whether steps also write and read rows; then no tables share arrays
    allocate : the memory of rows in the host's; None: anonymous
    """
    on_cpu: list[TableDefinition] = []
    others: list[TableDefinition] = []
    variants: list[str] = []  # of the others
    problems: dict[str, str] = {}
    for definition in definitions:
        layout, rule, *_ = definition
        chosen = choose(mesh, layout, rule, preferred.get(layout.name), processes) if variant is None else (variant, "")
        table_variant, problems[layout.name] = chosen
        if table_variant == "host":
            on_cpu.append(definition)
        else:
            variants.append(table_variant)
            others.append(definition._replace(layout=formatted(layout, table_variant)))
    if processes is not None:  # one program runs on the devices of all
        processes.agree(f"Engine(…), tables by {[*variants, *('host' for _ in on_cpu)]}")
    stacks = _requested(STACKS, ("on", "off")) != "off" and not moving
    groups = [on_cpu] if stacks else [[definition] for definition in on_cpu]
    created: list[BackendTables] = []
    for group in filter(None, groups):
        with _allocating(group):
            created.append(HostTables(mesh, group, team, allocate=allocate))
    if not others:
        return created
    mesh = on_jax(mesh)
    from penstock.rows.bridge.dispatcher import Dispatcher
    from penstock.rows.bridge.xla_tables import XlaTables

    others = [table._replace(layout=replace(table.layout, num_devices=mesh.size)) for table in others]
    dispatcher = Dispatcher(team)  # shared by all tables, as are its arenas
    for members in stacked(others) if stacks else [[member] for member in range(len(others))]:
        group = [others[member] for member in members]
        # The tables of a stack have one variant, and had one canary.
        table_variant, problem = variants[members[0]], problems[group[0].layout.name]
        with _allocating(group):
            if processes is None:
                created.append(XlaTables(mesh, group, table_variant, dispatcher, problem, moving=moving))
            else:
                of_processes = import_module(PROCESSES["tables"]).ProcessTables
                created.append(of_processes(mesh, group, table_variant, dispatcher, processes, problem))
    return created


@contextmanager
def _allocating(definitions: Sequence[TableDefinition]) -> Iterator[None]:
    """Name the tables, the largest first, in an error that there is no memory for them. Raises CapacityError."""
    try:
        yield
    except (RuntimeError, OSError) as error:  # a JaxRuntimeError is a RuntimeError
        if "RESOURCE_EXHAUSTED" not in str(error) and getattr(error, "errno", None) != errno.ENOMEM:
            raise
        reason = error.strerror if isinstance(error, OSError) else short(str(error).partition("\n")[0])
        layouts = sorted((definition.layout for definition in definitions), key=lambda layout: -layout.vocabulary_size)
        raise CapacityError(
            f"out of memory: no room for {quoted([layout.name for layout in layouts])} with slots "
            f"({reason}); give more memory or devices, or replay in passes (penstock passes)"
        ) from None


def lanes(mesh: AnyMesh) -> int:
    """Return the unit of the width of a table's lines on these devices. Raises ConfigError for a bad override."""
    requested = _requested(FORM, tuple(FORMS))
    if requested is not None:
        return FORMS[requested]
    on_tpu = platform(mesh) == "tpu" or requested_variant() in KERNELS
    return FORMS["tiled"] if on_tpu else FORMS["plain"]


def sums_by_gathers(mesh: AnyMesh) -> bool:
    """Return whether a user's own step sums by gathers on these devices. Raises ConfigError for a bad override."""
    requested = _requested(SUMS, ("gathers", "scatters"))
    return platform(mesh) == "gpu" if requested is None else requested == "gathers"


def requested_variant() -> str | None:
    """Return the variant that the environment requests; None: it leaves the choice to others. Raises ConfigError."""
    requested = _requested(VARIANT, VARIANTS)
    return None if requested in (None, "auto") else requested


def choose(
    mesh: AnyMesh, layout: Layout, rule: UpdateRule, preferred: str | None = None, processes: ProcessGroup | None = None
) -> tuple[str, str]:
    """Return the variant for a table, and why its kernel failed its canary ("": it did not, or there was none).

    The variant that the environment requests needs no canary. Without it: the preferred one, or what suits the
    platform; of these, the first that is possible. Each process runs the canary on one of its devices, and the kernel
    must pass in all of them.
    """
    requested = requested_variant()
    if requested is not None and possible(requested, mesh, layout, rule, processes):
        return requested, ""
    usual = ("pallas", "xla") if platform(mesh) == "tpu" else ("host", "xla")
    order = usual if preferred is None else (preferred, *usual)
    variant = next(variant for variant in order if possible(variant, mesh, layout, rule, processes))
    if variant not in KERNELS:
        return variant, ""
    from penstock.rows.bridge import canary

    problem = canary.failure(on_jax(mesh), rule, form(formatted(layout, variant), rule), variant)
    if processes is not None:
        failed = processes.agree(f"the canary of table '{layout.name}'", [bool(problem)])[:, 0]
        problem = problem or (f"in process {failed.argmax()}" if failed.any() else "")
    return ("xla" if problem else variant), problem


def formatted(layout: Layout, variant: str) -> Layout:
    """Return the layout in the format that suits the variant."""
    halved = variant == "xla" and layout.lanes == FORMS["tiled"]
    return replace(layout, halved=halved, by_row=variant == "sparsecore")


def possible(
    variant: str, mesh: AnyMesh, layout: Layout, rule: UpdateRule, processes: ProcessGroup | None = None
) -> bool:
    """Return whether a variant can update tables of that layout by that rule on these devices."""
    if variant == "host":
        return not host_tables.obstacle(mesh, layout, rule)
    if variant in KERNELS:
        # Rounding to bfloat16 and sums over a row of a line need divisions and shuffles that a vector unit lacks.
        tiled = layout.lanes == FORMS["tiled"] and not layout.bfloat16
        if not tiled or rule.algorithm in WITHOUT_KERNEL[variant] or platform(mesh) not in ("tpu", "cpu"):
            return False
        if variant == "sparsecore" and processes is not None:  # hosts exchange sums of lines
            return False
        fits: bool = kernel(variant).fits(formatted(layout, variant).line, mesh.devices.flat[0].device_kind)
        return fits
    return True


def _requested(variable: str, choices: tuple[str, ...]) -> str | None:
    requested = os.environ.get(variable) or None
    if requested is not None and requested not in choices:
        raise ConfigError(f"{variable}: expected one of {', '.join(choices)}, got '{requested}'")
    return requested


# ---- where the configuration places tables


def mesh_of(spec: TableSpec, devices: AnyMesh) -> AnyMesh:
    """Return the devices that have all rows of a table. devices : of the engine"""
    return devices if spec.placement.where == "device" else HOST


def reasons_for_xla(
    specs: Specs, layouts: Mapping[str, Layout], devices: AnyMesh, variants: Mapping[str, str]
) -> list[str]:
    """Return why XLA updates tables that lie in the memory of hosts, a sentence for each reason. variants : by table"""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, spec in specs.items():
        if variants[name] == "xla" and platform(mesh := mesh_of(spec, devices)) == "cpu":
            by_reason[host_tables.obstacle(mesh, layouts[name], spec.rule)].append(name)
    return [f"{quoted(names)}: XLA updates the rows, since {reason}" for reason, names in by_reason.items() if reason]


def layouts_of(specs: Specs, devices: AnyMesh, mod: bool, among: Callable[[str], tuple[int, int]]) -> dict[str, Layout]:
    """Return the layout of every table. mod, among : as ``Layout`` has them

    Raises MemoryError if not even the rows fit, before the errors of a layout.
    """
    check_memory([(mesh_of(spec, devices), spec.weights_bytes + spec.slots_bytes) for spec in specs.values()])
    device_lanes = lanes(devices)
    return {
        name: Layout(
            name,
            spec.vocabulary_size,
            spec.dim,
            len(spec.slots),
            mesh_of(spec, devices).size,
            mod,
            device_lanes if spec.placement.where == "device" else 1,
            bfloat16=spec.storage_dtype == "bfloat16",
            among=among(name),
            row_slots=spec.rule.row_slots,
            drawn_as=spec.drawn_as,
        )
        for name, spec in specs.items()
    }


def check_placed(specs: Specs, layouts: Mapping[str, Layout], devices: AnyMesh, directories: int) -> None:
    """Raise MemoryError if tables, caches and directories do not fit. directories : bytes of those of dynamic tables"""
    needed = [(devices, directories)]
    for name, spec in specs.items():
        needed.append((mesh_of(spec, devices), layouts[name].nbytes))
        if spec.placement.where == "cached":
            needed.append((devices, places_layout(layouts[name], spec.places, devices).nbytes))
            needed.append((HOST, spec.cache_bytes))
    check_memory(needed)


def create_placed(
    specs: Specs,
    layouts: Mapping[str, Layout],
    devices: AnyMesh,
    team: ThreadTeam,
    preferred: Mapping[str, str],
    processes: ProcessGroup | None,
    allocate: Allocate | None = None,
) -> tuple[list[BackendTables], dict[str, CachedTables]]:
    """Create tables, with weights of 0. Returns all, of which some are stacks, and the cached ones by name.

    team, preferred, processes, allocate : as for ``create_tables``
    """
    on_devices: list[TableDefinition] = []
    on_host: list[TableDefinition] = []
    places: list[TableDefinition] = []
    for name, spec in specs.items():
        starts = tuple(start for _, start in spec.slots)
        definition = TableDefinition(layouts[name], spec.rule, starts, (spec.tag, spec.learning_rate))
        if spec.placement.where == "cached":
            places.append(definition._replace(layout=places_layout(layouts[name], spec.places, devices)))
        else:
            (on_devices if spec.placement.where == "device" else on_host).append(definition)
    cached: dict[str, CachedTables] = {}
    for of_device in create_tables(devices, places, team, preferred=preferred, moving=True):
        name = of_device.layouts[0].name
        spec = specs[name]
        definition = TableDefinition(layouts[name], spec.rule, tuple(start for _, start in spec.slots))
        (of_host,) = create_on_host([definition], team)
        cache = RowCache(spec.vocabulary_size, spec.places, is_tolerant=spec.dynamic is not None)
        cached[name] = CachedTables(of_host, of_device, cache)
    # The devices first: they update their tables while the host updates its own.
    created = create_tables(devices, on_devices, team, preferred=preferred, processes=processes, allocate=allocate)
    return [*created, *cached.values(), *create_on_host(on_host, team, allocate)], cached


def create_on_host(
    definitions: Sequence[TableDefinition], team: ThreadTeam, allocate: Allocate | None = None
) -> list[BackendTables]:
    """Create tables in the host's memory, by the variant that suits each: an override is for devices."""
    by_variant: dict[str, list[TableDefinition]] = {"host": [], "xla": []}
    for definition in definitions:
        variant = next(name for name in by_variant if possible(name, HOST, definition.layout, definition.rule))
        by_variant[variant].append(definition)
    created = (create_tables(HOST, group, team, variant, allocate=allocate) for variant, group in by_variant.items())
    return [table for group in created for table in group]


def places_layout(layout: Layout, places: int, mesh: AnyMesh) -> Layout:
    """Return the layout of the places on the devices for a table on the host.

    With MOD sharding each 1024 successive places use all devices evenly; the first rows take the first places.
    """
    return replace(
        layout, vocabulary_size=places, num_devices=mesh.size, mod=True, lanes=lanes(mesh), among=(0, 1), halved=False
    )
