"""What does a forward pass cost the host, and how much of it is the combining of rows?

    python bench/experiments/activations.py
    python bench/experiments/activations.py --samples 8192 --dim 64

One table of a million rows and one feature. "recv" is Engine.recv_activations of one batch, "send" its send_gradients,
"combine" the part of recv that sums looked-up rows into activations, "add.at" the same by NumPy's definition.
Batches are uniform ids: one per sample, or 0 to 16 as an Arrow list array, then with weights and combiner mean.
Milliseconds, median and minimum; all sides take turns. combine and add.at must return the same bits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

import penstock as ps
from penstock.activations.combiners import combine, gains

VOCABULARY = 1 << 20


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    arguments.add_argument("--samples", type=int, default=2048)
    arguments.add_argument("--dim", type=int, default=32)
    arguments.add_argument("--rounds", type=int, default=200)
    given = arguments.parse_args()
    rng = np.random.default_rng(0)
    print(f"{'ids':>20}" + "".join(f"{side:>17}" for side in ("recv", "send", "combine", "add.at")))
    for what in ("one per sample", "0 to 16", "0 to 16, weighted"):
        times = measured(rng, what, given.samples, given.dim, given.rounds)
        print(f"{what:>20}" + "".join(f"{1e3 * statistics.median(t):9.3f}{1e3 * min(t):8.3f}" for t in times))
    return 0


def measured(rng: np.random.Generator, what: str, num_samples: int, dim: int, rounds: int) -> list[list[float]]:
    """Return the seconds of recv, send, combine and add.at."""
    table = ps.TableConfig(VOCABULARY, dim, name="t", combiner="mean" if "weighted" in what else "sum")
    engine = ps.Engine(ps.EmbeddingConfig.from_features([ps.FeatureConfig(table)], num_samples, ps.Adagrad(0.1)))
    lengths = np.ones(num_samples, int) if what == "one per sample" else rng.integers(0, 17, num_samples)
    ids, values = rng.integers(0, VOCABULARY, lengths.sum()), rng.random(lengths.sum(), np.float32)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    batch: Any = [ids] if what == "one per sample" else [pa.ListArray.from_arrays(pa.array(ends), pa.array(ids))]
    weights = [pa.ListArray.from_arrays(pa.array(ends), pa.array(values))] if "weighted" in what else None
    samples = np.repeat(np.arange(num_samples), lengths)
    by = None if weights is None else gains(samples, values, num_samples, "mean")
    unique, which = np.unique(ids, return_inverse=True)
    rows, gradient = engine.lookup("t", unique), np.ones((num_samples, dim), np.float32)
    times: list[list[float]] = [[], [], [], []]
    for _ in range(rounds):
        (_, dedup) = timed(times[0], lambda: engine.recv_activations(batch, weights))
        timed(times[1], lambda of=dedup: engine.send_gradients([gradient], deduplication_data=of))
        ours = timed(times[2], lambda: combine(rows, samples, by, num_samples, which))
        theirs = timed(times[3], lambda: defined(rows[which], samples, by, num_samples))
        assert ours.tobytes() == theirs.tobytes()
    return times


def defined(rows: Any, samples: Any, by: Any, num_samples: int) -> Any:
    out = np.zeros((num_samples, rows.shape[1]), np.float32)
    np.add.at(out, samples, rows if by is None else rows * by[:, None])
    return out


def timed(into: list[float], run: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    found = run()
    into.append(time.perf_counter() - start)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
