"""A message that follows others of its schema is decoded as it would be alone, also if it is damaged."""

import numpy as np
import pyarrow as pa
import pytest
from brokers import message_of
from evidence import IS_EVIDENCE, more_as_evidence
from ipc import stream
from services import VOCABULARY, config_of, frame

from penstock.base.errors import InputError
from penstock.io.decoding.reader import ReadOptions
from penstock.io.partitions.broker_partition import Message
from penstock.io.partitions.message_frames import MessageFrames

FIRST = message_of(frame(0, step=7))


def after(*messages, **options):
    """A decoder that has decoded these messages."""
    decoder = MessageFrames(ReadOptions(config_of().id_ranges, unvalidated=True, **options), {})
    for each in messages:
        decoder.read(Message(1, each), "m")
    return decoder


def outcome(decoder, message):
    """What a message is decoded to: its rows, or the error."""
    try:
        actual = decoder.read(Message(2, message), "m").frame().audited()
    except InputError as error:
        return str(error)
    return (
        actual.is_void,
        actual.local_step,
        actual.contributor,
        actual.position,
        [(table, rows.ids.tolist(), rows.grads.tobytes()) for table, row in actual.rows.items() for rows in row],
    )


BATCH = frame(1, rows=33, step=8)
CODED = BATCH.append_column("contributor", pa.array(["w"] * 33).dictionary_encode())
OTHERS = {
    "the same form": message_of(BATCH),
    "no rows": message_of(BATCH.slice(0, 0)),
    "several batches": message_of(BATCH.slice(0, 10), BATCH.slice(10)),
    "another schema": message_of(frame(1)),
    "columns in another order": message_of(BATCH.select(["step", "gradient", "id"])),
    "a dictionary": message_of(CODED),
    "compression": stream([BATCH], compression="zstd"),
    "metadata of the batch": stream([BATCH], metadata=[{"penstock.end": "1"}]),
    "a bad row": message_of(frame(1, step=8).set_column(0, "id", pa.array([VOCABULARY] * 20))),
    "two steps": message_of(BATCH, frame(2, step=9)),
    "no end marker": message_of(BATCH)[:-8],
    "bytes after the end": message_of(BATCH) + bytes(8),
    "two streams": message_of(BATCH) * 2,
    "a file": b"ARROW1" + FIRST,
    "nothing": b"",
}


@pytest.mark.parametrize("form", OTHERS)
def test_a_message_is_decoded_as_it_is_alone(form):
    assert outcome(after(FIRST), OTHERS[form]) == outcome(after(), OTHERS[form])
    assert outcome(after(message_of(CODED), FIRST), OTHERS[form]) == outcome(after(), OTHERS[form])


@more_as_evidence
def test_a_damaged_message_is_decoded_as_it_is_alone():
    whole, rng = message_of(BATCH), np.random.default_rng(0)
    decoder = after(FIRST)
    for offset in rng.choice(len(whole), 400 if IS_EVIDENCE else 150, replace=False):
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << rng.integers(8)
        assert outcome(decoder, bytes(damaged)) == outcome(after(), bytes(damaged)), offset
        assert outcome(decoder, whole[:offset]) == outcome(after(), whole[:offset]), offset


def test_rows_are_read_where_the_message_has_them(monkeypatch):
    decoder, message = after(FIRST), message_of(BATCH)
    monkeypatch.setattr("penstock.io.partitions.message_frames.open_bytes", lambda *_: pytest.fail("by pyarrow"))
    actual = decoder.read(Message(2, message), "m").frame()
    (rows,) = actual.rows["user"]
    assert rows.ids.tolist() == BATCH["id"].to_pylist()
    assert rows.grads.tolist() == BATCH["gradient"].to_pylist()
    position = np.frombuffer(message, np.uint8).ctypes.data
    for array in (rows.ids, rows.grads):
        assert position < array.ctypes.data < position + len(message)
