"""Which rows wait and which have changed: against sets, and a saver that copies between any steps."""

import numpy as np
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.checkpoint.arrays import rows_of
from penstock.checkpoint.dirty_rows import RowMarks, TouchedRows
from penstock.checkpoint.incremental import CommitContents, Saved, Saver
from penstock.checkpoint.source_positions import Positions
from penstock.checkpoint.store import Folder
from penstock.checkpoint.writer import Ring
from penstock.core.observers import Pushed
from penstock.model.frames import NO_FRAMES, Coalesced, SummedArrays
from penstock.model.stats import Counters
from penstock.pyx import dirty_bits as kernel

ROWS = 30
IDS = st.sets(st.integers(0, ROWS - 1)).map(lambda ids: np.array(sorted(ids, key=lambda n: n * 7 % ROWS), np.int64))


def test_rows_that_several_steps_of_a_run_touched_are_marked_once(monkeypatch):
    monkeypatch.setattr("penstock.checkpoint.dirty_rows.MERGE_IDS", 4)
    touched = TouchedRows(ROWS)
    touched.add(np.array([3, 1, 3, 1, 3, 2]))
    assert (touched.num_ids, touched.num_changes) == (3, 6)
    assert touched.take().tolist() == [1, 2, 3]


@given(st.lists(st.tuples(st.sampled_from(["step", "load all", "take"]), IDS)), st.sampled_from([1, 8, 1 << 16]))
@settings(max_examples=200, deadline=None)
def test_a_commit_and_a_delta_hold_the_same_rows(changes, merge_ids):
    """Both keep track of the rows changed since the last one, each in its own way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.checkpoint.dirty_rows.MERGE_IDS", merge_ids)
        marks, touched = RowMarks(ROWS), TouchedRows(ROWS)
        for name, ids in [*changes, ("take", None)]:
            if name == "step":
                marks.change(ids)
                touched.add(ids)
            elif name == "load all":
                marks.change_all()
                touched.add_all()
            else:
                marks.begin(everything=False)
                assert marks.take_next(ROWS).tolist() == (list(touched.take()) if touched.num_ids else [])


MARKS = st.lists(st.integers(0, 3), min_size=1, max_size=60).map(lambda marks: np.array(marks, np.uint8))


@given(MARKS, st.data())
def test_changed_and_waiting_rows_equal_the_twin(marks, data):
    ids = np.array(data.draw(st.lists(st.integers(0, len(marks) - 1), unique=True)), np.int64)
    wanted, wanted_waiting = reference.change_marks(marks, ids)
    waiting = np.empty(len(ids), np.int64)
    actual = kernel.change(marks, ids, waiting)
    assert marks.tolist() == wanted.tolist()
    assert waiting[:actual].tolist() == wanted_waiting.tolist()


@given(MARKS, st.integers(1, 70), st.data())
def test_taken_rows_equal_the_twin_for_any_budget(marks, stride, data):
    cursor, most = data.draw(st.integers(0, len(marks))), data.draw(st.integers(0, 70))
    wanted, wanted_taken = reference.take_marked(marks, cursor, stride, most)
    taken, looked_at = [], data.draw(st.integers(1, 70))
    while cursor < len(marks) and len(taken) < most:
        out = np.empty(most - len(taken), np.int64)
        actual, cursor = kernel.take(marks, cursor, stride, looked_at, out)
        taken += out[:actual].tolist()
    assert taken == wanted_taken.tolist()
    assert marks.tolist() == wanted.tolist()


@pytest.mark.parametrize("row", [-1, 9, -(2**63), 2**63 - 1])
def test_ids_outside_the_table_mark_no_row(row):
    marks, ids = np.full(9, kernel.WAITING, np.uint8), np.array([3, row], np.int64)
    with pytest.raises(IndexError, match=f"id {row} of a table of 9 rows"):
        kernel.change(marks, ids, np.empty(2, np.int64))
    assert (marks == kernel.WAITING).all()


# The fields that a manifest must have, as of a run without tables.
MANIFEST = {
    "global_step": 0,
    "changed_step": 0,
    "clock_offset": 0,
    "tables": [],
    "programs": {},
    "num_required": 1,
    "reduction": "mean",
    "seed": 0,
    "learning_rates": None,
    "positions": Positions().get_state(),
    "counters": Counters().get_state(),
    "gate": {"global_step": 0, "num_accumulated": 0},
    "pipeline": {},
    "config": "",
    "python": [],
}


class Numbers:
    """A table in numpy, whose copies are given late, as a device's are."""

    part_dims = (3, 1)

    def __init__(self, stride, copies_any_number):
        self.values = np.zeros((ROWS, 4), np.float32)
        self.stride, self.copies_any_number = stride, copies_any_number
        self.backend = self

    def copy_rows(self, ids, out):
        copy = self.values[ids]

        def wait():
            out[...] = copy[: len(out)]

        return wait


@pytest.fixture(autouse=True)
def tiny_blocks(monkeypatch):
    monkeypatch.setattr("penstock.checkpoint.incremental.BLOCK_BYTES", 4 * 4 * 4)
    monkeypatch.setattr("penstock.checkpoint.incremental.ROOM_BYTES", 12 * 4 * 4)
    monkeypatch.setattr("penstock.checkpoint.incremental.COPYING_FRACTION", 1e9)


ACTIONS = st.lists(st.one_of(IDS, st.sampled_from(["begin", "advance", "idle", "unknown"])), max_size=30)


@given(ACTIONS, st.booleans(), st.sampled_from([(1, False), (1, True), (7, True), (1024, True)]))
@settings(max_examples=60, deadline=None)
def test_a_commit_is_the_table_as_it_was_when_it_began_whatever_is_done_meanwhile(
    tmp_path_factory, actions, all_change, kind
):
    folder, table, began = Folder(tmp_path_factory.mktemp("saver")), Numbers(*kind), {}
    saver = Saver(
        folder, {"t": Saved(table, ROWS, all_change)}, lambda: CommitContents({**MANIFEST, "global_step": number}, [])
    )
    saver.open(keep=100)
    number = 0
    for action in [*actions, "begin"]:
        if isinstance(action, str) and action == "begin":
            saver.begin()
            number += 1
            began[number] = table.values.copy()
        elif isinstance(action, str) and action in ("advance", "idle"):
            saver.advance(idle=action == "idle")
        elif isinstance(action, str):
            saver.before_load()
            table.values += 1
        else:
            summed = SummedArrays(action, np.zeros((len(action), 3)))
            saver.before_step({"t": [Coalesced((summed,))]})
            table.values[slice(None) if all_change else action] += 1
            saver.pushed(Pushed(NO_FRAMES, 0, 0, None, seconds=[0.0], changed={"t": [summed]}))
    saver.finish()
    saver.close()
    assert folder.numbers() == list(began)
    for number, wanted in began.items():
        actual = np.full_like(wanted, np.nan)
        for _, ids, parts in rows_of(folder, folder.load(number)):
            actual[ids] = np.concatenate(parts, axis=1)
        assert actual.tobytes() == wanted.tobytes()


# ---- memory that is lent


@given(st.lists(st.one_of(st.integers(1, 12), st.none()), max_size=80))
def test_buffers_in_use_never_overlap_and_are_reused_after_release(steps):
    ring, lent = Ring(np.zeros(12, np.float32)), []
    for size in steps:
        if size is None and lent:
            ring.take_back()
            piece, value = lent.pop(0)
            assert (piece == value).all()
        elif size is not None:
            piece = ring.lend(size)
            assert piece is not None or lent
            if piece is not None:
                lent.append((piece, float(len(steps) + size)))
                piece[:] = lent[-1][1]
        assert 4 * sum(len(piece) for piece, _ in lent) <= ring.lent_bytes <= 4 * 12
