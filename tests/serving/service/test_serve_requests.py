"""Invalid descriptors, tickets and actions over Flight: one line for the caller, whatever the method."""

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from services import client_of, frame, service_of

BAD_REQUESTS = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"7",
    b"\xff\xfe",
    b"[" * 100_000,
    b"9" * 5000,
    b"x" * (3 << 20),
    b'{"a":"' + b"a" * 9000 + b'"}',
    b'{"gradients":7}',
    b'{"gradients":{"contributor":[]}}',
    b'{"gradients":{"first":-1}}',
    b'{"exchange":{"stream":""}}',
    b'{"gradients":{"contributor":"\\ud800"}}',
    b'{"deltas":{"since":"x"}}',
    b'{"table":7}',
    b'{"table":"user","ids":[1]}',
    b'{"table":"\xc3\xa9"}',
    b'{"contributor":7}',
    b'{"contributor":null}',
]
BAD_PATHS = [(), ("",), ("..",), ("\0",), ("table",), ("table", "x"), ("table", "user", "x"), ("deltas", "x"), ("é",)]
BAD_PATHS += [("gradients", ""), ("gradients", "x" * 300), ("exchange", "x", "y"), ("x" * 9000,), ("é" * 9000,)]


@pytest.mark.parametrize("method", ["get_schema", "get_flight_info", "do_get", "do_put", "do_exchange", "do_action"])
def test_every_method_answers_a_bad_request_with_one_line(method):
    """pyarrow answered GetSchema with the traceback of the service, and long texts did not fit into gRPC's headers."""
    descriptors = [flight.FlightDescriptor.for_path(*path) for path in BAD_PATHS]
    descriptors += [flight.FlightDescriptor.for_command(command) for command in BAD_REQUESTS]
    columns = frame(0).schema

    def put(client, request):
        writer, _ = client.do_put(request, columns)
        writer.close()

    def exchange(client, request):
        writer, reader = client.do_exchange(request)
        writer.done_writing()
        reader.read_all()
        writer.close()

    requests = {
        "do_get": [flight.Ticket(ticket) for ticket in BAD_REQUESTS],
        "do_action": [flight.Action(kind, body) for kind in ("position", "x" * 9000, "\0") for body in BAD_REQUESTS],
        "do_exchange": [*descriptors, *(flight.FlightDescriptor.for_path(path) for path in ("exchange", "lookup"))],
    }
    call = {"do_put": put, "do_exchange": exchange, "do_get": lambda client, ticket: client.do_get(ticket).read_all()}
    call["do_action"] = lambda client, action: list(client.do_action(action))
    with service_of() as service, flight.connect(service.address.uri) as client:
        for request in requests.get(method, descriptors):
            with pytest.raises((pa.ArrowException, flight.FlightError)) as refusal:
                call.get(method, lambda client, request: getattr(client, method)(request))(client, request)
            text = str(refusal.value)
            assert "Traceback" not in text
            assert "\n" not in text
            assert not isinstance(refusal.value, flight.FlightInternalError), text
            assert any(word in text for word in ("expected", "no table", "no schema")), text
        with client_of(service) as caller:
            assert caller.status()["frames"] == 0
