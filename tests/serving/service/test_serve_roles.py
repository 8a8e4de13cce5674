"""The roles of tokens: a producer puts, a reader reads, an operator does everything."""

import pyarrow.flight as flight
import pytest
from limits import in_thread, until
from services import client_of, config_of, frame, service_of

import penstock as ps
from penstock.cli.main import main
from penstock.serving.flight.messages import LOOKUP, PutRequest, encoded
from penstock.serving.service.auth import Role, may_read, tokens_of
from penstock.serving.service.lookup_streams import REQUEST_SCHEMA

FRAMES = [frame(number) for number in range(4)]
TOKENS = {b"p": Role.PRODUCER, b"r": Role.READER, b"o": Role.OPERATOR}


@pytest.fixture(scope="module")
def service():
    with service_of(tokens=TOKENS) as made:
        yield made


def options_of(token):
    return flight.FlightCallOptions(headers=[(b"authorization", b"Bearer " + token)])


def act(client, kind, options):
    return list(client.do_action(flight.Action(kind, encoded({"contributor": "w0", "stream": "s"})), options))


def put(client, options):
    writer, reader = client.do_put(PutRequest("raw").descriptor(), FRAMES[0].schema, options)
    writer.write_batch(FRAMES[0])
    writer.done_writing()
    while reader.read() is not None:
        pass
    writer.close()


def exchange(client, options):
    descriptor = flight.FlightDescriptor.for_path("exchange", "x")
    writer, reader = client.do_exchange(descriptor, options)
    writer.begin(FRAMES[0].schema)
    writer.done_writing()
    reader.read_all()
    writer.close()


def look_up(client, options):
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path(LOOKUP), options)
    writer.begin(REQUEST_SCHEMA)
    writer.done_writing()
    reader.read_all()
    writer.close()


CALLS = {
    "lookup": (look_up, {b"r", b"o"}),
    "put": (put, {b"p", b"o"}),
    "position": (lambda client, options: act(client, "position", options), {b"p", b"o"}),
    "leave": (lambda client, options: act(client, "leave", options), {b"p", b"o"}),
    "tag": (lambda client, options: act(client, "tag", options), {b"o"}),
    "table": (
        lambda client, options: client.do_get(flight.Ticket(encoded({"table": "user"})), options).read_all(),
        {b"r", b"o"},
    ),
    "deltas": (
        lambda client, options: client.do_get(flight.Ticket(encoded({"deltas": {}})), options).read_all(),
        {b"r", b"o"},
    ),
    "status": (lambda client, options: act(client, "status", options), {b"r", b"o"}),
    "explain": (lambda client, options: act(client, "explain", options), {b"r", b"o"}),
    "checkpoint": (lambda client, options: act(client, "checkpoint", options), {b"p", b"o"}),
    "unknown action": (lambda client, options: act(client, "nothing", options), {b"o"}),
    "exchange": (exchange, {b"o"}),
    "flights": (lambda client, options: list(client.list_flights(options=options)), {b"p", b"r", b"o"}),
    "actions": (lambda client, options: list(client.list_actions(options)), {b"p", b"r", b"o"}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("token", sorted(TOKENS))
def test_a_call_is_permitted_to_its_roles_alone(name, token, service):
    call, permitted = CALLS[name]
    refused = service.admission.num_refused
    with flight.connect(service.address.uri) as client:
        if token in permitted:
            try:
                call(client, options_of(token))
            except flight.FlightServerError as error:  # such as of an action that does not exist
                assert "token" not in str(error)  # noqa: PT017
            assert service.admission.num_refused == refused
        else:
            with pytest.raises(flight.FlightUnauthorizedError, match=r"the token is a .*'s, and this call needs an? "):
                call(client, options_of(token))
            assert service.admission.num_refused == refused + 1


def test_clients_work_within_their_roles_and_name_them_beyond(tmp_path, capsys, monkeypatch):
    with service_of(tokens=TOKENS) as service:
        with client_of(service, token="p") as producer, client_of(service, token="r") as reader:
            assert producer.put(FRAMES, "w0").position == 4
            assert reader.table("user").version.step == 4
            with pytest.raises(
                ps.ServiceError, match=r"the token is a reader's, and this call needs a producer or ope"
            ):
                reader.put(FRAMES, "w1")
            with pytest.raises(
                ps.ServiceError, match=r"the token is a producer's, and this call needs a reader or ope"
            ):
                producer.table("user")
        into = ["follow", service.address.uri, "--into", f"parquet:{tmp_path / 'store'}", "--once"]
        monkeypatch.setenv("PENSTOCK_FLIGHT_TOKEN", "r")
        assert main(into) == 0
        monkeypatch.setenv("PENSTOCK_FLIGHT_TOKEN", "p")
        assert main(into) == 2
        assert "the token is a producer's" in capsys.readouterr().err
    assert service.engine.global_step == 4


def test_a_producer_may_wait_for_the_commit_of_its_frames(tmp_path):
    with (
        service_of(folder=tmp_path / "run", tokens=TOKENS) as service,
        client_of(service, token="p") as client,
        client.producer("w0") as producer,
    ):
        producer.send(FRAMES[0])
        assert producer.wait().durable


def test_a_worker_with_a_producers_token_waits_for_the_others(monkeypatch, caplog):
    monkeypatch.setattr("penstock.serving.flight.producer.LOG_EVERY_S", 0.1)
    engine = ps.Engine(config_of(), workers=2)
    with service_of(engine, tokens=TOKENS) as service:
        clients = [client_of(service, token="p") for _ in range(2)]
        workers = [client.producer(f"rank-{rank}") for rank, client in enumerate(clients)]
        for number in range(4):
            workers[0].send(frame(number, step=number))
        wait = in_thread(workers[0].wait)
        until(lambda: any("missing: rank-1" in record.penstock.get("waits_for", "") for record in caplog.records))
        for number in range(4):
            workers[1].send(frame(number, step=number))
        assert wait().position == 4
        for opened in [*workers, *clients]:
            opened.close()
    assert engine.global_step == 4


# ---- the file


def test_a_line_has_a_role_and_a_token_or_a_token_alone(tmp_path):
    file = tmp_path / "tokens"
    file.write_bytes(b"producer p\n\n  reader\tr  \r\noperator o\nplain\nreader\noperator o\n")
    roles = {b"p": Role.PRODUCER, b"r": Role.READER, b"o": Role.OPERATOR, b"plain": Role.OPERATOR}
    assert tokens_of(file) == {**roles, b"reader": Role.OPERATOR}
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # as editors of Windows begin a file
    assert tokens_of(file) == {**roles, b"reader": Role.OPERATOR}
    assert tokens_of(None) == {}


@pytest.mark.parametrize(
    ("content", "code", "text"),
    [
        (b"ok\nwriter s3cret\n", 4, "line 2: the first word is no role; expected producer, reader, operator"),
        (b"s3cret reader\n", 4, "line 1: the first word is no role"),
        (b"reader s3cret more\n", 2, "line 1: expected ROLE TOKEN, or a token alone"),
        (b"reader s3cr\xc3\xa9t\n", 2, "line 1: expected ROLE TOKEN"),
        (b"reader s3cret\nproducer s3cret\n", 2, "line 2: an earlier line gives this token another role"),
        (b"\n \n", 2, "expected one token per line"),
    ],
)
def test_a_bad_line_is_named_without_its_words(content, code, text, tmp_path, refused):
    config_of().save(tmp_path / "c.pbtxt")
    (tmp_path / "tokens").write_bytes(content)
    line = refused(code, "serve", tmp_path / "c.pbtxt", "--token-file", tmp_path / "tokens")
    assert text in line
    assert "s3cr" not in line


def test_pages_are_of_readers_and_operators():
    assert [may_read(TOKENS, b"Bearer " + token) for token in (b"p", b"r", b"o", b"x")] == [False, True, True, False]


def test_only_an_operator_drains():
    with service_of(tokens=TOKENS) as service, flight.connect(service.address.uri) as client:
        for token in (b"p", b"r"):
            with pytest.raises(flight.FlightUnauthorizedError):
                act(client, "drain", options_of(token))
        assert not service.wants_to_end.is_set()
        act(client, "drain", options_of(b"o"))
        assert service.wants_to_end.is_set()
