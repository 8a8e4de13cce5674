"""Dynamic tables in the Flight service: tables and rows by key, deltas with deletes, and what a full table does."""

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from dynamic import ALL_POLICIES, Reader, churning_steps, config_of, engine_of, log_of, physical, timed
from limits import HANG_S, until
from services import Process, client_of, service_of

import penstock as ps
from penstock.serving.flight import connect
from penstock.serving.flight.messages import decoded, encoded
from penstock.serving.service import snapshots
from penstock.serving.service.limits import Limits

STEPS = churning_steps(60)


def frame(step):
    """The frame of one step of STEPS, the same in every test."""
    return log_of([*([[]] * step), STEPS[step]])


FRAMES = [frame(step) for step in range(len(STEPS))]


def replayed(frames, dynamic=ALL_POLICIES, **options):
    engine = engine_of(dynamic, rows=32, **options)
    engine.run(iter(frames))
    return engine


def rows_of(snapshot):
    assert snapshot.keys.tolist() == sorted(snapshot.keys.tolist())
    return dict(zip(snapshot.keys.tolist(), snapshot.rows.tolist(), strict=True))


@pytest.mark.parametrize("durable", [False, True])
def test_a_table_and_its_deltas_are_those_of_the_engine(durable, tmp_path):
    saving = {"folder": tmp_path / "c", "every": 7} if durable else {"per_steps": 5}
    with service_of(engine_of(ALL_POLICIES, rows=32), last=True, **saving) as service, client_of(service) as client:
        assert client.table("user").keys.tolist() == []
        client.put(FRAMES[:20], "w0")
        snapshot = client.table("user")
        assert rows_of(snapshot) == physical(replayed(FRAMES[: snapshot.version.step]))
        reader = Reader(snapshot.version.step)
        reader.rows, reader.last = (
            rows_of(snapshot),
            dict(zip(snapshot.keys.tolist(), snapshot.last.tolist(), strict=True)),
        )
        client.put(FRAMES, "w0", first=1)
        for delta in client.deltas(snapshot.version):
            reader.follow(delta.batches)
            assert reader.rows == physical(replayed(FRAMES[: delta.version.step]))
        whole = replayed(FRAMES)
        assert reader.step == 60
        assert reader.ops["delete"] > 20
        assert [key for key in sorted(reader.rows) if reader.clock - reader.last[key] <= 9] == (
            whole.keys("user").to_pylist()
        )
        assert service.engine.state_hash() == whole.state_hash()


@pytest.mark.parametrize("durable", [False, True])
def test_a_table_without_a_key_is_of_the_step_of_its_clock(durable, tmp_path):
    engine = engine_of(ps.Dynamic(min_count=100), rows=32)
    with service_of(engine, folder=tmp_path / "c" if durable else None) as service, client_of(service) as client:
        with client.producer("w0") as producer:
            for step in range(5):
                producer.send(log_of([*([[]] * step), [1, 2]]))
            until(lambda: engine.global_step == 5)
            snapshot = client_of(service).table("user")
        assert (snapshot.version.step, snapshot.clock, snapshot.keys.tolist()) == (5, 4, [])


def read_slowly(monkeypatch, engine, steps):
    """Read tables in blocks of one row, and after each wait for the next of these steps. Returns the blocks so far."""
    blocks = []

    def slowly(metadata):
        blocks.append(metadata)
        until(lambda: engine.global_step >= steps[min(len(blocks), len(steps)) - 1])
        return encoded(metadata)

    monkeypatch.setattr(snapshots, "BLOCK_BYTES", 16)
    monkeypatch.setattr(snapshots, "encoded", slowly)
    return blocks


def table_of(stream):
    """(key → row of a table as it is sent, null ones included; the metadata of its end)"""
    rows, end = {}, {}
    for chunk in stream:
        rows |= dict(zip(chunk.data["id"].to_pylist(), chunk.data["row"].to_pylist(), strict=True))
        end = decoded(chunk.app_metadata, "")
    return rows, end


@pytest.mark.parametrize("durable", [False, True])
def test_a_table_read_while_keys_come_and_go_is_of_one_step(durable, tmp_path, monkeypatch):
    saving = {"folder": tmp_path / "c", "every": 10} if durable else {}
    engine = engine_of(ALL_POLICIES, rows=32)
    blocks = read_slowly(monkeypatch, engine, range(25, 61))
    with service_of(engine, **saving) as service, client_of(service) as client:
        with client_of(service).producer("w0") as producer:
            for each in FRAMES[:25]:  # with a commit every 10 steps, the last one is behind
                producer.send(each)
            until(lambda: engine.global_step == 25)
            stream = client.connection.opened()[0].do_get(flight.Ticket(encoded({"table": "user"})))
            until(lambda: blocks)
            for each in FRAMES[25:]:
                producer.send(each)
            producer.wait()
        rows, end = table_of(stream)
        version = ps.Version(end["version"])
        assert None in rows.values()  # keys of the first blocks that were removed meanwhile
        assert {key: row for key, row in rows.items() if row is not None} == physical(replayed(FRAMES[: version.step]))
        assert end["clock"] == version.step - 1


def test_a_key_admitted_before_a_read_and_removed_after_it_within_one_commit_is_not_left_over(tmp_path, monkeypatch):
    engine = engine_of(ps.Dynamic(evict="lru"), rows=2)
    blocks = read_slowly(monkeypatch, engine, [2, 3])
    with service_of(engine, folder=tmp_path / "c") as service, client_of(service) as client:
        client.put([log_of([[1, 2]])], "w0")  # committed at its end
        with client_of(service).producer("w0") as producer:
            producer.send(log_of([[], [3]]))
            until(lambda: engine.global_step == 2)
            stream = client.connection.opened()[0].do_get(flight.Ticket(encoded({"table": "user"})))
            until(lambda: len(blocks) == 2)
            producer.send(log_of([[], [], [4, 5]]))
            producer.wait()
        rows, _ = table_of(stream)
        assert 3 in rows
        assert sorted(key for key, row in rows.items() if row is not None) == [4, 5]


def test_a_table_that_is_read_again_forgets_the_keys_of_the_first_time(monkeypatch):
    engine = engine_of(ps.Dynamic(evict="lru"), rows=2)
    with service_of(engine, limits=Limits(delta_bytes=1)) as service, client_of(service) as client:
        client.put([log_of([[1, 2]])], "w0")
        settle = snapshots.TableSnapshots._settle

        def settle_late(self, step):
            if service.engine.global_step == 1:  # between the first read and its deltas, which are too large to keep
                client_of(service).put([log_of([[], [3, 4]])], "w1")
            settle(self, step)

        monkeypatch.setattr(snapshots.TableSnapshots, "_settle", settle_late)
        snapshot = client.table("user")
        assert (snapshot.keys.tolist(), snapshot.version.step) == ([3, 4], 2)


@pytest.mark.parametrize("key_type", ["int64", "uint64"])
def test_rows_are_looked_up_by_key(key_type):
    engine = engine_of(ps.Dynamic(key_type=key_type), rows=8)
    largest = 2**64 - 1 if key_type == "uint64" else -(2**63)
    keys = np.array([largest, 7], key_type)
    with service_of(engine) as service, client_of(service) as client:
        client.put([pa.record_batch({"id": keys, "gradient": [np.ones(4, np.float32)] * 2})], "w0")
        asked = np.array([7, largest, 7, 9], key_type)
        np.testing.assert_array_equal(client.lookup({"user": asked})["user"], engine.lookup("user", asked))
        snapshot = client.table("user")
        assert snapshot.keys.dtype == key_type
        assert snapshot.keys.tolist() == sorted(keys.tolist())
        outside = -1 if key_type == "uint64" else 2**63
        with pytest.raises(ps.InputError, match=f"table 'user': expected .*, got {outside}"):
            client.lookup({"user": [outside]})
        info = client.connection.opened()[0].get_flight_info(flight.FlightDescriptor.for_path("table", "user"))
        assert info.total_records == 2
        assert info.schema.field("id").type == pa.type_for_alias(key_type)


def test_the_status_has_the_keys():
    with service_of(engine_of(ALL_POLICIES, rows=32)) as service, client_of(service) as client:
        client.put(FRAMES, "w0")
        report = replayed(FRAMES).core.table_reports()["user"].keys
        user = client.status()["keys"]["user"]
        assert user["keys"] == report.keys
        assert (user["admitted"], user["evicted"]) == (report.admitted, report.evicted)
        assert user["evicted"] > 0


def test_frames_carry_the_time():
    dynamic = ps.Dynamic(expire_after=100, clock="time")
    with service_of(engine_of(dynamic, rows=8)) as service, client_of(service) as client:
        client.put(timed([1, 2, 3], [1000, 1050, 1101]), "w0")
        assert service.engine.keys("user").to_pylist() == [2, 3]
        assert client.table("user").clock == 1101
        with pytest.raises(ps.InputError, match="the clock of a dynamic table needs 'time'"):
            client.put([timed([1], [5]).drop_columns(["time"])], "w1")
        with pytest.raises(ps.InputError, match="these may be milliseconds: divide by 1000"):
            client.put([timed([1], [1_700_000_000_000], [9])], "w2")
        descriptor = flight.FlightDescriptor.for_path("gradients", "w0")
        assert client.connection.opened()[0].get_schema(descriptor).schema.field("time").type == pa.int64()


def test_a_full_table_ends_the_service_and_no_frame_is_lost_or_applied_twice(tmp_path):
    small, large = (tmp_path / f"rows{rows}.pbtxt" for rows in (2, 9))
    config_of(rows=2).save(small)
    config_of(rows=9).save(large)
    frames = [log_of([*([[]] * step), keys]) for step, keys in enumerate([[1, 2], [1], [3], [4]])]
    saving = ("--checkpoint", tmp_path / "c", "--every", 1)
    with Process(small, *saving) as service, connect(service.uri, patience_s=0.5) as client:
        with pytest.raises(ps.ServiceError):
            client.put(frames, "w0")
        code, _, err = service.wait()
    assert code == 6
    assert "table 'user': no room for 1 of 1 new keys: 2 of 2 rows are in use; set a larger vocabulary_size" in err
    assert err.count("\n") == 1
    with Process(large, *saving, "--resume", "--json") as service, connect(service.uri, patience_s=HANG_S) as client:
        done = client.position("w0")
        client.put(frames[done:], "w0", first=done + 1)
        client.drain()
        code, out, err = service.wait()
    assert code == 0, err
    straight = engine_of(rows=9)
    straight.run(iter(frames))
    assert f'"state_hash": "{straight.state_hash()}"' in out


def send_often(producer, frame):
    for _ in range(10_000):
        producer.send(frame)


@pytest.mark.parametrize("durable", [False, True])
def test_every_producer_of_a_service_that_a_full_table_ends_gets_the_line_that_names_it(durable, tmp_path):
    config_of(rows=2).save(tmp_path / "c.pbtxt")
    saving = ("--checkpoint", tmp_path / "c") if durable else ()
    with Process(tmp_path / "c.pbtxt", *saving) as service:
        other = connect(service.uri, patience_s=0.5).producer("in flight")
        other.send(log_of([[1]]))
        other.wait()
        with pytest.raises(ps.ServiceError) as cause:
            connect(service.uri, patience_s=0.5).put([log_of([[], [2, 3]])], "cause")
        with pytest.raises(ps.ServiceError) as in_flight:
            send_often(other, log_of([[1]]))
        assert service.wait()[0] == 6
    for line in (str(cause.value), str(in_flight.value)):
        assert "table 'user': no room for 1 of 2 new keys: 1 of 2 rows are in use; set a larger vocabulary_size" in line
        assert "\n" not in line
