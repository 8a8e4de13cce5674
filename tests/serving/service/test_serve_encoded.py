"""Deltas and tables of a service in 16 or 8 bits per value."""

import json
import zlib
from struct import pack

import numpy as np
import pyarrow.flight as flight
import pytest
from scripts import loaded
from services import client_of, config_of, frame, service_of
from stores import config_of as mixed_config
from stores import frame as mixed_frame

import penstock as ps
import penstock.io.delta_format as delta_format
import penstock.serving.flight.client as client_module
from penstock.model.row_encodings import ENCODINGS

ENCODED = ["bfloat16", "int8"]
FRAMES = [mixed_frame(step) for step in range(40)]


def rows_in(deltas):
    """(table, id, row) of all rows, and of the other columns but the checksum everything."""
    rows, others = [], []
    for delta in deltas:
        for batch in delta.batches:
            columns = (batch[name].to_pylist() for name in ("table", "id", "row"))
            rows += zip(*columns, strict=True)
            others.append(batch.drop_columns(["row", "checksum"]).to_pylist())
    return rows, others


def checksums(delta, last=False):
    """The checksum of each batch, as docs/formats.md defines it."""
    crc = zlib.crc32(pack("<qq", delta.since, delta.version.step))
    for batch in delta.batches:
        rows = batch.to_pylist()
        for table in dict.fromkeys(row["table"] for row in rows):
            own = [row for row in rows if row["table"] == table]
            crc = zlib.crc32(table.encode() + b"\0", crc)
            crc = zlib.crc32(b"".join(pack("<Q", row["id"] % 2**64) for row in own), crc)
            crc = zlib.crc32(bytes(row["row"] is None for row in own), crc)
            if own[0]["clock"] is not None:
                crc = zlib.crc32(pack("<q", own[0]["clock"]), crc)
                if last:
                    crc = zlib.crc32(b"".join(pack("<q", row["last"]) for row in own if row["row"] is not None), crc)
            crc = zlib.crc32(b"".join(row["row"] for row in own if row["row"] is not None), crc)
        yield crc


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("rows", ENCODED)
def test_deltas_have_the_encoded_rows_of_float32_and_their_checksum(rows, last, monkeypatch):
    monkeypatch.setattr(delta_format, "MOST_ROWS", 7)  # deltas of several batches
    with service_of(ps.Engine(mixed_config()), per_steps=5, last=last) as service, client_of(service) as client:
        begin = client.status().version
        client.put(FRAMES, "w0")
        deltas, encoded = list(client.deltas(begin)), list(client.deltas(begin, rows=rows))
        assert any(len(delta.batches) > 2 for delta in deltas)
        (floats, others), (values, encoded_others) = rows_in(deltas), rows_in(encoded)
        assert others == encoded_others
        assert any(row is None for *_, row in floats)
        for (table, id_, row), value in zip(floats, values, strict=True):
            wanted = None if row is None else ENCODINGS[rows].encode(np.array([row], np.float32)).tobytes()
            assert value == (table, id_, wanted)
        for delta in encoded:
            assert list(checksums(delta, last)) == [batch["checksum"][0].as_py() for batch in delta.batches]
            assert delta.batches[0].schema.metadata[b"penstock.rows"] == rows.encode()
            assert delta.batches[0].schema.metadata[b"penstock.delta_stream"] == b"2"


@pytest.mark.parametrize("rows", ENCODED)
@pytest.mark.parametrize("table", ["item", "user"])
def test_a_table_is_fetched_encoded(rows, table):
    with service_of(ps.Engine(mixed_config()), per_steps=1) as service, client_of(service) as client:
        client.put(FRAMES, "w0")
        whole, encoded = client.table(table), client.table(table, rows=rows)
        assert encoded.version == whole.version
        assert encoded.rows.tobytes() == ENCODINGS[rows].encode(whole.rows).tobytes()
        assert encoded.rows.shape == (len(whole.rows), ENCODINGS[rows].width(4))
        if whole.keys is not None:
            assert encoded.keys.tolist() == whole.keys.tolist()


def test_the_bytes_are_the_same_for_any_threads_devices_and_deltas(mesh_of):
    results = []
    for number, arguments in enumerate(({"threads": 1}, {"threads": 3}, {"mesh": mesh_of(3)})):
        engine, rows = ps.Engine(config_of(), **arguments), {}
        with service_of(engine, per_steps=1 + number) as service, client_of(service) as client:
            begin = client.status().version
            client.put([frame(step) for step in range(12)], "w0")
            for delta in client.deltas(begin, rows="int8"):
                for batch in delta.batches:
                    rows.update(zip(batch["id"].to_pylist(), batch["row"].to_pylist(), strict=True))
        results.append(rows)
    assert results[0] == results[1] == results[2]
    assert len(results[0]) > 100


def test_a_table_that_changes_while_it_is_fetched(monkeypatch):
    monkeypatch.setattr("penstock.serving.service.snapshots.BLOCK_BYTES", 16 * 10)
    with service_of(ps.Engine(mixed_config()), per_steps=1) as service, client_of(service) as client:
        client.put(FRAMES[:20], "w0")
        messages = service.readers.snapshots.read("user", ENCODINGS["int8"])
        first, _ = next(messages)
        client.put(FRAMES[:35], "w0", first=1)
        rows = dict(zip(first["id"].to_pylist(), first["row"].to_pylist(), strict=True))
        removed = 0
        for batch, _ in messages:
            for id_, row in zip(batch["id"].to_pylist(), batch["row"].to_pylist(), strict=True):
                removed += row is None
                rows[id_] = row
        assert removed
        table = client.table("user", rows="int8")
        rows = {id_: row for id_, row in rows.items() if row is not None}
        assert rows == {id_: row.tobytes() for id_, row in zip(table.keys.tolist(), table.rows, strict=True)}


# ---- what is refused


@pytest.mark.parametrize("rows", ["int4", 8, None])
def test_an_unknown_encoding_is_refused_by_name(rows):
    with service_of() as service, client_of(service) as client:
        for call in (lambda: next(client.deltas(rows=rows)), lambda: client.table("user", rows=rows)):
            with pytest.raises(ps.UsageError, match=f"rows: expected float32, bfloat16, int8, got {rows!r}"):
                call()
        for ticket in ({"deltas": {"rows": rows}}, {"table": "user", "rows": rows}):
            with pytest.raises(flight.FlightError, match="rows: expected float32, bfloat16, int8, got"):
                flight.connect(service.address.uri).do_get(flight.Ticket(json.dumps(ticket).encode())).read_all()


def test_a_service_that_knows_no_encodings_is_refused_by_name(monkeypatch):
    """It ignores what it does not know in a ticket, and sends float32."""
    monkeypatch.setattr(client_module, "_ticket_rows", lambda encoding: {})
    with service_of() as service, client_of(service) as client:
        for call in (lambda: next(client.deltas(rows="int8")), lambda: client.table("user", rows="int8")):
            with pytest.raises(ps.UsageError, match="expected rows of int8, got float32; the service runs another ver"):
                call()


def test_the_plain_reader_refuses_encoded_rows_by_name():
    example = loaded("examples/apply_deltas.py")
    with service_of(per_steps=1) as service, client_of(service) as client:
        begin = client.status().version
        client.put([frame(0)], "w0")
        (delta,) = client.deltas(begin, rows="int8")
    with pytest.raises(example.BrokenError, match="rows of int8: expected float32"):
        example.Follower({}).take(delta.batches[0])
