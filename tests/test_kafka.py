"""Frames from Kafka, by the real client. librdkafka's mock cluster shows neither retention nor transactions."""

import subprocess
import sys
from pathlib import Path

import pytest
from brokers import message_of
from limits import HANG_S, until
from services import client_of, config_of, frame, replayed, service_of

from penstock.errors import StateError, UsageError
from penstock.io.brokers.kafka_partition import kafka_partitions

kafka = pytest.importorskip("confluent_kafka")
FRAMES = [frame(number) for number in range(30)]


@pytest.fixture
def brokers():
    script = Path(__file__).with_name("mock_kafka.py")
    words = [sys.executable, str(script)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cluster:
        yield cluster.stdout.readline().strip()
        cluster.stdin.close()
        cluster.wait(HANG_S)


def send(brokers, frames, partition=0):
    producer = kafka.Producer({"bootstrap.servers": brokers})
    for each in frames:
        producer.produce("gradients", message_of(each), partition=partition)
    producer.flush(HANG_S)


def test_offsets_are_positions_that_commits_contain(brokers, tmp_path):
    send(brokers, FRAMES[:12])
    first, *others = kafka_partitions(f"kafka://{brokers}/gradients")
    assert [each.producer for each in (first, *others)] == [f"kafka/gradients/{number}" for number in range(4)]
    for end in (12, 20, 30):
        send(brokers, FRAMES[12:20] if end == 20 else FRAMES[20:30] if end == 30 else [])
        if end > 12:
            (first, *_) = kafka_partitions(f"kafka://{brokers}/gradients")
        saved = {"folder": tmp_path / "c", "every": 5, "resume": end > 12}
        with (
            service_of(restored(tmp_path) if end > 12 else None, partitions=[first], **saved) as service,
            client_of(service) as client,
        ):
            until(lambda end=end, client=client: client.position("kafka/gradients/0") == end)
            assert service.engine.state_hash() == replayed(FRAMES[:end]).state_hash()


def restored(folder):
    import penstock as ps

    return ps.Engine.restore(folder / "c", config=config_of())


def test_every_partition_is_a_producer(brokers):
    send(brokers, FRAMES[:5], 0)
    send(brokers, FRAMES[5:9], 3)
    with (
        service_of(partitions=kafka_partitions(f"kafka://{brokers}/gradients")) as service,
        client_of(service) as client,
    ):
        until(lambda: [client.position(f"kafka/gradients/{number}") for number in (0, 3)] == [5, 4])
        assert service.status()["frames"] == 9


def test_an_offset_beyond_the_topic_is_a_topic_that_was_replaced(brokers, tmp_path):
    send(brokers, FRAMES[:5])
    with service_of(folder=tmp_path / "c", partitions=kafka_partitions(f"kafka://{brokers}/gradients")) as service:
        until(lambda: service.sequencer.position("kafka/gradients/0") == 5)
    engine = restored(tmp_path)
    engine.session.positions.producers["kafka/gradients/0"] = 50
    with (
        pytest.raises(StateError, match=r"partition 0, offset 49 is in the tables, and the topic ends before it"),
        service_of(engine, partitions=kafka_partitions(f"kafka://{brokers}/gradients")) as service,
    ):
        assert service.wants_to_end.wait(HANG_S)


def test_settings_are_those_of_the_client(brokers):
    with pytest.raises(UsageError, match=r'No such configuration property: "no\.such"'):
        kafka_partitions(f"kafka://{brokers}/gradients?no.such=1")
