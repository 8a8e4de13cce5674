"""Commits of dynamic tables that are restored with another configuration."""

import pytest
from dynamic import ALL_POLICIES, config_of, engine_of, push

import penstock as ps


def test_a_larger_capacity_grows_and_a_smaller_one_is_refused(tmp_path):
    engine = engine_of(rows=8, num_required=2)
    push(engine, range(100, 108))
    push(engine, [100])
    push(engine, [-1])
    engine.save(tmp_path)
    larger = ps.Engine.restore(tmp_path, config=config_of(rows=20_000))
    assert larger.lookup("user", range(100, 108)).tobytes() == engine.lookup("user", range(100, 108)).tobytes()
    push(larger, [5])
    assert larger.keys("user").to_pylist() == [-1, 5, *range(100, 108)]
    with pytest.raises(ps.StateError, match="8 rows in the checkpoint and only 7 in the configuration"):
        ps.Engine.restore(tmp_path, config=config_of(rows=7))


def test_other_settings_are_refused(tmp_path):
    engine_of(ALL_POLICIES).save(tmp_path)
    expected = (
        "dynamic expire_after 9, evict lru in the checkpoint and expire_after None, evict None in the configuration"
    )
    with pytest.raises(ps.StateError, match=expected):
        ps.Engine.restore(tmp_path, config=config_of(ps.Dynamic(min_count=2)))
