"""How much faster than TensorFlow's SparseConditionalAccumulator are gradients applied and taken?

64 gradients of 16,384 rows × 32 float32 are applied one after the other, then all are taken at once (MEAN). The ids of
a gradient are distinct and ascending, because TensorFlow merges no others correctly; they are drawn by zipf 1.1 from
1,000,000, so that the gradients share their frequent ids. Both results are first compared bit for bit. Then the two
sides run in turns, and the answer is the ratio of the median seconds.

TensorFlow gets its best case: a graph (its class has no other mode) with the gradients as constants, one session.run
for all 64 applies, chained by control dependencies, and one for the take. So its time includes neither feeding nor
Python; penstock's includes Python. Both sum on one thread.

It does not measure many producers at once, or ids in any order, for which TensorFlow's result differs
(docs/accumulators.md).

    python bench/experiments/accumulators.py            # with TensorFlow installed; without it, penstock only
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps

WANTED = 5.0
VOCABULARY = 1_000_000
ALPHA = 1.1


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    arguments.add_argument("--gradients", type=int, default=64)
    arguments.add_argument("--rows", type=int, default=16_384, help="of each gradient")
    arguments.add_argument("--dim", type=int, default=32)
    arguments.add_argument("--repeats", type=int, default=15)
    arguments.add_argument("--json", action="store_true", help="one JSON object instead of text")
    args = arguments.parse_args()
    gradients = made(args.gradients, args.rows, args.dim)
    distinct = len(np.unique(np.concatenate([ids for ids, _ in gradients])))
    sides = {"penstock": ours(gradients)}
    if importlib.util.find_spec("tensorflow"):
        sides["tensorflow"] = theirs(gradients)
        check(sides, args.gradients)
    found = in_turns(sides, args.repeats)
    report: dict[str, Any] = {
        **machine(),
        "sizes": f"{args.gradients} gradients of {args.rows} rows x {args.dim}, zipf {ALPHA} of {VOCABULARY}, "
        f"{distinct} distinct ids",
        "seconds": found,
    }
    if len(sides) == 2:
        ratios = [theirs / ours for ours, theirs in zip(found["penstock"], found["tensorflow"], strict=True)]
        report["ratio"] = statistics.median(found["tensorflow"]) / statistics.median(found["penstock"])
        report["ratio_of_least"] = min(found["tensorflow"]) / min(found["penstock"])
        report["ratio_of_pairs"] = [min(ratios), max(ratios)]
    if args.json:
        print(json.dumps(report))
    else:
        tell(report)
    return int(report.get("ratio", WANTED) < WANTED)


def made(num: int, rows: int, dim: int) -> list[tuple[Any, Any]]:
    """Return (ids int64 (rows,) ascending and distinct, values float32 (rows, dim)), deterministic by the sizes."""
    rng = np.random.default_rng(11)
    share = np.cumsum(np.arange(1, VOCABULARY + 1) ** -ALPHA)
    gradients = []
    for _ in range(num):
        ids = np.empty(0, np.int64)
        while len(ids) < rows:
            more = np.searchsorted(share, rng.random(rows) * share[-1])
            ids = np.unique(np.concatenate([ids, np.minimum(more, VOCABULARY - 1)]))
        ids = np.sort(rng.choice(ids, rows, replace=False))
        gradients.append((ids, rng.standard_normal((rows, dim), np.float32)))
    return gradients


def ours(gradients: list[tuple[Any, Any]]) -> Any:
    """Return a callable that applies all gradients, takes, and returns (indices, values)."""
    acc = ps.SparseConditionalAccumulator("float32", (VOCABULARY, gradients[0][1].shape[1]))

    def once() -> tuple[Any, Any]:
        for ids, values in gradients:
            acc.apply_gradient(ids, values, acc.global_step)
        taken = acc.take_gradient(len(gradients))
        return taken.indices, taken.values

    return once


def theirs(gradients: list[tuple[Any, Any]]) -> Any:
    """Return the same callable for TensorFlow, in graph mode."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    graph = tf.Graph()
    with graph.as_default():
        acc = tf.compat.v1.SparseConditionalAccumulator(tf.float32, shape=(VOCABULARY, gradients[0][1].shape[1]))
        before: list[Any] = []
        for ids, values in gradients:
            with tf.control_dependencies(before):
                # A step far in the future is never stale.
                applied = acc.apply_grad(tf.constant(ids), tf.constant(values), local_step=2**62)
                before = [applied]
        take = acc.take_indexed_slices_grad(len(gradients))
        fetch = take.indices, take.values
    session = tf.compat.v1.Session(graph=graph)

    def once() -> tuple[Any, Any]:
        session.run(applied)
        return session.run(fetch)

    return once


def check(sides: dict[str, Any], num: int) -> None:
    (ids, values), (their_ids, their_values) = (once() for once in sides.values())
    if ids.tobytes() != their_ids.tobytes() or values.tobytes() != their_values.tobytes():
        raise SystemExit(f"accumulators.py: the results of {num} gradients differ; nothing was measured")


def in_turns(sides: dict[str, Any], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every repetition, by side."""
    for once in sides.values():
        once()
    found: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, once in sides.items():
            started = time.perf_counter()
            once()
            found[name].append(time.perf_counter() - started)
    return found


def tell(report: dict[str, Any]) -> None:
    for name in ("machine", "versions", "date", "sizes"):
        print(f"{name:9} {report[name]}")
    print(f"\n{'':12} {'median s':>9} {'least s':>9} {'most s':>9}")
    for name, seconds in report["seconds"].items():
        print(f"{name:12} {statistics.median(seconds):9.4f} {min(seconds):9.4f} {max(seconds):9.4f}")
    if "ratio" in report:
        low, high = report["ratio_of_pairs"]
        print(
            f"\nresults equal bit for bit; ratio of medians {report['ratio']:.1f} (of the least "
            f"{report['ratio_of_least']:.1f}, of pairs {low:.1f} to {high:.1f}), ",
            end="",
        )
        print(f"wanted {WANTED:g}: {'reached' if report['ratio'] >= WANTED else 'MISSED'}")
    else:
        print("\nTensorFlow is not installed here: nothing to compare with")


def machine() -> dict[str, str]:
    """Return the properties of the machine that affect the numbers; nothing that identifies it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    versions = {"penstock": ps.__version__, "numpy": np.__version__}
    if "tensorflow" in sys.modules:
        versions["tensorflow"] = sys.modules["tensorflow"].__version__
    return {
        "machine": f"{platform.machine()}, {model}, {os.cpu_count()} CPUs",
        "versions": f"Python {platform.python_version()}, " + ", ".join(f"{n} {v}" for n, v in versions.items()),
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    sys.exit(main())
