"""The programs of a cached table, compiled for TPUs by libtpu: read evicted rows, write fetched rows, and the update.

In addition to the matrix (matrix.py), at the size of a cache: places on 3 or 4 chips of a topology, numbered in turns
as ``places_layout`` has them. Writes and updates must alias the whole cache, no program may copy it, and temporary
memory is bounded by the rows that move.

    PYTHONPATH=build/tree build/tpu/bin/python -m penstock.bench.tpu.cached_steps [v5e]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from penstock.bench.tpu.matrix import Compiler, check, prepare, print_rows
from penstock.bench.tpu.step_cases import TOPOLOGIES, Case

# Dim, optimizer, variant and 16-bit weights of the tables, and chips.
TABLES = (
    (32, "Adagrad", "pallas", False, 4),
    (128, "Adam", "pallas", False, 4),
    (64, "FTRL", "xla", False, 4),
    (128, "Adagrad", "xla", True, 4),
    (32, "RowWiseAdagrad", "xla", False, 4),
    (12, "SGD", "pallas", False, 3),
    (20, "Adam", "pallas", False, 3),
    (24, "SGD", "pallas", False, 3),
    (40, "Adam", "pallas", False, 3),
)
PLACES, ROWS = 1_000_003, 4096  # on all chips; of a step, on each


def checked(compiler: Compiler, generation: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (a line of the table, the faults) of each program."""
    from penstock.rows.bridge.backends import formatted, places_layout
    from penstock.rows.bridge.program_cache import Programs
    from penstock.rows.bridge.stacking import Stack

    for dim, optimizer, variant, bfloat16, chips in TABLES:
        case = Case(generation, optimizer, dim, variant, bfloat16, lines=ROWS, chips=chips)
        whole, rule, mesh = compiler.table_of(case)
        layout = formatted(places_layout(whole, PLACES, mesh), variant)
        programs = Programs(mesh, Stack.of([layout], rule, moving=True), rule, variant)
        for operation in ("read", "write", "apply"):
            began = time.perf_counter()
            program: Any = programs.at(operation, ROWS, layout.line if operation == "read" else None)
            seconds = time.perf_counter() - began
            by_xla = Case(generation, optimizer, dim, "xla", bfloat16, operation, ROWS)  # spreads rows to lines
            failed = check(by_xla, layout, program)
            temporary = f"{program.memory_analysis().temp_size_in_bytes / 1e6:.2f} MB"
            yield (
                f"| {generation} | {case.title}, dim {dim} | {variant} | {operation} | {temporary} | {seconds:.1f} s |",
                failed,
            )


def main() -> int:
    prepare()
    compiler, topologies = Compiler(), sys.argv[1:] or list(TOPOLOGIES)
    print(f"{PLACES:,} places on 3 or 4 chips; {ROWS:,} rows on each\n")
    print("| topology | table | variant | program | temporary | compiled in |")
    print("|---|---|---|---|---|---|")
    return print_rows(row for generation in topologies for row in checked(compiler, generation))


if __name__ == "__main__":
    sys.exit(main())
