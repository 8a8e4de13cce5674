"""A run of frames through gate, sums and update in native code, against its twin in NumPy."""

import numpy as np
import pytest
import reference
from accumulate import drain, int64
from frame_way import DIM, MOST, Way, frames_of
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pyx.frame_steps import SMALL_ROWS

LIMITS = ("most", "most_steps", "most_changes")


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.lists(st.integers(0, 9), min_size=12, max_size=12),
    st.none() | st.tuples(st.integers(0, 60), st.sampled_from(["id", "value", "negative", "sum"])),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.tuples(st.integers(1, 14), st.integers(1, 14), st.integers(1, 60)),
    st.sets(st.integers(1, 11)),
)
@settings(deadline=None)
def test_any_run_equals_its_twin(sizes, steps, bad, num_required, mean, devices, known, limits, cuts):
    way = Way(num_required, mean, devices, known)
    twin = reference.FrameSteps(way.table(), num_required, mean)
    ids, grads, bounds = frames_of(sizes)
    if bad is not None and bad[0] < len(ids):
        row, kind = bad
        grads[row, 1] = np.nan if kind == "value" else grads[row, 1]
        grads[ids == ids[row], 0] = 3e38 if kind == "sum" else grads[ids == ids[row], 0]
        ids[row] = {"id": 1 << 40, "negative": -1}.get(kind, ids[row])
    cuts = sorted(int(bounds[cut]) for cut in cuts if cut < len(sizes))
    steps, first = np.array(steps[: len(sizes)]), 0
    while first < len(sizes):
        num = way.take(ids, grads, bounds, steps, first=first, cuts=cuts, **dict(zip(LIMITS, limits, strict=True)))
        assert num == twin.take(ids, grads, bounds, steps, first, *limits, 0.5)
        assert way.steps.ids.tolist() == twin.ids
        assert len(way.steps.seconds) == way.steps.num_steps
        assert (way.gate.global_step, way.gate.num_accumulated) == (twin.step, twin.num_accumulated)
        assert way.table().tobytes() == twin.table.tobytes()
        first += num or 1  # a stale or a bad frame, or the gate may not open
    held_ids, held_sums, _ = drain(way.sums)
    assert held_ids.tolist() == list(twin.sums)
    assert [row.tobytes() for row in held_sums] == [row.tobytes() for row in twin.sums.values()]


@pytest.mark.parametrize("known", [True, False])
def test_distinct_ids_are_counted_over_steps_and_without_a_bad_frame(known):
    way = Way(known=known)
    grads = np.ones((6, DIM), np.float32)
    grads[4] = np.inf
    bounds = int64([0, 2, 4, 6])
    assert way.take(int64([1, 2, 2, 3, 7, 8]), grads, bounds, None) == 2
    assert (way.sums.num_distinct, way.sums.num_rows) == (3, 4)
    way.sums.start_counting()
    assert way.take(int64([1, 2, 2, 3, 7, 8]), np.ones((6, DIM), np.float32), bounds, None) == 3
    assert (way.sums.num_distinct, way.sums.num_rows) == (5, 6)


def test_the_counters_of_a_map_are_renumbered_in_time():
    way = Way()
    way.sums.map._give_out(2**32 - 10)
    ids, grads, bounds = frames_of([3] * 8)
    twin = reference.FrameSteps(way.table(), 1, False)
    assert way.take(ids, grads, bounds, None) == twin.take(ids, grads, bounds, None, 0, MOST, MOST, MOST, 0.5) == 8
    assert way.table().tobytes() == twin.table.tobytes()


def test_the_slots_of_hashed_ids_are_renumbered_in_time():
    way = Way(known=False, vocabulary=1000)
    way.sums._give_out(2**32 - 400)
    ids, grads, bounds = frames_of([50] * 40, vocabulary=1000)
    twin = reference.FrameSteps(way.table(), 1, False)
    assert way.take(ids, grads, bounds, None) == twin.take(ids, grads, bounds, None, 0, MOST, MOST, MOST, 0.5) == 40
    assert way.table().tobytes() == twin.table.tobytes()


def test_a_large_frame_and_a_large_step_are_left_to_other_paths():
    ids, grads, bounds = frames_of([1, SMALL_ROWS + 1, 1])
    assert Way().take(ids, grads, bounds, None) == 1
    assert Way().take(ids, grads, bounds, None, first=1) == 0
    assert Way(num_required=3).take(*frames_of([SMALL_ROWS // 2] * 3), None) == 2


def test_a_step_at_which_the_gate_may_not_open_is_left_to_other_paths():
    way = Way(num_required=2)
    way.gate.steps = range(2)
    assert way.take(*frames_of([1] * 9), None) == 5  # the fifth frame waits, the sixth would open the gate
    assert (way.gate.global_step, way.gate.num_accumulated) == (2, 1)


@pytest.mark.parametrize(
    ("bounds", "steps", "message"),
    [
        ([0, 2, 2], None, "expected ascending bounds, got 2 and 2"),
        ([-1, 2], None, "expected ascending bounds, got -1 and 2"),
        ([0, 2, 4], None, "expected rows 2 to 4 in one block, got 3 rows"),
        ([0], None, "expected one of 0 frames"),
        ([0, 2], [1, 2], "expected one of 1 frames with a step each"),
    ],
)
def test_wrong_bounds_are_an_error_and_nothing_has_changed(bounds, steps, message):
    way = Way()
    ids, grads, _ = frames_of([3])
    with pytest.raises(ValueError, match=message):
        way.take(ids, grads, int64(bounds), None if steps is None else int64(steps))
    assert (way.gate.num_accumulated, way.gate.global_step, len(way.sums), way.sums.num_rows) == (0, 0, 0, 0)
    assert way.take(ids, grads, int64([0, 3]), None) == 1


def test_a_frame_over_two_blocks_is_an_error_and_nothing_has_changed():
    way = Way()
    with pytest.raises(ValueError, match="expected rows 1 to 3 in one block, got 2 rows"):
        way.take(*frames_of([1, 2, 1]), None, cuts=[2])
    assert way.gate.global_step == 0
    assert way.take(*frames_of([1, 2, 1]), None, cuts=[1, 1]) == 3  # a block without rows is none


def test_rows_of_another_dim_are_an_error_and_nothing_has_changed():
    way = Way()
    with pytest.raises(ValueError, match=f"expected float32 of dim {DIM}, got {DIM + 1}"):
        way.take(int64([1]), np.ones((1, DIM + 1), np.float32), int64([0, 1]), None)
    assert way.gate.global_step == 0


def test_a_gate_that_only_takers_open_is_refused():
    with pytest.raises(ValueError, match="expected a gate that contributions open"):
        Way(num_required=None)
