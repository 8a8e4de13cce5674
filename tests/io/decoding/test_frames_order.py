"""Which frames come out before an error, at a stream's end and in what order when sources are merged."""

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from framed import GRADIENT, contents_of, frames_of, ids_of, reader_of, until_error, with_steps, without_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from ipc import stream

from penstock.base.errors import TruncatedInputError

# ---- bad rows


def test_an_error_stops_before_the_frame_and_the_whole_frames_before_it_are_out():
    batch = with_steps((1, 7), (2, 8), (3, 8), (100, 9), (4, 9))
    frames, error = until_error([batch])
    assert contents_of(frames) == [([1], 7, None), ([2, 3], 8, None)]
    assert (error.batch, error.row, error.column, error.reason) == (0, 3, "id", "id_out_of_range")


def test_dropped_rows_are_counted_by_reason_and_the_frame_stays():
    batches = [with_steps((1, 7), (100, 7), (None, 7)), with_steps((101, 7), (2, 7), (3, 8)), with_steps((100, 9))]
    reader = reader_of(batches, on_bad_row="drop")
    frames = list(reader)
    assert contents_of(frames) == [([1, 2], 7, None), ([3], 8, None), ([], 9, None)]
    assert [f.num_rows for f in frames] == [5, 1, 1]
    assert [f.dropped for f in frames] == [{"id_out_of_range": 2, "id_null": 1}, {}, {"id_out_of_range": 1}]
    assert frames[2].rows == {}
    first = reader.first_bad["id_out_of_range"]
    assert first == (
        "<batches>: batch 0, row 1, column 'id': expected 0 <= id < 100 (vocabulary_size of table 'user'), "
        "got 100 [id_out_of_range]"
    )


def test_dropped_rows_count_towards_contribution_rows():
    frames = frames_of([without_steps(1, 100, 2, 3)], contribution_rows=2, on_bad_row="drop")
    assert [(ids_of(f), f.num_rows, f.dropped) for f in frames] == [([1], 2, {"id_out_of_range": 1}), ([2, 3], 2, {})]


@pytest.mark.parametrize("bad", ["id", "step", "learning_rates"])
def test_a_row_of_a_parquet_file_is_counted_over_the_file(tmp_path, bad):
    rows = 70_000
    columns = {
        "id": [1] * rows,
        "gradient": [[1.0]] * rows,
        "step": [1] * rows,
        "learning_rates": [[0.5]] * rows,
    }
    columns[bad][-2] = None
    kinds = {"id": pa.int64(), "gradient": GRADIENT, "step": pa.int64(), "learning_rates": pa.list_(pa.float32())}
    pq.write_table(pa.table({n: pa.array(c, kinds[n]) for n, c in columns.items()}), tmp_path / "p")
    _, error = until_error(tmp_path / "p", num_tags=1)
    assert (error.batch, error.row, error.column) == (None, rows - 2, bad)


# ---- learning rates


def test_learning_rates_that_change_inside_a_frame_are_an_error_across_batches_too():
    def batch(*rates):
        rates = pa.array([[r] for r in rates], pa.list_(pa.float32()))
        return with_steps(*[(1, 7)] * len(rates)).append_column("learning_rates", rates)

    assert [f.learning_rates for f in frames_of([batch(0.5, 0.5), batch(0.5)], num_tags=1)] == [(0.5,)]
    for batches, place in (([batch(0.5, 0.25)], (0, 1)), ([batch(0.5), batch(0.5, 0.25)], (1, 1))):
        frames, error = until_error(batches, num_tags=1)
        assert frames == []
        assert "learning rates change inside a frame: [0.5], then [0.25]" in str(error)
        assert (error.batch, error.row, error.column) == (*place, "learning_rates")


# ---- the end of a stream


@pytest.mark.parametrize("end", [True, False])
def test_the_last_frame_is_withheld_where_the_stream_does_not_end(end):
    content = stream([with_steps((1, 7), (2, 8)), with_steps((3, 8))], end)
    if end:
        assert contents_of(frames_of(io.BytesIO(content))) == [([1], 7, None), ([2, 3], 8, None)]
        return
    frames, error = until_error(io.BytesIO(content))
    assert contents_of(frames) == [([1], 7, None)]
    assert isinstance(error, TruncatedInputError)
    assert "no end marker after batch 1" in str(error)
    accepted = frames_of(io.BytesIO(content), allow_missing_end=True)
    assert contents_of(accepted) == [([1], 7, None), ([2, 3], 8, None)]


# ---- merging


def test_merging_goes_by_step_then_by_the_order_of_the_sources(tmp_path):
    logs = {"b": [(1, 5), (2, 7), (3, 9)], "a": [(4, 5), (5, 5), (6, 8), (7, 9)], "c": []}
    for name, rows in logs.items():
        (tmp_path / name).write_bytes(stream([with_steps(*rows)]))
    sources = [tmp_path / name for name in logs]
    wanted = [([1], 5), ([4, 5], 5), ([2], 7), ([6], 8), ([3], 9), ([7], 9)]
    reader = reader_of(sources, merge="step")
    assert [(i, s) for i, s, _ in contents_of(reader)] == wanted
    assert reader.fraction() == 1.0


@given(st.lists(st.lists(st.integers(0, 6), max_size=8).map(sorted), min_size=1, max_size=4))
@settings(deadline=None, max_examples=40)
def test_merging_keeps_every_frame_and_the_order_of_each_source(logs):
    rows = [[(n, step) for step in dict.fromkeys(steps)] for n, steps in enumerate(logs)]
    sources = [pa.table(with_steps(*r)) for r in rows]
    wanted = sorted((step, n) for n, r in enumerate(rows) for _, step in r)
    assert [(f.local_step, ids_of(f)[0]) for f in reader_of(sources, merge="step")] == wanted


def test_merging_an_unsorted_source_is_an_error_that_names_it(tmp_path):
    (tmp_path / "good").write_bytes(stream([with_steps((1, 1), (2, 9))]))
    (tmp_path / "bad").write_bytes(stream([with_steps((3, 2), (4, 1))]))
    frames, error = until_error([tmp_path / "good", tmp_path / "bad"], merge="step")
    assert contents_of(frames) == [([1], 1, None), ([3], 2, None)]
    assert f"{tmp_path / 'bad'}: --merge step needs sources sorted by step: 1 comes after 2" in str(error)


def test_merging_needs_a_step_in_every_source():
    frames, error = until_error(
        [pa.table(with_steps((1, 1))), pa.table(without_steps(2))], merge="step", contribution_rows=1
    )
    assert frames == []
    assert "--merge step needs a step column in every source" in str(error)
