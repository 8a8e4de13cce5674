"""The directory of a dynamic table: admission, expiry, eviction and saving."""

import numpy as np
import pytest
from openings import int64, opened, present, removals

from penstock.pyx.keys.directory import Directory
from penstock.pyx.keys.directory_plan import EVICTED

EDGES = [-(2**63), -1, 0, 1, 2**63 - 1]


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


@pytest.mark.parametrize(("evict", "most"), [(None, 40), ("lfu", 44)])
def test_a_key_costs_at_most_40_bytes_in_addition_to_its_row_and_44_with_counts(evict, most):
    directory = Directory(1_000_000, 0, "t", evict=evict, half_life=5 if evict else None)
    assert directory.nbytes <= most * 1_000_000
