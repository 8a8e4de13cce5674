"""Gradients in a topic, tables in a service, rows in a store: each part is killed repeatedly, and nothing is lost.

A producer publishes frames to a stream of NATS JetStream; ``penstock serve`` applies them; ``penstock follow`` keeps
Redis up to date; a reader looks a row up there. While frames flow, a part that is chosen at random, the servers
included, is killed (SIGKILL) and started again. At the end the store must equal, bit for bit, the tables of the same
frames applied by one engine without a failure, and name its step. One table is static; the keys of the other come and
go, so that rows are removed.

    python examples/topic_to_store.py --kills 20     # needs nats-server, redis-server, and the packages nats-py, redis
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nats
import numpy as np
import pyarrow as pa
import redis

import penstock as ps

ITEMS, KEYS, DIM, STREAM = 100, 64, 8, "gradients"
PATIENCE_S = 600
PARTS = ("broker", "producer", "service", "follower", "store")


def config() -> ps.EmbeddingConfig:
    tables = [
        ps.TableConfig(ITEMS, DIM, name="item", optimizer=ps.Adagrad(0.1)),
        ps.TableConfig(KEYS, DIM, name="user", optimizer=ps.Adagrad(0.1), dynamic=ps.Dynamic(evict="lru")),
    ]
    return ps.EmbeddingConfig.from_tables(tables)


def frame(number: int) -> pa.RecordBatch:
    """Return the frame with a number, from 1: the same whenever it is asked for."""
    rng = np.random.default_rng(number)
    items, users = rng.integers(0, ITEMS, 10), number // 4 + rng.integers(0, 40, 10)
    values = rng.standard_normal(20 * DIM).astype(np.float32)
    return pa.record_batch(
        {
            "table": ["item"] * 10 + ["user"] * 10,
            "id": np.concatenate([items, users]),
            "gradient": pa.FixedSizeListArray.from_arrays(pa.array(values), DIM),
        }
    )


# ---- the producer


async def produce(server: str, pause_s: float) -> None:
    """Publish frames, numbered by the stream, from the first one that it does not contain."""
    connection = await nats.connect(server)
    stream = connection.jetstream()
    try:
        number = (await stream.stream_info(STREAM)).state.last_seq
    except nats.js.errors.NotFoundError:
        await stream.add_stream(name=STREAM, subjects=[f"{STREAM}.>"])
        number = 0
    while True:
        sink = pa.BufferOutputStream()
        batch = frame(number + 1)
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        # The server refuses a frame that follows on another one: it is stored once, whatever was repeated.
        expected = {"Nats-Expected-Last-Sequence": str(number)}
        await stream.publish(f"{STREAM}.worker-0", sink.getvalue().to_pybytes(), headers=expected)
        number += 1
        await asyncio.sleep(pause_s)


# ---- the parts


class Part:
    """A process that is killed and started again. It also starts again when it ends by itself."""

    def __init__(self, words: list[str], log: Path) -> None:
        self._words, self._log = words, log
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._words, stdout=log, stderr=log)

    def keep_running(self) -> None:
        if self.process.poll() is not None:
            self.process = self._started()

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait()


def parts_in(folder: Path) -> tuple[dict[str, Part], str, int]:
    """Start all parts. Returns them, the address of the broker and the port of the store."""
    config().save(folder / "tables.pbtxt")
    (folder / "redis").mkdir()
    broker, store, service = (free_port() for _ in range(3))
    server = f"nats://127.0.0.1:{broker}"
    address = f"grpc://127.0.0.1:{service}"
    penstock = [sys.executable, "-m", "penstock"]
    listen = ["--listen", address, "--nats", f"{server}/{STREAM}", "--patience", str(PATIENCE_S)]
    saving = ["--checkpoint", str(folder / "state"), "--every", "20", "--resume", "--no-hash"]
    durable = ["--appendonly", "yes", "--appendfsync", "always", "--dir", str(folder / "redis")]
    into = ["--into", f"redis://127.0.0.1:{store}/0", "--interval", "0.05", "--patience", str(PATIENCE_S)]
    words = {
        "broker": ["nats-server", "-a", "127.0.0.1", "-p", str(broker), "-js", "-sd", str(folder / "nats")],
        "store": ["redis-server", "--port", str(store), "--bind", "127.0.0.1", "--save", "", *durable],
        "producer": [sys.executable, __file__, "--produce", server],
        "service": [*penstock, "serve", str(folder / "tables.pbtxt"), *listen, *saving],
        "follower": [*penstock, "follow", address, *into],
    }
    return {name: Part(words[name], folder / f"{name}.log") for name in words}, server, store


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


# ---- the store, as a serving system reads it


def step_of(store: redis.Redis) -> int:
    try:
        return int(store.hget("penstock-state", "step") or 0)
    except redis.exceptions.RedisError:
        return 0


def rows_of(store: redis.Redis, table: str) -> dict[int, bytes]:
    return {int(id_): row for id_, row in store.hgetall(f"penstock:{table}").items()}


def expected_rows(num_frames: int) -> dict[str, dict[int, bytes]]:
    """Return the rows of an engine that nothing happened to."""
    engine = ps.Engine(config())
    engine.run(frame(number) for number in range(1, num_frames + 1))
    ids = {"item": list(range(ITEMS)), "user": engine.keys("user").to_pylist()}
    return {
        name: {id_: row.tobytes() for id_, row in zip(some, engine.lookup(name, some), strict=True)}
        for name, some in ids.items()
    }


def main(kills: int, seed: int) -> int:
    rng = random.Random(seed)
    killed = dict.fromkeys(PARTS, 0)
    with tempfile.TemporaryDirectory() as folder:
        parts, server, port = parts_in(Path(folder))
        store = redis.Redis(port=port)
        try:
            for _ in range(kills):
                name, before, moment_s = rng.choice(PARTS), step_of(store), time.monotonic() + rng.uniform(0.1, 1)
                while time.monotonic() < moment_s or step_of(store) <= before:  # rows flow again after each kill
                    for part in parts.values():
                        part.keep_running()
                    time.sleep(0.02)
                parts[name].kill()
                killed[name] += 1
            parts["producer"].kill()
            num_frames = 0
            while not num_frames or step_of(store) < num_frames:
                for name, part in parts.items():
                    if name != "producer":
                        part.keep_running()
                time.sleep(0.1)
                num_frames = num_frames or asyncio.run(stored(server))
            stored_rows = {name: rows_of(store, name) for name in ("item", "user")}
            step, row = step_of(store), np.frombuffer(store.hget("penstock:item", 7), "<f4")
        finally:
            store.close()
            for part in parts.values():
                if part.process.poll() is None:
                    part.kill()
    print(f"{kills} kills: {', '.join(f'{count} of the {name}' for name, count in killed.items())}")
    print(f"{num_frames} frames in the topic; the store is at step {step}; row 7 of 'item' begins with {row[0]:.4f}")
    same = stored_rows == expected_rows(num_frames) and step == num_frames
    print("the store equals the tables" if same else "THE STORE DIFFERS")
    return 0 if same else 1


async def stored(server: str) -> int:
    """Return the number of frames in the topic; 0 while the broker starts."""
    try:
        connection = await nats.connect(server, allow_reconnect=False, max_reconnect_attempts=1)
        try:
            return int((await connection.jetstream().stream_info(STREAM)).state.last_seq)
        finally:
            await connection.close()
    except (nats.errors.Error, OSError):
        return 0


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--produce", metavar="SERVER", help="be the producer")
    arguments = options.parse_args()
    if arguments.produce:
        asyncio.run(produce(arguments.produce, 0.01))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    sys.exit(main(arguments.kills, arguments.seed))
