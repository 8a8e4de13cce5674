"""A flight as a source whose endpoints lie elsewhere: who is sent the token."""

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from services import config_of, frame, replayed, self_signed

import penstock as ps

FRAMES = [frame(n) for n in range(4)]
TOKEN = "s3cret"


class _Seen(flight.ServerMiddlewareFactory):
    """Notes the authorization of every call, and refuses calls without it where it is required."""

    def __init__(self, required):
        self.tokens = []
        self._required = required

    def start_call(self, info, headers):
        tokens = headers.get("authorization")
        self.tokens.append(tokens)
        if self._required and tokens != [f"Bearer {TOKEN}"]:
            raise flight.FlightUnauthenticatedError("the token is missing or wrong")


class Log(flight.FlightServerBase):  # type: ignore[misc]
    """Four frames; ``location`` is where its only endpoint lies, None: here."""

    def __init__(self, uri="grpc://127.0.0.1:0", location=None, required=False, folder=None):
        self._seen = _Seen(required)
        pair = [] if folder is None else [(folder / "cert.pem", folder / "key.pem")]
        tls = [(cert.read_bytes(), key.read_bytes()) for cert, key in pair]
        super().__init__(uri, tls_certificates=tls, middleware={"seen": self._seen})
        self._location = location

    @property
    def tokens(self):
        return self._seen.tokens

    def get_flight_info(self, context, descriptor):
        locations = [] if self._location is None else [self._location]
        endpoint = flight.FlightEndpoint(b"all", locations)
        return flight.FlightInfo(FRAMES[0].schema, descriptor, [endpoint], -1, -1)

    def do_get(self, context, ticket):
        return flight.RecordBatchStream(pa.Table.from_batches(FRAMES))


@pytest.fixture
def token(monkeypatch):
    monkeypatch.setenv("PENSTOCK_FLIGHT_TOKEN", TOKEN)
    return [f"Bearer {TOKEN}"]


def test_the_token_stays_with_the_host_that_was_asked(token):
    with Log() as other, Log(location=f"grpc://localhost:{other.port}") as asked:
        engine = ps.Engine(config_of())
        engine.run(f"grpc://127.0.0.1:{asked.port}/monday")
        assert engine.state_hash() == replayed(FRAMES).state_hash()
        assert (asked.tokens, other.tokens) == ([token], [None])


def test_another_port_of_the_same_host_gets_the_token(token):
    with Log(required=True) as other, Log(location=f"grpc://127.0.0.1:{other.port}") as asked:
        engine = ps.Engine(config_of())
        assert engine.run(f"grpc://127.0.0.1:{asked.port}/monday").frames == 4
        assert (asked.tokens, other.tokens) == ([token], [token])


def test_without_a_location_the_host_that_was_asked_gets_the_token(token):
    with Log(required=True) as asked:
        assert ps.Engine(config_of()).run(f"grpc://127.0.0.1:{asked.port}/monday").frames == 4
        assert asked.tokens == [token, token]


def test_a_host_that_requires_the_token_and_is_not_sent_it_is_named(token):
    with Log(required=True) as other, Log(location=f"grpc://localhost:{other.port}") as asked:
        uri, location = f"grpc://127.0.0.1:{asked.port}/monday", f"grpc://localhost:{other.port}"
        with pytest.raises(ps.InputError) as error:
            ps.Engine(config_of()).run(uri)
        expected = (
            f"{uri}: the token is missing or wrong; {location} was sent no token: it goes only to the host that was "
            "asked, 127.0.0.1"
        )
        assert str(error.value) == expected


def test_a_token_that_was_sent_over_tls_is_not_sent_in_plain_text(token, tmp_path, monkeypatch):
    folder = self_signed(tmp_path)
    monkeypatch.setenv("PENSTOCK_FLIGHT_ROOTS", str(folder / "cert.pem"))
    with Log() as plain, Log("grpc+tls://127.0.0.1:0", folder=folder) as tls:
        with Log("grpc+tls://127.0.0.1:0", f"grpc://127.0.0.1:{plain.port}", folder=folder) as asked:
            engine = ps.Engine(config_of())
            assert engine.run(f"grpc+tls://127.0.0.1:{asked.port}/monday").frames == 4
            assert (asked.tokens, plain.tokens) == ([token], [None])
        with Log("grpc+tls://127.0.0.1:0", f"grpc+tls://127.0.0.1:{tls.port}", folder=folder) as asked:
            engine = ps.Engine(config_of())
            assert engine.run(f"grpc+tls://127.0.0.1:{asked.port}/monday").frames == 4
            assert (asked.tokens, tls.tokens) == ([token], [token])
