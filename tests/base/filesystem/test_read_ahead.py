"""Files of checkpoints at URIs are read in large requests, and headers of their records without the arrays between."""

import numpy as np
import pyarrow.fs
import pytest
from object_store import ObjectStore

from penstock.base.filesystem import read_ahead
from penstock.base.filesystem.file_stores import RemoteStore
from penstock.checkpoint.records import MAGIC, Record, read_records


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(read_ahead, "BLOCK_BYTES", 1 << 17)
    monkeypatch.setattr(read_ahead, "_END_BYTES", 1 << 14)
    records = [Record("rows", {}, {"rows": np.full((1 << 12, 64), number, np.float32)}) for number in range(3)]
    return ObjectStore({"run/a": MAGIC + b"".join(bytes(piece) for record in records for piece in record.pieces())})


def opened(store, **options):
    return RemoteStore("store://run", pyarrow.fs.PyFileSystem(store), "run").open("a", **options)


def test_a_file_is_read_once_in_large_requests(store):
    contents = store.objects["run/a"]
    with opened(store) as file:
        assert b"".join(iter(lambda: file.read(1000), b"")) == contents
    assert sum(num_bytes for _, num_bytes in store.requests) == len(contents)
    assert sorted(num_bytes for _, num_bytes in store.requests)[1] >= 1 << 17


def test_headers_are_read_without_the_arrays(store):
    with opened(store, ahead=False) as file:
        assert [record.arrays["rows"].shape for record in read_records(file, "a", only_shapes=True)] == [
            (1 << 12, 64)
        ] * 3
    assert sum(num_bytes for _, num_bytes in store.requests) < len(store.objects["run/a"]) // 8
