"""Which rows wait and which have changed: against sets, and a saver that copies between any steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.checkpoint.contents import rows_of
from penstock.checkpoint.folder import Folder
from penstock.checkpoint.rows import RowMarks
from penstock.checkpoint.saver import Contents, Saved, Saver

ROWS = 30
IDS = st.sets(st.integers(0, ROWS - 1)).map(lambda ids: np.array(sorted(ids, key=lambda n: n * 7 % ROWS), np.int64))
STEPS = st.lists(st.tuples(st.sampled_from(["change", "change all", "begin", "begin all", "among", "next"]), IDS))


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_marks_are_two_sets(steps):
    marks, changed, waiting = RowMarks(ROWS), set(), set()
    for what, ids in steps:
        if what == "change":
            marks.change(ids)
            changed |= set(ids.tolist())
        elif what == "change all":
            marks.change_all()
            changed = set(range(ROWS))
        elif what.startswith("begin"):
            marks.begin(what == "begin all")
            waiting, changed = set(range(ROWS)) if what == "begin all" else changed, set()
        else:
            wanted = sorted(waiting & set(ids.tolist())) if what == "among" else sorted(waiting)[: len(ids) + 1]
            got = marks.take_among(ids) if what == "among" else marks.take_next(len(ids) + 1)
            assert got.tolist() == wanted
            waiting -= set(wanted)
        assert marks.num_waiting == len(waiting)


class Numbers:
    """A table in numpy, whose copies are given late, as a device's are."""

    num_parts = 2

    def __init__(self):
        self.values = np.zeros((ROWS, 2, 3), np.float32)

    def copy_rows(self, ids):
        copy = self.values[ids]
        return lambda: copy


@pytest.fixture(autouse=True)
def tiny_blocks(monkeypatch):
    monkeypatch.setattr("penstock.checkpoint.saver.BLOCK_BYTES", 4 * 4 * 2 * 3)
    monkeypatch.setattr("penstock.checkpoint.saver.SHARE", 1e9)


ACTIONS = st.lists(st.one_of(IDS, st.sampled_from(["begin", "advance", "unknown"])), max_size=30)


@given(ACTIONS, st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_commit_is_the_table_as_it_was_when_it_began_whatever_is_done_meanwhile(
    tmp_path_factory, actions, all_change
):
    folder, table, began = Folder(tmp_path_factory.mktemp("saver")), Numbers(), {}
    saver = Saver(folder, {"t": Saved(table, ROWS, 3, all_change)}, lambda: Contents({}, []))
    saver.open(keep=100)
    number = 0
    for action in [*actions, "begin"]:
        if isinstance(action, str) and action == "begin":
            saver.begin()
            number += 1
            began[number] = table.values.copy()
        elif isinstance(action, str) and action == "advance":
            saver.advance()
        elif isinstance(action, str):
            saver.before_any_change()
            table.values += 1
        else:
            saver.before_step({"t": [action]})
            table.values[slice(None) if all_change else action] += 1
    saver.finish()
    saver.close()
    assert folder.numbers() == list(began)
    for number, wanted in began.items():
        found = np.full_like(wanted, np.nan)
        for _, ids, values in rows_of(folder, folder.load(number)):
            found[ids] = values
        assert found.tobytes() == wanted.tobytes()
