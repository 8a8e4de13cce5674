"""Frames from Kafka, by the real client. librdkafka's mock cluster shows neither retention nor transactions."""

import pytest
from brokers import MockKafka, growing_topic, message_of
from limits import HANG_S, until
from services import client_of, config_of, frame, replayed, service_of

import penstock as ps
from penstock.base.errors import InputError, StateError, UsageError
from penstock.contrib.connectors import kafka_topic_id
from penstock.contrib.connectors.kafka_partition import kafka_partitions

kafka = pytest.importorskip("confluent_kafka")
FRAMES = [frame(number) for number in range(30)]


@pytest.fixture
def brokers():
    cluster = MockKafka()
    yield cluster.brokers
    cluster.close()


def send(brokers, frames, partition=0, topic="gradients"):
    producer = kafka.Producer({"bootstrap.servers": brokers})
    for each in frames:
        producer.produce(topic, message_of(each), partition=partition)
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


@pytest.mark.parametrize("merge", [None, "round"])
def test_a_replay_reads_the_partitions_in_order_and_continues(brokers, tmp_path, merge):
    send(brokers, FRAMES[0:10:2], 0)
    send(brokers, FRAMES[1:10:2], 1)
    uri = f"kafka://{brokers}/gradients"
    order = FRAMES[:10] if merge else FRAMES[0:10:2] + FRAMES[1:10:2]
    for stop in (3, None):
        engine = restored(tmp_path) if stop is None else ps.Engine(config_of())
        engine.run(uri, merge=merge, limit=stop, checkpoint=tmp_path / "c", resume=stop is None)
    assert engine.state_hash() == replayed(order).state_hash()


def committed(brokers):
    """The offset that Kafka shows for partition 0."""
    reader = kafka.Consumer({"bootstrap.servers": brokers, "group.id": "penstock"})
    (actual,) = reader.committed([kafka.TopicPartition("gradients", 0)], timeout=HANG_S)
    reader.close()
    return actual.offset


def test_kafka_shows_the_offsets_of_commits(brokers, tmp_path):
    send(brokers, FRAMES[:9])
    uri = f"kafka://{brokers}/gradients"
    ps.Engine(config_of()).run(uri, limit=6, checkpoint=tmp_path / "c", every=2)
    assert committed(brokers) == 6
    with service_of(restored(tmp_path), folder=tmp_path / "c", resume=True, partitions=kafka_partitions(uri)):
        until(lambda: committed(brokers) == 9)


def test_brokers_that_are_gone_are_bad_input_after_patience(tmp_path):
    cluster = MockKafka()
    send(cluster.brokers, FRAMES[:3])
    engine = ps.Engine(config_of())

    def close(*_):
        if engine.global_step == 3:
            cluster.close()

    with pytest.raises(InputError, match=r"partition 0: the broker cannot be reached: .*brokers are down"):
        engine.run(
            f"kafka://{cluster.brokers}/gradients", follow=True, patience=0.2, checkpoint=tmp_path / "c", progress=close
        )
    assert restored(tmp_path).state_hash() == replayed(FRAMES[:3]).state_hash()


def test_settings_are_those_of_the_client(brokers):
    with pytest.raises(UsageError, match=r'No such configuration property: "no\.such"'):
        kafka_partitions(f"kafka://{brokers}/gradients?no.such=1")


@pytest.mark.parametrize("follows", [False, True])
def test_new_partitions_are_read_by_the_next_run_and_reported_meanwhile(
    brokers, tmp_path, monkeypatch, caplog, follows
):
    grow = growing_topic(monkeypatch)
    monkeypatch.setattr(kafka_topic_id, "TRUSTED_S", 0.0)
    uri, engine = f"kafka://{brokers}/gradients", ps.Engine(config_of())
    send(brokers, FRAMES[:3])

    def add_partitions(*_):
        if engine.global_step == 3:
            grow()
            send(brokers, FRAMES[3:4])

    engine.run(uri, follow=follows, limit=3 + follows, checkpoint=tmp_path / "c", every=1, progress=add_partitions)
    grown = [each.message for each in caplog.records if "topic_has_grown" in each.message]
    assert len(grown) == follows
    assert all(each.endswith('partitions=4 read=1 hint="restart to read the others"') for each in grown)
    grow()
    send(brokers, FRAMES[4:6], 2)
    engine = restored(tmp_path)
    engine.run(uri, checkpoint=tmp_path / "c", resume=True)
    assert engine.state_hash() == replayed(FRAMES[:6]).state_hash()


def test_several_topics_of_which_the_first_one_has_grown_continue(brokers, tmp_path, monkeypatch):
    grow = growing_topic(monkeypatch)
    send(brokers, FRAMES[:3])
    send(brokers, FRAMES[3:5], topic="others")
    uris = [f"kafka://{brokers}/gradients", f"kafka://{brokers}/others"]
    ps.Engine(config_of()).run(uris, checkpoint=tmp_path / "c")
    grow()
    send(brokers, FRAMES[5:7], 2)
    with pytest.raises(StateError, match="holds 3 frames of kafka/gradients/0 in its place"):
        restored(tmp_path).run(uris[::-1], checkpoint=tmp_path / "c", resume=True)
    engine = restored(tmp_path)
    engine.run(uris, checkpoint=tmp_path / "c", resume=True)
    assert engine.state_hash() == replayed(FRAMES[:7]).state_hash()


def test_a_service_reports_new_partitions(brokers, monkeypatch, caplog):
    grow = growing_topic(monkeypatch)
    monkeypatch.setattr(kafka_topic_id, "TRUSTED_S", 0.0)
    send(brokers, FRAMES[:1])
    with service_of(partitions=kafka_partitions(f"kafka://{brokers}/gradients")):
        grow()
        until(lambda: "topic_has_grown" in caplog.text)
