"""Tables as Parquet files: they are read as they were written, complete or absent, and bad files are reported."""

import gc
import math
import os
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.base.errors import InputError
from penstock.io.table_files import TablesWriter, read_table, table_path

ROWS = pa.list_(pa.float32(), 2)


def block_of(num_rows, dim=2, start=0.0):
    return (np.arange(num_rows * dim, dtype=np.float32) + np.float32(start)).reshape(num_rows, dim)


def write_table(directory, table, dim, slots, blocks):
    with TablesWriter(directory) as writer:
        writer.write(table, dict.fromkeys(["row", *slots], dim), blocks)
    return writer.written[0]


def read_all(directory, table="user", size=10, dim=2, columns=("row",)):
    """Return all blocks of a file joined: the ids, and column → rows."""
    blocks = list(read_table(directory, table, size, dict.fromkeys(columns, dim)))
    ids = [id_ for ids, _ in blocks for id_ in ids.tolist()]
    names = blocks[0][1] if blocks else {}
    return ids, {name: np.concatenate([block[name] for _, block in blocks]).tolist() for name in names}


def write_parquet(directory, table="user", **columns):
    """Write a file as another program might."""
    pq.write_table(pa.table(columns), table_path(directory, table))


def error_of(directory, **options):
    with pytest.raises(InputError) as caught:
        read_all(directory, **options)
    assert "\n" not in str(caught.value)
    return caught.value


# ---- round trips


@pytest.mark.promise("Written tables are read back bit for bit")
@given(st.integers(1, 4), st.lists(st.integers(0, 5), max_size=4), st.integers(0, 2), st.data())
@settings(deadline=None, max_examples=40)
def test_written_tables_are_read_back_bit_for_bit(tmp_path_factory, dim, counts, num_slots, data):
    finite_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
    blocks = [
        tuple(data.draw(hnp.arrays(np.float32, (count, dim), elements=finite_floats)) for _ in range(1 + num_slots))
        for count in counts
    ]
    directory, slots = tmp_path_factory.mktemp("tables"), ["momenta", "velocities"][:num_slots]
    write_table(directory, "user", dim, slots, blocks)
    actual_blocks = list(read_table(directory, "user", sum(counts) or 1, dict.fromkeys(["row", *slots], dim)))
    assert [id_ for ids, _ in actual_blocks for id_ in ids.tolist()] == list(range(sum(counts)))
    for number, name in enumerate(["row", *slots]):
        expected = b"".join(block[number].tobytes() for block in blocks)
        assert b"".join(np.ascontiguousarray(columns[name]).tobytes() for _, columns in actual_blocks) == expected


def test_the_file_is_plain_parquet_with_id_row_and_one_column_per_slot(tmp_path):
    path = write_table(tmp_path / "new" / "folder", "user", 2, ["accumulators"], [(block_of(3), block_of(3, start=9))])
    assert path == tmp_path / "new" / "folder" / "user.parquet"
    table = pq.read_table(path)
    assert table.schema.names == ["id", "row", "accumulators"]
    assert table["id"].to_pylist() == [0, 1, 2]
    assert table["accumulators"].to_pylist() == block_of(3, start=9).tolist()


def test_columns_that_are_not_requested_or_missing_are_omitted(tmp_path):
    write_table(tmp_path, "user", 2, ["momenta"], [(block_of(2), block_of(2))])
    assert list(read_all(tmp_path)[1]) == ["row"]
    assert list(read_all(tmp_path, columns=("row", "momenta", "velocities"))[1]) == ["row", "momenta"]


NAMES = ["user", "a/b", "../up", "..", "über 表", "per%cent", "a%2Fb", "semi;colon", "tab\tnew\nline", "x.parquet", "-"]


def test_a_table_of_any_name_has_a_separate_file_inside_the_folder(tmp_path):
    for number, name in enumerate(NAMES):
        write_table(tmp_path / "out", name, 2, [], [(block_of(1, start=number),)])
    for number, name in enumerate(NAMES):
        assert read_all(tmp_path / "out", name)[1]["row"] == block_of(1, start=number).tolist(), name
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert len(os.listdir(tmp_path / "out")) == len(NAMES)


def test_a_file_of_several_blocks_is_read_completely(tmp_path):
    rows = 150_000
    write_table(tmp_path, "user", 1, [], [(block_of(rows // 2, 1),), (block_of(rows // 2, 1),)])
    blocks = list(read_table(tmp_path, "user", rows, {"row": 1}))
    assert len(blocks) > 1
    assert np.array_equal(np.concatenate([ids for ids, _ in blocks]), np.arange(rows))


# ---- files of other programs


@pytest.mark.parametrize(
    "row_type", [pa.list_(pa.float64()), pa.large_list(pa.float16()), pa.list_(pa.float32(), 2)], ids=str
)
@pytest.mark.parametrize("id_type", [pa.int8(), pa.uint64()], ids=str)
def test_ids_of_any_integer_type_and_rows_of_any_float_list_are_read(tmp_path, row_type, id_type):
    write_parquet(tmp_path, row=pa.array([[1, 2], [3, 4]], row_type), more=["x", "y"], id=pa.array([7, 3], id_type))
    assert read_all(tmp_path) == ([7, 3], {"row": [[1, 2], [3, 4]]})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"row": pa.array([[1, 2]], ROWS)}, "no column 'id' (has: row)"),
        ({"id": [1]}, "no column 'row' (has: id)"),
        ({"id": [1.5], "row": pa.array([[1, 2]], ROWS)}, "column 'id': expected any integer type, got double"),
        ({"id": [1], "row": [1.5]}, "column 'row': expected a list of 2 floats, got double"),
        ({"id": [1], "row": [[1, 2]]}, "column 'row': expected a list of 2 floats, got list<element: int64>"),
    ],
)
def test_columns_that_are_missing_or_of_another_type_are_reported(tmp_path, columns, message):
    write_parquet(tmp_path, **columns)
    assert message in str(error_of(tmp_path))


def test_a_duplicate_column_is_reported(tmp_path):
    rows = pa.array([[1, 2]], ROWS)
    table = pa.Table.from_arrays([pa.array([1]), rows, rows], names=["id", "row", "row"])
    pq.write_table(table, table_path(tmp_path, "user"))
    assert "column 'row': more than one column has this name" in str(error_of(tmp_path))


@pytest.mark.parametrize(
    ("ids", "row", "message"),
    [
        ([1, 10], 1, "expected 0 <= id < 10 (vocabulary_size of table 'user'), got 10"),
        ([1, -1], 1, "got -1"),
        ([1, None], 1, "expected an id, got null"),
        ([1, 2, 1], 2, "id 1 occurs twice"),
        ([5, 5], 1, "id 5 occurs twice"),
    ],
)
def test_bad_or_repeated_ids_are_reported_with_their_row(tmp_path, ids, row, message):
    write_parquet(tmp_path, id=pa.array(ids, pa.int64()), row=pa.array([[1, 2]] * len(ids), ROWS))
    error = error_of(tmp_path)
    assert (error.row, error.column) == (row, "id")
    assert message in str(error)


def test_an_id_of_2_to_the_63_is_reported_without_overflow(tmp_path):
    write_parquet(tmp_path, id=pa.array([2**63], pa.uint64()), row=pa.array([[1, 2]], ROWS))
    assert f"got {2**63}" in str(error_of(tmp_path))


def test_a_duplicate_id_is_reported_when_70000_rows_lie_between(tmp_path):
    rows = 70_000
    write_parquet(tmp_path, id=pa.array([*range(rows), 3]), row=pa.array([[1.0, 2.0]] * (rows + 1), ROWS))
    error = error_of(tmp_path, size=rows)
    assert (error.row, error.problem) == (rows, "id 3 occurs twice")


@pytest.mark.parametrize(
    "bad_row", [[1.0, math.nan], [math.inf, 1.0], [1e39, 1.0], [1.0, None], None, [1.0], [1.0] * 3], ids=str
)
def test_rows_that_are_not_dim_finite_floats_are_reported_with_their_row(tmp_path, bad_row):
    write_parquet(tmp_path, id=pa.array([1, 2]), row=pa.array([[1.0, 2.0], bad_row], pa.list_(pa.float64())))
    error = error_of(tmp_path)
    assert (error.row, error.column) == (1, "row")
    assert "expected 2 finite floats, got " in str(error)


def test_a_truncated_file_or_one_of_another_format_is_an_error(tmp_path):
    path = write_table(tmp_path, "user", 2, ["momenta"], [(block_of(5), block_of(5))])
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        error_of(tmp_path)
    path.write_text("id,row")
    assert "cannot be read as Parquet" in str(error_of(tmp_path))
    path.unlink()
    path.mkdir()
    assert "no file for table 'user'; there: user.parquet" in str(error_of(tmp_path))


def test_the_file_is_closed_however_far_it_was_read(tmp_path):
    write_table(tmp_path, "user", 2, [], [(block_of(5),)])
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("open files cannot be counted here")
    gc.collect()
    num_open_files = len(os.listdir("/proc/self/fd"))
    blocks = read_table(tmp_path, "user", 5, {"row": 2})
    next(blocks)
    blocks.close()
    read_all(tmp_path)
    error = error_of(tmp_path, size=2)
    assert len(os.listdir("/proc/self/fd")) == num_open_files, error


# ---- complete or absent


def failing_blocks(*blocks):
    yield from blocks
    raise RuntimeError("the device is gone")


def test_a_block_that_fails_leaves_the_previous_file(tmp_path):
    path = write_table(tmp_path, "user", 2, [], [(block_of(2),)])
    content = path.read_bytes()
    with pytest.raises(RuntimeError, match="the device is gone"):
        write_table(tmp_path, "user", 2, [], failing_blocks((block_of(5, start=7),)))
    assert os.listdir(tmp_path) == ["user.parquet"]
    assert path.read_bytes() == content


def test_partial_files_of_an_ended_process_are_removed_and_those_of_a_running_one_are_not(tmp_path):
    ended_process = subprocess.Popen(["true"])
    ended_process.wait()
    for process in (ended_process.pid, os.getppid()):
        (tmp_path / f".us[er].parquet.{process}-1.part").touch()
    write_table(tmp_path, "us[er]", 2, (), [(block_of(3),)])
    assert sorted(os.listdir(tmp_path)) == [f".us[er].parquet.{os.getppid()}-1.part", "us[er].parquet"]
