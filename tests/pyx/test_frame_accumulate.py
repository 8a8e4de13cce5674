"""A frame of many tables enters by one call: the sums of each are its twin's, and a bad row leaves nothing behind."""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import reference
from accumulate import drain
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.frames import Rows
from penstock.pyx.accumulator import Accumulator
from penstock.pyx.frame_accumulate import Intake

SIZES = [(13, 3), (500, 8), (2**30, 5), (40, 1)]  # vocabularies and dims: one of them is hashed


def made(count=True):
    return [Accumulator(dim, vocabulary_size=vocabulary, count=count) for vocabulary, dim in SIZES]


def rows_of(rng, vocabulary, dim):
    """Some blocks of one table; of one the rows are picked."""
    blocks = []
    for picked in rng.random(rng.integers(0, 3)) < 0.5:
        ids = rng.integers(0, min(vocabulary, 600), rng.integers(0, 1500))
        grads = rng.standard_normal((len(ids) + 3, dim), np.float32)
        which = rng.permutation(len(ids) + 3)[: len(ids)] if picked else None
        blocks.append(Rows(ids, grads if picked else grads[3:], which))
    return blocks


def taken(blocks):
    """What the twin is given of them."""
    return [(block.ids, block.grads if block.which is None else block.grads[block.which]) for block in blocks]


def whole(pairs, dim):
    """The blocks of a frame as one: an id that is in two of them was in one frame."""
    ids, grads = [np.zeros(0, np.int64)], [np.zeros((0, dim), np.float32)]
    for group, rows in pairs:
        ids.append(group)
        grads.append(rows)
    return np.concatenate(ids), np.concatenate(grads)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
    st.lists(st.sampled_from([1, 2, 4]), min_size=4, max_size=4),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_sums_of_every_table_are_the_twins_whatever_the_parts_and_threads(seed, num_frames, parts, threads, mean):
    rng, accumulators, intake = np.random.default_rng(seed), made(), Intake()
    frames = [[rows_of(rng, *size) for size in SIZES] for _ in range(num_frames)]
    with ThreadPoolExecutor(threads) as pool:
        for number, blocks in enumerate(frames):
            assert intake.begin(accumulators, blocks, number, parts) is all(
                not block.ids.size for before in frames[:number] for table in before for block in table
            )
            for share_out in (lambda: intake.check(3), intake.add):
                share_out()
                assert all(list(pool.map(lambda _: intake.work(), range(threads))))
            intake.end()
    for table, (accumulator, (_, dim)) in enumerate(zip(accumulators, SIZES, strict=True)):
        given_rows = [whole(taken(blocks[table]), dim) for blocks in frames]
        ids, sums, counts = reference.coalesce(given_rows, dim, mean)
        order = np.argsort(ids)
        got = drain(accumulator, mean, ascending=True)
        assert [array.tobytes() for array in got] == [array[order].tobytes() for array in (ids, sums, counts)]
        assert accumulator.num_rows == sum(len(ids) for ids, _ in given_rows)


@pytest.mark.parametrize("parts", [1, 4])
def test_threads_without_a_processor_leave_their_folds_to_others_and_the_sums_are_the_twins(parts):
    rng, dim, threads = np.random.default_rng(0), 32, 4 * (os.cpu_count() or 1)
    ids = rng.zipf(1.2, 1 << 18).astype(np.int64) % 100_000
    grads = rng.standard_normal((len(ids), dim), np.float32)
    distinct, sums, _ = reference.coalesce([(ids, grads)], dim, False)
    order = np.argsort(distinct)
    with ThreadPoolExecutor(threads) as pool:
        intake = Intake()
        for _ in range(8):
            accumulator = Accumulator(dim, vocabulary_size=100_000)
            intake.begin([accumulator], [[Rows(ids, grads, None)]], 0, [parts])
            intake.add()
            assert all(pool.map(lambda _: intake.work(), range(threads)))
            intake.end()
            actual, sums_of_threads, _ = drain(accumulator, False, ascending=True)
            assert actual.tobytes() == distinct[order].tobytes()
            assert sums_of_threads.tobytes() == sums[order].tobytes()


@pytest.mark.parametrize("table", range(4))
@pytest.mark.parametrize("bad", ["id", "value"])
def test_a_bad_row_of_any_table_leaves_nothing_behind(table, bad):
    rng, accumulators, intake = np.random.default_rng(0), made(), Intake()
    blocks = [[Rows(rng.integers(0, 13, 50), np.ones((50, dim), np.float32))] for _, dim in SIZES]
    good = [list(block) for block in blocks]
    ids, grads = blocks[table][0].ids.copy(), blocks[table][0].grads.copy()
    if bad == "id":
        ids[49] = SIZES[table][0]
    else:
        grads[49, -1] = np.nan
    blocks[table] = [Rows(ids, grads)]
    assert intake.begin(accumulators, blocks, 1)
    intake.check(1)
    assert not intake.work()
    intake.add()
    assert not intake.work()
    intake.undo()
    assert [(len(a), a.num_distinct, a.num_rows) for a in accumulators] == [(0, 0, 0)] * 4
    assert intake.begin(accumulators, good, 1)
    assert intake.add() == 8
    assert intake.work()
    intake.end()
    assert [a.num_rows for a in accumulators] == [50] * 4


def test_arrays_that_do_not_fit_are_refused_before_any_table():
    accumulators, intake = made(), Intake()
    blocks = [[Rows(np.arange(3), np.ones((3, dim), np.float32))] for _, dim in SIZES]
    blocks[2] = [Rows(np.arange(3), np.ones((3, 4), np.float32))]
    with pytest.raises(ValueError, match=r"grads float32 \(n, 5\), .* got int64 \(3,\), float32 \(3, 4\)$"):
        intake.begin(accumulators, blocks, 1)
    assert intake.add() == 0
    assert intake.work()
    assert [(len(a), a.num_rows) for a in accumulators] == [(0, 0)] * 4


@pytest.mark.parametrize(
    "ids", [np.arange(3, dtype=np.int32), np.arange(6)[::2], np.arange(3).astype(">i8"), np.arange(3).reshape(3, 1)]
)
def test_ids_of_another_kind_are_refused_not_misread(ids):
    with pytest.raises(ValueError, match=r"ids and which int64 \(n,\), .* got "):
        Intake().begin(made()[:1], [[Rows(ids, np.ones((3, 3), np.float32))]], 1)
