"""Engines that hold a share of the rows: together they are one engine, bit for bit, whatever their number."""

import numpy as np
import pyarrow as pa
import pytest
from checkpoints import DIM, ROWS, batch, config_of, log_of
from dynamic import churning_steps
from dynamic import config_of as dynamic_config
from dynamic import log_of as dynamic_log
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharing import LocalJob

import penstock as ps
import penstock.updates as o
from penstock.checkpoint.store import Folder
from penstock.core import pipeline

COUNTS = [1, 2, 3, 5]
LOGS = [[batch(step, n) for step in range(8)] for n in range(3)]


def with_strategy(config, strategy):
    message = config.to_engine_proto()
    message.tpu_embedding_configuration.sharding_strategy = {"DIV": 0, "MOD": 1}[strategy]
    return ps.EmbeddingConfig.from_proto(message)


def sources():
    return [iter(log) for log in LOGS]


def gradients_of(rng, rows):
    values = pa.array(rng.standard_normal(2 * rows).astype(np.float32))
    return pa.FixedSizeListArray.from_arrays(values, 2)


def made_of(frames):
    """A source with a frame per list of ids, and always the same gradients."""
    schema = pa.schema({"id": pa.int64(), "gradient": pa.list_(pa.float32(), 2)})
    rng = np.random.default_rng(len(frames))
    return pa.RecordBatchReader.from_batches(
        schema,
        [pa.record_batch([pa.array(ids, pa.int64()), gradients_of(rng, len(ids))], schema=schema) for ids in frames],
    )


def alone(config, log, flush=True, **engine):
    whole = ps.Engine(config, **engine)
    whole.run(log, merge="round" if isinstance(log, list) else None, flush=flush)
    return whole


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("strategy", ["MOD", "DIV"])
@pytest.mark.promise("No way to scale changes a bit")
def test_shares_of_any_number_have_the_hash_of_one_engine(count, strategy):
    config = with_strategy(config_of(), strategy)
    wanted = alone(config, sources(), num_required=3).state_hash()
    assert LocalJob(config, count, num_required=3).run(sources()).flush().state_hash() == wanted


POLICIES = {
    "all": ps.Dynamic(),
    "counted": ps.Dynamic(min_count=2, expire_after=9, evict="lru"),
    "frames": ps.Dynamic(min_count=2, count="frames", expire_after=5, evict="lfu", half_life=7),
    "chance": ps.Dynamic(probability=0.5, expire_after=6),
}


def churn():
    """Keys over several virtual shards, of which each policy removes some."""
    return dynamic_log(churning_steps(40, 9000, 800))


@pytest.mark.sampled("all-2", "frames-3")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_shares_of_dynamic_tables_have_the_hash_of_one_engine(count, policy):
    config = dynamic_config(POLICIES[policy], rows=16_384)
    engine = alone(config, churn(), num_required=2)
    assert engine.core.tables.dynamic["user"].directory.num_shards == 4
    assert LocalJob(config, count, num_required=2).run(churn()).flush().state_hash() == engine.state_hash()


@pytest.mark.sampled("counted-3", "chance-5")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_rows_that_were_summed_before_they_were_sent_change_nothing(count, policy):
    for config, log in ((dynamic_config(POLICIES[policy], rows=16_384), churn()), (config_of(), sources())):
        job = LocalJob(config, count, sums=True).run(log if not isinstance(log, list) else sources())
        whole = alone(config, log)
        assert job.state_hash() == whole.state_hash()
        reports = [engine.core.table_reports() for engine in job.engines]
        for name, report in whole.core.table_reports().items():
            assert sum(item[name].rows for item in reports) == report.rows
            if report.keys is not None:
                for kind in ("keys", "admitted", "expired", "evicted", "unadmitted_rows"):
                    assert sum(getattr(item[name].keys, kind) for item in reports) == getattr(report.keys, kind), kind


def test_threads_that_divide_frames_find_the_number_of_rows_of_every_sum(monkeypatch):
    monkeypatch.setattr(pipeline, "ROWS_WORTH_SPLITTING", 4)
    config = dynamic_config(POLICIES["counted"], rows=16_384)
    job = LocalJob(config, 3, sums=True, threads=4).run(churn())
    assert job.state_hash() == alone(config, churn()).state_hash()


@given(
    st.lists(st.lists(st.lists(st.integers(0, 6), max_size=6), max_size=4), min_size=1, max_size=3),
    st.integers(1, 3),
    st.sampled_from(["MOD", "DIV"]),
    st.sampled_from(["mean", "sum"]),
    st.booleans(),
)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_hash_on_any_log(logs, num_required, strategy, reduction, accumulate):
    """Ids of a table of seven rows, several times in a frame; shares without a row of a frame are likely."""
    optimizer = o.Adam(0.1, lazy_adam=False) if accumulate else o.Adagrad(0.1, use_gradient_accumulation=False)
    config = with_strategy(
        ps.EmbeddingConfig.from_tables([ps.TableConfig(7, 2, name="t", optimizer=optimizer)]), strategy
    )
    engine = {"num_required": num_required, "reduction": reduction}
    wanted = alone(config, [made_of(log) for log in logs], False, **engine).state_hash()
    for count in (2, 3):
        job = LocalJob(config, count, sums=num_required == 1, **engine).run([made_of(log) for log in logs])
        assert job.state_hash() == wanted


@pytest.mark.sampled("MOD-1-3", "MOD-5-1", "DIV-3-2", "DIV-3-3", "dynamic-2-5")
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 5), (5, 1), (3, 3)])
@pytest.mark.parametrize("kind", ["MOD", "DIV", "dynamic"])
def test_any_number_of_shares_continues_where_another_stopped(tmp_path, before, after, kind):
    log, config = sources, with_strategy(config_of(), kind) if kind != "dynamic" else None
    if config is None:
        log, config = churn, dynamic_config(POLICIES["counted"], rows=16_384)
    wanted = alone(config, log(), num_required=3).state_hash()
    folder = tmp_path / "c"
    job = LocalJob(config, before, num_required=3).run(log(), limit=7)
    job.commit(folder)
    job.run(log(), limit=6)
    job.commit(folder)
    assert LocalJob(config, after, folder).run(log()).flush().state_hash() == wanted
    engine = ps.Engine.restore(folder)
    report = engine.run(log(), merge="round" if isinstance(log(), list) else None, resume=True, flush=True)
    assert report.skipped == 13
    assert engine.state_hash() == wanted


def test_a_second_commit_contains_only_what_has_changed(tmp_path):
    job = LocalJob(config_of(), 2, num_required=3).run(sources(), limit=12)
    job.commit(tmp_path)
    job.run(sources(), limit=6)
    job.commit(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir() if path.name != ".lock")
    assert names == [
        "00000001-0of2.a0.base", "00000001-1of2.a0.base", "00000001.commit",
        "00000002-0of2.a0.delta", "00000002-1of2.a0.delta", "00000002.commit",
    ]  # fmt: skip


def test_a_stale_owner_changes_no_commit_of_a_later_attempt(tmp_path):
    """The job abandoned the owner without a way to stop it. It writes its part after the next attempt has committed."""
    LocalJob(config_of(), 2, num_required=3).run(sources(), limit=12).commit(tmp_path)
    stale = LocalJob(config_of(), 2, tmp_path).run(sources(), limit=3)
    later = LocalJob(config_of(), 2, tmp_path).run(sources(), limit=6)
    later.commit(tmp_path, attempt="b1")
    stale.engines[1].session.write_part(Folder(tmp_path), 2, "a1")
    assert ps.Engine.restore(tmp_path).state_hash() == later.state_hash()
    later.run(sources(), limit=3)
    later.commit(tmp_path, attempt="b1")
    assert not list(tmp_path.glob("*.a1.*"))  # the next commit removes it
    assert ps.Engine.restore(tmp_path).state_hash() == later.state_hash()


def test_a_share_restores_only_the_files_that_contain_its_rows(tmp_path):
    LocalJob(config_of(), 4, num_required=3).run(sources(), limit=12).commit(tmp_path)
    damaged = tmp_path / "00000001-3of4.a0.base"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    ps.Engine.restore(tmp_path, share=(0, 4))
    ps.Engine.restore(tmp_path, share=(0, 2))  # ids of parts 0 and 2, or 0 and 1
    with pytest.raises(ps.StateError, match=r"00000001-3of4\.a0\.base: .* cut"):
        ps.Engine.restore(tmp_path, share=(1, 2))


@pytest.mark.parametrize("change", ["more rows", "another strategy", "keys"])
@pytest.mark.parametrize("counts", [(2, 2), (3, 2), (4, 3)])
def test_shares_restore_rows_that_belong_to_other_shares_than_when_they_were_written(tmp_path, counts, change):
    LocalJob(config_of(), counts[0]).run(sources()).commit(tmp_path)
    optimizers = {"user": (DIM, o.Adagrad(0.1)), "item": (2, o.SGD(0.5, use_gradient_accumulation=True))}
    more = {"dynamic": ps.Dynamic()} if change == "keys" else {}
    rows = {"more rows": ROWS + 900, "another strategy": ROWS, "keys": 8192}[change]
    tables = [ps.TableConfig(rows, dim, name=name, optimizer=each, **more) for name, (dim, each) in optimizers.items()]
    strategy = "MOD" if change == "another strategy" else "DIV"
    config = with_strategy(ps.EmbeddingConfig.from_tables(tables), strategy)
    restored = LocalJob(config, counts[1], tmp_path)
    assert restored.state_hash() == ps.Engine.restore(tmp_path, config=config).state_hash()


def test_a_share_refuses_calls_that_need_whole_tables(tmp_path):
    engine = ps.Engine(config_of(), share=(1, 3))
    with pytest.raises(ps.UsageError, match="id 0 belongs to share 0, and this engine holds share 1 of 3"):
        engine.lookup("user", [0])
    with pytest.raises(ps.UsageError, match="table 'user': this engine holds only share 1 of 3 of its rows"):
        engine.table("user")
    with pytest.raises(ps.UsageError, match="state hash needs whole tables, and this engine holds only share 1 of 3"):
        engine.state_hash()
    with pytest.raises(ps.UsageError, match="holds a share of the rows, and only its job commits all of them"):
        engine.save(tmp_path)
    with pytest.raises(ps.UsageError, match="holds a share of the rows, and only its job commits all of them"):
        engine.run(iter(LOGS[0]), checkpoint=tmp_path / "c")
    for share in ((3, 3), (-1, 2), (0, 0), 1, ("a", 2)):
        with pytest.raises(ps.UsageError, match="share"):
            ps.Engine(config_of(), share=share)


@pytest.mark.parametrize("count", [1, 3])
def test_the_tables_of_all_shares_are_written_as_one(tmp_path, count):
    for name, config, log in (("s", config_of(), sources), ("d", dynamic_config(rows=16_384), churn)):
        engine = alone(config, log(), num_required=3)
        engine.write_tables(tmp_path / name)
        written = LocalJob(config, count, num_required=3).run(log()).flush().tables.write(tmp_path / f"{name}{count}")
        for path in written:
            assert path.read_bytes() == (tmp_path / name / path.name).read_bytes()


def test_shares_that_have_diverged_are_no_commit(tmp_path):
    job = LocalJob(config_of(), 2, num_required=3).run(sources(), limit=12)
    job.engines[1].flush()
    job.engines[1].apply({"user": (np.array([0]), np.ones((1, DIM), np.float32))})
    with pytest.raises(ps.StateError, match="share 1 and share 0 differ in gate"):
        job.commit(tmp_path)
    assert not list(tmp_path.glob("*.commit"))


def test_a_bad_row_of_another_share_stops_every_share_before_the_frame():
    bad = log_of([0])[0]
    grads = np.zeros((1, DIM), np.float32)
    for rank in range(3):
        engine = ps.Engine(config_of(), share=(rank, 3))
        engine.run([bad])
        with pytest.raises(ps.InputError, match=f"id {ROWS}|got {ROWS}"):
            engine.apply({"user": (np.array([1, ROWS]), np.concatenate([grads, grads]))})
        assert engine.global_step == 1


@pytest.mark.sampled("MOD-1-2", "non-lazy-3-1", "dynamic-3-3")
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("per_steps", [1, 3])
@pytest.mark.parametrize("kind", ["MOD", "DIV", "non-lazy", "dynamic"])
def test_the_deltas_of_all_shares_are_those_of_one_engine(count, per_steps, kind):
    options = {"per_steps": per_steps, "slots": True}
    if kind == "dynamic":
        config, log, options = dynamic_config(POLICIES["counted"], rows=16_384), churn, {**options, "last": True}
    else:
        optimizer = o.Adam(0.1, lazy_adam=False) if kind == "non-lazy" else None
        config, log = with_strategy(config_of(optimizer=optimizer), kind if kind != "non-lazy" else "MOD"), sources
    engine = ps.Engine(config, num_required=3)
    merge = "round" if isinstance(log(), list) else None
    wanted = list(engine.stage(log(), merge=merge, flush=True, numbered=True, **options))
    job = LocalJob(config, count, num_required=3, frames_per_block=1).emit(**options).run(log()).flush()
    assert len(wanted) >= 3
    assert [batch.to_pylist() for batch in job.deltas] == [batch.to_pylist() for batch in wanted]
    assert job.deltas[0].schema == wanted[0].schema
