"""Every kernel equals its NumPy twin bit for bit, and the edges of each have a test of their own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.pyx import accumulator as accumulator_module
from penstock.pyx import reference
from penstock.pyx.accumulator import Accumulator
from penstock.pyx.id_table import IdTable
from penstock.pyx.partition import locate, pad, place

INT64_MAX = 2**63 - 1
EDGE_IDS = [0, -1, 1, INT64_MAX, -(2**63), 2**32, 2**32 - 1, 2**62]
id_arrays = st.lists(st.one_of(st.sampled_from(EDGE_IDS), st.integers(0, 40), st.integers(0, INT64_MAX)), max_size=200)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def int64(values):
    return np.array(values, np.int64)


def bits(array):
    return np.asarray(array, np.float32).view(np.uint32).tolist()


# ---- id table


@given(id_arrays)
def test_indices_follow_first_appearance(ids):
    table = IdTable()
    assert table.insert(int64(ids)).tolist() == reference.index(int64(ids)).tolist()
    assert len(table) == len(set(ids))


@given(id_arrays, id_arrays)
def test_find_knows_exactly_what_was_inserted(ids, others):
    table = IdTable()
    known = dict(zip(ids, table.insert(int64(ids)).tolist(), strict=True))
    assert table.find(int64(others)).tolist() == [known.get(i, -1) for i in others]


def test_every_int64_may_be_an_id():
    table = IdTable()
    assert table.insert(int64(EDGE_IDS)).tolist() == list(range(len(EDGE_IDS)))
    assert table.find(int64(EDGE_IDS)).tolist() == list(range(len(EDGE_IDS)))


def test_growth_at_the_exact_load_limit():
    table = IdTable()
    limit = table.capacity // 2
    table.insert(np.arange(limit))
    assert table.capacity == 2 * limit
    table.insert(int64([limit]))
    assert table.capacity == 4 * limit
    assert table.find(np.arange(limit + 2)).tolist() == [*range(limit + 1), -1]


def test_ids_that_differ_only_in_their_high_bits_do_not_pile_up():
    ids = np.arange(50_000, dtype=np.int64) << 46
    assert IdTable().insert(ids).tolist() == list(range(50_000))  # quadratic probing time would never end


def test_ids_of_another_type_are_refused_not_wrapped():
    with pytest.raises(ValueError, match="Buffer dtype mismatch"):
        IdTable().insert(np.array([2**63], np.uint64))


# ---- accumulator


@st.composite
def frame_lists(draw, dtype=np.float32):
    dim = draw(st.integers(1, 9))
    frames = []
    for _ in range(draw(st.integers(0, 4))):
        ids = draw(st.lists(st.integers(0, 12), max_size=30))
        frames.append((int64(ids), draw(hnp.arrays(dtype, (len(ids), dim), elements=finite))))
    return dim, frames


@given(frame_lists(), st.booleans(), st.integers(1, 4))
def test_coalescing_equals_the_twin_bit_for_bit(dim_and_frames, mean, parts):
    dim, frames = dim_and_frames
    accumulator = Accumulator(dim)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = reference.coalesce(frames, dim, mean)
    for number, (ids, grads) in enumerate(frames):
        order = accumulator.resolve(ids, number)
        for part in range(parts):
            accumulator.fold(order, grads, part, parts)
    got = accumulator.drain(mean)
    assert got[0].tolist() == wanted[0].tolist()
    assert bits(got[1]) == bits(wanted[1])
    assert got[2].tolist() == wanted[2].tolist()


@given(frame_lists(np.float64), st.booleans(), st.integers(1, 4))
def test_coalescing_in_float64_and_by_ascending_id_equals_the_twin(dim_and_frames, mean, parts):
    dim, frames = dim_and_frames
    accumulator = Accumulator(dim, "float64")
    ids, sums, counts = reference.coalesce(frames, dim, mean, np.float64)
    for number, (some, grads) in enumerate(frames):
        order = accumulator.resolve(some, number)
        for part in range(parts):
            accumulator.fold(order, grads, part, parts)
    got, ascending = accumulator.drain(mean, ascending=True), np.argsort(ids)
    assert got[1].dtype == np.float64
    for a, b in zip(got, (ids, sums, counts), strict=True):
        assert a.tobytes() == b[ascending].tobytes()


@given(frame_lists(), st.data())
def test_cutting_a_frame_into_batches_changes_nothing(dim_and_frames, data):
    dim, frames = dim_and_frames
    whole, cut = Accumulator(dim), Accumulator(dim)
    for number, (ids, grads) in enumerate(frames):
        whole.add(ids, grads, number)
        at = data.draw(st.integers(0, len(ids)))
        cut.add(ids[:at], grads[:at], number)
        cut.add(ids[at:], grads[at:], number)
    for a, b in zip(whole.drain(), cut.drain(), strict=True):
        assert a.tobytes() == b.tobytes()


def test_first_row_is_copied_so_minus_zero_survives():
    accumulator = Accumulator(1)
    accumulator.add(int64([7]), np.array([[-0.0]], np.float32), 0)
    assert np.signbit(accumulator.drain()[1][0, 0])


def test_mean_divides_by_frames_that_held_the_row_not_by_rows():
    accumulator = Accumulator(1)
    accumulator.add(int64([1, 1, 2]), np.array([[1], [2], [8]], np.float32), 0)
    accumulator.add(int64([1]), np.array([[3]], np.float32), 1)
    ids, sums, counts = accumulator.drain(mean=True)
    assert dict(zip(ids.tolist(), sums[:, 0].tolist(), strict=True)) == {1: 3.0, 2: 8.0}
    assert counts.tolist() == [2, 1]


@pytest.mark.parametrize("ids", [[], [5], [5] * 1000, list(range(1000))], ids=["empty", "one", "equal", "distinct"])
def test_sizes_at_the_edges(ids):
    accumulator = Accumulator(3)
    grads = np.ones((len(ids), 3), np.float32)
    accumulator.add(int64(ids), grads, 0)
    wanted = reference.coalesce([(int64(ids), grads)], 3)
    for a, b in zip(accumulator.drain(), wanted, strict=True):
        assert a.tolist() == b.tolist()


def test_drained_arrays_are_never_written_again():
    accumulator = Accumulator(1)
    accumulator.add(int64([1, 2]), np.ones((2, 1), np.float32), 0)
    ids, sums, _ = accumulator.drain()
    accumulator.add(int64([3, 4]), np.full((2, 1), 9, np.float32), 1)
    assert (ids.tolist(), sums[:, 0].tolist()) == ([1, 2], [1, 1])
    assert accumulator.drain()[0].tolist() == [3, 4]


def test_rows_drained_by_ascending_id_are_never_written_again_and_a_bulge_is_given_back():
    accumulator = Accumulator(4)
    accumulator.add(np.arange(10_000)[::-1].copy(), np.ones((10_000, 4), np.float32), 0)
    ids, sums, counts = accumulator.drain(ascending=True)
    bulge = accumulator.nbytes
    accumulator.add(np.arange(10), np.full((10, 4), 9, np.float32), 0)
    assert (ids == np.arange(10_000)).all()
    assert (sums == 1).all()
    assert (counts == 1).all()
    assert accumulator.drain(ascending=True)[1].tolist() == [[9.0] * 4] * 10
    assert accumulator.nbytes <= bulge - 10_000 * 4 * 4


def test_state_taken_and_given_back_continues_the_same_sum():
    rng = np.random.default_rng(3)
    frames = [(rng.integers(0, 50, 100), rng.standard_normal((100, 4), np.float32)) for _ in range(4)]
    unbroken, first, second = Accumulator(4), Accumulator(4), Accumulator(4)
    for number, frame in enumerate(frames):
        unbroken.add(*frame, number)
        (first if number < 2 else second).add(*frame, number)
        if number == 1:
            second.set_state(first.get_state())
    for a, b in zip(unbroken.drain(True), second.drain(True), strict=True):
        assert a.tobytes() == b.tobytes()


def test_wrong_shape_is_refused_and_nothing_is_counted():
    accumulator = Accumulator(2)
    with pytest.raises(ValueError, match=r"expected shape \(3, 2\), got \(2, 2\)"):
        accumulator.add(int64([1, 2, 3]), np.ones((2, 2), np.float32), 0)
    assert len(accumulator) == 0


def test_another_dtype_is_refused_and_nothing_is_counted():
    for dtype, other in ((np.float32, np.float64), (np.float64, np.float32)):
        accumulator = Accumulator(2, dtype)
        with pytest.raises(ValueError, match=f"expected {np.dtype(dtype)}, got {np.dtype(other)}"):
            accumulator.add(int64([1]), np.ones((1, 2), other), 0)
        assert len(accumulator) == 0
    with pytest.raises(ValueError, match="dtype must be float32 or float64, got float16"):
        Accumulator(2, np.float16)


def test_where_memory_for_the_sums_fails_the_frame_leaves_nothing_behind(monkeypatch):
    def no_room(array, used, room):
        if array.ndim == 2:
            raise MemoryError
        return grown(array, used, room)

    grown = accumulator_module.grown
    accumulator, other = Accumulator(1), Accumulator(1)
    frames = [(int64([4, 5]), np.ones((2, 1), np.float32)), (int64([6, 5, 6]), np.full((3, 1), 3, np.float32))]
    for number, frame in enumerate(frames):
        monkeypatch.setattr(accumulator_module, "grown", no_room)
        with pytest.raises(MemoryError):
            accumulator.add(int64([5, 9, 5, 9, *range(10, 40)]), np.ones((34, 1), np.float32), number)
        monkeypatch.setattr(accumulator_module, "grown", grown)
        accumulator.add(*frame, number)
        other.add(*frame, number)
    for a, b in zip(accumulator.drain(), other.drain(), strict=True):
        assert a.tolist() == b.tolist()


def test_memory_held_is_told_and_given_back_by_drain():
    accumulator = Accumulator(8)
    accumulator.add(np.arange(10_000), np.ones((10_000, 8), np.float32), 0)
    before = accumulator.nbytes
    assert before >= 10_000 * (8 * 4 + 8)
    accumulator.drain()
    assert accumulator.nbytes <= before - 10_000 * (8 * 4 + 8)


# ---- partition


def test_thirteen_ids_on_five_shards_as_tensorflow_deals_them():
    ids = np.arange(13)
    shards, rows = locate(ids, 13, 5, False)
    assert shards.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4]
    assert rows.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 0, 1]
    shards, rows = locate(ids, 13, 5, True)
    assert [ids[shards == s].tolist() for s in range(5)] == [[0, 5, 10], [1, 6, 11], [2, 7, 12], [3, 8], [4, 9]]
    assert rows.tolist() == [i // 5 for i in range(13)]


@st.composite
def placements(draw):
    vocabulary_size = draw(st.integers(1, 300))
    num_shards = draw(st.integers(1, 40))
    num_owners = draw(st.integers(1, 9))
    ids = draw(st.lists(st.integers(0, vocabulary_size - 1), max_size=100))
    shape = (-(-num_shards // num_owners), -(-vocabulary_size // num_shards), num_owners)
    return int64(ids), vocabulary_size, num_shards, draw(st.booleans()), *shape


@given(placements())
def test_placing_equals_the_twin(args):
    for a, b in zip(locate(*args[:4]), reference.locate(*args[:4]), strict=True):
        assert a.tolist() == b.tolist()
    for a, b in zip(place(*args), reference.place(*args), strict=True):
        assert a.tolist() == b.tolist()


@given(placements())
def test_no_two_ids_share_a_place(args):
    _, vocabulary_size, *rest = args
    owners, rows, counts = place(np.arange(vocabulary_size), vocabulary_size, *rest)
    assert len(set(zip(owners.tolist(), rows.tolist(), strict=True))) == vocabulary_size
    assert counts.sum() == vocabulary_size
    assert rows.max() < args[4] * args[5]


@given(placements(), st.integers(1, 5), st.integers(0, 7))
@settings(max_examples=60)
def test_padding_equals_the_twin_and_keeps_rows_unique(args, dim, extra):
    ids = np.unique(args[0])
    owners, rows, counts = place(ids, *args[1:])
    grads = np.random.default_rng(0).standard_normal((len(ids), dim), np.float32)
    rows_per_owner, capacity = args[4] * args[5], int(counts.max(initial=0)) + extra
    got = pad(owners, rows, grads, args[6], capacity, rows_per_owner)
    wanted = reference.pad(owners, rows, grads, args[6], capacity, rows_per_owner)
    assert got[0].tolist() == wanted[0].tolist()
    assert bits(got[1]) == bits(wanted[1])
    assert all(len(set(owner)) == capacity for owner in got[0].tolist())


@pytest.mark.parametrize("bad", [-1, 13, INT64_MAX])
def test_an_id_outside_the_vocabulary_is_an_error_never_another_row(bad):
    with pytest.raises(ValueError, match=rf"expected 0 <= id < 13, got {bad}"):
        place(int64([3, bad]), 13, 5, False, 5, 3, 1)


def test_an_owner_over_capacity_is_an_error_not_an_overrun():
    owners, rows, _ = place(np.arange(13), 13, 5, False, 5, 3, 1)
    with pytest.raises(ValueError, match="more rows than the capacity of 12"):
        pad(owners, rows, np.ones((13, 2), np.float32), 1, 12, 15)
