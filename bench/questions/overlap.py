"""Does the host work while the device does? Writes a trace of a few steps for Perfetto, and says how much overlaps.

    python bench/questions/overlap.py DIR [--variant xla] [--steps 20] [--rows 200000]

The trace is DIR/plugins/profile/*/perfetto_trace.json.gz: open it at ui.perfetto.dev. Three rows matter: "coalesce" on
the caller's thread, "dispatch" on penstock's, and the device's own (on a CPU: XLA's threads).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import numpy as np


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--variant", default="xla", help="ffi has nothing to overlap: the caller runs the step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rows", type=int, default=200_000, help="gradient rows per step")
    args = parser.parse_args()
    os.environ["PENSTOCK_VARIANT"] = args.variant
    import jax

    import penstock as ps
    from penstock.bridge.staging import Dispatcher

    config = ps.EmbeddingConfig.from_tables([ps.TableConfig(100_000, 32, name="t")], ps.Adagrad(0.1))
    engine = ps.Engine(config)
    rng = np.random.default_rng(0)
    frames = [
        (rng.zipf(1.2, args.rows) % 100_000, rng.standard_normal((args.rows, 32), np.float32))
        for _ in range(args.steps)
    ]
    engine.apply({"t": frames[0]})
    engine.state_hash()
    spent = {"coalesce": 0.0, "dispatch": 0.0}
    plain = Dispatcher._unless_failed

    def watched(self, reader, work):  # type: ignore[no-untyped-def]
        began = time.perf_counter()
        with jax.profiler.TraceAnnotation("dispatch"):
            plain(self, reader, work)
        spent["dispatch"] += time.perf_counter() - began

    Dispatcher._unless_failed = watched  # type: ignore[method-assign]
    with jax.profiler.trace(str(args.directory), create_perfetto_trace=True):
        began = time.perf_counter()
        for frame in frames:
            called = time.perf_counter()
            with jax.profiler.TraceAnnotation("coalesce"):
                engine.apply({"t": frame})
            spent["coalesce"] += time.perf_counter() - called
        engine.lookup("t", [0])
        seconds = time.perf_counter() - began
    print(f"{args.steps} steps in {seconds:.2f} s; the caller was busy {spent['coalesce']:.2f} s,", end=" ")
    print(f"the dispatching thread {spent['dispatch']:.2f} s: {sum(spent.values()) / seconds:.2f} of them at a time")
    print(*args.directory.rglob("*.json.gz"), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
