"""One step over tables that share arrays, compiled by libtpu for every generation of TPU.

In addition to the matrix (matrix.py), whose tables are separate: four tables of dims 8, 32, 64 and 128 with one
optimizer share one stack of lines, and a step over all of them is one program. It must compile, alias the whole stack,
copy no part of it, and need no more temporary memory than the step of one table may; so must a write of rows. The
programs that read rows of each table must not copy the stack either.

    PYTHONPATH=build/tree build/tpu/bin/python -m penstock.bench.tpu.stacked_step [GENERATION…]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from penstock.bench.tpu.matrix import Compiler, check, prepare, print_rows
from penstock.bench.tpu.step_cases import LINES, ROWS, TOPOLOGIES, Case

DIMS = (8, 32, 64, 128)
OPTIMIZERS = ("SGD", "Adagrad", "Adam")


def stack_of(compiler: Compiler, generation: str, optimizer: str, variant: str) -> tuple[Any, Any, Any]:
    """Return the stack of tables with half as many rows as the matrix's, their rule and their mesh."""
    from penstock.rows.bridge.sharding import TableDefinition
    from penstock.rows.bridge.stacking import Stack, stacked

    prepared = [compiler.table_of(Case(generation, optimizer, dim, variant)) for dim in DIMS]
    layouts = [replace(layout, vocabulary_size=ROWS // 2) for layout, _, _ in prepared]
    _, rule, mesh = prepared[0]
    (members,) = stacked([TableDefinition(layout, rule, ()) for layout in layouts])  # all of them
    return Stack.of([layouts[member] for member in members], rule), rule, mesh


def checked(compiler: Compiler, generation: str, optimizer: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (a line of the table, the faults) of each program."""
    from penstock.rows.bridge.program_cache import Programs

    for variant in ("pallas", "xla"):
        stack, rule, mesh = stack_of(compiler, generation, optimizer, variant)
        for operation in ("apply", "write"):
            began = time.perf_counter()
            program: Any = Programs(mesh, stack, rule, variant).at(operation, LINES)
            seconds = time.perf_counter() - began
            case = Case(generation, optimizer, DIMS[-1], variant, program=operation)
            failed = check(case, stack, program)
            memory = program.memory_analysis()
            aliased = f"{memory.alias_size_in_bytes:,} of {sum(table.nbytes for table in stack.tables) // mesh.size:,}"
            temporary = f"{memory.temp_size_in_bytes / 1e6:.2f} MB"
            yield f"| {generation} | {case.title} | {variant} | {aliased} | {temporary} | {seconds:.1f} s |", failed
        for table in stack.tables:
            program = Programs(mesh, stack, rule, variant).at("read", LINES, table.line)
            failed = check(Case(generation, optimizer, table.dim, variant, program="read"), stack, program)
            if failed:
                yield f"| {generation} | {optimizer} | {variant}, reading dim {table.dim} | | | |", failed


def main(words: Sequence[str] | None = None) -> int:
    prepare()
    generations = list(sys.argv[1:] if words is None else words) or list(TOPOLOGIES)
    compiler = Compiler()
    dims = ", ".join(map(str, DIMS))
    print(f"{len(DIMS)} tables of {ROWS // 2:,} rows, dims {dims}; one dispatch of {LINES:,} lines\n")
    print("| generation | optimizer | variant | aliased, bytes per device | temporary | compiled in |")
    print("|---|---|---|---|---|---|")
    cases = product(generations, OPTIMIZERS)
    return print_rows(row for generation, optimizer in cases for row in checked(compiler, generation, optimizer))


if __name__ == "__main__":
    sys.exit(main())
