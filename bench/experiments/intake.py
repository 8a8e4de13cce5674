"""What does a service need to take in frames, next to a bare Flight server, and under other gates?

Producers, each a process, send frames of some rows as fast as the server takes them, over loopback; the servers in
turns. Printed are the median seconds until the last frame is acknowledged, rows per second, and the CPU time of the
server for each frame.

    python bench/experiments/intake.py --producers 4 --frames 1000 --rows 500 --turns 5
    python bench/experiments/intake.py --servers num_required,rounds --rows 20000
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight

from penstock import Adagrad, EmbeddingConfig, TableConfig, connect
from penstock.bench.doput import DISCARD, SERVE

VOCABULARY, DIM = 100_000, 8
# A bare server discards what it receives.
GATES = {
    "flight": "",
    "frames": "--num-required 1 --max-staleness 1000000",
    "num_required": "--num-required {producers} --max-staleness 1000000",
    "rounds": "--workers {producers}",
}


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    arguments.add_argument("--producers", type=int, default=4)
    arguments.add_argument("--frames", type=int, default=1000, help="of each producer")
    arguments.add_argument("--rows", type=int, default=500, help="of a frame")
    arguments.add_argument("--turns", type=int, default=5)
    arguments.add_argument("--servers", default=",".join(GATES), help="some of: %(default)s")
    arguments.add_argument("--work", nargs=3, metavar=("PRODUCER", "SERVER", "ADDRESS"), help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.work:
        work(int(args.work[0]), args.work[1], args.work[2], args.frames, args.rows)
        return 0
    measures: dict[str, list[tuple[float, float]]] = {server: [] for server in args.servers.split(",")}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "tables.pbtxt"
        EmbeddingConfig.from_tables([TableConfig(VOCABULARY, DIM, name="user")], optimizer=Adagrad(0.1)).save(config)
        for _ in range(args.turns):
            for server, each in measures.items():
                each.append(measured(config, server, args))
    medians = {server: np.median(each, axis=0) for server, each in measures.items()}
    num_frames = args.producers * args.frames
    for server, (wall_s, cpu_s) in medians.items():
        rate, each_us = num_frames * args.rows / wall_s / 1e6, 1e6 * cpu_s / num_frames
        print(f"{server:12} {wall_s:7.3f} s  {rate:7.2f} M rows/s  {each_us:7.0f} µs of CPU per frame")
    if {"rounds", "num_required"} <= medians.keys():
        wall, cpu = medians["rounds"] / medians["num_required"]
        print(f"rounds / num_required: {wall:.3f}, CPU time {cpu:.3f}")
    return 0


def measured(config: Path, server: str, args: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds, and the CPU seconds of the server, of one run."""
    gate = GATES[server].format(producers=args.producers).split()
    command = DISCARD if server == "flight" else [*SERVE, str(config), "--reduction", "sum", *gate]
    sizes = ["--frames", str(args.frames), "--rows", str(args.rows)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        address = service.stdout.readline().split()[1].rstrip(",")
        producers = [
            subprocess.Popen(
                [sys.executable, __file__, *sizes, "--work", str(number), server, address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for number in range(args.producers)
        ]
        for producer in producers:
            producer.stdout.readline()  # type: ignore[union-attr]
        cpu_s, begin_s = cpu_seconds(service.pid), time.perf_counter()
        for producer in producers:
            producer.stdin.close()  # type: ignore[union-attr]
        for producer in producers:
            producer.wait()
        seconds = time.perf_counter() - begin_s, cpu_seconds(service.pid) - cpu_s
        service.terminate()
    return seconds


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def work(number: int, server: str, address: str, frames: int, rows: int) -> None:
    """Send a producer's frames, once its standard input ends."""
    rng, batches = np.random.default_rng(number), []
    for step in range(frames):
        values = pa.FixedSizeListArray.from_arrays(rng.standard_normal(rows * DIM, np.float32), DIM)
        columns = {"step": np.full(rows, step), "id": rng.integers(0, VOCABULARY, rows), "gradient": values}
        batches.append(pa.record_batch(columns))
    if server == "flight":
        client = flight.connect(address)
        writer, reader = client.do_put(flight.FlightDescriptor.for_path("bench"), batches[0].schema)
    print("ready", flush=True)
    sys.stdin.read()
    if server == "flight":
        for batch in batches:
            writer.write_batch(batch)
        writer.done_writing()
        reader.read()  # the server's last message
        writer.close()
        return
    with connect(address) as client, client.producer(f"rank-{number}") as producer:
        for batch in batches:
            producer.send(batch)


if __name__ == "__main__":
    sys.exit(main())
