"""A partition of Kafka over a scripted client: what librdkafka's mock cluster does not show."""

from types import SimpleNamespace

import pytest
from brokers import message_of
from services import config_of, frame, replayed

import penstock as ps
from penstock.base.errors import StateError
from penstock.contrib.connectors.kafka_client import Topic, kafka_failures, kafka_topic
from penstock.contrib.connectors.kafka_partition import KafkaPartition
from penstock.io.partitions.partition_reader import PartitionReader
from penstock.io.partitions.partition_source import PartitionSource

kafka = pytest.importorskip("confluent_kafka")
EOF = kafka.KafkaError._PARTITION_EOF


def arrival(offset, error=None, value=b""):
    return SimpleNamespace(
        offset=lambda: offset, value=lambda: value, error=lambda: None if error is None else kafka.KafkaError(error)
    )


class Scripted:
    """A consumer. arrivals : what it receives, in order; low, high : of the offsets that the broker has"""

    def __init__(self, arrivals, low=0, high=10):
        self.arrivals, self.low, self.high, self.assigned = list(arrivals), low, high, []

    def assign(self, partitions):
        self.assigned += [each.offset for each in partitions]

    def poll(self, timeout):
        return self.arrivals.pop(0) if self.arrivals else None

    def consume(self, num_messages, timeout):
        actual, self.arrivals = self.arrivals, []
        return actual

    def get_watermark_offsets(self, partition, timeout, cached):
        return self.low, self.high

    def close(self):
        pass


def partition_of(consumer):
    client = SimpleNamespace(
        Consumer=lambda settings, logger: consumer,
        KafkaException=kafka.KafkaException,
        TopicPartition=kafka.TopicPartition,
    )
    no_id = SimpleNamespace(ask=lambda consumer: None, recent=lambda consumer: None)
    return KafkaPartition(Topic(client, "t", {}, "kafka://b/t"), no_id, 0)


def numbers(reader):
    return [message.number for message in reader.read(0)]


def test_an_offset_that_is_out_of_range_is_an_incompatible_state():
    consumer = Scripted([arrival(3, kafka.KafkaError.OFFSET_OUT_OF_RANGE)])
    reader = PartitionReader(partition_of(consumer), 3, 60)
    assert numbers(reader) == []
    consumer.low = 6
    with pytest.raises(
        StateError, match=r"partition 0, offset 3 is next, and the topic retains only what follows .* 5;"
    ):
        reader.read(0)


def test_messages_before_an_error_are_read_and_the_next_one_follows_them():
    consumer = Scripted([arrival(0), arrival(1), arrival(2, kafka.KafkaError._TRANSPORT), arrival(5)])
    reader = PartitionReader(partition_of(consumer), 0, 60)
    assert numbers(reader) == [1, 2]
    assert consumer.assigned == [0, 2]


def test_an_aborted_transaction_and_a_marker_at_the_end_end_a_replay():
    frames = [frame(0), frame(1), frame(2)]
    values = map(message_of, frames)
    consumer = Scripted([*(arrival(offset, value=next(values)) for offset in (0, 1, 6)), arrival(10, EOF)])
    engine = ps.Engine(config_of())
    assert engine.run(PartitionSource(partition_of(consumer), 60)).frames == 3
    assert engine.state_hash() == replayed(frames).state_hash()


def test_a_fatal_error_that_shows_after_the_first_one_is_reported():
    def poll(timeout):
        raise kafka.KafkaException(kafka.KafkaError(kafka.KafkaError._FENCED, "fenced by a newer instance", fatal=True))

    topic = kafka_topic("kafka://127.0.0.1:1/rows")
    with pytest.raises(OSError, match="fenced by a newer instance"), kafka_failures(topic, SimpleNamespace(poll=poll)):
        raise kafka.KafkaException(kafka.KafkaError(kafka.KafkaError._TRANSPORT))
