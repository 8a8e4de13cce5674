"""Bad input through the command line: the exit code, one line that says where, and nothing half-applied."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from cli import TWO_TABLES, frame
from ipc import stream

import penstock as ps

CONFIG = TWO_TABLES


def rows(ids, step=0, table="user", **columns):
    """One record batch: one frame."""
    tables = [table] * len(ids) if isinstance(table, str) else table
    return frame(step, ids, table=tables, **columns)


def good(count=2):
    return [rows([1, 2, 3, 1], step) for step in range(count)]


def after_good(batch):
    """Two good frames of the same schema, then the bad one."""
    first = [b.select(batch.schema.names).cast(batch.schema) for b in good()]
    return stream([*first, batch])


def floats(*values):
    return pa.FixedSizeListArray.from_arrays(pa.array(values, pa.float32()), 2)


def bare(ids, gradient, name="gradient"):
    """A stream of two columns."""
    return stream([pa.RecordBatch.from_pydict({"id": pa.array(ids), name: gradient})])


FINE = stream(good())
FIRST_END = len(stream(good(1), end=False))

# name → (the file's bytes, what the one line must say); test_columns.py and test_sources_damage.py have every message
BAD = {
    "cut inside a batch": (FINE[: FIRST_END + 40], ["batch 1", "cut"]),
    "cut at a batch boundary": (FINE[:FIRST_END], ["batch 0", "no end marker"]),
    "empty file": (b"", ["empty", "0 bytes"]),
    "two streams in one": (FINE + FINE, ["batch 1", "two streams"]),
    "no Arrow": (b"id,gradient\n1,2\n", ["Arrow"]),
    "no gradient column": (bare([1], floats(1, 2), "gradients"), ["'gradient'", "--column gradient=gradients"]),
    "rows of no table": (bare([1], floats(1, 2)), ["--table", "user, item"]),
    "null id": (after_good(rows([4, None, 5])), ["batch 2, row 1, column 'id'", "null", "[id_null]"]),
    "gradients of 3 floats": (
        stream([rows([1, 2], gradient=pa.FixedSizeListArray.from_arrays(pa.array(np.ones(6, np.float32)), 3))]),
        ["batch 0, row 0, column 'gradient'", "expected 2 floats", "got 3", "[length_mismatch]"],
    ),
    "NaN": (
        after_good(rows([1, 2], gradient=floats(1, 2, 3, np.nan))),
        ["batch 2, row 1, column 'gradient'", "finite", "nan"],
    ),
    "unknown table": (
        after_good(rows([1, 2], table=["user", "usr"])),
        ["batch 2, row 1, column 'table'", "got 'usr'", "did you mean 'user'"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_stream_is_one_line_with_its_place(name, config, tmp_path, refused):
    content, wanted = BAD[name]
    path = tmp_path / "monday.arrows"
    path.write_bytes(content)
    line = refused(3, "replay", config, path)
    assert str(path) in line
    for fragment in wanted:
        assert fragment in line


def test_a_misspelt_file_name_suggests_the_nearest_one(config, tmp_path, refused):
    (tmp_path / "monday.arrows").touch()
    assert f"did you mean '{tmp_path / 'monday.arrows'}'?" in refused(3, "replay", config, tmp_path / "mondya.arrows")
    assert "give an Arrow or Parquet file" in refused(3, "replay", config, tmp_path / "x")


def test_missing_files_are_named(config, tmp_path, refused):
    assert "nowhere.arrows: no such file" in refused(3, "replay", config, tmp_path / "nowhere.arrows")
    assert "no such file" in refused(3, "replay", config, "file:///nowhere.arrows")
    assert "nowhere.arrows: no such file" in refused(3, "inspect", tmp_path / "nowhere.arrows")
    (tmp_path / "void").mkdir()
    assert "no files" in refused(3, "replay", config, tmp_path / "void")


def test_the_second_of_two_sources_is_named(config, tmp_path, refused):
    (tmp_path / "a.arrows").write_bytes(FINE)
    (tmp_path / "b.arrows").write_bytes(FINE[:-8])
    assert "b.arrows: " in refused(3, "replay", config, tmp_path / "a.arrows", tmp_path / "b.arrows")
    assert "c.arrows: " in refused(3, "replay", config, tmp_path / "a.arrows", tmp_path / "c.arrows")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "out of memory: the tables with their slots, what the gate holds and one frame must fit"),
        (MemoryError("no room for 9 bytes"), "out of memory: no room for 9 bytes"),
        (RuntimeError("can't start new thread"), "can't start new thread: raise the limit of memory or of threads"),
    ],
)
def test_a_lack_of_memory_is_reported_with_what_must_fit(error, message, config, tmp_path, refused, monkeypatch):
    def lacking(*_, **__):
        raise error

    monkeypatch.setattr(ps.Engine, "run", lacking)
    (tmp_path / "monday.arrows").write_bytes(FINE)
    assert refused(6, "replay", config, tmp_path / "monday.arrows").startswith(f"penstock: {message}")
