"""Batches whose tables are runs of codes are read in place, with the same result as the general decoder."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from batches import received
from columns import outcome
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.io.decoding import batch_pieces
from penstock.io.decoding.coded_tables import coded_tables
from penstock.io.decoding.reader import ReadOptions
from penstock.io.decoding.schema import resolve

OPTIONS = ReadOptions({"a": (900, 2), "b": (900, 3), "c": (900, 2)}, unvalidated=True)
NAMES = ["a", "b", "c", "unknown", "a", None]

RUN = st.tuples(
    st.sampled_from([0, 0, 1, 2, 3, 4, 5]),  # the code
    st.integers(1, 700),  # rows
    st.sampled_from([0] * 9 + [1]),  # floats more than the table's dim
    st.integers(5, 6),  # the step
)


def column_of(lists, kind):
    offsets = np.cumsum([0, *lists])
    values = pa.array(np.arange(offsets[-1], dtype=np.float32))
    if kind == "fixed":
        return pa.FixedSizeListArray.from_arrays(values[: 2 * len(lists)], 2)
    if kind == "large":
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)


def batch_of(runs, names=NAMES, kind="list", codes=np.int32, steps=True, first_id=0):
    """A batch with these runs of rows, and ids from first_id on."""
    each = [run for run in runs for _ in range(run[1])]
    dims = {"a": 2, "b": 3, "c": 2}
    lists = [2 if kind == "fixed" else dims.get(names[run[0]], 2) + run[2] for run in each]
    columns = {
        "table": pa.DictionaryArray.from_arrays(pa.array([run[0] for run in each], pa.from_numpy_dtype(codes)), names),
        "id": pa.array(np.arange(first_id, first_id + len(each))),
        "gradient": column_of(lists, kind) if kind != "fixed" else column_of([2] * len(each), "fixed"),
    }
    if steps:
        columns["step"] = pa.array([run[3] for run in each], pa.int64())
    return pa.record_batch(columns)


def read(batch):
    return coded_tables(resolve(batch.schema, "x", OPTIONS), OPTIONS.sizes).read(batch)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(RUN, min_size=1, max_size=4), min_size=1, max_size=3),
    st.sampled_from(["list", "large", "fixed"]),
    st.sampled_from([np.int8, np.int16, np.int32, np.int64]),
    st.booleans(),
    st.sampled_from(["error", "drop"]),
    st.sampled_from([None, 300]),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([0, 0, 1, 2, 4]),
)
# A frame whose first batch is read in place, and has a bad row as the second one has.
@example([[(0, 271, 0, 5), (0, 630, 0, 5)], [(1, 1, 0, 5)]], "fixed", np.int8, True, "error", None, 0, False, 0)
def test_coded_and_general_decoding_give_the_same_frames_and_errors(
    runs, kind, codes, steps, on_bad_row, contribution_rows, skipped, has_null, shift
):
    names = NAMES if has_null else ["a", "b", "c", "unknown", "a", "b"]
    batches = [received(batch_of(each, names, kind, codes, steps).slice(skipped), shift) for each in runs]
    options = replace(OPTIONS, on_bad_row=on_bad_row, contribution_rows=contribution_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_pieces, "coded_tables", lambda *_: None)
        wanted = outcome(batches, options)
    assert outcome(batches, options) == wanted


@pytest.mark.parametrize("kind", ["list", "large", "fixed"])
def test_batches_of_common_logs_are_read_in_place(kind):
    runs = [(0, 300, 0, 5), (2, 300, 0, 6)]
    rows = read(batch_of(runs, kind=kind).slice(100))
    assert [run[:3] for run in rows.tables] == [(0, 200, "a"), (200, 500, "c")]
    assert rows.steps == [(0, 200, 5), (200, 500, 6)]
    assert read(batch_of(runs, kind=kind, steps=False)).steps is None
    assert rows.tables[1].rows.ids.tolist() == list(range(300, 600))
    assert rows.tables[1].rows.grads[0].tolist() == [600, 601]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("id", pa.array([1, None] * 300)),
        ("gradient", pa.array([[1.0, 2.0], None] * 300, pa.list_(pa.float32()))),
        ("gradient", pa.array([[1.0, None]] * 600, pa.list_(pa.float32()))),
        ("step", pa.array([1, None] * 300)),
        ("table", pa.array(["a", "b"] * 300).dictionary_encode()),
    ],
    ids=["null id", "null gradient", "null value", "null step", "tables take turns"],
)
def test_batches_that_do_not_fit_take_the_general_decoder(column, values):
    batch = batch_of([(0, 600, 0, 5)])
    columns = {**dict(zip(batch.schema.names, batch.columns, strict=True)), column: values}
    assert read(pa.record_batch(columns)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"id": pa.array([1], pa.int32())},
        {"gradient": pa.array([[1.0, 2.0]], pa.list_(pa.float64()))},
        {"table": pa.array(["a"])},
        {"contributor": pa.array(["x"])},
    ],
    ids=["int32", "float64", "strings", "contributor"],
)
def test_schemas_that_do_not_fit_take_the_general_decoder(changes):
    batch = batch_of([(0, 1, 0, 5)])
    batch = pa.record_batch(dict(zip(batch.schema.names, batch.columns, strict=True)) | changes)
    assert coded_tables(resolve(batch.schema, "x", OPTIONS), OPTIONS.sizes) is None


def test_each_batch_may_have_another_dictionary():
    batches = [batch_of([(0, 300, 0, 5)], names=names) for names in (["a"], ["c"], ["a"], ["c", "a"])]
    frames, error, _ = outcome(batches, replace(OPTIONS, contribution_rows=300))
    assert error is None
    assert [list(frame[0]) for frame in frames] == [["a"], ["c"], ["a"], ["c"]]


def test_a_dictionary_of_the_same_place_and_length_in_later_memory_is_read_anew():
    columns = coded_tables(resolve(batch_of([(0, 300, 0, 5)]).schema, "x", OPTIONS), OPTIONS.sizes)
    for number in range(40):  # each takes the memory that the one before has freed
        name = "ac"[number % 2]
        (run,) = columns.read(batch_of([(0, 300, 0, 5)], names=[name])).tables
        assert run.table == name
