"""When keys of a dynamic table are admitted, and when they expire, as users of an engine see it."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from dynamic import engine_of, log_of, push
from ipc import log as log_bytes

import penstock as ps


@pytest.mark.parametrize(
    ("count", "num_required", "frames", "admitted"),
    [
        ("rows", 1, [[5, 5, 5]], [5]),  # inside one frame
        ("frames", 1, [[5, 5, 5]], []),
        ("rows", 2, [[5, 6, 5], [5]], [5]),  # by two frames of one opening
        ("frames", 2, [[5, 6, 5], [5, 5]], []),
        ("frames", 3, [[5, 6], [5], [5, 7]], [5]),
        ("rows", 1, [[5], [5, 6], [5]], [5]),  # by three openings
        ("frames", 1, [[5], [5, 6, 6], [5, 6]], [5]),
    ],
)
def test_a_key_is_admitted_by_its_third_row_or_frame_wherever_it_is(count, num_required, frames, admitted):
    for accumulate in (True, False):
        optimizer = ps.SGD(1.0, use_gradient_accumulation=accumulate)
        engine = engine_of(ps.Dynamic(min_count=3, count=count), optimizer=optimizer, num_required=num_required)
        for keys in frames:
            push(engine, keys)
        assert engine.keys("user").to_pylist() == admitted


@pytest.mark.parametrize(
    ("dynamic", "admitted"),
    [
        (ps.Dynamic(min_count=1), list(range(200))),
        (ps.Dynamic(probability=1.0), list(range(200))),
        (ps.Dynamic(probability=0.0), []),
    ],
)
def test_every_key_or_none_is_admitted_at_the_ends_of_the_range(dynamic, admitted):
    engine = engine_of(dynamic, rows=200)
    push(engine, range(200))
    assert engine.keys("user").to_pylist() == admitted


def test_a_probability_admits_its_share_of_keys_and_more_rows_are_more_chances():
    engine = engine_of(ps.Dynamic(probability=0.3), rows=4000)
    push(engine, [*range(2000), *np.repeat(np.arange(5000, 7000), 3)])
    keys = engine.keys("user").to_numpy()
    assert abs(np.count_nonzero(keys < 2000) - 600) < 80
    assert abs(np.count_nonzero(keys >= 5000) - 2000 * (1 - 0.7**3)) < 80


@pytest.mark.parametrize(("steps", "expired"), [(5, False), (6, True)])
def test_a_key_that_expires_and_comes_in_one_step_starts_anew(steps, expired):
    engine = engine_of(ps.Dynamic(expire_after=5))
    start = engine.lookup("user", [1])
    push(engine, [1])
    first = engine.lookup("user", [1])
    for step in range(1, steps):
        push(engine, [100 + step])
    push(engine, [1])
    assert (engine.lookup("user", [1]).tobytes() == first.tobytes()) == expired  # the row and its slot are new
    assert engine.core.tables.dynamic["user"].directory.counts["returned"] == expired
    assert start.tobytes() != first.tobytes()


@pytest.mark.parametrize(("steps", "present"), [(5, True), (6, False)])
def test_an_expired_key_is_absent_for_every_reader_at_once(steps, present, tmp_path):
    engine = engine_of(ps.Dynamic(expire_after=5))
    start = engine.lookup("user", [1])
    push(engine, [1])
    for step in range(1, steps + 1):
        push(engine, [100 + step])
    assert (engine.lookup("user", [1]).tobytes() != start.tobytes()) == present
    assert (1 in engine.keys("user").to_pylist()) == present
    assert (engine.records("user", [1])["present"][0], engine.rows("user", [1])[0] >= 0) == (present, present)
    assert engine.explain("user", 1).startswith("present" if present else "absent")
    engine.write_tables(tmp_path)
    assert len(pq.read_table(tmp_path / "user.parquet")) == len(engine.keys("user"))
    assert engine.core.table_reports()["user"].keys.expired_waiting == (not present)


def test_the_largest_settings_are_numbers_that_a_table_can_keep():
    most = 2**31 - 1
    settings = {"min_count": most, "forget_after": most, "expire_after": most, "evict": "lfu", "half_life": most}
    engine = engine_of(ps.Dynamic(**settings))
    push(engine, [1, 1])
    assert engine.explain("user", 1) == f"waits: 2 of {most} rows, last at step 0"


@pytest.mark.parametrize(
    ("key_type", "keys", "rows"),
    [
        ("int64", [-(2**63), -1, 0, 2**63 - 1], [3 - 2**63, 2, 3, 2**63 + 2]),
        ("uint64", [0, 7, 2**63, 2**64 - 1], [3, 10, 2**63 + 3, 2**64 + 2]),
    ],
)
def test_a_row_that_starts_from_its_id_starts_from_the_key_in_its_type(key_type, keys, rows):
    dynamic = ps.Dynamic(key_type=key_type, evict="lru")
    table = ps.TableConfig(8, 2, name="user", initializer=ps.RowIdInitializer(3), dynamic=dynamic)
    engine = ps.Engine(ps.EmbeddingConfig.from_tables([table], ps.SGD(1.0)))
    keys = np.array(keys, key_type)
    expected = [float(np.float32(row)) for row in rows]
    assert engine.lookup("user", keys)[:, 1].tolist() == expected
    engine.apply({"user": (keys, np.zeros((4, 2), np.float32))})
    assert len(engine.keys("user")) == 4
    assert engine.lookup("user", keys)[:, 0].tolist() == expected


def test_deltas_of_int64_and_uint64_keys_together_are_refused_before_anything_starts(tmp_path, refused):
    tables = [
        ps.TableConfig(8, 2, name=name, dynamic=ps.Dynamic(key_type=key_type))
        for name, key_type in (("user", "int64"), ("item", "uint64"))
    ]
    config = ps.EmbeddingConfig.from_tables(tables, ps.SGD(1.0))
    line = "table 'user' has int64 keys and table 'item' has uint64 keys, but deltas have one column for both"
    with pytest.raises(ps.ConfigError, match=line):
        ps.Engine(config).stage([])
    config.save(tmp_path / "c.pbtxt")
    (tmp_path / "log.arrows").write_bytes(log_bytes([log_of([[1]], dim=2)]))
    assert line in refused(4, "serve", tmp_path / "c.pbtxt", "--checkpoint", tmp_path / "state")
    replay = ("replay", tmp_path / "c.pbtxt", tmp_path / "log.arrows", "--table", "user")
    assert line in refused(4, *replay, "--deltas", tmp_path / "deltas")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.pbtxt", "log.arrows"]
