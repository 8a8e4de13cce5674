"""Lookups over DoExchange: rows of several tables in one answer, in the order of its request; and bad requests."""

import json
import re
import threading
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from limits import HANG_S, in_thread, until
from services import Process, client_of, config_of, frame, free_port, service_of

import penstock as ps
from penstock.serving.flight import connect
from penstock.serving.service.auth import Role
from penstock.serving.service.limits import Limits

FRAMES = [frame(n) for n in range(12)]


def engine_of(*dims, optimizer=None):
    """An engine with a table per dim, t0, t1, …, of 500 rows."""
    tables = [ps.TableConfig(500, dim, name=f"t{n}", optimizer=optimizer or ps.SGD(0.5)) for n, dim in enumerate(dims)]
    return ps.Engine(ps.EmbeddingConfig.from_tables(tables))


class Raw:
    """An exchange for lookups, as any Flight client opens it."""

    def __init__(self, service):
        self._client = flight.connect(service.address.uri)
        self.writer, self.reader = self._client.do_exchange(flight.FlightDescriptor.for_path("lookup"))
        self._begun = False

    def ask(self, columns, metadata=None):
        """Send a request, and return its answer."""
        batch = pa.record_batch(columns)
        if not self._begun:
            self.writer.begin(batch.schema)
            self._begun = True
        self.writer.write_with_metadata(batch, metadata) if metadata else self.writer.write_batch(batch)
        return self.reader.read_chunk()

    def rows(self, columns, metadata=None):
        """Return the rows of an answer as lists."""
        return self.ask(columns, metadata).data["row"].to_pylist()

    def error(self, columns, metadata=None):
        """Return the error of an answer, which has no rows."""
        answer = self.ask(columns, metadata)
        assert answer.data.num_rows == 0
        error = json.loads(answer.app_metadata.to_pybytes())["error"]
        assert error["kind"] == "InputError"
        return error["message"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.reader.cancel()
        self._client.close()


@pytest.mark.parametrize("dims", [(4, 4), (2, 7, 1)])
def test_a_lookup_has_the_rows_of_all_its_tables(dims):
    engine = engine_of(*dims)
    ids = {f"t{n}": np.arange(n, 500, 7 * n + 3)[::-1] for n in range(len(dims))} | {"t1": np.zeros(0, np.int64)}
    with service_of(engine) as service, client_of(service) as client:
        for _ in range(3):
            answer = client.lookup(ids)
            assert list(answer) == list(ids)
            for name, array in ids.items():
                assert answer[name].dtype == np.float32
                np.testing.assert_array_equal(answer[name], engine.lookup(name, array))
            engine.apply({"t0": ([1], np.ones((1, dims[0])))})
        assert answer.version.step == 2
        assert client.lookup({}) == {}


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ({"user": [1.5]}, r"expected integer ids of shape \(n,\), got float64"),
        ({"user": [True]}, r"expected integer ids of shape \(n,\), got bool"),
        ({"user": [[1]]}, r"expected integer ids of shape \(n,\), got int64 of \(1, 1\)"),
        ({"user": 1}, r"expected integer ids of shape \(n,\)"),
        ({"user": np.ma.array([1, 2], mask=[0, 1])}, "masked array"),
        ({"user": [2**64]}, "not both an int64 or an uint64"),
        ({"user": [-1, 2**63]}, "not both an int64 or an uint64"),
        ({1: [1]}, "expected the names of tables, got 1"),
        ([1], "expected a mapping from tables to ids, got list"),
    ],
)
def test_ids_of_another_form_are_refused_by_the_client(ids, problem):
    with service_of() as service, client_of(service) as client, pytest.raises(ps.UsageError, match=problem):
        client.lookup(ids)


def test_a_bad_request_is_refused_and_the_next_one_is_answered():
    with service_of(limits=Limits(message_bytes=800_000)) as service, client_of(service) as client:
        client.lookup({"user": [1]})
        (stream,) = client._lookups.values()
        for ids, problem in [
            ({"x": [1]}, r"no table 'x' in the configuration \(user\)"),
            ({"user": [500]}, "table 'user': expected 0 <= id < 500, got 500"),
            ({"user": [-1]}, "table 'user': expected 0 <= id < 500, got -1"),
            ({"user": np.ones(65_537, np.int8)}, "65,537 ids in one request; send 65,536 at most"),
            ({"user": np.ones(60_000, np.int8)}, r"rows of 960,000 bytes; this service sends 800,000 at most .*fewer"),
        ]:
            with pytest.raises(ps.InputError, match=problem):
                client.lookup(ids)
            np.testing.assert_array_equal(client.lookup({"user": [3]})["user"], service.engine.lookup("user", [3]))
        assert list(client._lookups.values()) == [stream]
        with pytest.raises(ps.InputError, match=f"expected 0 <= id < 500, got {2**64 - 1}"):
            client.lookup({"user": [2**64 - 1]})  # over a second stream, of uint64


@pytest.mark.parametrize("kind", [pa.utf8(), pa.large_utf8(), pa.string_view(), pa.dictionary(pa.int8(), pa.utf8())])
def test_tables_may_alternate_in_a_request(kind):
    engine = engine_of(2, 3)
    names, ids = ["t1", "t0", "t0", "t1", "t0"], [7, 8, 8, 9, 10]
    expected = [engine.lookup(name, [row_id])[0].tolist() for name, row_id in zip(names, ids, strict=True)]
    with service_of(engine) as service, Raw(service) as raw:
        assert raw.rows({"ids": ids, "table": pa.array(names).cast(kind)}) == expected


def test_a_dictionary_may_repeat_a_name_and_have_unused_ones():
    engine = engine_of(2, 3)
    names = pa.DictionaryArray.from_arrays([3, 0, 1], ["t1", "t0", "unknown", "t1"])
    expected = [engine.lookup(name, [5])[0].tolist() for name in ("t1", "t1", "t0")]
    with service_of(engine) as service, Raw(service) as raw:
        assert raw.rows({"table": names, "ids": [5, 5, 5]}) == expected


def test_the_only_table_need_not_be_named():
    with service_of() as service, Raw(service) as raw:
        assert raw.rows({"ids": [3]}) == service.engine.lookup("user", [3]).tolist()


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"x": [1]}, "expected the columns table and ids, got x"),
        ({"ids": [1]}, "expected the columns table and ids, got ids"),
        ({"table": ["t0"], "ids": pa.array([1], pa.int32())}, "column 'ids': expected int64 or uint64, got int32"),
        ({"table": ["t0"], "ids": [[1]]}, "column 'ids': expected int64 or uint64, got list"),
        ({"table": [0], "ids": [1]}, "column 'table': expected utf8, or a dictionary of utf8, got int64"),
    ],
)
def test_other_columns_end_the_stream(columns, problem):
    with service_of(engine_of(2, 3)) as service:
        with Raw(service) as raw, pytest.raises(flight.FlightServerError, match=problem):
            raw.ask(columns)
        until(lambda: service.admission.num_calls == 0)


@pytest.mark.parametrize(
    ("columns", "metadata", "problem"),
    [
        ({"table": ["t0", None], "ids": [1, 2]}, None, "row 1, column 'table': expected a value, got null"),
        ({"table": ["t0", "t0"], "ids": pa.array([None, 2], pa.int64())}, None, "row 0, column 'ids': .* got null"),
        ({"table": ["t0"], "ids": [1]}, b"x", "the request's metadata: expected a JSON object"),
        ({"table": ["t0"], "ids": [1]}, b"[" * 3000, "the request's metadata: expected a JSON object"),
        ({"table": ["t0"], "ids": [1]}, b"[" * 5000, "the request's metadata: 5,000 bytes"),
        ({"table": ["t0"], "ids": [1]}, b'{"consistent": 1}', "consistent: expected true or false, got '1'"),
        ({"table": ["t0"], "ids": [1]}, b'{"timeout_ms": -1}', "timeout_ms: expected a whole number from 0"),
        ({"table": ["x" * 10_000], "ids": [1]}, None, "no table 'x"),
    ],
)
def test_a_request_with_a_wrong_value_is_answered_in_one_line(columns, metadata, problem):
    with service_of(engine_of(2, 3)) as service, Raw(service) as raw:
        row = service.engine.lookup("t0", [1])[0].tolist()
        for _ in range(2):
            message = raw.error(columns, metadata)
            assert re.search(problem, message)
            assert "\n" not in message
            assert len(message) < 1600
            assert raw.rows({"table": ["t0"], "ids": [1]}) == [row]


def test_damaged_batches_are_refused_and_the_stream_continues():
    names = pa.array(["t0", "t1"])
    beyond = pa.DictionaryArray.from_arrays(pa.array([0, 99], pa.int32()), names, safe=False)
    good = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int32()), names)
    with service_of(engine_of(2, 3)) as service, Raw(service) as raw:
        for _ in range(2):
            assert "the request is damaged" in raw.error({"table": beyond, "ids": [1, 2]})
            assert len(raw.rows({"table": good, "ids": [1, 2]})) == 2


@pytest.mark.parametrize(("key_type", "keys"), [("int64", [-7, -(2**63), 5]), ("uint64", [2**64 - 1, 2**63, 5])])
def test_rows_of_dynamic_tables_are_looked_up_by_key(key_type, keys):
    drawn, zero = ps.Dynamic(key_type=key_type), ps.Dynamic(key_type=key_type, missing="zero")
    tables = [
        ps.TableConfig(100, 2, ps.Constant(1.0), ps.SGD(0.5), name="initial", dynamic=drawn),
        ps.TableConfig(100, 3, ps.Constant(2.0), ps.SGD(0.5), name="zero", dynamic=zero),
        ps.TableConfig(100, 3, name="static", optimizer=ps.SGD(0.5)),
    ]
    engine = ps.Engine(ps.EmbeddingConfig.from_tables(tables))
    keys = np.array(keys, key_type)
    engine.apply({"initial": (keys[:2], np.ones((2, 2))), "zero": (keys[:2], np.ones((2, 3)))})
    with service_of(engine) as service, client_of(service) as client:
        answer = client.lookup({"initial": keys, "static": [99], "zero": keys})
        assert answer["initial"].tolist() == [[0.5, 0.5], [0.5, 0.5], [1.0, 1.0]]
        assert answer["zero"].tolist() == [[1.5, 1.5, 1.5], [1.5, 1.5, 1.5], [0.0, 0.0, 0.0]]
        np.testing.assert_array_equal(answer["static"], engine.lookup("static", [99]))
        outside = -1 if key_type == "uint64" else 2**63
        with pytest.raises(ps.InputError, match=f"table 'zero': expected .*, got {outside}"):
            client.lookup({"zero": [outside]})


def test_an_answer_names_its_step_and_the_durable_one(tmp_path):
    with service_of(folder=tmp_path / "c", every=4) as service, client_of(service) as client:
        with client.producer("w0") as producer:
            for each in FRAMES[:6]:
                producer.send(each)
            until(lambda: service.sequencer.streams.durable_step == 4 and service.sequencer.counters.frames == 6)
            answer = client.lookup({"user": [1]})
            assert (answer.version.step, answer.durable_step) == (6, 4)
        assert answer.version == client.table("user").version
    with service_of() as service, client_of(service) as client:
        assert client.lookup({"user": [1]}).durable_step is None


def test_a_consistent_lookup_is_of_one_step_while_frames_arrive():
    """Every frame adds the same to all rows of both tables, so rows of one step are equal."""
    tables = [ps.TableConfig(64, dim, ps.Constant(0.0), ps.SGD(1.0), name=f"t{dim}") for dim in (2, 3)]
    batches = [
        pa.record_batch({"table": [f"t{dim}"] * 64, "id": range(64), "gradient": [[-1.0] * dim] * 64}) for dim in (2, 3)
    ]
    every = np.arange(64)
    with service_of(ps.Engine(ps.EmbeddingConfig.from_tables(tables))) as service, client_of(service) as client:

        def push():
            with client_of(service) as pushing:
                return pushing.put([batches] * 300, "w0").position

        pushed, steps = in_thread(push), []
        while not steps or steps[-1] < 300:
            answer = client.lookup({"t2": every, "t3": every[::-1]}, consistent=True)
            assert all((rows == answer.version.step).all() for rows in answer.values())
            steps.append(answer.version.step)
        assert pushed() == 300
        assert steps == sorted(steps)


def test_a_lookup_does_not_wait_for_a_step_unless_it_is_consistent(monkeypatch):
    with service_of() as service, client_of(service) as client:
        before = client.lookup({"user": [1]})
        running, end = threading.Event(), threading.Event()
        apply = service.engine.core.tables.apply

        def slowly(*arguments):
            running.set()
            assert end.wait(HANG_S)
            return apply(*arguments)

        monkeypatch.setattr(service.engine.core.tables, "apply", slowly)
        pushed = in_thread(lambda: client_of(service).put(FRAMES[:1], "w0"))
        assert running.wait(HANG_S)
        np.testing.assert_array_equal(client.lookup({"user": [1]})["user"], before["user"])
        with pytest.raises(TimeoutError, match="no rows after 20 ms: step 1 runs"):
            client.lookup({"user": [1]}, consistent=True, timeout_ms=20)
        waiting = in_thread(lambda: client.lookup({"user": [1]}, consistent=True, timeout_ms=60_000).version.step)
        end.set()
        assert waiting() == 1
        assert pushed().position == 1


def test_rows_that_are_not_all_on_the_host_are_looked_up_between_steps():
    placement = ps.Placement("cached", device_bytes=100_000)
    tables = [ps.TableConfig(500, 4, name="user"), ps.TableConfig(500, 2, name="item", placement=placement)]
    engine = ps.Engine(ps.EmbeddingConfig.from_tables(tables, optimizer=ps.SGD(0.5)))
    with pytest.raises(ps.ConfigError, match="table item: its rows are not in the host's memory"):
        engine.reads  # noqa: B018
    with service_of(engine) as service, client_of(service) as client:
        client.put([frame(0, table="user")], "w0")
        answer = client.lookup({"item": [7], "user": [1, 2]}, consistent=True)
        assert answer.version.step == 1
        np.testing.assert_array_equal(answer["user"], engine.lookup("user", [1, 2]))
        np.testing.assert_array_equal(answer["item"], engine.lookup("item", [7]))


def test_a_client_that_reads_no_answers_does_not_delay_others():
    with service_of(engine_of(256)) as service, client_of(service) as client, Raw(service) as deaf:
        request = pa.record_batch({"ids": np.arange(500)})
        deaf.writer.begin(request.schema)

        def send():
            with suppress(flight.FlightError, pa.ArrowException, OSError):
                while True:
                    deaf.writer.write_batch(request)

        sent = in_thread(send)
        for number in range(20):
            client.put([pa.record_batch({"id": [number], "gradient": [[1.0] * 256]})], "w0")
            assert client.lookup({"t0": [number]}).version.step == number + 1
        deaf.reader.cancel()
        sent()


def test_an_idle_stream_does_not_delay_the_end_and_the_next_lookup_is_refused():
    serving = service_of()
    service = serving.__enter__()  # which this test ends
    with client_of(service, patience_s=0.1) as client, client_of(service, patience_s=0.1) as other:
        client.lookup({"user": [1]})
        other.lookup({"user": [1]})
        assert service.admission.num_calls == 2
        service.end()
        with pytest.raises(ps.ServiceError, match="the service is ending; look the rows up again later"):
            client.lookup({"user": [1]})
        assert service.admission.wait_until_empty(HANG_S)
        assert service.close(0)
        with pytest.raises(ps.ServiceError):
            other.lookup({"user": [1]})


def test_an_idle_stream_is_closed_with_its_connection_and_opened_again():
    with service_of(limits=Limits(idle_s=0.1)) as service, client_of(service) as client:
        for step in range(3):
            assert client.lookup({"user": [1]}).version.step == step
            until(lambda: service.connections.num_open == 0)
            service.engine.apply({"user": ([1], np.ones((1, 4)))})


@pytest.mark.evidence
def test_lookups_continue_after_the_service_was_killed(tmp_path):
    config_of().save(config := tmp_path / "tables.pbtxt")
    words = [config, "--listen", f"grpc://127.0.0.1:{free_port()}", "--checkpoint", tmp_path / "c"]
    with Process(*words) as service, connect(service.uri, patience_s=HANG_S) as client:
        client.put(FRAMES, "w0")
        before = client.lookup({"user": np.arange(500)})
        service.process.kill()
        service.wait()
        with Process(*words, "--resume"):
            after = client.lookup({"user": np.arange(500)})
        np.testing.assert_array_equal(before["user"], after["user"])
        assert (after.version.step, after.version.lineage) == (before.version.step, before.version.lineage)


def test_lookups_need_a_token():
    with service_of(tokens={b"s3cret": Role.READER, b"other": Role.PRODUCER}) as service:
        refused = pytest.raises(ps.ServiceError, match="the token is missing or wrong")
        with client_of(service, token="wrong", patience_s=0.1) as client, refused:
            client.lookup({"user": [1]})
        refused = pytest.raises(ps.ServiceError, match="the token is a producer's, and this call needs")
        with client_of(service, token="other", patience_s=0.1) as client, refused:
            client.lookup({"user": [1]})
        with client_of(service, token="s3cret") as client:
            assert client.lookup({"user": [1]}).version.step == 0


def test_a_failed_engine_answers_no_lookup():
    with service_of() as service, client_of(service) as client:
        client.lookup({"user": [1]})
        service.engine.core.fail(MemoryError("no room"))
        with pytest.raises(ps.StateError, match="an earlier step failed half way"):
            client.lookup({"user": [1]})


def test_a_ticket_with_ids_is_refused_by_a_line_that_names_the_exchange():
    refused = pytest.raises(flight.FlightServerError, match="no ids; look up rows with DoExchange, path lookup")
    with service_of() as service, flight.connect(service.address.uri) as raw, refused:
        list(raw.do_get(flight.Ticket(b'{"table": "user", "ids": [1]}')))


class Silent(flight.FlightServerBase):
    """Ends every exchange without an answer."""

    def do_exchange(self, context, descriptor, reader, writer):
        reader.read_chunk()


def test_a_stream_that_ends_without_an_answer_is_an_error_of_one_line():
    with Silent("grpc://127.0.0.1:0") as server:
        ended = pytest.raises(ps.ServiceError, match="the service has ended the lookups")
        with connect(f"grpc://127.0.0.1:{server.port}", patience_s=0.1) as client, ended:
            client.lookup({"user": [1]})
