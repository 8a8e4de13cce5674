"""What operators do with a running service: its status, draining it, ending it, and its log."""

import json
import re
import signal
import socket
from contextlib import contextmanager, suppress

import numpy as np
import pyarrow.flight as flight
import pytest
from batches import batch
from cli import outcome, started
from limits import HANG_S, in_thread, until
from scrapes import fetched, parsed
from services import VOCABULARY, Process, client_of, config_of, frame, free_port, replayed, self_signed, service_of

import penstock as ps
from penstock.cli import main
from penstock.serving.flight import connect
from penstock.serving.service.auth import Role

CONFIG = config_of()
FRAMES = [frame(number) for number in range(60)]
# A name that tries to look like another line, to clear the terminal, and to turn the text round.
HOSTILE = 'w\n2026-11-23T00:00:00Z error failed\r{"level":"error"}\x1b[2J\u202e\x9b'


# ---- status


def test_status_shows_what_a_service_has_done(capsys, tmp_path):
    engine = ps.Engine(config_of(), num_required=2)
    with service_of(engine, folder=tmp_path / "c") as service, client_of(service) as client:
        client.put(FRAMES[:5], "w0")
        client.put([frame(5, step=0)], "w1")
        client.lookup({"user": [1, 2, 3]})
        code, status, _ = outcome(capsys, "status", service.address.uri)
        assert code == 0
        expected = {"service": "engine", "state": "serving", "penstock": ps.__version__, "global_step": 2}
        expected |= {"committed_step": 2, "frames": 6, "stale": 1, "pending": 1, "producers": 2, "streams": 0}
        expected |= {"queued_rows": 0, "queued_bytes": 0, "refused": 0, "lookups": 1, "looked_up_rows": 3}
        assert {name: status[name] for name in expected} == expected
        assert main(["status", service.address.uri]) == 0
        text = capsys.readouterr().out
        assert f"service   {service.address.uri}: serving, up 0:0" in text
        assert "step      2, committed 2\n" in text
        assert "frames    6: 120 rows, 2 steps, 1 stale, 1 pending\n" in text
        service.wants_to_end.set()
        assert outcome(capsys, "status", service.address.uri)[1]["state"] == "draining"
        service.end()
        assert outcome(capsys, "status", service.address.uri)[1]["state"] == "draining"


def test_a_wrong_token_is_exit_2_and_the_role_of_a_producer_too(capsys, monkeypatch):
    with service_of(tokens={b"p": Role.PRODUCER, b"r": Role.READER, b"o": Role.OPERATOR}) as service:
        for command, token, code in [
            *(("status", token, code) for token, code in (("x", 2), ("p", 2), ("r", 0), ("o", 0))),
            *(("drain", token, 2) for token in ("x", "p", "r")),
        ]:
            monkeypatch.setenv("PENSTOCK_FLIGHT_TOKEN", token)
            actual, result, _ = outcome(capsys, command, service.address.uri)
            assert actual == code, (command, token)
            assert code == 0 or "set PENSTOCK_FLIGHT_TOKEN to a token of the service" in result["error"]
        assert not service.wants_to_end.is_set()


class OtherServer(flight.FlightServerBase):
    """A Flight server that is no service of penstock. answers : of its actions"""

    def __init__(self, answers):
        super().__init__("grpc://127.0.0.1:0")
        self.answers = answers

    def do_action(self, context, action):
        return iter(self.answers)


@pytest.mark.parametrize("answers", [[], [b"{}"], [b"[1]"], [b"no json \xff"], [b"{}", b"{}"], [b'{"global_step": 1}']])
@pytest.mark.parametrize("command", ["status", "drain"])
def test_another_flight_service_is_one_line(command, answers, refused):
    with OtherServer(answers) as server:
        line = refused(3, command, f"grpc://127.0.0.1:{server.port}")
        assert "it answers 'status' with something else than penstock does" in line


@pytest.mark.parametrize("command", ["status", "drain"])
def test_a_port_without_an_answer_is_one_line(command, refused, monkeypatch):
    with flight.FlightServerBase("grpc://127.0.0.1:0") as server:
        assert "it does not answer this call" in refused(3, command, f"grpc://127.0.0.1:{server.port}")
    monkeypatch.setattr(f"penstock.cli.{command}.TIMEOUT_S", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert refused(3, command, f"grpc://127.0.0.1:{silent.getsockname()[1]}")
    assert "onnect" in refused(3, command, f"grpc://127.0.0.1:{free_port()}")
    assert "expected an address such as" in refused(2, command, "127.0.0.1:8815")


# ---- the end


def test_drain_commits_what_the_gate_holds_and_both_commands_exit_with_0(config, tmp_path, capsys):
    words = (config, "--checkpoint", tmp_path / "c", "--num-required", "4", "--resume", "--json")
    with Process(*words) as service:
        with connect(service.uri) as client:
            client.put(FRAMES[:6], "w0")
        assert main(["drain", service.uri]) == 0
        assert capsys.readouterr().out == (
            f"drained   {service.uri}: step 1, committed 1\npending   2 frames in the gate: the checkpoint has them\n"
        )
        code, out, _ = service.wait()
        assert (code, json.loads(out)["state"]) == (0, "draining")
        assert outcome(capsys, "drain", service.uri)[0] == 3  # it is gone
    with Process(*words) as service:
        with connect(service.uri) as client:
            client.put(FRAMES[:8], "w0", first=1)
        code, drained, _ = outcome(capsys, "drain", service.uri)
        assert (code, drained["global_step"], drained["committed_step"], drained["pending"]) == (0, 2, 2, 0)
        assert service.wait()[0] == 0
    assert ps.Engine.restore(tmp_path / "c").state_hash() == replayed(FRAMES[:8], num_required=4).state_hash()


def test_two_drains_wait_for_the_same_end(capsys):
    with service_of() as service, client_of(service) as client:
        client.put(FRAMES[:3], "w0")
        draining = [in_thread(lambda: connect(service.address.uri).connection.act("drain", wait=True)) for _ in "12"]
        assert service.wants_to_end.wait(HANG_S)
        until(lambda: service.admission.num_calls == 2)
        service.end()
        for drained in draining:
            assert (drained()["global_step"], drained()["committed_step"], drained()["error"]) == (3, None, None)
        assert outcome(capsys, "drain", service.address.uri)[1]["ending"] is True  # it has ended, and still listens


def test_a_drain_whose_commit_fails_is_exit_6(capsys, tmp_path, monkeypatch):
    with suppress(OSError), service_of(folder=tmp_path / "c") as service:
        with client_of(service) as client:
            client.put(FRAMES[:1], "w0")
        monkeypatch.setattr(service.sequencer._commits, "end", fail)
        ended = in_thread(lambda: service.wants_to_end.wait(HANG_S) and service.end())
        code, result, _ = outcome(capsys, "drain", service.address.uri)
        assert code == 6
        assert "the service ends without its last commit: disk is full" in result["error"]
        with pytest.raises(OSError, match="disk is full"):
            ended()


def fail():
    raise OSError("disk is full")


def test_a_producer_that_pushes_during_a_drain_continues_with_the_next_service(config, tmp_path, capsys):
    address = f"grpc://127.0.0.1:{free_port()}"
    words = (config, "--listen", address, "--checkpoint", tmp_path / "c", "--every", "5", "--resume")

    def push():
        with connect(address, patience_s=HANG_S) as client, client.producer("w0") as producer:
            for each in FRAMES:
                producer.send(each)
        return producer.acked.position

    with Process(*words) as service:
        pushed = in_thread(push)
        with connect(address) as client:
            until(lambda: client.status()["frames"] > 10)
        code, drained, _ = outcome(capsys, "drain", address)
        assert (code, drained["committed_step"]) == (0, drained["global_step"])
        assert service.wait()[0] == 0
    held = ps.Engine.restore(tmp_path / "c")
    assert held.state_hash() == replayed(FRAMES[: held.global_step]).state_hash()
    with Process(*words) as service:
        assert pushed() == len(FRAMES)
        assert service.end(signal.SIGTERM)[0] == 0
    assert ps.Engine.restore(tmp_path / "c").state_hash() == replayed(FRAMES).state_hash()


def test_sigterm_during_a_drain_changes_nothing(config, tmp_path):
    with Process(config, "--checkpoint", tmp_path / "c", "--grace", "2") as service, connect(service.uri) as client:
        client.put(FRAMES[:3], "w0")
        raw, _ = client.connection.opened()
        following = raw.do_get(flight.Ticket(b'{"deltas":{"follow":true}}'))  # so that the end takes its grace
        client.drain()
        for _ in range(3):
            service.process.send_signal(signal.SIGTERM)
        assert service.wait()[0] == 0
        following.cancel()
    assert ps.Engine.restore(tmp_path / "c").global_step == 3


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_follower_waits_for_its_service_until_a_signal(number, code, tmp_path):
    words = ["follow", f"grpc://127.0.0.1:{free_port()}", "--into", f"parquet:{tmp_path / 'rows'}"]
    following = started(*words, "--log-format", "json", "--json")
    line = json.loads(following.stderr.readline())
    assert (line["event"], line["level"]) == ("retrying", "warning")
    following.send_signal(number)
    out, err = following.communicate(timeout=HANG_S)
    assert following.returncode == code
    assert json.loads(out).get("exit_code", 0) == code
    assert all(json.loads(line) for line in err.splitlines())


def test_a_follower_that_starts_first_follows_once_its_service_is_there(config, tmp_path):
    address = f"grpc://127.0.0.1:{free_port()}"
    following = started("follow", address, "--into", f"parquet:{tmp_path / 'rows'}", "--interval", "0.05")
    assert b" warning retrying error=" in following.stderr.readline()
    with Process(config, "--listen", address) as service:
        assert following.stdout.readline().endswith(b", step 0\n")
        assert service.end(signal.SIGTERM)[0] == 0
    assert following.poll() is None
    following.send_signal(signal.SIGTERM)
    out, _ = following.communicate(timeout=HANG_S)
    assert (following.returncode, out.decode().splitlines()[-1]) == (0, "step      0")


# ---- certificates


def test_certificates_are_a_file_or_its_content_and_a_wrong_one_is_final(config, tmp_path, refused, monkeypatch):
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
        self_signed(tmp_path / name)
    cert, key = tmp_path / "right" / "cert.pem", tmp_path / "right" / "key.pem"
    words = (config, "--listen", "grpc+tls://127.0.0.1:0", "--tls-cert", cert, "--tls-key", key)
    with Process(*words) as service:
        for roots in (str(cert), cert, cert.read_bytes()):
            with connect(service.uri, roots=roots) as client:
                assert client.status()["global_step"] == 0
        for roots in (tmp_path / "wrong" / "cert.pem", (tmp_path / "wrong" / "cert.pem").read_bytes()):
            with (
                connect(service.uri, roots=roots, patience_s=HANG_S) as client,
                pytest.raises(ps.ServiceError, match="no connection with its certificate: certificate verify failed"),
            ):
                client.status()
        for roots in (key, b"no certificate", b"\xff", tmp_path / "missing"):
            with connect(service.uri, roots=roots) as client, pytest.raises(ps.UsageError, match="certificates"):
                client.status()
        monkeypatch.setenv("PENSTOCK_FLIGHT_ROOTS", str(tmp_path / "wrong" / "cert.pem"))
        follow = ("follow", service.uri, "--into", f"parquet:{tmp_path / 'rows'}")
        for command in (("status", service.uri), ("drain", service.uri), follow):
            assert "set PENSTOCK_FLIGHT_ROOTS to a file with the certificates to trust" in refused(2, *command)
        monkeypatch.setenv("PENSTOCK_FLIGHT_ROOTS", str(cert))
        assert main(["status", service.uri]) == 0


# ---- the log


def refused_frame(client, name):
    bad = batch([VOCABULARY], np.ones((1, 4), np.float32))
    with pytest.raises(ps.InputError, match="id_out_of_range"):
        client.put([bad], name)


@contextmanager
def logging_service(config, tmp_path, *flags):
    """The lines of a service with tokens to which things have happened that it logs, once it has ended."""
    (tmp_path / "tokens").write_text("operator ours\nreader theirs\n")
    lines = []
    words = [config, "--checkpoint", tmp_path / "c", "--token-file", tmp_path / "tokens", "--log-level", "debug"]
    with Process(*words, *flags) as service:
        with connect(service.uri, token="ours", patience_s=0.1) as client:
            client.put([frame(0, step=0), frame(1, step=0)], HOSTILE)
            refused_frame(client, "bad")
        for token in ("theirs", "unknown"):
            with connect(service.uri, token=token, patience_s=0.1) as client, pytest.raises(ps.ServiceError):
                client.checkpoint()
        yield lines
        code, _, err = service.end(signal.SIGTERM)
        assert code == 0
        lines += err.splitlines()


def test_a_json_log_has_an_object_per_line_whatever_a_producer_is_called(config, tmp_path):
    with logging_service(config, tmp_path, "--log-format", "json") as lines:
        pass
    events = [json.loads(line) for line in lines]
    assert all({"time", "level", "event"} <= event.keys() for event in events)
    by_name = {event["event"]: event for event in events}
    assert {"listening", "ending", "committed", "commit_began", "producer_connected", "producer_left"} <= by_name.keys()
    connected = next(event for event in events if event["event"] == "producer_connected")
    assert (connected["contributor"], connected["first"], connected["level"]) == (HOSTILE, 1, "info")
    left = next(event for event in events if event["event"] == "producer_left")
    assert (left["contributor"], left["position"], left["applied"], left["stale"]) == (HOSTILE, 2, 1, 1)
    stale = by_name["stale_frame"]
    assert (stale["contributor"], stale["step"], stale["global_step"], stale["level"]) == (HOSTILE, 0, 1, "warning")
    assert "id_out_of_range" in by_name["put_failed"]["error"]
    refused = [event for event in events if event["event"] == "call_refused"]
    assert refused[0]["error"] == "the token is a reader's, and this call needs a producer or operator's"
    assert {event["level"] for event in events} == {"debug", "info", "warning"}
    assert by_name["committed"]["step"] == 1


def test_a_text_log_has_a_line_per_event_whatever_a_producer_is_called(config, tmp_path):
    with logging_service(config, tmp_path) as lines:
        pass
    form = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (debug|info|warning) [a-z_]+( [a-z_]+=.*)?")
    assert all(form.fullmatch(line) and line.isprintable() for line in lines), lines
    assert sum(" stale_frame contributor=" in line for line in lines) == 1


@pytest.mark.sampled("error-events1")
@pytest.mark.parametrize(("level", "events"), [("warning", {"stale_frame"}), ("error", set())])
def test_the_log_has_the_level_that_is_asked_for(level, events, config):
    flags = ["--log-level", level] if level != "warning" else []
    with Process(config, *flags) as service:
        with connect(service.uri) as client:
            client.put([frame(0, step=0), frame(1, step=0)], "w0")
        _, _, err = service.end(signal.SIGTERM)
    assert {line.split()[2] for line in err.splitlines()} == events


def test_the_error_that_ends_a_service_is_a_line_of_its_json_log(tmp_path, config):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"grpc://127.0.0.1:{taken.getsockname()[1]}"
        with started("serve", config, "--listen", listen, "--log-format", "json") as process:
            assert process.wait(HANG_S) == 6
            (line,) = process.stderr.read().splitlines()
    event = json.loads(line)
    assert (event["level"], event["event"]) == ("error", "error")
    assert event["message"].startswith(f"penstock: cannot listen at {listen}")


def test_a_flood_of_refused_calls_is_a_line_a_second(config, tmp_path):
    (tmp_path / "tokens").write_text("ours\n")
    with Process(config, "--token-file", tmp_path / "tokens", "--log-format", "json") as service:
        for _ in range(300):
            with flight.connect(service.uri) as client, pytest.raises(flight.FlightUnauthenticatedError):
                list(client.list_actions())
        _, _, err = service.end(signal.SIGTERM)
    refused = [json.loads(line) for line in err.splitlines()]
    assert 1 <= len(refused) < 150
    assert sum(event.get("omitted", 0) for event in refused) < 300


@pytest.mark.evidence
def test_no_step_waits_for_a_log_without_a_reader(config):
    """More lines than a pipe and the queue have room for; the service keeps its place in the stream."""
    with Process(config, "--log-level", "debug") as service:
        with connect(service.uri, patience_s=HANG_S) as client:
            for number in range(1200):
                with connect(service.uri) as another:
                    another.put(FRAMES[:1], "n" * 200 + str(number))
            assert client.status()["frames"] == 1200
        assert service.end(signal.SIGTERM)[0] == 0


# ---- pages of a replica


def test_a_replica_has_metrics_a_page_and_a_file(config, tmp_path, capsys):
    with Process(config, "--shared", tmp_path / "shared") as writer:
        with connect(writer.uri) as client:
            client.put(FRAMES[:4], "w0")
        flags = ("--metrics", "127.0.0.1:0", "--ui", "127.0.0.1:0", "--metrics-file", tmp_path / "metrics.jsonl")
        words = ["serve", "--replica", tmp_path / "shared", *flags]
        with started(*words) as replica:
            urls = dict(replica.stderr.readline().decode().split()[:2] for _ in "12")
            uri = replica.stdout.readline().decode().split()[1].rstrip(",")
            with connect(uri) as client:
                client.lookup({"user": [1, 2, 3]})
            values = parsed(fetched(urls["metrics"]))
            assert (values["penstock_global_steps"], values["penstock_looked_up_rows_total"]) == (4, 3)
            assert values["penstock_connections"] >= 0
            assert fetched(urls["metrics"].replace("/metrics", "/health")) == "ok, step 4\n"
            live = json.loads(fetched(urls["ui"] + "live.json"))
            assert live["title"] == f"penstock serve {tmp_path / 'shared'}"
            assert live["metrics"]["penstock_lookups_total"] == 1
            code, status, _ = outcome(capsys, "status", uri)
            assert (code, status["service"], status["tables"], status["looked_up_rows"]) == (0, "replica", ["user"], 3)
            assert main(["status", uri]) == 0
            assert capsys.readouterr().out.startswith(f"replica   {uri}: serving, up 0:")
            assert main(["drain", uri]) == 0
            assert replica.wait(HANG_S) == 0
        assert (tmp_path / "metrics.jsonl").read_text().count("\n") >= 2
