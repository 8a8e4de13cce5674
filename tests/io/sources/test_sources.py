"""Every kind of source gives its frames; one that is cut, continued, damaged or something else is an InputError."""

import gc
import io
import os
import sys
import threading
import tracemalloc
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.ipc
import pytest
from ipc import stream
from streams import CONTAINERS, EVERY, FRAMES, SIZES, OneWay, batch_of, frames_of, parquet, until_error

import penstock.io.sources.opening as sources
from penstock.base.errors import InputError, TruncatedInputError
from penstock.io.decoding.reader import FrameReader, ReadOptions

# ---- every kind of source


@EVERY
def test_a_file_by_its_path_or_its_uri(tmp_path, container):
    path = tmp_path / "log with spaces.bin"
    path.write_bytes(CONTAINERS[container])
    uri = path.as_uri()
    for source in (path, str(path), uri, [path], (str(path),)):
        assert frames_of(source) == FRAMES
    assert frames_of([path, uri]) == FRAMES * 2


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_arrow_refers_to_a_mapped_file_with_unused_columns_unless_they_are_compressed(tmp_path, compression):
    path, floats = tmp_path / "log.arrow", pa.array(np.zeros(1 << 16, np.float32))
    gradients = pa.FixedSizeListArray.from_arrays(floats, 16)
    batch = pa.record_batch({"id": np.arange(1 << 12), "gradient": gradients, "note": np.arange(1 << 12)})
    with pa.ipc.new_file(path, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(batch)
    with closing(sources.open_source(path).parts()) as parts:
        before = pa.total_allocated_bytes()
        (read,) = next(parts).batches(["id", "gradient"])
        num_copied = pa.total_allocated_bytes() - before
        assert read.data.select(["id", "gradient"]) == batch.select(["id", "gradient"])
        assert ("note" in read.data.schema.names) == (compression is None)
        assert num_copied < 4096 if compression is None else num_copied >= floats.nbytes


@EVERY
def test_a_file_of_another_file_system(monkeypatch, container):
    fs = pa.fs._MockFileSystem()
    fs.create_dir("logs")
    with fs.open_output_stream("logs/a") as file:
        file.write(CONTAINERS[container])
    monkeypatch.setattr(sources, "filesystem_of", lambda text: (fs, text.removeprefix("mock://")))
    assert frames_of("mock://logs/a") == FRAMES
    assert frames_of("mock://logs") == FRAMES
    assert "mock://logs/b: no such file" in until_error("mock://logs/b")[1]


@EVERY
def test_a_binary_file_object_and_a_stream_that_cannot_seek(container):
    content = CONTAINERS[container]
    for source in (io.BytesIO(content), OneWay(content), io.BufferedReader(OneWay(content)), pa.BufferReader(content)):
        assert frames_of(source) == FRAMES
        assert not source.closed  # the caller opened it


@EVERY
def test_standard_input_and_a_fifo(tmp_path, monkeypatch, container):
    content = CONTAINERS[container]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(OneWay(content))))
    assert frames_of("-") == FRAMES
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    producer = threading.Thread(target=fifo.write_bytes, args=(content,))
    producer.start()
    assert frames_of(fifo) == FRAMES
    producer.join()


def test_a_file_object_that_stands_further_on_is_read_from_there():
    for container, content in CONTAINERS.items():
        stream = io.BytesIO(b"junk" + content)
        stream.seek(4)
        assert frames_of(stream) == FRAMES, container


@EVERY
def test_files_are_closed_whether_read_to_the_end_left_early_or_bad(tmp_path, container):
    # A file that is left open would warn, and warnings are errors; descriptors are counted as well.
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(CONTAINERS[container])
    bad.write_bytes(CONTAINERS[container][:-9])
    gc.collect()
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    reader = iter(FrameReader([good, good], ReadOptions(SIZES)))
    next(reader)
    reader.close()
    frames_of(good)
    caught = []
    for source in (bad, good):
        try:
            frames_of(source, columns={"table": "nope"} if source is good else {})
        except InputError as error:
            caught.append(error)  # and with it the traceback
    assert len(caught) == 2
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


def test_frames_outlive_the_files_they_look_into(tmp_path):
    (tmp_path / "log").write_bytes(CONTAINERS["stream"])
    frames = list(FrameReader(tmp_path / "log", ReadOptions(SIZES)))
    (tmp_path / "log").unlink()
    assert [b.grads.tolist() for f in frames for b in f.rows["user"]] == [[[0], [0]], [[1]], [[1]], [[2]], [[3]], [[4]]]


def test_a_mapped_file_is_looked_into_and_never_read_whole(tmp_path):
    rows = 1 << 20
    gradient = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(rows * 4, np.float32)), 4)
    table = pa.table({"id": np.zeros(rows, np.int64), "gradient": gradient, "step": np.zeros(rows, np.int64)})
    for name, make in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
        with make(tmp_path / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=1 << 14)
        arrow, python = pa.total_allocated_bytes(), 0
        tracemalloc.start()
        for frame in FrameReader(tmp_path / name, ReadOptions({"user": (1, 4)}, contribution_rows=1 << 14)):
            assert frame.num_rows == 1 << 14
            python = max(python, tracemalloc.get_traced_memory()[0])
            assert pa.total_allocated_bytes() - arrow < 1 << 20
        tracemalloc.stop()
        assert python < 2 << 20


def test_a_large_row_group_behind_a_file_object_is_not_read_at_once():
    class Counting(io.BytesIO):
        most = 0

        def read(self, size=-1):
            got = super().read(size)
            self.most = max(self.most, len(got))
            return got

    rows = 1 << 18
    gradient = pa.FixedSizeListArray.from_arrays(pa.array(np.random.default_rng(0).random(rows * 4, np.float32)), 4)
    table = pa.table({"id": np.zeros(rows, np.int64), "gradient": gradient, "step": np.zeros(rows, np.int64)})
    stream = Counting(parquet(table, compression="none", use_dictionary=False))
    reader = FrameReader(stream, ReadOptions({"user": (1, 4)}, contribution_rows=1 << 14))
    assert sum(frame.num_rows for frame in reader) == rows
    assert stream.most <= 2 << 20


# ---- directories


def test_a_directorys_files_by_name_without_hidden_ones_and_marks(tmp_path):
    for name, batch in {"b": batch_of(2), "a/2": batch_of(1), "a/1": batch_of(0), "c.parquet": batch_of(3)}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        content = parquet(pa.table(batch)) if name.endswith("parquet") else stream([batch])
        (tmp_path / name).write_bytes(content)
    for name in (".hidden", "_SUCCESS", "_metadata"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_bytes(b"x")
    for source in (tmp_path, f"{tmp_path}/", tmp_path.as_uri()):
        assert frames_of(source) == [[0], [1], [2], [3]]


def test_a_bad_file_of_a_directory_is_named(tmp_path):
    (tmp_path / "1").write_bytes(CONTAINERS["stream"])
    (tmp_path / "2").write_bytes(CONTAINERS["stream"][:-8])
    frames, text = until_error(tmp_path, TruncatedInputError)
    assert frames == [*FRAMES[:-1], [4], *FRAMES[:-1]]
    assert text.startswith(f"{tmp_path}/2: ")


def test_a_directory_without_files_and_a_path_that_is_not_there(tmp_path):
    assert "the directory holds no files" in until_error(tmp_path)[1]
    assert "no such file or directory" in until_error(tmp_path / "x")[1]
    assert "no such file or directory" in until_error([tmp_path / "x", tmp_path])[1]


@pytest.mark.parametrize(
    "name", ["", "a\0b", "nothing://here", "file://host/x", "file://[x", "s3:///", "\udcff"], ids=repr
)
def test_unknown_schemes_and_missing_paths_are_input_errors(name):
    until_error(name)


def test_a_uri_whose_library_is_missing_is_an_input_error(monkeypatch):
    def url_to_fs(uri):
        raise ImportError("Install huggingface_hub to access HfFileSystem")

    monkeypatch.setitem(sys.modules, "fsspec", SimpleNamespace(url_to_fs=url_to_fs))
    assert "hf://owner/log: cannot open: Install huggingface_hub" in until_error("hf://owner/log")[1]


def test_a_name_that_is_not_utf_8_is_a_limit_of_arrow(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / os.fsdecode(b"log\xff")
    path.write_bytes(CONTAINERS["stream"])
    limit = "name is not UTF-8, and Arrow knows no other names; rename it"
    for source in (path, str(path), str(folder / "lo*")):
        assert f"log\udcff: cannot open: its {limit}" in until_error(source)[1]
    assert f"{folder}: the name of a file in it is not UTF-8" in until_error(folder)[1]


def test_a_file_that_may_not_be_read(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(CONTAINERS["stream"])
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    assert "cannot open: " in until_error(path)[1]


# ---- how far


@EVERY
def test_the_share_read_grows_to_one(tmp_path, container):
    path = tmp_path / "log"
    path.write_bytes(CONTAINERS[container])
    reader = FrameReader([path, path], ReadOptions(SIZES))
    shares = [reader.fraction(), *(reader.fraction() for _ in reader), reader.fraction()]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == 1
    assert len(set(shares)) > 2


@pytest.mark.parametrize("kind", ["stream", "iterator"])
def test_the_share_of_a_stream_is_unknown(kind):
    data = CONTAINERS["stream"]
    reader = FrameReader(OneWay(data) if kind == "stream" else iter(pa.ipc.open_stream(data)), ReadOptions(SIZES))
    assert [reader.fraction(), *(reader.fraction() for _ in reader)] == [None] * (1 + len(FRAMES))
