"""Where a frame begins and ends, what is in it, and which frames come out before an error."""

import io
import itertools

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InputError, TruncatedInputError
from penstock.io.reader import FrameReader, ReadOptions

SIZES = {"user": (100, 1), "item": (100, 1)}
GRADIENT = pa.list_(pa.float32(), 1)
END = {"penstock.end": ""}


def batch_of(*rows, **roles):
    """Rows (id, step, contributor) as a batch; the columns named in roles are kept. The gradient is the id."""
    rows = [(*row, None, None)[:3] for row in rows]
    columns = {
        "id": pa.array([i for i, _, _ in rows], pa.int64()),
        "gradient": pa.array([None if i is None else [i] for i, _, _ in rows], GRADIENT),
        "step": pa.array([s for _, s, _ in rows], pa.int64()),
        "contributor": pa.array([c for _, _, c in rows], pa.utf8()),
    }
    return pa.RecordBatch.from_pydict({n: c for n, c in columns.items() if roles.get(n, n in ("id", "gradient"))})


def with_steps(*rows, contributor=False):
    return batch_of(*rows, step=True, contributor=contributor)


def bare(*ids):
    return batch_of(*((i,) for i in ids))


def reader_of(source, **options):
    return FrameReader(source, ReadOptions(**({"sizes": {"user": (100, 1)}} | options)))


def frames_of(source, **options):
    return list(reader_of(source, **options))


def told(frames):
    """[(ids, step, contributor), …]: what a frame is, whatever its blocks."""
    return [(ids_of(frame), frame.local_step, frame.contributor) for frame in frames]


def ids_of(frame):
    return [int(i) for blocks in frame.rows.values() for block in blocks for i in block.ids]


def until_error(source, **options):
    """The frames before the error, and the error."""
    frames = []

    def collect():
        for frame in reader_of(source, **options):
            frames.append(frame)

    with pytest.raises(InputError) as caught:
        collect()
    return frames, caught.value


def stream_of(*batches, metadata=(), end=True):
    sink = io.BytesIO()
    writer = pa.ipc.new_stream(sink, batches[0].schema)
    for batch, extra in itertools.zip_longest(batches, metadata):
        writer.write_batch(batch, custom_metadata=extra) if extra else writer.write_batch(batch)
    writer.close()
    return sink.getvalue() if end else sink.getvalue()[:-8]


# ---- where a frame ends


def test_without_step_every_record_batch_is_a_frame_and_empty_ones_are_none():
    batches = [bare(), bare(1, 2), bare(), bare(3), bare(4), bare()]
    assert told(frames_of(batches)) == [([1, 2], None, None), ([3], None, None), ([4], None, None)]


def test_with_step_a_frame_is_the_longest_run_across_batches():
    batches = [with_steps((1, 7), (2, 7)), with_steps(), with_steps((3, 7), (4, 8)), with_steps((5, 7))]
    assert told(frames_of(batches)) == [([1, 2, 3], 7, None), ([4], 8, None), ([5], 7, None)]


def test_a_change_of_contributor_ends_a_frame_too():
    rows = [(1, 7, "a"), (2, 7, "b"), (3, 7, "b"), (4, 7, None), (5, 7, None), (6, 8, None)]
    wanted = [([1], 7, "a"), ([2, 3], 7, "b"), ([4, 5], 7, None), ([6], 8, None)]
    assert told(frames_of([with_steps(*rows, contributor=True)])) == wanted
    assert told(frames_of([with_steps(row, contributor=True) for row in rows])) == wanted


def test_without_step_both_the_batch_and_a_change_of_contributor_end_a_frame():
    batches = [batch_of((1, None, "a"), (2, None, "b"), contributor=True), batch_of((3, None, "b"), contributor=True)]
    assert told(frames_of(batches)) == [([1], None, "a"), ([2], None, "b"), ([3], None, "b")]


def test_the_end_of_a_source_ends_its_frame_even_where_the_next_goes_on_with_the_key(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(stream_of(with_steps((1, 7))))
    assert told(frames_of([tmp_path / "a", tmp_path / "b"])) == [([1], 7, None)] * 2


def test_a_directory_is_one_source_and_a_frame_may_go_from_file_to_file(tmp_path):
    (tmp_path / "2.arrows").write_bytes(stream_of(with_steps((2, 7), (3, 8))))
    (tmp_path / "1.arrows").write_bytes(stream_of(with_steps((1, 7))))
    pq.write_table(pa.table(with_steps((4, 8), (5, 9))), tmp_path / "3.parquet")
    assert told(frames_of(tmp_path)) == [([1, 2], 7, None), ([3, 4], 8, None), ([5], 9, None)]


def test_penstock_end_closes_a_frame_at_once():
    rows = [with_steps((1, 7)), with_steps((2, 7)), with_steps(), with_steps((3, 7)), with_steps()]
    stream = stream_of(*rows, metadata=[END, None, END, None, None])
    assert told(frames_of(io.BytesIO(stream))) == [([1], 7, None), ([2], 7, None), ([3], 7, None)]
    reader = pa.ipc.open_stream(stream)
    assert told(frames_of(reader)) == [([1], 7, None), ([2], 7, None), ([3], 7, None)]


def test_penstock_end_gives_the_frame_before_anything_more_is_asked_of_the_stream():
    class Live(io.BytesIO):
        def read(self, size=-1):
            assert self.tell() < len(first), "read beyond the frame's last batch"
            return super().read(size)

        def seekable(self):
            return False

    first = stream_of(with_steps((1, 7)), metadata=[END], end=False)
    reader = iter(reader_of(Live(first + b"more")))
    assert told([next(reader)]) == [([1], 7, None)]
    reader.close()


def test_penstock_end_in_a_file(tmp_path):
    with pa.ipc.new_file(tmp_path / "a", with_steps().schema) as writer:
        writer.write_batch(with_steps((1, 7)), custom_metadata=END)
        writer.write_batch(with_steps((2, 7)))
    assert told(frames_of(tmp_path / "a")) == [([1], 7, None), ([2], 7, None)]


# ---- contribution_rows


def containers(tmp_path, batches):
    """The same rows in every container, as (name, source)."""
    table = pa.Table.from_batches(batches)
    (tmp_path / "s.arrows").write_bytes(stream_of(*batches))
    with pa.ipc.new_file(tmp_path / "f.arrow", table.schema) as writer:
        writer.write_table(table)
    pq.write_table(table, tmp_path / "p.parquet", row_group_size=3)
    return [
        ("stream", tmp_path / "s.arrows"),
        ("file", tmp_path / "f.arrow"),
        ("parquet", tmp_path / "p.parquet"),
        ("table", table),
        ("reader", table.to_reader()),
        ("batches", batches),
        ("generator", (b for b in batches)),
    ]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 100])
def test_contribution_rows_cuts_every_container_alike_whatever_its_batches(tmp_path, num_rows):
    batches = [bare(0, 1), bare(2), bare(), bare(3, 4, 5, 6)]
    wanted = [(list(range(at, min(at + num_rows, 7))), None, None) for at in range(0, 7, num_rows)]
    for name, source in containers(tmp_path, batches):
        assert told(frames_of(source, contribution_rows=num_rows)) == wanted, name


def test_contribution_rows_and_step_both_cut():
    batches = [with_steps((1, 7), (2, 7)), with_steps((3, 7), (4, 8), (5, 8))]
    wanted = [([1, 2], 7, None), ([3], 7, None), ([4, 5], 8, None)]
    assert told(frames_of(batches, contribution_rows=2)) == wanted


def test_contribution_rows_goes_from_file_to_file_of_a_directory_but_not_from_source_to_source(tmp_path):
    for name in ("1", "2"):
        pq.write_table(pa.table(bare(1, 2, 3)), tmp_path / name)
    assert [f.num_rows for f in frames_of(tmp_path, contribution_rows=2)] == [2, 2, 2]
    assert [f.num_rows for f in frames_of([tmp_path / "1", tmp_path / "2"], contribution_rows=2)] == [2, 1, 2, 1]


class Capsule:
    """As a query engine hands out its results."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize("kind", ["parquet", "table", "capsule"])
def test_where_batches_mean_nothing_frames_need_a_step_or_a_number_of_rows(tmp_path, kind):
    def source_of(batch):
        table = pa.table(batch)
        pq.write_table(table, tmp_path / "p")
        return {"parquet": tmp_path / "p", "table": table, "capsule": Capsule(table)}[kind]

    frames, error = until_error(source_of(bare(1, 2)))
    assert frames == []
    assert "without a 'step' column its frames are unknown: give --contribution-rows N" in str(error)
    named = with_steps((1, 7)).rename_columns(["id", "gradient", "steps"])
    assert "did you mean --column step=steps?" in str(until_error(source_of(named))[1])
    assert told(frames_of(source_of(with_steps((1, 7), (2, 8))))) == [([1], 7, None), ([2], 8, None)]
    assert frames_of(source_of(bare())) == []


# ---- re-chunking

keyed_rows = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 2), st.sampled_from([None, "a", "b"])), max_size=25)


def chopped(batch, cuts):
    edges = [0, *sorted(min(c, batch.num_rows) for c in cuts), batch.num_rows]
    return [batch.slice(a, b - a) for a, b in itertools.pairwise(edges)]


def ids_by_table(frame):
    return {table: np.concatenate([b.ids for b in blocks]).tolist() for table, blocks in frame.rows.items()}


def gradients(block):
    return block.grads if block.which is None else block.grads[block.which]


def contents(frames):
    """All that is in a frame, whatever its blocks."""
    grads = [{t: np.concatenate(list(map(gradients, blocks))).tolist() for t, blocks in f.rows.items()} for f in frames]
    rest = [(f.local_step, f.contributor, f.num_rows, f.dropped, f.learning_rates) for f in frames]
    return list(zip(map(ids_by_table, frames), grads, rest, strict=True))


def wide(rows):
    """Rows with table and learning rates beside the key; the rates follow the step."""
    batch = with_steps(*rows, contributor=True)
    batch = batch.append_column("table", pa.array([["user", "item"][i % 2] for i, _, _ in rows], pa.utf8()))
    return batch.append_column("learning_rates", pa.array([[s / 4] for _, s, _ in rows], pa.list_(pa.float32())))


@given(keyed_rows, st.lists(st.integers(0, 25), max_size=6), st.sampled_from([None, 1, 2, 5]))
@settings(deadline=None)
def test_any_chopping_of_a_stream_with_steps_gives_the_same_frames(rows, cuts, limit):
    batch = wide(rows)
    options = {"sizes": SIZES, "num_tags": 1, "contribution_rows": limit}
    wanted = []  # by a plain loop
    for row in rows:
        if not wanted or wanted[-1][-1][1:] != row[1:] or len(wanted[-1]) == limit:
            wanted.append([])
        wanted[-1].append(row)
    whole = frames_of([batch], **options)
    assert [(f.local_step, f.contributor, f.num_rows) for f in whole] == [(*w[0][1:], len(w)) for w in wanted]
    assert [ids_by_table(f) for f in whole] == [
        {
            t: [i for i, _, _ in w if i % 2 == n]
            for n, t in enumerate(("user", "item"))
            if any(i % 2 == n for i, _, _ in w)
        }
        for w in wanted
    ]
    assert contents(frames_of(chopped(batch, cuts), **options)) == contents(whole)
    assert contents(frames_of(io.BytesIO(stream_of(*chopped(batch, cuts))), **options)) == contents(whole)


@given(
    keyed_rows.filter(bool),
    st.lists(st.integers(0, 25), max_size=6),
    st.integers(0, 24),
    st.sampled_from(["id", "step", "table", "learning_rates"]),
    st.sampled_from([None, 2]),
)
@settings(deadline=None)
def test_the_frames_before_a_bad_row_come_out_whatever_the_chopping(rows, cuts, at, column, limit):
    batch, at = wide(rows), at % len(rows)
    keep = pa.array([n != at for n in range(len(rows))])
    spoilt = pa.compute.if_else(keep, batch[column], pa.scalar(None, batch[column].type))
    batch = batch.set_column(batch.schema.get_field_index(column), column, spoilt)
    options = {"sizes": SIZES, "num_tags": 1, "contribution_rows": limit}
    frames, error = until_error([batch], **options)
    assert (error.row, error.column) == (at, column)
    clean = contents(frames_of([wide(rows)], **options))
    ends = np.cumsum([rest[2] for *_, rest in clean]).tolist()
    num_whole = sum(end <= at for end in ends)
    if column == "step" and at in ends and clean[num_whole - 1][-1][2] != limit:
        num_whole -= 1  # the row without a step might have gone on with that frame
    assert contents(frames) == clean[:num_whole]
    for source in (chopped(batch, cuts), io.BytesIO(stream_of(*chopped(batch, cuts)))):
        frames, other = until_error(source, **options)
        assert contents(frames) == clean[:num_whole]
        assert (other.column, other.reason) == (error.column, error.reason)


# ---- bad rows


def test_an_error_stops_before_the_frame_and_the_whole_frames_before_it_are_out():
    batch = with_steps((1, 7), (2, 8), (3, 8), (100, 9), (4, 9))
    frames, error = until_error([batch])
    assert told(frames) == [([1], 7, None), ([2, 3], 8, None)]
    assert (error.batch, error.row, error.column, error.reason) == (0, 3, "id", "id_out_of_range")


def test_dropped_rows_are_counted_by_reason_and_the_frame_stays():
    batches = [with_steps((1, 7), (100, 7), (None, 7)), with_steps((101, 7), (2, 7), (3, 8)), with_steps((100, 9))]
    reader = reader_of(batches, on_bad_row="drop")
    frames = list(reader)
    assert told(frames) == [([1, 2], 7, None), ([3], 8, None), ([], 9, None)]
    assert [f.num_rows for f in frames] == [5, 1, 1]
    assert [f.dropped for f in frames] == [{"id_out_of_range": 2, "id_null": 1}, {}, {"id_out_of_range": 1}]
    assert frames[2].rows == {}
    first = reader.first_bad["id_out_of_range"]
    assert first == (
        "<batches>: batch 0, row 1, column 'id': expected 0 <= id < 100 (vocabulary_size of table 'user'), "
        "got 100 [id_out_of_range]"
    )


def test_dropped_rows_count_towards_contribution_rows():
    frames = frames_of([bare(1, 100, 2, 3)], contribution_rows=2, on_bad_row="drop")
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


def test_learning_rates_may_change_from_frame_to_frame():
    rates = pa.array([[0.5, 1.0], [0.25, 1.0]], pa.list_(pa.float32()))
    batch = with_steps((1, 7), (2, 8)).append_column("learning_rates", rates)
    assert [f.learning_rates for f in frames_of([batch], num_tags=2)] == [(0.5, 1.0), (0.25, 1.0)]


# ---- the end of a stream


@pytest.mark.parametrize("end", [True, False])
def test_the_last_frame_is_withheld_where_the_stream_does_not_end(end):
    stream = stream_of(with_steps((1, 7), (2, 8)), with_steps((3, 8)), end=end)
    if end:
        assert told(frames_of(io.BytesIO(stream))) == [([1], 7, None), ([2, 3], 8, None)]
        return
    frames, error = until_error(io.BytesIO(stream))
    assert told(frames) == [([1], 7, None)]
    assert isinstance(error, TruncatedInputError)
    assert "no end marker after batch 1" in str(error)
    accepted = frames_of(io.BytesIO(stream), allow_missing_end=True)
    assert told(accepted) == [([1], 7, None), ([2, 3], 8, None)]


# ---- merging


def test_merging_goes_by_step_then_by_the_order_of_the_sources(tmp_path):
    logs = {"b": [(1, 5), (2, 7), (3, 9)], "a": [(4, 5), (5, 5), (6, 8), (7, 9)], "c": []}
    for name, rows in logs.items():
        (tmp_path / name).write_bytes(stream_of(with_steps(*rows)))
    sources = [tmp_path / name for name in logs]
    wanted = [([1], 5), ([4, 5], 5), ([2], 7), ([6], 8), ([3], 9), ([7], 9)]
    reader = reader_of(sources, merge="step")
    assert [(i, s) for i, s, _ in told(reader)] == wanted
    assert reader.fraction() == 1.0


@given(st.lists(st.lists(st.integers(0, 6), max_size=8).map(sorted), min_size=1, max_size=4))
@settings(deadline=None, max_examples=40)
def test_merging_keeps_every_frame_and_the_order_of_each_source(logs):
    rows = [[(n, step) for step in dict.fromkeys(steps)] for n, steps in enumerate(logs)]
    sources = [pa.table(with_steps(*r)) for r in rows]
    wanted = sorted((step, n) for n, r in enumerate(rows) for _, step in r)
    assert [(f.local_step, ids_of(f)[0]) for f in reader_of(sources, merge="step")] == wanted


def test_merging_an_unsorted_source_is_an_error_that_names_it(tmp_path):
    (tmp_path / "good").write_bytes(stream_of(with_steps((1, 1), (2, 9))))
    (tmp_path / "bad").write_bytes(stream_of(with_steps((3, 2), (4, 1))))
    frames, error = until_error([tmp_path / "good", tmp_path / "bad"], merge="step")
    assert told(frames) == [([1], 1, None), ([3], 2, None)]
    assert f"{tmp_path / 'bad'}: --merge step needs sources sorted by step: 1 comes after 2" in str(error)


def test_merging_needs_a_step_in_every_source():
    frames, error = until_error([pa.table(with_steps((1, 1))), pa.table(bare(2))], merge="step", contribution_rows=1)
    assert frames == []
    assert "--merge step needs a step column in every source" in str(error)
