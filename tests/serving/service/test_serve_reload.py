"""SIGHUP to a service: tokens and certificates are read again, while frames and deltas pass."""

import signal
import urllib.error
import urllib.request

import pytest
from limits import in_thread, until
from services import Process, client_of, config_of, frame, free_port, self_signed, service_of

import penstock as ps
from penstock.cli import main
from penstock.contrib.pages.http_server import JSON, PageAccess, Server
from penstock.serving.flight import connect
from penstock.serving.service.auth import Role, may_read

CONFIG = config_of()


def reloaded(service):
    """Send the signal, and return the line that reports what became of it."""
    service.process.send_signal(signal.SIGHUP)
    return service.process.stdout.readline()


@pytest.mark.promise("Tokens and certificates are rotated without losing a frame")
def test_tokens_and_a_certificate_are_rotated_without_losing_a_frame_or_a_follower(config, tmp_path):
    """The recipe of docs/operations.md."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
        self_signed(folder)
    files = {name: tmp_path / name for name in ("cert.pem", "key.pem")}
    for name, file in files.items():
        file.write_bytes((old / name).read_bytes())
    roots = tmp_path / "roots.pem"
    roots.write_bytes((old / "cert.pem").read_bytes())
    tokens = tmp_path / "tokens"
    tokens.write_text("operator old\n")
    words = ["--tls-cert", files["cert.pem"], "--tls-key", files["key.pem"], "--token-file", tokens, "--delta-steps", 1]
    with Process(config, "--listen", "grpc+tls://localhost:0", *words) as service:
        with connect(service.uri, "old", roots=roots) as trainer, connect(service.uri, "new", roots=roots) as moved:
            producer = trainer.producer("w0")
            producer.send(frame(0))

            tokens.write_text("writer old\n")  # a broken file changes nothing
            service.process.send_signal(signal.SIGHUP)
            problem = service.process.stderr.readline()
            assert "reload_failed" in problem
            assert "line 1: the first word is no role" in problem
            assert "tokens and certificate stay those before" in problem

            tokens.write_text("operator old\noperator new\n")  # both tokens
            assert reloaded(service) == "reloaded  2 tokens\n"
            assert moved.status()["frames"] == 1
            deltas = connect(service.uri, "new", roots=roots).deltas(follow=True)
            producer.send(frame(1))
            assert next(deltas).version.step == 1

            # Callers trust both: also those that have connected before.
            roots.write_bytes((old / "cert.pem").read_bytes() + (new / "cert.pem").read_bytes())
            for name, file in files.items():
                file.write_bytes((new / name).read_bytes())
            assert reloaded(service) == "reloaded  2 tokens, a new certificate\n"
            producer.send(frame(2))
            with connect(service.uri, "new", roots=new / "cert.pem") as later:
                assert later.status()["state"] == "serving"
            producer.send(frame(3))
            producer.close()
            assert moved.position("w0") == 4

            tokens.write_text("operator new\n")  # the new ones alone
            assert reloaded(service) == "reloaded  1 token\n"
            with pytest.raises(ps.ServiceError, match="the token is missing or wrong"):
                trainer.status()
            assert [delta.version.step for delta in (next(deltas) for _ in range(3))] == [2, 3, 4]
            deltas.close()
        assert service.end(signal.SIGTERM)[0] == 0


def test_a_call_by_a_token_that_is_gone_ends():
    tokens = {b"old": Role.OPERATOR, b"new": Role.OPERATOR}
    with (
        service_of(tokens=tokens) as service,
        client_of(service, token="old") as leaked,
        client_of(service, token="new") as other,
    ):
        leaked.lookup({"user": [3]})
        other.lookup({"user": [3]})
        assert service.admission.num_calls == 2
        assert service.renew({b"new": Role.OPERATOR}, []) is False
        until(lambda: service.admission.num_calls == 1)
        other.lookup({"user": [3]})
        with pytest.raises(ps.ServiceError, match="the token is missing or wrong"):
            leaked.lookup({"user": [3]})


def test_a_service_that_loses_its_port_between_two_certificates_commits_and_ends(config, tmp_path, monkeypatch):
    uri = f"grpc+tls://127.0.0.1:{free_port()}"
    self_signed(tmp_path)
    words = ["serve", config, "--listen", uri, "--checkpoint", tmp_path / "state"]
    words += ["--tls-cert", tmp_path / "cert.pem", "--tls-key", tmp_path / "key.pem", "--grace", 0]
    monkeypatch.setattr("penstock.serving.service.listener.CUT_S", 0.1)
    signals = []
    monkeypatch.setattr("penstock.base.interrupts.requested", lambda number: bool(signals) and not signals.clear())
    serving = in_thread(lambda: main([*map(str, words)]))
    with connect(uri, roots=tmp_path / "cert.pem") as client:
        client.put([frame(0)], "w0")
        self_signed(tmp_path)
        monkeypatch.setattr("penstock.serving.service.flight_server.FlightServer.__init__", taken)
        signals.append(signal.SIGHUP)
        assert serving() == 6
    assert ps.Engine.restore(tmp_path / "state").global_step == 1


def taken(*_):
    raise OSError("cannot bind")


def test_the_session_of_a_page_ends_with_its_token():
    tokens = {b"old": Role.READER, b"new": Role.READER}
    access = PageAccess(lambda authorization: may_read(tokens, authorization))
    server = Server(("127.0.0.1", 0), {"/": (JSON, lambda: "{}")}, access)
    try:

        def fetched(path="/", cookie=""):
            request = urllib.request.Request(server.url + path, headers={"Cookie": cookie})
            with urllib.request.urlopen(request) as answer:
                return answer.headers.get("Set-Cookie", "").partition(";")[0]

        sessions = [fetched(f"/?token={token}") for token in ("old", "new")]
        assert sessions[0] != sessions[1]
        del tokens[b"old"]
        fetched(cookie=sessions[1])
        with pytest.raises(urllib.error.HTTPError, match="401"):
            fetched(cookie=sessions[0])
    finally:
        server.close()
