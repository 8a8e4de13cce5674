"""Tokens as programs pass them, and connections next to a proxy that the environment names."""

import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pyarrow.flight as flight
import pytest
from services import client_of, config_of, frame, service_of

import penstock as ps
import penstock.serving.flight.connection as connection
from penstock.base.errors import ServiceError, UsageError
from penstock.cli.main import main
from penstock.serving.followers.target_kinds import open_target

TOKEN = "t0ken-of-a-service"
SECRET = "hunter2"
PROXY = f"http://user:{SECRET}@127.0.0.1:1"


@pytest.fixture
def proxy(monkeypatch):
    for name in ("no_proxy", "NO_PROXY", "grpc_proxy"):
        monkeypatch.setenv(name, "example.org" if "no" in name.lower() else "")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, PROXY)


@pytest.mark.parametrize("end", ["\n", "\r\n", " ", "\t\n"])
def test_white_space_around_a_token_is_stripped_as_in_a_file(end, monkeypatch, capsys):
    with service_of(tokens=[TOKEN.encode()]) as service:
        uri = service.address.uri
        with client_of(service, token=f" {TOKEN}{end}") as client:
            assert client.put([frame(0)], "w0").applied == 1
        monkeypatch.setenv("PENSTOCK_FLIGHT_TOKEN", f"{TOKEN}{end}")
        with client_of(service) as client:
            assert client.status()["global_step"] == 1
        assert main(["status", uri]) == 0
        capsys.readouterr()


@pytest.mark.promise("No error prints a password or a token")
@pytest.mark.parametrize("token", [f"reader {TOKEN}", f"{TOKEN}\nother", f"{TOKEN}\x00", f"{TOKEN}é", f"{TOKEN}\x7f"])
def test_a_token_that_no_header_can_have_is_refused_at_once_and_not_printed(token, monkeypatch):
    with pytest.raises(UsageError, match=r"^token: expected one token, ASCII without spaces") as raised:
        ps.connect("grpc://127.0.0.1:1", token)
    assert TOKEN not in str(raised.value)
    monkeypatch.setenv("PENSTOCK_FLIGHT_TOKEN", token.replace("\x00", "\x01"))
    with ps.connect("grpc://127.0.0.1:1", patience_s=3600) as client, pytest.raises(UsageError) as raised:
        client.status()
    assert str(raised.value).startswith("PENSTOCK_FLIGHT_TOKEN: expected one token")
    assert TOKEN not in str(raised.value)
    with pytest.raises(UsageError, match=r"^PENSTOCK_FLIGHT_TOKEN: expected one token"):
        ps.Engine(config_of()).run("grpc://127.0.0.1:1/gradients")


def test_a_token_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match=r"^token: expected a token as str, got bytes"):
        ps.connect("grpc://127.0.0.1:1", TOKEN.encode())


def test_a_connection_to_this_machine_uses_no_proxy(proxy):
    with service_of() as service, client_of(service, patience_s=0) as client:
        assert client.put([frame(0)], "w0").applied == 1


def test_the_error_of_another_host_names_the_variable_of_the_proxy(proxy, monkeypatch, caplog):
    def unavailable(*_):
        raise flight.FlightUnavailableError("failed to connect to all addresses")

    monkeypatch.setattr(connection, "dial", lambda *_: (SimpleNamespace(do_action=unavailable, close=int), None))
    with ps.connect("grpc://10.0.0.9:8815", patience_s=0) as client, pytest.raises(ServiceError) as raised:
        client.status()
    hint = " (through the proxy of https_proxy; set no_proxy to connect without it)"
    assert str(raised.value) == f"grpc://10.0.0.9:8815: failed to connect to all addresses{hint}"
    assert SECRET not in caplog.text


class _Refuses(BaseHTTPRequestHandler):
    """An object store that refuses everything."""

    def do_GET(self):
        self.server.num_requests += 1
        body = b"<Error><Code>AccessDenied</Code></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 (the name that http.server calls)

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(("scheme", "library"), [("delta", "deltalake"), ("lance", "lance")])
def test_an_object_store_of_this_machine_is_reached_without_a_proxy(scheme, library, proxy, monkeypatch):
    pytest.importorskip(library)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refuses) as server:
        server.num_requests = 0
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        target = open_target(f"{scheme}:s3://bucket/rows")
        with pytest.raises(UsageError, match=r"; check the credentials in the environment$"), target.failures():
            target.stored()
        server.shutdown()
    assert server.num_requests
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "example.org,localhost,127.0.0.1,::1"
