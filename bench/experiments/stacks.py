"""What is the fixed cost of a step over 32 tables, and how much do stacks save? Runs on any machine.

The tables of w4 at a hundredth of their sizes, Adagrad, one device. Two steps: one row for each table, which measures
the cost of dispatching, and 16,384 gradient rows distributed as in w4. Each way of updating runs a table at a time
(PENSTOCK_STACKS=off) and stacked; the CPU's handler (ffi) has no stacks. Times run from the coalesced rows on the host
to the completion on the devices; the median of --rounds.

    python bench/experiments/stacks.py [--rounds 30]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import jax
import numpy as np

from penstock.bench.penstock_adapter import config_of
from penstock.bench.workloads import make
from penstock.engine import Engine
from penstock.frames import Coalesced, SummedArrays

WAYS = [("ffi", "plain", "off"), *((v, f, s) for v, f in (("xla", "plain"), ("xla", "tiled")) for s in ("off", "on"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    workload = make("w4", rows=1 << 14, scale=0.01)
    step = workload.steps()[0]
    one = {t.name: (np.zeros(1, np.int64), np.ones((1, t.dim), np.float32)) for t in workload.tables}
    many = {name: unique(*rows) for name, rows in step.parts.items()}
    print(f"{len(one)} tables; {sum(len(ids) for ids, _ in many.values())} distinct rows of {workload.rows}")
    print("| variant | layout | stacks | tables together | 1 row per table | all rows |\n|---|---|---|---|---|---|")
    for variant, layout, stacks in WAYS:
        os.environ |= {"PENSTOCK_VARIANT": variant, "PENSTOCK_LAYOUT": layout, "PENSTOCK_STACKS": stacks}
        engine = Engine(config_of(workload, "adagrad"), jax.make_mesh((1,), ("shard",), devices=jax.devices()[:1]))
        times = " | ".join(f"{1e3 * median(engine, rows, args.rounds):.2f} ms" for rows in (one, many))
        print(f"| {variant} | {layout} | {stacks} | {len(engine.core.tables._groups)} | {times} |", flush=True)
    return 0


def unique(ids, grads):  # type: ignore[no-untyped-def]
    """Return each id once, with one of its gradients."""
    distinct, first = np.unique(ids, return_index=True)
    return distinct, np.ascontiguousarray(grads[first])


def median(engine: Engine, rows, rounds: int) -> float:  # type: ignore[no-untyped-def]
    """Return the median seconds of a step with these rows."""
    coalesced, times = {name: [Coalesced((SummedArrays(*part),))] for name, part in rows.items()}, []
    for step in range(2 + rounds):  # the first ones compile
        began = time.perf_counter()
        engine.core.tables.apply(coalesced, (), step)
        engine.core.tables.wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


if __name__ == "__main__":
    sys.exit(main())
