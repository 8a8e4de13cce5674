"""How many rows per second the host sums and lays out for devices, of two checkouts in turns.

A step is a frame of 131,072 rows of a table of 10,000,000, on 8 devices: each row that it updates occurs once, or three
times. Its rows are summed by the pipeline ("sums"), then routed and packed by the tables, whose programs do nothing
here ("layout"), one after the other. The devices are only numbers: on a CPU their work would take the same cores.

    python bench/feed_rates.py [--base CHECKOUT] [--rounds 15] [--only pallas,32]

CHECKOUT is another working tree of penstock, compiled, with its ``build/tree``: both sides take turns, each in a
separate process. Prints the best of all rounds in millions of distinct rows per second; gains are of the best, and of
the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROWS, VOCABULARY, DEVICES, FRAMES = 131_072, 10_000_000, 8, 3
HERE = Path(__file__).parents[1]
CASES = [
    {"variant": variant, "dim": dim, "threads": threads, "uses": uses}
    for variant in ("sparsecore", "pallas")
    for dim in (32, 128)
    for threads in (1, 2)
    for uses in (1, 3)
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, help="another checkout to compare with")
    parser.add_argument("--rounds", type=int, default=15, help="per case")
    parser.add_argument("--only", help="the cases whose variant, dim, threads and uses begin so")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    sides = [Checkout(folder) for folder in ([args.base] if args.base else []) + [HERE]]
    print("| variant | dim | threads | uses | sums | layout | together |" + " gain |" * bool(args.base))
    print("|---" * (7 + bool(args.base)) + "|")
    for case in CASES:
        if args.only and not ",".join(map(str, case.values())).startswith(args.only):
            continue
        print(f"| {' | '.join(map(str, case.values()))} | {' | '.join(cells(case, sides, args.rounds))} |", flush=True)


def cells(case: dict[str, Any], sides: Sequence[Checkout], rounds: int) -> Iterator[str]:
    """Yield the rates of sums, layout and both, one side → another, and the gain."""
    times: list[list[tuple[float, float]]] = [[] for _ in sides]
    for number in range(rounds):
        for side in range(len(sides)) if number % 2 else reversed(range(len(sides))):
            times[side] += sides[side].ask(case)
    both = [[sums + layout for sums, layout in side_times] for side_times in times]
    parts = ([[seconds[part] for seconds in side_times] for side_times in times] for part in (0, 1))
    for measured in (*parts, both):
        yield " → ".join(f"{ROWS / case['uses'] / min(seconds) / 1e6:.1f}" for seconds in measured)
    if len(sides) > 1:
        yield f"{min(both[0]) / min(both[1]):.2f}, {statistics.median(both[0]) / statistics.median(both[1]):.2f}"


class Checkout:
    """A process that runs the code of a checkout."""

    def __init__(self, folder: Path) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(folder / "build" / "tree"),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
            "JAX_PLATFORMS": "cpu",
        }
        command = [sys.executable, __file__, "--serve"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, case: dict[str, Any]) -> list[tuple[float, float]]:
        """Return the seconds of sums and layout of a few steps."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(case), file=self._process.stdin, flush=True)
        times: list[tuple[float, float]] = json.loads(self._process.stdout.readline())
        return times


def serve() -> None:
    """Run the steps of each case that is asked for."""
    feeder, last = None, None
    for line in sys.stdin:
        if line != last:
            feeder, last = Feeder(**json.loads(line)), line
            feeder.steps()  # memory is touched
        assert feeder is not None
        print(json.dumps(feeder.steps()), flush=True)


class Feeder:
    """The host's side of steps over a table whose programs do nothing."""

    def __init__(self, variant: str, dim: int, threads: int, uses: int) -> None:
        import jax
        import numpy as np
        from jax.sharding import Mesh

        from penstock.base.threads import ThreadTeam
        from penstock.core.pipeline import Pipeline, TableStore
        from penstock.model.frames import Frame, Rows
        from penstock.model.updates import UpdateRule
        from penstock.rows.bridge.backends import formatted
        from penstock.rows.bridge.devices import AXIS
        from penstock.rows.bridge.dispatcher import Dispatcher
        from penstock.rows.bridge.sharding import Layout, TableDefinition
        from penstock.rows.bridge.xla_tables import XlaTables

        rng, team = np.random.default_rng(0), ThreadTeam(threads)
        self._frames = []
        for _ in range(FRAMES):
            ids = rng.choice(VOCABULARY, ROWS // uses, replace=False, shuffle=False)
            ids = rng.permutation(np.repeat(ids, uses))
            rows = Rows(ids, rng.random((len(ids), dim), np.float32))
            self._frames.append(Frame({"t": (rows,)}, len(ids)))
        self._pipeline = Pipeline({"t": TableStore(VOCABULARY, dim, accumulate=True, mean=False)}, team)
        mesh = Mesh(np.asarray(jax.devices()), (AXIS,))
        layout = formatted(Layout("t", VOCABULARY, dim, 1, DEVICES, True, 128), variant)
        definition = TableDefinition(layout, UpdateRule("adagrad", 1), (0.1,))
        fence = jax.numpy.zeros(1)
        self._tables = XlaTables(mesh, [definition], variant, Dispatcher(team), arrays=(fence,))
        vars(self._tables).update(_num_watched=99, _program=lambda *_: lambda arrays, *arguments: (arrays, fence))
        self._step = SimpleNamespace(number=0)

    def steps(self) -> list[tuple[float, float]]:
        times = []
        for frame in self._frames:
            began = time.perf_counter()
            self._pipeline.add(frame)
            (coalesced,) = self._pipeline.drain()["t"]
            summed = time.perf_counter()
            self._tables.apply([(0, coalesced.summed, 0.1)])
            self._tables.wait()
            times.append((summed - began, time.perf_counter() - summed))
        return times


if __name__ == "__main__":
    main()
