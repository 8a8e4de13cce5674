"""Every step and write for every generation of TPU, through TPU's real compiler, on a machine without a TPU.

libtpu compiles for a described topology. The compiled program shows whether a table is updated in place, how much
temporary memory it needs, and how many bytes move; it shows nothing about time. ``make tpu-matrix`` runs this, and
writes bench/results/tpu-matrix.md; ``--small`` is the sample that CI compiles.

Bytes moved per line (one physical row, docs/tpu.md) are compared with a floor: reading and writing weights and slots
once (slots of one number per row: those of its rows), and reading the gradient and the number of the line, and of
16-bit weights the keys of its rows. moved_bytes.py counts them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from penstock.bench.tpu.moved_bytes import dma_bytes, hbm_bytes

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
FOUR_HOSTS = "v5e, 4 hosts"
OF_FOUR_HOSTS = {FOUR_HOSTS: "v5e:4x4", "v5p, 4 hosts": "v5p:2x2x4"}
DIMS = (8, 32, 64, 128, 200)
MAIN = ("SGD", "Adagrad", "Adam", "FTRL")
ROWS, LINES = 1 << 22, 4096
# Bytes moved, as a multiple of the floor.
MOST_BY_KERNEL, MOST_BY_XLA = 1.25, 2.5
HEAD = """# The compile matrix of TPU steps

Written by `make tpu-matrix` on {date}, with jax {jax} and the libtpu that it pins: {rows:,} rows over all chips
and {lines:,} lines per chip and step. [docs/tpu.md](../../docs/tpu.md) explains the columns.
"4 hosts" is a v5e:4x4 topology.

"""


@dataclass(frozen=True)
class Case:
    generation: str
    optimizer: str
    dim: int
    variant: str
    bfloat16: bool = False
    program: str = "apply"

    @property
    def what(self) -> str:
        """The optimizer, and in what a case differs from its usual step."""
        return self.optimizer + ", bfloat16" * self.bfloat16 + ", write" * (self.program == "write")

    @property
    def by_xla(self) -> bool:
        """Whether XLA compiles the program, and not Pallas."""
        return self.variant == "xla" or self.program == "write"


@dataclass(frozen=True)
class Result:
    """The result of compiling a case.

    bytes_per_line : bytes moved; None: nothing was compiled
    failed : the faults
    """

    case: Case
    temp_bytes: int
    bytes_per_line: float | None
    floor: float
    seconds: float
    failed: tuple[str, ...] = ()

    @property
    def ratio(self) -> float | None:
        return None if self.bytes_per_line is None else self.bytes_per_line / self.floor


def optimizers() -> dict[str, Any]:
    """Return every optimizer that has a formula, by name."""
    from penstock.config import optimizers as o

    plain = ["Momentum", "Lion", "RMSProp", "CenteredRMSProp", "Adadelta", "ProximalAdagrad", "BoundedAdagrad"]
    plain += ["OnlineYogi", "ProximalYogi", "FrequencyEstimator", "RowWiseAdagrad"]
    made = {name: getattr(o, name)(learning_rate=0.1) for name in plain}
    made |= {"SGD": o.SGD(0.1), "Adagrad": o.Adagrad(0.1), "Adam": o.Adam(0.1), "FTRL": o.FTRL(0.1)}
    return made | {"AdagradMomentum": o.AdagradMomentum(0.1, momentum=0.9), "Assign": o.Assign()}


def cases(small: bool) -> Iterator[Case]:
    """Yield the cases of the grid. small : each generation and each optimizer once, the rest sampled"""
    for generation in TOPOLOGIES:
        for optimizer in MAIN:
            for dim in DIMS:
                if small and (generation, optimizer, dim) not in SMALL:
                    continue
                yield Case(generation, optimizer, dim, "pallas")
                yield Case(generation, optimizer, dim, "xla")
    if not small:
        for optimizer in sorted(set(optimizers()) - set(MAIN)):
            for dim in (32, 128):
                if optimizer != ROW_WISE:
                    yield from (Case("v5e", optimizer, dim, variant) for variant in ("pallas", "xla"))
        for optimizer in MAIN:
            yield from (Case(FOUR_HOSTS, optimizer, dim, "pallas") for dim in (32, 128))
            yield from (Case(generation, optimizer, 128, "xla", True) for generation in TOPOLOGIES)
    for generation, dim in [("v5e", 32)] if small else product(TOPOLOGIES, (8, 32, 128, 200)):
        if dim >= 128 or generation not in SEPARATED:
            yield from (Case(generation, ROW_WISE, dim, "xla", program=program) for program in ("apply", "write"))
    for generation, dim in SMALL_WRITES if small else product(TOPOLOGIES, DIMS):
        for variant in ("pallas", "xla"):
            yield Case(generation, "Adagrad", dim, variant, program="write")
        if dim == 128:
            yield Case(generation, "Adagrad", dim, "xla", True, "write")


ROW_WISE = "RowWiseAdagrad"  # the one whose slots are no lines; XLA compiles its steps
# There XLA separates the rows of a line in HBM: more than MOST_BY_XLA times the floor (docs/tpu.md, limits).
SEPARATED = ("v5p", "tpu7x")
SMALL = {("v4", "SGD", 8), ("v5e", "Adagrad", 32), ("v5e", "Adam", 128), ("v5p", "FTRL", 64), ("v6e", "Adam", 200)}
SMALL |= {("tpu7x", "Adagrad", 128)}
SMALL_WRITES = [("v4", 8), ("v5e", 128), ("v5p", 32), ("v6e", 200), ("tpu7x", 64)]


class Compiler:
    """Compiles cases; topologies and rules are cached."""

    def __init__(self) -> None:
        self._meshes: dict[str, Any] = {}
        self._optimizers = optimizers()

    def mesh(self, generation: str) -> Any:
        """Return a mesh over all chips of a described topology."""
        import numpy as np
        from jax.experimental import topologies
        from jax.sharding import Mesh

        if generation not in self._meshes:
            name = (TOPOLOGIES | OF_FOUR_HOSTS)[generation]
            devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
            self._meshes[generation] = Mesh(np.asarray(devices).reshape(-1), ("shard",))
        return self._meshes[generation]

    def made(self, case: Case) -> tuple[Any, Any, Any]:
        """Return the layout, the rule and the mesh of a case."""
        from penstock.bridge.backends import formatted
        from penstock.bridge.sharding import Layout
        from penstock.config.embedding import EmbeddingConfig
        from penstock.config.tables import TableConfig

        optimizer = self._optimizers[case.optimizer]
        config = EmbeddingConfig.from_tables([TableConfig(ROWS, case.dim, name="t", optimizer=optimizer)])
        spec, mesh = config.table("t"), self.mesh(case.generation)
        slots, by_row = len(spec.slots), spec.rule.row_slots
        layout = Layout("t", ROWS, case.dim, slots, mesh.size, False, 128, case.bfloat16, row_slots=by_row)
        return formatted(layout, case.variant), spec.rule, mesh

    def compile(self, case: Case) -> Result:
        from jax import set_mesh

        from penstock.bridge.program_cache import compiled, jitted, shapes

        layout, rule, mesh = self.made(case)
        line, num_lines = layout.line, layout.num_devices * layout.lines_per_device
        floor = floor_of(line)
        began = time.perf_counter()
        try:
            variant = "xla" if case.by_xla else case.variant
            program: Any = compiled(case.program, mesh, rule, line, variant, num_lines, LINES)
        except Exception as error:  # the compiler may raise anything
            return Result(case, 0, None, floor, 0.0, (f"does not compile: {str(error).splitlines()[0][:200]}",))
        seconds = time.perf_counter() - began
        memory, text = program.memory_analysis(), program.as_text()
        if case.by_xla:
            touched = [shape for shape, _ in line.arrays(LINES)]
            moved = hbm_bytes(text, dict(zip(on_device(layout), touched, strict=True))) / LINES
        else:
            with set_mesh(mesh):
                traced = jitted("apply", mesh, rule, line, case.variant, num_lines)
                jaxpr = traced.trace(*shapes("apply", mesh, line, num_lines, LINES)).jaxpr
            moved = dma_bytes(jaxpr) + 4 * line.width + 4  # Pallas loads the words and the number
        failed = (*faults(case, layout, memory, text), *too_many_bytes(case, moved, floor))
        return Result(case, memory.temp_size_in_bytes, moved, floor, seconds, failed)


def on_device(layout: Any) -> list[tuple[int, ...]]:
    """Return the shapes of a table's arrays on one device."""
    return [(first // layout.num_devices, *others) for first, *others in layout.shapes]


def floor_of(line: Any) -> float:
    """Return the least bytes of a line: its strips read and written, its gradient, number and keys read."""
    keys = line.group if line.halves > 1 else 0
    floor: float = 2 * line.nbytes(1) + 4 * (line.halves * line.width + 1 + keys)
    return floor


def too_many_bytes(case: Case, moved: float, floor: float) -> Iterator[str]:
    most = MOST_BY_XLA if case.by_xla else MOST_BY_KERNEL
    if moved > most * floor:
        yield f"moves {moved / floor:.2f} times the floor, more than {most}"


def faults(case: Case, layout: Any, memory: Any, text: str) -> Iterator[str]:
    """Yield the faults of a compiled step: what no step may do, with any optimizer."""
    of_device = layout.nbytes // layout.num_devices
    if memory.alias_size_in_bytes != of_device:
        yield f"aliases {memory.alias_size_in_bytes} bytes of a table of {of_device}"
    # XLA keeps lines three times: before the update, after it, and for the write into the table.
    line_bytes = layout.line.nbytes(1) + 4 * layout.line.halves * layout.line.width
    bound = (1 << 20) + (3 * LINES * line_bytes if case.by_xla else 0)
    if memory.temp_size_in_bytes > bound:
        yield f"needs {memory.temp_size_in_bytes} bytes beside the table, more than {bound}"
    for shape in on_device(layout):
        sized = rf"\[{','.join(map(str, shape))}\]\S* copy(-start)?\("
        if re.search(sized, text):
            yield f"copies a table of {shape}"


def markdown_table(results: Sequence[Result]) -> str:
    """Return a row per result."""
    rows = ["| generation | optimizer | dim | variant | bytes per line | × floor | temporary | compiled in |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    for result in results:
        case = result.case
        moved = "; ".join(result.failed) or f"{result.bytes_per_line:,.0f} | {result.ratio:.2f}"
        rows.append(
            f"| {case.generation} | {case.what} | {case.dim} | {case.variant} | {moved} "
            f"| {result.temp_bytes / 1e6:.2f} MB | {result.seconds:.1f} s |"
        )
    return "\n".join(rows)


def kept(path: Path | None) -> dict[Case, Result]:
    """Return the results of an earlier run."""
    found = {}
    for line in path.read_text().splitlines() if path is not None and path.exists() else ():
        result = json.loads(line)
        case = Case(**result.pop("case"))
        found[case] = Result(case, **{**result, "failed": tuple(result["failed"])})
    return found


def write(path: Path, results: Sequence[Result]) -> None:
    """Write the results as a page, which replaces an earlier one."""
    head = HEAD.format(date=date.today(), jax=version("jax"), rows=ROWS, lines=LINES)
    path.write_text(f"{head}{markdown_table(results)}\n")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.bench.tpu.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a sample of the grid")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table into this file")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FILE",
        help="one JSON object per case; cases that it holds are not compiled again",
    )
    parser.add_argument("--only", default="", metavar="WORDS", help="cases whose line has all these words")
    args = parser.parse_args(words)
    # The host has no TPU: libtpu must not look for one, and several processes may load it to compile.
    os.environ.update(JAX_PLATFORMS="cpu", ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_SKIP_MDS_QUERY="1")
    compiler, results, known = Compiler(), [], kept(args.results)
    for case in cases(args.small):
        if not set(args.only.split()) <= {str(word) for word in asdict(case).values()}:
            continue
        if case not in known:
            known[case] = compiler.compile(case)
            print(markdown_table([known[case]]).splitlines()[-1], flush=True)
            if args.results is not None:
                with args.results.open("a") as file:
                    file.write(json.dumps(asdict(known[case])) + "\n")
        results.append(known[case])
    if args.write is not None:
        write(args.write, results)
    bad = [result for result in results if result.failed]
    print(f"{len(results)} compiled, {len(bad)} not as they must be", file=sys.stderr)
    return 1 if bad or not results else 0


if __name__ == "__main__":
    sys.exit(main())
