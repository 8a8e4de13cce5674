"""How fast does ``penstock follow`` write into each target, and how far is the target behind while steps are applied?

    python bench/experiments/follow_rates.py [--targets redis,kafka,lmdb,lance,delta,parquet,function] [--seconds 15]

The service runs a tenth of W1 (1,000,000 rows of dim 32, zipf, 104,858 gradient rows per step), a step per --pause
seconds, and publishes a delta per step. A producer, the service and the follower are three processes and share the CPUs
with the server of the target. The first number is the time in which an empty target gets all tables. The others are of
the time after it: rows written per second, and the steps that the target is behind, sampled twenty times per second.
Redis syncs every write; Kafka is librdkafka's mock cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import penstock as ps
from penstock.bench.workloads import STEP_ROWS, make
from penstock.io.flight import connect
from penstock.io.targets.follower import Follower
from penstock.io.targets.target_uri import open_target

SCALE = 0.1
TARGETS = ("redis", "kafka", "lmdb", "lance", "delta", "parquet", "function")
TOPIC_RATES = Path(__file__).with_name("topic_rates.py")


def count_rows(batch: object, step: int) -> None:
    """Be the function that ``follow`` calls."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two steps")
    parser.add_argument("--push", metavar="ADDRESS", help="be the producer")
    args = parser.parse_args()
    if args.push:
        push(args.push, args.pause)
        return
    workload = make("w1", round(SCALE * STEP_ROWS), SCALE)
    (size,) = workload.tables
    table = ps.TableConfig(size.vocabulary_size, size.dim, name=size.name, optimizer=ps.Adagrad(0.1))
    with tempfile.TemporaryDirectory(prefix="penstock-follow-") as folder:
        config = Path(folder) / "tables.pbtxt"
        ps.EmbeddingConfig.from_tables([table]).save(config)
        for kind in args.targets.split(","):
            with target_of(kind, Path(folder)) as target:
                measure(kind, target, config, Path(folder) / f"{kind}.json", args)


def push(address: str, pause_s: float) -> None:
    """Push the steps of the workload, one per pause, until the service ends."""
    steps = [step.batches for step in make("w1", round(SCALE * STEP_ROWS), SCALE).steps()]
    number = 0
    with contextlib.suppress(ps.PenstockError), connect(address, patience_s=1.0) as client:
        while True:
            begin = time.monotonic()
            batches = steps[number % len(steps)]
            client.put(batches, "worker", first=len(batches) * number + 1)
            number += 1
            time.sleep(max(pause_s - (time.monotonic() - begin), 0.0))


def measure(kind: str, target: str, config: Path, state: Path, args: argparse.Namespace) -> None:
    words = [
        sys.executable,
        "-m",
        "penstock",
        "serve",
        config,
        "--delta-steps",
        "1",
        "--num-required",
        "4",
        "--no-hash",
    ]
    with contextlib.ExitStack() as stack:
        service = started(stack, *words)
        assert service.stdout is not None
        address = service.stdout.readline().split()[1].rstrip(",")
        opened = open_target(target, state if kind == "function" else None)
        client, watcher = (stack.enter_context(connect(address)) for _ in range(2))
        follower = Follower(client, opened, 60.0, opened.interval_s)
        begin = time.monotonic()
        follower.run(once=True)
        filled_s = time.monotonic() - begin
        started(stack, sys.executable, __file__, "--push", address, "--pause", args.pause)
        while not watcher.status()["steps"]:
            time.sleep(0.1)
        threading.Thread(target=follow, args=(follower,), daemon=True).start()
        before, begin, behind = follower.progress.rows, time.monotonic(), []
        first = watcher.status()["global_step"]
        while time.monotonic() < begin + args.seconds:
            time.sleep(0.05)
            behind.append(watcher.status()["global_step"] - (follower.progress.step or 0))
        seconds, rows = time.monotonic() - begin, follower.progress.rows - before
        steps = watcher.status()["global_step"] - first
    anew = follower.progress.anew - 1
    print(
        f"{kind:<9} filled in {filled_s:5.1f} s; {rows / seconds:>9,.0f} rows/s at {steps / seconds:.2f} steps/s, "
        f"{statistics.median(behind):.0f} steps behind (median), {max(behind)} at most"
        + (f"; all tables {anew} times again" if anew else ""),
        flush=True,
    )


def started(stack: contextlib.ExitStack, *words: object) -> subprocess.Popen[str]:
    """Start a process, which the stack kills."""
    process = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


def follow(follower: Follower) -> None:
    with contextlib.suppress(ps.PenstockError):  # the service ends first
        follower.run()


@contextlib.contextmanager
def target_of(kind: str, folder: Path) -> Iterator[str]:
    """Start what a target needs; yield its spelling."""
    if kind == "redis":
        binary = shutil.which("redis-server", path=f"{os.environ['PATH']}:/usr/sbin")
        if binary is None:
            raise SystemExit("redis-server is not installed")
        (folder / "redis").mkdir()
        durable = ["--appendonly", "yes", "--appendfsync", "always", "--save", "", "--dir", str(folder / "redis")]
        with subprocess.Popen([binary, "--port", "6390", *durable], stdout=subprocess.DEVNULL) as server:
            time.sleep(1)
            yield "redis://127.0.0.1:6390/0"
            server.kill()
    elif kind == "kafka":
        words = [sys.executable, str(TOPIC_RATES), "--be", "cluster"]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cluster:
            import confluent_kafka

            assert cluster.stdin is not None
            assert cluster.stdout is not None
            server = cluster.stdout.readline().strip()
            confluent_kafka.Producer({"bootstrap.servers": server}).list_topics("rows", timeout=60)  # creates it
            time.sleep(1)
            yield f"kafka://{server}/rows"
            cluster.stdin.close()
    elif kind == "function":
        sys.path.insert(0, str(Path(__file__).parent))
        yield "follow_rates:count_rows"
    else:
        yield f"{kind}:{folder / kind}"


if __name__ == "__main__":
    main()
