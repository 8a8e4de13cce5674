"""Compile the SparseCore kernel's steps for every generation that has SparseCores, by TPU's real compiler.

The same checks as in bench/tpu/matrix.py, whose cases and bounds it takes: a step must compile, alias its whole table,
copy none, need at most 1 MB of further memory, and move at most 1.25 times the floor. It says nothing about time.

    PYTHONPATH=build/tree build/tpu/bin/python bench/experiments/sparsecore/compile_steps.py [--small]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from penstock.bench.tpu import matrix
from penstock.bench.tpu.moved_bytes import dma_bytes
from penstock.bench.tpu.step_cases import DIMS, LINES, MAIN, Case, Result, optimizers

GENERATIONS = ("v5p", "v6e", "tpu7x")


def cases(small: bool) -> Iterator[Case]:
    """Yield the matrix's cases for the kernel. small : one for each generation"""
    main, dims = (("Adam",), (128,)) if small else (MAIN, DIMS)
    for generation in GENERATIONS:
        for optimizer in main:
            yield from (Case(generation, optimizer, dim, "sparsecore") for dim in dims)
    if not small:
        others = sorted(set(optimizers()) - {*MAIN, "RowWiseAdagrad"})
        yield from (Case("v6e", optimizer, 128, "sparsecore") for optimizer in others)


def compiled(compiler: matrix.Compiler, case: Case) -> Result:
    from jax import set_mesh

    from penstock.bench.experiments.sparsecore import kernel
    from penstock.bridge.program_cache import shapes

    layout, rule, mesh = compiler.made(case)
    line, num_lines = layout.line, layout.num_devices * layout.lines_per_device
    began = time.perf_counter()
    with set_mesh(mesh):
        traced: Any = kernel.apply(mesh, rule, line).trace(*shapes("apply", mesh, line, num_lines, LINES))
        program = traced.lower().compile()
    seconds = time.perf_counter() - began
    moved, floor = dma_bytes(traced.jaxpr, kernel.block_of(line)), matrix.floor_of(line)
    failed = (*matrix.check(case, layout, program).faults, *matrix.too_many_bytes(case, moved, floor))
    temporary = program.memory_analysis().temp_size_in_bytes
    return Result(case, temporary, moved, floor, matrix.floor_of_row(line), seconds, failed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="one case for each generation")
    args = parser.parse_args()
    # The host has no TPU: libtpu must not look for one.
    os.environ.update(JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_SKIP_MDS_QUERY="1")
    compiler, results = matrix.Compiler(), []
    for case in cases(args.small):
        results.append(compiled(compiler, case))
        print(matrix.row_of(results[-1], {}), flush=True)
    return 1 if any(result.failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
