"""Deltas of dynamic tables as their readers use them: the clock, ``last``, files, and the example that applies them."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.ipc
import pytest
from deltas import example, follow
from dynamic import ALL_POLICIES, Reader, churning_steps, config_of, engine_of, log_of, timed
from ipc import write

import penstock as ps

EXPIRING = ps.Dynamic(expire_after=5)


def present(reader, expire_after):
    """The keys that a reader with ``last`` finds not expired."""
    return sorted(key for key in reader.rows if reader.clock - reader.last[key] <= expire_after)


@pytest.mark.parametrize("per_steps", [1, 7])
def test_a_reader_that_tests_expiry_by_clock_and_last_has_the_keys_of_the_engine(per_steps):
    engine, reader = engine_of(EXPIRING, rows=200), Reader()
    steps, swept = churning_steps(70), 0
    for first in range(0, 70, 7):
        batch = log_of([[] for _ in range(first)] + steps[first : first + 7])
        reader.follow(engine.stage([batch], numbered=True, last=True, per_steps=per_steps))
        assert reader.clock == engine.global_step - 1
        assert present(reader, 5) == engine.keys("user").to_pylist()
        swept += len(reader.rows) - len(engine.keys("user"))
    assert swept > 0  # some of its keys were expired and waited for their sweep


def test_the_clock_is_that_of_the_end_of_the_delta_and_last_that_of_each_key():
    engine = engine_of(ps.Dynamic(expire_after=3600, clock="time"), rows=8)
    first, second = engine.stage([timed([1, 2, 1, 3], [100, 200, 150, 4000])], last=True, per_steps=2)
    assert first.select(["id", "op", "clock", "last"]).to_pylist() == [
        {"id": 1, "op": "upsert", "clock": 200, "last": 100},
        {"id": 2, "op": "upsert", "clock": 200, "last": 200},
    ]
    assert second.select(["id", "op", "clock", "last"]).to_pylist() == [
        {"id": 1, "op": "upsert", "clock": 4000, "last": 200},
        {"id": 3, "op": "upsert", "clock": 4000, "last": 4000},
    ]


def test_the_last_of_a_delta_is_read_before_the_next_step_stamps_its_keys():
    engine = engine_of(rows=8)
    deltas = engine.stage([log_of([[1, 2], [1, 2]])], last=True, per_steps=1)
    with engine.gate.still():
        batch = deltas.read_next_batch()
    assert batch["last"].to_pylist() == [0, 0]
    assert deltas.read_next_batch()["last"].to_pylist() == [1, 1]


@pytest.mark.parametrize("filtered", [False, True])
def test_the_first_step_says_the_last_of_keys_that_were_loaded_before_it(filtered):
    """Also a step that changes no row. A reader with the stamps of the load would find these keys expired."""
    engine = engine_of(ps.Dynamic(expire_after=3600, clock="time", min_count=2 if filtered else 1), rows=8)
    engine.load_parameters("user", np.ones((2, 4)), ids=[7, 8], accumulators=np.ones((2, 4)))
    (delta,) = engine.stage([timed([1], [5000])], last=True)
    assert engine.keys("user").to_pylist() == ([7, 8] if filtered else [1, 7, 8])
    assert delta["id"].to_pylist() == engine.keys("user").to_pylist()
    assert set(delta["last"].to_pylist()) == {5000}


def test_rows_of_static_tables_have_no_clock_and_deletes_no_last():
    tables = [
        ps.TableConfig(1, 4, name="user", optimizer=ps.SGD(1.0), dynamic=ps.Dynamic(evict="lru")),
        ps.TableConfig(9, 4, name="item", optimizer=ps.SGD(1.0)),
    ]
    engine = ps.Engine(ps.EmbeddingConfig.from_tables(tables))
    log = pa.concat_batches(
        [
            log_of([[7], [8]]).append_column("table", pa.array(["user"] * 2)),
            log_of([[], [5]]).append_column("table", pa.array(["item"])),
        ]
    )
    rows = [row for batch in engine.stage([log], last=True) for row in batch.to_pylist()]
    shown = [(row["table"], row["id"], row["op"], row["clock"], row["last"]) for row in rows]
    assert shown == [
        ("user", 7, "upsert", 0, 0),
        ("user", 7, "delete", 1, None),
        ("user", 8, "upsert", 1, 1),
        ("item", 5, "upsert", None, None),
    ]


def test_last_is_refused_where_no_table_is_dynamic():
    static = ps.Engine(ps.EmbeddingConfig.from_tables([ps.TableConfig(9, 4, name="user", optimizer=ps.SGD(1.0))]))
    with pytest.raises(ps.UsageError, match="last: no table is dynamic"):
        static.stage([log_of([[1]])], last=True)
    with pytest.raises(ps.UsageError, match="last: sets what deltas hold; give deltas= too"):
        engine_of().run([log_of([[1]])], last=True)


def test_a_stage_function_knows_the_columns_before_it_runs():
    stage = ps.stage_fn(config_of(ALL_POLICIES), last=True, numbered=True)
    batches = list(stage(iter([log_of(churning_steps(5))])))
    assert stage.schema == batches[0].schema
    assert {"op", "clock", "last"} <= set(stage.schema.names)


@pytest.mark.parametrize(("key_type", "last"), [("int64", False), ("uint64", True)])
def test_base_and_deltas_give_what_out_has(tmp_path, call, key_type, last):
    engine = engine_of(ps.Dynamic(min_count=2, evict="lru", key_type=key_type), rows=32)
    log = log_of(churning_steps(60))
    if key_type == "uint64":
        log = log.set_column(0, "id", log["id"].view(pa.uint64()))
    base, deltas, copy, out = (tmp_path / name for name in ("base", "deltas", "copy", "out"))
    engine.write_tables(base)
    engine.run([log], deltas=deltas, slots=True, last=last)
    engine.write_tables(out)
    command = [sys.executable, example.__file__, base, deltas, copy]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "step 60: 60 deltas applied, 0 known already\n"
    call(0, "diff", out, copy)
    assert len(engine.keys("user")) > 20
    assert engine.core.tables.dynamic["user"].directory.counts["evicted"] > 20


def test_the_example_detects_a_lost_delete(tmp_path):
    engine = engine_of(ps.Dynamic(evict="lru"), rows=32)
    engine.write_tables(tmp_path / "base")
    batches = list(engine.stage([log_of(churning_steps(30))], numbered=True))
    tables, keys = example.read_tables(tmp_path / "base", ["row"])
    follower = example.Follower(tables, keys=keys)
    kept = [batch.filter(pa.compute.equal(batch["op"], "upsert")) for batch in batches]
    with pytest.raises(example.BrokenError, match="its checksum differs"):
        follow(follower, kept)


def test_a_file_of_deltas_and_its_commits_resume_together(tmp_path):
    log = write(tmp_path / "log.arrows", [log_of(churning_steps(40))])
    whole = engine_of(ALL_POLICIES, rows=32)
    whole.run(log, deltas=tmp_path / "whole", last=True)
    for limit in (7, 22):
        folder, deltas = tmp_path / f"run{limit}", tmp_path / f"deltas{limit}"
        engine_of(ALL_POLICIES, rows=32).run(log, checkpoint=folder, every=3, limit=limit, deltas=deltas, last=True)
        ps.Engine.restore(folder).run(log, checkpoint=folder, resume=True, deltas=deltas, last=True)
        with pa.ipc.open_stream(deltas) as stream, pa.ipc.open_stream(tmp_path / "whole") as wanted:
            assert stream.read_all().equals(wanted.read_all())
        with pytest.raises(ps.StateError, match="its deltas have other columns"):
            ps.Engine.restore(folder).run(log, checkpoint=folder, resume=True, deltas=deltas)
