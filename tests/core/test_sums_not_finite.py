"""Rows at which the sum of an id leaves the finite range, through the paths by which frames enter an engine."""

import re
from functools import partial
from itertools import pairwise

import engines
import numpy as np
import pyarrow as pa
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
import penstock.core.engine_core
import penstock.core.pipeline

RATE = 2.0**-10
VALUES = [1.0, -2e30, 4e37, 1.7e38, -1.7e38, 3.4e38, -3.4e38]
# Frames of (id, value) rows; the first value of every gradient is 1, so that every row counts.
FRAMES = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(VALUES)), min_size=1, max_size=7), min_size=1, max_size=5
)


engine_of = partial(engines.engine_of, ps.SGD(RATE), rows=8, initializer=ps.Constant(1.0))


def log_of(frames, cuts=(), tables=None):
    """A stream of frames by step, each above every global step, in batches that end after the rows ``cuts``."""
    rows = [(row_id, value, 1000 + step) for step, frame in enumerate(frames) for row_id, value in frame]
    columns = {
        "id": pa.array([row_id for row_id, _, _ in rows], pa.int64()),
        "gradient": pa.array([[1.0, value] for _, value, _ in rows], pa.list_(pa.float32(), 2)),
        "step": pa.array([step for _, _, step in rows], pa.int64()),
    }
    if tables is not None:
        columns["table"] = pa.array(tables)
    batch = pa.RecordBatch.from_pydict(columns)
    bounds = [0, *sorted(cut for cut in set(cuts) if cut < len(rows)), len(rows)]
    return pa.Table.from_batches([batch.slice(a, b - a) for a, b in pairwise(bounds)])


def expected(frames, num_required, mean, drops):
    """Table, dropped rows as (frame, row), and the first bad row if it ends the run; else None."""
    table, sums, counts, dropped, num = np.ones((8, 2), np.float32), {}, {}, [], 0
    for number, frame in enumerate(frames):
        ids, after = np.array([row_id for row_id, _ in frame]), dict(sums)
        refused = reference.overflowing_rows(after, ids, np.array([[1.0, value] for _, value in frame], np.float32))
        if refused.any() and not drops:
            return table, dropped, (number, int(refused.argmax()))
        dropped += [(number, row) for row in np.flatnonzero(refused).tolist()]
        sums, num = after, num + 1
        for row_id in set(ids[~refused].tolist()):
            counts[row_id] = counts.get(row_id, 0) + 1
        if num == num_required:
            for row_id, total in sums.items():
                table[row_id] -= np.float32(RATE) * (total / np.float32(counts[row_id]) if mean else total)
            sums, counts, num = {}, {}, 0
    return table, dropped, None


@given(
    FRAMES,
    st.integers(1, 3),
    st.sampled_from(["mean", "sum"]),
    st.booleans(),
    st.sets(st.integers(1, 30)),
    st.sampled_from([1, 3]),
    st.sampled_from([0, 4096]),
)
@settings(deadline=None, max_examples=60)
def test_the_same_rows_are_refused_for_any_batches_threads_and_gates(
    frames, num_required, reduction, drops, cuts, threads, small
):
    table, dropped, first = expected(frames, num_required, reduction == "mean", drops)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(penstock.core.engine_core, "SMALL_ROWS", small)
        patch.setattr(penstock.core.pipeline, "ROWS_WORTH_SPLITTING", 2 if threads > 1 else 1 << 14)
        engine = engine_of(num_required=num_required, reduction=reduction, threads=threads)
        run = {"on_bad_row": "drop" if drops else "error", "flush": False}
        if first is None:
            report = engine.run(log_of(frames, cuts), **run)
            assert report.dropped == ({"sum_not_finite": len(dropped)} if dropped else {})
            assert report.rows == sum(map(len, frames))
        else:
            number, row = first
            row_id = frames[number][row][0]
            with pytest.raises(ps.InputError, match=f"of id {row_id} of table 't' is not") as error:
                engine.run(log_of(frames, cuts), **run)
            number_in_log = sum(map(len, frames[:number])) + row
            starts = [0, *sorted(cut for cut in cuts if cut < sum(map(len, frames)))]
            batch = max(i for i, start in enumerate(starts) if start <= number_in_log)
            place = (error.value.batch, error.value.row, error.value.reason)
            assert place == (batch, number_in_log - starts[batch], "sum_not_finite")
            assert engine.global_step * num_required + engine.gate.num_accumulated == number
    assert engine.table("t").tobytes() == table.tobytes()


HUGE = [[(0, 1.0), (1, 3e38), (1, 1e38), (1, -2e38), (2, 1.0)], [(1, 1.0)], [(3, 3e38), (3, 3e38)]]


def test_quarantined_rows_are_those_of_the_source_and_a_killed_run_resumes_to_the_same_file(tmp_path):
    files = []
    for parts in ([5], [1, 5]):  # how many frames are applied by which run
        folder = tmp_path / str(len(parts))
        options = {"on_bad_row": f"quarantine={folder}/bad.arrow", "checkpoint": folder / "ck"}
        for number, limit in enumerate(parts):
            engine = ps.Engine.restore(folder / "ck") if number else engine_of()
            engine.run(log_of(HUGE, {2, 4}), resume=number > 0, limit=limit, **options)
        files.append(pa.ipc.open_file(folder / "bad.arrow").read_all().to_pylist())
        assert engine.table("t").tobytes() == expected(HUGE, 1, True, True)[0].tobytes()
    assert files[0] == files[1]
    got = [(row["batch"], row["row_index"], row["id"], row["origin_step"], row["reason"]) for row in files[0]]
    assert got == [(1, 0, 1, 1000, "sum_not_finite"), (2, 3, 3, 1002, "sum_not_finite")]


def test_a_refused_frame_leaves_sums_gate_and_tables_as_they_were():
    engine = engine_of(("t", "u"), num_required=2, reduction="sum")
    big = np.full((1, 2), 3e38, np.float32)
    assert engine.apply({"t": ([1], big), "u": ([2], big)})
    with pytest.raises(ps.InputError, match="id 2 of table 'u' is not") as error:
        engine.apply({"t": ([1], -big), "u": ([5, 2], np.concatenate([big, big]))})
    assert (error.value.row, error.value.reason, engine.gate.num_accumulated) == (1, "sum_not_finite", 1)
    assert engine.apply({"t": ([1], -big)})
    assert engine.table("t").tolist() == np.ones((8, 2)).tolist()
    assert engine.table("u")[2].tolist() == [np.float32(1) - np.float32(RATE) * np.float32(3e38)] * 2


def test_rows_of_several_tables_are_summed_by_table_and_id():
    names = ["t", "u", "t", "u", "u"]
    frames = [[(1, 3e38), (1, 3e38), (1, 3e38), (1, -3e38), (1, 1.0)]]
    engine = engine_of(("t", "u"))
    report = engine.run(log_of(frames, {1, 3}, names), on_bad_row="drop")
    assert (report.dropped, report.tables["t"].rows, report.tables["u"].rows) == ({"sum_not_finite": 1}, 1, 3)
    with pytest.raises(ps.InputError, match=r"batch 1, row 1, column 'gradient': .* of id 1 of table 't' is not"):
        engine_of(("t", "u")).run(log_of(frames, {1, 3}, names))


@pytest.mark.parametrize("share", [None, (0, 2)])
def test_a_stale_frame_adds_to_no_sum(share):
    engine = engine_of(share=share)
    engine.gate.set_global_step(2000)
    report = engine.run(log_of(HUGE))
    assert (report.stale, report.dropped) == (3, {})


@pytest.mark.parametrize("num_required", [1, 2])
def test_a_share_stops_where_the_whole_engine_does_or_names_the_row(num_required):
    whole = engine_of(num_required=num_required)
    with pytest.raises(ps.InputError) as error:
        whole.run(log_of(HUGE))
    for rank in range(2):
        share = engine_of(num_required=num_required, share=(rank, 2))
        if num_required == 1 or rank == 0:  # of several frames only the share that has the id sees the sum
            with pytest.raises(ps.InputError, match=re.escape(str(error.value))):
                share.run(log_of(HUGE))
            assert share.global_step == whole.global_step
    share = engine_of(num_required=num_required, share=(0, 2))
    if num_required == 1:
        assert share.run(log_of(HUGE), on_bad_row="drop").dropped == {"sum_not_finite": 2}
    else:
        with pytest.raises(ps.InputError, match="of id 1 of table 't' is not"):
            share.run(log_of(HUGE), on_bad_row="drop")
