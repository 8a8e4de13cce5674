"""Who may read ``--ui`` and ``--metrics``: hosts that a request may name, and the tokens of a service."""

import http.client
import json
import signal
import ssl
import subprocess
import sys
from contextlib import contextmanager

import pytest
from cli import ONE_TABLE
from limits import HANG_S
from services import self_signed

from penstock.cli import main
from penstock.contrib.pages.http_server import JSON, Server

CONFIG = ONE_TABLE
PATHS = ("/", "/live.json", "/metrics", "/health", "/absent")
ROUTES = {"/live.json": (JSON, lambda: "{}")}


def answer(port, path="/live.json", host=None, tls=None, **headers):
    """(status, headers, body) of a GET. host : the header Host; tls : the folder of the certificate to trust"""
    if tls is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
    else:
        context = ssl.create_default_context(cafile=tls / "cert.pem")
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=HANG_S, context=context)
    named = {"Host": host} if host else {}
    connection.request("GET", path, headers={**named, **{name.title(): value for name, value in headers.items()}})
    response = connection.getresponse()
    return response.status, response.headers, response.read().decode()


@contextmanager
def local(host="127.0.0.1"):
    """The port of a server on this host."""
    server = Server((host, 0), ROUTES)
    try:
        yield int(server.url.rpartition(":")[2])
    finally:
        server.close()


@pytest.mark.parametrize("host", ["localhost", "LocalHost:80", "127.0.0.1", "127.0.0.1:9090", "[::1]", "[::1]:9090"])
def test_a_server_on_loopback_answers_requests_that_name_this_machine(host):
    with local() as port:
        assert answer(port, host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "127.0.0.9", "::1", "@:"]
)
def test_a_server_on_loopback_refuses_every_other_host(host):
    """A page of that host could read it, if its name resolved to 127.0.0.1."""
    with local() as port:
        status, _, body = answer(port, host=host)
        assert (status, body) == (403, "this server answers to 127.0.0.1, [::1], localhost only\n")


def test_a_server_answers_to_the_address_that_it_listens_on():
    with local("127.0.0.9") as port:
        connection = http.client.HTTPConnection("127.0.0.9", port, timeout=HANG_S)
        connection.request("GET", "/live.json")
        assert connection.getresponse().status == 200


@pytest.fixture
def serving(tmp_path, config):
    """serving(flags…) → ports of page and metrics of a service that listens on all interfaces for them."""
    (tmp_path / "tokens").write_text("ours\nother\n")
    running = []

    def start(*flags):
        words = ["serve", config, "--ui", "0.0.0.0:0", "--metrics", "0.0.0.0:0", *flags]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
        process = subprocess.Popen([sys.executable, "-m", "penstock", *map(str, words)], **pipes)
        running.append(process)
        lines = [process.stderr.readline() for _ in range(2)]
        assert process.stdout.readline().startswith("listening"), lines
        return [int(line.split()[1].rstrip("/").removesuffix("/metrics").rpartition(":")[2]) for line in lines], lines

    yield start
    for process in running:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANG_S)


def test_off_loopback_a_service_with_tokens_asks_for_one_on_every_path(serving):
    (page, metrics), lines = serving("--token-file", "tokens")
    assert all("its token travels in clear text" in line for line in lines)
    for port, path in ((port, path) for port in (page, metrics) for path in PATHS):
        for sent in ({}, {"authorization": "Bearer wrong"}, {"authorization": "ours"}, {"cookie": "penstock=1"}):
            status, headers, body = answer(port, path, **sent)
            assert (status, headers["WWW-Authenticate"]) == (401, 'Bearer realm="penstock"')
            assert body.count("\n") == 1
        assert answer(port, path + "?token=wrong")[0] == 401
    assert answer(page, host="monitoring.example", authorization="Bearer other")[0] == 200
    assert "penstock_rows_total" in answer(metrics, "/metrics", authorization="Bearer ours")[2]


def test_a_browser_gives_the_token_once_and_then_a_cookie(serving):
    (page, metrics), _ = serving("--token-file", "tokens")
    status, headers, body = answer(page, "/?token=ours")
    cookie, *attributes = headers["Set-Cookie"].split("; ")
    assert (status, attributes) == (200, ["Path=/", "HttpOnly", "SameSite=Strict"])
    assert "<html" in body
    assert "ours" not in cookie
    live = json.loads(answer(page, "/live.json", cookie=f"other=1; {cookie}")[2])
    assert live["metrics"]["penstock_frames_total"] == 0
    assert answer(metrics, "/metrics", cookie=cookie)[0] == 401  # of another port


@pytest.mark.evidence
def test_pages_have_the_certificate_of_the_service(serving, tmp_path):
    folder = self_signed(tmp_path)
    tls = ["--listen", "grpc+tls://127.0.0.1:0", "--tls-cert", folder / "cert.pem", "--tls-key", folder / "key.pem"]
    (page, metrics), lines = serving("--token-file", "tokens", *tls)
    assert all("https://0.0.0.0:" in line and "clear text" not in line for line in lines)
    assert answer(page, tls=folder)[0] == 401
    status, headers, _ = answer(metrics, "/metrics?token=other", tls=folder)
    assert (status, "; Secure" in headers["Set-Cookie"]) == (200, True)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        answer(page)  # clear text


def test_insecure_opens_the_pages_and_loopback_needs_no_token(serving):
    (page, metrics), _ = serving("--token-file", "tokens", "--insecure")
    assert [answer(page)[0], answer(metrics, "/metrics")[0]] == [200, 200]
    (page, _), _ = serving("--token-file", "tokens", "--ui", "127.0.0.1:0")
    assert answer(page)[0] == 200


@pytest.mark.parametrize("flag", ["--ui", "--metrics"])
def test_a_service_with_tls_and_without_tokens_cannot_protect_its_pages(flag, config, tmp_path, capsys):
    folder = self_signed(tmp_path)
    words = ["--listen", "grpc+tls://127.0.0.1:0", "--tls-cert", folder / "cert.pem", "--tls-key", folder / "key.pem"]
    assert main(["serve", str(config), *map(str, words), flag, "0.0.0.0:0"]) == 2
    refusal = f"penstock: {flag} 0.0.0.0:0: others can reach this address, and the service has no token (--token-file)"
    assert capsys.readouterr().err.startswith(refusal)
