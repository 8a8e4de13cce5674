"""Rows that are split by the part that owns their id: the kernel is its twin's, and so are sums on up to 64 threads."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import reference
from accumulate import drain
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.frames import Rows
from penstock.pyx.accumulator import Accumulator, targets
from penstock.pyx.coalesce import split_rows
from penstock.pyx.frame_accumulate import Intake, bytes_held

POOL = ThreadPoolExecutor(64)


@pytest.mark.parametrize("isa", range(len(targets())))
@given(st.integers(0, 2**32 - 1), st.integers(1, 2000), st.integers(1, 6), st.sampled_from([2**10, 2**25, 2**32, None]))
@settings(max_examples=60, deadline=None)
def test_rows_are_split_as_by_the_twin(isa, seed, num_rows, log_parts, size):
    rng = np.random.default_rng(seed)
    ids = rng.integers(-(2**63), 2**63 - 1, num_rows) if size is None else rng.integers(0, size, num_rows)
    wanted = reference.split_rows(ids, 1 << log_parts)
    for wide in {True, size is None}:
        got = split_rows(ids, 1 << log_parts, wide, isa)
        assert [array.tolist() for array in got] == [array.tolist() for array in wanted]


def rows_of(rng, num_rows, vocabulary, dim, scaled):
    """The rows of a frame in up to five blocks, of which some are picked and some have factors; few ids are hot."""
    blocks = []
    for picked in rng.random(rng.integers(1, 6)) < 0.3:
        n = int(rng.integers(0, num_rows))
        ids = rng.zipf(1.3, n).astype(np.int64) * 997 % (vocabulary or 2**60)
        grads = rng.standard_normal((n + 3, dim), np.float32)
        which = rng.permutation(n + 3)[:n] if picked else None
        gains = rng.standard_normal(n).astype(np.float32) if scaled and rng.random() < 0.5 else None
        blocks.append(Rows(ids, grads if picked else grads[3:], which, gains))
    return blocks


def written(block):
    """What the twin is given of a block."""
    grads = block.grads if block.which is None else block.grads[block.which]
    return block.ids, grads if block.gains is None else grads * block.gains[:, None]


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([2, 4, 16, 64]),
    st.integers(1, 64),
    st.integers(1, 3),
    st.sampled_from([None, 5000, 2**31]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_sums_of_split_rows_are_the_twins_on_any_threads(seed, parts, threads, num_frames, vocabulary, scaled, mean):
    """Of several stripes; what is held by the parts moves as they grow."""
    rng, dim = np.random.default_rng(seed), 3
    accumulator = Accumulator(dim, vocabulary_size=vocabulary, count=mean, count_rows=True)
    frames, intake = [], Intake()
    for number in range(num_frames):
        blocks = rows_of(rng, 12_000, vocabulary, dim, scaled)
        pairs = [written(block) for block in blocks]
        frames.append(tuple(np.concatenate(arrays) for arrays in zip(*pairs, strict=True)))
        intake.begin([accumulator], [blocks], number, [parts])
        intake.add()
        assert all(POOL.map(lambda _: intake.work(), range(threads)))
        intake.end()
    wanted = reference.coalesce(frames, dim, mean)
    order = np.argsort(wanted[0])
    rows = np.concatenate([sums.rows for sums in accumulator.sums()])
    by_id = np.argsort(np.concatenate([sums.ids for sums in accumulator.sums()]))
    assert rows[by_id].tolist() == np.unique(np.concatenate([ids for ids, _ in frames]), return_counts=True)[1].tolist()
    assert vocabulary is None or accumulator.num_distinct == len(order)
    state = accumulator.get_state()
    got = drain(accumulator, mean, ascending=True)
    assert [array.tobytes() for array in got[:2]] == [array[order].tobytes() for array in wanted[:2]]
    assert not mean or got[2].tolist() == wanted[2][order].tolist()
    restored = Accumulator(dim, vocabulary_size=vocabulary, count=mean, count_rows=True)
    restored.set_state(state)
    assert [array.tobytes() for array in drain(restored, mean, ascending=True)] == [array.tobytes() for array in got]


@pytest.mark.parametrize("bad", ["id", "value"])
def test_a_bad_row_among_split_rows_leaves_nothing(bad):
    accumulator, intake = Accumulator(4, vocabulary_size=90_000), Intake()
    ids, grads = np.arange(80_000), np.ones((80_000, 4), np.float32)
    if bad == "id":
        ids[70_000] = 90_000
    else:
        grads[70_000, 2] = np.nan
    for block, wanted in ((Rows(ids, grads), False), (Rows(np.arange(80_000), np.ones_like(grads)), True)):
        intake.begin([accumulator], [[block]], 1, [16])
        intake.add()
        assert all(list(POOL.map(lambda _: intake.work(), range(8)))) is wanted
        (intake.end if wanted else intake.undo)()
        assert len(accumulator) == accumulator.num_distinct == (80_000 if wanted else 0)


@pytest.mark.parametrize("vocabulary", [10**6, None])
def test_parts_take_no_more_memory_than_one(vocabulary):
    held, intake, rng = [], Intake(), np.random.default_rng(0)
    for parts in (1, 64):
        accumulator = Accumulator(8, vocabulary_size=vocabulary, count=False)
        for number in range(3):
            block = Rows(rng.integers(0, 10**6, 200_000), np.ones((200_000, 8), np.float32))
            intake.begin([accumulator], [[block]], number, [parts])
            intake.add()
            assert intake.work()
            intake.end()
            accumulator.drain()
        held.append(bytes_held([accumulator]))
    assert held[1] < 1.5 * held[0]
