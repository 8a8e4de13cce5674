"""What does a step cost in the host's memory, next to the CPU engine? Runs on any machine.

The workloads w1 to w4 with Adagrad, each by three engines in turns: the CPU engine (one host device), all tables with
the placement HOST on eight host devices, and the same tables sharded over these devices. The first two keep the rows of
a table in one place, so their ratio is the cost of the placement. It cannot say how long a step takes next to an
accelerator.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python bench/experiments/placement.py [--scale 1] [--rounds 9]

The exit code is 1 if HOST takes more than 1.05 times as long as the CPU engine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from penstock.bench.interleave import take_turns
from penstock.bench.penstock_adapter import batches_of, config_of
from penstock.bench.workloads import WORKLOADS, Step, Workload, make
from penstock.config.embedding import EmbeddingConfig
from penstock.engine import Engine

MOST = 1.05


class Placed:
    """An engine of a workload. on_host : whether all tables have the placement HOST"""

    def __init__(self, workload: Workload, steps: Sequence[Step], num_devices: int, on_host: bool) -> None:
        message = config_of(workload, "adagrad").to_engine_proto()
        for settings in message.table:
            settings.placement.where = "HOST" if on_host else "DEVICE"
        mesh = Mesh(np.asarray(jax.devices()[:num_devices]), ("shard",))
        self.engine = Engine(EmbeddingConfig.from_proto(message), mesh)
        self._steps, self._rows = steps, workload.rows

    def prepare(self, steps: Sequence[int]) -> None:
        pass

    def run(self, steps: Sequence[int]) -> None:
        self.engine.run(batches_of(self._steps, steps), contribution_rows=self._rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of the vocabularies")
    parser.add_argument("--rows", type=int, default=1 << 20, help="of a step")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    devices, worst = len(jax.devices()), 0.0
    print(f"| workload | CPU engine | HOST on {devices} devices | sharded over them | HOST / CPU |")
    print("|---|---|---|---|---|")
    for name in WORKLOADS:
        workload = make(name, args.rows, args.scale)
        steps = workload.steps()
        sides = {
            "cpu": Placed(workload, steps, 1, False),
            "host": Placed(workload, steps, devices, True),
            "sharded": Placed(workload, steps, devices, False),
        }
        ms = {side: of.median_ms for side, of in take_turns(sides, len(steps), args.rounds).items()}
        worst = max(worst, ms["host"] / ms["cpu"])
        times = " | ".join(f"{ms[side]:.1f} ms" for side in sides)
        print(f"| {name} | {times} | {ms['host'] / ms['cpu']:.3f} |", flush=True)
    return 0 if worst <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
