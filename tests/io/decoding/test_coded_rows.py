"""Columns that repeat themselves: runs equal their twins, and what a run cannot vouch for is asked of every row."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import InputError
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.pyx.buffer_pool import Pool
from penstock.pyx.plain_batches import coded_rows

SIZES = {"a": (2000, 2), "b": (2000, 3)}
UNSIGNED = {np.int32: np.uint32, np.int64: np.uint64}


def rows_in_place(codes, offsets, num_values, width=2, steps=None):
    """Rows by their codes and offsets of values, which nothing has validated. offsets : None: all of a width"""
    n, memory = len(codes), lambda array: [None, pa.py_buffer(np.ascontiguousarray(array))]
    indices = pa.Array.from_buffers(pa.from_numpy_dtype(codes.dtype), n, memory(codes))
    names = pa.DictionaryArray.from_arrays(indices, pa.array(["a"]), safe=False)
    values = pa.array(np.zeros(num_values if offsets is not None else n * width, np.float32))
    if offsets is None:
        lists = pa.FixedSizeListArray.from_arrays(values, width)
    else:
        make, valid = pa.list_ if offsets.dtype == np.int32 else pa.large_list, np.zeros_like(offsets)
        lists = pa.Array.from_buffers(make(pa.float32()), n, memory(valid), children=[values])
    columns = [names, pa.array(np.arange(n)), lists]
    if steps is not None:
        columns.append(pa.array(steps, pa.int64()))
    batch = pa.RecordBatch.from_arrays(columns, ["table", "id", "gradient", "step"][: len(columns)])
    if offsets is not None:
        valid[:] = offsets  # pyarrow has looked at them
    offset_bytes = 0 if offsets is None else offsets.itemsize
    of_step, width = (3 if steps is not None else -1), (width if offsets is None else 0)
    rows, _ = coded_rows(
        batch.__arrow_c_array__()[1], Pool(), len(columns), 0, codes.itemsize, 1, 2, width, offset_bytes, of_step
    )
    return rows


@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 200)), min_size=1, max_size=8),
    st.sampled_from([np.int8, np.int16, np.int32, np.int64]),
    st.sampled_from([None, np.int32, np.int64]),
    st.lists(st.sampled_from([2, 2, 2, 3, 5, -1]), min_size=3, max_size=4),
    st.integers(-3, 3),
    st.integers(0, 10),
    st.one_of(st.none(), st.tuples(st.integers(0, 1000), st.integers(-(2**31), 2**31 - 1))),
)
def test_runs_of_tables_equal_their_twin_also_where_offsets_are_damaged(
    parts, code_type, offset_type, dims, more_values, most, damage
):
    codes = np.concatenate([np.full(n, code, code_type) for code, n in parts])
    lengths = [max(dims[code], 0) if 0 <= code < len(dims) else 1 for code in codes.tolist()]
    offsets, bounds, num_values = None, list(range(0, 2 * len(codes) + 1, 2)), 2 * len(codes)
    if offset_type is not None:
        offsets = np.cumsum([0, *lengths]).astype(offset_type)
        num_values = max(0, int(offsets[-1]) + more_values)
        if damage is not None:
            offsets[damage[0] % len(offsets)] = damage[1]
        bounds = offsets.view(UNSIGNED[offset_type]).tolist()
    rows = rows_in_place(codes, offsets, num_values)
    assert rows.table_runs(np.array(dims), most) == reference.table_runs(codes, bounds, num_values, dims, most)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 200)), min_size=1, max_size=8))
def test_runs_of_steps_are_the_longest(parts):
    steps = np.concatenate([np.full(n, step) for step, n in parts])
    runs = rows_in_place(np.zeros(len(steps), np.int8), None, 0, steps=steps).step_runs()
    assert np.concatenate([np.full(stop - start, step) for start, stop, step in runs]).tolist() == steps.tolist()
    assert all(before[2] != after[2] for before, after in itertools.pairwise(runs))


def test_offsets_that_wrap_around_are_no_run():
    codes = np.zeros(2, np.int32)
    # Every difference is 4.
    assert rows_in_place(codes, np.array([-4, 0, 4], np.int32), 100).table_runs(np.array([4]), 5) is None
    assert rows_in_place(codes, np.array([-4, 0, 4], np.int64), 100).table_runs(np.array([4]), 5) is None


def batch_of(codes, lists, names=("a", "b")):
    """A batch of tables by code and gradients by length, ids 0, 1, 2 …"""
    offsets = np.cumsum([0, *lists]).astype(np.int32)
    gradients = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.arange(offsets[-1], dtype=np.float32)))
    tables = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(names))
    ids = pa.array(np.arange(len(codes)))
    return pa.RecordBatch.from_arrays([tables, ids, gradients], ["table", "id", "gradient"])


def rows_of(batch):
    (frame,) = FrameReader([batch], ReadOptions(SIZES, unvalidated=True))
    return {
        table: [(int(i), block.gradient(index).tolist()) for block in blocks for index, i in enumerate(block.ids)]
        for table, blocks in frame.rows.items()
    }


@pytest.mark.parametrize("position", [0, 1, 450, 699, 700, 1199])
def test_one_list_of_another_length_is_found_wherever_it_stands(position):
    codes = [0] * 700 + [1] * 500
    lists = [2 + code for code in codes]
    lists[position] += 1
    with pytest.raises(InputError, match=f"row {position}, .*expected {2 + codes[position]} floats"):
        rows_of(batch_of(codes, lists))


@pytest.mark.parametrize("position", [0, 450, 1199])
def test_a_code_beyond_the_dictionary_is_found_wherever_it_stands(position):
    codes = np.array([0] * 700 + [1] * 500, np.int32)
    codes[position] = 2
    whole = batch_of([0] * 1200, [2] * 1200)
    indices = pa.Array.from_buffers(pa.int32(), 1200, [None, pa.py_buffer(codes)])
    tables = pa.DictionaryArray.from_arrays(indices, pa.array(["a", "b"]), safe=False)
    batch = pa.RecordBatch.from_arrays([tables, *whole.columns[1:]], whole.schema.names)
    with pytest.raises(InputError, match="corrupt Arrow data"):
        rows_of(batch)


@pytest.mark.parametrize("damage", [(5, -1), (5, 10**6), (0, 3), (600, 0)])
def test_damaged_offsets_are_found(damage):
    position, value = damage
    offsets = np.arange(0, 2 * 1201, 2, dtype=np.int32)
    offsets[position] = value
    values = pa.array(np.zeros(2400, np.float32))
    gradients = pa.Array.from_buffers(pa.list_(pa.float32()), 1200, [None, pa.py_buffer(offsets)], children=[values])
    batch = pa.RecordBatch.from_arrays([pa.array(np.arange(1200)), gradients], ["id", "gradient"])
    with pytest.raises(InputError):
        list(FrameReader([batch], ReadOptions(SIZES, table="a", unvalidated=True)))


def test_equal_names_in_a_dictionary_are_one_table():
    batch = batch_of([0] * 300 + [1] * 300, [2] * 600, ("a", "a"))
    assert len(rows_of(batch)["a"]) == 600
    batch = batch_of([2] * 300 + [1] * 300, [2] * 300 + [3] * 300, ("a", "b", "a"))
    audited = ReadOptions(SIZES)
    for options in (audited, ReadOptions(SIZES, unvalidated=True)):
        (frame,) = FrameReader([batch], options)
        assert {table: len(block.ids) for table, (block,) in frame.rows.items()} == {"a": 300, "b": 300}
