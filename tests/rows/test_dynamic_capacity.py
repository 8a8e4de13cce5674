"""Full dynamic tables: the refused step, what stays in the gate and in the commit, and how a larger table resumes."""

import os

import numpy as np
import pyarrow as pa
import pytest
import reference_directory
from dynamic import churning_steps, config_of, engine_of, log_of, push
from ipc import log as log_bytes

import penstock as ps
from penstock.cli.main import main


def keys_of_one_shard(capacity, number, seed=0):
    """So many keys of the first virtual shard of a table ``user``."""
    twin, keys = reference_directory.Directory(capacity, seed, "user"), []
    while len(keys) < number:
        keys += [
            key
            for key in range(len(keys) * 3, len(keys) * 3 + 3 * number)
            if twin.mixed(key) * len(twin.shards) >> 64 == 0
        ]
    return sorted(set(keys))[:number]


def deltas_of(folder):
    with pa.ipc.open_stream(folder / "deltas.arrows") as batches:
        return [batch for batch in batches if batch.num_rows]


@pytest.mark.parametrize("rates", [None, {0: 0.5}])
@pytest.mark.parametrize("later", [[], [[5], [1, 5]]])
def test_a_run_that_resumes_with_more_rows_is_the_run_that_had_them_from_the_start(tmp_path, rates, later):
    """Also its deltas, its learning rates and its report: the refused step is the first one of the resumed run."""
    optimizer = ps.Adagrad(lambda step: 0.1) if rates else ps.Adagrad(0.1)
    log = log_of([[1, 2], [1], [3], [4, 1], [2], *later])
    options = {"learning_rates": rates, "checkpoint": tmp_path / "run", "deltas": tmp_path / "deltas.arrows"}
    with pytest.raises(ps.CapacityError, match="no room for 1 of 1 new keys: 2 of 2 rows are in use"):
        engine_of(rows=2, optimizer=optimizer).run([log], **options)
    larger = ps.Engine.restore(tmp_path / "run", config=config_of(rows=9, optimizer=optimizer))
    assert (larger.global_step, larger.gate.num_accumulated) == (2, 1)
    report = larger.run([log], resume=True, **options)
    straight = engine_of(rows=9, optimizer=optimizer)
    whole = list(straight.stage([log], learning_rates=rates, numbered=True))
    assert larger.state_hash() == straight.state_hash()
    assert ps.Engine.restore(tmp_path / "run", config=config_of(rows=9, optimizer=optimizer)).state_hash() == (
        straight.state_hash()
    )
    assert [batch.to_pylist() for batch in deltas_of(tmp_path)] == [batch.to_pylist() for batch in whole]
    assert report.tables["user"].keys.admitted == straight.core.tables.dynamic["user"].directory.counts["admitted"] - 2
    assert report.steps == straight.global_step - 2


def test_a_commit_with_a_refused_step_is_restored_as_it_is(tmp_path):
    engine = engine_of(rows=2)
    push(engine, [1, 2])
    with pytest.raises(ps.CapacityError):
        push(engine, [3])
    engine.save(tmp_path)
    again = ps.Engine.restore(tmp_path)
    assert again.lookup("user", [1, 2, 3]).tobytes() == engine.lookup("user", [1, 2, 3]).tobytes()
    assert (again.global_step, again.gate.num_accumulated) == (1, 1)
    with pytest.raises(ps.CapacityError, match="no room for 1 of 1 new keys"):
        again.flush()


def test_the_gate_of_a_full_table_admits_no_frame_before_the_refused_step(tmp_path):
    engine = engine_of(rows=2)
    push(engine, [1, 2])
    states = []
    for keys in ([3], [1], [2, 7]):
        with pytest.raises(ps.CapacityError):
            push(engine, keys, contributor="a")
        states.append((engine.state_hash(), engine.gate.get_state()))
    assert states[0] == states[1] == states[2]
    engine.save(tmp_path)
    larger = ps.Engine.restore(tmp_path, config=config_of(rows=9))
    assert not push(larger, [1], local_step=1)  # stale: the refused step comes first
    assert (larger.global_step, larger.keys("user").to_pylist()) == (2, [1, 2, 3])


def test_a_refused_step_leaves_no_trace_in_any_table():
    tables = [
        ps.TableConfig(8, 4, name=name, optimizer=ps.SGD(1.0), dynamic=ps.Dynamic(expire_after=5)) for name in "ab"
    ]
    engine = ps.Engine(ps.EmbeddingConfig.from_tables(tables))

    def step(**keys):
        engine.apply({name: (np.array(ids), np.ones((len(ids), 4), np.float32)) for name, ids in keys.items()})

    engine.gate.set_global_step(2)
    step(a=[1], b=range(8))
    engine.gate.set_global_step(8)
    step(a=[2])
    absent, state = engine.lookup("a", [1]), engine.state_hash()
    assert engine.keys("a").to_pylist() == [2]
    engine.gate.set_global_step(4)  # the keys of step 2 are alive again, for this step
    with pytest.raises(ps.CapacityError, match="table 'b'"):
        step(a=[1], b=[8])
    assert engine.keys("a").to_pylist() == [2]
    assert engine.lookup("a", [1]).tobytes() == absent.tobytes()
    engine.gate.set_global_step(9)
    assert engine.state_hash() == state


def test_the_error_says_how_full_the_shard_and_the_table_are():
    keys = keys_of_one_shard(8192, 4100)
    engine = engine_of(rows=8192)
    push(engine, keys[:4000])
    before = engine.state_hash()
    how_full = "4000 of 8192 rows are in use, in one of the 2 virtual shards 4000 of 4096"
    with pytest.raises(ps.CapacityError, match=f"table 'user': no room for 4 of 100 new keys: {how_full}"):
        push(engine, keys[4000:])
    assert engine.state_hash() == before


@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize("evict", [None, "lru"])
def test_a_step_needs_a_row_for_each_of_its_keys(spare, evict):
    engine = engine_of(ps.Dynamic(evict=evict), rows=5)
    if evict:
        push(engine, range(100, 105))
    if spare:
        remedy = "begin anew with on_full: REJECT" if evict else "begin anew with evict or on_full: REJECT"
        with pytest.raises(ps.CapacityError, match=f"no room for 1 of 6 new keys: .*, or {remedy}"):
            push(engine, range(6))
        assert engine.keys("user").to_pylist() == ([*range(100, 105)] if evict else [])
    else:
        push(engine, range(5))
        assert engine.keys("user").to_pylist() == [0, 1, 2, 3, 4]


def test_a_full_table_whose_keys_all_occur_rejects_the_newcomer_which_waits():
    engine = engine_of(ps.Dynamic(evict="lru", on_full="reject"), rows=2)
    push(engine, [1, 2])
    push(engine, [1, 2, 3])
    assert engine.explain("user", 3) == "waits for room, last at step 1"
    assert engine.keys("user").to_pylist() == [1, 2]
    push(engine, [2, 3])  # now key 1 is a victim
    assert engine.keys("user").to_pylist() == [2, 3]


def test_a_load_into_a_full_table_evicts_where_the_table_does():
    engine = engine_of(ps.Dynamic(evict="lru"), rows=3)
    push(engine, [1])
    push(engine, [2])
    push(engine, [3])
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    engine.load_parameters("user", rows, ids=[3, 9], accumulators=rows + 1)
    assert engine.keys("user").to_pylist() == [2, 3, 9]
    assert engine.lookup("user", [3, 9]).tobytes() == rows.tobytes()
    with pytest.raises(ps.CapacityError, match="no room for 1 of 4 new keys"):
        engine.load_parameters("user", np.ones((4, 4)), ids=[4, 5, 6, 7], accumulators=np.ones((4, 4)))
    assert engine.keys("user").to_pylist() == [2, 3, 9]


def test_a_table_grows_across_a_change_of_its_shards_and_decides_as_one_that_had_these_keys(tmp_path):
    """4,000 rows are one virtual shard, 40,000 are eight. Keys, stamps and candidates move, and the twin continues."""
    policy = {"min_count": 2, "expire_after": 3, "forget_after": 30}
    dynamic = ps.Dynamic(**policy, evict="lru")
    steps = [np.unique(keys) for keys in churning_steps(30, 3900, 1200)]
    everything = np.unique(np.concatenate(steps))
    engine = engine_of(dynamic, rows=4000)
    engine.run([log_of(steps[:20])], checkpoint=tmp_path)
    larger = ps.Engine.restore(tmp_path, config=config_of(dynamic, rows=40_000))
    small, large = (each.core.tables.dynamic["user"].directory for each in (engine, larger))
    assert (small.num_shards, large.num_shards) == (1, 8)
    assert larger.lookup("user", everything).tobytes() == engine.lookup("user", everything).tobytes()
    records = [each.records("user", everything) for each in (engine, larger)]
    assert all((records[0][name] == records[1][name]).all() for name in records[0])
    twin = reference_directory.Directory(40_000, 0, "user", **policy, evict="lru")
    for state, names in (
        (large.state(), ("key", "last")),
        (large.candidates(), ("key", "last", "count", "generation")),
    ):
        for key, last, *count in zip(*(state[name].tolist() for name in names), strict=True):
            shard = twin.shards[twin.mixed(key) * 8 >> 64]
            place = shard.keys if not count else shard.old if count.pop() else shard.young
            place[key] = reference_directory.Record(last, *(count or [0]))
    for step, group in enumerate(steps[20:], 20):
        before = large.counts["admitted"], large.counts["expired"]
        push(larger, group)
        admitted, removed, rejected = twin.step(group.tolist(), [1] * len(group), [1] * len(group), step, step)
        counted = (large.counts["admitted"], large.counts["expired"])
        assert np.subtract(counted, before).tolist() == [len(admitted), len(removed)]
        assert len(admitted) > 0 < len(removed)
        assert rejected == 0
        assert sorted(large.state()["key"].tolist()) == sorted(key for shard in twin.shards for key in shard.keys)


@pytest.mark.parametrize("step", [-1, 2**32 - 1])
def test_steps_that_are_no_clock_are_refused_before_a_frame_enters(step):
    engine = engine_of(num_required=2)
    push(engine, [1])
    engine.gate.set_global_step(step)
    before = engine.gate.get_state()
    with pytest.raises(ps.StateError, match=f"the global step is {step}, and the gate opens only from 0 to 4294967294"):
        push(engine, [2])
    with pytest.raises(ps.StateError, match="the gate opens only from"):
        engine.flush()
    assert engine.gate.get_state() == before
    engine.gate.set_global_step(3)
    push(engine, [2])
    assert engine.keys("user").to_pylist() == [1, 2]


def test_a_directory_that_cannot_fit_the_machine_is_refused_before_memory_runs_out(
    tmp_path, refused, monkeypatch, capsys
):
    """Also where no table is needed."""
    config, log = tmp_path / "c.pbtxt", tmp_path / "log.arrows"
    config_of(rows=20_000_000, dim=1, optimizer=ps.SGD(0.1)).save(config)
    log.write_bytes(log_bytes([log_of([[1]], dim=1)]))
    counts = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 500_000_000 // 4096}
    monkeypatch.setattr(os, "sysconf", lambda name, ask=os.sysconf: counts.get(name) or ask(name))
    for command in ("replay", "plan"):
        assert "table 'user': its directory needs 0.8 GB, this machine has 0.5 GB" in refused(6, command, config, log)
    several = [
        ps.TableConfig(8_000_000, 1, name=name, optimizer=ps.SGD(0.1), dynamic=ps.Dynamic())
        for name in ("user", "item")
    ]
    ps.EmbeddingConfig.from_tables(several).save(config)
    line = "tables 'user', 'item': their directories need 0.6 GB, this machine has 0.5 GB"
    for command in ("replay", "plan"):
        assert line in refused(6, command, config, log)
    assert main(["validate", str(config), str(log)]) == 6
    assert line in capsys.readouterr().err
