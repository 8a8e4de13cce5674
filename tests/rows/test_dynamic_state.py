"""Commits of dynamic tables that are restored with another configuration."""

import pytest
from dynamic import ALL_POLICIES, config_of, engine_of

import penstock as ps


def test_a_smaller_capacity_is_refused(tmp_path):
    engine_of(rows=8).save(tmp_path)
    with pytest.raises(ps.StateError, match="8 rows in the checkpoint and only 7 in the configuration"):
        ps.Engine.restore(tmp_path, config=config_of(rows=7))


def test_other_settings_are_refused(tmp_path):
    engine_of(ALL_POLICIES).save(tmp_path)
    expected = (
        "dynamic expire_after 9, evict lru in the checkpoint and expire_after None, evict None in the configuration"
    )
    with pytest.raises(ps.StateError, match=expected):
        ps.Engine.restore(tmp_path, config=config_of(ps.Dynamic(min_count=2)))
