"""Services, stores, and positions in topics and tables with versions that commit 0db4065 left are read by today's code.

Every store is followed from its step on.
"""

import hashlib
import json
import signal
import sys
from base64 import b64decode
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from at_0db4065 import EXPECTED, GATE_FLAGS, check_restored, check_resumed, read_frames, replay_arguments
from brokers import MockKafka, Nats
from cli import outcome
from limits import HANG_S, until
from services import Process, client_of, connect, service_of
from stores import open_store, rows_of

import penstock as ps


def digest(rows):
    """Return the digest of a store. rows : table → id → the bytes of its row"""
    hashed = hashlib.sha256()
    for table, of_table in sorted(rows.items()):
        for id_, row in sorted(of_table.items()):
            hashed.update(f"{table}\0{id_}\0".encode() + row)
    return hashed.hexdigest()


pytestmark = pytest.mark.usefixtures("at_0db4065")


# ---- a service, and the stores that followed it


@contextmanager
def restored_service():
    """The service of the checkpoint. Its producer has sent all of its frames again, and what is new is committed."""
    engine, frames = check_service(), read_frames("service/frames.arrows")
    with service_of(engine, "service/commits", every=4, resume=True) as service:
        with client_of(service) as client:
            assert client.position("w0") == EXPECTED["service"]["producers"]["w0"]
            client.put(frames, "w0", first=1)
        yield service


def check_service():
    engine, wanted = ps.Engine.restore("service/commits"), EXPECTED["service"]
    positions = engine.session.positions
    assert (engine.global_step, positions.producers) == (wanted["step"], wanted["producers"])
    assert positions.lineage.id == wanted["lineage"]
    assert digest(rows_of(engine)) == wanted["rows"]
    return engine


def test_a_service_continues_its_producer_and_its_lineage():
    flags = ("--checkpoint", "service/commits", "--every", 4, "--num-required", 2, "--resume")
    with (
        Process("service/tables.pbtxt", *flags) as serving,
        connect(serving.uri, patience_s=HANG_S) as client,
    ):
        assert client.status()["lineage"] == EXPECTED["service"]["lineage"]
        assert client.position("w0") == EXPECTED["service"]["producers"]["w0"]
        client.put(read_frames("service/frames.arrows"), "w0", first=1)
        code, _, error = serving.end(signal.SIGTERM)
    assert code == 0, error
    assert ps.Engine.restore("service/commits").state_hash() == EXPECTED["service"]["resumed"]


def decoded(text):
    return None if text is None else b64decode(text)


def fill(kind, store):
    """Give a server what the store had: kinds of files have it already."""
    if kind == "redis":
        for key, fields in json.loads(Path("stores/redis.json").read_text()).items():
            store.client.hset(key, mapping={decoded(field): decoded(value) for field, value in fields})
    if kind == "kafka":
        producer = store.kafka.Producer({"bootstrap.servers": store.cluster.brokers})
        for line in Path("stores/kafka.json").read_text().splitlines():
            message = json.loads(line)
            producer.produce(
                "rows",
                key=decoded(message["key"]),
                value=decoded(message["value"]),
                partition=message["partition"],
                headers=[(name, decoded(value)) for name, value in message["headers"]],
            )
        assert producer.flush(HANG_S) == 0


@pytest.mark.parametrize("kind", ["delta", "kafka", "lance", "lmdb", "parquet", "redis"])
def test_a_store_is_followed_from_its_step_on(kind, capsys):
    wanted, place = EXPECTED["service"], Path("stores", kind)
    place.mkdir(exist_ok=True)
    with open_store(kind, place) as store:
        fill(kind, store)
        assert (store.step(), digest(store.read())) == (wanted["step"], wanted["rows"])
        with restored_service() as service:
            code, done, text = outcome(capsys, "follow", service.address.uri, "--into", store.target, "--once")
            assert code == 0, text
            assert rows_of(service.engine) == store.read()
        assert (done["full_copies"], done["deltas"] > 0) == (0, True)
        assert (store.step(), digest(store.read())) == (wanted["resumed_step"], wanted["resumed_rows"])


def test_a_function_is_called_from_the_step_of_its_state_file_on(monkeypatch, capsys):
    wanted, steps, changed = EXPECTED["service"], [], {"item": {}, "user": {}}

    def take(batch, step):
        assert b"penstock.full_copy" not in (batch.schema.metadata or {})
        steps.append(step)
        for row in batch.to_pylist():
            changed[row["table"]][row["id"]] = row["row"]

    monkeypatch.setitem(sys.modules, "follower", type(sys)("follower"))
    sys.modules["follower"].take = take
    with restored_service() as service:
        words = ("--into", "follower:take", "--state", "stores/function/state.json", "--once")
        code, done, text = outcome(capsys, "follow", service.address.uri, *words)
        assert (code, done["full_copies"]) == (0, 0), text
        assert steps[0] > wanted["step"]
        assert steps[-1] == wanted["resumed_step"]
        rows = rows_of(service.engine)
    for table, changes in changed.items():
        assert any(changes.values())
        for id_, row in changes.items():
            packed = None if row is None else pa.array(row, pa.float32()).to_numpy().tobytes()
            assert rows[table].get(id_) == packed
    assert json.loads(Path("stores/function/state.json").read_text())["step"] == wanted["resumed_step"]


# ---- positions in a topic, and in tables with versions


def messages():
    return [value for batch in read_frames("topic/messages.arrows") for value in batch["message"].to_pylist()]


@contextmanager
def kafka_topic(*more):
    """The topic as it was, with two partitions that take turns. more : further messages, in partition 0"""
    with MockKafka() as cluster:
        producer = pytest.importorskip("confluent_kafka").Producer({"bootstrap.servers": cluster.brokers})
        for number, message in [*enumerate(messages()), *((0, message) for message in more)]:
            producer.produce("gradients", message, partition=number % 2)
        assert producer.flush(HANG_S) == 0
        yield f"kafka://{cluster.brokers}/gradients"


@contextmanager
def nats_stream(tmp_path):
    """The stream as it was."""
    with Nats(tmp_path / "nats") as server:
        server.send(*messages())
        yield server.uri


def test_a_replay_continues_a_position_in_kafka(call):
    with kafka_topic() as uri:
        check_resumed(call, "topic/kafka", *replay_arguments("topic", uri), "--merge", "round")


def test_a_replay_continues_a_position_in_nats(call, tmp_path):
    with nats_stream(tmp_path) as uri:
        check_resumed(call, "topic/nats", *replay_arguments("topic", uri))


def serve_until(commits, flag, uri, producer, last):
    """Resume the service of a checkpoint, until it has applied a producer's message."""
    check_restored(commits)
    flags = ("--checkpoint", commits, "--every", 4, *GATE_FLAGS, "--resume")
    with (
        Process("topic/tables.pbtxt", flag, uri, *flags) as serving,
        connect(serving.uri, patience_s=HANG_S) as client,
    ):
        until(lambda: client.position(producer) == last)
        code, _, error = serving.end(signal.SIGTERM)
    assert code == 0, error
    return ps.Engine.restore(commits).state_hash()


def test_a_service_continues_positions_in_kafka():
    frames = [batch for message in messages()[:4] for batch in _batches(message)]
    wanted = ps.Engine.restore("topic/kafka-service")
    wanted.run(iter(frames))
    with kafka_topic(*messages()[:4]) as uri:
        state = serve_until("topic/kafka-service", "--kafka", uri, "kafka/gradients/0", 12 + 4)
    assert state == wanted.state_hash()


def _batches(message):
    with pa.ipc.open_stream(message) as reader:
        return list(reader)


@pytest.mark.parametrize(("kind", "library"), [("delta", "deltalake"), ("lance", "lance")])
def test_a_replay_continues_a_position_in_a_table_with_versions(kind, library, call):
    pytest.importorskip(library)
    check_resumed(call, f"versions/{kind}", *replay_arguments("versions", f"{kind}:versions/rows.{kind}"))
