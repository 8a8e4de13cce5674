"""The Flight service: what producers push is applied, counted and acknowledged; what readers get is right."""

import shutil
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from ipc import write
from limits import HANG_S, until
from services import VOCABULARY, client_of, config_of, frame, free_port, put, replayed, service_of

import penstock as ps
from penstock.serving.flight import connect
from penstock.serving.flight.connection import Address
from penstock.serving.flight.messages import decoded

FRAMES = [frame(n) for n in range(12)]


def test_a_put_gives_the_state_of_a_replay():
    with service_of() as service, client_of(service) as client:
        ack = client.put(FRAMES, "w0")
        assert (ack.position, ack.durable, ack.step) == (12, False, 12)
        assert service.engine.state_hash() == replayed(FRAMES).state_hash()
        assert (client.status()["frames"], client.status()["rows"]) == (12, 240)


def test_frames_of_several_batches_and_of_producers_in_turn():
    pieces = [[f.slice(0, 7), f.slice(7)] for f in FRAMES]
    with (
        service_of(ps.Engine(config_of(), num_required=2)) as service,
        client_of(service) as first,
        client_of(service) as two,
    ):
        a, b = first.producer("a"), two.producer("b")
        for n, piece in enumerate(pieces):
            (a if n % 2 else b).send(piece)
            until(lambda: service.sequencer.counters.frames == n + 1)  # noqa: B023
        a.close()
        b.close()
        assert service.engine.state_hash() == replayed(FRAMES, num_required=2).state_hash()
        assert (first.position("a"), first.position("b"), first.position("c")) == (6, 6, 0)


def test_a_stream_with_steps_is_cut_where_they_change():
    """As a producer without our client sends it: no numbers, no end of frames but the next step."""
    steps = [frame(n, step=n // 2) for n in range(6)]
    with service_of() as service:
        assert put(service, steps, contributor="plain")["position"] == 3
        assert service.engine.state_hash() == replayed(steps).state_hash()


def test_penstock_end_in_metadata_ends_a_frame():
    with service_of() as service:
        client = flight.connect(service.address.uri)
        first = frame(0, step=0)
        descriptor, options = flight.FlightDescriptor.for_path("gradients", "live"), flight.FlightCallOptions(HANG_S)
        writer, reader = client.do_put(descriptor, first.schema, options)
        writer.write_batch(first.slice(0, 5))
        writer.write_batch(first.slice(5))
        writer.write_metadata(b"penstock.end")
        while decoded(reader.read(), "")["ack"]["position"] < 1:  # before the stream ends
            pass
        writer.close()
        client.close()


def test_acknowledgements_follow_the_commit(tmp_path):
    with service_of(folder=tmp_path / "c", every=5) as service, client_of(service) as client:
        producer = client.producer("w0")
        for each in FRAMES[:4]:
            producer.send(each)
        until(lambda: service.sequencer.counters.frames == 4)
        assert producer.acked.position == 0
        producer.send(FRAMES[4])
        until(lambda: service.sequencer.streams.durable_step == 5)
        assert producer.wait().position == 5
        producer.close()


def test_waiting_for_the_last_acknowledgement_commits(tmp_path):
    with service_of(folder=tmp_path / "c") as service, client_of(service) as client:
        ack = client.put(FRAMES, "w0")
        assert (ack.position, ack.durable, ack.step) == (12, True, 12)
    restored = ps.Engine.restore(tmp_path / "c")
    assert restored.state_hash() == replayed(FRAMES).state_hash()
    assert restored.session.positions.producers == {"w0": 12}


def test_a_service_restarted_from_its_checkpoint_continues(tmp_path):
    with service_of(folder=tmp_path / "c") as service, client_of(service) as client:
        client.put(FRAMES[:7], "w0")
    again = ps.Engine.restore(tmp_path / "c")
    with service_of(again, tmp_path / "c", resume=True) as service, client_of(service) as client:
        assert client.position("w0") == 7
        client.put(FRAMES, "w0", first=1)  # all of them once more
        assert again.state_hash() == replayed(FRAMES).state_hash()
        assert service.sequencer.counters.frames == 5


def test_a_replay_onto_the_checkpoint_of_a_service_keeps_its_positions(tmp_path):
    with service_of(folder=tmp_path / "c") as service, client_of(service) as client:
        client.put(FRAMES[:7], "w0")
    engine = ps.Engine.restore(tmp_path / "c")
    engine.run(iter(FRAMES[7:9]), checkpoint=tmp_path / "c", resume=True)
    again = ps.Engine.restore(tmp_path / "c")
    with service_of(again, tmp_path / "c", resume=True) as service, client_of(service) as client:
        assert client.position("w0") == 7
        assert service.engine.state_hash() == replayed(FRAMES[:9]).state_hash()


def test_frames_sent_again_are_recognised_and_gaps_are_named():
    with service_of() as service, client_of(service) as client:
        client.put(FRAMES[:5], "w0")
        put(service, FRAMES[2:8], contributor="w0", first=3)
        assert client.position("w0") == 8
        assert service.engine.state_hash() == replayed(FRAMES[:8]).state_hash()
        with pytest.raises(flight.FlightServerError, match="a gap: got frame 11, expected 9; send from there"):
            put(service, FRAMES[10:], contributor="w0", first=11)
        with pytest.raises(flight.FlightServerError, match=r"8 of its frames are here already: give the number"):
            put(service, FRAMES[8:], contributor="w0")


def sent(producer, frame):
    producer.send(frame)  # raises if the service has answered by then
    producer.wait()


def test_the_newest_stream_of_a_name_counts():
    with service_of() as service, client_of(service) as first, client_of(service) as two:
        old = first.producer("w0")
        old.send(FRAMES[0])
        old.wait()
        new = two.producer("w0")
        new.send(FRAMES[1])
        new.wait()

        with pytest.raises(ps.UsageError, match="another stream of producer 'w0' has begun: this one ends"):
            sent(old, FRAMES[1])
        new.close()
        assert service.engine.state_hash() == replayed(FRAMES[:2]).state_hash()


def test_a_new_producer_takes_over_a_name_before_it_sends():
    """Else a frame that is still on its way from a process that was killed could take the number of its first one."""
    with service_of() as service, client_of(service) as first, client_of(service) as two:
        old = first.producer("w0")
        old.send(FRAMES[0])
        until(lambda: old.poll().position == 1)
        new = two.producer("w0")
        assert new.last == 1

        with pytest.raises(ps.UsageError, match="another stream of producer 'w0' has begun"):
            sent(old, FRAMES[5])
        with pytest.raises(flight.FlightServerError, match="another stream of producer 'w0' has begun"):
            put(service, FRAMES[5:6], contributor="w0", first=2, process=old._process)
        assert new.send(FRAMES[1]) == 2
        new.close()
        assert (new.acked.position, new.acked.applied) == (2, 1)
        assert service.engine.state_hash() == replayed(FRAMES[:2]).state_hash()
        put(service, FRAMES[2:3], contributor="w0", first=3, process="another")  # as this one has finished


def test_the_later_of_two_producers_of_a_new_name_has_it_also_after_a_restart(tmp_path):
    address = Address("127.0.0.1", free_port(), False)
    with connect(address.uri, patience_s=HANG_S) as one, connect(address.uri, patience_s=HANG_S) as two:
        with service_of(None, tmp_path, every=1, address=address) as service:
            earlier, later = one.producer("w0"), two.producer("w0")
            with pytest.raises(ps.UsageError, match="another stream of producer 'w0' has begun"):
                sent(earlier, FRAMES[5])
            later.send(FRAMES[0])
            later.wait()
        resumed = ps.Engine.restore(tmp_path)
        with service_of(resumed, tmp_path, every=1, resume=True, address=address) as service:
            with pytest.raises(ps.UsageError, match="another stream of producer 'w0' has begun"):
                sent(earlier, FRAMES[6])
            later.send(FRAMES[1])
            later.close()
            assert service.engine.state_hash() == replayed(FRAMES[:2]).state_hash()


@pytest.mark.parametrize("returns_first", ["earlier", "later"])
def test_the_later_of_two_producers_has_the_name_also_if_the_last_commit_was_before_it(returns_first, tmp_path):
    address, last_commit = Address("127.0.0.1", free_port(), False), tmp_path / "last_commit"
    earlier = {"contributor": "w0", "process": "old"}
    with connect(address.uri, patience_s=HANG_S) as client:
        with service_of(None, tmp_path / "run", every=1, address=address) as service:
            earlier["claim"] = client.connection.act("position", contributor="w0", stream="old", claims=True)["claim"]
            put(service, FRAMES[:1], contributor="w1", first=1)
            shutil.copytree(tmp_path / "run", last_commit)  # as if the service was killed now
            later = client.producer("w0")
        with service_of(ps.Engine.restore(last_commit), last_commit, every=1, resume=True, address=address) as service:
            number = 1
            if returns_first == "earlier":
                assert put(service, FRAMES[1:2], first=1, **earlier)["position"] == 1
                number = 2
            later.begin_at(number)
            later.send(FRAMES[number])
            later.wait()
            with pytest.raises(flight.FlightServerError, match="another stream of producer 'w0' has begun"):
                put(service, FRAMES[6:7], first=number + 1, **earlier)
            later.close()
            assert service.engine.state_hash() == replayed(FRAMES[: number + 1]).state_hash()


@pytest.mark.parametrize("stream", ["", "x" * 300, "\ud800", None, 7])
def test_only_a_name_claims_the_place_of_a_producer(stream):
    with (
        service_of() as service,
        client_of(service) as client,
        pytest.raises(ps.UsageError, match=r"position: expected .*contributor.*stream.*, each of 1 to"),
    ):
        client.connection.act("position", contributor="w0", stream=stream, claims=True)


def test_a_process_that_comes_back_after_a_later_one_has_finished_is_told():
    with service_of() as service, client_of(service) as first, client_of(service) as two:
        earlier, later = first.producer("w0"), two.producer("w0")
        later.send(FRAMES[0])
        later.close()
        with pytest.raises(ps.UsageError, match="another stream of producer 'w0' has begun"):
            sent(earlier, FRAMES[5])
        put(service, FRAMES[1:2], contributor="w0", first=2)
        assert service.engine.state_hash() == replayed(FRAMES[:2]).state_hash()


def test_a_put_that_is_refused_takes_no_name():
    with service_of() as service, client_of(service) as client:
        producer = client.producer("w0")
        later = {"contributor": "w0", "process": "later", "claim": producer._claim + 1}
        with pytest.raises(flight.FlightServerError, match="a gap: got frame 5"):
            put(service, FRAMES[:1], first=5, **later)
        with pytest.raises(flight.FlightServerError, match="claim: expected the number that the service gave"):
            put(service, FRAMES[:1], first=1, **(later | {"claim": 2**63 - 1}))
        producer.send(FRAMES[0])
        producer.close()
        assert service.engine.state_hash() == replayed(FRAMES[:1]).state_hash()


def test_a_producer_continues_with_a_service_whose_clock_has_gone_back(tmp_path, monkeypatch):
    address = Address("127.0.0.1", free_port(), False)
    with service_of(folder=tmp_path, every=1, address=address) as service:
        client = client_of(service)
        producer = client.producer("w0")
        producer.send(FRAMES[0])
        producer.wait()
    monkeypatch.setattr("time.time_ns", lambda: 0)
    engine = ps.Engine.restore(tmp_path)
    with service_of(engine, tmp_path, every=1, resume=True, address=address), client:
        producer.send(FRAMES[1])
        producer.close()
        with client.producer("w0") as later:
            later.send(FRAMES[2])
        with pytest.raises(ps.UsageError, match="another stream of producer 'w0' has begun"):
            sent(producer, FRAMES[3])
    assert engine.state_hash() == replayed(FRAMES[:3]).state_hash()


@pytest.mark.parametrize("claim", [-1, "1", 2**63, True])
def test_only_a_number_is_a_claim(claim):
    with service_of() as service, pytest.raises(flight.FlightServerError, match="claim: expected the number that the"):
        put(service, FRAMES[:1], contributor="w0", first=1, process="a", claim=claim)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (frame(3, table="absent"), "expected a table of the configuration"),
        (
            pa.record_batch({"id": [VOCABULARY], "gradient": [[1.0] * 4]}),
            r"batch \d+, row 0, column 'id': expected 0 <= id",
        ),
        (pa.record_batch({"id": [1], "gradient": [[float("nan")] * 4]}), "gradient_not_finite"),
        (pa.record_batch({"id": [1, 1], "gradient": [[3e38] * 4] * 2}), "row 1, .* id 1 of table '.*' is not"),
        (pa.record_batch({"id": [1], "grad": [[1.0] * 4]}), "no column for the role 'gradient'"),
        (pa.record_batch({"id": [1], "gradient": [[1.0] * 3]}), "length_mismatch"),
    ],
)
def test_a_bad_frame_is_refused_whole_and_the_service_stays_up(bad, message):
    with service_of() as service, client_of(service) as client:
        client.put(FRAMES[:3], "w0")
        with pytest.raises(ps.InputError, match=message) as error:
            client.put([bad], "w0")
        assert "producer 'w0'" in str(error.value)
        assert "Traceback" not in str(error.value)
        client.put(FRAMES[3:], "w0")
        assert service.engine.state_hash() == replayed(FRAMES).state_hash()


def test_bad_rows_can_be_dropped_and_are_counted():
    with service_of(on_bad_row="drop") as service, client_of(service) as client:
        client.put([pa.record_batch({"id": [1, VOCABULARY], "gradient": [[1.0] * 4] * 2})], "w0")
        assert client.status()["dropped"] == {"id_out_of_range": 1}
        client.put([pa.record_batch({"id": [1, 1], "gradient": [[3e38] * 4] * 2})], "w0")
        assert client.status()["dropped"] == {"id_out_of_range": 1, "sum_not_finite": 1}


def test_stale_frames_advance_the_position():
    with service_of() as service, client_of(service) as client:
        client.put([frame(0, step=0), frame(1, step=0), frame(2, step=1)], "w0")
        status = client.status()
        assert (status["stale"], status["global_step"]) == (1, 2)
        assert client.position("w0") == 3
        assert "'w0': 1" in client.explain() or "1 stale" in client.explain()


DIES = """
import os, signal, sys
import pyarrow as pa, pyarrow.flight as flight
client = flight.connect(sys.argv[1])
batches = pa.ipc.open_stream(sys.argv[2]).read_all().to_batches()
writer, reader = client.do_put(flight.FlightDescriptor.for_path("gradients", "w0"), batches[0].schema)
for batch in batches:
    writer.write_batch(batch)
while b'"position":1' not in reader.read().to_pybytes():
    pass
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_producer_that_dies_leaves_nothing_of_its_last_frame(tmp_path):
    whole, cut = frame(0, step=0), frame(1, step=1)
    write(tmp_path / "log", [whole, cut])  # cut says that the one before is whole, and may have more rows itself
    with service_of() as service:
        for _ in range(3):
            done = subprocess.run(
                [sys.executable, "-c", DIES, service.address.uri, tmp_path / "log"], check=False, timeout=HANG_S
            )
            assert done.returncode == -signal.SIGKILL
            until(lambda: service.admission.num_calls == 0)
            assert service.sequencer.streams.position("w0") == 1
            with service.engine.gate.still():
                service.sequencer.streams._positions.producers["w0"] = 0  # as if it had not been
        assert service.engine.global_step == 1
        assert service.engine.gate.stale.total == 2


def test_a_stream_that_ends_inside_a_frame_is_refused():
    with service_of() as service, client_of(service) as client:
        with pytest.raises(flight.FlightServerError, match="the stream ended inside a frame; 20 rows"):
            put(service, FRAMES[:1], contributor="w0", first=1, ends=True)
        assert client.position("w0") == 0


def test_the_actions_and_flights_are_listed():
    with service_of(ps.Engine(config_of(("user", "item")))) as service:
        client = flight.connect(service.address.uri)
        assert {a.type for a in client.list_actions()} == {
            "status",
            "explain",
            "position",
            "checkpoint",
            "rollback",
            "tag",
            "leave",
            "drain",
        }
        paths = [[p.decode() for p in info.descriptor.path] for info in client.list_flights()]
        assert paths == [["gradients"], ["lookup"], ["deltas"], ["table", "user"], ["table", "item"]]
        info = client.get_flight_info(flight.FlightDescriptor.for_path("table", "item"))
        assert info.total_records == VOCABULARY
        assert client.get_schema(flight.FlightDescriptor.for_path("table", "item")).schema.names == ["id", "row"]
        with pytest.raises(flight.FlightServerError, match=r"no table 'x' in the configuration \(user, item\)"):
            client.get_flight_info(flight.FlightDescriptor.for_path("table", "x"))
        with pytest.raises(flight.FlightServerError, match="action 'dance': expected one of status"):
            list(client.do_action("dance"))
        client.close()
