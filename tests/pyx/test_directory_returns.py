"""Keys that return after they lost their row, and samples of virtual shards."""

import numpy as np
import pytest
from openings import hashed, opened

from penstock.pyx.keys.directory import Directory
from penstock.pyx.keys.shard_sample import by_shard, sampled


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
            position = sampled(part, keys, bits)
            assert position.tolist() == sampled(whole, keys, bits).tolist()
            opened(part, keys[position], step, rows=rows[position])
    expected = by_shard(whole)
    assert whole.num_shards == 4
    assert {name: counts.sum() for name, counts in expected.items()} == {"keys": len(whole), **whole.counts}
    for bits, part in parts.items():
        assert part.num_shards == 4 >> bits
        for name, counts in by_shard(part).items():
            assert counts.tolist() == expected[name][: part.num_shards].tolist()
        state, every = part.state(), whole.state()
        assert state["key"].tolist() == every["key"][np.isin(every["key"], state["key"])].tolist()
        assert state["key"].tolist() == every["key"][sampled(whole, every["key"], bits)].tolist()
    assert whole.counts["evicted"] > 1000
    assert whole.counts["returned"] > 100
