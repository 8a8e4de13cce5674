"""Frames from a NATS server: applied once and in order, over kills of the service and of the server."""

import json
import signal

import pyarrow as pa
import pytest
from brokers import message_of
from limits import HANG_S, until
from services import Process, client_of, config_of, connect, frame, free_port, replayed, service_of

from penstock.contrib.connectors.nats_stream import NatsStream

FRAMES = [frame(number) for number in range(60)]
MESSAGES = [message_of(each) for each in FRAMES]


def position(client):
    return client.position("nats/gradients")


def test_each_message_is_a_frame_of_a_producer(nats, tmp_path):
    nats.send(*MESSAGES[:20])
    with (
        service_of(folder=tmp_path / "c", every=5, partitions=[NatsStream(nats.uri)]) as service,
        client_of(service) as client,
    ):
        until(lambda: position(client) == 20)
        nats.send(*MESSAGES[20:33])
        until(lambda: position(client) == 33)  # also those after the last commit that is due
        assert service.engine.state_hash() == replayed(FRAMES[:33]).state_hash()
        assert service.status()["frames"] == 33


def test_several_batches_of_a_message_are_one_frame(nats, tmp_path):
    half = FRAMES[0].slice(0, 7), FRAMES[0].slice(7)
    nats.send(message_of(*half), message_of(FRAMES[1]))
    with service_of(partitions=[NatsStream(nats.uri)]) as service, client_of(service) as client:
        until(lambda: position(client) == 2)
        assert service.engine.state_hash() == replayed(FRAMES[:2]).state_hash()


def serving(nats, folder, *flags):
    config_of().save(folder / "tables.pbtxt")
    saving = ("--checkpoint", folder / "c", "--every", 3, "--resume", "--grace", 0)
    return Process(folder / "tables.pbtxt", "--nats", nats.uri, *saving, *flags)


def test_kills_of_the_service_and_of_the_server_lose_and_repeat_nothing(nats, tmp_path):
    config_of().save(tmp_path / "tables.pbtxt")
    address = f"grpc://127.0.0.1:{free_port()}"
    sent = 0
    for kill in range(4):
        with (
            serving(nats, tmp_path, "--listen", address) as running,
            connect(address, patience_s=HANG_S) as client,
        ):
            nats.send(*MESSAGES[sent : sent + 8])
            sent += 8
            if kill % 2:
                nats.kill()
                nats.start()
                nats.send(*MESSAGES[sent : sent + 2])
                sent += 2
            until(lambda sent=sent, kill=kill: position(client) >= sent - 4 * (kill % 3))
            running.process.kill()
            running.wait()
    with serving(nats, tmp_path, "--listen", address, "--json") as running, connect(address) as client:
        until(lambda: position(client) == sent)
        code, out, _ = running.end(signal.SIGTERM)
    assert code == 0
    assert json.loads(out.splitlines()[0])["state_hash"] == replayed(FRAMES[:sent]).state_hash()


BAD = {
    "the value is null, expected an Arrow IPC stream": b"",
    "expected": b"no Arrow",
    "truncated": MESSAGES[0][:-8],
    "rows of several (step, contributor), (0, nats/gradients)": None,
}


def bad_message(data):
    return message_of(frame(0, step=0), frame(1, step=1)) if data is None else data


@pytest.mark.parametrize("problem", BAD)
def test_a_bad_message_ends_the_service_and_is_named(nats, tmp_path, problem):
    nats.send(MESSAGES[0], bad_message(BAD[problem]), MESSAGES[1])
    with serving(nats, tmp_path) as running:
        code, _, err = running.wait()
    assert code == 3
    assert err.startswith(f"penstock: {nats.uri}, sequence 2: ")
    with serving(nats, tmp_path, "--on-bad-row", "drop", "--json") as running, connect(running.uri) as client:
        until(lambda: position(client) == 3)
        _, out, _ = running.end(signal.SIGTERM)
    status = json.loads(out.splitlines()[0])
    assert status["dropped"] == {"bad_message": 1}
    assert status["state_hash"] == replayed(FRAMES[:2]).state_hash()


def test_a_bad_row_is_named_by_its_message(nats, tmp_path):
    nats.send(MESSAGES[0], message_of(pa.record_batch({"id": [600], "gradient": FRAMES[0]["gradient"].slice(0, 1)})))
    with serving(nats, tmp_path) as running:
        code, _, err = running.wait()
    assert code == 3
    assert f"{nats.uri}, sequence 2: batch 0, row 0, column 'id': expected 0 <= id < 500" in err


def test_a_broker_that_is_gone_or_refuses_the_caller(nats, tmp_path):
    nats.send(MESSAGES[0])
    with (
        serving(nats, tmp_path, "--patience", "0.2", "--log-level", "error") as running,
        connect(running.uri) as client,
    ):
        until(lambda: position(client) == 1)
        nats.kill()
        code, _, err = running.wait()
    assert code == 3
    assert err.startswith(f"penstock: {nats.uri}: the broker cannot be reached: ")
    nats.options = ("--user", "u", "--pass", "p")
    nats.login = {"user": "u", "password": "p"}
    nats.start()
    with serving(nats, tmp_path) as running:
        code, _, err = running.wait()
    assert code == 2
    assert err.endswith("and the user and the password in the URI\n")


def test_a_broker_that_is_misspelled(tmp_path, refused):
    config_of().save(tmp_path / "t.pbtxt")
    line = refused(2, "serve", tmp_path / "t.pbtxt", "--nats", "nats://here")
    assert line == "penstock: nats://here: expected nats://HOST:PORT/STREAM\n"
    line = refused(2, "serve", tmp_path / "t.pbtxt", "--kafka", "kafka://here")
    assert line == "penstock: kafka://here: expected kafka://BROKER:PORT,…/TOPIC?SETTING=VALUE&…\n"
