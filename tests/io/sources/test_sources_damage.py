"""Sources that are cut, continued, replaced in mid-stream or damaged: an error or whole frames, never a crash."""

import io
import itertools
import subprocess
import sys
from contextlib import suppress

import pyarrow as pa
import pyarrow.ipc
import pytest
from ipc import stream
from streams import CONTAINERS, TABLE, OneWay, batch_of, frames_of, parquet, until_error

from penstock.base.errors import InputError, TruncatedInputError
from penstock.io.decoding.reader import FrameReader, ReadOptions

# ---- cut and continued

NAMES = pa.DictionaryArray.from_arrays(pa.array([0, 0], pa.int8()), pa.array(["user"]))
SMALL = {
    "plain": stream([batch_of(0, 1), batch_of(1, 2)]),
    "dictionary": stream([batch_of(0, 1, table=NAMES), batch_of(1, 2, table=NAMES)]),
    "compressed": stream([batch_of(0, 1), batch_of(1, 2)], compression="zstd"),
    "legacy": stream([batch_of(0, 1), batch_of(1, 2)], use_legacy_format=True),
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


@pytest.mark.parametrize("container", ["file", "parquet", "zstd file", "polars file"])
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
            content += stream([tables[size][0]], make=pa.ipc.new_file)
        else:
            content += stream(tables[size], make=pa.ipc.new_file)
    path.write_bytes(content)
    for source in (path, io.BytesIO(content)):
        frames, text = until_error(source)
        assert frames == []
        assert "two" in text


def test_a_file_without_any_batch_after_another_is_noticed(tmp_path):
    empty = stream([], schema=TABLE.schema, make=pa.ipc.new_file)
    (tmp_path / "empty").write_bytes(empty)
    (tmp_path / "two").write_bytes(CONTAINERS["file"] + empty)
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
        content = stream(batches, emit_dictionary_deltas=deltas)
        (tmp_path / "log").write_bytes(content)
        for source in (tmp_path / "log", OneWay(content)):
            frames = list(FrameReader(source, ReadOptions(sizes, columns={"step": "id"})))
            names = [{table: [b.ids.tolist() for b in blocks] for table, blocks in f.rows.items()} for f in frames]
            assert names[:2] == [{"user": [[0]]}, {"item": [[1]]}]
            assert names[-2:] == [{"other": [[0]]}, {"user": [[1]]}]


def test_a_dictionary_that_no_batch_follows_is_no_cut(tmp_path):
    # As other writers do it: dictionaries first, then nothing but the end marker.
    content = SMALL["dictionary"]
    messages, position = [], 0
    reader = pa.BufferReader(content)
    while True:
        try:
            message = pa.ipc.read_message(reader)
        except EOFError:
            break
        messages.append((message.type, content[position : reader.tell()]))
        position = reader.tell()
    assert [kind for kind, _ in messages[:3]] == ["schema", "dictionary", "record batch"]
    no_batch = messages[0][1] + messages[1][1]
    for source_of in (OneWay, lambda c: (tmp_path / "x").write_bytes(c) and tmp_path / "x"):
        assert frames_of(source_of(no_batch + content[-8:])) == []
        until_error(source_of(no_batch), TruncatedInputError)
        assert "bytes follow" in until_error(source_of(no_batch + content[-8:] + b"x"))[1]


# ---- damage

FUZZ = """
import io, pathlib, random, sys, warnings
import pyarrow as pa
from penstock.base.errors import InputError
from penstock.io.decoding.reader import FrameReader, ReadOptions
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
    "stream": stream([rich(), rich()]),
    "compressed stream": stream([rich(), rich()], compression="lz4"),
    "file": stream([rich(), rich()], make=pa.ipc.new_file),
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


@pytest.mark.parametrize("name", [b"table", b"inner"])
def test_a_name_that_is_not_utf8_is_bad_input(name):
    """Of a column, or of a field inside one."""
    row = {"id": pa.array([1]), "table": ["t"], "gradient": pa.array([[1.0]], pa.list_(pa.float32(), 1))}
    batch = pa.record_batch(row | {"more": pa.array([[{"inner": 1}]])})
    damaged = io.BytesIO(stream([batch]).replace(name, b"t\xff\xfe\xfde"))
    with pytest.raises(InputError, match="name is not UTF-8"):
        list(FrameReader(damaged, ReadOptions({"t": (5, 1), "u": (5, 1)})))
