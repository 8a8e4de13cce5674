"""The directory of a dynamic table: admission, expiry, eviction and saving."""

import numpy as np
import pytest
import reference_directory
from openings import int64, opened, present, removals, state_of

from penstock.pyx.keys.directory import Directory
from penstock.pyx.keys.directory_plan import EVICTED, EXPIRED, Plan

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


def test_threads_and_the_order_of_keys_decide_nothing():
    from penstock.threads import ThreadTeam

    rng = np.random.default_rng(1)
    states = []
    openings = [np.unique(rng.integers(0, 300_000, 100_000)) for _ in range(8)]
    for threads in (1, 2, 4):
        directory = Directory(100_000, 0, "t", min_count=2, expire_after=6, evict="lru")
        team = ThreadTeam(threads)
        taken = []
        for step, keys in enumerate(openings):
            order = np.random.default_rng(threads).permutation(len(keys))
            plan = opened(directory, keys[order], step, run=team.run)
            taken.append(removals(plan))
            assert (plan.key_rows >= 0).tolist() == present(directory, keys[order])
        team.close()
        states.append((state_of(directory), taken))
    assert states[0] == states[1] == states[2]
    assert directory.num_evicted > 10_000


def test_any_64_bits_are_a_key_and_rows_stay_with_their_keys():
    directory = Directory(5, 0, "t")
    rows = opened(directory, EDGES, 0).key_rows
    assert sorted(rows.tolist()) == [0, 1, 2, 3, 4]
    assert directory.rows(int64(EDGES)).tolist() == rows.tolist()
    assert directory.keys(rows.astype(np.int64)).tolist() == EDGES
    with pytest.raises(IndexError, match="no row 5 of 5"):
        directory.keys(int64([0, 5]))
    assert present(directory, [2, -2]) == [False, False]


@pytest.mark.parametrize(("after", "clock", "stays"), [(5, 5, True), (5, 6, False), (0, 0, True), (0, 1, False)])
def test_a_key_expires_when_more_than_after_has_passed(after, clock, stays):
    directory = Directory(4, 0, "t", expire_after=after)
    opened(directory, [9], 0, 0)
    opened(directory, [], 1, clock)
    assert present(directory, [9]) == [stays]
    plan = opened(directory, [9], 2, clock)
    assert removals(plan) == ([] if stays else [(9, EXPIRED)])
    assert (len(plan.fresh), plan.num_returned) == (0 if stays else 1, 0 if stays else 1)
    assert present(directory, [9]) == [True]


def test_an_expired_key_that_waits_again_has_lost_its_row():
    directory = Directory(4, 0, "t", expire_after=1, min_count=3)
    opened(directory, [9], 0, rows=[3])
    plan = opened(directory, [9], 5, rows=[2])
    assert (removals(plan), len(directory), directory.num_waiting) == ([(9, EXPIRED)], 0, 1)
    assert opened(directory, [9], 6).fresh.tolist() == [0]


@pytest.mark.parametrize("swept", [0, 1, 4])
def test_when_memory_is_swept_changes_nothing_but_when_keys_are_removed(swept):
    rng = np.random.default_rng(5)
    openings = [np.unique(rng.integers(0, 60, 12)) for _ in range(60)]
    lookups = []
    for period in (1024, swept):
        directory = Directory(30, 0, "t", min_count=2, expire_after=2, evict="lru")
        directory._sweep_every(period)
        seen = []
        for step, keys in enumerate(openings):
            opened(directory, keys, step)
            seen.append((present(directory, range(60)), directory.state(expired=False)["key"].tolist()))
        lookups.append(seen)
    assert lookups[0] == lookups[1]


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


def test_keys_of_the_step_are_no_victims_at_a_clock_that_stands_still():
    directory = Directory(4, 0, "t", evict="lru")
    opened(directory, [1, 2, 3, 4], 0, clock=7)
    plan = opened(directory, [1, 2, 3, 50], 1, clock=7)
    assert removals(plan) == [(4, EVICTED)]


def test_lfu_halves_counts_and_evicts_the_least_used():
    directory = Directory(3, 0, "t", evict="lfu", half_life=10)
    opened(directory, [1, 2, 3], 0, rows=[64, 5, 3])
    opened(directory, [2, 3], 31, rows=[1, 1])
    assert directory.records(int64([1, 2, 3]))["count"].tolist() == [8, 1, 1]
    plan = opened(directory, [2, 4], 32)
    assert removals(plan) == [(3, EVICTED)]


def test_a_full_shard_whose_keys_all_occur_rejects_newcomers_which_wait():
    directory = Directory(3, 0, "t", evict="lru")
    opened(directory, [1, 2, 3], 0)
    before = state_of(directory)
    plan = Plan(directory, int64([1, 2, 3, 4]), clock=1, step=1)
    assert (plan.num_rejected, plan.key_rows.tolist()[3]) == (1, -1)
    plan.cancel()
    assert state_of(directory) == before
    assert opened(directory, [1, 2, 3, 4], 1).unadmitted_rows == 1
    assert directory.records(int64([4]))["waiting"].tolist() == [1]
    assert present(directory, [1, 2, 3, 4]) == [True, True, True, False]


@pytest.mark.parametrize("capacity", [1, 5])
def test_capacity_of_the_keys_of_a_step_fits_and_one_less_does_not(capacity):
    assert opened(Directory(capacity, 0, "t"), range(capacity), 0).num_rejected == 0
    plan = opened(Directory(capacity, 0, "t", evict="lru"), range(capacity + 1), 0)
    assert (plan.num_rejected, plan.num_admitted) == (1, capacity)


@pytest.mark.parametrize(
    ("rows", "frames", "by_frames", "admitted"), [(3, 1, False, 1), (3, 1, True, 0), (3, 3, True, 1)]
)
def test_min_count_is_reached_inside_one_step(rows, frames, by_frames, admitted):
    directory = Directory(4, 0, "t", min_count=3, by_frames=by_frames)
    plan = opened(directory, [5], 0, rows=[rows], frames=[frames])
    assert (len(plan.fresh), plan.unadmitted_rows) == (admitted, 0 if admitted else rows)


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


@pytest.mark.parametrize(("probability", "admitted"), [(0.0, 0), (1.0, 2000)])
def test_probabilities_0_and_1_admit_none_and_all(probability, admitted):
    directory = Directory(2000, 0, "t", probability=probability)
    assert opened(directory, range(2000), 0).num_admitted == admitted
    assert directory.num_waiting == 0


def test_keys_chosen_to_fall_into_one_shard_fill_it_alone():
    twin = reference_directory.Directory(8192, 0, "t")
    keys = [k for k in range(20_000) if twin.mixed(k) >> 63 == 0]
    directory = Directory(8192, 0, "t")
    plan = opened(directory, keys, 0)
    assert (plan.num_admitted, plan.num_rejected) == (4096, len(keys) - 4096)


@pytest.mark.parametrize("capacity", [40, 41, 80, 10_000])
def test_a_saved_state_continues_in_a_directory_of_the_same_or_a_larger_capacity(capacity):
    policy = {"min_count": 2, "expire_after": 6, "evict": "lfu", "half_life": 3, "forget_after": 5}
    rng = np.random.default_rng(2)
    saved, loaded = Directory(40, 0, "t", **policy), Directory(capacity, 0, "t", **policy)
    for step in range(20):
        opened(saved, np.unique(rng.integers(0, 90, 20)), step)
    state = saved.get_state()
    rows = loaded.set_state(state)
    assert (rows.tolist() == state["row"].tolist()) == (capacity == 40)
    assert loaded.rows(state["key"])[loaded.rows(state["key"]) >= 0].tolist() == [
        row for row, some in zip(rows.tolist(), present(saved, state["key"]), strict=True) if some
    ]
    assert state_of(loaded) == {**state_of(saved), "numbers": [capacity, *state_of(saved)["numbers"][1:]]}
    if capacity == 40:
        for step in range(20, 40):
            keys = np.unique(rng.integers(0, 90, 20))
            assert removals(opened(loaded, keys, step)) == removals(opened(saved, keys, step))
        assert saved.num_returned > state["numbers"][6]
        assert state_of(loaded) == state_of(saved)


def test_a_smaller_capacity_is_refused_and_nothing_changes():
    saved, small = Directory(41, 0, "t"), Directory(40, 0, "t")
    opened(saved, [1], 0)
    opened(small, [2], 0)
    with pytest.raises(ValueError, match="the saved capacity is 41, this one 40: it can only grow"):
        small.set_state(saved.get_state())
    assert present(small, [1, 2]) == [False, True]


@pytest.mark.parametrize(("clock", "step"), [(-1, 0), (2**32 - 1, 0), (0, -1)])
def test_clocks_beyond_32_bits_and_negative_steps_are_refused(clock, step):
    with pytest.raises(ValueError, match="expected a step of at least 0 and a clock from 0 to 4294967294"):
        Plan(Directory(4, 0, "t"), int64([1]), clock=clock, step=step)


def test_loads_admit_without_the_filter_and_stamp():
    directory = Directory(4, 0, "t", min_count=5, expire_after=3)
    opened(directory, [1], 0)
    assert opened(directory, [1, 2], 2, admit_all=True).num_admitted == 2
    assert directory.records(int64([1, 2]))["last"].tolist() == [2, 2]
    assert directory.num_waiting == 0


@pytest.mark.parametrize(("evict", "most"), [(None, 40), ("lfu", 44)])
def test_a_key_costs_at_most_40_bytes_in_addition_to_its_row_and_44_with_counts(evict, most):
    directory = Directory(1_000_000, 0, "t", evict=evict, half_life=5 if evict else None)
    assert directory.nbytes <= most * 1_000_000
