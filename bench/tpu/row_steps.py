"""The steps of the variant ``sparsecore``, compiled by libtpu for every generation of TPU that has SparseCores.

A step must alias the whole table, copy none of it, and need at most 1 MB of further memory, and its copies must move at
most 1.1 times what a row needs: weights and slots read and written, and the gradient and the row's number read. They
are counted in the traced kernel, as are those of ``pallas`` for the line that the row is in.

    PYTHONPATH=build/tree build/tpu/bin/python -m penstock.bench.tpu.row_steps [--small] [GENERATION…]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from penstock.bench.tpu import in_place
from penstock.bench.tpu.matrix import Compiler, floor_of, floor_of_row, prepare, print_rows
from penstock.bench.tpu.moved_bytes import dma_bytes_by_turn
from penstock.bench.tpu.step_cases import Case

GENERATIONS = ("v5p", "v6e", "tpu7x")
DIMS = (8, 16, 24, 32, 48, 64, 128)
OPTIMIZERS = ("SGD", "Adagrad", "Adam", "FTRL", "Momentum", "AdagradMomentum", "RowWiseAdagrad")
SMALL = {("v5p", "Adagrad", 8), ("v6e", "FTRL", 32), ("v6e", "RowWiseAdagrad", 64), ("tpu7x", "SGD", 16)}
# Rows of a step and of the table, whose lines per chip would be no multiple of 8; further memory; bytes of a row.
ROWS_OF_STEP, ROWS, MOST_TEMPORARY, MOST_BYTES = 32_768, 8_000_003, 1 << 20, 1.1


def cases(small: bool, generations: list[str]) -> Iterator[Case]:
    """Yield the steps to compile."""
    chips = (1, 3, 4)
    for number, (generation, optimizer, dim) in enumerate(product(generations, OPTIMIZERS, DIMS)):
        if not small or (generation, optimizer, dim) in SMALL:
            yield Case(generation, optimizer, dim, "sparsecore", rows=ROWS, chips=chips[number % 3])


def checked(compiler: Compiler, case: Case) -> tuple[str, list[str]] | None:
    """Return a line of the table and the faults of a step; None where the variant is impossible."""
    import jax

    from penstock.contrib import sparsecore
    from penstock.rows.bridge.program_cache import compiled, jitted, shapes

    layout, rule, mesh = compiler.table_of(case)
    line, num_lines = layout.line, layout.num_devices * layout.lines_per_device
    if not sparsecore.fits(line, mesh.devices.flat[0].device_kind):
        return None
    began = time.perf_counter()
    program: Any = compiled("apply", mesh, rule, line, "sparsecore", num_lines, ROWS_OF_STEP)
    seconds = time.perf_counter() - began
    faults = in_place.check(layout, program, MOST_TEMPORARY, ROWS_OF_STEP * in_place.line_bytes(line))
    arguments = shapes("apply", mesh, line, num_lines, ROWS_OF_STEP, by_row=True)
    with jax.set_mesh(mesh):
        jaxpr = jitted("apply", mesh, rule, line, "sparsecore", num_lines).trace(*arguments).jaxpr
    moved, floor = dma_bytes_by_turn(jaxpr) / sparsecore.block_of(line), floor_of_row(line)
    if moved > MOST_BYTES * floor:
        faults.append(f"moves {moved / floor:.2f} times what a row needs, more than {MOST_BYTES}")
    memory = program.memory_analysis()
    aliased = f"{memory.alias_size_in_bytes / (layout.nbytes // layout.num_devices):.3f}"
    temporary = f"{memory.temp_size_in_bytes / 1e6:.2f} MB"
    title = replace(case, rows=Case.rows).title
    cells = [case.generation, title, case.dim, sparsecore.block_of(line), f"{moved:,.0f}", f"{moved / floor:.2f}"]
    by_line = floor_of(line)
    cells += [f"{by_line:,.0f}", f"{by_line / moved:.1f}", aliased, temporary, f"{seconds:.1f} s"]
    return f"| {' | '.join(map(str, cells))} |", faults


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.bench.tpu.row_steps", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a sample")
    parser.add_argument("generations", nargs="*", default=list(GENERATIONS), metavar="GENERATION")
    args = parser.parse_args()
    prepare()
    compiler = Compiler()
    print(f"{ROWS:,} rows on 1, 3 or 4 chips; {ROWS_OF_STEP:,} rows of a step on each\n")
    columns = "generation,optimizer,dim,rows of a block,bytes per row,× floor,of its line,ratio,aliased,temporary"
    print(f"| {' | '.join(columns.split(','))} | compiled in |\n{'|---' * 11}|")
    rows = (checked(compiler, case) for case in cases(args.small, args.generations))
    return print_rows(row for row in rows if row is not None)


if __name__ == "__main__":
    sys.exit(main())
