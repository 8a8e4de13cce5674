"""What does saving cost the steps meanwhile: time per frame, and memory in addition to the tables?

One table with Adagrad's slot (--gb of weights and slots, dim 64) takes frames of --frame-rows rows (zipf 1.1 over all
ids, num_required 1, so every frame is a step), first --frames without a checkpoint, then until a base of the whole
table and two deltas are on disk; each commit begins as soon as the previous one is complete. The output is the median,
the 99th percentile and the maximum time of a frame of both runs, and how much RssAnon grew over the peak of the first
run (sampled every 20 ms; the page cache does not count). The last commit of a run, which the run waits for, is not a
step and is reported separately. Linux only.

    python bench/experiments/checkpoint.py --gb 2
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa

import penstock as ps
from penstock.checkpoint.store import Folder

DIM, PARTS = 64, 2


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    arguments.add_argument("--gb", type=float, default=2.0, help="of weights and slots")
    arguments.add_argument("--frame-rows", type=int, default=20_000)
    arguments.add_argument("--frames", type=int, default=300, help="of the run without a checkpoint")
    arguments.add_argument("--dir", type=Path, help="where to save (default: a temporary folder)")
    args = arguments.parse_args()
    num_rows = int(args.gb * 1e9 / (4 * DIM * PARTS))
    table = ps.TableConfig(num_rows, DIM, name="t", initializer=ps.Constant(0.5), optimizer=ps.Adagrad(0.1))
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    print(f"machine   {platform.machine()}, {os.cpu_count()} CPUs; jax {jax.__version__}, numpy {np.__version__}")
    print(
        f"table     {num_rows:,} × {DIM}, {num_rows * 4 * DIM * PARTS / 1e9:.2f} GB; frames of {args.frame_rows:,} rows"
    )
    batches = frames(num_rows, args.frame_rows)
    engine.run(batches[:20])  # compiles the programs
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        engine.apply({"t": (np.arange(9), np.zeros((9, DIM), np.float32))})
        without, memory, _ = measure(engine, repeated(batches, args.frames))
        line("without", without)
        place = Path(folder) / "c"
        started = time.perf_counter()
        until = until_three_commits(batches, Folder(place))
        saving, peak, rest_s = measure(engine, until, checkpoint=place, every=1, keep=3)
        line("saving", saving)
        size = sum(file.stat().st_size for file in place.iterdir())
        print(f"p99       {np.quantile(saving, 0.99) / np.quantile(without, 0.99):.2f} times")
        extra = peak - memory
        print(
            f"memory    {extra / 1e6:,.0f} MB beside the tables while saving, {extra / (args.gb * 1e7):.1f} % of them"
        )
        seconds = time.perf_counter() - started
        print(f"commits   {size / 1e9:.2f} GB in {seconds:.0f} s; the last one waited {rest_s:.1f} s")


def line(name: str, seconds: Any) -> None:
    median, high = np.quantile(seconds, [0.5, 0.99]) * 1e3
    longest = max(seconds) * 1e3
    print(f"{name:9} {len(seconds)} frames: median {median:.1f} ms, p99 {high:.1f} ms, longest {longest:.1f} ms")


def frames(num_rows: int, rows: int) -> list[pa.RecordBatch]:
    """Return frames to cycle through."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(20):
        ids = (rng.zipf(1.1, rows).astype(np.uint64) * 2654435761 % num_rows).astype(np.int64)
        values = pa.array(rng.standard_normal(rows * DIM, np.float32))
        gradient = pa.FixedSizeListArray.from_arrays(values, DIM)
        made.append(pa.RecordBatch.from_arrays([pa.array(ids), gradient], ["id", "gradient"]))
    return made


def repeated(batches: list[pa.RecordBatch], num: int) -> Iterator[pa.RecordBatch]:
    for number in range(num):
        yield batches[number % len(batches)]


def until_three_commits(batches: list[pa.RecordBatch], folder: Folder) -> Iterator[pa.RecordBatch]:
    number = 0
    while len(folder.numbers()) < 3:
        yield batches[number % len(batches)]
        number += 1


def measure(engine: ps.Engine, source: Iterator[pa.RecordBatch], **options: Any) -> tuple[Any, int, float]:
    """Return (seconds of every frame, peak RssAnon in bytes, seconds from the last frame to the end of the run)."""
    times, peak, done = [time.perf_counter()], [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], anon_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        engine.run(source, progress=lambda *_: times.append(time.perf_counter()), **options)
    finally:
        done.set()
        sampler.join()
    return np.diff(times)[5:], peak[0], time.perf_counter() - times[-1]


def anon_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


if __name__ == "__main__":
    main()
