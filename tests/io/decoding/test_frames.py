"""Where a frame begins and ends, what is in it, and which frames come out before an error."""

import io
import itertools

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from framed import END, SIZES, batch_of, contents_of, frames_of, reader_of, until_error, with_steps, without_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from ipc import stream

from penstock.base.errors import UsageError

# ---- where a frame ends


def test_without_step_every_record_batch_is_a_frame_and_empty_ones_are_none():
    batches = [without_steps(*ids) for ids in ([], [1, 2], [], [3], [4], [])]
    assert contents_of(frames_of(batches)) == [([1, 2], None, None), ([3], None, None), ([4], None, None)]


def test_without_step_both_the_batch_and_a_change_of_contributor_end_a_frame():
    batches = [batch_of((1, None, "a"), (2, None, "b"), contributor=True), batch_of((3, None, "b"), contributor=True)]
    assert contents_of(frames_of(batches)) == [([1], None, "a"), ([2], None, "b"), ([3], None, "b")]


def test_the_end_of_a_source_ends_its_frame_even_if_the_next_has_the_same_key(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(stream([with_steps((1, 7))]))
    assert contents_of(frames_of([tmp_path / "a", tmp_path / "b"])) == [([1], 7, None)] * 2


def test_a_directory_is_one_source_and_a_frame_may_go_from_file_to_file(tmp_path):
    (tmp_path / "2.arrows").write_bytes(stream([with_steps((2, 7), (3, 8))]))
    (tmp_path / "1.arrows").write_bytes(stream([with_steps((1, 7))]))
    pq.write_table(pa.table(with_steps((4, 8), (5, 9))), tmp_path / "3.parquet")
    assert contents_of(frames_of(tmp_path)) == [([1, 2], 7, None), ([3, 4], 8, None), ([5], 9, None)]


def test_penstock_end_closes_a_frame_at_once():
    rows = [with_steps((1, 7)), with_steps((2, 7)), with_steps(), with_steps((3, 7)), with_steps()]
    content = stream(rows, metadata=[END, None, END])
    assert contents_of(frames_of(io.BytesIO(content))) == [([1], 7, None), ([2], 7, None), ([3], 7, None)]
    reader = pa.ipc.open_stream(content)
    assert contents_of(frames_of(reader)) == [([1], 7, None), ([2], 7, None), ([3], 7, None)]


def test_penstock_end_gives_the_frame_before_anything_more_is_asked_of_the_stream():
    class Live(io.BytesIO):
        def read(self, size=-1):
            assert self.tell() < len(first), "read beyond the frame's last batch"
            return super().read(size)

        def seekable(self):
            return False

    first = stream([with_steps((1, 7))], metadata=[END], end=False)
    reader = iter(reader_of(Live(first + b"more")))
    assert contents_of([next(reader)]) == [([1], 7, None)]
    reader.close()


def test_penstock_end_in_a_file(tmp_path):
    content = stream([with_steps((1, 7)), with_steps((2, 7))], metadata=[END], make=pa.ipc.new_file)
    (tmp_path / "a").write_bytes(content)
    assert contents_of(frames_of(tmp_path / "a")) == [([1], 7, None), ([2], 7, None)]


# ---- contribution_rows


def containers(tmp_path, batches):
    """The same rows in every container, as (name, source)."""
    table = pa.Table.from_batches(batches)
    (tmp_path / "s.arrows").write_bytes(stream(batches))
    (tmp_path / "f.arrow").write_bytes(stream(batches, make=pa.ipc.new_file))
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
    batches = [without_steps(0, 1), without_steps(2), without_steps(), without_steps(3, 4, 5, 6)]
    wanted = [(list(range(start, min(start + num_rows, 7))), None, None) for start in range(0, 7, num_rows)]
    for name, source in containers(tmp_path, batches):
        assert contents_of(frames_of(source, contribution_rows=num_rows)) == wanted, name


def test_contribution_rows_goes_from_file_to_file_of_a_directory_but_not_from_source_to_source(tmp_path):
    for name in ("1", "2"):
        pq.write_table(pa.table(without_steps(1, 2, 3)), tmp_path / name)
    assert [f.num_rows for f in frames_of(tmp_path, contribution_rows=2)] == [2, 2, 2]
    assert [f.num_rows for f in frames_of([tmp_path / "1", tmp_path / "2"], contribution_rows=2)] == [2, 1, 2, 1]


class Capsule:
    """As a query engine hands out its results."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


@pytest.mark.parametrize("kind", ["parquet", "IPC file", "table", "capsule"])
def test_tables_without_batches_need_a_step_or_a_number_of_rows(tmp_path, kind):
    def source_of(batch):
        table = pa.table(batch)
        pq.write_table(table, tmp_path / "p")
        (tmp_path / "f").write_bytes(stream([batch], make=pa.ipc.new_file))
        files = {"parquet": tmp_path / "p", "IPC file": tmp_path / "f"}
        return {**files, "table": table, "capsule": Capsule(table)}[kind]

    frames, error = until_error(source_of(without_steps(1, 2)))
    assert frames == []
    assert "no column for the role 'step' (the stream has: id: int64, gradient: fixed_size_list" in str(error)
    assert "its batches are arbitrary, so frames need 'step', or --contribution-rows N" in str(error)
    named = with_steps((1, 7)).rename_columns(["id", "gradient", "steps"])
    assert "; try --column step=steps" in str(until_error(source_of(named))[1])
    assert contents_of(frames_of(source_of(with_steps((1, 7), (2, 8))))) == [([1], 7, None), ([2], 8, None)]
    assert frames_of(source_of(without_steps())) == []


def test_a_record_batch_is_a_frame_on_request_except_in_parquet(tmp_path):
    wanted = [([0, 1], None, None), ([2], None, None), ([3], None, None)]
    for name, source in containers(tmp_path, [without_steps(0, 1), without_steps(2), without_steps(3)]):
        if name == "parquet":
            frames, error = until_error(source, contribution_rows="batch")
            assert frames == []
            assert "a Parquet file has no record batches; give --contribution-rows N" in str(error)
        else:
            assert contents_of(frames_of(source, contribution_rows="batch")) == wanted, name
    stepping = [with_steps((1, 7), (2, 8)), with_steps((3, 8))]
    assert contents_of(frames_of(stepping, contribution_rows="batch")) == [
        ([1], 7, None),
        ([2], 8, None),
        ([3], 8, None),
    ]
    with pytest.raises(UsageError, match="expected a whole number of at least 1, or 'batch', got 'batches'"):
        frames_of(stepping, contribution_rows="batches")


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
    """Rows with table and learning rates next to the key; the rates follow the step."""
    batch = with_steps(*rows, contributor=True)
    batch = batch.append_column("table", pa.array([["user", "item"][i % 2] for i, _, _ in rows], pa.utf8()))
    return batch.append_column("learning_rates", pa.array([[s / 4] for _, s, _ in rows], pa.list_(pa.float32())))


@given(keyed_rows, st.lists(st.integers(0, 25), max_size=6), st.sampled_from([None, 1, 2, 5]))
@settings(deadline=None)
def test_any_batching_of_a_stream_with_steps_gives_the_same_frames(rows, cuts, limit):
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
    assert contents(frames_of(io.BytesIO(stream(chopped(batch, cuts))), **options)) == contents(whole)


@given(
    keyed_rows.filter(bool),
    st.lists(st.integers(0, 25), max_size=6),
    st.integers(0, 24),
    st.sampled_from(["id", "step", "table", "learning_rates"]),
    st.sampled_from([None, 2]),
)
@settings(deadline=None)
def test_frames_before_a_bad_row_are_read_for_any_batching(rows, cuts, position, column, limit):
    batch, position = wide(rows), position % len(rows)
    keep = pa.array([n != position for n in range(len(rows))])
    spoilt = pa.compute.if_else(keep, batch[column], pa.scalar(None, batch[column].type))
    batch = batch.set_column(batch.schema.get_field_index(column), column, spoilt)
    options = {"sizes": SIZES, "num_tags": 1, "contribution_rows": limit}
    frames, error = until_error([batch], **options)
    assert (error.row, error.column) == (position, column)
    clean = contents(frames_of([wide(rows)], **options))
    ends = np.cumsum([rest[2] for *_, rest in clean]).tolist()
    num_whole = sum(end <= position for end in ends)
    if column == "step" and position in ends and clean[num_whole - 1][-1][2] != limit:
        num_whole -= 1  # the row without a step might have continued that frame
    assert contents(frames) == clean[:num_whole]
    for source in (chopped(batch, cuts), io.BytesIO(stream(chopped(batch, cuts)))):
        frames, other = until_error(source, **options)
        assert contents(frames) == clean[:num_whole]
        assert (other.column, other.reason) == (error.column, error.reason)
