"""Deltas with removals: what a reader of them has at every step, and how it notices that one is missing."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from batches import batch
from dynamic import ALL_POLICIES, Reader, churning_steps, engine_of, log_of, physical, push, same_rows
from evidence import IS_EVIDENCE, more_as_evidence

import penstock as ps

STEPS = 1000 if IS_EVIDENCE else 300
FIRST = 800  # so that the sweep of step 1024 is among them


def test_the_deltas_of_uint64_keys_are_in_their_order():
    engine, reader = engine_of(ps.Dynamic(key_type="uint64")), Reader()
    (delta,) = engine.stage([batch(pa.array([2**64 - 1, 5, 2**63], pa.uint64()), dim=4)], numbered=True)
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


def random_steps(number, seed=0):
    """Busy and quiet stretches of steps, whose keys drift."""
    rng = np.random.default_rng(seed)
    sizes = [rng.integers(1, 4) if step // 8 % 2 else rng.integers(8, 20) for step in range(number)]
    return [churning_steps(1, 40 + step // 10, size, seed=step)[0] for step, size in enumerate(sizes)]


@more_as_evidence
@pytest.mark.sampled("lru")
@pytest.mark.parametrize(
    "dynamic",
    [
        ps.Dynamic(min_count=2, expire_after=8, evict="lru", forget_after=40),
        ps.Dynamic(expire_after=8, evict="lfu", half_life=16, on_full="reject"),
    ],
    ids=["lru", "lfu"],
)
def test_a_reader_equals_the_table_at_each_of_many_steps_and_accounts_for_every_key(dynamic):
    engine, reader = engine_of(dynamic, rows=32), Reader()
    engine.gate.set_global_step(FIRST)
    directory = engine.core.tables.dynamic["user"].directory
    counts, most_waiting = np.zeros(3, int), 0
    for keys in random_steps(STEPS):
        before, held = directory.counts, set(reader.rows)
        deltas = engine.stage([log_of([[] for _ in range(engine.global_step)] + [keys])], numbered=True)
        upserts, deletes = reader.ops["upsert"], reader.ops["delete"]
        reader.follow(deltas)
        admitted, expired, evicted = (
            directory.counts[name] - before[name] for name in ("admitted", "expired", "evicted")
        )
        same_rows(reader.rows, physical(engine))
        assert len(held) + admitted - expired - evicted == len(directory) == len(reader.rows)
        gone = len(held - set(reader.rows))
        assert reader.ops["delete"] - deletes == gone
        assert reader.ops["upsert"] - upserts >= len(set(reader.rows) - held)
        # A key that expired and came back in one step is in both counts and in neither set.
        back = expired + evicted - gone
        assert admitted - len(set(reader.rows) - held) == back >= 0
        assert len(reader.rows) - directory.num_expired_waiting() == len(engine.keys("user"))
        most_waiting = max(most_waiting, directory.num_expired_waiting())
        counts += admitted, expired, evicted
    assert counts.min() >= STEPS // 10
    assert most_waiting > 0
    assert engine.global_step > 1024


def test_each_delta_that_is_lost_repeated_swapped_or_damaged_is_detected():
    engine = engine_of(ALL_POLICIES, rows=32)
    batches = list(engine.stage([log_of(churning_steps(30))], numbered=True))
    assert Reader().follow(batches).step == engine.global_step == len(batches) == 30
    for n in range(30):
        changed = {"lost": batches[:n] + batches[n + 1 :], "repeated": batches[: n + 1] + batches[n:]}
        if n < 29:
            changed["swapped"] = [*batches[:n], batches[n + 1], batches[n], *batches[n + 2 :]]
            with pytest.raises(ValueError, match="follows on"):
                Reader().follow(changed["lost"])
        else:
            assert Reader().follow(changed.pop("lost")).step < engine.global_step
        for broken in changed.values():
            with pytest.raises(ValueError, match="follows on"):
                Reader().follow(broken)
        ops = np.array([op == "delete" for op in batches[n]["op"].to_pylist()])
        ops[n % len(ops)] ^= True
        column = pa.DictionaryArray.from_arrays(pa.array(ops.astype(np.int8)), ["upsert", "delete"])
        flipped = batches[n].set_column(batches[n].schema.get_field_index("op"), batches[n].schema.field("op"), column)
        with pytest.raises(ValueError, match="its checksum differs"):
            Reader().follow([*batches[:n], flipped])


def test_a_coalesced_delta_may_be_applied_to_any_state_that_it_covers():
    """A reader that takes the tables in the middle of an interval has keys that come and go within it."""
    steps = churning_steps(80)
    straight = engine_of(ALL_POLICIES, rows=32)
    (delta,) = straight.stage([log_of(steps)], numbered=True, per_steps=1000)
    removed = set()
    for limit in range(1, 80, 4):
        engine = engine_of(ALL_POLICIES, rows=32)
        engine.run([log_of(steps)], limit=limit)
        reader = Reader()
        reader.rows = physical(engine)
        removed |= reader.rows.keys() - physical(straight).keys()
        reader.take(delta)
        same_rows(reader.rows, physical(straight))
    assert len(removed) > 20


def test_deltas_contain_what_loads_admit_and_evict():
    engine, reader = engine_of(ps.Dynamic(evict="lru"), rows=3), Reader()
    load = itertools.count(1)

    def loaded(*keys):
        rows = np.full((len(keys), 4), next(load), np.float32)
        engine.load_parameters("user", rows, ids=keys, accumulators=rows)

    for keys in ([1, 2, 3], [3], [2]):
        reader.follow(engine.stage([log_of([[] for _ in range(engine.global_step)] + [keys])], numbered=True))
    deltas = engine.stage([log_of([[] for _ in range(3)] + [[9], [7]])], numbered=True)
    first = next(deltas)
    loaded(5, 2)
    loaded(6)
    reader.follow([first, *deltas])
    same_rows(reader.rows, physical(engine))
    assert sorted(reader.rows) == engine.keys("user").to_pylist()


def test_steps_that_admit_no_key_have_no_delta_and_change_only_what_waits():
    engine = engine_of(ps.Dynamic(min_count=9))
    hashes = [engine.state_hash()]
    assert list(engine.stage([log_of([[1, 2], [1], [3, 3]])], numbered=True)) == []
    hashes.append(engine.state_hash())
    assert (len(engine.keys("user")), engine.global_step, engine.core.changed_step) == (0, 3, 0)
    assert engine.explain("user", 1) == "waits: 2 of 9 rows, last at step 1"
    assert hashes[0] != hashes[1]


def test_a_run_resumes_after_an_interval_whose_keys_came_and_went(tmp_path):
    """The table is as it was before the interval, and yet the interval has its delta."""
    engine = engine_of(ps.Dynamic(min_count=2, expire_after=1))
    engine.gate.set_global_step(1020)
    log = log_of([[] for _ in range(1020)] + [[5, 5], *([100 + n] for n in range(9)), [6, 6]])
    options = {"checkpoint": tmp_path / "run", "deltas": tmp_path / "deltas.arrows", "per_steps": 2048}
    engine.run([log], limit=8, **options)
    assert (len(engine.core.tables.dynamic["user"].directory), engine.core.changed_step) == (0, 1025)
    again = ps.Engine.restore(tmp_path / "run")
    again.run([log], resume=True, **options)
    with pa.ipc.open_stream(tmp_path / "deltas.arrows") as batches:
        reader = Reader().follow(batch for batch in batches if batch.num_rows)
    same_rows(reader.rows, physical(again))
    assert (sorted(reader.rows), reader.step) == ([6], 1031)
