"""What share of an accelerator's copy bandwidth does a step reach? Needs an accelerator; --any runs it on a CPU.

For SGD, Adagrad and Adam at dims 32, 64 and 128: 65,536 unique rows per step of a table of 10 million. Two figures:
the time of the device, whose steps are in one loop of one program, and whole steps from NumPy arrays. A row's traffic
is the minimum that any implementation must move: weights and slots read and written, gradient and number read. The copy
bandwidth is that of a jitted copy of 1 GB, read and write counted, the best of nine.

    python bench/experiments/gpu.py [--rows 10000000] [--unique 65536] [--any]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from penstock.bridge.backends import create_tables, lanes
from penstock.bridge.device_tables import DeviceTable
from penstock.bridge.mesh_selection import make_mesh
from penstock.bridge.packing import Packer
from penstock.bridge.pallas import tensorcore
from penstock.bridge.programs import local_apply, row_sharding
from penstock.bridge.sharding import Layout, TableDefinition
from penstock.bridge.stacking import MemberRows, Stack
from penstock.threads import ThreadTeam
from penstock.updates import UpdateRule

ADAM = (("beta1", 0.9), ("beta2", 0.999), ("epsilon", 1e-8))
RULES = {
    "SGD": UpdateRule("stochastic_gradient_descent", 0),
    "Adagrad": UpdateRule("adagrad", 1),
    "Adam": UpdateRule("adam", 2, ADAM),
}
DIMS = (32, 64, 128)
# Rounds of all steps in the loops whose difference is the time of a round, and how often each is timed.
SHORT, LONG, ROUNDS_TIMED = 2, 22, 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000, help="of a table")
    parser.add_argument("--unique", type=int, default=65_536, help="rows per step")
    parser.add_argument("--any", action="store_true", help="also where the device is a CPU, to see the script work")
    args = parser.parse_args()
    mesh = make_mesh(jax.make_mesh((1,), ("shard",), devices=jax.devices()[:1]))
    device = mesh.devices.flat[0]
    if device.platform == "cpu" and not args.any:
        print("no accelerator here: jax sees CPUs only", file=sys.stderr)
        return 2
    limit = copy_bandwidth(1 << 30 if device.platform != "cpu" else 1 << 26)
    print(f"{device.device_kind}, jax {jax.__version__}: a copy moves {limit / 1e9:.1f} GB/s")
    print(
        "| optimizer | dim | the device, M rows/s | of copy bandwidth | whole steps, M rows/s |\n|---|---|---|---|---|"
    )
    for name, rule in RULES.items():
        for dim in DIMS:
            alone, whole = measure(mesh, rule, dim, args.rows, args.unique)
            traffic = 4 * (2 * (dim + rule.num_slots * rule.slot_dim(dim)) + dim + 1)
            share = alone * traffic / limit
            print(f"| {name} | {dim} | {alone / 1e6:.1f} | {share:.0%} | {whole / 1e6:.1f} |", flush=True)
    return 0


def copy_bandwidth(num_bytes: int) -> float:
    """Return the bytes read and written per second by a copy."""
    array = jnp.zeros(num_bytes // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * num_bytes / min(timed(lambda: copy(array)) for _ in range(9))


def measure(mesh: jax.sharding.Mesh, rule: UpdateRule, dim: int, rows: int, unique: int) -> tuple[float, float]:
    """Return the rows per second of the device, and of whole steps."""
    layout = Layout("t", rows, dim, rule.num_slots, 1, False, lanes(mesh), row_slots=rule.row_slots)
    variant = "xla" if mesh.devices.flat[0].platform == "cpu" else None
    (tables,) = create_tables(mesh, [TableDefinition(layout, rule, (0.1,) * rule.num_slots)], ThreadTeam(None), variant)
    table = DeviceTable(tables)
    rng = np.random.default_rng(0)
    steps = [
        (rng.choice(rows, unique, replace=False), rng.standard_normal((unique, dim), np.float32)) for _ in range(4)
    ]
    return alone(mesh, layout, rule, tables, steps), whole(table, steps)


def alone(mesh, layout, rule, tables, steps) -> float:  # type: ignore[no-untyped-def]
    """Return the rows per second of the device, whose steps are in one loop of one program.

    All arguments are on the device. A short and a long loop run, and the difference counts: not the launch, nor Python.
    """
    stack, sharding = Stack.of([layout], rule, compact=False), row_sharding(mesh)
    packer = Packer(stack, ThreadTeam(None))
    local = local_apply(rule, stack.line) if tables.variant == "xla" else tensorcore.local_apply(mesh, rule, stack.line)
    sent = []
    for ids, grads in steps:
        routed = packer.route([MemberRows(0, ids, grads)])
        packed = packer.pack(routed, routed.by_device)
        sent.append(tuple(jax.device_put(part, sharding) for part in packed.arguments))

    @partial(jax.jit, donate_argnums=0)
    def run(arrays, sent, rounds, *numbers):  # type: ignore[no-untyped-def]
        def one_round(_, arrays):  # type: ignore[no-untyped-def]
            for of_step in sent:
                arrays, _ = local(arrays, *of_step, *numbers)
            return arrays

        return jax.lax.fori_loop(0, rounds, one_round, arrays)

    def seconds(rounds: int) -> float:
        def once() -> object:
            numbers = np.int32(rounds), np.float32(0.1), np.int32(0), np.uint32(0)
            tables.arrays = run(tables.arrays, tuple(sent), *numbers)
            return tables.arrays

        return statistics.median(timed(once) for _ in range(ROUNDS_TIMED))

    seconds(SHORT)  # compiles
    per_round = (seconds(LONG) - seconds(SHORT)) / (LONG - SHORT)
    return sum(len(ids) for ids, _ in steps) / per_round


def whole(table: DeviceTable, steps) -> float:  # type: ignore[no-untyped-def]
    """Run steps from host arrays, partitioned and transferred as in a run."""

    def once() -> None:
        for ids, grads in steps:
            table.apply(ids, grads, 0.1)
        table.wait()

    timed(once)
    return sum(len(ids) for ids, _ in steps) / statistics.median(timed(once) for _ in range(5))


def timed(work: Callable[[], object]) -> float:
    """Return the seconds until the result of ``work`` is ready."""
    began = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
