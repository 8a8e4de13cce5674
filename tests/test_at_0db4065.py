"""What commit 0db4065 left on disk, in stores and in topics is read by today's code (tests/data/at_0db4065/write.py).

Every checkpoint resumes with the hash of a run that was never interrupted. Every store is followed from its step on.
"""

import json
import shutil
import signal
import sys
from base64 import b64decode
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from brokers import MockKafka, Nats
from cli import outcome
from deltas import example
from limits import HANG_S, until
from scripts import loaded
from services import Process, client_of, connect, service_of
from stores import STORES, opened, rows_of

import penstock as ps

DATA = Path(__file__).resolve().parent / "data" / "at_0db4065"
writer = loaded("tests/data/at_0db4065/write.py")
EXPECTED = json.loads((DATA / "expected.json").read_text())
GATE = {"cached": ("--num-required", 2)}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A copy of the folder, which is the working directory: commits name the sources as they were spelled."""
    shutil.copytree(DATA, tmp_path / "data", symlinks=True)
    monkeypatch.chdir(tmp_path / "data")


def replaying(folder, *sources):
    """The command of a replay of a folder's sources; without any, of its log."""
    sources = sources or (f"{folder}/log.arrows",)
    return "replay", f"{folder}/tables.pbtxt", *sources, *GATE.get(folder, writer.GATE)


def check_restored(commits):
    """The state of a checkpoint, and what its gate holds."""
    engine, wanted = ps.Engine.restore(commits), EXPECTED[commits]
    assert (engine.global_step, engine.gate.num_accumulated) == (wanted["step"], wanted["pending"])
    assert engine.state_hash() == wanted["restored"]
    return engine


def check_resumed(call, commits, *words):
    """A replay continues a checkpoint, commits, and has the hash of a run that was never interrupted."""
    check_restored(commits)
    _, report = call(0, *words, "--checkpoint", commits, "--resume")
    assert (report["skipped"], report["state_hash"]) == (EXPECTED[commits]["skipped"], EXPECTED[commits]["resumed"])
    assert ps.Engine.restore(commits).state_hash() == EXPECTED[commits]["resumed"]
    return report


def rows_in(path):
    """id → the values of its columns in a table that ``--out`` wrote."""
    table = pa.parquet.read_table(path)
    columns = [np.array(column.to_pylist(), np.float32) for column in table.columns[1:]]
    return {id_: tuple(column[n].tobytes() for column in columns) for n, id_ in enumerate(table["id"].to_pylist())}


# ---- checkpoints


@pytest.mark.parametrize("folder_name", ["static", "dynamic", "cached"])
def test_a_replay_continues_its_commits_its_deltas_and_its_bad_rows(folder_name, call):
    words, form = replaying(folder_name), ("--deltas", f"{folder_name}/deltas.arrows", "--deltas-slots", "all")
    begun = len(writer.read_frames(f"{folder_name}/deltas.arrows"))
    flags = ("--on-bad-row", f"quarantine={folder_name}/bad.arrows", *form, "--out", "out")
    tables = check_resumed(call, f"{folder_name}/commits", *words, *flags)["tables"]
    assert 0 < begun < len(writer.read_frames(f"{folder_name}/deltas.arrows"))
    call(0, *words, "--on-bad-row", "drop", "--limit", 0, "--out", "base")
    example.main("base", f"{folder_name}/deltas.arrows", "followed")
    for name, table in tables.items():
        rows, followed = (rows_in(Path(place, f"{name}.parquet")) for place in ("out", "followed"))
        assert rows.items() <= followed.items()
        # Expired keys are in the deltas until they are removed.
        assert len(followed) - len(rows) == table.get("keys", {}).get("expired_waiting", 0)
    bad_rows = sum(batch.num_rows for batch in writer.read_frames(f"{folder_name}/bad.arrows"))
    assert bad_rows == (0 if folder_name == "cached" else 2)


@pytest.mark.parametrize("commits", ["shares", "ray"])
def test_one_process_continues_the_commits_of_a_job(commits, call):
    check_resumed(call, f"job/{commits}", *replaying("job"), "--merge", "round")


@pytest.mark.parametrize("commits", ["shares", "ray"])
@pytest.mark.parametrize("count", [2, 3])
def test_shares_continue_the_commits_of_a_job(commits, count):
    from sharing import LocalJob

    config = ps.EmbeddingConfig.load("job/tables.pbtxt")
    job = LocalJob(config, count, f"job/{commits}")
    assert job.state_hash() == EXPECTED[f"job/{commits}"]["restored"]
    job.run(["job/log.arrows"])
    assert job.state_hash() == EXPECTED[f"job/{commits}"]["resumed"]


@pytest.mark.filterwarnings("default")  # Ray's own warnings
def test_a_job_on_a_cluster_continues_its_commits(call):
    pytest.importorskip("ray", reason="Ray is not installed", exc_type=ImportError)
    saving = ("--checkpoint", "job/ray", "--every", 2, "--resume")
    _, report = call(0, *replaying("job"), *saving, "--ray", "local", "--shares", 2)
    assert (report["skipped"], report["state_hash"]) == (EXPECTED["job/ray"]["skipped"], EXPECTED["job/ray"]["resumed"])


def test_a_replay_in_passes_continues_inside_a_pass(call):
    assert (
        len(list(Path("passes/commits/.passes").glob("*.json"))) == 2
    )  # the flags, and the first pass, which has ended
    saving = ("--checkpoint", "passes/commits", "--every", 1, "--deltas", "passes/deltas.arrows", "--resume")
    _, report = call(0, *replaying("passes"), "--passes", 3, *saving)
    assert report["state_hash"] == EXPECTED["passes"]["resumed"]
    call(0, *replaying("passes"), "--deltas", "whole.arrows")
    assert writer.read_frames("passes/deltas.arrows") == writer.read_frames("whole.arrows")


@pytest.mark.parametrize("folder_name", ["static", "dynamic", "cached"])
def test_a_replay_begins_at_tables_that_out_wrote(folder_name, call):
    _, report = call(0, *replaying(folder_name), "--on-bad-row", "drop", "--init", f"init/{folder_name}")
    assert report["state_hash"] == EXPECTED[f"init/{folder_name}"]["resumed"]


# ---- a service, and the stores that followed it


@contextmanager
def restored_service():
    """The service of the checkpoint. Its producer has sent all of its frames again, and what is new is committed."""
    engine, frames = check_service(), writer.read_frames("service/frames.arrows")
    with service_of(engine, "service/commits", every=4, resume=True) as service:
        with client_of(service) as client:
            assert client.position("w0") == EXPECTED["service"]["producers"]["w0"]
            client.put(frames, "w0", first=1)
        yield service


def check_service():
    engine, wanted = ps.Engine.restore("service/commits"), EXPECTED["service"]
    positions = engine.session.positions
    assert (engine.global_step, positions.producers) == (wanted["step"], wanted["producers"])
    assert positions.lineage == wanted["lineage"]
    assert writer.digest(rows_of(engine)) == wanted["rows"]
    return engine


def test_a_service_continues_its_producer_and_its_lineage():
    flags = ("--checkpoint", "service/commits", "--every", 4, "--num-required", 2, "--resume")
    with (
        Process("service/tables.pbtxt", *flags) as serving,
        connect(serving.uri, patience_s=HANG_S) as client,
    ):
        assert client.status()["lineage"] == EXPECTED["service"]["lineage"]
        assert client.position("w0") == EXPECTED["service"]["producers"]["w0"]
        client.put(writer.read_frames("service/frames.arrows"), "w0", first=1)
        code, _, error = serving.end(signal.SIGTERM)
    assert code in (0, 130), error  # 130 until SIGTERM became an end in order
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


@pytest.mark.parametrize("kind", STORES)
def test_a_store_is_followed_from_its_step_on(kind, capsys):
    wanted, place = EXPECTED["service"], Path("stores", kind)
    place.mkdir(exist_ok=True)
    with opened(kind, place) as store:
        fill(kind, store)
        assert (store.step(), writer.digest(store.read())) == (wanted["step"], wanted["rows"])
        with restored_service() as service:
            code, done, text = outcome(capsys, "follow", service.address.uri, "--into", store.target, "--once")
            assert code == 0, text
            assert rows_of(service.engine) == store.read()
        assert (done["anew"], done["deltas"] > 0) == (0, True)
        assert (store.step(), writer.digest(store.read())) == (wanted["resumed_step"], wanted["resumed_rows"])


def test_a_function_is_called_from_the_step_of_its_state_file_on(monkeypatch, capsys):
    wanted, steps, changed = EXPECTED["service"], [], {"item": {}, "user": {}}

    def take(batch, step):
        assert b"penstock.anew" not in (batch.schema.metadata or {})
        steps.append(step)
        for row in batch.to_pylist():
            changed[row["table"]][row["id"]] = row["row"]

    monkeypatch.setitem(sys.modules, "follower", type(sys)("follower"))
    sys.modules["follower"].take = take
    with restored_service() as service:
        words = ("--into", "follower:take", "--state", "stores/function/state.json", "--once")
        code, done, text = outcome(capsys, "follow", service.address.uri, *words)
        assert (code, done["anew"]) == (0, 0), text
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
    return [value for batch in writer.read_frames("topic/messages.arrows") for value in batch["message"].to_pylist()]


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
        check_resumed(call, "topic/kafka", *replaying("topic", uri), "--merge", "round")


def test_a_replay_continues_a_position_in_nats(call, tmp_path):
    with nats_stream(tmp_path) as uri:
        check_resumed(call, "topic/nats", *replaying("topic", uri))


def serve_until(commits, flag, uri, producer, last):
    """Resume the service of a checkpoint, until it has applied a producer's message."""
    check_restored(commits)
    flags = ("--checkpoint", commits, "--every", 4, *writer.GATE, "--resume")
    with (
        Process("topic/tables.pbtxt", flag, uri, *flags) as serving,
        connect(serving.uri, patience_s=HANG_S) as client,
    ):
        until(lambda: client.position(producer) == last)
        code, _, error = serving.end(signal.SIGTERM)
    assert code in (0, 130), error  # 130 until SIGTERM became an end in order
    return ps.Engine.restore(commits).state_hash()


def test_a_service_continues_a_position_in_nats(tmp_path):
    with nats_stream(tmp_path) as uri:
        state = serve_until("topic/nats-service", "--nats", uri, "nats/gradients", writer.NUM_FRAMES)
    assert state == EXPECTED["topic/nats"]["resumed"]


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
    check_resumed(call, f"versions/{kind}", *replaying("versions", f"{kind}:versions/rows.{kind}"))
