"""A Kafka topic whose number of partitions changes: no message of a key is written to another partition."""

from typing import ClassVar

import pytest
from brokers import growing_topic
from cli import outcome
from services import client_of, service_of
from stores import config_of, frame, open_store, rows_of

import penstock as ps
from penstock.base.errors import StateError
from penstock.serving.followers.follower import Follower

kafka = pytest.importorskip("confluent_kafka")
FRAMES = [frame(step) for step in range(20)]
GROWN = (
    "/rows: the topic had 1 partition, now 4: the rows of a key would be in several of them; follow into a new topic"
)


@pytest.fixture
def grow(monkeypatch):
    return growing_topic(monkeypatch)


@pytest.fixture
def store(tmp_path):
    with open_store("kafka", tmp_path) as store:
        yield store


def test_a_topic_that_has_grown_is_refused_before_a_write(store, grow, capsys, refused):
    with service_of(ps.Engine(config_of())) as service, client_of(service) as client:
        for end in (5, 9):
            client.put(FRAMES[:end], "w0", first=1)
            code, _, error = outcome(capsys, "follow", service.address.uri, "--into", store.target, "--once")
            assert code == 0, error
        written, rows = len(store.messages()), rows_of(service.engine)
        grow()
        client.put(FRAMES, "w0", first=1)
        assert GROWN in refused(5, "follow", service.address.uri, "--into", store.target, "--once")
    with service_of(ps.Engine(config_of(), seed=1)) as service:
        assert GROWN in refused(5, "follow", service.address.uri, "--into", store.target, "--once", "--replace")
    assert (len(store.messages()), store.read()) == (written, rows)


@pytest.mark.parametrize("written_by", ["replace", "apply"])
def test_a_topic_that_grows_during_a_transaction_commits_nothing_of_it(store, grow, written_by, monkeypatch):
    class Producer(kafka.Producer):
        outcomes: ClassVar[list[str]] = []  # of all transactions
        sent = 0

        def produce(self, *args, **keywords):
            Producer.sent += 1
            if (Producer.sent, len(self.outcomes)) == (1, written_by == "apply"):
                grow()
            super().produce(*args, **keywords)

        def commit_transaction(self, *args):
            super().commit_transaction(*args)
            Producer.outcomes.append("committed")
            Producer.sent = 0

        def abort_transaction(self, *args):
            super().abort_transaction(*args)
            Producer.outcomes.append("aborted")

    monkeypatch.setattr(kafka, "Producer", Producer)
    with service_of(ps.Engine(config_of())) as service, client_of(service) as client:
        follower = Follower(client, store.open_target(), 0.0, 0.0)
        if written_by == "apply":
            follower.run(once=True)
            client.put(FRAMES[:3], "w0")
        with pytest.raises(StateError, match="the topic had 1 partition, now 4"):
            follower.run(once=True)
        follower.target.close()
    assert Producer.outcomes == ["committed"] * (written_by == "apply") + ["aborted"]
