"""The backends of tables: which variant updates a table's rows, in which line format, and the creation of tables.

The environment decides, else the caller, else the platform. A TPU's tables use our kernel once it has passed a canary
on this machine (pallas/canary.py), and XLA's programs until then.

| variant | where | implementation |
|---|---|---|
| ffi | CPU of one process, one row per line | FFI handlers, pyx/xla_handlers.pyx (cpu_ffi.py) |
| xla | everywhere; the oracle | XLA's gather and scatter (xla_tables.py, programs.py) |
| pallas | TPU; elsewhere interpreted, for tests | the same with a kernel for the TensorCore (pallas/tensorcore.py) |
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType

import jax
from jax.sharding import Mesh

from penstock.bridge import cpu_ffi
from penstock.bridge.backend_tables import BackendTables
from penstock.bridge.cpu_ffi import CpuTables
from penstock.bridge.dispatcher import Dispatcher
from penstock.bridge.processes.agreement import Processes
from penstock.bridge.processes.process_tables import ProcessTables
from penstock.bridge.programs import BY_ROW
from penstock.bridge.sharding import Layout, TableDefinition
from penstock.bridge.stacking import form, stacked
from penstock.bridge.xla_tables import XlaTables, quoted
from penstock.errors import CapacityError, ConfigError, short
from penstock.updates import UpdateRule

VARIANTS = ("auto", "ffi", "xla", "pallas")
FORMS = {"plain": 1, "tiled": 128}
# Environment variables that override variant and layout, or disable stacks, for tests, benchmarks and debugging.
VARIANT, FORM, STACKS = "PENSTOCK_VARIANT", "PENSTOCK_LAYOUT", "PENSTOCK_STACKS"


def create_tables(
    mesh: Mesh,
    definitions: Sequence[TableDefinition],
    threads: int = 0,
    variant: str | None = None,
    preferred: Mapping[str, str] = MappingProxyType({}),
    processes: Processes | None = None,
    dispatcher: Dispatcher | None = None,
    moving: bool = False,
) -> list[BackendTables]:
    """Create tables on the devices of a mesh, with weights of 0; those that share arrays are one object.

    mesh : one axis, ``programs.AXIS``
    threads : at most this many lay out rows, or on CPUs update those of one device; 0: all the host has
    variant : for tests and benchmarks; None: chosen for each table by ``choose``
    preferred : table → the variant that the caller prefers
    processes : that the mesh spans; None: only this one
    dispatcher : of tables that share arenas with these; moving : whether steps also write and read rows
    """
    on_cpu: list[TableDefinition] = []
    others: list[TableDefinition] = []
    variants: list[str] = []  # of the others
    problems: dict[str, str] = {}
    for definition in definitions:
        layout, rule, *_ = definition
        name = layout.name
        its_variant, problem = variant or "", ""
        if variant is None:
            its_variant, problem = choose(mesh, layout, rule, preferred.get(name), processes)
        if problem:
            problems[name] = problem
        if its_variant == "ffi":
            on_cpu.append(definition)
        else:
            variants.append(its_variant)
            others.append(definition._replace(layout=formatted(definition.layout, its_variant)))
    if processes is not None:  # one program runs on the devices of all
        processes.agree(f"Engine(…), tables by {[*variants, *('ffi' for _ in on_cpu)]}")
    share = _requested(STACKS, ("on", "off")) != "off"
    groups = [on_cpu] if share else [[definition] for definition in on_cpu]
    created: list[BackendTables] = []
    for group in filter(None, groups):
        with _allocating(group):
            created.append(CpuTables(mesh, group, threads))
    dispatcher = dispatcher or Dispatcher(threads)  # shared by all tables, as are its arenas
    for members in stacked(others) if share else [[member] for member in range(len(others))]:
        group = [others[member] for member in members]
        # The tables of a stack have one variant, and had one canary.
        its_variant, problem = variants[members[0]], problems.get(group[0].layout.name, "")
        with _allocating(group):
            if processes is None:
                created.append(XlaTables(mesh, group, its_variant, dispatcher, problem, moving=moving))
            else:
                created.append(ProcessTables(mesh, group, its_variant, processes, problem))
    return created


@contextmanager
def _allocating(definitions: Sequence[TableDefinition]) -> Iterator[None]:
    """Name the tables, the largest first, in an error that there is no memory for them. Raises CapacityError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        layouts = sorted((definition.layout for definition in definitions), key=lambda layout: -layout.vocabulary_size)
        raise CapacityError(
            f"out of memory: no room for {quoted([layout.name for layout in layouts])} with slots "
            f"({short(str(error).partition(chr(10))[0])}); give more memory or devices, or replay with --passes auto"
        ) from None


def lanes(mesh: Mesh) -> int:
    """Return the unit of the width of a table's lines on these devices. Raises ConfigError for a bad override."""
    requested = _requested(FORM, tuple(FORMS))
    if requested is not None:
        return FORMS[requested]
    on_tpu = platform(mesh) == "tpu" or requested_variant() == "pallas"
    return FORMS["tiled"] if on_tpu else FORMS["plain"]


def requested_variant() -> str | None:
    """Return the variant that the environment requests; None: it leaves the choice to others. Raises ConfigError."""
    requested = _requested(VARIANT, VARIANTS)
    return None if requested == "auto" else requested


def choose(
    mesh: Mesh, layout: Layout, rule: UpdateRule, preferred: str | None = None, processes: Processes | None = None
) -> tuple[str, str]:
    """Return the variant for a table, and why its kernel failed its canary ("": it did not, or there was none).

    The variant that the environment requests needs no canary. Without it: the preferred one, or what suits the
    platform; of these, the first that is possible. Each process runs the canary on one of its devices, and the kernel
    must pass in all of them.
    """
    requested = requested_variant()
    if requested is not None and possible(requested, mesh, layout, rule):
        return requested, ""
    usual = ("pallas", "xla") if platform(mesh) == "tpu" else ("ffi", "xla")
    order = usual if preferred is None else (preferred, *usual)
    variant = next(variant for variant in order if possible(variant, mesh, layout, rule))
    if variant != "pallas":
        return variant, ""
    from penstock.bridge.pallas import canary

    problem = canary.failure(mesh, rule, form(formatted(layout, variant), rule))
    if processes is not None:
        failed = processes.agree(f"the canary of table '{layout.name}'", [bool(problem)])[:, 0]
        problem = problem or (f"in process {failed.argmax()}" if failed.any() else "")
    return ("xla" if problem else variant), problem


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
        if not tiled or platform(mesh) not in ("tpu", "cpu"):
            return False
        from penstock.bridge.pallas import tensorcore

        return tensorcore.fits(formatted(layout, variant).line, mesh.devices.flat[0].device_kind)
    return True


def platform(mesh: Mesh) -> str:
    name: str = mesh.devices.flat[0].platform
    return name


def _requested(variable: str, choices: tuple[str, ...]) -> str | None:
    requested = os.environ.get(variable) or None
    if requested is not None and requested not in choices:
        raise ConfigError(f"{variable}: expected one of {', '.join(choices)}, got '{requested}'")
    return requested
