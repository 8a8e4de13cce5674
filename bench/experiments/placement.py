"""What does a step cost by where its rows lie? Runs on any machine.

The workloads w1 to w4 with Adagrad, each by five engines in turns: the CPU engine (one host device), all tables with
the placement HOST on eight host devices, the same tables sharded over these devices, and CACHED on one device with room
for all rows, and for a share of them. The first two keep the rows of a table in one place, so their ratio is the cost
of the placement HOST. The fourth moves nothing once its rows are there, so its ratio to the first is the cost of
deciding what moves; the last also shows the bytes that a step moves. It cannot say how long a step takes next to an
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
    """An engine of a workload.

    where : the placement of all tables; cached : of CACHED, the share of rows with room, and the look-ahead
    moved_bytes : of a step of the last run, if cached
    """

    def __init__(
        self,
        workload: Workload,
        steps: Sequence[Step],
        num_devices: int,
        where: str = "DEVICE",
        cached: tuple[float, int] = (0, 0),
    ) -> None:
        config = config_of(workload, "adagrad")
        message = config.to_engine_proto()
        for settings in message.table:
            settings.placement.where = where
            if where == "CACHED":
                spec = config.table(settings.name)
                settings.placement.device_bytes = int(cached[0] * spec.vocabulary_size) * spec.row_bytes
                settings.placement.look_ahead = cached[1]
        mesh = Mesh(np.asarray(jax.devices()[:num_devices]), ("shard",))
        self.engine = Engine(EmbeddingConfig.from_proto(message), mesh)
        self._steps, self._rows, self.moved_bytes = steps, workload.rows, 0.0

    def prepare(self, steps: Sequence[int]) -> None:
        pass

    def run(self, steps: Sequence[int]) -> None:
        report = self.engine.run(list(batches_of(self._steps, steps)), contribution_rows=self._rows)
        moved = [table.cache.bytes for table in report.tables.values() if table.cache is not None]
        self.moved_bytes = sum(moved) / max(1, report.steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of the vocabularies")
    parser.add_argument("--rows", type=int, default=1 << 20, help="of a step")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cached", type=float, default=0.1, help="the share of rows that have room on the device")
    parser.add_argument("--look-ahead", type=int, default=4, help="openings that cached tables look ahead")
    args = parser.parse_args()
    devices, worst = len(jax.devices()), 0.0
    head = ["workload", "CPU engine", f"HOST on {devices} devices", "sharded over them", "CACHED, all"]
    head += [f"CACHED, {args.cached:.0%}", "HOST / CPU", "CACHED, all / CPU", "moved per step"]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    for name in WORKLOADS:
        workload = make(name, args.rows, args.scale)
        steps = workload.steps()
        sides = {
            "cpu": Placed(workload, steps, 1),
            "host": Placed(workload, steps, devices, "HOST"),
            "sharded": Placed(workload, steps, devices),
            "all": Placed(workload, steps, 1, "CACHED", (1.0, args.look_ahead)),
            "some": Placed(workload, steps, 1, "CACHED", (args.cached, args.look_ahead)),
        }
        ms = {side: of.median_ms for side, of in take_turns(sides, len(steps), args.rounds).items()}
        worst = max(worst, ms["host"] / ms["cpu"])
        times = " | ".join(f"{ms[side]:.1f} ms" for side in sides)
        ratios = f"{ms['host'] / ms['cpu']:.3f} | {ms['all'] / ms['cpu']:.3f}"
        print(f"| {name} | {times} | {ratios} | {sides['some'].moved_bytes / 1e6:.1f} MB |", flush=True)
    return 0 if worst <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
