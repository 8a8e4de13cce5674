"""Every kind of source gives its frames; one that is cut, continued, damaged or something else is an InputError."""

import gc
import gzip
import io
import itertools
import os
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from contextlib import suppress

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.fs
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

import penstock.io.sources as sources
from penstock.errors import InputError, TruncatedInputError
from penstock.io.reader import FrameReader, ReadOptions
from penstock.io.sources import looks_like_arrow, open_source

GRADIENT = pa.list_(pa.float32(), 1)


def batch_of(*steps, table=None):
    """One row per step, its id the step."""
    columns = {"id": pa.array(steps), "gradient": pa.array([[s] for s in steps], GRADIENT), "step": pa.array(steps)}
    if table is not None:
        columns["table"] = table
    return pa.RecordBatch.from_pydict(columns)


BATCHES = [batch_of(0, 0, 1), batch_of(1, 2), batch_of(3, 4)]
TABLE = pa.Table.from_batches(BATCHES)
FRAMES = [[0, 0], [1, 1], [2], [3], [4]]
SIZES = {"user": (1000, 1)}


def frames_of(source, **options):
    return told(list(FrameReader(source, ReadOptions(**({"sizes": SIZES} | options)))))


def told(frames):
    return [[int(i) for blocks in f.rows.values() for b in blocks for i in b.ids] for f in frames]


def until_error(source, kind=InputError, **options):
    """The frames before the error, and its text."""
    frames = []

    def collect():
        for frame in FrameReader(source, ReadOptions(**({"sizes": SIZES} | options))):
            frames.append(frame)

    with pytest.raises(kind) as caught:
        collect()
    assert "\n" not in str(caught.value)
    return told(frames), str(caught.value)


def written(batches=BATCHES, make=pa.ipc.new_stream, **options):
    sink = io.BytesIO()
    with make(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def parquet(table=TABLE, **options):
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


CONTAINERS = {
    "stream": written(),
    "file": written(make=pa.ipc.new_file),
    "parquet": parquet(),
    "legacy stream": written(use_legacy_format=True),
    "lz4 stream": written(compression="lz4"),
    "zstd file": written(make=pa.ipc.new_file, compression="zstd"),
}
EVERY = pytest.mark.parametrize("container", CONTAINERS)


class OneWay(io.RawIOBase):
    """A pipe: no seeking, and no more than a few bytes at a time."""

    def __init__(self, content, at_once=7):
        self._content, self._at_once = io.BytesIO(content), at_once

    def readable(self):
        return True

    def readinto(self, buffer):
        return self._content.readinto(memoryview(buffer)[: self._at_once])


# ---- every kind of source


@EVERY
def test_a_file_by_its_path_or_its_uri(tmp_path, container):
    path = tmp_path / "log with spaces.bin"
    path.write_bytes(CONTAINERS[container])
    uri = path.as_uri()
    for source in (path, str(path), uri, [path], (str(path),)):
        assert frames_of(source) == FRAMES
    assert frames_of([path, uri]) == FRAMES * 2


@EVERY
def test_a_file_of_another_file_system(monkeypatch, container):
    fs = pa.fs._MockFileSystem()
    fs.create_dir("logs")
    with fs.open_output_stream("logs/a") as file:
        file.write(CONTAINERS[container])
    monkeypatch.setattr(sources, "_filesystem", lambda text: (fs, text.removeprefix("mock://")))
    assert frames_of("mock://logs/a") == FRAMES
    assert frames_of("mock://logs") == FRAMES
    assert "mock://logs/b: no such file" in until_error("mock://logs/b")[1]


@EVERY
def test_a_binary_file_object_and_a_stream_that_cannot_seek(container):
    content = CONTAINERS[container]
    for stream in (io.BytesIO(content), OneWay(content), io.BufferedReader(OneWay(content)), pa.BufferReader(content)):
        assert frames_of(stream) == FRAMES
        assert not stream.closed  # it belongs to whoever opened it


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


# ---- objects


class Producer:
    """Anything with the Arrow C stream interface."""

    def __init__(self, reader):
        self._reader = reader

    def __arrow_c_stream__(self, requested_schema=None):
        return self._reader.__arrow_c_stream__(requested_schema)


def test_objects_in_memory():
    for source in (
        TABLE,
        TABLE.to_reader(),
        Producer(TABLE),
        Producer(TABLE.to_reader()),
        pa.ipc.open_stream(CONTAINERS["stream"]),
        BATCHES,
        tuple(BATCHES),
        iter(BATCHES),
        (batch for batch in BATCHES),
    ):
        assert frames_of(source) == FRAMES, source
    assert frames_of(BATCHES[0]) == [[0, 0], [1]]


def test_several_objects_are_several_sources():
    assert frames_of([TABLE, io.BytesIO(CONTAINERS["file"]), Producer(TABLE)]) == FRAMES * 3


def test_no_batches_at_all_are_no_frames():
    assert frames_of([]) == []
    assert frames_of(iter([])) == []
    assert frames_of(TABLE.slice(0, 0)) == []
    assert frames_of(io.BytesIO(written([BATCHES[0].slice(0, 0)]))) == []
    schema_only = io.BytesIO()
    pa.ipc.new_stream(schema_only, TABLE.schema).close()
    assert frames_of(io.BytesIO(schema_only.getvalue())) == []


@pytest.mark.parametrize("thing", [None, 7, b"bytes", {"id": []}, object()], ids=lambda t: type(t).__name__)
def test_what_is_no_source_is_refused(thing):
    with pytest.raises(InputError, match=f"expected a path, '-', a URI, .* got {type(thing).__name__}"):
        open_source(thing)


def test_an_iterator_of_something_else_is_refused_with_its_place():
    frames, text = until_error(iter([BATCHES[0], "text"]))
    assert frames == [[0, 0]]
    assert text == "<batches>: batch 1: expected a pyarrow.RecordBatch, got str"


def test_an_iterator_whose_schema_changes_says_how():
    required = pa.schema([f.with_nullable(f.name != "id") for f in BATCHES[0].schema])
    frames, text = until_error(iter([BATCHES[0], BATCHES[1].cast(required)]))
    assert frames == [[0, 0]]
    assert "batch 1: the schema changed: expected id: int64, gradient" in text
    assert "got id: int64 not null, gradient" in text


def test_a_producer_that_fails_is_an_input_error_without_its_traceback():
    def failing():
        yield BATCHES[0]
        raise ValueError("the query was cancelled")

    frames, text = until_error(Producer(pa.RecordBatchReader.from_batches(BATCHES[0].schema, failing())))
    assert frames == [[0, 0]]
    assert "batch 1: the stream failed" in text
    assert "the query was cancelled" in text
    assert "Traceback" not in text
    assert "describes non-struct type" in until_error(pa.chunked_array([[1, 2]]))[1]


def test_the_errors_of_a_users_own_generator_pass_unchanged():
    def failing():
        yield BATCHES[0]
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        frames_of(failing())


def test_an_interrupt_passes_through_arrow():
    class Interrupted(OneWay):
        def readinto(self, buffer):
            if self._content.tell() > 500:
                raise KeyboardInterrupt
            return super().readinto(buffer)

    with pytest.raises(KeyboardInterrupt):
        frames_of(Interrupted(CONTAINERS["stream"]))


@pytest.mark.parametrize("failure", [OSError(5, "Input/output error"), EOFError("ended"), ConnectionResetError("gone")])
def test_a_stream_that_cannot_be_read_on(failure):
    class Failing(OneWay):
        def readinto(self, buffer):
            if self._content.tell() > len(CONTAINERS["stream"]) - 200:
                raise failure
            return super().readinto(buffer)

    frames, text = until_error(Failing(CONTAINERS["stream"]))
    assert frames == FRAMES[:2]
    assert str(failure.args[-1]) in text


def test_a_text_file_object_is_refused():
    assert "expected a binary file, got one whose read() gives str" in until_error(io.StringIO("id,gradient"))[1]


def test_a_stream_that_gives_more_than_it_was_asked_for_is_refused():
    class Generous(io.BytesIO):
        def read(self, size=-1):
            return super().read(size + 1)

        def seekable(self):
            return False

    assert "read(8) gives 9 bytes" in until_error(Generous(CONTAINERS["stream"]))[1]


@pytest.mark.parametrize("container", ["file", "parquet"])
def test_no_room_for_what_must_be_kept_on_disk_is_no_fault_of_the_input(tmp_path, monkeypatch, container):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    os.mkfifo(tmp_path / "fifo")
    producer = threading.Thread(target=(tmp_path / "fifo").write_bytes, args=(CONTAINERS[container],))
    producer.start()
    for source in (OneWay(CONTAINERS[container]), tmp_path / "fifo"):
        with pytest.raises(OSError, match="missing"):
            frames_of(source)
    producer.join()


# ---- directories


def test_a_directorys_files_by_name_without_hidden_ones_and_marks(tmp_path):
    for name, batch in {"b": batch_of(2), "a/2": batch_of(1), "a/1": batch_of(0), "c.parquet": batch_of(3)}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        content = parquet(pa.table(batch)) if name.endswith("parquet") else written([batch])
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


@pytest.mark.parametrize("name", ["", "a\0b", "nothing://here", "file://host/x", "s3:///", "\udcff"], ids=repr)
def test_names_that_name_nothing(name):
    until_error(name)


def test_a_file_that_may_not_be_read(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(CONTAINERS["stream"])
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    assert "cannot open: " in until_error(path)[1]


# ---- what is something else

OTHERS = {
    "nothing": (b"", "(0 bytes)"),
    "one byte": (b"A", "1 bytes: neither Arrow IPC nor Parquet"),
    "text": (b"id,gradient\n1,2\n", "neither an Arrow IPC stream, an Arrow IPC file nor Parquet"),
    "zeros": (bytes(100), "neither an Arrow IPC stream"),
    "a configuration": (b"\x0a\x10\x0a\x03abc" * 20, "neither an Arrow IPC stream"),
    "gzip": (gzip.compress(CONTAINERS["stream"]), "compressed with gzip; decompress it first"),
    "feather v1": (b"FEA1" + bytes(50), "a Feather V1 file; write it as Arrow IPC (Feather V2)"),
    "magic of a file only": (b"ARROW1\0\0", "no footer"),
    "magic of Parquet only": (b"PAR1", "no footer"),
    "Parquet's twice": (b"PAR1PAR1", "no footer"),
    "Parquet without a footer's length": (b"PAR1" + bytes(8) + b"PAR1", "corrupt Parquet file"),
    "noise in a footer": (b"ARROW1\0\0" + b"\xab" * 100 + b"\x40\0\0\0ARROW1", "corrupt Arrow IPC file"),
    "a footer of negative length": (b"ARROW1\0\0" + bytes(50) + b"\xff\xff\xff\xffARROW1", "a footer of -1 bytes"),
    "noise in a schema": (b"\xff\xff\xff\xff\x40\0\0\0" + b"\xab" * 100, "not an Arrow IPC stream"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_is_neither_arrow_nor_parquet_is_told(tmp_path, what):
    content, message = OTHERS[what]
    path = tmp_path / "x"
    path.write_bytes(content)
    for source in (path, OneWay(content), io.BytesIO(content)):
        frames, text = until_error(source)
        assert frames == []
        assert message in text


def test_which_files_look_like_arrow(tmp_path):
    path = tmp_path / "x"
    for container, content in CONTAINERS.items():
        path.write_bytes(content)
        assert looks_like_arrow(path) == (container != "legacy stream")
    path.write_bytes(b"tpu_embedding")
    assert not looks_like_arrow(path)


# ---- cut and continued

NAMES = pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int8()), pa.array(["user"]))
SMALL = {
    "plain": written([batch_of(0, 1), batch_of(1, 2)]),
    "dictionary": written([batch_of(0, 1, table=NAMES), batch_of(1, 2, table=NAMES)]),
    "compressed": written([batch_of(0, 1), batch_of(1, 2)], compression="zstd"),
    "legacy": written([batch_of(0, 1), batch_of(1, 2)], use_legacy_format=True),
}
SMALL_FRAMES = [[0], [1, 1], [2]]


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "pipe"])
def test_a_stream_cut_at_any_byte_is_an_error_and_gives_whole_frames_only(tmp_path, kind, mapped):
    content, path = SMALL[kind], tmp_path / "log"
    assert frames_of(io.BytesIO(content)) == SMALL_FRAMES
    for cut in range(0, len(content), 1 if kind in ("plain", "dictionary") else 7):
        path.write_bytes(content[:cut])
        kind_of_error = TruncatedInputError if cut >= 8 else InputError
        frames, _ = until_error(path if mapped else io.BytesIO(content[:cut]), kind_of_error)
        assert frames == SMALL_FRAMES[: len(frames)]
        assert len(frames) <= 2  # the last is not whole before the end marker


@pytest.mark.parametrize("kind", ["plain", "dictionary"])
def test_allow_missing_end_accepts_the_end_at_a_batch_and_nowhere_else(tmp_path, kind):
    content = SMALL[kind]
    accepted = {}
    for cut in range(len(content) + 1):
        with suppress(InputError):
            accepted[cut] = frames_of(io.BytesIO(content[:cut]), allow_missing_end=True)
    # After the schema, after the dictionary if there is one, after each batch, and with the end marker.
    start = [[]] if kind == "plain" else [[], []]
    assert list(accepted.values()) == [*start, [[0], [1]], SMALL_FRAMES, SMALL_FRAMES]
    assert list(accepted)[-2:] == [len(content) - 8, len(content)]


@pytest.mark.parametrize("container", ["file", "parquet", "zstd file"])
def test_a_file_cut_at_any_byte_is_an_error(tmp_path, container):
    content, path = CONTAINERS[container], tmp_path / "log"
    for cut in [*range(0, len(content), 13), *range(len(content) - 30, len(content))]:
        path.write_bytes(content[:cut])
        frames, _ = until_error(path, TruncatedInputError if cut >= 12 else InputError)
        assert frames == []


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("more", ["\0", "again", "text"])
def test_bytes_after_the_end_are_an_error(tmp_path, kind, more):
    path = tmp_path / "log"
    content = SMALL[kind] + (SMALL[kind] if more == "again" else more.encode())
    path.write_bytes(content)
    for source in (path, OneWay(content)):
        for allow in (True, False):
            frames, text = until_error(source if source is path else OneWay(content), allow_missing_end=allow)
            assert frames == SMALL_FRAMES[:2]
            assert "bytes follow the end marker (after batch 1)" in text


@pytest.mark.parametrize("order", list(itertools.product(["big", "small", "empty"], repeat=2)), ids="-".join)
@pytest.mark.parametrize("kind", ["file", "parquet"])
def test_two_files_in_one_are_an_error_and_never_one_files_rows_by_the_others_footer(tmp_path, kind, order):
    tables = {"big": [batch_of(*range(300))] * 3, "small": [batch_of(1, 2)], "empty": [batch_of(1).slice(0, 0)]}
    path, content = tmp_path / "log", b""
    for size in order:
        if kind == "parquet":
            content += parquet(pa.Table.from_batches(tables[size]))
        elif size == "empty":
            content += written([tables[size][0]], pa.ipc.new_file)
        else:
            content += written(tables[size], pa.ipc.new_file)
    path.write_bytes(content)
    for source in (path, io.BytesIO(content)):
        frames, text = until_error(source)
        assert frames == []
        assert "two" in text


def test_a_file_without_any_batch_after_another_is_noticed(tmp_path):
    empty = io.BytesIO()
    pa.ipc.new_file(empty, TABLE.schema).close()
    (tmp_path / "empty").write_bytes(empty.getvalue())
    (tmp_path / "two").write_bytes(CONTAINERS["file"] + empty.getvalue())
    assert frames_of(tmp_path / "empty") == []
    assert "two files in one?" in until_error(tmp_path / "two")[1]


@pytest.mark.parametrize(
    "options", [{"write_page_index": True}, {"data_page_size": 100}, {"row_group_size": 1}], ids=str
)
def test_parquet_with_indexes_and_many_pages_is_not_mistaken_for_two(options):
    table = pa.Table.from_batches([batch_of(*range(500))])
    assert frames_of(io.BytesIO(parquet(table, **options))) == [[n] for n in range(500)]


# ---- dictionaries of streams


def named(*names):
    return batch_of(*range(len(names)), table=pa.array(names).dictionary_encode())


def test_dictionaries_that_grow_or_are_replaced_in_mid_stream(tmp_path):
    sizes = {"user": (10, 1), "item": (10, 1), "other": (10, 1)}
    batches = [named("user", "item"), named("user", "item", "other"), named("other", "user")]
    for deltas in (True, False):
        content = written(batches, emit_dictionary_deltas=deltas)
        (tmp_path / "log").write_bytes(content)
        for source in (tmp_path / "log", OneWay(content)):
            frames = list(FrameReader(source, ReadOptions(sizes, columns={"step": "id"})))
            names = [{table: [b.ids.tolist() for b in blocks] for table, blocks in f.rows.items()} for f in frames]
            assert names[:2] == [{"user": [[0]]}, {"item": [[1]]}]
            assert names[-2:] == [{"other": [[0]]}, {"user": [[1]]}]


def test_a_dictionary_that_no_batch_follows_is_no_cut(tmp_path):
    # As other writers do it: dictionaries first, then nothing but the end marker.
    content = SMALL["dictionary"]
    messages, at = [], 0
    reader = pa.BufferReader(content)
    while True:
        try:
            message = pa.ipc.read_message(reader)
        except EOFError:
            break
        messages.append((message.type, content[at : reader.tell()]))
        at = reader.tell()
    assert [kind for kind, _ in messages[:3]] == ["schema", "dictionary", "record batch"]
    no_batch = messages[0][1] + messages[1][1]
    for source_of in (OneWay, lambda c: (tmp_path / "x").write_bytes(c) and tmp_path / "x"):
        assert frames_of(source_of(no_batch + content[-8:])) == []
        until_error(source_of(no_batch), TruncatedInputError)
        assert "bytes follow" in until_error(source_of(no_batch + content[-8:] + b"x"))[1]


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


def test_the_share_of_a_stream_is_unknown():
    reader = FrameReader(OneWay(CONTAINERS["stream"]), ReadOptions(SIZES))
    assert [reader.fraction() for _ in reader] == [None] * len(FRAMES)


# ---- damage

FUZZ = """
import io, pathlib, random, sys, warnings
import pyarrow as pa
from penstock.errors import InputError
from penstock.io.reader import FrameReader, ReadOptions
path, seed, flips = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
warnings.simplefilter("error")
content, chance = pathlib.Path(path).read_bytes(), random.Random(seed)
bad = 0
for number in range(flips):
    bit = chance.randrange(8 * len(content))
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    print(bit, file=sys.stderr, flush=True)  # the last line tells which flip it was
    pathlib.Path(path + ".x").write_bytes(damaged)
    for source in (path + ".x", io.BytesIO(damaged)):
        options = ReadOptions({"user": (50, 4)}, num_tags=1, contribution_rows=None if number % 2 else 5,
                              on_bad_row="drop" if number % 3 else "error")
        try:
            for frame in FrameReader(source, options):
                for blocks in frame.rows.values():
                    for block in blocks:
                        assert block.grads.shape == (len(block.ids), 4)
                        assert len(block.ids) and 0 <= block.ids.min() <= block.ids.max() < 50
                        block.grads.sum()
        except InputError as error:
            assert "\\n" not in str(error), error
            bad += 1
print(bad)
"""


def rich(rows=9):
    """Every role, lists of several kinds, nulls where they may be."""
    return pa.RecordBatch.from_pydict(
        {
            "id": pa.array(range(rows)),
            "gradient": pa.array([[1.0, 2.0, 3.0, 4.0]] * rows, pa.list_(pa.float32())),
            "table": pa.array(["user"] * rows).dictionary_encode(),
            "step": pa.array([n // 4 for n in range(rows)]),
            "contributor": pa.array(["a worker's name that does not fit inline", None, "b"] * 3, pa.string_view()),
            "learning_rates": pa.array([[0.5]] * rows, pa.list_(pa.float32(), 1)),
        }
    )


DAMAGED = {
    "stream": written([rich(), rich()]),
    "compressed stream": written([rich(), rich()], compression="lz4"),
    "file": written([rich(), rich()], pa.ipc.new_file),
    "parquet": parquet(pa.table(rich())),
}


@pytest.mark.parametrize("container", DAMAGED)
def test_any_bit_flipped_is_an_input_error_or_a_result_and_never_a_crash(tmp_path, container):
    path = tmp_path / "log"
    path.write_bytes(DAMAGED[container])
    command = [sys.executable, "-c", FUZZ, str(path), "1", "250"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 50


def test_a_column_name_that_is_not_utf8_is_bad_input():
    sink = io.BytesIO()
    batch = pa.record_batch(
        {"id": pa.array([1]), "table": ["t"], "gradient": pa.array([[1.0]], pa.list_(pa.float32(), 1))}
    )
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    damaged = io.BytesIO(sink.getvalue().replace(b"table", b"t\xff\xfe\xfde"))
    with pytest.raises(InputError, match="name is not UTF-8"):
        list(FrameReader(damaged, ReadOptions({"t": (5, 1), "u": (5, 1)})))
