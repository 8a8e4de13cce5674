"""What an acknowledgement says became of a producer's frames, also over restarts of the service."""

import signal
import threading
import time

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from limits import HANG_S, until
from services import VOCABULARY, Process, client_of, config_of, frame, free_port, put, replayed, service_of

import penstock as ps
from penstock.checkpoint.incremental import Saver
from penstock.serving.flight import connect
from penstock.serving.flight.messages import Ack, PutRequest, decoded
from penstock.serving.service import put_streams

FRAMES = [frame(n, step=n) for n in range(6)]
PLAIN = [frame(n) for n in range(6)]
BAD_ROW = pa.record_batch({"id": [1, VOCABULARY, 2], "gradient": [[1.0] * 4] * 3})


def fates(ack):
    return ack.applied, ack.stale, ack.pending, ack.dropped


@pytest.mark.parametrize("durable", [False, True])
def test_frames_pushed_again_are_reported_as_stale(tmp_path, durable):
    with service_of(folder=tmp_path / "c" if durable else None) as service, client_of(service) as client:
        first, again = client.put(FRAMES, "w0"), client.put(FRAMES, "w0")
        assert (first.position, fates(first)) == (6, (6, 0, 0, {}))
        assert (again.position, again.durable, fates(again)) == (12, durable, (0, 6, 0, {}))
        assert service.engine.state_hash() == replayed(FRAMES).state_hash()


def test_frames_without_a_step_pushed_again_are_applied_again():
    with service_of() as service, client_of(service) as client:
        client.put(PLAIN, "w0")
        assert fates(client.put(PLAIN, "w0")) == (6, 0, 0, {})
        assert service.engine.state_hash() == replayed(PLAIN * 2).state_hash()


def test_the_acknowledgement_of_a_plain_flight_client_has_every_count():
    with service_of(ps.Engine(config_of(), num_required=4)) as service:
        put(service, PLAIN[:1], contributor="other", first=1)
        ack = put(service, PLAIN[:2], contributor="w0", first=1)
        expected = {"position": 2, "durable": False, "step": 0, "closing": False}
        assert ack == {**expected, "applied": 2, "stale": 0, "pending": 3, "dropped": {}}
        ack = put(service, PLAIN[1:4], contributor="w0", first=2)  # the first of them has been applied
        assert (ack["position"], ack["applied"], ack["pending"], ack["step"]) == (4, 2, 1, 1)


def test_frames_of_a_stream_without_a_contributor_are_counted():
    with service_of() as service:
        ack = put(service, [FRAMES[0], FRAMES[1], FRAMES[0]])
        assert (ack["position"], ack["applied"], ack["stale"]) == (3, 2, 1)


def test_dropped_rows_are_counted_by_reason():
    with service_of(on_bad_row="drop") as service, client_of(service) as client:
        ack = client.put([BAD_ROW, BAD_ROW], "w0")
        assert fates(ack) == (2, 0, 0, {"id_out_of_range": 2})
        assert fates(client.put([PLAIN[0]], "w0")) == (1, 0, 0, {})


def test_counts_are_those_of_the_frames_up_to_the_position(tmp_path, monkeypatch):
    """Two frames are applied while the commit of the four before them is written."""
    advance, may_go_on = Saver.advance, threading.Event()
    monkeypatch.setattr(Saver, "advance", lambda self, *words: may_go_on.is_set() and advance(self, *words))
    with service_of(folder=tmp_path / "c", every=3) as service:
        client = flight.connect(service.address.uri)
        request = PutRequest(contributor="w0", first=1, ends=True)
        writer, reader = client.do_put(request.descriptor(), FRAMES[0].schema)
        for number in (0, 1, 0, 2):
            writer.write_with_metadata(FRAMES[number], b"penstock.end")
        until(lambda: service.sequencer.counters.frames == 4)
        for number in (3, 0):
            writer.write_with_metadata(FRAMES[number], b"penstock.end")
        until(lambda: service.sequencer.counters.frames == 6)
        may_go_on.set()
        acks = [Ack.of(decoded(reader.read(), "")) for _ in range(2)]
        writer.done_writing()
        acks += [Ack.of(decoded(reader.read(), ""))]
        writer.close()
        client.close()
        assert [(ack.position, ack.applied, ack.stale) for ack in acks] == [(0, 0, 0), (4, 3, 1), (6, 4, 2)]


@pytest.mark.sampled("3")
@pytest.mark.parametrize("committed", [0, 3])
def test_counts_of_a_put_are_right_after_the_service_was_killed(tmp_path, committed):
    """Three frames of an earlier put, then ten of one that continues after a kill, of which five are stale."""
    config, listen = tmp_path / "tables.pbtxt", f"grpc://127.0.0.1:{free_port()}"
    config_of().save(config)
    words = (config, "--listen", listen, "--checkpoint", tmp_path / "c", "--resume")
    frames = [frame(n, step=0 if n % 2 else 3 + n // 2) for n in range(10)]
    with connect(listen, patience_s=HANG_S) as client:
        with Process(*words) as service:
            assert fates(client.put(FRAMES[:3], "w0")) == (3, 0, 0, {})
            producer = client.producer("w0")
            for each in frames[:committed]:
                producer.send(each)
            assert producer.wait().position == (3 + committed if committed else 0)
            for each in frames[committed:6]:
                producer.send(each)
            until(lambda: client.status()["frames"] == 9)
            service.end(signal.SIGKILL)
        with Process(*words) as service:
            for each in frames[6:]:
                producer.send(each)
            producer.close()
            expected = ps.Engine(config_of())
            report = expected.run(iter([*FRAMES[:3], *frames]))
            assert report.stale == 5
            assert producer.acked.position == 13
            assert fates(producer.acked) == (5, 5, 0, {})
            service.end(signal.SIGTERM)
    assert ps.Engine.restore(tmp_path / "c").state_hash() == expected.state_hash()


def test_counts_begin_anew_with_another_stream(tmp_path):
    with service_of(folder=tmp_path / "c") as service:
        assert put(service, FRAMES[:2], contributor="w0", first=1, process="a")["applied"] == 2
        assert put(service, FRAMES[2:4], contributor="w0", first=3, process="a")["applied"] == 4
        again = put(service, FRAMES[2:4], contributor="w0", first=3, process="a")
        assert (again["position"], again["applied"]) == (4, 4)
        assert put(service, FRAMES[4:5], contributor="w0", first=5, process="b")["applied"] == 1
        assert put(service, FRAMES[5:], contributor="w0", first=6)["applied"] == 1


def test_a_poll_has_the_counts_of_a_stream_before_they_are_durable(tmp_path):
    with service_of(folder=tmp_path / "c") as service, client_of(service) as client:
        client.put(FRAMES[:2], "w0")
        with client.producer("w0") as producer:
            assert fates(producer.poll()) == (0, 0, 0, {})
            for each in (frame(7, step=2), frame(8, step=0)):
                producer.send(each)
            until(lambda: producer.poll().position == 4)
            polled = producer.poll()
            assert (polled.step, polled.durable, fates(polled)) == (3, False, (1, 1, 0, {}))
            until(lambda: producer.poll() and producer.acked.position)  # a poll also takes acknowledgements
            assert producer.acked.position == 2  # of the last commit
            other = client.connection.act("position", contributor="w0", stream="another")
            assert (other["position"], other["durable_position"], other["applied"]) == (4, 2, 0)


def test_an_interrupt_inside_a_frame_sends_it_again_from_its_beginning(monkeypatch):
    def interrupted(stream, frame):
        monkeypatch.undo()
        stream._writer.write_batch(frame.pieces[0])
        raise KeyboardInterrupt

    expected = ps.Engine(config_of())
    expected.run(iter(FRAMES[:2]))
    with service_of() as service, client_of(service) as client, client.producer("w0") as producer:
        monkeypatch.setattr("penstock.serving.flight.producer._PutStream.send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.send(FRAMES[0])
        producer.send(FRAMES[1])
        assert producer.wait().position == 2
        assert service.engine.state_hash() == expected.state_hash()


def test_names_of_streams_that_are_no_text_are_refused():
    problem = "stream: expected a name of 1 to 256 bytes, got '7'"
    with service_of() as service, pytest.raises(flight.FlightServerError, match=problem):
        put(service, FRAMES, contributor="w0", first=1, process=7)


def test_a_client_ignores_what_it_does_not_know_and_does_without_counts():
    message = {"position": 7, "durable": True, "step": 40, "closing": False}
    assert Ack.of({"ack": {**message, "weather": "fine"}}) == Ack(7, True, 40)


@pytest.mark.parametrize("pause_s", [0, 0.0001, 0.003])
def test_the_last_acknowledgement_is_sent_whenever_a_stream_ends(monkeypatch, pause_s):
    monkeypatch.setattr(put_streams, "ACK_PAUSE_S", 0.002)
    for count in range(60):
        sent = []
        with put_streams.Acks(sent.append) as acks:
            for position in range(1, count % 4 + 2):
                acks.put(Ack(position, False, 0))
                time.sleep(pause_s)
        positions = [decoded(message, "it")["ack"]["position"] for message in sent]
        assert positions[-1] == count % 4 + 1
        assert positions == sorted(set(positions))
