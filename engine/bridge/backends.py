"""The backends of tables: which variant updates a table's rows, in which line format, and the creation of tables.

The platform decides unless the environment overrides it.

| variant | where | implementation |
|---|---|---|
| ffi | CPU of one process, one row per line | FFI handlers, pyx/xla_handlers.pyx (cpu_ffi.py) |
| xla | everywhere; the oracle | XLA's gather and scatter (xla_tables.py, programs.py) |
| pallas | TPU; elsewhere interpreted, for tests | the same with a kernel for the TensorCore (pallas/tensorcore.py) |
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from jax.sharding import Mesh

from penstock.bridge import cpu_ffi
from penstock.bridge.cpu_ffi import CpuTables
from penstock.bridge.dispatcher import Dispatcher
from penstock.bridge.processes.agreement import Processes
from penstock.bridge.processes.process_tables import ProcessTables
from penstock.bridge.programs import BY_ROW
from penstock.bridge.sharding import Layout, TableDefinition
from penstock.bridge.stacking import stacked
from penstock.bridge.xla_tables import XlaTables
from penstock.errors import ConfigError
from penstock.updates import UpdateRule

VARIANTS = ("ffi", "xla", "pallas")
FORMS = {"plain": 1, "tiled": 128}
# Environment variables that override variant and layout, or disable stacks, for tests, benchmarks and debugging.
VARIANT, FORM, STACKS = "PENSTOCK_VARIANT", "PENSTOCK_LAYOUT", "PENSTOCK_STACKS"


def create_tables(
    mesh: Mesh,
    definitions: Sequence[TableDefinition],
    threads: int = 0,
    variant: str | None = None,
    processes: Processes | None = None,
) -> list[CpuTables | XlaTables]:
    """Create tables on the devices of a mesh, with weights of 0; those that share arrays are one object.

    mesh : one axis, ``programs.AXIS``
    threads : at most this many update one device's rows, on CPUs; 0: all the host has
    variant : for tests and benchmarks; None: chosen for each table by devices and rule
    processes : that the mesh spans; None: only this one
    """
    on_cpu: list[TableDefinition] = []
    others: list[TableDefinition] = []
    variants: list[str] = []  # of the others
    for definition in definitions:
        its_variant = variant or choose(mesh, definition.layout, definition.rule)
        if its_variant == "ffi":
            on_cpu.append(definition)
        else:
            variants.append(its_variant)
            others.append(definition._replace(layout=formatted(definition.layout, its_variant)))
    share = _requested(STACKS, ("on", "off")) != "off"
    groups = [on_cpu] if share else [[definition] for definition in on_cpu]
    created: list[CpuTables | XlaTables] = [CpuTables(mesh, group, threads) for group in groups if group]
    dispatcher = Dispatcher()  # shared by all tables, as are its arenas
    for members in stacked(others) if share else [[member] for member in range(len(others))]:
        group = [others[member] for member in members]
        its_variant = variants[members[0]]  # a stack has one
        if processes is None:
            created.append(XlaTables(mesh, group, its_variant, dispatcher))
        else:
            created.append(ProcessTables(mesh, group, its_variant, processes))
    return created


def lanes(mesh: Mesh) -> int:
    """Return the unit of the width of a table's lines on these devices. Raises ConfigError for a bad override."""
    requested = _requested(FORM, tuple(FORMS))
    if requested is not None:
        return FORMS[requested]
    on_tpu = platform(mesh) == "tpu" or _requested(VARIANT, VARIANTS) == "pallas"
    return FORMS["tiled"] if on_tpu else FORMS["plain"]


def choose(mesh: Mesh, layout: Layout, rule: UpdateRule) -> str:
    """Return the variant for a table: the requested one if possible, else the first that suits the platform."""
    requested = _requested(VARIANT, VARIANTS)
    if requested is not None and possible(requested, mesh, layout, rule):
        return requested
    usual = ("pallas", "xla") if platform(mesh) == "tpu" else ("ffi", "xla")
    return next(variant for variant in usual if possible(variant, mesh, layout, rule))


def formatted(layout: Layout, variant: str) -> Layout:
    """Return the layout in the format that suits the variant."""
    return replace(layout, halved=variant == "xla" and layout.lanes == FORMS["tiled"])


def possible(variant: str, mesh: Mesh, layout: Layout, rule: UpdateRule) -> bool:
    """Return whether a variant can update tables of that layout by that rule on these devices."""
    if variant == "ffi":
        return not layout.line.masked and cpu_ffi.possible(mesh, rule, layout.dim)
    if variant == "pallas":
        # Rounding to bfloat16 and rules on whole rows need divisions and shuffles that a vector unit lacks.
        tiled = layout.lanes == FORMS["tiled"] and not layout.bfloat16 and rule.algorithm not in BY_ROW
        return tiled and platform(mesh) in ("tpu", "cpu")
    return True


def platform(mesh: Mesh) -> str:
    name: str = mesh.devices.flat[0].platform
    return name


def _requested(variable: str, choices: tuple[str, ...]) -> str | None:
    requested = os.environ.get(variable) or None
    if variable == VARIANT and requested == "sparsecore":
        raise ConfigError(
            f"{VARIANT}: 'sparsecore' is an experiment in bench/experiments/sparsecore of the repository until "
            "hardware has run it; use 'pallas', the default on TPUs"
        )
    if requested is not None and requested not in choices:
        raise ConfigError(f"{variable}: expected one of {', '.join(choices)}, got '{requested}'")
    return requested
