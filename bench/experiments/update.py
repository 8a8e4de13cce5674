"""How fast is the optimizer's step alone? The CPU's handler against XLA's gather and scatter.

    python bench/experiments/update.py                     the whole table of figures, some minutes
    python bench/experiments/update.py --rules adam --dims 32 --threads 1 --variants ffi

Times ``DeviceTable.apply`` followed by ``wait``: 200,000 distinct random ids of a table of 10,000,000 rows, their
gradients in one host array, no reading, summing or gate. The variants run one after the other, each with a new table
and every repetition with other ids; the figure is the median. Then the smallest steps: 100 rows of a small table, next
to a jitted program that only returns its donated table.

It does not measure the gain of a whole replay: coalescing and reading are additional and share the memory bus.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from penstock.bridge.backends import create_tables
from penstock.bridge.device_tables import DeviceTable, make_mesh
from penstock.bridge.programs import row_sharding
from penstock.bridge.sharding import Layout, TableDefinition
from penstock.updates import UpdateRule

RULES = {
    "sgd": UpdateRule("stochastic_gradient_descent", 0),
    "adagrad": UpdateRule("adagrad", 1),
    "adam": UpdateRule("adam", 2, (("beta1", 0.9), ("beta2", 0.999), ("epsilon", 1e-7))),
    "ftrl": UpdateRule("ftrl", 2, (("lr_power", -0.5), ("l1", 0.01), ("l2", 0.01))),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=10_000_000)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rules", type=lambda given: given.split(","), default=list(RULES))
    parser.add_argument("--dims", type=lambda given: [int(d) for d in given.split(",")], default=[16, 32, 64])
    parser.add_argument("--threads", type=lambda given: [int(t) for t in given.split(",")], default=[1, 2])
    parser.add_argument("--variants", type=lambda given: given.split(","), default=["ffi", "xla"])
    parser.add_argument("--repetitions", type=int, default=9)
    return parser.parse_args()


def made(rule: UpdateRule, rows: int, dim: int, threads: int, variant: str) -> DeviceTable:
    mesh = make_mesh(jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("shard",)))
    layout = Layout("t", rows, dim, rule.num_slots, 1, True, row_slots=rule.row_slots)
    definition = TableDefinition(layout, rule, (0.1,) * rule.num_slots)
    return DeviceTable(*create_tables(mesh, [definition], threads, variant))


def seconds(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def apply_and_wait(table: DeviceTable, ids: Any, grads: Any) -> None:
    table.apply(ids, grads, 0.1)
    table.wait()


def rows_per_second(table: DeviceTable, given: argparse.Namespace) -> float:
    """Return the rows per second of the median repetition."""
    rng = np.random.default_rng(0)
    grads = rng.standard_normal((given.rows, table.layout.dim), np.float32)
    times = []
    for _ in range(given.repetitions + 1):  # the first one compiles and does not count
        ids = rng.choice(given.vocabulary, given.rows, replace=False, shuffle=True)
        times.append(seconds(partial(apply_and_wait, table, ids, grads)))
    return given.rows / statistics.median(times[1:])


def large_steps(given: argparse.Namespace) -> None:
    print(f"{given.rows} distinct rows of {given.vocabulary}, million rows/s")
    variants = [(v, t) for v in given.variants for t in (given.threads if v == "ffi" else [0])]
    names = [f"{v}, {t} thread{'s'[: t > 1]}" if t else f"{v}, XLA's threads" for v, t in variants]
    print("| rule | dim | " + " | ".join(names) + " |")
    print("|---|---|" + "---|" * len(names))
    for name in given.rules:
        for dim in given.dims:
            speeds = [
                rows_per_second(made(RULES[name], given.vocabulary, dim, threads, variant), given)
                for variant, threads in variants
            ]
            print(f"| {name} | {dim} | " + " | ".join(f"{s / 1e6:.2f}" for s in speeds) + " |", flush=True)


def small_steps(given: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    ids, grads = rng.permutation(10_000)[:100], rng.standard_normal((100, 16), np.float32)
    runs: dict[str, Callable[[], Any]] = {
        v: partial(apply_and_wait, made(RULES["adagrad"], 10_000, 16, 0, v), ids, grads) for v in given.variants
    }
    state = [jax.jit(lambda: jax.numpy.zeros((10_240, 2, 16)), out_shardings=row_sharding(make_mesh()))()]
    nothing = jax.jit(lambda table: table, donate_argnums=0)

    def bare() -> None:
        state[0] = nothing(state[0])
        state[0].block_until_ready()

    runs["a program that does nothing"] = bare
    print("\n100 rows of 10000, adagrad, dim 16: microseconds a step")
    for name, run in runs.items():
        times = [seconds(run) for _ in range(3000)][500:]
        print(f"{name}: median {1e6 * statistics.median(times):.1f}, least {1e6 * min(times):.1f}")


def main() -> None:
    given = arguments()
    model = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    print(f"{platform.machine()}, {len(model)} CPUs: {model[0]}; jax {jax.__version__}, numpy {np.__version__}\n")
    large_steps(given)
    small_steps(given)


if __name__ == "__main__":
    main()
