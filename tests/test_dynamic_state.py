"""Deltas with removals and commits of dynamic tables."""

import pyarrow as pa
import pytest
from dynamic import Reader, churning_steps, config_of, engine_of, log_of, physical, push, same_rows

import penstock as ps

BITING = ps.Dynamic(min_count=2, expire_after=9, evict="lru")


@pytest.mark.parametrize("per_steps", [1, 4, 100])
def test_a_reader_of_the_deltas_has_the_table(per_steps):
    engine, reader = engine_of(BITING, rows=32), Reader()
    steps = churning_steps(80)
    for first in range(0, 80, 16):
        batch = log_of([[] for _ in range(first)] + steps[first : first + 16])
        reader.follow(engine.stage([batch], numbered=True, per_steps=per_steps))
        same_rows(reader.rows, physical(engine))
    directory = engine.core.tables.dynamic["user"].directory
    assert directory.num_admitted - directory.num_expired - directory.num_evicted == len(directory) == len(reader.rows)
    assert directory.num_evicted > 20
    if per_steps == 1:
        # An expired key that came back in the step that removed it is one upsert.
        assert reader.ops["delete"] == directory.num_expired + directory.num_evicted - directory.num_returned


def test_the_deltas_of_uint64_keys_are_in_their_order():
    engine, reader = engine_of(ps.Dynamic(key_type="uint64")), Reader()
    batch = pa.record_batch(
        {
            "id": pa.array([2**64 - 1, 5, 2**63], pa.uint64()),
            "gradient": pa.array([[1.0] * 4] * 3, pa.list_(pa.float32(), 4)),
        }
    )
    (delta,) = engine.stage([batch], numbered=True)
    assert delta["id"].to_pylist() == [5, 2**63, 2**64 - 1]
    reader.take(delta)
    same_rows(reader.rows, physical(engine))


@pytest.mark.parametrize(
    ("steps", "changes"),
    [
        ([[1], [2]], [(1, "delete"), (2, "upsert")]),
        ([[2], [1]], [(1, "upsert"), (2, "delete")]),  # a reader that began in between has 2
        ([[1], [2], [1]], [(1, "upsert"), (2, "delete")]),
    ],
)
def test_an_interval_says_only_how_it_ends(steps, changes):
    engine = engine_of(ps.Dynamic(evict="lru"), rows=1)
    if changes[0][1] == "delete":
        push(engine, [1])
    first = engine.global_step
    batch = log_of([[] for _ in range(first)] + steps)
    (delta,) = engine.stage([batch], per_steps=100)
    assert list(zip(delta["id"].to_pylist(), delta["op"].to_pylist(), strict=True)) == changes


def test_a_lost_repeated_or_damaged_delta_is_detected():
    batches = list(engine_of(BITING, rows=32).stage([log_of(churning_steps(30))], numbered=True))
    for broken in (batches[:3] + batches[4:], batches[:4] + batches[3:], [batches[1], batches[0], *batches[2:]]):
        with pytest.raises(ValueError, match="follows on"):
            Reader().follow(broken)
    flipped = batches[5].set_column(
        batches[5].schema.get_field_index("op"),
        batches[5].schema.field("op"),
        pa.DictionaryArray.from_arrays(
            pa.array([1] + [0] * (batches[5].num_rows - 1), pa.int8()), ["upsert", "delete"]
        ),
    )
    with pytest.raises(ValueError, match="its checksum differs"):
        Reader().follow([*batches[:5], flipped])


@pytest.mark.parametrize("devices", [1, 3])
def test_a_run_that_resumes_at_any_commit_ends_like_the_unbroken_one(tmp_path, mesh_of, devices):
    log = log_of(churning_steps(40))
    whole = ps.Engine(config_of(BITING, rows=32), num_required=2)
    whole.run([log])
    for limit in (1, 7, 20, 33):
        folder = tmp_path / str(limit)
        ps.Engine(config_of(BITING, rows=32), num_required=2).run([log], checkpoint=folder, limit=limit, every=3)
        again = ps.Engine.restore(folder, mesh_of(devices))
        again.run([log], checkpoint=folder, resume=True, every=3)
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
    engine_of(BITING).save(tmp_path)
    with pytest.raises(ps.StateError, match="table 'user' has dynamic"):
        ps.Engine.restore(tmp_path, config=config_of(ps.Dynamic(min_count=2)))
