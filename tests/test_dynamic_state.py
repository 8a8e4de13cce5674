"""Commits of dynamic tables."""

from dataclasses import asdict

import pytest
from dynamic import ALL_POLICIES, churning_steps, config_of, engine_of, log_of, physical, push, same_rows

import penstock as ps


@pytest.mark.parametrize("devices", [1, 3])
def test_a_run_that_resumes_at_any_commit_ends_like_the_unbroken_one(tmp_path, mesh_of, devices):
    log = log_of(churning_steps(40))
    whole = ps.Engine(config_of(ALL_POLICIES, rows=32), num_required=2)
    keys = asdict(whole.run([log]).tables["user"].keys)
    assert keys["returned"] > 0
    for limit in (1, 7, 20, 33):
        folder = tmp_path / str(limit)
        first = ps.Engine(config_of(ALL_POLICIES, rows=32), num_required=2)
        begun = asdict(first.run([log], checkpoint=folder, limit=limit, every=3).tables["user"].keys)
        again = ps.Engine.restore(folder, mesh_of(devices))
        ended = asdict(again.run([log], checkpoint=folder, resume=True, every=3).tables["user"].keys)
        for number in ("keys", "load", "waiting", "expired_waiting"):
            assert ended[number] == keys[number]
        for number in ("admitted", "expired", "evicted", "returned", "rejected", "unadmitted_rows"):
            assert begun[number] + ended[number] == keys[number]
        assert again.state_hash() == whole.state_hash()
        last = ps.Engine.restore(folder)
        assert last.state_hash() == whole.state_hash()
        same_rows(physical(last), physical(whole))


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
