"""Which rows of cached tables move, and what happens if the devices or memory fail meanwhile."""

import cached
import jax
import numpy as np
import pytest
from cache_rule import simulated
from device_table import addresses_of
from ipc import log

import penstock as ps


def engine_of(mesh, places, look_ahead=0, **arguments):
    return ps.Engine(cached.config_of(cached.cached(places, look_ahead), ["plain"]), mesh, **arguments)


def step(engine, ids, seed=0):
    """Apply one step to the table ``plain``."""
    grads = np.random.default_rng(seed).standard_normal((len(ids), 3)).astype(np.float32)
    for contributor in ("a", "b"):
        engine.apply({"plain": (np.array(ids), grads)}, contributor=contributor)


def steps_of(*several, placement):
    engine = ps.Engine(cached.config_of(placement, ["plain"]))
    for seed, ids in enumerate(several):
        step(engine, ids, seed)
    return engine


@pytest.mark.sampled("host")
@pytest.mark.parametrize("variant", ["host", "xla", "pallas"])
def test_a_row_that_comes_down_is_updated_in_the_next_step(variant, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VARIANT", variant)
    ids = [[0, 1], [2, 3], [0, 2], [1, 3], [0, 1], [3, 2]]
    engine = steps_of(*ids, placement=cached.cached(2))
    assert engine.state_hash() == steps_of(*ids, placement=lambda spec: ps.Placement()).state_hash()
    assert cached.counts(engine) == (2, 10, 8)  # hits: row 2 in the third step, row 1 in the fifth


@pytest.mark.sampled("host", "xla")
@pytest.mark.parametrize("variant", ["host", "xla", "pallas"])
def test_a_step_of_more_rows_than_places_is_carried_out_in_several(variant, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VARIANT", variant)
    ids = [[5, 6, 7], range(20), range(10, 30)]
    engine = steps_of(*ids, placement=cached.cached(8))
    assert engine.state_hash() == steps_of(*ids, placement=lambda spec: ps.Placement()).state_hash()
    moves = simulated([[row_id] for row_id in ids], 8, 0)
    assert cached.counts(engine) == (
        sum(hits for *_, hits in moves),
        sum(len(up) for up, *_ in moves),
        sum(len(down) for _, down, _ in moves),
    )


def test_a_new_run_counts_anew(mesh_of):
    engine = engine_of(mesh_of(1), places=300)
    engine.run(cached.log_of(names=["plain"]))
    assert cached.counts(engine)[1] > 50
    engine.run(cached.log_of(names=["plain"]))
    assert cached.counts(engine) == (engine.watch.updated["plain"], 0, 0)


def test_a_replay_prints_what_moved(tmp_path, call):
    call(0, "synth", tmp_path / "log.arrows", "--rows", 400, "--rows-per-step", 40, "--vocabulary", 90, "--dim", 4)
    message = ps.EmbeddingConfig.load(tmp_path / "log.pbtxt").to_engine_proto()
    name = message.tpu_embedding_configuration.table_descriptor[0].name
    settings = next((table for table in message.table if table.name == name), None) or message.table.add(name=name)
    settings.placement.where = "CACHED"
    settings.placement.device_bytes = 32 * 30
    settings.placement.look_ahead = 0
    ps.EmbeddingConfig.from_proto(message).save(tmp_path / "cached.pbtxt")
    text, printed = call(0, "replay", tmp_path / "cached.pbtxt", tmp_path / "log.arrows")
    cache = printed["tables"][name]["cache"]
    assert cache["places"] == 30
    assert cache["bytes"] == (cache["up"] + cache["down"]) * 32
    updates = cache["hits"] + cache["up"]
    assert (
        f"cache     {name}: {cache['hits'] / updates:.1%} of {updates} updates hit 30 cached rows; {cache['up']} up, "
        in text
    )
    assert "on the host, cached" in call(0, "inspect", tmp_path / "cached.pbtxt")[0]


def test_the_moves_of_all_passes_are_summed(tmp_path, call):
    cached.config_of(cached.cached(1.0), ["plain"]).save(tmp_path / "tables.pbtxt")
    (tmp_path / "log.arrows").write_bytes(log(cached.log_of(names=["plain"])))
    words = (tmp_path / "tables.pbtxt", tmp_path / "log.arrows", "--out", tmp_path / "out")
    reports = [call(0, *command, *words)[1]["tables"]["plain"] for command in (["replay"], ["passes", "--passes", 3])]
    for report in reports:
        del report["cache"]["waited_ms"]
        assert report["cache"]["up"] == report["distinct"]  # each row goes up once, as there is room for all
    assert reports[0] == reports[1]


@pytest.mark.evidence
@pytest.mark.parametrize("variant", ["host", "xla", "pallas"])
def test_moves_copy_no_table_and_compile_nothing_once_warm(variant, mesh_of, compilations, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VARIANT", variant)
    engine = ps.Engine(cached.config_of(cached.cached(40)), mesh_of(2))
    engine.core.tables.warm()
    before = [addresses_of(engine.core.tables.table(name)) for name in cached.DIMS]
    compilations.clear()
    engine.run(cached.log_of())
    assert [addresses_of(engine.core.tables.table(name)) for name in cached.DIMS] == before
    assert compilations == []


def test_rows_of_new_keys_are_created_on_the_device_and_not_read_from_the_host(mesh_of, monkeypatch):
    """Rows of the keys that lost them are neither read: they get new values where they are."""
    config = cached.config_of(cached.cached(150), ["keyed"])
    engine = ps.Engine(config, mesh_of(2))
    table = engine.core.tables.cached["keyed"]
    read = []
    copy_rows = table._host.copy_rows
    monkeypatch.setattr(table._host, "copy_rows", lambda *arguments: read.append(arguments[1]) or copy_rows(*arguments))
    device = ps.Engine(cached.config_of(names=["keyed"]), mesh_of(2))
    for first in range(0, 600, 100):
        for item in (engine, device):
            item.apply({"keyed": (np.arange(first, first + 100), np.ones((100, 8)))}, contributor=0)
            item.apply({"keyed": (np.arange(first, first + 100), np.ones((100, 8)))}, contributor=1)
    assert read == []
    assert engine.state_hash() == device.state_hash()


# ---- failures


class Lost:
    """A part of rows whose computation failed on the device."""

    shape = (1, 1, 6)

    def copy_to_host_async(self):
        pass

    def __array__(self, *_, **__):
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")


def refuse(*_):
    raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")


@pytest.mark.parametrize("read", [refuse, lambda *_: [Lost()]], ids=["dispatch", "transfer"])
def test_a_device_that_fails_with_rows_on_their_way_down_fails_the_engine_and_not_its_commits(
    read, mesh_of, tmp_path, monkeypatch
):
    monkeypatch.setenv("PENSTOCK_VARIANT", "xla")
    batches = cached.log_of(steps=8, names=["plain"])
    whole = engine_of(mesh_of(2), places=20)
    whole.run(batches)
    engine = engine_of(mesh_of(2), places=20)
    engine.run(batches, checkpoint=tmp_path / "c", every=1, limit=7)
    programs = engine.core.tables.cached["plain"]._device.programs
    original = programs.at
    monkeypatch.setattr(programs, "at", lambda kind, *arguments: read if kind == "read" else original(kind, *arguments))
    with pytest.raises(jax.errors.JaxRuntimeError, match="the device is gone"):
        engine.run(batches, resume=True, checkpoint=tmp_path / "c", every=100)
    for use in (engine.state_hash, lambda: engine.lookup("plain", [1]), lambda: step(engine, [1])):
        with pytest.raises(ps.StateError, match="an earlier step failed half way"):
            use()
    again = ps.Engine.restore(tmp_path / "c", mesh_of(2))
    assert again.global_step == 3
    again.run(batches, resume=True, checkpoint=tmp_path / "c", every=3)
    assert again.state_hash() == whole.state_hash()
