"""The step of tables over several hosts, compiled for TPUs by libtpu: an exchange of rows, then the usual step.

In addition to the matrix (matrix.py): on topologies of four hosts, the program that sends the rows of all hosts to
their owners and adds them, the step on the received rows, and the program that looks up rows of other hosts. The step
must alias its whole table, the lookup must not copy it, and the memory of the exchange is bounded by the rows it moves.

    PYTHONPATH=build/tree build/tpu/bin/python -m penstock.bench.tpu.exchanged_step ["v5p, 4 hosts"]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from penstock.bench.tpu import in_place
from penstock.bench.tpu.matrix import Compiler, check, prepare, print_rows
from penstock.bench.tpu.step_cases import OF_FOUR_HOSTS, ROWS, Case

# Dim and optimizer of the tables; whether the sums are divided by numbers of frames; 16-bit weights.
TABLES = ((32, "Adagrad", True, False), (128, "Adam", False, False), (128, "Adagrad", True, True))
# Lines that a device sends to each of the others.
BLOCK = 256
# Blocks as they are sent, as they arrive, and sorted; numbers of frames; and the lines' sums before and after.
MOST_TEMPORARY = 6


def checked(compiler: Compiler, generation: str) -> Iterator[tuple[str, list[str]]]:
    """Yield (a line of the table, the faults) of each program."""
    from penstock.contrib.meshes.row_exchange import exchange, fetch
    from penstock.rows.bridge.program_cache import Programs
    from penstock.rows.bridge.stacking import Stack, multiple_of

    for dim, optimizer, mean, bfloat16 in TABLES:
        variant = "xla" if bfloat16 else "pallas"
        case = Case(generation, optimizer, dim, variant, bfloat16)
        layout, rule, mesh = compiler.table_of(case)
        stack, line = Stack.of([layout], rule, compact=False), layout.line  # an exchange adds lines
        owners = [device.process_index for device in mesh.devices.flat]
        by_rank = tuple(
            tuple(number for number, owner in enumerate(owners) if owner == rank) for rank in sorted(set(owners))
        )
        num_lines, size = layout.num_devices * layout.lines_per_device, mesh.size * BLOCK
        sent = size * 4 * (line.halves * line.width + 1)
        grain, pads = dim if mean else 0, (layout.lines_per_device, multiple_of(line))
        programs: dict[str, Callable[[], Any]] = {
            "exchange": partial(exchange, mesh, line, by_rank, *pads, grain, BLOCK),
            "step": partial(Programs(mesh, stack, rule, variant).at, "apply", size),
            "lookup": partial(fetch, mesh, line, num_lines, BLOCK),
        }
        for name, build in programs.items():
            began = time.perf_counter()
            program = build()
            seconds = time.perf_counter() - began
            if name == "step":
                failed = check(case, layout, program)
            else:
                failed = in_place.check(layout, program, MOST_TEMPORARY * sent, sent, is_read=True)
            sizes = program.memory_analysis().temp_size_in_bytes, sent
            cells = [generation, f"{case.title}, dim {dim}", name, *(f"{size / 1e6:.2f} MB" for size in sizes)]
            yield f"| {' | '.join(cells)} | {seconds:.1f} s |", failed


def main() -> int:
    prepare()
    compiler, topologies = Compiler(), sys.argv[1:] or list(OF_FOUR_HOSTS)
    print(f"tables of {ROWS:,} rows; {BLOCK} lines from each device to each other one\n")
    print("| topology | table | program | temporary | moved by a device | compiled in |")
    print("|---|---|---|---|---|---|")
    return print_rows(row for generation in topologies for row in checked(compiler, generation))


if __name__ == "__main__":
    sys.exit(main())
