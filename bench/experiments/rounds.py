"""What do rounds cost over a loopback connection, next to the same frames under num_required?

Four workers, each a process, send frames of some rows as fast as the service takes them; the two policies in turns.
Printed are the seconds until the last frame is acknowledged, and the CPU seconds of the service.

    python bench/experiments/rounds.py --steps 1000 --rows 500 --turns 5
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

from penstock import Adagrad, EmbeddingConfig, TableConfig, connect

WORKERS, VOCABULARY, DIM = 4, 100_000, 8
POLICIES = {
    "num_required": ["--num-required", str(WORKERS), "--max-staleness", "1000000"],
    "rounds": ["--workers", "4"],
}


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    arguments.add_argument("--steps", type=int, default=1000)
    arguments.add_argument("--rows", type=int, default=500)
    arguments.add_argument("--turns", type=int, default=5)
    arguments.add_argument("--work", nargs=2, metavar=("WORKER", "ADDRESS"), help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.work:
        work(int(args.work[0]), args.work[1], args.steps, args.rows)
        return 0
    seconds: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "tables.pbtxt"
        EmbeddingConfig.from_tables([TableConfig(VOCABULARY, DIM, name="user")], optimizer=Adagrad(0.1)).save(config)
        for _ in range(args.turns):
            for policy, flags in POLICIES.items():
                seconds[policy].append(measured(config, flags, args.steps, args.rows))
    medians = {policy: np.median(each, axis=0) for policy, each in seconds.items()}
    for policy, (wall_s, cpu_s) in medians.items():
        print(f"{policy:12} {wall_s:7.3f} s   {cpu_s:7.2f} CPU s of the service")
    wall, cpu = medians["rounds"] / medians["num_required"]
    print(f"rounds / num_required: {wall:.3f}, CPU of the service {cpu:.3f}")
    return 0


def measured(config: Path, flags: list[str], steps: int, rows: int) -> tuple[float, float]:
    """Return the seconds, and the CPU seconds of the service, of one run."""
    command = [sys.executable, "-m", "penstock", "serve", str(config), "--reduction", "sum", *flags]
    sizes = ["--steps", str(steps), "--rows", str(rows)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        address = service.stdout.readline().split()[1].rstrip(",")
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, *sizes, "--work", str(worker), address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for worker in range(WORKERS)
        ]
        for worker in workers:
            worker.stdout.readline()  # type: ignore[union-attr]
        cpu_s, begin_s = cpu_seconds(service.pid), time.perf_counter()
        for worker in workers:
            worker.stdin.close()  # type: ignore[union-attr]
        for worker in workers:
            worker.wait()
        seconds = time.perf_counter() - begin_s, cpu_seconds(service.pid) - cpu_s
        service.terminate()
    return seconds


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def work(worker: int, address: str, steps: int, rows: int) -> None:
    """Send a worker's frames, once a line has come."""
    rng = np.random.default_rng(worker)
    frames = []
    for step in range(steps):
        values = pa.FixedSizeListArray.from_arrays(rng.standard_normal(rows * DIM, np.float32), DIM)
        columns = {"step": np.full(rows, step), "id": rng.integers(0, VOCABULARY, rows), "gradient": values}
        frames.append(pa.record_batch(columns))
    print("ready", flush=True)
    sys.stdin.readline()
    with connect(address) as client, client.producer(f"rank-{worker}") as producer:
        for frame in frames:
            producer.send(frame)


if __name__ == "__main__":
    sys.exit(main())
