"""Reads of 100 rows of dim 32: in process and over Flight on loopback, alone and during updates.

The case ``reads`` of ``penstock bench``. ``python -P bench/reads.py`` prints the same for the penstock on its path,
which may be an earlier version; it skips a way to read that this version does not have.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.flight as flight

import penstock
from penstock.api.engine import Engine
from penstock.bench import machine
from penstock.bench.doput import DISCARD
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.tables import Constant, TableConfig
from penstock.model.updates import Adagrad
from penstock.serving.flight import connect

Ids = npt.NDArray[np.int64]

TABLE, VOCABULARY, DIM = "table", 1_000_000, 32
ROWS, BATCH_ROWS = 100, 1024
# Rows of the steps that update the table meanwhile: in this process, and in a service.
STEP_ROWS, PUSHED_ROWS = 1 << 17, 1 << 14
SECONDS, SHORT_SECONDS = 5.0, 0.2
PAUSE_S = 0.0005
WARM_UP = 20
DISTINCT = 64  # batches of ids, read in turn


@dataclass(frozen=True)
class Latencies:
    """How long single reads took, in ms. rows : of a read"""

    ms: npt.NDArray[np.float64]
    rows: int

    def as_json(self) -> dict[str, Any]:
        """Return percentiles. samples_ms : from the minimum to the maximum, 101 of them"""
        percentiles = np.percentile(self.ms, range(101)).round(5).tolist()
        return {
            "median_ms": percentiles[50],
            "p99_ms": percentiles[99],
            "min_ms": percentiles[0],
            "max_ms": percentiles[100],
            "rows": self.rows,
            "reads": len(self.ms),
            "clean": len(percentiles),
            "samples_ms": percentiles,
        }


def measured(folder: Path, seconds: float, scale: float = 1.0) -> Iterator[tuple[str, Latencies]]:
    """Yield the way of reading and its latencies. scale : of the rows of updates"""
    config = EmbeddingConfig.from_tables([TableConfig(VOCABULARY, DIM, Constant(1 / 64), Adagrad(0.05), name=TABLE)])
    engine = Engine(config, threads=1)

    def read(ids: Ids) -> Any:
        return engine.lookup(TABLE, ids)

    yield "penstock", timed(read, ROWS, seconds)
    yield "rows_1024", timed(read, BATCH_ROWS, seconds, pause_s=0)
    with updating(engine, round(STEP_ROWS * scale)):
        yield "during_updates", timed(read, ROWS, seconds)
        if hasattr(Engine, "reads"):
            yield "unlocked_during_updates", timed(lambda ids: engine.reads.lookup({TABLE: ids}), ROWS, seconds)
    if hasattr(penstock, "Reader"):
        yield from shared(config, folder / "shared", seconds, str(round(STEP_ROWS * scale)))
    with running(DISCARD) as address, bare_exchange(address) as exchange:
        yield "bare_flight", timed(exchange, ROWS, seconds)
    config.save(folder / "tables.pbtxt")
    service = [sys.executable, "-m", "penstock", "serve", str(folder / "tables.pbtxt"), "--threads", "1", "--no-hash"]
    with running(service) as address, connect(address) as client:
        ways = flight_ways(client)
        for name, way in ways.items():
            yield name, timed(way, ROWS, seconds)
        with running([sys.executable, "-P", __file__, "--push", address, "--rows", str(round(PUSHED_ROWS * scale))]):
            for name, way in ways.items():
                yield f"{name}_during_updates", timed(way, ROWS, seconds)


def shared(config: EmbeddingConfig, folder: Path, seconds: float, rows: str) -> Iterator[tuple[str, Latencies]]:
    """Yield reads of the shared tables of another process, which updates them."""
    config.save(tables := folder.with_suffix(".pbtxt"))
    words = [sys.executable, "-P", __file__, "--update", str(folder), "--config", str(tables), "--rows", rows]
    with running(words), penstock.Reader(folder) as reader:
        yield "reader_rows_1024", timed(partial(reader.lookup, TABLE), BATCH_ROWS, seconds, pause_s=0)
        for name, consistent in {"reader": False, "reader_consistent": True}.items():
            read = partial(reader.lookup, TABLE, consistent=consistent)
            yield f"{name}_during_updates", timed(read, ROWS, seconds)


@contextmanager
def bare_exchange(address: str) -> Iterator[Callable[[Ids], Any]]:
    """Yield a way to exchange ids for zeros with a server that does nothing else: what Flight itself takes."""
    with flight.connect(address) as client:
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(str(DIM)))
        writer.begin(pa.schema({"ids": pa.int64()}))

        def exchange(ids: Ids) -> Any:
            writer.write_batch(pa.record_batch({"ids": ids}))
            return reader.read_chunk().data.column("row").values.to_numpy()

        yield exchange
        writer.close()


def flight_ways(client: Any) -> dict[str, Callable[[Ids], Any]]:
    if not hasattr(client, "lookup"):  # of an earlier version
        return {"flight": lambda ids: client.rows(TABLE, ids)}
    return {
        "flight": lambda ids: client.lookup({TABLE: ids}),
        "flight_consistent": lambda ids: client.lookup({TABLE: ids}, consistent=True),
    }


def timed(read: Callable[[Ids], Any], rows: int, seconds: float, pause_s: float = PAUSE_S) -> Latencies:
    """Read random rows for some time.

    pause_s : between two reads. Without it, most reads would fall between two steps: one that waits for a step counts
        as much as one that does not, and takes the time of a thousand others
    """
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, VOCABULARY, rows) for _ in range(DISTINCT)]
    for ids in batches[:WARM_UP]:
        read(ids)
    ms, end = list[float](), time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        read(batches[len(ms) % DISTINCT])
        ms.append(1e3 * (time.perf_counter() - begin))
        if pause_s:
            time.sleep(pause_s)
    return Latencies(np.array(ms), rows)


def gradients(rows: int) -> list[pa.RecordBatch]:
    """Return batches of random rows, one step each."""
    rng = np.random.default_rng(1)
    values = [rng.standard_normal(rows * DIM, np.float32) for _ in range(2)]
    ids = [rng.integers(0, VOCABULARY, rows) for _ in values]
    rows_of = [pa.FixedSizeListArray.from_arrays(part, DIM) for part in values]
    return [pa.record_batch({"id": part, "gradient": rows}) for part, rows in zip(ids, rows_of, strict=True)]


@contextmanager
def updating(engine: Engine, rows: int) -> Iterator[None]:
    """Update the table in a thread while in the context."""
    over, batches = threading.Event(), gradients(rows)

    def endless() -> Iterator[pa.RecordBatch]:
        yield batches[0]
        begun.set()
        while not over.is_set():
            yield from batches

    begun = threading.Event()
    thread = threading.Thread(target=lambda: engine.run(endless(), contribution_rows=rows))
    thread.start()
    try:
        begun.wait()
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def running(command: Sequence[str]) -> Iterator[str]:
    """Run a process while in the context, and yield the second word of its first line."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[1].rstrip(",")
        finally:
            process.kill()


def push(address: str, rows: int) -> None:
    """Push steps into a service until it or this process ends."""
    batches = gradients(rows)
    with connect(address) as client, client.producer("bench") as producer:
        for number in range(1 << 62):
            producer.send(batches[number % len(batches)])
            if number == 0:
                producer.wait()
                print("pushing to", address, flush=True)


def update(folder: str, config: str, rows: int) -> None:
    """Update shared tables until this process ends."""
    engine = Engine(EmbeddingConfig.load(config), threads=1, shared=folder)
    with updating(engine, rows):
        print("updating", folder, flush=True)
        threading.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--push", metavar="ADDRESS")
    parser.add_argument("--update", metavar="DIR")
    parser.add_argument("--config")
    parser.add_argument("--rows", type=int, default=PUSHED_ROWS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    args = parser.parse_args()
    if args.push is not None:
        push(args.push, args.rows)
        return
    if args.update is not None:
        update(args.update, args.config, args.rows)
        return
    print(machine.named(machine.describe()))
    with tempfile.TemporaryDirectory() as folder:
        for name, latencies in measured(Path(folder), args.seconds):
            side = latencies.as_json()
            rows_per_s = 1e3 * side["rows"] / side["median_ms"]
            print(
                f"{name:32} p50 {1e3 * side['median_ms']:9.1f} µs   p99 {1e3 * side['p99_ms']:9.1f} µs   "
                f"most {side['max_ms']:8.2f} ms   {rows_per_s / 1e6:6.2f} M rows/s   {side['reads']:,} reads",
                flush=True,
            )


if __name__ == "__main__":
    main()
