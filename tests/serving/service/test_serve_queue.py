"""Frames that are not whole yet: what they keep in the service's memory, and how much of it they may."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from limits import HANG_S, until
from services import Process, config_of, frame, refused, replayed, service_of

import penstock as ps
from penstock.serving.flight import connect
from penstock.serving.flight.messages import PutRequest
from penstock.serving.service import limits
from penstock.serving.service.limits import Limits

MB = 1 << 20


def with_column(batch, num_bytes):
    """Return the batch with another column, which the service does not read. Columns of a size share their memory."""
    return batch.append_column("unread", unread(batch.num_rows, num_bytes))


@lru_cache
def unread(num_rows, num_bytes):
    return pa.array([b"x" * num_bytes] * num_rows)


def begin(client, batches, contributor="w0"):
    """Send batches and nothing that ends the last frame."""
    writer, reader = client.do_put(PutRequest(contributor=contributor).descriptor(), batches[0].schema)
    for batch in batches:
        writer.write_batch(batch)
    return writer, reader


def resident(process):
    """Bytes of memory that a process has."""
    (line,) = (line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "VmRSS" in line)
    return int(line.split()[1]) << 10


def test_a_queued_row_does_not_retain_its_whole_message(tmp_path):
    config_of().save(tmp_path / "c.pbtxt")
    rows = [with_column(frame(n, 1, step=0), 6 * MB) for n in range(150)]
    # glibc would keep what gRPC's threads free, as much as their order decides; above this size it gives it back.
    under = ("env", "MALLOC_MMAP_THRESHOLD_=65536")
    words = ("--max-message", "16", "--max-queued-rows", "1000")
    with Process(tmp_path / "c.pbtxt", *words, under=under) as service:
        with connect(service.uri, patience_s=HANG_S) as client, flight.connect(service.uri) as raw:
            client.lookup({"user": [0]})
            before = resident(service.process)
            writer, _ = begin(raw, rows)
            until(lambda: client.status()["queued_rows"] == len(rows))
            assert client.status()["queued_bytes"] < MB
            until(lambda: resident(service.process) - before < len(rows) * MB)
            writer.close()
            assert client.position("w0") == 1
            client.drain()
        code, out, _ = service.wait()
    assert code == 0
    whole = pa.Table.from_batches([row.drop_columns(["unread"]) for row in rows]).combine_chunks().to_batches()
    assert replayed(whole).state_hash() in out


@pytest.mark.parametrize("kind", ["fixed", "lists", "dictionary", "bad row"])
def test_copied_rows_give_the_same_state(monkeypatch, kind):
    monkeypatch.setattr(limits, "WORTH_COPYING", 0)
    tables = ("user", "item") if kind == "dictionary" else ("user",)
    names = pa.DictionaryArray.from_arrays(np.arange(20, dtype=np.int32) % 2, pa.array(tables * 2)[:2])
    frames = []
    for n in range(12):
        batch = frame(n, step=n // 3)
        if kind == "lists":
            gradient = batch.column("gradient").cast(pa.list_(pa.float32()))
            batch = batch.set_column(batch.schema.get_field_index("gradient"), "gradient", gradient)
        if kind == "dictionary":
            batch = batch.append_column("table", names)
        if kind == "bad row" and n == 4:
            ids = batch.column("id").to_numpy().copy()
            ids[7] = -1
            batch = batch.set_column(batch.schema.get_field_index("id"), "id", pa.array(ids))
        frames.append(with_column(batch, 10_000))
    with service_of(ps.Engine(config_of(tables)), on_bad_row="drop") as service:
        raw = flight.connect(service.address.uri)
        writer, _ = begin(raw, frames)
        until(lambda: service.producers.budget.num_rows == 60)  # those of the last step
        assert service.producers.budget.num_bytes < 60_000
        writer.close()
        raw.close()
        until(lambda: service.sequencer.streams.position("w0") == 4)
        engine = ps.Engine(config_of(tables))
        engine.run(iter(each.drop_columns(["unread"]) for each in frames), on_bad_row="drop")
        assert service.engine.state_hash() == engine.state_hash()
        assert service.producers.budget.num_bytes == 0


@pytest.mark.parametrize(
    ("most", "rows", "problem"),
    [
        (Limits(queued_bytes=MB), 5000, "a frame of more than 1,048,576 bytes.*--queued-memory"),
        (Limits(queued_rows=130), 20, "a frame of more than 130 rows"),
    ],
)
def test_a_frame_larger_than_what_may_be_queued_is_refused(most, rows, problem):
    with service_of(limits=most) as service, flight.connect(service.address.uri) as raw:
        # The last one is too much: an earlier refusal could arrive while the client still writes.
        writer, reader = begin(raw, [frame(n, rows=rows, step=0) for n in range(7)])
        refused(writer, reader, flight.FlightServerError, problem)
        until(lambda: service.admission.num_calls == 0)
        assert (service.producers.budget.num_bytes, service.producers.budget.num_rows) == (0, 0)
        assert service.engine.global_step == 0


@pytest.mark.parametrize(
    ("most", "rows", "problem"),
    [
        (Limits(queued_bytes=MB // 4), 3000, "bytes wait in unfinished frames of all producers"),
        (Limits(queued_rows=50), 20, "40 rows wait in unfinished frames of all producers"),
    ],
)
def test_unfinished_frames_of_all_producers_are_bounded_together(most, rows, problem):
    part = [frame(0, rows=rows, step=0)]
    with service_of(limits=most) as service:
        clients = [flight.connect(service.address.uri) for _ in range(3)]
        writers = []
        for n in range(2):
            writers.append(begin(clients[n], part, f"w{n}"))
            until(lambda: service.producers.budget.num_rows == rows * (n + 1))  # noqa: B023
        writer, reader = begin(clients[2], part, "w2")
        refused(writer, reader, flight.FlightUnavailableError, problem)
        for writer, _ in writers:
            writer.close()
        for client in clients:
            client.close()
        until(lambda: service.admission.num_calls == 0)
        assert (service.producers.budget.num_bytes, service.sequencer.counters.frames) == (0, 2)


def test_metadata_of_a_batch_counts_as_queued_bytes():
    """It lies in the same message."""
    batch = frame(0, step=0)
    with service_of() as service, flight.connect(service.address.uri) as raw:
        writer, _ = raw.do_put(PutRequest(contributor="w0").descriptor(), batch.schema)
        for _ in range(4):
            writer.write_with_metadata(batch, b"x" * (1 << 15))
        until(lambda: service.producers.budget.num_rows == 80)
        assert service.producers.budget.num_bytes > 4 << 15
        writer.close()
