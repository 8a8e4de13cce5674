"""Sums have the bits of their NumPy twin on every instruction set, and whichever threads find and fold the rows."""

import numpy as np
import pytest
import reference
from accumulate import add, blocks_of, drain
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.frames import Rows, SummedArrays
from penstock.model.overflows import overflows_of
from penstock.pyx.accumulator import Accumulator, targets
from penstock.pyx.frame_accumulate import Intake

LARGE = [1.0, -2e30, 4e37, -4e37, 1.7e38, -1.7e38, 3.4e38, -3.4e38]


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("vocabulary", [None, 3000, 2**30])
@given(st.integers(1, 140), st.integers(0, 2**32 - 1), st.sampled_from([np.float32, np.float64]))
@settings(max_examples=20, deadline=None)
def test_every_instruction_set_gives_the_bits_of_the_twin(target, vocabulary, dim, seed, dtype):
    rng = np.random.default_rng(seed)
    accumulator, frames = Accumulator(dim, dtype, vocabulary, target=target), []
    for number in range(2):
        ids = rng.integers(0, 3000, rng.integers(0, 2500)) * (2**18 if vocabulary == 2**30 else 1)
        ids = ids * (2**50 + 1) - 2**62 if vocabulary is None else ids
        grads = rng.choice(np.array([-0.0, 0.0, 1e-40, 0.1, -3.3, 1e30], dtype), (len(ids), dim))
        frames.append((ids, grads))
        assert add(accumulator, [(ids, grads)], number)
    for got, wanted in zip(drain(accumulator, mean=True), reference.coalesce(frames, dim, True, dtype), strict=True):
        assert got.tobytes() == wanted.tobytes()


def test_the_sets_are_those_of_the_machine_and_others_are_refused():
    assert targets()[-1] == "baseline"
    with pytest.raises(ValueError, match="not in list"):
        Accumulator(1, target="mmx")


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_every_instruction_set_finds_a_value_that_is_not_finite_in_every_column(target, bad):
    for dim in (1, 4, 13, 31):
        for column in range(dim):
            accumulator, grads = Accumulator(dim, vocabulary_size=9, target=target), np.ones((9, dim), np.float32)
            grads[8, column] = bad
            assert not add(accumulator, [(np.arange(9), grads)], 0)
            assert len(accumulator) == 0


@pytest.mark.parametrize("target", targets())
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_instruction_set_finds_a_sum_that_is_not_finite_in_every_column(target, dtype):
    for dim in (1, 4, 13, 31):
        for column in range(dim):
            accumulator, grads = Accumulator(dim, dtype, 9, target=target), np.ones((9, dim), dtype)
            grads[[3, 8], column] = -0.6 * np.finfo(dtype).max
            assert add(accumulator, [(np.arange(9), grads)], 0)
            accumulator.drain()
            assert not add(accumulator, [(np.arange(9) % 5, grads)], 1)
            assert len(accumulator) == 0


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(LARGE)), max_size=6), max_size=4),
    st.sampled_from([np.float32, np.float64]),
    st.booleans(),
)
@settings(deadline=None)
def test_a_frame_that_looks_harmless_never_overflows_and_the_rows_that_do_are_those_of_the_twin(frames, dtype, gained):
    accumulator, held = Accumulator(2, dtype), {}
    scale = np.finfo(dtype).max / np.finfo(np.float32).max
    for number, frame in enumerate(frames):
        ids = np.array([row_id for row_id, _ in frame], np.int64)
        grads = np.array([[1.0, value] for _, value in frame]).reshape(len(ids), 2).astype(np.float32).astype(dtype)
        grads *= dtype(scale)
        gains = np.full(len(ids), 0.75, np.float32) if gained and dtype == np.float32 else None
        rows = grads if gains is None else grads * gains[:, None]
        after = dict(held)
        refused = reference.overflowing_rows(after, ids, rows)
        sums = SummedArrays(np.array(list(held), np.int64), np.array(list(held.values()), dtype).reshape(-1, 2))
        assert overflows_of([Rows(ids, grads, None, gains)], [sums])[0].tolist() == refused.tolist()
        intake, block = Intake(), (ids, grads, None, gains)
        intake.begin([accumulator], [blocks_of(block)], number)
        intake.check(2)
        assert intake.work()
        harmless = not intake.may_overflow
        intake.cancel()
        if harmless:
            assert not refused.any()
        if not refused.any():
            assert add(accumulator, [block], number)
            held = after


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("vocabulary", [None, 40_000, 2**30])
@pytest.mark.parametrize("dim", [1, 16, 70])
def test_threads_that_take_turns_at_a_frame_change_no_bit(dim, vocabulary, parts):
    """Many chunks of several blocks, one of them of picked rows with gains, in two frames."""
    rng = np.random.default_rng(dim)
    frames = []
    for _ in range(2):
        ids = (rng.zipf(1.2, 60_000) % 40_000).astype(np.int64) * (2**14 if vocabulary == 2**30 else 1)
        grads, which = rng.standard_normal((60_000, dim), np.float32), rng.integers(0, 60_000, 10_000)
        gains = rng.standard_normal(10_000).astype(np.float32)
        frames.append([(ids[:50_000], grads[:50_000]), (ids[50_000:], grads, which, gains)])
    actual = []
    for threads in (1, 2, 3, 4):
        accumulator = Accumulator(dim, vocabulary_size=vocabulary)
        for number, blocks in enumerate(frames):
            assert add(accumulator, blocks, number, parts, threads)
        actual.append([array.tobytes() for array in drain(accumulator, mean=True)])
    assert actual[1:] == actual[:1] * 3


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("position", [0, 30_000, 59_999])
@pytest.mark.parametrize("bad", ["id", "value"])
def test_a_bad_row_stops_all_threads_and_leaves_nothing(threads, position, bad):
    accumulator = Accumulator(8, vocabulary_size=50_000)
    ids, grads = np.arange(60_000) % 50_000, np.ones((60_000, 8), np.float32)
    if bad == "id":
        ids[position] = 50_000
    else:
        grads[position, 7] = np.nan
    for parts in (1, 2):
        assert not add(accumulator, [(ids, grads)], 0, parts, threads)
        assert len(accumulator) == accumulator.num_distinct == 0
    assert add(accumulator, [(np.arange(9), np.ones((9, 8), np.float32))], 0)
    assert accumulator.num_distinct == 9


def test_ids_without_columns_are_counted_and_restored():
    accumulator, restored = (Accumulator(0, vocabulary_size=9, count_rows=True) for _ in range(2))
    assert add(accumulator, [(np.array([4, 2, 4]), np.empty((3, 0), np.float32))], 0, threads=2)
    restored.set_state(accumulator.get_state())
    (sums,) = restored.sums()
    assert (sums.ids.tolist(), sums.rows.tolist(), sums.sums.shape) == ([4, 2], [2, 1], (2, 0))


@pytest.mark.parametrize(("vocabulary", "left"), [(20, 45), (2**30, 200)], ids=["dense", "hashed"])
def test_indices_and_slots_are_renumbered_before_they_exceed_32_bits(vocabulary, left):
    rng = np.random.default_rng(0)
    accumulators = [Accumulator(1, vocabulary_size=vocabulary) for _ in range(2)]
    for number in range(15):
        if number == 3:
            (accumulators[0].map if vocabulary == 20 else accumulators[0])._give_out(2**32 - left)
        ids, grads = rng.integers(0, 20, 15), rng.standard_normal((15, 1), np.float32)
        for accumulator in accumulators:
            add(accumulator, [(ids, grads)], number)
        drained = [drain(accumulator) for accumulator in accumulators if number % 3 == 2]
        assert len({(ids.tobytes(), sums.tobytes()) for ids, sums, _ in drained}) <= 1
    assert vocabulary == 20 or accumulators[0].num_distinct == accumulators[1].num_distinct == 20
