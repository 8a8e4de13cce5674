"""Every step and write, compiled by XLA for an H200, on a machine without a GPU.

XLA compiles for a described device, down to PTX, at the most rows that one dispatch takes. A step must alias its whole
table and copy none of it, need temporary memory bounded by its rows, launch at most three kernels, and contain no
atomic operation (``atom``, ``red``): a sum by atomics has another order, and so other bits, in every run. A user's
step (``penstock.bridge.gather``, a loss, and ``apply``) sums repeated rows, too. It is compiled with default options,
for a batch whose ids have a Zipf distribution, and may launch twelve kernels, those of the loss included; in a scan
three more turn the loop. Its kernels may move four times the bytes that any step must (``least_bytes``), counted by the
shapes of their arguments and results. This shows nothing about time. ``make gpu-aot`` runs it, and ``--small`` is the
sample that CI compiles.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from penstock.bench.device_cases import LOOKUPS, batch_of, optimizers
from penstock.bench.tpu import functional_step, in_place

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 149000000000 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } device_description_str: "NVIDIA H200"
"""
ROWS, MOST_KERNELS = 10_000_000, 3
# Of a user's step; of one in a scan; and the most bytes that it moves, as a multiple of the least.
MOST_OWN_KERNELS, MOST_SCANNED_KERNELS, MOST_BYTES = 12, 15, 4.0
PLACES = 1_000_003  # of a cached table, whose steps also read evicted rows and write fetched ones
DIMS = (8, 32, 128, 200)
SMALL = {("SGD", 128), ("Adagrad", 32), ("Adam", 128), ("RowWiseAdagrad", 32)}
SMALL_OWN = {("Adagrad", 32), ("SGD", 200), ("RowWiseAdagrad", 8)}
# A user's own step, alone and in a scan.
OWN, SCANNED = "own step", "own steps, scanned"
# The least that a GPU reads of its memory.
SECTOR = 32
# Operations of a compiled program that launch nothing.
FREE = {"parameter", "bitcast", "get-tuple-element", "tuple", "constant"}
# Signals that a step is done: a constant, which is copied without a kernel.
FENCE = "s32[1]{0}"
ATOMIC = re.compile(r"^\s*(?:@\S+\s+)?((?:atom|red)\.\S+)", re.MULTILINE)


@dataclass(frozen=True)
class GpuCase:
    optimizer: str
    dim: int
    program: str = "apply"
    rows: int = ROWS

    @property
    def is_own(self) -> bool:
        """Whether the program is a user's own step."""
        return self.program in (OWN, SCANNED)


def cases(small: bool) -> Iterator[GpuCase]:
    """Yield the programs to compile. small : a few steps, a write, and those of a small cached table"""
    for optimizer, dim in product(sorted(optimizers()), DIMS):
        if not small or (optimizer, dim) in SMALL:
            yield GpuCase(optimizer, dim)
    for dim in (32,) if small else DIMS:
        yield GpuCase("Adagrad", dim, "write")
        yield from (GpuCase("Adagrad", dim, program, PLACES) for program in ("read", "write", "apply"))
    for optimizer, dim in product((*functional_step.OPTIMIZERS, "RowWiseAdagrad"), DIMS):
        for program in (OWN, SCANNED):
            if not small or (program == OWN and (optimizer, dim) in SMALL_OWN):
                yield GpuCase(optimizer, dim, program)


def set_environment(dump: Path | None = None) -> None:
    """Prepare XLA, before jax runs anything. dump : the directory for PTX"""
    compiler = Path(sysconfig.get_paths()["purelib"]) / "nvidia" / "cuda_nvcc"
    flags = {
        "cuda_data_dir": compiler,
        "autotune_level": 0,  # which would need a GPU
        "enable_command_buffer": "",  # so that the program lists its kernels
    }
    of_gpu = " ".join(f"--xla_gpu_{name}={value}" for name, value in flags.items())
    dumps = "" if dump is None else f" --xla_dump_to={dump}"
    os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS=of_gpu + dumps)
    os.environ["PATH"] = f"{compiler / 'bin'}:{os.environ['PATH']}"


def mesh_of_one() -> Any:
    """Return a mesh of one described GPU."""
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    described = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology="1x1x1", target_config=H200
    )
    return Mesh(np.asarray(described.devices).reshape(-1), ("shard",))


def compiled(case: GpuCase, mesh: Any) -> tuple[Any, Any]:
    """Return a compiled program, and the layout of its table."""
    from penstock.model.config.embedding import EmbeddingConfig
    from penstock.model.config.tables import TableConfig
    from penstock.rows.bridge import program_cache
    from penstock.rows.bridge.sharding import Layout

    table = TableConfig(case.rows, case.dim, name="t", optimizer=optimizers()[case.optimizer])
    spec = EmbeddingConfig.from_tables([table]).table("t")
    layout = Layout("t", case.rows, case.dim, len(spec.slots), 1, False, row_slots=spec.rule.row_slots)
    if case.is_own:
        step = functional_step.FunctionalStep(
            "h200", case.optimizer, case.dim, "xla", "scan" if case.program == SCANNED else "one chip"
        )
        return functional_step.compiled((layout, spec.rule, mesh), step, by_gathers=True)
    rule = spec.rule if case.program in program_cache.BY_RULE else None
    size = lines_of(case, layout)
    program = program_cache.compiled(case.program, mesh, rule, layout.line, "xla", layout.lines_per_device, size)
    return program, layout


def lines_of(case: GpuCase, layout: Any) -> int:
    """Return the lines of the largest step that is one dispatch, or of a user's own step; of a read the rows."""
    from penstock.rows.bridge.sharding import MAX_BUCKET, largest_bucket

    if case.is_own:
        return LOOKUPS // 2
    return MAX_BUCKET if case.program == "read" else largest_bucket("gpu", layout.line)


def launched(text: str) -> list[Any]:
    """Return the instructions that launch a kernel, or copy more than the fence: of a program, or of its loop."""
    bodies = in_place.computations(text)
    loops = [each.attributes for each in bodies["ENTRY"] if each.operation == "while"]
    names = [name for loop in loops for name in in_place.RUNS.findall(loop)] or ["ENTRY"]
    return [
        each
        for name in names
        for each in bodies[name]
        if each.operation not in FREE
        and "-done" not in each.operation
        and not (each.operation == "copy" and each.kind.startswith(FENCE))
    ]


def kernels(text: str) -> list[str]:
    """Return the operations of ``launched``."""
    return [each.operation for each in launched(text)]


def moved_bytes(layout: Any, text: str, lines: int) -> int:
    """Return the bytes of the arguments and results of a program's kernels, of a table those of the touched lines.

    A kernel that updates the table in place only writes it. Pads read one line again, and write none.
    """
    tables = {in_place.without_ones(shape) for shape, _ in in_place.arrays_on_device(layout)}
    bodies = in_place.computations(text)
    kinds = {each.name: each.kind for each in bodies["ENTRY"]}
    total = 0
    for each in launched(text):
        arrays = in_place.ARRAY.findall(each.kind)
        written = [lines * layout.line.nbytes(1) if _shape(dims) in tables else 0 for _, dims, _ in arrays]
        total += sum(written) + _size(each.kind, tables)
        for number, name in enumerate(each.operands):
            total += _size(kinds[name], tables)
            if not any(written) and any(_shape(dims) in tables for _, dims, _ in in_place.ARRAY.findall(kinds[name])):
                total += lines * _read_of_line(layout, bodies, each, number)
    return total


def _shape(dims: str) -> tuple[int, ...]:
    return in_place.without_ones([int(length) for length in dims.split(",") if length])


def _size(kind: str, without: set[tuple[int, ...]]) -> int:
    """Return the bytes of all arrays but those of some shapes."""
    arrays = [(name, _shape(dims)) for name, dims, _ in in_place.ARRAY.findall(kind)]
    return sum(math.prod(shape) * in_place.WIDTHS.get(name, 4) for name, shape in arrays if shape not in without)


def _read_of_line(layout: Any, bodies: dict[str, list[Any]], kernel: Any, number: int) -> int:
    """Return the bytes that a kernel reads of a line: slices of it, in sectors; else all. number : of the operand"""
    whole: int = layout.line.nbytes(1)
    called = re.search(r"\bcalls=%?([\w.\-]+)", kernel.attributes)
    if called is None:
        return whole
    fused = bodies[called[1]]
    (parameter,) = [each.name for each in fused if re.match(rf"%param_{number}\b", each.name)]
    names = {each.name for each in fused if each.operation == "gather" and each.operands[0] == parameter}
    parts = set()
    for each in fused:
        if not names.intersection(each.operands[:1]):
            continue
        if each.operation == "bitcast":
            names.add(each.name)
        elif each.operation == "slice":
            ((_, dims, _),) = in_place.ARRAY.findall(each.kind)
            parts.add((each.attributes.partition("slice=")[2].partition("}")[0], math.prod(_shape(dims)[1:])))
        else:
            return whole
    return min(whole, sum(-(-4 * elements // SECTOR) * SECTOR for _, elements in parts)) if parts else whole


def least_bytes(layout: Any) -> int:
    """Return the bytes that a user's step must move: touched lines read and written, activations written, their
    gradients read, and the arrays of ``Uses`` read once."""
    import jax

    uses = batch_of(layout, by_gathers=True)
    activations = 2 * functional_step.SAMPLES * 4 * layout.line.dim
    lookups = sum(array.nbytes for array in jax.tree.leaves(uses))
    return int(2 * uses.counts.sum() * layout.line.nbytes(1) + activations + lookups)


def faults(case: GpuCase, layout: Any, program: Any, ptx: str) -> Iterator[str]:
    """Yield the faults of a compiled program."""
    staged = lines_of(case, layout) * in_place.line_bytes(layout.line)
    bound = temporary_bound(case, layout)
    yield from in_place.check(layout, program, bound, staged, is_read=case.program == "read")
    text = program.as_text()
    operations = kernels(text)
    most = {OWN: MOST_OWN_KERNELS, SCANNED: MOST_SCANNED_KERNELS}.get(case.program, MOST_KERNELS)
    if len(operations) > most:
        yield f"launches {len(operations)} kernels ({', '.join(operations)}), more than {most}"
    if case.program == OWN and (share := byte_share(layout, text)) > MOST_BYTES:
        yield f"moves {share:.1f} times the least bytes, more than {MOST_BYTES}"
    if atomic := ATOMIC.search(ptx):
        yield f"has an atomic operation, {atomic[1]}"
    if not ptx:
        yield "has no PTX"


def byte_share(layout: Any, text: str) -> float:
    """Return the bytes that a user's step moves, as a multiple of the least."""
    lines = int(batch_of(layout, by_gathers=True).counts.sum())
    return moved_bytes(layout, text, lines) / least_bytes(layout)


def temporary_bound(case: GpuCase, layout: Any) -> int:
    """Return the bytes that a program may need in addition to the table: its rows three times, and sorted lookups."""
    bound: int = (1 << 20) + 3 * lines_of(case, layout) * in_place.line_bytes(layout.line)
    if case.is_own:
        bound = functional_step.temporary_bound(layout) + 4 * LOOKUPS * 4 * (layout.line.width + 8)
    return bound


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.bench.gpu.compiled_steps", description=__doc__)
    parser.add_argument("--own", action="store_true", help="only steps of a user's own")
    parser.add_argument("--small", action="store_true", help="a sample")
    args = parser.parse_args(words)
    number = bad = 0
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder)
        set_environment(dump)
        mesh = mesh_of_one()
        print("| optimizer | dim | program | rows | temporary | kernels | bytes | compiled in | |\n" + "|---" * 9 + "|")
        for case in cases(args.small):
            if args.own and not case.is_own:
                continue
            began = time.perf_counter()
            program, layout = compiled(case, mesh)
            ptx_files = sorted(dump.glob("*.ptx"))
            text, memory = program.as_text(), program.memory_analysis()
            failed = list(faults(case, layout, program, "".join(path.read_text() for path in ptx_files)))
            for path in dump.iterdir():
                path.unlink()
            size, seconds = f"{memory.temp_size_in_bytes / 1e6:.2f} MB", f"{time.perf_counter() - began:.1f} s"
            title = case.program + ", cached" * (case.rows == PLACES)
            rows = f"{lines_of(case, layout):,}"
            share = f"{byte_share(layout, text):.2f} x" if case.program == OWN else ""
            cells = [case.optimizer, case.dim, title, rows, size, len(kernels(text)), share, seconds]
            print("|", " | ".join(map(str, [*cells, "; ".join(failed)])), "|", flush=True)
            number, bad = number + 1, bad + bool(failed)
    print(f"{number} compiled, {bad} with faults", file=sys.stderr)
    return 1 if bad or not number else 0


if __name__ == "__main__":
    sys.exit(main())
