"""Files of object stores: few large requests, the next one in flight while one is read, and the results of any file."""

import io
import tracemalloc
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from batches import batch
from ipc import log, stream
from limits import until
from object_store import ObjectStore
from streams import CONTAINERS, EVERY, FRAMES, frames_of, until_error

import penstock as ps
from penstock.base.filesystem import read_ahead
from penstock.io.sources import parquet, parquet_pages
from penstock.io.sources.opening import open_source

DIM = 64
CONFIG = ps.EmbeddingConfig.from_tables([ps.TableConfig(1000, DIM, name="user", optimizer=ps.SGD(0.5))])


def frames_at(num_bytes, rows=15):
    """Frames of 4 kB each, as many as these bytes."""
    ids = np.arange(rows)
    return [
        batch(ids, np.full((rows, DIM), step % 7, np.float32), step=step)
        for step in range(num_bytes // (rows * 4 * DIM))
    ]


def contents_of(container, frames):
    if container == "log":
        return log(frames)
    if container in ("stream", "file"):
        return stream(frames, make=pa.ipc.new_stream if container == "stream" else pa.ipc.new_file)
    sink = io.BytesIO()
    options = {"use_dictionary": False, "compression": "none", "data_page_size": 1 << 14}  # much less than a block
    rows = 500 if container == "parquet of short groups" else None
    pa.parquet.write_table(pa.Table.from_batches(frames).combine_chunks(), sink, row_group_size=rows, **options)
    return sink.getvalue()


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(read_ahead, "BLOCK_BYTES", 1 << 17)
    monkeypatch.setattr(read_ahead, "_END_BYTES", 1 << 14)
    monkeypatch.setattr(parquet, "_READ_BYTES", 1 << 14)
    monkeypatch.setattr(parquet_pages, "_MAX_ROWS_AT_ONCE", 1024)  # as many bytes as two blocks, as in real files


KINDS = pytest.mark.parametrize("container", ["log", "stream", "file", "parquet", "parquet of short groups"])


def test_a_log_of_64_mb_in_batches_of_4_kb_takes_at_most_12_requests(monkeypatch):
    frames = frames_at(1 << 20) * 64
    store = ObjectStore({"a/log.arrow": contents_of("file", frames)})
    store.use(monkeypatch)
    with closing(open_source("store://a/log.arrow").parts()) as parts:
        num_rows = sum(each.num_rows for each in next(parts).batches(["id", "gradient", "step"]))
    assert num_rows == sum(frame.num_rows for frame in frames)
    assert len(store.requests) <= 12
    assert sorted(num_bytes for _, num_bytes in store.requests)[1] >= 8_000_000  # the end of the file is shorter


@KINDS
def test_a_remote_file_gives_the_tables_of_a_local_one_with_few_requests(container, small_blocks, monkeypatch):
    frames = frames_at(1 << 20)
    contents = contents_of(container, frames)
    expected = ps.Engine(CONFIG)
    expected.run(pa.RecordBatchReader.from_batches(frames[0].schema, frames))
    store = ObjectStore({"a": contents})
    store.use(monkeypatch)
    engine = ps.Engine(CONFIG)
    assert engine.run("store://a").frames == len(frames)
    assert engine.state_hash() == expected.state_hash()
    assert len(store.requests) <= len(contents) / (1 << 17) + 2
    assert sum(num_bytes for _, num_bytes in store.requests) <= len(contents)


@KINDS
def test_the_next_block_is_requested_before_it_is_needed(container, small_blocks, monkeypatch):
    contents = contents_of(container, frames_at(1 << 20))
    store = ObjectStore({"a": contents})
    store.use(monkeypatch)
    num_read = 0
    with closing(open_source("store://a").parts()) as parts:
        part = next(parts)
        for each in part.batches(["id", "gradient", "step"]):
            num_read += each.num_rows * (DIM + 4) * 4
            wanted = min(num_read + (1 << 17), len(contents) - (1 << 17))
            until(lambda wanted=wanted: max(map(sum, store.requests[2:]), default=0) >= wanted)


@KINDS
def test_two_blocks_are_in_memory(container, small_blocks, monkeypatch):
    store = ObjectStore({"a": contents_of(container, frames_at(1 << 21))})
    store.use(monkeypatch)
    tracemalloc.start()
    try:
        with closing(open_source("store://a").parts()) as parts:
            part = next(parts)
            tracemalloc.reset_peak()
            for _ in part.batches(["id", "gradient", "step"]):
                pass
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    num_sequences = 3 if container == "parquet" else 1
    assert peak_bytes < (2 * num_sequences + 2) * (1 << 18)  # a block is shorter than 2^18 bytes


@EVERY
def test_every_container_is_read_and_a_failing_request_is_one_line(container, monkeypatch):
    store = ObjectStore({"a": CONTAINERS[container]})
    store.use(monkeypatch)
    assert frames_of("store://a") == FRAMES

    def fail(number):
        raise OSError("AWS Error SLOW_DOWN")

    store.before_request = fail
    frames, text = until_error("store://a")
    assert frames == []
    assert "AWS Error SLOW_DOWN" in text


@KINDS
def test_an_object_that_is_truncated_or_changed_meanwhile_is_an_error(container, small_blocks, monkeypatch):
    contents = contents_of(container, frames_at(1 << 20))
    for changed in (contents[: len(contents) // 2], contents[: 1 << 19] + bytes(1 << 18) + contents[3 << 18 :]):
        if changed[-1:] and len(changed) == len(contents) and container.startswith("parquet"):
            continue  # the values of plain pages have no checksum
        store = ObjectStore({"a": contents})
        store.use(monkeypatch)
        store.before_request = lambda number, store=store, changed=changed: (
            number < 3 or store.objects.update(a=changed)
        )
        with pytest.raises(ps.InputError):
            ps.Engine(CONFIG).run("store://a")


def test_the_next_file_of_a_directory_is_requested_while_one_is_read(monkeypatch):
    frames = frames_at(1 << 15)
    store = ObjectStore({f"day/{number}": stream([frame]) for number, frame in enumerate(frames)})
    store.use(monkeypatch)
    with closing(open_source("store://day").parts()) as parts:
        for number, part in enumerate(parts, 1):
            until(lambda number=number: len(store.requests) == min(number + 1, len(frames)))
            assert sum(each.num_rows for each in part.batches(["id", "gradient", "step"])) == 15


def test_columns_that_are_not_used_are_not_requested(small_blocks, monkeypatch):
    rows = pa.Table.from_batches(frames_at(1 << 18)).combine_chunks()
    wide = pa.FixedSizeListArray.from_arrays(pa.array(np.random.default_rng(0).random(len(rows) * 512)), 512)
    sink = io.BytesIO()
    pa.parquet.write_table(rows.add_column(1, "wide", wide), sink, compression="none", use_dictionary=False)
    store = ObjectStore({"a": sink.getvalue()})
    store.use(monkeypatch)
    ps.Engine(CONFIG).run("store://a")
    assert sum(num_bytes for _, num_bytes in store.requests) < 1 << 20 < len(sink.getvalue()) // 4
