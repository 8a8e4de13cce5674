"""The directory of a dynamic table: admission, expiry, eviction and saving."""

import numpy as np
import pytest
import reference_directory
from openings import int64, opened, present, removals, state_of

from penstock.pyx.keys.directory import Directory
from penstock.pyx.keys.directory_plan import EVICTED, Plan

EDGES = [-(2**63), -1, 0, 1, 2**63 - 1]


def test_dropped_plans_leave_no_trace():
    directory = Directory(40, 0, "t", min_count=2, expire_after=3, evict="lfu", half_life=4)
    rng = np.random.default_rng(0)
    for step in range(30):
        keys = np.unique(rng.integers(0, 90, 25))
        before = state_of(directory)
        Plan(directory, keys, clock=step + 1, step=step + 1)  # dropped by whatever comes next
        assert state_of(directory) == before
        plan = Plan(directory, keys, clock=step, step=step)
        plan.cancel()
        assert state_of(directory) == before
        with pytest.raises(ValueError, match="committed or cancelled before"):
            plan.commit()
        opened(directory, keys, step)


def test_any_64_bits_are_a_key_and_rows_stay_with_their_keys():
    directory = Directory(5, 0, "t")
    rows = opened(directory, EDGES, 0).key_rows
    assert sorted(rows.tolist()) == [0, 1, 2, 3, 4]
    assert directory.rows(int64(EDGES)).tolist() == rows.tolist()
    assert directory.keys(rows.astype(np.int64)).tolist() == EDGES
    with pytest.raises(IndexError, match="no row 5 of 5"):
        directory.keys(int64([0, 5]))
    assert present(directory, [2, -2]) == [False, False]


def test_every_shard_is_swept_once_in_a_period():
    directory = Directory(4 * 4096, 0, "t", expire_after=1)
    opened(directory, range(1000), 0)
    sizes = []
    for step in range(2, 1026):
        opened(directory, [], step)
        sizes.append(len(directory))
    assert sizes[-1] == 0
    assert len(set(sizes)) == directory.num_shards + (sizes[0] == 1000)


def test_a_full_directory_evicts_the_oldest_and_leaves_a_sixteenth_free():
    directory = Directory(64, 0, "t", evict="lru")
    for step in range(64):
        opened(directory, [step], step)
    plan = opened(directory, [1000], 64)
    assert removals(plan) == [(key, EVICTED) for key in range(5)]
    assert len(directory) == 60
    plan = opened(directory, [1, 1001, 1002, 1003, 1004], 65)
    assert removals(plan) == [(key, EVICTED) for key in range(5, 10)]


def test_candidates_are_forgotten_after_two_generations():
    directory = Directory(4, 0, "t", min_count=2, forget_after=10)
    opened(directory, [5, 6], 9)
    assert opened(directory, [5], 19).fresh.tolist() == [0]  # one swap later
    assert opened(directory, [6], 39).fresh.tolist() == []  # forgotten
    assert opened(directory, [6], 39).fresh.tolist() == [0]


def test_without_forget_after_candidates_are_bounded_by_the_rows():
    directory = Directory(16, 0, "t", min_count=2)
    for step in range(200):
        opened(directory, range(100 * step, 100 * step + 10), step)
        assert directory.num_waiting < 2 * 16 + 10


def test_keys_chosen_to_fall_into_one_shard_fill_it_alone():
    twin = reference_directory.Directory(8192, 0, "t")
    keys = [k for k in range(20_000) if twin.mixed(k) >> 63 == 0]
    directory = Directory(8192, 0, "t")
    plan = opened(directory, keys, 0)
    assert (plan.num_admitted, plan.num_rejected) == (4096, len(keys) - 4096)


@pytest.mark.parametrize(("evict", "most"), [(None, 40), ("lfu", 44)])
def test_a_key_costs_at_most_40_bytes_in_addition_to_its_row_and_44_with_counts(evict, most):
    directory = Directory(1_000_000, 0, "t", evict=evict, half_life=5 if evict else None)
    assert directory.nbytes <= most * 1_000_000
