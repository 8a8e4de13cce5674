"""What do deltas cost? The same steps through ``Engine.run`` and through ``Engine.stage``, and the size of the deltas.

One table of 2^20 rows of dim 32, Adagrad; steps of 2^16 rows with zipf ids, in memory; with validation. Each way has a
separate engine, which has run two steps before; the best of several turns. Deltas are read and dropped.

    python bench/experiments/stage.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

import penstock as ps

ROWS, DIM, VOCABULARY, STEPS, TURNS = 1 << 16, 32, 1 << 20, 12, 5

WAYS: dict[str, dict[str, Any] | None] = {
    "run": None,
    "stage": {},
    "stage, numbered": {"numbered": True},
    "stage, numbered, slots": {"numbered": True, "slots": True},
    "stage, numbered, per 12 steps": {"numbered": True, "per_steps": STEPS},
}


def main() -> None:
    config = ps.EmbeddingConfig.from_tables([ps.TableConfig(VOCABULARY, DIM, name="t")], ps.Adagrad(0.1))
    print(f"{STEPS} steps of {ROWS:,} rows, dim {DIM}; best of {TURNS}")
    for name, arguments in WAYS.items():
        engine, rng = ps.Engine(config), np.random.default_rng(0)
        engine.run([batch(rng) for _ in range(2)])
        frames = [batch(rng) for _ in range(STEPS)]
        seconds, out = best_of(lambda e=engine, f=frames, a=arguments: once(e, f, a))  # type: ignore[misc]
        rows, num_bytes = out
        print(
            f"{name:32} {seconds / STEPS * 1e3:6.2f} ms a step, {STEPS * ROWS / seconds / 1e6:5.1f} M gradient rows/s; "
            f"{rows / STEPS:8,.0f} rows and {num_bytes / STEPS / 1e6:5.2f} MB of deltas a step"
        )


def once(engine: ps.Engine, frames: list[pa.RecordBatch], arguments: dict[str, Any] | None) -> tuple[int, int]:
    """Run the steps once; return the rows and bytes of the deltas."""
    if arguments is None:
        engine.run(frames)
        return 0, 0
    rows = num_bytes = 0
    for delta in engine.stage(frames, **arguments):
        rows, num_bytes = rows + delta.num_rows, num_bytes + delta.nbytes
    return rows, num_bytes


def best_of(call: Callable[[], tuple[int, int]]) -> tuple[float, tuple[int, int]]:
    best, out = float("inf"), (0, 0)
    for _ in range(TURNS):
        started = time.perf_counter()
        out = call()
        best = min(best, time.perf_counter() - started)
    return best, out


def batch(rng: np.random.Generator) -> pa.RecordBatch:
    gradients = rng.standard_normal(ROWS * DIM, np.float32)
    return pa.record_batch(
        {
            "id": pa.array(rng.zipf(1.05, ROWS) % VOCABULARY),
            "gradient": pa.FixedSizeListArray.from_arrays(pa.array(gradients), DIM),
        }
    )


if __name__ == "__main__":
    main()
