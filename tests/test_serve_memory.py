"""Gradients that reach the service through shared memory: the same tables, whatever the producer does with it."""

import os
import signal
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pytest
from limits import HANG_S, until
from raw_producer import FRAMES, ROWS, Raw, put
from services import DIM, client_of, config_of, frame, replayed, service_of

import penstock as ps
from penstock.io.decoding import source_batch
from penstock.io.flight import shm_ring, shm_writer
from penstock.io.flight.messages import Columns, Place
from penstock.io.flight.shm_ring import Room
from penstock.io.flight.shm_writer import Memory
from penstock.service import put_streams
from penstock.service.limits import Limits

pytestmark = pytest.mark.skipif(not shm_writer._SEALS, reason="only Linux shares memory without a name")

MB = 1 << 20


@pytest.fixture(autouse=True)
def worth_sharing(monkeypatch):
    """Batches that tests are quick with."""
    monkeypatch.setattr(shm_ring, "WORTH_SHARING_BYTES", 1 << 16)


@pytest.fixture
def small(monkeypatch):
    """Memory for five frames, so that it is written round and round."""
    monkeypatch.setattr(put_streams, "SHARED_BYTES", MB)


def shared(client):
    return client.status()["shared_memory"]


def frames_for(tables):
    """Dictionaries, lists of their own lengths, and slices that begin somewhere."""
    names = pa.DictionaryArray.from_arrays(np.arange(ROWS + 10, dtype=np.int32) % len(tables), pa.array(tables))
    made = []
    for n in range(12):
        whole = frame(n, ROWS + 10)
        gradient = whole.column("gradient").cast(pa.list_(pa.float32()))
        made.append(pa.record_batch({"id": whole.column("id"), "gradient": gradient, "table": names}).slice(10))
    return made


@pytest.mark.parametrize("tables", [("user",), ("user", "item")])
def test_what_goes_through_memory_ends_as_a_replay_of_it(tables, small):
    frames = FRAMES if len(tables) == 1 else frames_for(tables)
    with service_of(ps.Engine(config_of(tables))) as service, client_of(service) as client:
        with client.producer("w0") as producer:
            producer.send(frames[0])
            producer.wait()  # from here on the offer is known
            for each in frames[1:]:
                producer.send(each)
        # The first may come before the offer is known.
        until(lambda: shared(client)["batches"] in (11, 12) and shared(client)["bytes"] == 0)
        assert service.engine.state_hash() == replayed(frames, config_of(tables)).state_hash()


def test_small_batches_and_those_beyond_the_memory_go_with_their_message(small):
    frames = [FRAMES[0], frame(1, 20), frame(2, 60_000), FRAMES[3]]
    with service_of() as service, client_of(service) as client:
        with client.producer("w0") as producer:
            for each in frames:
                producer.send(each)
                producer.wait()
        until(lambda: shared(client)["batches"] in (1, 2))
        assert service.engine.state_hash() == replayed(frames).state_hash()


def test_it_can_be_left_out_on_either_side():
    with service_of() as service, client_of(service, share_memory=False) as client:
        client.put(FRAMES, "w0")
        assert shared(client)["batches"] == 0
    with service_of(limits=Limits(memory_bytes=0)) as service, client_of(service) as client:
        client.put(FRAMES, "w0")
        assert shared(client)["batches"] == 0
        assert service.engine.state_hash() == replayed(FRAMES).state_hash()


def test_all_streams_together_have_so_much_and_others_go_the_ordinary_way():
    limits = Limits(memory_bytes=put_streams.SHARED_BYTES)
    with service_of(limits=limits) as service, client_of(service) as one, client_of(service) as two:
        first, second = one.producer("a"), two.producer("b")
        for producer in (first, second):
            for each in FRAMES[:3]:
                producer.send(each)
                producer.wait()
        assert shared(one) == {"bytes": put_streams.SHARED_BYTES, "batches": 0}
        first.close()
        second.close()
        until(lambda: shared(one)["batches"] in (2, 3) and shared(one)["bytes"] == 0)


@pytest.mark.parametrize(
    "place",
    [
        (0, 100),
        (-64, 100),
        (65, 100),
        (64, -1),
        (64, 0),
        (64, 1 << 40),
        (1 << 62, 1 << 62),
        ((16 << 20) - 8, 16),
        (16 << 20, 1),
    ],
)
def test_a_place_outside_the_memory_is_refused(place):
    with service_of() as service, client_of(service) as client:
        raw = Raw(service)
        raw.say(ends=True, number=1, place=Place(*place))
        assert f"{place[1]} bytes at {place[0]} of the shared memory, which has 16777216" in raw.refused()
        client.put(FRAMES[:2], "w0")
        assert service.engine.state_hash() == replayed(FRAMES[:2]).state_hash()


def test_a_place_in_memory_that_was_not_offered_is_refused():
    with service_of() as service:
        raw = Raw(service, memory=False)
        raw.say(ends=True, number=1, place=Place(64, 100))
        assert "a batch lies in shared memory, which this stream has not" in raw.refused()


def damaged():
    """Bytes that are no batch of the stream, and what is said of them."""
    compressed, other = pa.BufferOutputStream(), pa.BufferOutputStream()
    zeros = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(1 << 24, np.float32)), 4)
    bomb = pa.record_batch({"id": np.zeros(1 << 22, np.int64), "gradient": zeros})
    with pa.ipc.new_stream(compressed, bomb.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(bomb)
    with pa.ipc.new_stream(other, pa.schema([("id", pa.int32())])) as writer:
        writer.write_batch(pa.record_batch({"id": pa.array([1], pa.int32())}))
    empty = pa.BufferOutputStream()
    pa.ipc.new_stream(empty, FRAMES[0].schema).close()
    return {
        "zeros": (bytes(1000), "no batch in the shared memory"),
        "noise": (np.random.default_rng(0).bytes(100_000), "no batch in the shared memory"),
        "empty": (empty.getvalue().to_pybytes(), "no batch in the shared memory"),
        "schema": (other.getvalue().to_pybytes(), "another schema than its stream"),
        "bomb": (compressed.getvalue().to_pybytes(), "bytes that unpack to"),
    }


@pytest.mark.parametrize("kind", ["zeros", "noise", "empty", "schema", "bomb"])
def test_what_is_no_batch_of_the_stream_is_refused(kind):
    content, said = damaged()[kind]
    with service_of() as service, client_of(service) as client:
        raw = Raw(service)
        room = Room.found(raw.offer)
        room._bytes[64 : 64 + len(content)] = np.frombuffer(content, np.uint8)
        raw.say(ends=True, number=1, place=Place(64, len(content)))
        assert said in raw.refused()
        assert client.put(FRAMES[:2], "w0").position == 2


def test_what_a_producer_changes_after_it_was_taken_changes_nothing():
    first, second = FRAMES[0].slice(0, 5000), FRAMES[0].slice(5000)
    with service_of() as service:
        raw = Raw(service)
        room = Room.found(raw.offer)
        for count, (piece, words) in enumerate([(first, {}), (second, {"ends": True, "number": 1})], 1):
            put(raw, room, piece, **words)
            assert raw.heard("taken") == count
            room._bytes[64:MB] = 255
        raw.close()
        assert service.engine.state_hash() == replayed(FRAMES[:1]).state_hash()


@pytest.fixture
def lends(monkeypatch):
    """Of every batch in shared memory, whether its values were lent."""
    batch, seen = Memory.batch, []

    def spied(memory, *arguments):
        given = batch(memory, *arguments)
        seen.append(given.copied is not None)
        return given

    monkeypatch.setattr(Memory, "batch", spied)
    return seen


@pytest.mark.parametrize("num_required", [1, 2])
def test_values_are_lent_where_they_are_read_once(num_required, lends):
    """Where frames are held their values are judged before they are added: those are copied."""
    with service_of(ps.Engine(config_of(), num_required=num_required)) as service:
        raw = Raw(service)
        room = Room.found(raw.offer)
        for number, each in enumerate(FRAMES[:4], 1):
            put(raw, room, each, ends=True, number=number)
            assert raw.heard("taken") == number
            room._bytes[64:MB] = 255
        raw.close()
        assert lends == [num_required == 1] * 4
        assert service.engine.state_hash() == replayed(FRAMES[:4], num_required=num_required).state_hash()


def test_values_of_a_frame_in_pieces_or_too_large_to_leave_room_for_others_are_copied(lends, small):
    large = frame(9, 30_000)
    with service_of() as service:
        raw = Raw(service)
        room = Room.found(raw.offer)
        put(raw, room, FRAMES[0].slice(0, 5000))
        put(raw, room, FRAMES[0].slice(5000), ends=True, number=1)
        assert raw.heard("taken") in (1, 2)
        put(raw, room, large, ends=True, number=2)
        assert raw.heard("taken") in (2, 3)
        raw.close()
        assert lends == [False] * 3
        assert service.engine.state_hash() == replayed([FRAMES[0], large]).state_hash()


IDS, GRADIENTS = Place(64, 8 * ROWS), Place(64 + 8 * ROWS, 4 * DIM * ROWS)


@pytest.mark.parametrize(
    ("num_rows", "places", "said"),
    [
        (ROWS, [IDS], "1 columns in the shared memory, where the stream has 2"),
        (ROWS, [IDS, GRADIENTS, IDS], "3 columns in the shared memory, where the stream has 2"),
        (ROWS, [], "0 columns in the shared memory"),
        (ROWS, [IDS, Place(64, 100)], "100 bytes in the shared memory for 8000 rows of fixed_size_list"),
        (ROWS, [GRADIENTS, IDS], "128000 bytes in the shared memory for 8000 rows of int64"),
        (ROWS + 1, [IDS, GRADIENTS], "64000 bytes in the shared memory for 8001 rows of int64"),
        (0, [Place(64, 0), Place(64, 0)], "0 bytes in the shared memory for 0 rows"),
        (-1, [Place(64, -8), Place(64, -16)], "-8 bytes in the shared memory for -1 rows"),
        (1 << 61, [Place(64, 1 << 64), GRADIENTS], "bytes at 64 of the shared memory, which has 16777216"),
        (ROWS, [Place(0, 8 * ROWS), GRADIENTS], "64000 bytes at 0 of the shared memory"),
        (ROWS, [IDS, Place(68, 4 * DIM * ROWS)], "128000 bytes at 68 of the shared memory"),
        (ROWS, [IDS, Place((16 << 20) - 64, 4 * DIM * ROWS)], "of the shared memory, which has 16777216"),
    ],
)
def test_columns_that_are_not_those_of_the_stream_are_refused(num_rows, places, said):
    with service_of() as service, client_of(service) as client:
        raw = Raw(service)
        raw.say(ends=True, number=1, place=Columns(num_rows, tuple(places)))
        assert said in raw.refused()
        client.put(FRAMES[:2], "w0")
        assert service.engine.state_hash() == replayed(FRAMES[:2]).state_hash()


@pytest.mark.parametrize(
    "column",
    [
        ["a"] * ROWS,
        [True] * ROWS,
        [[1.0]] * ROWS,
        pa.array(["a"] * ROWS).dictionary_encode(),
        [1.0, None] * (ROWS // 2),
    ],
)
def test_batches_with_columns_of_other_kinds_go_as_streams(column, lends, small):
    frames = [each.append_column("more", pa.array(column)) for each in FRAMES[:3]]
    with service_of() as service:
        raw = Raw(service, schema=frames[0].schema)
        room = Room.found(raw.offer)
        for number, each in enumerate(frames, 1):
            put(raw, room, each, ends=True, number=number)
        raw.close()
        assert lends == [False] * 3
        assert service.engine.state_hash() == replayed(frames).state_hash()


def test_a_batch_of_very_many_columns_goes_as_a_stream(lends):
    wide = FRAMES[0].slice(0, 3000)
    for number in range(300):
        wide = wide.append_column(f"more{number}", wide.column("id"))
    with service_of() as service, client_of(service) as client:
        with client.producer("w0") as producer:
            for _ in range(3):
                producer.send(wide)
                producer.wait()
        assert lends == [False] * len(lends) != []
        assert service.engine.state_hash() == replayed([wide] * 3).state_hash()


def test_columns_of_a_kind_whose_values_are_not_all_there_is_are_refused():
    schema = FRAMES[0].schema.append(pa.field("more", pa.utf8()))
    with service_of() as service:
        raw = Raw(service, schema=schema)
        raw.say(ends=True, number=1, place=Columns(ROWS, (IDS, GRADIENTS, Place(64, 8 * ROWS))))
        assert "64000 bytes in the shared memory for 8000 rows of string" in raw.refused()


@pytest.mark.parametrize("on_bad_row", ["error", "drop"])
def test_a_value_that_turns_bad_after_it_was_judged_is_not_added(on_bad_row, monkeypatch, lends):
    """A producer that writes to what it lends: what is looked at twice is a copy."""
    judged = source_batch.SourceBatch.validated

    def changing(batch, sizes):
        seen = judged(batch, sizes)
        room._bytes[64:MB].view(np.float32)[:] = np.nan
        return seen

    monkeypatch.setattr(source_batch.SourceBatch, "validated", changing)
    with service_of(on_bad_row=on_bad_row) as service:
        raw = Raw(service)
        room = Room.found(raw.offer)
        put(raw, room, with_value(FRAMES[0], np.nan), ends=True, number=1)
        if on_bad_row == "error":
            assert "gradient_not_finite" in raw.refused()
            assert service.engine.global_step == 0
        else:
            raw.close()
            assert service.status()["dropped"] == {"gradient_not_finite": 1}
        assert lends == [True]
        assert np.isfinite(np.asarray(service.engine.table("user"))).all()


def with_value(batch, value):
    values = batch.column("gradient").values.to_numpy().copy()
    values[17] = value
    return batch.set_column(1, "gradient", pa.FixedSizeListArray.from_arrays(values, DIM))


DIES = """
import os, signal, sys
import numpy as np, pyarrow as pa
from penstock.io.flight import connect

with connect(sys.argv[1]) as service:
    gradient = pa.FixedSizeListArray.from_arrays(np.ones(4 * 16000, np.float32), 4)
    frame = pa.record_batch({"id": np.arange(16000) % 500, "gradient": gradient})
    producer = service.producer("w0")
    producer.send(frame)
    producer.wait()  # from here on the offer is known
    while True:
        producer.send(frame)
        if producer.acked.position > 5:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_producer_that_dies_leaves_no_memory_behind():
    before = shared_memory_files()  # of other tests' producers that the garbage collector has not met yet
    with service_of() as service:
        done = subprocess.run([sys.executable, "-c", DIES, service.address.uri], check=False, timeout=HANG_S)
        assert done.returncode == -signal.SIGKILL
        until(lambda: service.door.num_calls == 0)
        assert service.producers.memory.num_taken == 0
        assert service.producers.num_shared > 0
        assert shared_memory_files() <= before


def shared_memory_files():
    """Return the descriptors of shared memory that this process has open."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}").startswith("/memfd:penstock "):
                found.add(number)
    return found
