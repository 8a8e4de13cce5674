"""The directory equals its twin: the same keys, victims and order."""

import numpy as np
import reference_directory
from evidence import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from openings import hashed, opened, removals, state_of

from penstock.pyx.keys.directory import Directory
from penstock.pyx.keys.directory_plan import Plan

EDGES = [-(2**63), -1, 0, 1, 2**63 - 1]


class Returns:
    """The keys that a directory counts as returned: those it admits again while it remembers their removal.

    A shard of n rows remembers n to 2n removals.
    """

    def __init__(self, twin):
        self.twin, self.removed = twin, [(set(), set()) for _ in twin.shards]  # lately, before
        self.num_returned = 0

    def count(self, admitted, removed):
        for key, _ in removed:
            shard = self.shard_of(key)
            if len(self.removed[shard][0]) >= self.twin.shards[shard].num_rows:
                self.removed[shard] = set(), self.removed[shard][0]
            self.removed[shard][0].add(key)
        self.num_returned += sum(any(key in group for group in self.removed[self.shard_of(key)]) for key in admitted)

    def shard_of(self, key):
        return self.twin.mixed(key) * len(self.removed) >> 64


class Pair:
    """A directory and its twin, which must agree on every opening."""

    def __init__(self, capacity, *, period=1024, **policy):
        self.directory = Directory(capacity, 7, "items", **policy)
        self.directory._sweep_every(period)
        self.twin = reference_directory.Directory(capacity, 7, "items", sweep_period=period, **policy)
        self.returns = Returns(self.twin)

    def open(self, keys, rows, frames, clock, step, **options):
        before = len(self.directory)
        plan = opened(self.directory, keys, step, clock, rows, frames, **options)
        admitted, removed, rejected = self.twin.step(keys, rows, frames, clock, step, **options)
        self.returns.count(admitted, removed)
        assert sorted(plan.keys[plan.fresh].tolist()) == sorted(admitted)
        assert removals(plan) == removed
        assert plan.num_rejected == rejected
        actual = plan.key_rows[plan.key_rows >= 0]
        assert len(set(actual.tolist())) == len(actual)
        assert before + plan.num_admitted - plan.num_expired - plan.num_evicted == len(self.directory)
        return plan

    def compare(self):
        state, waiting = self.directory.state(), self.directory.candidates()
        twin = self.twin
        records = {k: record for shard in twin.shards for k, record in shard.keys.items()}
        assert state["key"].tolist() == sorted(records, key=twin.mixed)
        assert state["last"].tolist() == [records[k].last for k in state["key"].tolist()]
        if "count" in state:
            assert state["count"].tolist() == [records[k].count for k in state["key"].tolist()]
        assert len(set(state["row"].tolist())) == len(records)
        assert self.directory.counts["returned"] == self.returns.num_returned
        young = {k: r for shard in twin.shards for k, r in shard.young.items()}
        old = {k: r for shard in twin.shards for k, r in shard.old.items()}
        held = zip(*(waiting[name].tolist() for name in ("key", "generation", "count", "last")), strict=True)
        assert {(k, g): (count, last) for k, g, count, last in held} == {
            (k, g): (r.count, r.last) for g, group in enumerate((young, old)) for k, r in group.items()
        }


POLICIES = st.fixed_dictionaries(
    {
        "period": st.sampled_from([0, 1, 4, 1024]),
        "expire_after": st.sampled_from([None, 0, 1, 5, 40]),
        "forget_after": st.sampled_from([None, 1, 3, 50]),
    }
)
ADMISSION = st.one_of(
    st.fixed_dictionaries({"min_count": st.integers(1, 5), "by_frames": st.booleans()}),
    st.fixed_dictionaries({"probability": st.sampled_from([0.0, 0.1, 0.5, 1.0])}),
)
EVICTION = st.sampled_from([{}, {"evict": "lru"}, {"evict": "lfu", "half_life": 1}, {"evict": "lfu", "half_life": 7}])


@given(POLICIES, ADMISSION, EVICTION, st.sampled_from([1, 2, 5, 17, 40]), st.booleans(), st.data())
@examples(300, 60)
def test_openings_equal_the_twin(policy, admission, eviction, capacity, by_time, data):
    pair = Pair(capacity, **policy, **admission, **eviction)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    pool = np.unique(np.concatenate([EDGES, rng.integers(-(2**63), 2**63 - 1, 60), np.arange(20)]))
    step = clock = 0
    for _ in range(25):
        step += int(rng.integers(0, 3)) if rng.random() < 0.9 else 60
        clock = max(0, clock + int(rng.integers(0, 3))) if by_time else step
        keys = rng.choice(pool, int(rng.integers(0, 15)), replace=False).tolist()
        rows = rng.integers(1, 4, len(keys)).tolist()
        frames = [int(rng.integers(1, r + 1)) for r in rows]
        pair.open(keys, rows, frames, clock, step, admit_all=bool(rng.random() < 0.1))
    pair.compare()


@given(POLICIES, ADMISSION, EVICTION, st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_large_openings_of_new_and_of_present_keys_equal_the_twin(policy, admission, eviction, seed):
    """After an opening of mostly new keys, all keys of the next one are dealt to shards before they are found."""
    pair = Pair(500, **policy, **admission, **eviction)
    rng = np.random.default_rng(seed)
    first = 0
    for step in range(12):
        first += int(rng.choice([0, 20, 300]))
        keys = hashed(first + rng.permutation(300)[: int(rng.integers(64, 300))])
        rows = rng.integers(1, 4, len(keys))
        before = state_of(pair.directory)
        Plan(pair.directory, keys, rows, clock=step, step=step).cancel()
        assert state_of(pair.directory) == before
        pair.open(keys.tolist(), rows.tolist(), np.minimum(rows, 2).tolist(), step, step)
    pair.compare()
