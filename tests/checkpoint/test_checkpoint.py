"""Save and restore: everything comes back bit for bit, on any mesh, and a resumed run ends as an unbroken one."""

import numpy as np
import pytest
from checkpoints import LOG, ROWS, commits, config_of, engine_of, everything, unbroken

import penstock as ps
import penstock.updates as o
from penstock.base.errors import StateError

# ---- save and restore


@pytest.mark.parametrize("frames", [0, 1, 4, 18])
def test_a_restored_engine_continues_with_the_same_bits(tmp_path, frames):
    engine = engine_of()
    engine.run(iter(LOG[:frames] or LOG[:1]), limit=frames)
    engine.save(tmp_path / "c")
    other = ps.Engine.restore(tmp_path / "c")
    assert everything(other) == everything(engine)
    for each in (engine, other):
        each.run(iter(LOG[frames:]), flush=True)
    assert other.state_hash() == engine.state_hash() == unbroken()


@pytest.mark.parametrize("devices", [1, 2, 3, 8])
@pytest.mark.parametrize("strategy", ["MOD", "DIV"])
def test_on_any_number_of_devices_and_with_either_sharding(tmp_path, mesh_of, devices, strategy):
    engine = engine_of(mesh=mesh_of(2))
    engine.run(iter(LOG[:13]))
    engine.save(tmp_path)
    proto = config_of().to_engine_proto()
    embedding = proto.tpu_embedding_configuration
    embedding.sharding_strategy = type(embedding).ShardingStrategy.Value("DIV_DEFAULT" if strategy == "DIV" else "MOD")
    config = ps.EmbeddingConfig.from_proto(proto)
    other = ps.Engine.restore(tmp_path, mesh_of(devices), config=config)
    assert other.config.sharding_strategy == strategy
    assert everything(other) == everything(engine)
    other.run(iter(LOG[13:]), flush=True)
    assert other.state_hash() == unbroken()


def test_frames_buffered_one_by_one_are_restored_one_by_one(tmp_path):
    config = config_of(accumulate=False)
    engine = engine_of(config)
    engine.run(iter(LOG[:8]))
    assert engine.gate.num_accumulated == 2
    engine.save(tmp_path)
    other = ps.Engine.restore(tmp_path)
    other.run(iter(LOG[8:]), flush=True)
    assert other.state_hash() == unbroken(config=config)


def test_a_gate_that_is_flushed_right_after_the_restore_uses_the_rates_of_its_last_frame(tmp_path):
    config = config_of(optimizer=o.Adagrad(o.DynamicLearningRate(0)))
    engine = engine_of(config)
    gradient = {"user": (np.array([3, 3]), np.ones((2, 4), np.float32))}
    engine.run([LOG[0]], learning_rates=[0.25])
    engine.save(tmp_path)
    other = ps.Engine.restore(tmp_path)
    assert other.gate.explain() == engine.gate.explain()
    for each in (engine, other):
        each.apply(gradient, learning_rates=[0.25])
        each.apply(gradient, learning_rates=[0.25])
    assert other.state_hash() == engine.state_hash()


@pytest.mark.parametrize("optimizer", [o.Adam(0.1), o.Adam(0.1, lazy_adam=False), o.FTRL(0.1)])
def test_any_optimizer_lazy_or_not(tmp_path, optimizer, small_blocks):
    config = config_of(optimizer=optimizer)
    engine = engine_of(config)
    engine.run(iter(LOG[:20]), checkpoint=tmp_path, every=2)
    other = ps.Engine.restore(tmp_path)
    assert everything(other) == everything(engine)
    other.run(iter(LOG[20:]), flush=True)
    assert other.state_hash() == unbroken(config=config)


def test_the_seed_is_restored_with_the_state(tmp_path):
    engine_of(seed=7).save(tmp_path)
    other = ps.Engine.restore(tmp_path)
    assert (other.seed, other.state_hash()) == (7, engine_of(seed=7).state_hash())


def test_saving_again_makes_a_small_delta_and_an_old_commit_goes(tmp_path):
    engine = engine_of(num_required=1)
    engine.save(tmp_path)
    for n in range(4):
        engine.apply({"user": (np.array([n]), np.ones((1, 4), np.float32))})
        engine.save(tmp_path)
    names = commits(tmp_path)
    assert [n for n in names if n.endswith("commit")] == [f"0000000{n}.commit" for n in (3, 4, 5)]
    base, *deltas = [n for n in names if not n.endswith("commit")]
    assert (base, len(deltas)) == ("00000001.base", 4)
    assert ps.Engine.restore(tmp_path).state_hash() == engine.state_hash()


# ---- what a configuration may change


def test_a_table_may_grow_and_its_new_rows_start_as_they_would(tmp_path):
    engine = engine_of()
    engine.run(iter(LOG[:9]))
    engine.save(tmp_path)
    grown = config_of(rows=ROWS + 700)
    other = ps.Engine.restore(tmp_path, config=grown)
    start = engine_of(grown).retrieve_parameters("user")
    for key, rows in other.retrieve_parameters("user").items():
        assert rows[:ROWS].tobytes() == engine.retrieve_parameters("user")[key].tobytes()
        assert rows[ROWS:].tobytes() == start[key][ROWS:].tobytes()
    other.save(tmp_path)
    assert ps.Engine.restore(tmp_path).state_hash() == other.state_hash()
    with pytest.raises(StateError, match=f"has {ROWS + 700} rows in the checkpoint and only {ROWS} in the config"):
        ps.Engine.restore(tmp_path, config=config_of())


def test_a_gate_of_another_kind_is_refused(tmp_path):
    engine_of().save(tmp_path)
    with pytest.raises(StateError, match="made with num_required 3, not 4; give the same"):
        ps.Engine.restore(tmp_path, num_required=4)
    with pytest.raises(StateError, match="made with reduction mean, not sum"):
        ps.Engine.restore(tmp_path, reduction="sum")


def test_schedules_have_to_be_given_again_on_restore(tmp_path):
    config = config_of(optimizer=o.Adagrad(lambda step: 0.1))
    engine_of(config).save(tmp_path)
    with pytest.raises(StateError, match=r"holds the schedule of tag 0, which no file can; give config="):
        ps.Engine.restore(tmp_path)
    assert ps.Engine.restore(tmp_path, config=config).state_hash() == engine_of(config).state_hash()


@pytest.mark.parametrize("path", [3, None, b"c"])
def test_arguments_that_are_no_path_are_refused(path):
    engine = engine_of()
    problem = rf"expected a path, got {path!r}"
    for call in (engine.save, engine.write_tables, engine.read_tables, ps.Engine.restore):
        with pytest.raises(ps.UsageError, match=problem):
            call(path)
    with pytest.raises(TypeError, match="checkpoint: expected a path, got 3"):
        engine.run(iter([]), checkpoint=3)
    with pytest.raises(ps.UsageError, match="deltas: expected a path, got 3"):
        engine.run(iter([]), deltas=3)
