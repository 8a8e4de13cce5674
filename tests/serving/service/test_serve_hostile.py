"""Callers that break the protocol: each gets one clear error, nothing is lost, and the service continues."""

import itertools
import signal
import threading

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from limits import HANG_S, in_thread, until
from services import Process, client_of, config_of, frame, replayed, self_signed, service_of

import penstock as ps
from penstock.cli.main import main
from penstock.serving.flight import connect
from penstock.serving.flight.messages import PutRequest, decoded

FRAMES = [frame(n) for n in range(12)]


CONFIG = config_of()


def test_columns_that_change_in_mid_stream_are_refused_and_those_before_stay():
    other = pa.record_batch({"id": pa.array([1], pa.int32()), "gradient": [[1.0] * 4]})
    with service_of() as service, client_of(service) as client:
        with pytest.raises(ps.InputError, match=r"the schema changed: expected id: int64.*got id: int32.*producer"):
            client.put([*FRAMES[:3], other], "w0")
        until(lambda: client.position("w0") == 3)
        client.put(FRAMES[3:], "w0")
        assert service.engine.state_hash() == replayed(FRAMES).state_hash()


def test_two_producers_of_one_name_apply_every_frame_once():
    with service_of() as service:
        start = threading.Barrier(2)

        def push():
            with client_of(service) as client:
                start.wait()
                try:
                    return client.put(FRAMES, "w0", first=1).position
                except ps.UsageError as error:
                    return str(error)

        outcomes = [done() for done in [in_thread(push) for _ in range(2)]]
        assert 12 in outcomes
        assert all(outcome == 12 or "another stream of producer 'w0' has begun" in outcome for outcome in outcomes)
        assert service.engine.state_hash() == replayed(FRAMES).state_hash()


def test_an_error_after_a_frame_is_applied_does_not_apply_it_again(monkeypatch):
    """The client sends again what it heard nothing of: a frame in the tables must be one that is counted."""
    with service_of() as service, client_of(service) as client:
        watch, failures = service.engine.watch, [MemoryError("no room to look closer")]
        sample = watch.sample

        def fails_once(*arguments):
            sample(*arguments)
            if failures:
                raise failures.pop()

        monkeypatch.setattr(watch, "sample", fails_once)
        assert client.put(FRAMES, "w0").position == 12
        assert not failures
        assert service.engine.state_hash() == replayed(FRAMES).state_hash()


def test_no_commit_falls_between_a_frame_and_its_number(monkeypatch):
    """A commit needs the gate's lock, which is not free from before a frame is pushed until it is counted."""
    with service_of() as service, client_of(service) as client:
        engine, actual = service.engine, []
        lock, push = engine.gate.still(), engine.core.push

        def pushed(*arguments):
            taken = push(*arguments)
            actual.append(in_thread(lambda: lock.acquire(blocking=False))())
            return taken

        monkeypatch.setattr(engine.core, "push", pushed)
        client.put(FRAMES[:3], "w0")
        assert actual == [False] * 3


def exchange(service, name):
    client = flight.connect(service.address.uri)
    writer, reader = client.do_exchange(PutRequest("exchange", name, 1).descriptor())
    writer.begin(FRAMES[0].schema)
    return client, writer, reader


def test_exchanges_side_by_side_and_one_that_never_reads():
    with service_of() as service:
        deaf = exchange(service, "deaf")
        for each in FRAMES:
            deaf[1].write_batch(each)
        until(lambda: service.sequencer.streams.position("deaf") == 12)

        def run(name):
            client, writer, reader = exchange(service, name)
            for each in FRAMES:
                writer.write_batch(each)
            writer.done_writing()
            acked, rows = 0, 0
            for chunk in reader:
                ack = decoded(chunk.app_metadata or b"{}", "")
                acked = ack["ack"]["position"] if "ack" in ack else acked
                rows += 0 if chunk.data is None else chunk.data.num_rows
            writer.close()
            client.close()
            return acked, rows > 0

        assert [done() for done in [in_thread(lambda n=n: run(f"w{n}")) for n in range(3)]] == [(12, True)] * 3
        assert service.sequencer.counters.frames == 48
        deaf[1].close()
        deaf[0].close()


@pytest.mark.parametrize("since", [10**19 - 1, -(10**18), 1 << 63])
def test_deltas_since_steps_out_of_range_are_refused(since):
    with service_of() as service, client_of(service) as client, pytest.raises(ps.DeltasGoneError):
        list(client.deltas(ps.Version(str(since))))


def test_deeply_nested_json_is_refused():
    deep = b'{"deltas":' + b"[" * 100_000
    with service_of() as service, client_of(service) as client:
        raw = flight.connect(service.address.uri)
        with pytest.raises(flight.FlightServerError, match="the ticket: expected a JSON object"):
            list(raw.do_get(flight.Ticket(deep)))
        writer, _ = raw.do_put(PutRequest(contributor="w0").descriptor(), FRAMES[0].schema)
        for metadata in (b'{"x":' + b"[" * 3_000, b'{"x":' + b"[" * 100_000, b"\xff", b"{"):
            writer.write_with_metadata(FRAMES[0], metadata)  # what other programs say is nothing to us
        writer.done_writing()
        until(lambda: client.position("w0") == 4)
        writer.close()
        raw.close()


def test_a_service_that_ends_releases_a_producer_that_waits_to_send():
    large = [frame(n, 12_000) for n in range(40)]
    serving = service_of()
    service = serving.__enter__()  # which this test ends
    with client_of(service, patience_s=0.1) as client:
        producer = client.producer("w0")
        producer.send(large[0])
        producer.wait()
        with service.engine.gate.still():  # nothing is taken

            def push():
                for each in large[1:]:
                    producer.send(each)
                producer.close()

            pushed = in_thread(push)
            until(lambda: producer._stream is not None and producer._stream.next > 4)
            ended = in_thread(service.end)
        ended()
        assert service.close(HANG_S)
        with pytest.raises(ps.ServiceError):
            pushed()
        applied = service.sequencer.streams.position("w0")
        assert service.engine.state_hash() == replayed(large[:applied]).state_hash()


def pushing(producer):
    """Push until the service ends; what it has acknowledged then."""
    try:
        for number in itertools.count():
            producer.send(frame(number))
    except ps.ServiceError:
        return producer.acked.position


@pytest.mark.parametrize("how", ["drain", "two signals"])
def test_ended_in_the_middle_of_a_put_everything_acknowledged_is_on_disk(how, tmp_path, config):
    with (
        Process(config, "--checkpoint", tmp_path / "c", "--every", "20") as service,
        connect(service.uri, patience_s=0.1) as client,
    ):
        producer = client.producer("w0")
        pushed = in_thread(lambda: pushing(producer))
        until(lambda: producer.acked.position > 0)  # a commit counts it
        if how == "drain":
            with connect(service.uri, patience_s=0.1) as other:
                other.drain()
        else:
            service.process.send_signal(signal.SIGTERM)
            service.process.send_signal(signal.SIGTERM)
        code, _, err = service.wait()
        acked = pushed()
    assert (code, err) == (0, "")
    restored = ps.Engine.restore(tmp_path / "c")
    applied = restored.session.positions.producers["w0"]
    assert 0 < acked <= applied  # the last acknowledgement may still be on its way
    assert restored.state_hash() == replayed([frame(n) for n in range(applied)]).state_hash()


@pytest.mark.parametrize("broken", ["noise", "the key of another", "only a key"])
def test_invalid_certificates_are_exit_2_before_the_service_starts(broken, tmp_path, config, capsys):
    for folder in (tmp_path / "one", tmp_path / "another"):
        folder.mkdir()
        self_signed(folder)
    cert, key, other = (tmp_path / name for name in ("one/cert.pem", "one/key.pem", "another/key.pem"))
    if broken == "noise":
        cert.write_text("nothing")
    cert, key = {"the key of another": (cert, other), "only a key": (key, key)}.get(broken, (cert, key))
    words = ["--listen", "grpc+tls://127.0.0.1:0", "--tls-cert", str(cert), "--tls-key", str(key)]
    assert main(["serve", str(config), *words]) == 2
    assert "not a PEM certificate with its key" in capsys.readouterr().err
