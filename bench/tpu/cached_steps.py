"""The programs of a cached table, compiled by TPU's real compiler: rows come down, others go up, and the update.

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

from penstock.bench.tpu.matrix import Compiler, check, prepare
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
    from penstock.bridge.backends import formatted, places_layout
    from penstock.bridge.program_cache import Programs
    from penstock.bridge.stacking import Stack

    for dim, optimizer, variant, bfloat16, chips in TABLES:
        case = Case(generation, optimizer, dim, variant, bfloat16, lines=ROWS, chips=chips)
        whole, rule, mesh = compiler.made(case)
        layout = formatted(places_layout(whole, PLACES, mesh), variant)
        programs = Programs(mesh, Stack.of([layout], rule, moving=True), rule, variant)
        for what in ("read", "write", "apply"):
            began = time.perf_counter()
            program: Any = programs.at(what, ROWS, layout.line if what == "read" else None)
            seconds = time.perf_counter() - began
            by_xla = Case(generation, optimizer, dim, "xla", bfloat16, what, ROWS)  # spreads rows to lines
            failed, on_chip = check(by_xla, layout, program)
            temporary = f"{program.memory_analysis().temp_size_in_bytes / 1e6:.2f} MB | {on_chip / 1e6:.2f} MB"
            yield (
                f"| {generation} | {case.what}, dim {dim} | {variant} | {what} | {temporary} | {seconds:.1f} s |",
                failed,
            )


def main() -> int:
    prepare()
    compiler, number, bad, topologies = Compiler(), 0, 0, sys.argv[1:] or list(TOPOLOGIES)
    print(f"{PLACES:,} places on 3 or 4 chips; {ROWS:,} rows on each\n")
    print("| topology | table | variant | program | temporary | to VMEM | compiled in |")
    print("|---|---|---|---|---|---|---|")
    for generation in topologies:
        for line, failed in checked(compiler, generation):
            print(line, *failed, flush=True)
            number, bad = number + 1, bad + bool(failed)
    print(f"{number} compiled, {bad} not as they must be", file=sys.stderr)
    return 1 if bad or not number else 0


if __name__ == "__main__":
    sys.exit(main())
