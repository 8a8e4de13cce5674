"""A user's jitted step that contains a table, compiled by libtpu for every generation of TPU.

The step looks up a batch, takes the gradient of a loss by its activations, and updates the table
(``penstock.bridge.gather`` and ``apply``). Donated, the table must be aliased completely and copied nowhere, and the
further memory must be bounded by the batch: at dims that share lines and at wide ones, by our kernel and by XLA, on one
chip, on three and four of them as whole arrays, inside ``shard_map``, and in a ``lax.scan`` over steps.

    PYTHONPATH=build/tree build/tpu/bin/python -m penstock.bench.tpu.functional_step [--small] [GENERATION…]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from penstock.bench.device_cases import LOOKUPS, LOOKUPS_PER_SAMPLE, batch_of
from penstock.bench.tpu import in_place
from penstock.bench.tpu.matrix import Compiler, prepare
from penstock.bench.tpu.step_cases import TOPOLOGIES, Case

DIMS = (8, 12, 16, 20, 24, 32, 40, 64, 100, 128, 256, 300)
OPTIMIZERS = ("SGD", "Adagrad", "Adam")
PLACES = ("one chip", "three chips", "all chips", "shard_map", "scan")
ROWS, SCANNED = 1_000_003, 4
SAMPLES = LOOKUPS // LOOKUPS_PER_SAMPLE
SMALL = {("v5e", 64, "one chip"), ("v5e", 100, "scan"), ("v5p", 32, "all chips"), ("v6e", 128, "shard_map")}
SMALL |= {("v4", 300, "one chip"), ("tpu7x", 16, "one chip"), ("v5e", 24, "three chips")}


@dataclass(frozen=True)
class FunctionalStep:
    generation: str
    optimizer: str
    dim: int
    variant: str
    place: str


def steps(small: bool, generations: Sequence[str]) -> Iterator[FunctionalStep]:
    """Yield the steps to compile. small : a few of each kind, with Adagrad"""
    for generation, dim, place in product(generations, DIMS, PLACES):
        for optimizer, variant in product(OPTIMIZERS, ("pallas", "xla")):
            if not small or (optimizer == "Adagrad" and (generation, dim, place) in SMALL):
                yield FunctionalStep(generation, optimizer, dim, variant, place)


def compiled(table_of_case: tuple[Any, Any, Any], step: FunctionalStep, by_gathers: bool = False) -> tuple[Any, Any]:
    """Return the compiled program of a step, and the layout of its table.

    table_of_case : its layout, its rule and its mesh; by_gathers : how the step sums, as on a GPU
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from penstock.rows.bridge import apply, gather
    from penstock.rows.bridge.functional_table import Format, Table, Uses

    layout, rule, mesh = table_of_case
    n = {"one chip": 1, "scan": 1, "three chips": 3}.get(step.place, mesh.size)
    mesh = Mesh(mesh.devices[:n], mesh.axis_names)
    layout = replace(layout, vocabulary_size=ROWS * n, num_devices=n)
    line, form = layout.line, Format(layout.line, mesh, step.variant)
    leading = (SCANNED,) if step.place == "scan" else ()

    def split(*shape: int, dtype: Any = np.int32, before: tuple[int, ...] = leading) -> Any:
        spec = PartitionSpec(*[None] * len(before), mesh.axis_names)
        return jax.ShapeDtypeStruct((*before, *shape), dtype, sharding=NamedSharding(mesh, spec))

    arrays = line.arrays(n * layout.lines_per_device)
    table = Table(tuple(split(*shape, dtype=dtype, before=()) for shape, dtype in arrays), (), form)
    uses = jax.tree.map(lambda part: split(*part.shape, dtype=part.dtype), batch_of(layout, by_gathers))

    def trained(table: Table, uses: Uses) -> tuple[Table, Any]:
        def loss(activations: dict[str, Any]) -> Any:
            return jnp.sum((activations["f"] - 1) ** 2)

        value, gradients = jax.value_and_grad(loss)(gather(table, uses))
        return apply(rule, table, uses, gradients, 0.1), value[None]

    run: Any = trained
    if step.place == "scan":

        def run(table: Table, uses: Uses) -> Any:
            return jax.lax.scan(trained, table, uses)

    elif step.place == "shard_map":
        spec = PartitionSpec(mesh.axis_names)
        run = jax.shard_map(trained, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = jax.jit(run, donate_argnums=0).lower(table, uses).compile()
    return program, layout


def check(layout: Any, program: Any) -> list[str]:
    """Return the faults of a compiled step."""
    return in_place.check(layout, program, temporary_bound(layout), staged_bytes(layout))


def staged_bytes(layout: Any) -> int:
    """Return the bytes of the lookups and samples of a step."""
    size: int = (LOOKUPS + SAMPLES) * 4 * max(128, layout.line.width)
    return size


def temporary_bound(layout: Any) -> int:
    """Return the bytes that a step may need in addition to the table.

    Its lines three times, the lookups once, and over several devices the rows that they exchange, pads included.
    """
    exchanged = LOOKUPS * 4 * max(128, layout.line.width) if layout.num_devices > 1 else 0
    bound: int = (1 << 20) + 3 * LOOKUPS // 2 * in_place.line_bytes(layout.line) + staged_bytes(layout) + exchanged
    return bound


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m penstock.bench.tpu.functional_step", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a sample")
    parser.add_argument("--only", default="", metavar="WORDS", help="steps whose line has all these words")
    parser.add_argument("generations", nargs="*", default=list(TOPOLOGIES), metavar="GENERATION")
    args = parser.parse_args(words)
    prepare()
    compiler, bad, number = Compiler(), 0, 0
    print("| generation | optimizer | dim | variant | where | temporary | bound | compiled in | |")
    print("|---|---|---|---|---|---|---|---|---|")
    for step in steps(args.small, args.generations):
        cells = [step.generation, step.optimizer, str(step.dim), step.variant, step.place]
        if not set(args.only.split()) <= set(" ".join(cells).split()):
            continue
        began = time.perf_counter()
        try:
            case = Case(step.generation, step.optimizer, step.dim, step.variant)
            program, layout = compiled(compiler.table_of(case), step)
            failed = check(layout, program)
            sizes = program.memory_analysis().temp_size_in_bytes, temporary_bound(layout)
            cells += [f"{size / 1e6:.2f} MB" for size in sizes]
        except Exception as error:  # the compiler may raise anything
            failed = [f"does not compile: {str(error).splitlines()[0][:200]}"]
        print("|", " | ".join([*cells, f"{time.perf_counter() - began:.1f} s", "; ".join(failed)]), "|", flush=True)
        number, bad = number + 1, bad + bool(failed)
    print(f"{number} compiled, {bad} with faults", file=sys.stderr)
    return 1 if bad or not number else 0


if __name__ == "__main__":
    sys.exit(main())
