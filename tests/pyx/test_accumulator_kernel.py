"""The accumulator equals its NumPy twin bit for bit, and each of its edges has a test."""

import numpy as np
import pytest
import reference
from accumulate import add, drain, int64
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.model.frames import Rows
from penstock.pyx.accumulator import Accumulator
from penstock.pyx.frame_accumulate import Intake, bytes_held

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def frame_lists(draw, dtype):
    dim = draw(st.integers(1, 9))
    frames = []
    for _ in range(draw(st.integers(0, 4))):
        ids = draw(st.lists(st.integers(0, 12), max_size=30))
        frames.append((int64(ids), draw(hnp.arrays(dtype, (len(ids), dim), elements=finite))))
    return dim, frames


PARTS = st.sampled_from([1, 2, 4])


@given(st.data(), st.booleans(), PARTS, st.integers(1, 3), st.sampled_from([None, 13, 2**30]))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_coalescing_equals_the_twin_bit_for_bit(dtype, data, mean, parts, threads, vocabulary):
    dim, frames = data.draw(frame_lists(dtype))
    frames = [(ids * 2**26 if vocabulary == 2**30 else ids, grads) for ids, grads in frames]
    accumulator = Accumulator(dim, dtype, vocabulary)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = reference.coalesce(frames, dim, mean, dtype)
        for number, (ids, grads) in enumerate(frames):
            assert add(accumulator, [(ids, grads)], number, parts, threads, strict=False)
        if vocabulary is not None:
            assert accumulator.num_distinct == len(wanted[0])
        got = drain(accumulator, mean, ascending=parts > 1)
    order = np.argsort(wanted[0]) if parts > 1 else slice(None)  # else in order of first appearance
    assert got[0].tolist() == wanted[0][order].tolist()
    assert got[1].tobytes() == wanted[1][order].tobytes()
    assert got[2].tolist() == wanted[2][order].tolist()


@given(st.integers(1, 40), st.integers(0, 3000), PARTS, st.data())
@settings(max_examples=40)
def test_every_dim_and_many_rows_equal_the_twin(dim, num_rows, parts, data):
    """Vectors of 8, 4 and 1, chunks of 1024, rows picked out of order, blocks of one frame."""
    rng = np.random.default_rng(data.draw(st.integers(0, 100)))
    ids, grads = rng.integers(0, 500, num_rows), rng.standard_normal((num_rows + 7, dim), np.float32)
    which = rng.permutation(num_rows + 7)[:num_rows]
    position = num_rows // 3
    blocks = [(ids[:position], grads[:position]), (ids[position:], grads, which[position:])]
    accumulator = Accumulator(dim, vocabulary_size=500)
    assert add(accumulator, blocks, 0, parts)
    got = drain(accumulator, ascending=True)
    wanted = reference.coalesce([(ids, np.concatenate([grads[:position], grads[which[position:]]]))], dim)
    order = np.argsort(wanted[0])
    assert got[0].tolist() == wanted[0][order].tolist()
    assert got[1].tobytes() == wanted[1][order].tobytes()


@given(st.lists(st.tuples(st.lists(st.integers(0, 30), max_size=20), st.sampled_from("addundrainrun")), max_size=20))
@settings(max_examples=200)
@pytest.mark.parametrize("vocabulary", [31, 2**30])
def test_distinct_ids_are_those_added_in_this_run_whatever_was_drained_taken_back_or_held(vocabulary, acts):
    accumulator, seen, held = Accumulator(1, vocabulary_size=vocabulary), set(), set()
    for number, (ids, act) in enumerate(acts):
        block = (int64(ids), np.ones((len(ids), 1), np.float32))
        if act == "u" and not held:
            intake = Intake()
            intake.begin([accumulator], [[Rows(*block)]], number, [2])
            intake.add()
            intake.work()
            intake.undo()
        elif act == "r":
            accumulator.start_counting()
            seen = set()
        elif act == "i":
            accumulator.drain()
            held = set()
        else:
            add(accumulator, [block], number, 2)
            seen |= set(ids)
            held |= set(ids)
        assert accumulator.num_distinct == len(seen)
        assert len(accumulator) == len(held)


def test_rows_drained_by_ascending_id_are_never_written_again_and_a_bulge_is_given_back():
    accumulator = Accumulator(4)
    add(accumulator, [(np.arange(10_000)[::-1].copy(), np.ones((10_000, 4), np.float32))], 0)
    bulge = bytes_held([accumulator])
    ids, sums, counts = drain(accumulator, ascending=True)
    for _ in range(20):  # what is large is kept for a while
        add(accumulator, [(np.arange(10), np.full((10, 4), 7, np.float32))], 0)
        drain(accumulator)
    add(accumulator, [(np.arange(10), np.full((10, 4), 9, np.float32))], 0)
    assert (ids == np.arange(10_000)).all()
    assert (sums == 1).all()
    assert (counts == 1).all()
    assert drain(accumulator, ascending=True)[1].tolist() == [[9.0] * 4] * 10
    assert bytes_held([accumulator]) <= bulge - 10_000 * 4 * 4


@pytest.mark.parametrize("wrong", [{"sums": np.zeros((2, 3), np.float32)}, {"counts": [1]}, {"ids": [5, 5]}])
def test_a_state_that_does_not_fit_leaves_the_sums_held(wrong):
    accumulator = Accumulator(4, vocabulary_size=10)
    add(accumulator, [(int64([1, 2]), np.ones((2, 4), np.float32))], 0)
    state = accumulator.get_state()
    with pytest.raises(ValueError, match=r"expected different ids|same shape"):
        accumulator.set_state(state | wrong)
    assert (len(accumulator), accumulator.get_state()["sums"].tolist()) == (2, state["sums"].tolist())


def test_another_dtype_is_refused_and_nothing_is_counted():
    for dtype, other in ((np.float32, np.float64), (np.float64, np.float32)):
        accumulator = Accumulator(2, dtype)
        with pytest.raises(ValueError, match=rf"grads {np.dtype(dtype)} .*, {np.dtype(other)} \(1, 2\)$"):
            add(accumulator, [(int64([1]), np.ones((1, 2), other))], 0)
        assert len(accumulator) == 0
    with pytest.raises(ValueError, match="dtype must be float32 or float64, got float16"):
        Accumulator(2, np.float16)
