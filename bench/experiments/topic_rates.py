"""How many rows per second does a replay of a topic apply, next to a consumer that only receives the messages?

    DIM=64 python bench/experiments/topic_rates.py [--frames 1000000 --rows 100] [--broker kafka|nats]

Three ways, one after the other: a bare consumer of the client library, which counts messages; a replay of the topic; a
replay of the same frames from a file (--only selects some). A row is an id and DIM float32, a step is one frame.

Kafka is librdkafka's mock cluster, which keeps 5 MB per partition: the messages are produced while they are read, by a
process that never runs ahead by more. Cluster, producer and consumer are three processes and share the CPUs. NATS is
its server; the messages are in the stream, on disk, before they are read. The time begins with the first message.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

VOCABULARY, TOPIC = 1_000_000, "gradients"
DIM = int(os.environ.get("DIM", "64"))
# What the mock cluster keeps of a partition, less what a client may have packed into one request.
KEPT_BYTES = 4_000_000
PARTITIONS = 4  # the mock cluster's default
# The cluster answers a request for messages that it does not have only after this time, whatever arrives meanwhile.
FETCH = {"fetch.wait.max.ms": "2", "fetch.message.max.bytes": "8000000"}
DISTINCT = 64  # messages, sent again and again
SAMPLE_S = 0.0005
PUBLISH_S = 0.01  # a thread that wakes more often slows down the replay, by Python's lock


def message_of(number: int, rows: int) -> tuple[pa.RecordBatch, bytes]:
    rng = np.random.default_rng(number)
    values = 0.01 * rng.standard_normal(rows * DIM, dtype=np.float32)
    gradient = pa.FixedSizeListArray.from_arrays(values, DIM)
    batch = pa.record_batch({"id": rng.integers(0, VOCABULARY, rows), "gradient": gradient})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return batch, sink.getvalue().to_pybytes()


# ---- the processes


def keep_cluster() -> None:
    """Be the mock cluster, until the input ends."""
    import confluent_kafka

    keeper = confluent_kafka.Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "unused"})
    (broker,) = keeper.list_topics(timeout=60).brokers.values()
    print(f"{broker.host}:{broker.port}", flush=True)
    sys.stdin.read()


def produce(args: argparse.Namespace) -> None:
    """Send every frame, no further ahead of the consumer than the cluster retains."""
    import confluent_kafka

    messages = [message_of(number, args.rows)[1] for number in range(DISTINCT)]
    size = len(messages[0])
    most = max(1, KEPT_BYTES // size)  # messages of a partition that are not consumed
    settings = {"bootstrap.servers": args.server, "message.max.bytes": 10_000_000, "linger.ms": 1}
    producer = confluent_kafka.Producer({**settings, "batch.size": min(1_000_000, most * size)})
    consumed = consumed_counts(args.counts)
    for number in range(args.frames):
        partition = number % PARTITIONS
        while number // PARTITIONS - int(consumed[partition]) >= most:
            producer.poll(SAMPLE_S)
        while True:
            try:
                producer.produce(TOPIC, messages[number % DISTINCT], partition=partition)
                break
            except BufferError:
                producer.poll(SAMPLE_S)
    producer.flush()


async def publish(args: argparse.Namespace) -> None:
    import nats

    messages = [message_of(number, args.rows)[1] for number in range(DISTINCT)]
    connection = await nats.connect(args.server)
    stream = connection.jetstream(publish_async_max_pending=1000)
    await stream.add_stream(name=TOPIC, subjects=[f"{TOPIC}.>"])
    for number in range(args.frames):
        await stream.publish_async(f"{TOPIC}.w", messages[number % DISTINCT], wait_stall=60)
    await stream.publish_async_completed()
    await connection.close()


def consume_kafka(args: argparse.Namespace) -> float:
    import confluent_kafka

    consumer = confluent_kafka.Consumer({"bootstrap.servers": args.server, "group.id": "bare", **FETCH})
    consumer.assign([confluent_kafka.TopicPartition(TOPIC, number, 0) for number in range(PARTITIONS)])
    consumed = consumed_counts(args.counts)
    taken = [0] * PARTITIONS
    count, num_bytes, begin = 0, 0, 0.0
    while count < args.frames:
        messages = consumer.consume(256, 0.01)
        begin = begin or (time.perf_counter() if messages else 0.0)
        for message in messages:
            if message.error() is not None:
                raise SystemExit(message.error())
            num_bytes += len(message.value())
            taken[message.partition()] += 1
        consumed[:] = taken
        count += len(messages)
    return time.perf_counter() - begin


async def consume_nats(args: argparse.Namespace) -> float:
    import nats

    connection = await nats.connect(args.server)
    api = nats.js.api
    config = api.ConsumerConfig(ack_policy=api.AckPolicy.NONE)
    subscription = await connection.jetstream().pull_subscribe("", stream=TOPIC, config=config)
    begin, count, num_bytes = time.perf_counter(), 0, 0
    while count < args.frames:
        messages = await subscription.fetch(256, timeout=5)
        num_bytes += sum(len(message.data) for message in messages)
        count += len(messages)
    await connection.close()
    return time.perf_counter() - begin


def replay(args: argparse.Namespace) -> float:
    """Replay the topic. A thread publishes how far it is, for the producer."""
    import penstock as ps

    engine = warm_engine()
    begin = [0.0]
    progress: list[Any] = []
    is_over = threading.Event()

    def count() -> None:
        consumed = consumed_counts(args.counts)
        while not is_over.wait(PUBLISH_S):
            begin[0] = begin[0] or (time.perf_counter() if progress and progress[0].frames else 0.0)
            positions = engine.session.positions.producers
            consumed[:] = [positions.get(f"kafka/{TOPIC}/{number}", 0) for number in range(PARTITIONS)]

    def note(counters: Any, *_: Any) -> None:
        if not progress:
            progress.append(counters)

    thread = threading.Thread(target=count)
    thread.start()
    settings = "&".join(f"{name}={value}" for name, value in FETCH.items())
    uri = f"kafka://{args.server}/{TOPIC}?{settings}" if args.broker == "kafka" else f"{args.server}/{TOPIC}"
    report = engine.run(uri, merge="round", follow=True, limit=args.frames, progress=note)
    seconds = time.perf_counter() - begin[0]
    is_over.set()
    thread.join()
    assert isinstance(report, ps.Report)
    assert report.frames == args.frames
    return seconds


def replay_file(args: argparse.Namespace) -> float:
    engine = warm_engine()
    num_frames = min(args.frames, (1 << 30) // (args.rows * (8 + 4 * DIM)))
    batches = [message_of(number, args.rows)[0] for number in range(DISTINCT)]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "frames.arrows"
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as writer:
            for number in range(num_frames):
                writer.write_batch(batches[number % DISTINCT])
        return engine.run(path).seconds * args.frames / num_frames


def warm_engine() -> Any:
    import penstock as ps

    table = ps.TableConfig(VOCABULARY, DIM, name="user", optimizer=ps.Adagrad(0.1))
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    engine.run([message_of(number, rows)[0] for number in range(3) for rows in (100, 50_000)])
    return engine


def consumed_counts(path: str) -> Any:
    """Map the numbers of messages that were consumed of each partition, which the processes share."""
    return np.memmap(path, np.int64, "r+", shape=(PARTITIONS,))


# ---- the measurement


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=100, help="of a frame")
    parser.add_argument("--broker", choices=("kafka", "nats"), default="kafka")
    parser.add_argument("--only", default="consumer,topic,file", help="the ways to measure")
    parser.add_argument("--be", choices=WAYS, help="be one of the processes")
    parser.add_argument("--server")
    parser.add_argument("--counts")
    args = parser.parse_args()
    if args.be is not None:
        before_s = time.process_time()
        seconds = WAYS[args.be](args)
        if seconds is not None:
            print(seconds, time.process_time() - before_s)
        return
    print(f"{args.frames:,} frames of {args.rows:,} rows, {args.broker}", flush=True)
    measured = {}
    for way in args.only.split(","):
        seconds, cpu_s = measure(args, way)
        measured[way] = args.frames * args.rows / seconds
        share = f", {measured[way] / measured['consumer']:.0%} of the consumer" if "consumer" in measured else ""
        per_frame = f"{args.frames / seconds:>9,.0f} frames/s, {1e6 * cpu_s / args.frames:,.0f} µs of CPU per frame"
        print(f"{way:<9} {measured[way]:>13,.0f} rows/s, {per_frame}{share}", flush=True)


def measure(args: argparse.Namespace, way: str) -> tuple[float, float]:
    """Return the seconds, and those of CPU of the process that reads, its start and its client's threads included."""

    def results(process: subprocess.Popen[str]) -> tuple[float, float]:
        seconds, cpu_s = map(float, process.communicate()[0].split())
        return seconds, cpu_s

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        counts = Path(folder) / "counts"
        counts.write_bytes(bytes(8 * PARTITIONS))
        flags = ["--frames", str(args.frames), "--rows", str(args.rows), "--broker", args.broker, "--counts", counts]

        def process(be: str, *more: str) -> subprocess.Popen[str]:
            words = [sys.executable, __file__, "--be", be, *map(str, flags), *more]
            return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        if way == "file":
            return results(process("file"))
        if args.broker == "nats":
            with nats_server(folder) as server:
                process("publisher", "--server", server).communicate()
                return results(process(f"nats-{way}", "--server", server))
        with process("cluster") as cluster:
            assert cluster.stdout is not None
            assert cluster.stdin is not None
            server = cluster.stdout.readline().strip()
            consumer = process(way, "--server", server)
            producer = process("producer", "--server", server)
            found = results(consumer)
            producer.communicate()
            cluster.stdin.close()
        return found


@contextlib.contextmanager
def nats_server(folder: str) -> Iterator[str]:
    binary = shutil.which("nats-server", path=f"{os.environ['PATH']}:/usr/sbin")
    if binary is None:
        raise SystemExit("nats-server is not installed")
    words = [binary, "-a", "127.0.0.1", "-p", "4333", "-js", "-sd", folder]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as running:
        time.sleep(1)
        yield "nats://127.0.0.1:4333"
        running.kill()


WAYS: dict[str, Callable[[argparse.Namespace], float | None]] = {
    "cluster": lambda _: keep_cluster(),
    "producer": produce,
    "publisher": lambda args: asyncio.run(publish(args)),
    "consumer": consume_kafka,
    "topic": replay,
    "file": replay_file,
    "nats-consumer": lambda args: asyncio.run(consume_nats(args)),
    "nats-topic": replay,
}

if __name__ == "__main__":
    main()
