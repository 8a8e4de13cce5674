"""Memory that two processes share, by itself: its bounds, its key, and the ring that a producer writes."""

import os

import numpy as np
import pytest
from services import frame

from penstock.io.flight import shm_ring, shm_writer
from penstock.io.flight.shm_ring import Room
from penstock.io.flight.shm_writer import Memory

pytestmark = pytest.mark.skipif(not shm_writer._SEALS, reason="only Linux shares memory without a name")

MB = 1 << 20


@pytest.fixture(autouse=True)
def worth_sharing(monkeypatch):
    """Batches that tests are quick with."""
    monkeypatch.setattr(shm_ring, "WORTH_SHARING_BYTES", 1 << 16)


def test_the_memory_cannot_be_made_longer_or_shorter():
    memory = Memory(MB)
    offer = memory.offer()
    with open(f"/proc/{offer['pid']}/fd/{offer['fd']}", "r+b", buffering=0) as file:
        for size in (0, 2 * MB):
            with pytest.raises(PermissionError):
                os.truncate(file.fileno(), size)
    memory.close()


def test_memory_of_another_machine_is_not_believed(tmp_path):
    memory = Memory(MB)
    offer = memory.offer()
    assert Room.found(offer) is not None
    (tmp_path / "secret").write_bytes(bytes.fromhex(offer["key"]) + bytes(MB))
    with open(tmp_path / "secret", "rb") as other:
        wrong = [
            {"key": "00" * 32},  # another machine's process of that number
            {"key": "secret"},
            {"fd": other.fileno()},  # some other file
            {"fd": 10_000},
            {"fd": "../../../etc/passwd"},
            {"pid": 1 << 30},
            {"bytes": 0},
            {"bytes": 1 << 62},
        ]
        assert [Room.found({**offer, **words}) for words in wrong] == [None] * len(wrong)
    assert Room.found({}) is None
    memory.close()
    assert Room.found(offer) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_ring_never_writes_over_what_is_not_copied_yet(seed):
    """Batches of all sizes, copied after a while, in order: each is found as it was written."""
    rng = np.random.default_rng(seed)
    memory = Memory(MB)
    room = Room.found(memory.offer())
    held, taken = [], 0
    for n in range(200):
        batch = frame(n, int(rng.integers(3000, 12_000))).slice(int(rng.integers(0, 9)))
        parcel = room.parcel(batch)
        while not room.has(parcel.size) or (held and rng.random() < 0.3):
            where, wanted = held.pop(0)
            given = memory.batch(where, wanted.schema, "here", lend=bool(rng.random() < 0.5))
            assert given.data.equals(wanted)
            given.data.validate(full=True)
            room.taken(taken := taken + 1)
        held.append((room.put(parcel), batch))
    assert taken > 100
    memory.close()
