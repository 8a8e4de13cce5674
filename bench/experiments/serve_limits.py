"""What do slow readers and many producers cost a service? Rows per second pushed, and its memory, in four situations.

    python bench/experiments/serve_limits.py [--frames 300]

Frames of 2,000 rows, a table of 200,000 × 64, 32 MB of deltas kept. The situations: no reader; a reader follows; a
reader follows 100 times more slowly than the service steps without a reader; 100 producers at once with 16 calls
allowed. Memory is RssAnon of the process (Linux). Every frame must have been applied exactly once.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa

import penstock as ps
from penstock.io.flight import connect

VOCABULARY, DIM, ROWS = 200_000, 64, 2_000
SERVE = [sys.executable, "-m", "penstock", "serve"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=300)
    args = parser.parse_args()
    frames = [frame(n) for n in range(args.frames)]
    with tempfile.TemporaryDirectory(prefix="penstock-serve-") as folder:
        config = Path(folder) / "tables.pbtxt"
        table = ps.TableConfig(VOCABULARY, DIM, name="user", optimizer=ps.Adagrad(0.1))
        ps.EmbeddingConfig.from_tables([table]).save(config)
        alone = with_reader(config, frames, None)
        with_reader(config, frames, 0.0)
        with_reader(config, frames, 100 * alone)
        with_producers(config, frames[:100])


def frame(number: int) -> pa.RecordBatch:
    rng = np.random.default_rng(number)
    gradient = pa.FixedSizeListArray.from_arrays(rng.standard_normal(ROWS * DIM, dtype=np.float32), DIM)
    return pa.record_batch({"id": rng.integers(0, VOCABULARY, ROWS), "gradient": gradient})


def with_reader(config: Path, frames: list[pa.RecordBatch], pause_s: float | None) -> float:
    """Return the seconds per step. pause_s : pause of the reader after each delta; None: no reader"""
    said = "unread" if pause_s is None else f"a reader that pauses {1000 * pause_s:.1f} ms after each delta"
    with started(config) as service, connect(service.uri) as client:
        client.put(frames[:20], "warm")
        seen: list[str] = []
        if pause_s is not None:
            threading.Thread(target=follow, args=(service.uri, pause_s, seen), daemon=True).start()
            time.sleep(0.5)
        seconds, before, after = measured(service, lambda: client.put(frames, "bench"))
        time.sleep(0.5)
        tell(said, client, len(frames) + 20, seconds, len(frames) * ROWS, before, after)
        if seen:
            print(f"    the reader has seen {len(seen)} deltas, the last: {seen[-1]}")
        client.drain()
    return seconds / len(frames)


def follow(uri: str, pause_s: float, seen: list[str]) -> None:
    with connect(uri, patience_s=0.1) as client:
        try:
            for delta in client.deltas(client.table("user").step, follow=True):
                seen.append(f"step {delta.step}")
                time.sleep(pause_s)
        except ps.PenstockError as error:
            seen.append(f"{type(error).__name__}: {error}")


def with_producers(config: Path, frames: list[pa.RecordBatch]) -> None:
    """Push from 100 clients at once, a frame each."""
    with started(config, "--max-calls", "16") as service, connect(service.uri) as client:
        client.put(frames[:20], "warm")

        def push(number: int) -> None:
            with connect(service.uri, patience_s=120) as one:
                one.put([frames[number % len(frames)]], f"worker-{number}")

        def all_of_them() -> None:
            with ThreadPoolExecutor(100) as team:
                list(team.map(push, range(100)))

        seconds, before, after = measured(service, all_of_them)
        tell("100 producers, 16 calls", client, 120, seconds, 100 * ROWS, before, after)
        client.drain()


class started:  # noqa: N801 (read as a verb)
    """A service in a separate process."""

    def __init__(self, config: Path, *words: str) -> None:
        command = [*SERVE, str(config), "--delta-memory", "32", "--no-hash", "--grace", "1", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.uri = self.process.stdout.readline().split()[1].rstrip(",")

    def __enter__(self) -> started:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:  # the block failed before its ``drain``
            self.process.terminate()
        self.process.communicate(timeout=60)

    def rss_mb(self) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def measured(service: started, work) -> tuple[float, float, float]:
    before, began = service.rss_mb(), time.perf_counter()
    work()
    return time.perf_counter() - began, before, service.rss_mb()


def tell(said: str, client, num_frames: int, seconds: float, rows: int, before: float, after: float) -> None:
    status = client.status()
    assert status["frames"] == status["steps"] == num_frames, status
    print(f"{said}: {rows / seconds:,.0f} rows/s; memory {before:,.0f} MB before, {after:,.0f} MB after; ", end="")
    print(f"{status['deltas']['bytes'] >> 20} MB of deltas kept, {status['refused']} calls refused")


if __name__ == "__main__":
    main()
