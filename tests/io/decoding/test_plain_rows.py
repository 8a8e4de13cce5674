"""Batches of plain columns take a shorter path, with the same result as the general one."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from batches import received
from columns import outcome
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.io.decoding import batch_pieces, framing, source_batch
from penstock.io.decoding.reader import FrameReader, ReadOptions
from penstock.io.decoding.rows import plain_columns, rows_of
from penstock.io.decoding.schema import resolve

VOCABULARY, DIM = 10, 2
INT64 = pa.int64()
OPTIONS = ReadOptions({"t": (VOCABULARY, DIM)}, unvalidated=True)


def batch(rows, steps=False, id_type=INT64):
    """rows : (id, step, gradient), None for a null"""
    columns = {
        "id": pa.array([row[0] for row in rows], id_type),
        "gradient": pa.array([row[2] for row in rows], pa.list_(pa.float32(), DIM)),
    }
    if steps:
        columns["step"] = pa.array([row[1] for row in rows], pa.int64())
    return pa.record_batch(columns)


def is_plain(batch_of_rows: pa.RecordBatch) -> bool:
    columns = plain_columns(resolve(batch_of_rows.schema, "x", OPTIONS), "t", OPTIONS.sizes)
    return columns is not None and columns.read(batch_of_rows) is not None


ROW = st.tuples(
    st.sampled_from([0, 3, 9, 9, 10, -1, None]),
    st.sampled_from([5, 5, 5, 6, None]),
    st.sampled_from([[1.0, 2.0], [0.5, -1.0], [1.0, float("nan")], [1.0, None], None]),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(ROW, max_size=5), min_size=1, max_size=4),
    st.booleans(),
    st.sampled_from(["error", "drop", "quarantine"]),
    st.sampled_from([None, 3]),
    st.integers(0, 2),
    st.integers(0, 7),
)
def test_plain_and_general_decoding_give_the_same_frames_and_errors(
    rows, steps, on_bad_row, contribution_rows, skipped, shift
):
    batches = [received(batch(rows_batch, steps).slice(skipped), shift) for rows_batch in rows]
    options = replace(OPTIONS, on_bad_row=on_bad_row, contribution_rows=contribution_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_pieces, "plain_columns", lambda *_: None)
        wanted = outcome(batches, options)
    assert repr(outcome(batches, options)) == repr(wanted)  # NaN is not equal to itself


def with_bitmap(values, bits, kind, children=()):
    """An array whose bitmap is there, whether a bit of it is unset or not."""
    mask = pa.py_buffer(bytes(bits))
    buffers = [mask] if children else [mask, pa.array(values, kind).buffers()[1]]
    return pa.Array.from_buffers(kind, len(values), buffers, children=list(children))


@given(
    st.integers(1, 40),
    st.integers(0, 9),
    st.lists(st.integers(0, 120), max_size=2),
    st.sampled_from(["id", "gradient", "floats"]),
)
def test_a_column_with_a_bitmap_is_plain_where_no_bit_of_its_rows_is_unset(num_rows, first, unset, place):
    """What pyarrow says is the twin."""
    size = 2 * num_rows if place == "floats" else num_rows
    bits = bytearray(b"\xff" * 16)
    for bit in unset:
        bits[bit // 8] &= ~(1 << bit % 8)
    ids, floats = pa.array(range(num_rows), INT64), pa.array([0.5] * 2 * num_rows, pa.float32())
    if place == "floats":
        floats = with_bitmap([0.5] * size, bits, pa.float32())
    gradient = pa.FixedSizeListArray.from_arrays(floats, DIM)
    if place == "gradient":
        gradient = with_bitmap([None] * num_rows, bits, gradient.type, [floats])
    if place == "id":
        ids = with_bitmap(range(num_rows), bits, INT64)
    rows_batch = pa.record_batch({"id": ids, "gradient": gradient}).slice(first)
    columns = plain_columns(resolve(rows_batch.schema, "x", OPTIONS), "t", OPTIONS.sizes)
    seen = columns.read(rows_batch)
    holes = rows_batch.column("id").null_count + rows_batch.column("gradient").null_count
    # A hole in the floats of rows that the slice leaves out counts too: the general path then finds no bad row.
    assert (seen is None) == bool(holes or floats.null_count or not len(rows_batch))
    if seen is not None:
        rows, num_rows = rows_of(seen.blocks, 0), len(rows_batch)
        assert rows.ids.tolist() == rows_batch.column("id").to_pylist()
        assert rows.grads.tolist() == rows_batch.column("gradient").to_pylist()
        assert (seen.bounds.tolist(), seen.steps) == ([0, num_rows], None)


@pytest.mark.parametrize("num_rows", [1, 5, 20_000])
@pytest.mark.parametrize("shift", range(8))
def test_a_message_at_any_address_is_plain(num_rows, shift):
    sent = batch([(n % 10, n // 3, [n, -n]) for n in range(num_rows)], steps=True)
    columns = plain_columns(resolve(sent.schema, "x", OPTIONS), "t", OPTIONS.sizes)
    seen = columns.read(received(sent, shift))
    rows = rows_of(seen.blocks, 0)
    np.testing.assert_array_equal(rows.ids, sent.column("id"))
    np.testing.assert_array_equal(rows.grads.ravel(), sent.column("gradient").values)
    assert seen.steps.tolist() == sorted(set(sent.column("step").to_pylist()))
    assert seen.are_own == (shift > 0)
    assert rows.ids.flags.aligned
    assert rows.grads.flags.aligned


def test_batches_of_common_logs_are_plain():
    rows = [(1, 7, [1.0, 2.0]), (3, 7, [3.0, 4.0])]
    assert is_plain(batch(rows))
    assert is_plain(batch(rows).slice(1))
    assert is_plain(batch(rows, steps=True))


@pytest.mark.parametrize(
    "rows_batch",
    [
        batch([(None, 7, [1.0, 2.0])]),
        batch([(1, None, [1.0, 2.0])], steps=True),
        batch([(1, 7, None)]),
        batch([(1, 7, [1.0, None])]),
        batch([(1, 7, [1.0, 2.0])], id_type=pa.int32()),
        pa.record_batch({"id": pa.array([1]), "gradient": pa.array([[1.0, 2.0]], pa.list_(pa.float32()))}),
        pa.record_batch({"id": pa.array([1]), "gradient": pa.array([[1.0] * 3], pa.list_(pa.float32(), 3))}),
        pa.record_batch({"id": pa.array([1]), "gradient": pa.array([[1.0, 2.0]], pa.list_(pa.float64(), DIM))}),
        pa.record_batch(
            {"id": pa.array([1]), "table": ["t"], "gradient": pa.array([[1.0, 2.0]], pa.list_(pa.float32(), DIM))}
        ),
    ],
    ids=["null id", "null step", "null gradient", "null value", "int32", "lists", "dim", "float64", "table"],
)
def test_batches_that_are_not_plain_take_the_general_decoder(rows_batch):
    assert not is_plain(rows_batch)


@pytest.mark.parametrize("tables", [["t", "u", "t"], ["t", "t", "u"]], ids=["alternating", "in runs"])
def test_good_rows_of_several_tables_are_not_examined_one_by_one(monkeypatch, tables):
    monkeypatch.setattr(source_batch, "find_bad_rows", lambda *_: pytest.fail("examined every row"))
    rows_batch = batch([(1, 5, [1.0, 2.0]), (2, 5, [3.0, 4.0]), (3, 5, [5.0, 6.0])], steps=True)
    rows_batch = rows_batch.append_column("table", pa.array(tables).dictionary_encode())
    (frame,) = FrameReader([rows_batch], replace(OPTIONS, sizes=dict.fromkeys("tu", (VOCABULARY, DIM))))
    assert {table: sum(len(block.ids) for block in blocks) for table, blocks in frame.rows.items()} == {"t": 2, "u": 1}


def test_slices_of_a_large_table_are_not_examined_one_by_one(monkeypatch):
    """They are small, however large the buffers are that they share."""
    monkeypatch.setattr(source_batch, "find_bad_rows", lambda *_: pytest.fail("examined every row"))
    num_rows = framing.UNVALIDATED_BYTES // 8  # twice as large as what is examined
    floats = pa.array(np.zeros(DIM * num_rows, np.float32))
    large = pa.record_batch(
        {"id": pa.array(np.zeros(num_rows, np.int64)), "gradient": pa.FixedSizeListArray.from_arrays(floats, DIM)}
    )
    frames = list(FrameReader([large.slice(start, 3) for start in (0, 5)], replace(OPTIONS, on_bad_row="drop")))
    assert [frame.num_rows for frame in frames] == [3, 3]
