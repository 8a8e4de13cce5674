"""Objects in memory as sources, and what is refused because it is something else."""

import gzip
import io
import os
import sys
import tempfile
import threading
from types import ModuleType

import pyarrow as pa
import pyarrow.dataset
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from ipc import stream
from streams import BATCHES, CONTAINERS, FRAMES, TABLE, OneWay, frames_of, until_error

from penstock.base.errors import InputError
from penstock.io.sources.opening import open_source

# ---- objects


class Producer:
    """Anything with the Arrow C stream interface."""

    def __init__(self, reader):
        self._reader = reader

    def __arrow_c_stream__(self, requested_schema=None):
        return self._reader.__arrow_c_stream__(requested_schema)


def test_arrow_objects_in_memory_are_sources():
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


@pytest.fixture
def dataset(tmp_path):
    """The table as a dataset of two files, with a column that is no gradient's."""
    wide = TABLE.append_column("note", pa.array(["x"] * TABLE.num_rows))
    for name, part in (("a", wide.slice(0, 3)), ("b", wide.slice(3))):
        pq.write_table(part, tmp_path / f"{name}.parquet")
    return pyarrow.dataset.dataset(tmp_path)


def test_datasets_and_scanners_are_sources(dataset):
    for _ in range(2):  # a dataset may be read again
        assert frames_of(dataset) == FRAMES
    assert frames_of(dataset.scanner()) == FRAMES
    subset = dataset.scanner(columns=["id", "gradient", "step"], filter=pyarrow.dataset.field("step") >= 2)
    assert frames_of(subset) == FRAMES[2:]
    assert frames_of([dataset, TABLE]) == FRAMES * 2


def test_batches_of_a_dataset_are_no_frames(dataset):
    plain = dataset.scanner(columns=["id", "gradient"])
    frames, text = until_error(plain)
    assert frames == []
    assert "<pyarrow Scanner>" in text
    assert "contribution" in text
    assert frames_of(plain, contribution_rows=4) == [[0, 0, 1, 1], [2, 3, 4]]


def test_a_damaged_file_of_a_dataset_is_an_input_error(dataset, tmp_path):
    (tmp_path / "b.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    frames, text = until_error(dataset)
    assert frames in ([], [[0, 0]])  # files are opened ahead
    assert text.startswith("<pyarrow FileSystemDataset>: ")
    assert "b.parquet" in text


class Lazy:
    """A query that is not evaluated yet, as polars.LazyFrame is one: no Arrow before ``collect``."""

    def __init__(self, table, collected):
        self._table, self._collected = table, collected

    def collect_schema(self):
        raise AssertionError("not Arrow's")

    def head(self, rows):
        return Lazy(self._table.slice(0, rows), self._collected)

    def select(self, names):
        return Lazy(self._table.select(names), self._collected)

    def collect(self):
        self._collected.append((self._table.num_rows, self._table.column_names))
        return Producer(self._table)


def test_a_lazy_frame_is_collected_without_the_columns_that_are_no_gradients():
    collected = []
    lazy = Lazy(TABLE.append_column("note", pa.array(["x"] * TABLE.num_rows)), collected)
    opened = open_source(lazy)
    assert collected == []
    assert frames_of(opened) == FRAMES
    assert [(rows, sorted(names)) for rows, names in collected] == [
        (0, ["gradient", "id", "note", "step"]),
        (TABLE.num_rows, ["gradient", "id", "step"]),
    ]


def test_a_lazy_frame_whose_pieces_are_no_arrow_data_is_collected_once():
    class InPieces(Lazy):
        def head(self, rows):
            return InPieces(self._table.slice(0, rows), self._collected)

        def collect_batches(self):
            assert not self._table.num_rows, "evaluated for nothing"
            return iter([])

    assert frames_of(InPieces(TABLE, [])) == FRAMES


def test_several_objects_are_several_sources():
    assert frames_of([TABLE, io.BytesIO(CONTAINERS["file"]), Producer(TABLE)]) == FRAMES * 3


def test_no_batches_at_all_are_no_frames():
    assert frames_of([]) == []
    assert frames_of(iter([])) == []
    assert frames_of(TABLE.slice(0, 0)) == []
    assert frames_of(io.BytesIO(stream([BATCHES[0].slice(0, 0)]))) == []
    assert frames_of(io.BytesIO(stream([], schema=TABLE.schema))) == []


@pytest.mark.parametrize("thing", [None, 7, b"bytes", {"id": []}, object()], ids=lambda t: type(t).__name__)
def test_arguments_that_are_no_source_are_refused(thing):
    with pytest.raises(InputError, match=f"expected a path, '-', a URI, .* got {type(thing).__name__}"):
        open_source(thing)


def test_an_iterator_of_something_else_is_refused_with_its_place():
    frames, text = until_error(iter([BATCHES[0], "text"]))
    assert frames == [[0, 0]]
    assert text == "<batches>: batch 1: expected a pyarrow.RecordBatch, got str"


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


@pytest.mark.parametrize("kind", OTHERS)
def test_a_file_that_is_neither_arrow_nor_parquet_is_refused(tmp_path, kind):
    content, message = OTHERS[kind]
    path = tmp_path / "x"
    path.write_bytes(content)
    for source in (path, OneWay(content), io.BytesIO(content)):
        frames, text = until_error(source)
        assert frames == []
        assert message in text


def test_a_module_that_another_thread_is_loading_is_not_used(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.dataset", ModuleType("pyarrow.dataset"))
    assert frames_of(iter(BATCHES)) == FRAMES
    with pytest.raises(InputError, match="expected a path"):
        open_source(7)


def test_a_lazy_frame_that_fails_is_an_input_error_of_one_line():
    class Failing(Lazy):
        def head(self, rows):
            return self

        def collect(self):
            raise LookupError('unable to find column "b"\n\nResolved plan until failure:\n\n\t---> FAILED')

    class Strange(Failing):
        def collect(self):
            return 7

    assert until_error(Failing(TABLE, []))[1] == '<tests Failing>: the query failed: unable to find column "b"'
    assert until_error(Strange(TABLE, []))[1].endswith("collect() gave int, which has no __arrow_c_stream__")
