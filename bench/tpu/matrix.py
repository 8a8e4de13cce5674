"""Every step, write and read, compiled by libtpu for every generation of TPU, on a machine without a TPU.

libtpu compiles for a described topology. The compiled program shows whether a table is updated in place, how much
temporary memory it needs, and how many bytes move; it shows nothing about time. ``make tpu-matrix`` runs this, and
writes bench/results/tpu-matrix.md; ``--small`` is the sample that CI compiles.

Bytes moved per line (one physical row, docs/devices.md) are compared with a floor: reading and writing weights and
slots once (slots of one number per row: those of its rows), and reading the gradient and the number of the line, and
of 16-bit weights the keys of its rows. moved_bytes.py counts them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.bench.device_cases import optimizers
from penstock.bench.tpu import in_place
from penstock.bench.tpu.moved_bytes import dma_bytes, hbm_bytes
from penstock.bench.tpu.results_page import bundles_in, read_results, row_of, write
from penstock.bench.tpu.step_cases import LINES, OF_EIGHT, OF_FOUR_HOSTS, TOPOLOGIES, Case, Result, cases

# Bytes moved, as a multiple of the floor. XLA's staging leaves the chip beyond this dim, and beyond ``LINES`` lines,
# and it is never on the chip in programs that leave small tables in HBM.
MOST_BY_KERNEL, MOST_BY_XLA, MOST_DIM_BY_XLA, MOST_IN_HBM = 1.25, 2.5, 256, 13


class Compiler:
    """Compiles cases; topologies and rules are cached."""

    def __init__(self) -> None:
        self._meshes: dict[str, Any] = {}
        self._optimizers = optimizers()

    def mesh(self, generation: str, chips: int = 0) -> Any:
        """Return a mesh over chips of a described topology. chips : 0: all of the usual one"""
        import numpy as np
        from jax.experimental import topologies
        from jax.sharding import Mesh

        name = (TOPOLOGIES | OF_FOUR_HOSTS if chips <= 4 else OF_EIGHT)[generation]
        if name not in self._meshes:
            devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
            self._meshes[name] = Mesh(np.asarray(devices).reshape(-1), ("shard",))
        mesh = self._meshes[name]
        return Mesh(mesh.devices[: chips or mesh.size], mesh.axis_names)

    def table_of(self, case: Case) -> tuple[Any, Any, Any]:
        """Return the layout, the rule and the mesh of a case."""
        from penstock.model.config.embedding import EmbeddingConfig
        from penstock.model.config.tables import TableConfig
        from penstock.rows.bridge.backends import formatted
        from penstock.rows.bridge.sharding import Layout

        optimizer = self._optimizers[case.optimizer]
        config = EmbeddingConfig.from_tables([TableConfig(case.rows, case.dim, name="t", optimizer=optimizer)])
        spec, mesh = config.table("t"), self.mesh(case.generation, case.chips)
        slots, by_row = len(spec.slots), spec.rule.row_slots
        layout = Layout("t", case.rows, case.dim, slots, mesh.size, False, 128, case.bfloat16, row_slots=by_row)
        return formatted(layout, case.variant), spec.rule, mesh

    def compile(self, case: Case) -> Result:
        from jax import set_mesh

        from penstock.rows.bridge.program_cache import BY_RULE, compiled, jitted, options, shapes

        layout, rule, mesh = self.table_of(case)
        line, num_lines = layout.line, layout.num_devices * layout.lines_per_device
        floors = floor_of(line), floor_of_row(line)
        began = time.perf_counter()
        try:
            variant = "xla" if case.by_xla else case.variant
            own_rule = rule if case.program in BY_RULE else None
            program: Any = compiled(case.program, mesh, own_rule, line, variant, num_lines, case.lines, case.compact)
        except Exception as error:  # the compiler may raise anything
            return Result(case, 0, None, *floors, 0.0, (f"does not compile: {str(error).splitlines()[0][:200]}",))
        seconds = time.perf_counter() - began
        moved: float | None
        if case.compact or case.program == "read":
            moved = None  # no floor: how many lines its rows are in is up to them
        elif case.by_xla:
            touched = [shape for shape, _ in line.arrays(case.lines)]
            whole = [shape for shape, _ in in_place.arrays_on_device(layout)]
            moved = hbm_bytes(program.as_text(), dict(zip(whole, touched, strict=True))) / case.lines
        else:
            with set_mesh(mesh):
                traced = jitted("apply", mesh, rule, line, case.variant, num_lines)
                jaxpr = traced.trace(*shapes("apply", mesh, line, num_lines, case.lines)).jaxpr
            moved = dma_bytes(jaxpr) + 4 * line.width + 4  # Pallas loads the words and the number
        faults = check(case, layout, program)
        if moved is not None:
            arguments = shapes(case.program, mesh, line, num_lines, case.lines, case.compact)
            in_hbm = bool(options(case.program, mesh, line, arguments))
            faults += too_many_bytes(case, moved / floors[0], in_hbm)
        temporary = program.memory_analysis().temp_size_in_bytes
        return Result(case, temporary, moved, *floors, seconds, tuple(faults))


def floor_of(line: Any) -> float:
    """Return the least bytes of a line: its strips read and written, its gradient, number and keys read."""
    keys = line.group if line.halves > 1 else 0
    floor: float = 2 * line.nbytes(1) + 4 * (line.halves * line.width + 1 + keys)
    return floor


def floor_of_row(line: Any) -> float:
    """Return the least bytes of a row: its weights and slots read and written, its gradient, number and key read."""
    weights, slots = line.dim * 4 // line.halves, (line.plane_slots * line.dim + line.row_slots) * 4
    return float(2 * (weights + slots) + 4 * line.dim + 4 + 4 * (line.halves > 1))


def too_many_bytes(case: Case, times: float, in_hbm: bool) -> Iterator[str]:
    """Yield the fault, if there is one. times : bytes moved, by the floor; in_hbm : whether all rows are in HBM"""
    if case.by_xla and (case.dim > MOST_DIM_BY_XLA or case.lines > LINES):
        return
    most = MOST_IN_HBM if in_hbm else MOST_BY_XLA if case.by_xla else MOST_BY_KERNEL
    if times > most:
        yield f"moves {times:.2f} times the floor, more than {most}"


def check(case: Case, layout: Any, program: Any) -> list[str]:
    """Return the faults of a compiled program: what none may do, with any optimizer."""
    line = layout.line
    staged = case.lines * in_place.line_bytes(line)
    # XLA keeps lines before the update, after it, and for the write into the table, and then gradients.
    spread = 3 * case.lines * 4 * line.halves * line.width if case.compact else 0
    # Rows that share lines and are updated as rows: each becomes a line, of weights before and after, and gradients.
    spread += 3 * case.lines * line.group * 4 * line.lanes if line.row_slots and line.group > 1 else 0
    bound = (1 << 20) + (4 * staged if case.by_xla else 0) + spread
    if case.program == "read":
        bound = in_place.read_bound(line, case.lines)
    return in_place.check(layout, program, bound, staged, case.program == "read")


def prepare() -> None:
    """Set the environment: no TPU is here for libtpu to find, and several processes may load it to compile."""
    os.environ.update(JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_SKIP_MDS_QUERY="1")


def print_rows(rows: Iterable[tuple[str, Sequence[str]]]) -> int:
    """Print the row of each program, followed by its faults; return the exit code."""
    number = bad = 0
    for line, failed in rows:
        print(line, *failed, flush=True)
        number, bad = number + 1, bad + bool(failed)
    print(f"{number} compiled, {bad} with faults", file=sys.stderr)
    return 1 if bad or not number else 0


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.bench.tpu.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a sample of the grid")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table into this file")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="one JSON object per case; cases in this file are not compiled again",
    )
    parser.add_argument("--bundles", type=Path, metavar="FILE", help="the results of bundles.py, for the table")
    parser.add_argument("--only", default="", metavar="WORDS", help="cases whose line has all these words")
    args = parser.parse_args(words)
    prepare()
    compiler, results, earlier = Compiler(), [], read_results(args.results)
    listed = bundles_in(args.bundles)
    for case in cases(args.small):
        if not case.has(args.only):
            continue
        if case not in earlier:
            earlier[case] = compiler.compile(case)
            print(row_of(earlier[case], listed), flush=True)
            if args.results is not None:
                with args.results.open("a") as file:
                    file.write(json.dumps(asdict(earlier[case])) + "\n")
        results.append(earlier[case])
    if args.write is not None:
        write(args.write, results, listed)
    bad = [result for result in results if result.failed]
    print(f"{len(results)} compiled, {len(bad)} with faults", file=sys.stderr)
    return 1 if bad or not results else 0


if __name__ == "__main__":
    sys.exit(main())
