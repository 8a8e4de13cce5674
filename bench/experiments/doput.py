"""What does the network cost? Rows per second pushed into ``penstock serve`` on loopback, next to a replay of a file.

    python bench/experiments/doput.py [--rows 20000] [--frames 60] [--rounds 3]

The service and the producer are separate processes and share the CPUs of this machine; a replay has all of them.
The time ends with the last acknowledgement, or with ``--checkpoint`` with the commit of everything. Every process has
applied the whole log once before (warm), and there is no reader. The output says whether both ended with the same
tables.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

import penstock as ps
from penstock.io.flight import connect

VOCABULARY, DIM = 1_000_000, 64

SERVE = [sys.executable, "-m", "penstock", "serve"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000, help="of a frame")
    parser.add_argument("--frames", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--checkpoint", action="store_true", help="with one; the last acknowledgement waits for the disk"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-doput-") as folder:
        measure(args, Path(folder))


def measure(args: argparse.Namespace, folder: Path) -> None:
    log, config = folder / "log.arrows", folder / "tables.pbtxt"
    tables().save(config)
    frames = write_log(log, args.rows, args.frames)
    saving = ["--checkpoint", str(folder / "state")] if args.checkpoint else []
    engine = ps.Engine(tables())
    engine.run(str(log))
    replays, puts = [], []
    with subprocess.Popen([*SERVE, str(config), *saving], stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            uri = service.stdout.readline().split()[1].rstrip(",")
            with connect(uri) as client:
                client.put(frames, "bench")
                for _ in range(args.rounds):
                    replays.append(engine.run(str(log)).rows_per_s)
                    puts.append(pushed(client, frames))
                client.drain()
            told = service.stdout.read()
        except BaseException:
            service.kill()  # otherwise the wait for it would never end
            raise
    report(args, replays, puts, engine.state_hash() in told)


def tables() -> ps.EmbeddingConfig:
    return ps.EmbeddingConfig.from_tables([ps.TableConfig(VOCABULARY, DIM, name="user", optimizer=ps.Adagrad(0.1))])


def write_log(path: Path, rows: int, num_frames: int) -> list[pa.RecordBatch]:
    rng = np.random.default_rng(0)
    frames = []
    for _ in range(num_frames):
        gradient = pa.FixedSizeListArray.from_arrays(rng.standard_normal(rows * DIM, dtype=np.float32), DIM)
        frames.append(pa.record_batch({"id": rng.zipf(1.1, rows) % VOCABULARY, "gradient": gradient}))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, frames[0].schema) as writer:
        for frame in frames:
            writer.write_batch(frame)
    return frames


def pushed(client, frames: list[pa.RecordBatch]) -> float:
    began = time.perf_counter()
    client.put(frames, "bench")
    return sum(frame.num_rows for frame in frames) / (time.perf_counter() - began)


def report(args: argparse.Namespace, replays: list[float], puts: list[float], same: bool) -> None:
    replay, put = statistics.median(replays), statistics.median(puts)
    how = ", checkpoint" * args.checkpoint
    print(f"{args.frames} frames of {args.rows} rows, dim {DIM}, {args.rounds} rounds{how}")
    for name, all_of, median in (("replay", replays, replay), ("DoPut", puts, put)):
        print(f"{name:8}{median:12,.0f} rows/s   ({min(all_of):,.0f} to {max(all_of):,.0f})")
    print(f"DoPut / replay: {put / replay:.0%}; the same tables: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    main()
