"""A cache of compiled programs by size, filled ahead of the first step (``Programs.needed``) or on first use of a size.

It holds the results of `lower().compile()`: a call of a jitted function would not find them in JAX's cache, and would
depend on the caller's mesh and transfer guard.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.extend.backend import get_backend
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.base.integrations import KERNELS
from penstock.model.updates import UpdateRule
from penstock.rows.bridge import programs
from penstock.rows.bridge.compile_counter import num_compiles
from penstock.rows.bridge.devices import AXIS
from penstock.rows.bridge.programs import Program
from penstock.rows.bridge.row_format import Line
from penstock.rows.bridge.sharding import LINES, MAX_BUCKET, MAX_BUCKET_OF_KERNELS, READ_ROWS, buckets
from penstock.rows.bridge.stacking import Stack, multiple_of
from penstock.rows.bridge.variants import kernel

num_compiles()  # from here on

# The programs that compute updates.
BY_RULE = ("apply", "sweep")
# The programs that take rows, compact or in lines.
BY_ROWS = ("apply", "write")


class Programs:
    """The programs of one stack of tables.

    variant : implementation of ``apply`` from now on: "xla" or one of KERNELS; XLA compiles all other programs
    """

    def __init__(self, mesh: Mesh, stack: Stack, rule: UpdateRule, variant: str) -> None:
        self._mesh, self._stack, self._rule, self.variant = mesh, stack, rule, variant
        self._num_lines = stack.num_devices * stack.lines_per_device

    def at(self, name: str, size: int = 0, line: Line | None = None) -> Program:
        """Return the program of the function ``name`` of programs.py, for ``size`` rows or lines per device.

        line : of the table to read; None: the stack's line format for steps
        """
        line = line or self._stack.line
        rule = self._rule if name in BY_RULE else None  # so that stacks of all rules share the others
        variant = self.variant if name == "apply" else "xla"
        compact = self._stack.compact and name in BY_ROWS and variant != "sparsecore"
        return compiled(name, self._mesh, rule, line, variant, self._num_lines, size, compact)

    def largest(self, name: str) -> int:
        """Return the most rows, or lines, per device that one dispatch of "apply" or "write" updates.

        A kernel stages nothing. But XLA spreads the compact rows that ``pallas`` updates, and those of a larger
        dispatch would leave the chip's memory: 202 MB at 131,072 rows of dim 32.
        """
        stages = self.variant not in KERNELS or (self.variant == "pallas" and self._stack.compact)
        return self._stack.largest if name != "apply" or stages else MAX_BUCKET_OF_KERNELS

    def needed(self) -> list[tuple[str, int, Line]]:
        """Return every program that steps, lookups and checkpoints may need, as the arguments of ``at``."""
        stack = self._stack
        needed: list[tuple[str, int, Line]] = []
        each = [table.lines_per_device * (table.line.group if stack.compact else 1) for table in stack.tables]
        for name, most in (("apply", sum(each)), ("write", max(each))):
            growth = stack.growth(name)
            largest = self.largest(name)
            sizes = buckets(min(largest, most), multiple_of(stack.line), growth, largest)
            needed += [(name, size, stack.line) for size in sizes]
        for line in {table.line: None for table in stack.tables}:  # each once, in order
            most = max(table.rows_per_device for table in stack.tables if table.line == line)
            sizes = buckets(min(MAX_BUCKET, most), READ_ROWS, stack.growth("read"))
            needed += [("read", size, line) for size in sizes]
            if self._rule.non_lazy:
                needed += [("no_rows", 0, line), ("sweep", 0, line), *(("mark", size, line) for size in sizes)]
        return needed


@lru_cache(maxsize=4096)
def compiled(
    name: str,
    mesh: Mesh,
    rule: UpdateRule | None,
    line: Line,
    variant: str,
    num_lines: int,
    size: int,
    compact: bool = False,
) -> Program:
    """Return a program, compiled for arrays of ``num_lines`` lines and requests of ``size``.

    rule : of the programs BY_RULE, else None; variant : of ``apply``, else "xla"; compact : of the programs BY_ROWS
    """
    program = jitted(name, mesh, rule, line, variant, num_lines, compact)
    num_rates = 3 if rule is not None and rule.is_corrected else 0
    arguments = shapes(name, mesh, line, num_lines, size, compact, variant == "sparsecore", num_rates)
    return programs.compiled(mesh, program, *arguments, options=options(name, mesh, line, arguments))


def options(name: str, mesh: Mesh, line: Line, arguments: Sequence[Any]) -> dict[str, Any]:
    """Return the compiler options of a program. XLA moves no array in steps of rules whose slots are planes."""
    moves = name in ("read", "write") or (name in BY_RULE and line.row_slots > 0)
    return programs.left_in_hbm(mesh, arguments[0]) if moves else {}


def compiler_of(device: jax.Device) -> str:
    """Return the versions of jax and of the compiler of a device."""
    return f"jax {jax.__version__}, {' '.join(get_backend(device.platform).platform_version.split())}"


def jitted(
    name: str, mesh: Mesh, rule: UpdateRule | None, line: Line, variant: str, num_lines: int, compact: bool = False
) -> Any:
    """Return the jitted program ``name``."""
    if variant in KERNELS:
        return kernel(variant).apply(mesh, rule, line, *([True] if compact else []))
    arguments: dict[str, tuple[Any, ...]] = {"apply": (rule, line, compact), "sweep": (rule, line), "mark": ()}
    arguments["write"] = (line, compact)
    arguments["no_rows"] = (num_lines * line.group,)
    return getattr(programs, name)(mesh, *arguments.get(name, (line,)))


def shapes(
    name: str,
    mesh: Mesh,
    line: Line,
    num_lines: int,
    size: int,
    compact: bool = False,
    by_row: bool = False,
    num_rates: int = 0,
) -> Sequence[Any]:
    """Return the shapes of a program's arguments. by_row : of the variant sparsecore; num_rates : 0: a scalar"""
    by_device, same = NamedSharding(mesh, PartitionSpec(AXIS)), NamedSharding(mesh, PartitionSpec())

    def split(*shape: int, dtype: Any = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=by_device)

    def scalar(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=same)

    table = tuple(split(*shape, dtype=dtype) for shape, dtype in line.arrays(num_lines))
    numbers = split(mesh.size, size)
    words = split(mesh.size, size, line.halves * line.width)
    of_keys: tuple[int, ...] = (size, line.group)
    marks = []
    if compact or by_row:
        words, of_keys = split(mesh.size, size * line.dim // LINES, LINES), (size,)
    if compact:
        marks = [split(mesh.size, size, dtype=np.uint8)]
    rows = (numbers, words, split(mesh.size), *marks)
    keys = [split(mesh.size, *of_keys, dtype=np.uint32)] if line.halves > 1 else []
    step = (scalar(np.float32, *[num_rates] * (num_rates > 0)), scalar(np.int32), scalar(np.uint32))
    touched = split(num_lines * line.group, dtype=np.bool_)
    return {
        "apply": (table, *rows, *keys, *step),
        "write": (table, *rows, *(scalar(dtype, 1 + line.num_slots) for dtype in (np.bool_, np.bool_, np.float32))),
        "read": (table, numbers),
        "no_rows": (),
        "mark": (touched, numbers),
        "sweep": (table, touched, *step),
    }[name]
