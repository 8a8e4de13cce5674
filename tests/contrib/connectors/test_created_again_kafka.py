"""Kafka topics that were created again. librdkafka's mock cluster gives them no ids: the tests do."""

from types import SimpleNamespace

import pytest
from brokers import MockKafka, message_of
from limits import HANG_S
from services import config_of, frame, replayed, service_of

import penstock as ps
from penstock.base.errors import StateError
from penstock.contrib.connectors import kafka_topic_id
from penstock.contrib.connectors.kafka_client import kafka_topic
from penstock.contrib.connectors.kafka_partition import kafka_partitions
from penstock.contrib.connectors.kafka_topic_id import TopicId
from penstock.io.partitions.partition_source import PartitionSource

kafka = pytest.importorskip("confluent_kafka")
from confluent_kafka import admin  # noqa: E402

FRAMES = [frame(number, step=number) for number in range(30)]
OTHERS = [frame(number, step=number, seed=1) for number in range(30)]
MESSAGES, OTHER_MESSAGES = [message_of(each) for each in FRAMES], [message_of(each) for each in OTHERS]


@pytest.fixture
def topic_id(monkeypatch):
    """topic_id("A"): from now on the brokers give this id."""
    monkeypatch.setattr(kafka_topic_id, "TRUSTED_S", 0.0)

    def give(text):
        monkeypatch.setattr(TopicId, "_ask", lambda *_: f"id {text}")

    return give


def sent(brokers, messages, partition=0):
    producer = kafka.Producer({"bootstrap.servers": brokers})
    for message in messages:
        producer.produce("gradients", message, partition=partition)
    assert producer.flush(HANG_S) == 0


@pytest.mark.parametrize("count", [2, 5, 12], ids=["shorter", "equal", "longer"])
def test_a_kafka_topic_that_was_created_again_is_refused(topic_id, tmp_path, count):
    topic_id("A")
    with MockKafka() as cluster:
        sent(cluster.brokers, MESSAGES[:5], 1)  # nothing in the other partitions
        ps.Engine(config_of()).run(f"kafka://{cluster.brokers}/gradients", limit=4, checkpoint=tmp_path / "c")
        engine = ps.Engine.restore(tmp_path / "c")
        engine.run(f"kafka://{cluster.brokers}/gradients", checkpoint=tmp_path / "c", resume=True)
        assert engine.state_hash() == replayed(FRAMES[:5]).state_hash()
    topic_id("B")
    problem = r"partition 1, offset 5 is next, and the topic was deleted and created again \(expected id A, got id B\)"
    with MockKafka() as cluster:
        sent(cluster.brokers, OTHER_MESSAGES[:count], 1)
        uri = f"kafka://{cluster.brokers}/gradients"
        with pytest.raises(StateError, match=problem):
            ps.Engine.restore(tmp_path / "c").run(uri, merge=None, checkpoint=tmp_path / "c", resume=True)
        engine = ps.Engine.restore(tmp_path / "c", config=config_of())
        with (
            pytest.raises(StateError, match=problem),
            service_of(engine, tmp_path / "c", resume=True, partitions=kafka_partitions(uri)) as service,
        ):
            assert service.wants_to_end.wait(HANG_S)
    assert ps.Engine.restore(tmp_path / "c").state_hash() == replayed(FRAMES[:5]).state_hash()


def test_a_kafka_topic_that_is_created_again_under_a_reader_is_noticed(topic_id, tmp_path):
    topic_id("A")
    with MockKafka() as cluster:
        sent(cluster.brokers, MESSAGES[:5])
        partitions = kafka_partitions(f"kafka://{cluster.brokers}/gradients")
        engine = ps.Engine(config_of())

        def create_again(*_):
            if engine.global_step == 5:
                topic_id("B")
                sent(cluster.brokers, OTHER_MESSAGES[5:12])

        with pytest.raises(
            StateError, match="partition 0, offset 5 is next, and the topic was deleted and created again"
        ):
            engine.run(
                [PartitionSource(each, HANG_S) for each in partitions],
                follow=True, checkpoint=tmp_path / "c", every=1, progress=create_again,
            )  # fmt: skip
    assert ps.Engine.restore(tmp_path / "c").state_hash() == replayed(FRAMES[:5]).state_hash()


def test_librdkafkas_mock_cluster_has_no_ids():
    with MockKafka() as cluster:
        sent(cluster.brokers, MESSAGES[:1])
        partition, *_ = kafka_partitions(f"kafka://{cluster.brokers}/gradients")
        assert partition.creation() is None
        partition.close()


class Administrator:
    """Answers as brokers with ids do. bits : of the id, the higher and the lower half"""

    def __init__(self, *bits):
        self.uuid = kafka.Uuid(*bits)

    def __call__(self, settings, logger):
        self.settings = settings
        return self

    def describe_topics(self, topics, request_timeout):
        return {"gradients": self}

    def result(self):
        self.topic_id = self.uuid
        return self


class Consumer:
    """Only the metadata of a cluster whose controller can be reached."""

    controller_id, brokers = 1, (1,)
    topics = {"gradients": SimpleNamespace(partitions={0: None})}  # noqa: RUF012 (a constant of the class)

    def list_topics(self, name, timeout):
        return self


def test_the_id_is_that_of_the_topics_description(monkeypatch):
    topic = kafka_topic("kafka://b:1/gradients?client.id=me")
    for bits, wanted in {(0, 7): "id AAAAAAAAAAAAAAAAAAAABw", (0, 0): None}.items():
        administrator = Administrator(*bits)
        monkeypatch.setattr(admin, "AdminClient", administrator)
        assert TopicId(topic, 1).ask(Consumer()) == wanted
        assert administrator.settings == {"client.id": "me", "bootstrap.servers": "b:1"}
    refused = kafka.KafkaException(kafka.KafkaError(kafka.KafkaError._TIMED_OUT))
    monkeypatch.setattr(Administrator, "result", lambda _: (_ for _ in ()).throw(refused))
    with pytest.raises(OSError, match="Timed out"):
        TopicId(topic, 1).ask(Consumer())
