"""Columns that repeat themselves: runs equal their twins, and what a run cannot vouch for is asked of every row."""

import numpy as np
import pyarrow as pa
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import InputError
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.pyx.run_lengths import equal_runs, length_runs

SIZES = {"a": (2000, 2), "b": (2000, 3)}


@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 200)), max_size=8),
    st.sampled_from([np.int8, np.int16, np.int32, np.int64]),
    st.integers(0, 10),
)
def test_equal_runs_equal_their_twin(parts, dtype, most):
    codes = np.concatenate([np.empty(0, dtype), *(np.full(n, code, dtype) for code, n in parts)])
    assert equal_runs(codes, most) == reference.equal_runs(codes, most)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 200)), max_size=8),
    st.sampled_from([np.uint32, np.uint64]),
    st.integers(0, 2000),
    st.integers(0, 10),
    st.one_of(st.none(), st.tuples(st.integers(0, 1000), st.integers(0, 2**32 - 1))),
)
def test_length_runs_equal_their_twin_also_where_offsets_are_damaged(parts, dtype, num_values, most, damage):
    lengths = [length for length, n in parts for _ in range(n)]
    offsets = np.cumsum([0, *lengths]).astype(dtype)
    if damage is not None:
        offsets[damage[0] % len(offsets)] = damage[1]
    assert length_runs(offsets, num_values, most) == reference.length_runs(offsets, num_values, most)


def test_offsets_that_wrap_around_are_no_run():
    wrapped = np.array([2**32 - 4, 0, 4], np.uint32)  # every difference is 4
    assert length_runs(wrapped, 2**31 - 1, 5) is None
    assert length_runs(np.array([2**64 - 4, 0, 4], np.uint64), 2**63, 5) is None
    assert length_runs(np.empty(0, np.uint32), 10, 5) is None


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
