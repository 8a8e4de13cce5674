"""``penstock serve --replica``: lookups from the files that a follower writes, on other machines too."""

import signal
from contextlib import contextmanager

import numpy as np
import pyarrow.flight as flight
import pytest
from cli import outcome
from limits import in_thread, until
from services import LOOPBACK, Process, client_of, free_port, service_of
from stores import ITEMS, Shared, config_of, frame, rows_of

import penstock as ps
from penstock.cli import main
from penstock.serving.flight import connect
from penstock.serving.followers.follower import Follower
from penstock.serving.service.auth import Role
from penstock.serving.service.flight_server import AnsweringServer
from penstock.serving.service.replica import ReplicaService
from penstock.serving.shared.table_writer import SharedTable, SharedWriter

FRAMES = [frame(step) for step in range(30)]


@pytest.fixture
def store(tmp_path):
    return Shared(tmp_path)


def follow(service, store):
    follower = Follower(client_of(service), store.open_target(), patience_s=0.1, interval_s=0.01)
    follower.run(once=True)
    follower.target.close()


@contextmanager
def replica_of(reader, **arguments):
    service = ReplicaService(reader, LOOPBACK, **arguments)
    try:
        yield service
    finally:
        assert service.close(0)


def test_a_call_as_soon_as_a_service_or_a_replica_listens_is_answered(store, monkeypatch):
    listen, calls = AnsweringServer.__init__, []

    def called_at_once(server, service, *arguments):
        listen(server, service, *arguments)
        calls.append(service.status()["calls"])

    monkeypatch.setattr(AnsweringServer, "__init__", called_at_once)
    with service_of(ps.Engine(config_of())) as service:
        follow(service, store)
        with replica_of(ps.Reader(store.path)):
            assert calls == [0, 0]


def test_a_replica_answers_what_the_engine_has_at_each_step_that_was_followed(store):
    with service_of(ps.Engine(config_of()), per_steps=1) as service, client_of(service) as client:
        follow(service, store)
        with replica_of(ps.Reader(store.path)) as replica, client_of(replica) as reading:
            for end in (1, 5, 30):
                client.put(FRAMES[:end], "w0", first=1)
                follow(service, store)  # by another follower each time, so that there are new files
                rows = rows_of(service.engine)
                keys = np.array(list(rows["user"]), np.uint64)
                answer = reading.lookup({"item": np.arange(ITEMS), "user": keys}, consistent=True)
                assert [row.tobytes() for row in answer["item"]] == list(rows["item"].values())
                assert [row.tobytes() for row in answer["user"]] == list(rows["user"].values())
                assert (answer.version.step, answer.durable_step) == (end, end)
                assert answer.version.lineage == service.engine.version.lineage
                table = reading.table("user")
                actual = {int(key): row.tobytes() for key, row in zip(table.keys, table.rows, strict=True)}
                assert (actual, table.version.step) == (rows["user"], end)
                np.testing.assert_array_equal(reading.table("item").rows, answer["item"])
            assert reading.tables()["user"].field("id").type == "uint64"
            assert reading.status()["global_step"] == 30


def test_rows_read_while_a_follower_continues_in_another_epoch_are_not_named_after_it(tmp_path):
    writer = SharedWriter(tmp_path)
    writer.create([SharedTable("item", 2, 4)])
    writer.publish(ps.Version("lineage-first-7"), 7)
    reader = ps.Reader(tmp_path)
    read = reader._read

    def overtaken(*arguments, **options):
        """The rows before another epoch, which has begun when they are returned."""
        rows = read(*arguments, **options)
        if reader.version.epoch == "first":
            with writer.step(ps.Version("lineage-second-7"), 7):
                writer.write("item", np.arange(4), np.ones((4, 2)))
        return rows

    reader._read = overtaken
    with replica_of(reader) as service, client_of(service) as reading:
        answer = reading.lookup({"item": [3]}, consistent=True)
        assert (answer.version.epoch, answer["item"].tolist()) == ("second", [[1, 1]])
    writer.close()


@pytest.mark.parametrize(("item", "method"), [((4, 4), "lookup"), ((2, 8), "table")])
def test_tables_that_change_while_they_are_read_are_read_again(item, method, tmp_path):
    writer = SharedWriter(tmp_path)
    writer.create([SharedTable("item", 2, 4), SharedTable("user", 4, 4)])
    writer.publish(ps.Version("lineage-first-7"), 7)
    reader = ps.Reader(tmp_path)
    lookup = reader.lookup

    def changed(*arguments, **options):
        """The rows of the tables that a follower publishes after the service has looked which tables there are."""
        if reader.version.epoch == "first":
            writer.create([SharedTable("item", *item), SharedTable("user", 2, 4)])
            writer.write("item", np.arange(item[1]), np.full(item[::-1], 3.0))
            writer.publish(ps.Version("lineage-second-7"), 7)
        return lookup(*arguments, **options)

    reader.lookup = changed
    with replica_of(reader) as service, client_of(service) as reading:
        if method == "lookup":
            answer = reading.lookup({"item": [3], "user": [1]})
            assert (answer["item"].tolist(), answer["user"].shape) == ([[3.0] * 4], (1, 2))
        else:
            assert reading.table("item").rows.tolist() == [[3.0] * 2] * 8
    writer.close()


def test_a_replica_refuses_everything_but_reads_in_one_line(store):
    with service_of(ps.Engine(config_of()), per_steps=1) as service:
        follow(service, store)
        with replica_of(ps.Reader(store.path)) as replica, client_of(replica, patience_s=0.1) as reading:
            for call, problem in [
                (lambda: reading.put(FRAMES[:1], "w0", first=1), "a replica takes no gradients"),
                (lambda: list(reading.deltas()), "the ticket: expected table, got deltas"),
                (lambda: reading.table("x"), r"no table 'x' in the replica \(item, user\)"),
                (lambda: reading.lookup({"x": [1]}), "no table 'x'"),
                (lambda: reading.lookup({"item": [ITEMS]}), "expected 0 <= id < 30, got 30"),
                (lambda: reading.checkpoint(), "action 'checkpoint': expected one of status, drain"),
            ]:
                with pytest.raises(ps.PenstockError, match=problem) as caught:
                    call()
                assert "\n" not in str(caught.value)
            refused = pytest.raises(flight.FlightServerError, match="expected lookup or table/NAME; a replica takes no")
            with flight.connect(replica.address.uri) as raw, refused:
                raw.get_flight_info(flight.FlightDescriptor.for_path("gradients"))


def test_a_replica_needs_the_token(store):
    with service_of(ps.Engine(config_of()), per_steps=1) as service:
        follow(service, store)
        tokens = {b"s3cret": Role.READER, b"pr0ducer": Role.PRODUCER}
        with replica_of(ps.Reader(store.path), tokens=tokens) as replica:
            refused = pytest.raises(ps.ServiceError, match="the token is missing or wrong")
            with client_of(replica, token="", patience_s=0.1) as reading, refused:
                reading.lookup({"item": [1]})
            with client_of(replica, token="s3cret") as reading:
                assert reading.lookup({"item": [1]}).version.step == 0
                with pytest.raises(ps.ServiceError, match="the token is a reader's, and this call needs an operator's"):
                    reading.drain()
            refused = pytest.raises(
                ps.ServiceError, match="the token is a producer's, and this call needs a reader or operator's"
            )
            with client_of(replica, token="pr0ducer", patience_s=0.1) as reading, refused:
                reading.lookup({"item": [1]})


def test_the_command_serves_a_folder_until_a_drain_or_a_signal(store):
    with service_of(ps.Engine(config_of()), per_steps=1) as service:
        follow(service, store)
        for end in ("drain", signal.SIGTERM, signal.SIGINT):
            with Process("--replica", store.path) as replica, connect(replica.uri) as reading:
                expected = service.engine.lookup("item", [3, 4])
                np.testing.assert_array_equal(reading.lookup({"item": [3, 4]})["item"], expected)
                if end == "drain":
                    reading.drain()
                    code, _, err = replica.wait()
                    assert (code, err) == (0, "")
                else:
                    code, _, err = replica.end(end)
                    assert (code, err) == ((0, "") if end == signal.SIGTERM else (130, "penstock: interrupted\n"))


def test_a_replica_waits_for_its_follower_and_says_so(store, caplog):
    uri = f"grpc://127.0.0.1:{free_port()}"
    serving = in_thread(lambda: main(["serve", "--replica", str(store.path), "--listen", uri]))
    until(lambda: "has no shared tables; start their writer first" in caplog.text)
    with service_of(ps.Engine(config_of())) as service:
        follow(service, store)
        with connect(uri) as reading:
            assert reading.status().version.lineage == service.engine.version.lineage
            reading.drain()
    assert serving() == 0


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        ([], 2, "give CONFIG, or --replica DIR"),
        (["tables.pbtxt", "--replica", "x"], 2, "CONFIG: has no effect with --replica; omit it"),
        (["--replica", "x", "--checkpoint", "c"], 2, "--checkpoint: has no effect with --replica; omit it"),
        (["--replica", "x", "--listen", "grpc://0.0.0.0:1"], 2, "others can reach this address"),
    ],
)
def test_a_replica_that_cannot_start_is_one_line(words, code, problem, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    actual, _, text = outcome(capsys, "serve", *words)
    assert (actual, text.count("\n")) == (code, 1)
    assert problem in text
