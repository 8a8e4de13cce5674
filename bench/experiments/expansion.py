"""How much does it save to sum the gradients of lookups without materializing them?

    python bench/experiments/expansion.py                      speed, then memory: about a minute
    python bench/experiments/expansion.py --dims 64 --no-memory

Speed: 65,536 samples look up 8 ids each with weights, and every id occurs ``--reuse`` times on average (uniform). The
gradients of the samples are in memory, in Arrow's layout. One side multiplies while it sums; the other writes every
lookup's gradient into an array (numpy, one thread: take, then multiply in place) and sums that. Both sum as the engine
does, on one thread and on all, up to the start of the device's step. The sides take turns; in a turn a side runs once
uncounted, to fill the caches, and once counted; medians. Both must return the same bits.

Memory: ``Engine.run`` over one batch of an example stream in a separate process, for two numbers of lookups and two
dims, with constant numbers of ids and samples. The output is the rise of RssAnon from when the batch was ready to its
peak, sampled every 2 ms from outside, next to the size of an array of lookups × dim. Linux only: it reads /proc.

It does not measure the gain of a replay: reading and the optimizer's step are additional, and equal for both.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import penstock as ps
from penstock.frames import Rows
from penstock.pipeline import TableStore
from penstock.pyx.frame_accumulate import Intake
from penstock.threads import ThreadTeam

SAMPLES, PER_SAMPLE = 1 << 16, 8
IDS = 1 << 14  # of the memory measurement


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    arguments.add_argument("--dims", type=lambda text: [int(d) for d in text.split(",")], default=[32, 64, 128])
    arguments.add_argument("--reuse", type=lambda text: [int(r) for r in text.split(",")], default=[4, 16])
    arguments.add_argument(
        "--threads", type=lambda text: [int(t) for t in text.split(",")], default=[1, os.cpu_count()]
    )
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--no-memory", action="store_true")
    arguments.add_argument("--child", nargs=2, type=int, metavar=("LOOKUPS", "DIM"), help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.child:
        child(*given.child)
        return 0
    print(f"{platform.machine()}, {os.cpu_count()} CPUs: {processor()}; numpy {np.__version__}\n")
    print("| threads | dim | reuse | written out, ms | summed at once, ms | times |\n|---|---|---|---|---|---|")
    for threads, dim, reuse in itertools.product(given.threads, given.dims, given.reuse):
        written, fused = speed(dim, reuse, threads, given.rounds)
        print(f"| {threads} | {dim} | {reuse} | {written:.1f} | {fused:.1f} | {written / fused:.1f} |", flush=True)
    if not given.no_memory:
        print("\n| lookups | dim | RssAnon rises by, MB | lookups × dim, MB |\n|---|---|---|---|")
        for lookups in (1 << 19, 1 << 21):
            for dim in (32, 128):
                print(f"| {lookups} | {dim} | {rise(lookups, dim):.0f} | {lookups * dim * 4 / 1e6:.0f} |", flush=True)
    return 0


def speed(dim: int, reuse: int, threads: int, rounds: int) -> tuple[float, float]:
    """Return the median milliseconds of materializing and summing, and of summing directly."""
    rng, lookups = np.random.default_rng(0), SAMPLES * PER_SAMPLE
    vocabulary = lookups // reuse
    ids, samples = rng.integers(0, vocabulary, lookups), np.repeat(np.arange(SAMPLES), PER_SAMPLE)
    gradients, gains = rng.standard_normal((SAMPLES, dim), np.float32), rng.random(lookups, np.float32)
    store, team = TableStore(vocabulary, dim, accumulate=True, mean=True), ThreadTeam(threads)
    intake = Intake()

    def summed(rows: Rows) -> Any:
        intake.begin([store.accumulator], [[rows]], 0, [1 << threads.bit_length() - 1])
        team.run([intake.work] * intake.add())
        intake.end()
        return store.drain()[0].parts

    def written() -> Any:
        rows = np.take(gradients, samples, axis=0)
        rows *= gains[:, None]
        return summed(Rows(ids, rows))

    def fused() -> Any:
        return summed(Rows(ids, gradients, samples, gains))

    if [sums.tobytes() for _, sums in written()] != [sums.tobytes() for _, sums in fused()]:
        raise SystemExit("the two sides have different bits")
    times = [(turn(written), turn(fused)) for _ in range(rounds)]
    return statistics.median(w for w, _ in times), statistics.median(f for _, f in times)


def turn(work: Callable[[], Any]) -> float:
    """Return the milliseconds of the second of two runs."""
    work()
    began = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - began)


def child(lookups: int, dim: int) -> None:
    """Create a batch, print "ready", and run it after a line on stdin."""
    rng = np.random.default_rng(0)
    ends = pa.array(np.arange(0, lookups + 1, lookups // SAMPLES, dtype=np.int32))
    column = pa.StructArray.from_arrays(
        [
            pa.ListArray.from_arrays(ends, pa.array(rng.integers(0, IDS, lookups))),
            pa.ListArray.from_arrays(ends, pa.array(rng.random(lookups, np.float32))),
            pa.FixedSizeListArray.from_arrays(rng.standard_normal(SAMPLES * dim, np.float32), dim),
        ],
        ["ids", "weights", "gradient"],
    )
    batch = pa.record_batch({"clicked": column})
    table = ps.TableConfig(IDS, dim, name="t", combiner="mean")
    config = ps.EmbeddingConfig.from_features([ps.FeatureConfig(table, name="clicked")], 1, ps.SGD(0.1))
    engine = ps.Engine(config)
    engine.run([batch.slice(0, 64)])  # compiles and loads everything
    print("ready", flush=True)
    sys.stdin.readline()
    report = engine.run([batch])
    print(report.rows, flush=True)


def rise(lookups: int, dim: int) -> float:
    """Return the megabytes by which the child's anonymous memory rises while it runs its batch."""
    command = [sys.executable, __file__, "--child", str(lookups), str(dim)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        before = peak = anonymous(process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        while process.poll() is None:
            peak = max(peak, anonymous(process.pid))
            time.sleep(0.002)
        if process.stdout.read().strip() != str(lookups):
            raise SystemExit("the child did not apply its batch")
    return (peak - before) / 1e6


def anonymous(pid: int) -> int:
    """Return RssAnon in bytes; 0 if the process has exited."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "")


if __name__ == "__main__":
    sys.exit(main())
