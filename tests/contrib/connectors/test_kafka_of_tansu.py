"""The Kafka source and target against Tansu, a second implementation of the protocol: topic ids and transactions.

Its offset "latest" may be wrong, so that a reading of what is there may end early: these tests follow.
"""

from contextlib import closing

import pytest
from brokers import Tansu, message_of, numbers_of
from cli import outcome
from limits import suspend, until
from services import client_of, replayed, service_of
from services import config_of as config_of_frames
from services import frame as source_frame
from stores import KafkaOfTansu, config_of, frame, rows_of

import penstock as ps
from penstock.base.errors import InputError, StateError, TargetError
from penstock.contrib.connectors import kafka_client
from penstock.contrib.connectors.kafka_partition import kafka_partitions
from penstock.io.partitions.partition_reader import PartitionReader
from penstock.serving.followers.follower import Follower

SENT = [source_frame(number) for number in range(20)]
MESSAGES = [message_of(each) for each in SENT]
FRAMES = [frame(step) for step in range(40)]


@pytest.fixture
def broker():
    with Tansu() as broker:
        broker.create("gradients", 2)
        yield broker


@pytest.fixture
def store(tmp_path):
    with closing(KafkaOfTansu(tmp_path)) as store:
        yield store


def test_a_replay_follows_and_continues_over_the_markers_of_transactions(broker, tmp_path):
    uri = f"kafka://{broker.brokers}/gradients"
    for first in range(0, 10, 5):
        broker.send("gradients", MESSAGES[first : first + 5], **{"transactional.id": "trainer"})
    ps.Engine(config_of_frames()).run(uri, follow=True, limit=7, checkpoint=tmp_path / "c")
    broker.send("gradients", MESSAGES[10:])
    engine = ps.Engine.restore(tmp_path / "c")
    engine.run(uri, follow=True, limit=20, checkpoint=tmp_path / "c", resume=True)
    assert engine.state_hash() == replayed(SENT).state_hash()


def test_a_service_reads_every_partition(broker):
    broker.send("gradients", MESSAGES[:5], 0)
    broker.send("gradients", MESSAGES[5:9], 1)
    partitions = kafka_partitions(f"kafka://{broker.brokers}/gradients")
    with service_of(partitions=partitions) as service, client_of(service) as client:
        until(lambda: [client.position(f"kafka/gradients/{number}") for number in (0, 1)] == [5, 4])


def test_a_broker_that_stops_to_answer_is_noticed(broker, monkeypatch):
    monkeypatch.setattr(kafka_client, "SOCKET_MS", "2000")
    broker.send("gradients", MESSAGES[:2])
    (partition, _) = kafka_partitions(f"kafka://{broker.brokers}/gradients")
    reader = PartitionReader(partition, 0, patience_s=0)
    with closing(partition):
        assert numbers_of(reader, 2) == [1, 2]
        suspend(broker.process)
        with pytest.raises(InputError, match="the broker cannot be reached"):
            numbers_of(reader, 1)


def test_a_topic_that_was_created_again_is_refused(broker, tmp_path):
    uri = f"kafka://{broker.brokers}/gradients"
    broker.send("gradients", MESSAGES[:5])
    ps.Engine(config_of_frames()).run(uri, follow=True, limit=5, checkpoint=tmp_path / "c")
    broker.delete("gradients")
    broker.create("gradients", 2)
    broker.send("gradients", MESSAGES[5:15])
    with pytest.raises(StateError, match=r"the topic was deleted and created again \(expected id \S+, got id \S+\)"):
        ps.Engine.restore(tmp_path / "c").run(uri, follow=True, checkpoint=tmp_path / "c", resume=True)


def test_a_topic_equals_the_tables_after_every_transaction(store, capsys):
    with service_of(ps.Engine(config_of())) as service, client_of(service) as client:
        for end in (11, 25, 40):
            client.put(FRAMES[:end], "w0", first=1)
            code, done, error = outcome(capsys, "follow", service.address.uri, "--into", store.target, "--once")
            assert (code, done["full_copies"]) == (0, end == 11), error
            assert store.step() == end
            assert store.read() == rows_of(service.engine)
    with service_of(ps.Engine(config_of(), seed=1)) as service:
        code, done, error = outcome(
            capsys, "follow", service.address.uri, "--into", store.target, "--once", "--replace"
        )
        assert code == 0, error
        assert store.read() == rows_of(service.engine)


def test_a_new_follower_fences_the_one_before(store):
    with service_of(ps.Engine(config_of())) as service, client_of(service) as client:
        first, second = (Follower(client, store.open_target(), 0.0, 0.0) for _ in range(2))
        first.run(once=True)
        second.run(once=True)
        client.put(FRAMES[:3], "w0")
        with pytest.raises(TargetError, match="fenced"):
            first.run(once=True)
        second.run(once=True)
        assert store.read() == rows_of(service.engine)
        for each in (first, second):
            each.target.close()
