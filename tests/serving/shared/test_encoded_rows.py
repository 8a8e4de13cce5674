"""Shared tables in 16 or 8 bits per value: how they are stored, and what readers of any dtype get."""

import hashlib
import json
import struct

import ml_dtypes
import numpy as np
import pytest
from engines import engine_of

import penstock as ps
from penstock.model.row_encodings import ENCODINGS
from penstock.rows.initializers import InitialRows
from penstock.rows.shared.header import DESCRIPTION_BEGIN, ENCODED_FORMAT
from penstock.serving.shared.table_writer import SharedTable, SharedWriter

ENCODED = ["bfloat16", "int8"]
DIMS = [1, 3, 7, 64]


def values(num_rows, dim, seed=0):
    return np.random.default_rng(seed).standard_normal((num_rows, dim)).astype(np.float32)


@pytest.fixture
def written(tmp_path):
    """written(rows, dim, **more) → the writer of a published table of 300 rows, those of ``values``."""
    writers = []

    def write(rows, dim, **more):
        writer = SharedWriter(tmp_path / "tables")
        writers.append(writer)
        writer.create([SharedTable("user", dim, 300, rows=rows, **more)])
        writer.write("user", range(300), values(300, dim))
        writer.publish(ps.Version("0"))
        return writer

    yield write
    for writer in writers:
        writer.close()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("rows", ENCODED)
def test_a_reader_decodes_what_is_stored_and_gives_its_bytes(rows, dim, written, tmp_path):
    writer, encoding = written(rows, dim), ENCODINGS[rows]
    ids = [299, 0, 7, 7]
    wanted = encoding.encode(values(300, dim))
    decoded = ps.Reader(tmp_path / "tables").lookup("user", ids)
    assert decoded.dtype == np.float32
    assert decoded.tobytes() == encoding.decode(wanted)[ids].tobytes()
    reader = ps.Reader(tmp_path / "tables", dtype=rows)
    assert reader.lookup("user", ids).tobytes() == wanted[ids].tobytes()
    changed = values(2, dim, 1)
    with writer.step(ps.Version("1")):
        writer.write("user", [7], changed[:1])
        writer.write("user", [8], encoding.encode(changed[1:]))  # bytes, as they come from a service
    assert reader.lookup({"user": [7, 8]}, consistent=True)["user"].tobytes() == encoding.encode(changed).tobytes()


def test_files_take_less_than_a_third_of_the_memory(written, tmp_path):
    sizes = {}
    for rows in ENCODINGS:
        written(rows, 64).close()
        sizes[rows] = sum(path.stat().st_size for path in (tmp_path / "tables").glob("rows-*"))
    assert sizes["int8"] <= 0.30 * sizes["float32"]
    assert sizes["bfloat16"] == sizes["float32"] / 2


def test_a_reader_of_another_dtype_encodes_the_rows_of_an_engine(tmp_path):
    engine = engine_of(dim=5, shared=tmp_path / "shared")
    engine.load_parameters("t", values(10, 5))
    for rows in ENCODED:
        with ps.Reader(tmp_path / "shared", dtype=rows) as reader:
            read = reader.lookup("t", [9, 4])
            assert read.tobytes() == ENCODINGS[rows].encode(engine.lookup("t", [9, 4])).tobytes()
    assert read.shape == (2, 5 + 8)
    halves = ps.Reader(tmp_path / "shared", dtype="bfloat16").lookup("t", [9, 4])
    assert (halves.dtype, halves.shape) == (ml_dtypes.bfloat16, (2, 5))


def test_an_int8_reader_of_constant_rows(tmp_path):
    engine_of(dim=3, initializer=ps.Constant(0.7), shared=tmp_path / "shared")
    rows = ps.Reader(tmp_path / "shared", dtype="int8").lookup("t", [0, 9])
    assert rows[:, :3].any() == 0
    assert rows[:, 3:].view("<f4").tolist() == [[0.0, np.float32(0.7)]] * 2


@pytest.mark.parametrize("rows", ENCODED)
def test_rows_are_written_into_an_array_of_the_caller(rows, written, tmp_path):
    written(rows, 4)
    reader = ps.Reader(tmp_path / "tables", dtype=rows)
    wanted = reader.lookup("user", [3, 9])
    out = np.empty_like(wanted)
    assert reader.lookup("user", [3, 9], out) is out
    assert out.tobytes() == wanted.tobytes()
    with pytest.raises(ps.UsageError, match=f"out: expected a writable, contiguous {wanted.dtype} array of"):
        reader.lookup("user", [3, 9], np.empty((2, 4), np.float32))


@pytest.mark.parametrize("rows", ENCODED)
@pytest.mark.parametrize("dtype", ["float32", "own"])
def test_keys_that_are_added_removed_and_absent(rows, dtype, written, tmp_path):
    encoding, absent = ENCODINGS[rows], InitialRows("constant", 0.3)
    writer = written(rows, 5, id_type="uint64", has_keys=True, absent=absent)
    more = values(700, 5, 2)
    with writer.step(ps.Version("1")):
        writer.remove("user", [4])
        writer.write("user", range(2**63, 2**63 + 700), more)  # the table grows
    reader = ps.Reader(tmp_path / "tables", dtype=rows if dtype == "own" else "float32")
    first = np.full((1, 5), 0.3, np.float32)
    wanted = encoding.encode(np.concatenate([values(300, 5)[[3]], first, more[[699]]]))
    read = reader.lookup("user", np.array([3, 4, 2**63 + 699], np.uint64))
    assert read.tobytes() == (wanted if dtype == "own" else encoding.decode(wanted)).tobytes()


def test_one_encoding_is_not_read_as_another(written, tmp_path):
    written("bfloat16", 4)
    with pytest.raises(ps.UsageError, match="table 'user', dtype int8: its rows are stored as bfloat16; read"):
        ps.Reader(tmp_path / "tables", dtype="int8").lookup("user", [3])


@pytest.mark.parametrize("dtype", ["int4", "uint8", np.int8, None])
def test_an_unknown_dtype_is_refused(dtype, tmp_path):
    with pytest.raises(ps.UsageError, match="dtype: expected float32, bfloat16, int8, got"):
        ps.Reader(tmp_path, dtype=dtype)


def test_every_pattern_of_bits_is_kept(written, tmp_path):
    writer = written("int8", 8)
    rows = np.random.default_rng(3).integers(0, 256, (300, 16), np.uint8)  # scales, biases and words that are NaN
    rows[:4, ::4] = [[0], [1], [127], [255]]
    with writer.step(ps.Version("1")):
        writer.write("user", range(300), rows)
    assert ps.Reader(tmp_path / "tables", dtype="int8").lookup("user", range(300)).tobytes() == rows.tobytes()


def test_a_folder_of_encoded_rows_has_a_format_that_earlier_readers_refuse(written, tmp_path):
    written("float32", 4).close()
    path = tmp_path / "tables" / "tables"
    assert int.from_bytes(path.read_bytes()[8:12], "little") == 1
    assert b"encoding" not in path.read_bytes()
    written("int8", 4).close()
    assert int.from_bytes(path.read_bytes()[8:12], "little") == ENCODED_FORMAT == 2


@pytest.mark.parametrize(
    ("encoding", "problem"), [("int4", "'encoding': got 'int4'"), ("float32", "layout"), (8, "expected a text, got 8")]
)
def test_an_unknown_encoding_in_a_header_is_refused(encoding, problem, written, tmp_path):
    written("int8", 64).close()
    path = tmp_path / "tables" / "tables"
    data = path.read_bytes()
    description = json.loads(data[DESCRIPTION_BEGIN:])
    description["tables"][0]["encoding"] = encoding
    text = json.dumps(description).encode()
    head = struct.pack("<8sII32s", b"penstock", ENCODED_FORMAT, len(text), hashlib.sha256(text).digest())
    path.write_bytes(head + data[len(head) : DESCRIPTION_BEGIN] + text)
    with pytest.raises(ps.StateError, match=f"damaged.*{problem}"):
        ps.Reader(tmp_path / "tables")
