"""What a job on a Ray cluster costs: rows/s beside one process, bytes on the wire, and time per block and frame.

    PYTHONPATH=build/tree build/neighbours/bin/python bench/experiments/cluster_costs.py

The rows are those of W1 in the bench: Zipf 1.1 over 10 million ids of one table of dim 32, Adagrad, a frame per step.
Logs are files. Rates are measured while all actors work: after the first frames, and before the last ones. Next to
rows per second stand rows per second of CPU time, of all processes that carry gradients: noise changes them less.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.bench.penstock_adapter import config_of
from penstock.bench.workloads import Workload, make
from penstock.config.embedding import EmbeddingConfig
from penstock.engine import Engine
from penstock.frames import Frame
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.io.log import LogWriter
from penstock.ray import Job
from penstock.routing import Router, frames_of

OWNERS = (1, 2, 4, 16, 64, 256)
# Rates are measured between two numbers of rows: when all actors work, and before readers have nothing left to do.
Between = tuple[int, int]


def logs_of(workload: Workload, folder: Path, num_frames: int, num_sources: int = 2) -> list[str]:
    """Write logs of so many frames each; return their paths."""
    steps, paths = workload.steps(), []
    for source in range(num_sources):
        path = folder / f"{workload.name}-{workload.rows}-{source}.arrows"
        with open(path, "wb") as file:
            batches = [batch for n in range(num_frames) for batch in steps[(n + source) % len(steps)].batches]
            log = LogWriter(file, batches[0].schema)
            for batch in batches:
                log.write(batch)
            log.close()
        paths.append(str(path))
    return paths


def one_process(
    config: EmbeddingConfig, logs: list[str], rows: int, threads: int, between: Between
) -> tuple[float, float]:
    """Return rows/s of one process, and rows per second of CPU time."""
    engine, seen = Engine(config, threads=threads), Seen(time.process_time)
    engine.run(logs, merge="round", contribution_rows=rows, progress=lambda counters, *_: seen.saw(counters.rows))
    return seen.rates(*between)


def job(
    config: EmbeddingConfig, logs: list[str], rows: int, shares: int, between: Between, **options: Any
) -> tuple[float, float]:
    """Return what ``one_process`` does of a job."""
    import ray

    made = Job(config, logs, shares=shares, contribution_rows=rows, state_hash=False, **options)

    def used_s() -> float:
        actors = (*made.actors.readers, *made.actors.owners)
        return sum(ray.get([actor.__ray_call__.remote(lambda _: time.process_time()) for actor in actors]))

    seen = Seen(used_s)
    made.progress = lambda counters, _: seen.saw(counters.rows)
    made.run()
    return seen.rates(*between)


class Seen:
    """Numbers of rows, when they were applied, and the CPU time until then. used_s : of all processes"""

    def __init__(self, used_s: Callable[[], float]) -> None:
        self._used_s = used_s
        self._seen: list[tuple[int, float, float]] = []

    def saw(self, rows: int) -> None:
        if not self._seen or rows > self._seen[-1][0]:
            self._seen.append((rows, time.perf_counter(), self._used_s()))

    def rates(self, first: int, last: int) -> tuple[float, float]:
        """Return rows/s, and rows per second of CPU time, between two numbers of rows."""
        first, last = (next(of for of in self._seen if of[0] >= rows) for rows in (first, last))
        num_rows = last[0] - first[0]
        return num_rows / (last[1] - first[1]), num_rows / (last[2] - first[2])


def wire(config: EmbeddingConfig, logs: list[str], rows: int, count: int = 2) -> dict[str, float]:
    """Return the bytes that travel per gradient row, raw and summed; and the distinct ids per row."""
    found: dict[str, float] = {}
    for what, sums in (("raw", False), ("summed", True)):
        router, frames = Router(config, count, sums=sums), read(config, logs, rows, 3)
        num_rows = sum(frame.num_rows for frame in frames)
        batches = router.block(list(enumerate(frames))).batches
        found[f"{what}_bytes_per_row"] = sum(batch.nbytes for batch in batches) / num_rows
        found[f"{what}_rows_per_row"] = sum(batch.num_rows for batch in batches) / num_rows
    return found


def routing(config: EmbeddingConfig, frames: list[Frame]) -> list[dict[str, float]]:
    """Return µs of CPU time per frame to route and to unpack, and bytes of the heads, by number of owners."""
    found, dims = [], {spec.name: spec.dim for spec in config.tables}
    for count in OWNERS:
        router, numbered = Router(config, count), list(enumerate(frames))
        router.block(numbered)
        began = time.thread_time()
        block = router.block(numbered)
        routed = time.thread_time()
        list(frames_of(block.heads, block.batches[0], dims))
        unpacked = time.thread_time()
        found.append(
            {
                "owners": count,
                "route_us_per_frame": 1e6 * (routed - began) / len(frames),
                "unpack_us_per_frame_and_owner": 1e6 * (unpacked - routed) / len(frames),
                "head_bytes_per_frame": len(pickle.dumps(block.heads)) / len(frames),
            }
        )
    return found


def per_block(config: EmbeddingConfig, logs: list[str], rows: int, frames: int, shares: int) -> float:
    """Return µs per block of one frame, almost without rows: what Ray and the driver cost."""
    began = time.perf_counter()
    rate, _ = job(
        config, logs, rows, shares, (rows * frames // 4, rows * frames * 3 // 4), rounds_per_block=1, readers=1
    )
    print(f"{shares} shares: {frames} blocks, {time.perf_counter() - began:.1f} s with the start", file=sys.stderr)
    return 1e6 * rows / rate


def read(config: EmbeddingConfig, logs: list[str], rows: int, most: int) -> list[Frame]:
    options = ReadOptions(config.id_ranges, contribution_rows=rows)
    return [frame.audited() for _, frame in zip(range(most), FrameReader(logs[0], options), strict=False)]


def small_frames(num_tables: int, rows: int, dim: int, most: int) -> tuple[EmbeddingConfig, list[Frame]]:
    """Return frames of many tables, in which the counts and slices per owner cost the most."""
    from penstock.config.tables import TableConfig
    from penstock.frames import Rows
    from penstock.updates import SGD

    config = EmbeddingConfig.from_tables([TableConfig(100_000, dim, name=f"t{n}") for n in range(num_tables)], SGD(0.1))
    rng = np.random.default_rng(0)
    frames = []
    for _ in range(most):
        tables = {}
        for n in range(num_tables):
            grads = rng.standard_normal((rows, dim), dtype=np.float32)
            tables[f"t{n}"] = (Rows(rng.integers(0, 100_000, rows), grads),)
        frames.append(Frame(tables, num_tables * rows))
    return config, frames


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1 << 20, help="of a frame")
    parser.add_argument("--frames", type=int, default=12, help="of each of two sources")
    parser.add_argument("--scale", type=float, default=1.0, help="of the vocabulary")
    parser.add_argument("--shares", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--only", nargs="*", default=["rates", "wire", "routing", "blocks"])
    args = parser.parse_args()
    found: dict[str, Any] = {"rows": args.rows, "pyarrow": pa.__version__}
    with tempfile.TemporaryDirectory() as name:
        folder, workload = Path(name), make("w1", args.rows, args.scale)
        config = config_of(workload, "adagrad")
        logs = logs_of(workload, folder, args.frames)
        between = (6 * args.rows, 2 * (args.frames - 3) * args.rows)
        if "wire" in args.only:
            found["wire"] = wire(config, logs, args.rows)
        if "routing" in args.only:
            found["routing_w1"] = routing(config, read(config, logs, args.rows, 2))
            found["routing_26_tables"] = routing(*small_frames(26, 2048, 32, 8))
        if "rates" in args.only:
            found["one_process"] = {n: one_process(config, logs, args.rows, n, between) for n in (1, 2)}
        if "rates" in args.only or "blocks" in args.only:
            import ray

            ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False, object_store_memory=4 << 30)
        if "rates" in args.only:
            found["jobs"] = {n: job(config, logs, args.rows, n, between, readers=2) for n in args.shares}
        if "blocks" in args.only:
            small = make("w1", 64, 1e-3)
            tables, paths = config_of(small, "adagrad"), logs_of(small, folder, 300, 1)
            found["us_per_block"] = {n: per_block(tables, paths, 64, 300, n) for n in (1, 2, 4, 8)}
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
