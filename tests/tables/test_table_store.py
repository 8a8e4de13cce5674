"""What a table holds behind the gate, out and in again as plain arrays."""

import numpy as np
import pytest

from penstock.frames import Rows
from penstock.pipeline import TableStore
from penstock.pyx.frame_accumulate import Intake


def add(store, ids, frame):
    rng = np.random.default_rng(frame)
    rows = Rows(np.array(ids, np.int64), rng.standard_normal((len(ids), 3), np.float32))
    intake = Intake()
    intake.begin([store.accumulator], [[rows]], frame)
    intake.add()
    assert intake.work()
    intake.end()
    store.end()


def drained(store):
    return [(ids.tolist(), sums.tobytes()) for rows in store.drain() for ids, sums in rows.parts]


@pytest.mark.parametrize("accumulate", [True, False])
def test_a_restored_store_continues_with_the_same_sums(accumulate):
    store, other = (TableStore(100, 3, accumulate=accumulate, mean=True) for _ in range(2))
    add(other, [7, 7], 1)  # is dropped
    add(store, [5, 1, 5], 1)
    add(store, [1, 9], 2)
    other.set_state(store.get_state())
    for each in (store, other):
        add(each, [9, 5, 5], 3)
    assert drained(other) == drained(store)
    assert drained(other) == drained(store) == []


def test_an_empty_store_has_a_state_too():
    store, other = (TableStore(100, 3, accumulate=True, mean=True) for _ in range(2))
    other.set_state(store.get_state())
    assert drained(other) == []


def test_a_state_is_a_copy():
    store = TableStore(100, 3, accumulate=True, mean=False)
    add(store, [5], 1)
    state = store.get_state()
    before = {key: array.copy() for key, array in state.items()}
    add(store, [5], 2)
    assert all((state[key] == before[key]).all() for key in state)


def test_rows_accumulated_before_a_restore_are_not_counted_as_read():
    store, other = (TableStore(100, 3, accumulate=True, mean=True) for _ in range(2))
    add(store, [5, 1], 1)
    other.set_state(store.get_state())
    assert (other.accumulator.num_rows, other.accumulator.num_distinct) == (0, 0)
    add(other, [5], 2)
    assert (other.accumulator.num_rows, other.accumulator.num_distinct) == (1, 1)
