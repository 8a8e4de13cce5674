"""A fresh interpreter for one workload and number of threads: ``python -m penstock.bench.child FD``, started by runner.

It reads its order from stdin (JSON), and writes events to the file descriptor FD (a JSON object per line): ``begin``
names the next attempt, so that the parent knows which one killed the process; ``case`` is a result. Libraries may print
anything to stdout and stderr. The process is pinned to its CPUs before it imports anything that starts threads.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from penstock.bench import machine


def main() -> int:
    order = json.load(sys.stdin)
    machine.settle(order["threads"])
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as events:

        def say(event: str, **values: Any) -> None:
            print(json.dumps({"event": event, **values}), file=events, flush=True)

        measure(order, say)
        say("done")
    return 0


def measure(order: dict[str, Any], say: Any) -> None:
    """Measure all points of the order, one after the other."""
    import jax
    import pyarrow as pa

    from penstock.bench import compare, roofline
    from penstock.bench.cases import Sizes, points

    jax.config.update("jax_num_cpu_devices", 1)
    pa.set_cpu_count(order["threads"])
    pa.set_io_thread_count(max(1, order["threads"]))
    ways = load_ways(order, say)
    sizes = Sizes(**order["sizes"])
    settings = compare.Settings(order["threads"], order["rounds"], ways, say, sizes.short)
    candidates = [p for case in order["cases"] for p in points(case, sizes, order["cpus"])]
    ordered = [p for p in candidates if [p.case, p.x] in order["points"]]
    current: tuple[Any, list[Any], roofline.Rates | None] = (None, [], None)
    for point in ordered:
        say("begin", case=point.case, x=point.x, side="penstock")
        # The cases of w1 to w4 share their steps; every growth point draws new ones.
        key = (point.workload.name, point.x)
        if current[0] != key:
            current = (None, [], None)
            steps = point.workload.steps()
            kinds = compare.kinds_with_limits([p for p in ordered if (p.workload.name, p.x) == key])
            rates = roofline.measure(point.workload, kinds, order["threads"], machine.free_bytes()) if kinds else None
            current = (key, steps, rates)
        say("case", result=compare.measure(point, current[1], current[2], settings))


def load_ways(order: dict[str, Any], say: Any) -> list[Any]:
    """Return the ways of the peers; report and skip a library that cannot be loaded."""
    from penstock.bench import peers

    ways = []
    for name in order["peers"]:
        say("begin", side=name)
        try:
            ways += peers.ways(name, order["threads"])
        except Exception as error:
            first = (str(error).strip() or "no message").splitlines()[0]
            say("unusable", peer=name, problem=f"{type(error).__name__}: {first}"[:300])
    return [w for w in ways if (order["slow"] or not w.slow) and w.name not in order["without"]]


if __name__ == "__main__":
    sys.exit(main())
