"""Connections without calls: how many the service accepts, how long, and that they block no other caller."""

import resource
import signal
import socket

import numpy as np
import pyarrow.flight as flight
import pytest
from limits import HANG_S, until
from services import Process, client_of, config_of, frame, replayed, service_of

import penstock as ps
from penstock.serving.flight import connect
from penstock.serving.flight.messages import encoded
from penstock.serving.service import connections
from penstock.serving.service.limits import Limits

FRAMES = [frame(n) for n in range(6)]
FOLLOW = flight.Ticket(encoded({"deltas": {"follow": True}}))


@pytest.fixture
def strangers():
    """Opens connections that say nothing; they are closed at the end."""
    opened = []

    def open_to(address, count):
        new = [socket.create_connection((address.host, address.port), timeout=HANG_S) for _ in range(count)]
        opened.extend(new)
        return new

    yield open_to
    for each in opened:
        each.close()


@pytest.fixture
def many_descriptors():
    """This process may open 1,200 connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"needs 2,048 descriptors, may have {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048) if soft != resource.RLIM_INFINITY else soft, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def limited(most, *words):
    """A command that may have so many descriptors and no more."""
    return ["bash", "-c", f'ulimit -n {most}; exec "$@"', "bash", *map(str, words)]


def test_more_connections_than_descriptors_block_neither_clients_nor_commits(tmp_path, strangers, many_descriptors):
    config_of().save(tmp_path / "c.pbtxt")
    words = ["--checkpoint", tmp_path / "c", "--every", "1"]
    with Process(tmp_path / "c.pbtxt", *words, under=limited(1024)) as service:
        with connect(service.uri, patience_s=HANG_S) as early, connect(service.uri, patience_s=60) as late:
            early.put(FRAMES[:2], "w0")
            strangers(service.address, 1100)
            assert early.put(FRAMES[2:], "w0", first=3).position == 6
            assert late.put(FRAMES, "w1").position == 6
            late.drain()
        code, _, err = service.wait()
    assert (code, err) == (0, "")
    assert ps.Engine.restore(tmp_path / "c").state_hash() == replayed([*FRAMES, *FRAMES]).state_hash()


def test_a_connection_that_never_calls_is_closed(monkeypatch, strangers):
    monkeypatch.setattr(connections, "FIRST_CALL_S", 0.1)
    with service_of() as service, client_of(service) as client:
        client.status()
        (silent,) = strangers(service.address, 1)
        while silent.recv(4096):  # gRPC's own greeting, then the end
            pass
        until(lambda: client.status()["connections"] == 1)


def test_a_call_whose_token_is_refused_does_not_keep_its_connection(monkeypatch, strangers):
    monkeypatch.setattr(connections, "FIRST_CALL_S", 0.1)
    with service_of(tokens=(b"s3cret",)) as service:
        stranger = flight.connect(service.address.uri)
        with pytest.raises(flight.FlightUnauthenticatedError):
            list(stranger.do_action(flight.Action("status", b"")))
        (silent,) = strangers(service.address, 1)
        while silent.recv(4096):
            pass
        until(lambda: service.connections.num_open == 0)
        stranger.close()


def test_a_connection_without_a_call_is_closed_and_opened_again_by_the_next_one():
    with service_of(limits=Limits(idle_s=0.1)) as service, client_of(service) as client:
        assert client.put(FRAMES[:3], "w0").position == 3
        until(lambda: service.connections.num_open == 0)
        assert client.put(FRAMES[3:], "w0", first=4).position == 6
        assert service.engine.state_hash() == replayed(FRAMES).state_hash()


def test_a_call_in_progress_keeps_its_connection_for_as_long_as_it_takes(monkeypatch, strangers):
    """Longer than an idle one may stay, and while there are too many."""
    monkeypatch.setattr(connections, "FIRST_CALL_S", 0.1)
    with service_of(limits=Limits(idle_s=0.1, connections=2), per_steps=1) as service, client_of(service) as client:
        raw = flight.connect(service.address.uri)
        follow = raw.do_get(FOLLOW)
        client.put(FRAMES[:1], "w0")
        assert follow.read_chunk().data.column("step")[0].as_py() == 1
        for silent in strangers(service.address, 6):
            while silent.recv(4096):
                pass
        client.put(FRAMES[1:2], "w0", first=2)
        assert follow.read_chunk().data.column("step")[0].as_py() == 2
        del follow
        raw.close()


def test_of_too_many_connections_those_that_never_called_are_closed_first(monkeypatch, strangers):
    monkeypatch.setattr(connections, "FIRST_CALL_S", 600)
    with service_of(limits=Limits(connections=3)) as service, client_of(service) as client:
        client.status()
        for silent in strangers(service.address, 5)[:3]:
            while silent.recv(4096):
                pass
        until(lambda: service.connections.num_open == 3)


def test_final_writes_do_not_wait_for_open_calls(tmp_path, strangers):
    config_of().save(tmp_path / "c.pbtxt")
    words = ["--out", tmp_path / "out", "--checkpoint", tmp_path / "c", "--grace", "600", "--json"]
    with Process(tmp_path / "c.pbtxt", *words) as service, connect(service.uri, patience_s=HANG_S) as client:
        client.put(FRAMES, "w0")
        strangers(service.address, 1)
        raw = flight.connect(service.uri)
        writer, _ = raw.do_put(flight.FlightDescriptor.for_path("gradients", "w1"), FRAMES[0].schema)
        until(lambda: client.status()["streams"] == 1)
        service.process.send_signal(signal.SIGTERM)
        until((tmp_path / "out" / "user.parquet").exists)
        assert service.process.poll() is None
        writer.write_batch(FRAMES[0])  # which it takes no more
        with pytest.raises(flight.FlightError):
            writer.close()
        raw.close()
        code, _, _ = service.wait()
    assert code == 0
    again = ps.Engine(config_of())
    again.read_tables(tmp_path / "out")
    np.testing.assert_array_equal(np.asarray(again.table("user")), np.asarray(replayed(FRAMES).table("user")))
