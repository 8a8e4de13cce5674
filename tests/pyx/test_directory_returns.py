"""Keys that return after they lost their row, and samples of virtual shards."""

import numpy as np
import pytest
from openings import hashed, opened

from penstock.pyx.keys.directory import Directory
from penstock.pyx.keys.shard_sample import by_shard, sampled
from penstock.tables.key_directory import key_counts


def test_keys_that_lost_their_row_and_are_admitted_again_have_returned_whatever_took_it():
    directory = Directory(2, 0, "t", evict="lru", expire_after=9)
    opened(directory, [1, 2], 0)
    assert (opened(directory, [3], 1).num_evicted, directory.num_returned) == (1, 0)
    opened(directory, [1, 2], 2)
    assert directory.num_returned == 1  # one of them had been evicted
    assert opened(directory, [1, 3], 12).num_returned == 2  # 1 expired, 3 was evicted
    assert directory.num_returned == 3


def test_a_returning_key_counts_once_it_is_admitted():
    directory = Directory(2, 0, "t", min_count=2, expire_after=1)
    opened(directory, [5], 0, rows=[2])
    assert opened(directory, [5], 3, rows=[1]).num_expired == 1
    assert directory.num_returned == 0
    assert opened(directory, [5], 4, rows=[1]).num_returned == 1


def test_a_removed_key_is_remembered_until_as_many_more_as_there_are_rows_were_removed():
    directory = Directory(4, 0, "t", evict="lru")
    for first in range(0, 12, 4):
        opened(directory, range(first, first + 4), first)
    opened(directory, [4, 5, 6, 7], 20)  # the last four removed but four
    assert directory.num_returned == 4
    opened(directory, range(100, 104), 21)
    opened(directory, range(200, 204), 22)
    opened(directory, range(300, 304), 23)
    opened(directory, [0, 1, 2, 3], 24)
    assert directory.num_returned == 4


@pytest.mark.parametrize("evict", [{"evict": "lru"}, {"evict": "lfu", "half_life": 6}], ids=["lru", "lfu"])
def test_a_sample_of_the_shards_has_exactly_their_keys_of_the_whole_directory(evict):
    policy = {"min_count": 2, "expire_after": 30, **evict}
    whole = Directory(20_001, 5, "t", **policy)
    parts = {bits: Directory(20_001, 5, "t", sample_bits=bits, **policy) for bits in (1, 2)}
    rng = np.random.default_rng(1)
    for step in range(60):
        keys = hashed(np.unique(rng.integers(step * 300, 40_000 + step * 300, 6000)))
        rows = rng.integers(1, 3, len(keys))
        opened(whole, keys, step, rows=rows)
        for bits, part in parts.items():
            at = sampled(part, keys, bits)
            assert at.tolist() == sampled(whole, keys, bits).tolist()
            opened(part, keys[at], step, rows=rows[at])
    expected = by_shard(whole)
    assert whole.num_shards == 4
    assert {name: counts.sum() for name, counts in expected.items()} == {"keys": len(whole), **key_counts(whole)}
    for bits, part in parts.items():
        assert part.num_shards == 4 >> bits
        for name, counts in by_shard(part).items():
            assert counts.tolist() == expected[name][: part.num_shards].tolist()
        state, every = part.state(), whole.state()
        assert state["key"].tolist() == every["key"][np.isin(every["key"], state["key"])].tolist()
        assert state["key"].tolist() == every["key"][sampled(whole, every["key"], bits)].tolist()
    assert whole.num_evicted > 1000
    assert whole.num_returned > 100
