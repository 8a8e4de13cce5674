"""Does a dispatcher per chip, or a process per chip, feed 8 chips faster than one dispatcher for all of them?

Steps of SGD at dim 32 on 8 devices that jax simulates on the CPUs of this machine, in turns: by one process with one
dispatcher ("one"); by one process with a table and a dispatcher per device ("threads"); by 2 and 8 processes, each with
its share of devices and rows. The programs, and so the work of the devices, are the same. The rows of each table are
split beforehand, so neither threads nor processes pay for routing, which "one" does: they are favored.

    python bench/experiments/dispatchers.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

VOCABULARY, DIM, DEVICES, CPUS = 1_000_000, 32, 8, 2
SIZES = {1_024: 60, 16_384: 20, 131_072: 4}  # rows of a step → steps of a round
WAYS = {"one": (1, 1), "threads": (1, DEVICES), "2 processes": (2, 1), "8 processes": (DEVICES, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(*args.serve)
        return
    print(
        "ms per step, the median of all rounds\n\n| rows of a step | "
        + " | ".join(WAYS)
        + " |\n|---"
        + "|---" * 4
        + "|"
    )
    for rows, steps in SIZES.items():
        ways = {name: [Worker(rows, steps, number, *way) for number in range(way[0])] for name, way in WAYS.items()}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, workers in ways.items():
                began = time.perf_counter()
                for worker in workers:
                    worker.begin()
                for worker in workers:
                    worker.end()
                seconds[name].append((time.perf_counter() - began) / steps)
        cells = [f"{1000 * statistics.median(seconds[name]):.2f}" for name in ways]
        print(f"| {rows:,} | {' | '.join(cells)} |", flush=True)
        for workers in ways.values():
            for worker in workers:
                worker.stop()


class Worker:
    """A process with a share of the devices."""

    def __init__(self, rows: int, steps: int, number: int, processes: int, tables: int) -> None:
        devices = DEVICES // processes
        flags = f"--xla_force_host_platform_device_count={devices}"
        words = [sys.executable, __file__, "--serve", json.dumps([rows, steps, number, processes, tables])]
        self._process = subprocess.Popen(
            words,
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.end()  # it is ready

    def begin(self) -> None:
        assert self._process.stdin is not None
        print("go", file=self._process.stdin, flush=True)

    def end(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "done\n"

    def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(rows: int, num_steps: int, number: int, processes: int, num_tables: int) -> None:
    """Run the steps of a round for each line of input. number : of this process"""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from penstock.base.threads import ThreadTeam
    from penstock.core.pipeline import Pipeline, TableStore
    from penstock.model.frames import Frame, Rows
    from penstock.model.updates import UpdateRule
    from penstock.rows.bridge.devices import AXIS
    from penstock.rows.bridge.dispatcher import Dispatcher
    from penstock.rows.bridge.sharding import Layout, TableDefinition
    from penstock.rows.bridge.xla_tables import XlaTables

    rng, team = np.random.default_rng(number), ThreadTeam(max(1, CPUS // processes))
    devices, shares = jax.devices(), processes * num_tables
    local = VOCABULARY // shares
    tables: list[Any] = []
    for table in range(num_tables):
        mesh = Mesh(np.asarray(devices[table::num_tables]), (AXIS,))
        layout = Layout("t", local, DIM, 0, mesh.size, True, 1)
        rule = UpdateRule("stochastic_gradient_descent", 0)
        own = team if num_tables == 1 else ThreadTeam(1)
        tables.append(XlaTables(mesh, [TableDefinition(layout, rule, ())], "xla", Dispatcher(own)))
    frames = []
    for _ in range(3):
        blocks = {}
        for table in range(num_tables):
            ids = rng.choice(local, rows // shares, replace=False)
            blocks[str(table)] = (Rows(ids, rng.random((len(ids), DIM), np.float32)),)
        frames.append(Frame(blocks, rows // processes))
    stores = {str(table): TableStore(local, DIM, accumulate=True, mean=False) for table in range(num_tables)}
    pipeline = Pipeline(stores, team)

    def steps() -> None:
        for step in range(num_steps):
            pipeline.add(frames[step % 3])
            for name, (coalesced,) in pipeline.drain().items():
                tables[int(name)].apply([(0, coalesced.summed, 0.1)])
        for table in tables:
            table.wait()

    steps()  # compiles
    print("done", flush=True)
    for _ in sys.stdin:
        steps()
        print("done", flush=True)


if __name__ == "__main__":
    main()
