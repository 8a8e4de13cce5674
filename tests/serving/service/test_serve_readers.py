"""What readers get of the Flight service: tables of one step, rows, deltas that lead from step to step."""

import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from limits import HANG_S, in_thread, until
from services import DIM, VOCABULARY, Process, client_of, config_of, frame, put, replayed, service_of

import penstock as ps
from penstock.core.engine_core import EngineCore
from penstock.serving.flight import connect
from penstock.serving.flight.messages import PutRequest, decoded, encoded
from penstock.serving.service import snapshots
from penstock.serving.service.flight_server import FlightServer
from penstock.serving.service.limits import Limits

FRAMES = [frame(n) for n in range(12)]


def apply(rows, delta):
    """What a reader does with a delta of the one table."""
    for batch in delta.batches:
        values = batch.column("row").flatten().to_numpy().reshape(-1, DIM)
        rows[batch.column("id").to_numpy()] = values


def test_a_table_is_that_of_the_engine():
    with service_of() as service, client_of(service) as client:
        client.put(FRAMES, "w0")
        snapshot = client.table("user")
        assert snapshot.version == service.engine.version == service.sequencer.streams.lineage.at(12)
        np.testing.assert_array_equal(snapshot.rows, np.asarray(service.engine.table("user")))
        with pytest.raises(ps.UsageError, match="no table 'x' in the configuration"):
            client.table("x")


@pytest.mark.parametrize("durable", [False, True])
def test_a_table_read_during_steps_is_of_one_step(durable, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "BLOCK_BYTES", 40 * 4 * DIM)
    saving = {"folder": tmp_path / "c", "every": 2} if durable else {}
    with service_of(**saving) as service, client_of(service) as client, client_of(service).producer("w0") as producer:
        producer.send(FRAMES[0])
        producer.wait()
        stream = client.connection.opened()[0].do_get(flight.Ticket(encoded({"table": "user"})))
        first = stream.read_chunk()
        for each in FRAMES[1:7]:
            producer.send(each)
        producer.wait()
        rows = np.zeros((VOCABULARY, DIM), np.float32)
        for chunk in [first, *stream]:
            rows[chunk.data.column("id").to_numpy()] = chunk.data.column("row").flatten().to_numpy().reshape(-1, DIM)
            version = decoded(chunk.app_metadata, "").get("version")
        np.testing.assert_array_equal(rows, np.asarray(replayed(FRAMES[: ps.Version(version).step]).table("user")))


def test_deltas_lead_from_any_step_to_now():
    with service_of(per_steps=1) as service, client_of(service) as client:
        start = client.table("user")
        client.put(FRAMES, "w0")
        rows, steps = start.rows.copy(), list[int]()
        for delta in client.deltas(start.version):
            assert delta.since == (steps[-1] if steps else 0)
            steps.append(delta.version.step)
            apply(rows, delta)
            np.testing.assert_array_equal(rows, np.asarray(replayed(FRAMES[: delta.version.step]).table("user")))
        assert steps == list(range(1, 13))
        assert [d.version.step for d in client.deltas(start.version.at(9))] == [10, 11, 12]


def test_changes_without_a_follower_are_one_delta_on_request():
    with service_of() as service, client_of(service) as client:
        start = client.table("user")
        client.put(FRAMES, "w0")
        (delta,) = client.deltas(start.version)
        assert (delta.since, delta.version.step) == (0, 12)
        apply(start.rows, delta)
        np.testing.assert_array_equal(start.rows, np.asarray(service.engine.table("user")))


def test_deltas_of_a_service_with_a_checkpoint_are_of_what_is_on_disk(tmp_path):
    with service_of(folder=tmp_path / "c", every=4) as service, client_of(service) as client:
        start = client.table("user")
        with client.producer("w0") as producer:
            for each in FRAMES[:6]:
                producer.send(each)
            until(lambda: service.sequencer.streams.durable_step == 4 and service.sequencer.counters.frames == 6)
            assert [d.version.step for d in client.deltas(start.version)] == [4]
        rows = start.rows.copy()
        for delta in client.deltas(start.version):
            apply(rows, delta)
        assert delta.version.step == 6
        np.testing.assert_array_equal(rows, np.asarray(service.engine.table("user")))


def test_a_reader_follows_while_frames_arrive():
    with service_of() as service, client_of(service) as pushing, client_of(service) as client:
        start = client.table("user")
        rows = start.rows.copy()

        def follow():
            for delta in client.deltas(start.version, follow=True):
                apply(rows, delta)
                if delta.version.step == 12:
                    return

        done = in_thread(follow)
        pushing.put(FRAMES, "w0")
        done()
        np.testing.assert_array_equal(rows, np.asarray(service.engine.table("user")))


def test_deltas_that_are_no_longer_kept_and_steps_of_other_states_are_named():
    with service_of(limits=Limits(delta_bytes=2000), per_steps=1) as service, client_of(service) as client:
        start = client.status().version
        client.put(FRAMES, "w0")
        assert service.log.num_bytes <= 2000
        with pytest.raises(
            ps.DeltasGoneError, match=r"deltas are kept from step \d+ on, not from 0; read the tables again"
        ):
            list(client.deltas(start))
        with pytest.raises(ps.DeltasGoneError, match="step 13 is ahead of this service, which is at step 12"):
            list(client.deltas(start.at(13)))
        with pytest.raises(ps.DeltasGoneError, match="this service's state is another one"):
            list(client.deltas(ps.Version("0123-0-12")))


def test_exchange_answers_gradients_with_deltas():
    with service_of() as service:
        client = flight.connect(service.address.uri)
        writer, reader = client.do_exchange(PutRequest("exchange", "w0", 1).descriptor())
        writer.begin(FRAMES[0].schema)
        rows = np.asarray(ps.Engine(config_of()).table("user")).copy()
        acked = 0
        for each in FRAMES:
            writer.write_batch(each)
        writer.done_writing()
        for chunk in reader:
            metadata = decoded(chunk.app_metadata or b"{}", "")
            acked = metadata["ack"]["position"] if "ack" in metadata else acked
            if chunk.data is not None and chunk.data.num_rows:
                rows[chunk.data.column("id").to_numpy()] = (
                    chunk.data.column("row").flatten().to_numpy().reshape(-1, DIM)
                )
        writer.close()
        client.close()
        assert acked == 12
        np.testing.assert_array_equal(rows, np.asarray(service.engine.table("user")))


@pytest.mark.parametrize("durable", [False, True])
def test_small_frames_are_applied_in_native_code_while_no_delta_is_due(durable, tmp_path, monkeypatch):
    with service_of(folder=tmp_path / "c" if durable else None) as service, client_of(service) as client:
        list(client.deltas())  # from now on the service tracks what changes
        others, push = [], EngineCore._push
        monkeypatch.setattr(EngineCore, "_push", lambda core, *run: others.append(core.global_step) or push(core, *run))
        put(service, FRAMES[:4])
        assert (service.engine.global_step, others) == (4, [])


@pytest.mark.parametrize("durable", [False, True])
def test_a_table_that_changes_faster_than_deltas_are_kept_is_refused_by_the_setting(durable, tmp_path, monkeypatch):
    saving = {"folder": tmp_path / "c", "every": 1} if durable else {"per_steps": 1}
    with service_of(limits=Limits(delta_bytes=1000), **saving) as service, client_of(service) as client:
        busy = [True]
        sent = []

        def settle(self, step):
            """While a table is read, several commits are made, each as large as what is kept."""
            with client_of(service) as pushing:
                for _ in range(3 * busy[0]):
                    sent.append(frame(len(sent)))
                    pushing.put(sent[-1:], "w0")
            settled(self, step)

        settled = snapshots.TableSnapshots._settle
        monkeypatch.setattr(snapshots.TableSnapshots, "_settle", settle)
        refused = r"'user': [\d,]+ bytes .* made while it was read, and 1,000 are kept: .* a larger --delta-memory"
        for _ in range(2):
            with pytest.raises(ps.UsageError, match=refused):
                client.table("user")

        busy[0] = False
        snapshot = client.table("user")
        assert snapshot.version.step == len(sent)
        np.testing.assert_array_equal(snapshot.rows, np.asarray(service.engine.table("user")))


def test_a_table_that_changes_too_much_once_is_read_again(monkeypatch):
    with service_of(limits=Limits(delta_bytes=1000), per_steps=1) as service, client_of(service) as client:

        def settle(self, step):
            if service.engine.global_step == 0:
                with client_of(service) as pushing:
                    pushing.put(FRAMES, "w0")
            settled(self, step)

        settled = snapshots.TableSnapshots._settle
        monkeypatch.setattr(snapshots.TableSnapshots, "_settle", settle)
        snapshot = client.table("user")
        assert snapshot.version.step == 12
        np.testing.assert_array_equal(snapshot.rows, np.asarray(replayed(FRAMES).table("user")))


LEAVING = """
import sys
import pyarrow.flight as flight
from penstock.serving.flight import connect

with connect(sys.argv[1]) as service:
    for _ in range(5):
        for _ in service.deltas(follow=True):
            break
    raw, options = service.connection.opened()
    reader = raw.do_get(flight.Ticket(b'{"table":"user"}'), options)
    reader.read_chunk()
    reader.cancel()
    del reader
"""


def test_a_reader_that_leaves_leaves_no_trace_in_the_log(tmp_path):
    ps.EmbeddingConfig.from_tables([ps.TableConfig(1 << 18, 64, name="user", optimizer=ps.SGD(0.1))]).save(
        tmp_path / "c.pbtxt"
    )
    rows = pa.record_batch({"id": [1, 2], "gradient": [[1.0] * 64] * 2})
    with Process(tmp_path / "c.pbtxt", "--no-hash") as service, connect(service.uri, patience_s=HANG_S) as client:
        reading = subprocess.Popen([sys.executable, "-c", LEAVING, service.uri])
        with client.producer("w0") as producer:
            while reading.poll() is None:
                producer.send(rows)
                producer.wait()
        assert reading.returncode == 0
        until(lambda: client.status()["calls"] == 1)
        client.drain()
        code, _, err = service.wait()
    assert (code, err) == (0, "")


def test_a_flight_is_a_source(tmp_path):
    """Of an engine elsewhere: batches without steps are frames, and app_metadata may end one."""

    class Log(flight.FlightServerBase):  # type: ignore[misc]
        def get_flight_info(self, context, descriptor):
            assert descriptor.path == [b"monday"]
            ends = [flight.FlightEndpoint(text, []) for text in (b"0", b"1")]
            return flight.FlightInfo(FRAMES[0].schema, descriptor, ends, -1, -1)

        def do_get(self, context, ticket):
            half = FRAMES[:6] if ticket.ticket == b"0" else FRAMES[6:]
            return flight.RecordBatchStream(pa.Table.from_batches(half))

    with Log("grpc://127.0.0.1:0") as log:
        engine = ps.Engine(config_of())
        report = engine.run(f"grpc://127.0.0.1:{log.port}/monday")
        assert (report.frames, engine.state_hash()) == (12, replayed(FRAMES).state_hash())
        with pytest.raises(ps.InputError, match="name a flight: grpc://HOST:PORT/PATH"):
            engine.run(f"grpc://127.0.0.1:{log.port}")
    with pytest.raises(ps.InputError, match=r"grpc://127.0.0.1:1/x: failed to connect"):
        engine.run("grpc://127.0.0.1:1/x")


def test_a_service_that_ends_while_a_client_asks_for_its_tables_does_not_interrupt_the_program(monkeypatch):
    """pyarrow sends its program a simulated SIGINT if a call of ``list_flights`` is cancelled, in any thread."""
    interrupts = []
    before = signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
    flights = FlightServer._flight

    def cancelled_once(self, descriptor):
        monkeypatch.setattr(FlightServer, "_flight", flights)
        raise flight.FlightCancelledError("the service ends")

    monkeypatch.setattr(FlightServer, "_flight", cancelled_once)
    try:
        with service_of() as service, client_of(service) as client:
            assert list(in_thread(client.tables)()) == ["user"]
    finally:
        signal.signal(signal.SIGINT, before)
    assert not interrupts
