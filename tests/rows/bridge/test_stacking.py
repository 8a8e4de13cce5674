"""Tables that share arrays: one dispatch for all of them, and the same bytes as by themselves."""

import itertools

import jax
import numpy as np
import pytest
from device_table import addresses_of
from engines import stored
from evidence import examples
from hypothesis import given
from hypothesis import strategies as st

import penstock.updates as o
from penstock.api.engine import Engine
from penstock.base.errors import ConfigError, StateError
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.tables import TableConfig
from penstock.rows.bridge import dispatcher, stacking
from penstock.rows.bridge.sharding import largest_bucket

# (rows, dim): several of one dim, two dims that share arrays on a TPU, a table of one row.
SIZES = [(300, 8), (3, 8), (1025, 24), (90, 8), (1, 24)]


@pytest.fixture(autouse=True)
def _staged(monkeypatch):
    """As on an accelerator."""
    monkeypatch.setenv("PENSTOCK_VARIANT", "xla")


def config_of(sizes=SIZES, optimizers=None, sharding="DIV", bfloat16=()):
    optimizers = itertools.cycle(optimizers or [o.Adagrad(0.1)])
    tables = [
        TableConfig(rows, dim, name=f"t{number}", optimizer=next(optimizers))
        for number, (rows, dim) in enumerate(sizes)
    ]
    return stored(EmbeddingConfig.from_tables(tables), bfloat16, sharding)


def frame_of(seed, sizes=SIZES, share=0.3):
    """A gradient for some rows of most tables."""
    rng = np.random.default_rng(seed)
    tables = [number for number in range(len(sizes)) if rng.random() < 0.8] or [0]
    frame = {}
    for number in tables:
        rows, dim = sizes[number]
        ids = rng.integers(0, rows, 1 + int(share * rows))
        frame[f"t{number}"] = ids, rng.standard_normal((len(ids), dim), np.float32)
    return frame


def trained(engine, steps=range(2), sizes=SIZES):
    for step in steps:
        engine.apply(frame_of(step, sizes))
    return engine


def together(engine):
    return [[layout.name for layout in group.layouts] for group in engine.core.tables._groups]


@pytest.fixture
def dispatches(monkeypatch):
    """Who reads an arena, dispatch by dispatch."""
    seen, read_by = [], dispatcher.Arena.read_by

    def note(self, reader, fence):
        seen.append(reader)
        read_by(self, reader, fence)

    monkeypatch.setattr(dispatcher.Arena, "read_by", note)
    return seen


def test_an_engine_stacks_by_optimizer_and_by_whose_learning_rate_counts(monkeypatch):
    shared = lambda step: 0.1  # noqa: E731
    optimizers = [
        o.Adagrad(0.1),
        o.Adagrad(0.2),
        o.Adagrad(0.1),
        o.Adagrad(shared),
        o.Adagrad(shared),
        o.Adagrad(0.1, initial_accumulator_value=0.5),
    ]
    assert together(Engine(config_of([(10, 8)] * 6, optimizers))) == [["t0", "t2"], ["t1"], ["t3", "t4"], ["t5"]]
    monkeypatch.setenv("PENSTOCK_STACKS", "off")
    assert together(Engine(config_of([(10, 8)] * 2))) == [["t0"], ["t1"]]
    monkeypatch.setenv("PENSTOCK_STACKS", "of")
    with pytest.raises(ConfigError, match="PENSTOCK_STACKS: expected one of on, off, got 'of'"):
        Engine(config_of())


# ---- one dispatch


@pytest.mark.parametrize(("layout", "count"), [("plain", 3), ("tiled", 1)])
def test_a_step_over_32_tables_is_one_dispatch_per_stack(layout, count, dispatches, mesh_of, monkeypatch):
    monkeypatch.setenv("PENSTOCK_LAYOUT", layout)
    sizes = [(40, [4, 8, 32][number % 3]) for number in range(32)]
    engine = Engine(config_of(sizes), mesh_of(2))
    frame = {f"t{n}": (np.arange(9), np.ones((9, dim), np.float32)) for n, (_, dim) in enumerate(sizes)}
    engine.apply(frame)
    engine.core.wait()
    dispatches.clear()  # of the start, too
    engine.apply(frame)
    engine.core.wait()
    assert len(dispatches) == count
    assert all(reader.endswith(", step 1") for reader in dispatches)
    if layout == "tiled":
        assert dispatches == ["tables 't0', 't1', 't2' and 29 more, step 1"]


def test_more_rows_than_a_dispatch_may_bring_are_several_and_no_row_is_lost(dispatches, mesh_of, monkeypatch):
    monkeypatch.setattr(stacking, "largest_bucket", lambda *_: 64)
    sizes = [(100, 2), (50, 2), (100, 2)]
    engine = Engine(config_of(sizes, [o.SGD(1.0)], "MOD"), mesh_of(2))
    before = [engine.lookup(f"t{n}", range(rows)) for n, (rows, _) in enumerate(sizes)]
    dispatches.clear()
    engine.apply({f"t{n}": (np.arange(rows), np.ones((rows, 2), np.float32)) for n, (rows, _) in enumerate(sizes)})
    after = [engine.lookup(f"t{n}", range(rows)) for n, (rows, _) in enumerate(sizes)]
    assert 2 <= len(dispatches) <= 8
    assert all((a == b - 1).all() for a, b in zip(after, before, strict=True))


def test_a_gpu_takes_a_step_in_fewer_dispatches_with_the_same_bits(dispatches, mesh_of, monkeypatch):
    """The same programs, at the sizes of a GPU."""
    monkeypatch.setenv("PENSTOCK_LAYOUT", "plain")
    frame = {"t0": (np.arange(0, 80_000, 2), np.random.default_rng(0).standard_normal((40_000, 4), np.float32))}
    counts, hashes = [], []
    for platform in ("cpu", "gpu"):
        with monkeypatch.context() as patched:
            patched.setattr(stacking, "largest_bucket", lambda _, line, entry=platform: largest_bucket(entry, line))
            engine = Engine(config_of([(80_000, 4)]), mesh_of(1))
        engine.core.wait()
        dispatches.clear()
        engine.apply(frame)
        engine.core.wait()
        counts.append(len(dispatches))
        hashes.append(engine.state_hash())
    assert counts == [2, 1]
    assert hashes[0] == hashes[1]


def test_a_device_that_fails_names_the_tables_and_the_step(mesh_of, monkeypatch):
    engine = trained(Engine(config_of([(90, 8)] * 2), mesh_of(1)), range(1), [(90, 8)] * 2)
    engine.core.wait()

    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory")

    monkeypatch.setattr(engine.core.tables._groups[0].programs, "at", lambda *_: fail)
    both = {f"t{n}": (np.arange(3), np.ones((3, 8), np.float32)) for n in range(2)}
    engine.apply(both)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"^tables 't0', 't1', step 1: RESOURCE_EXHAUSTED"):
        engine.run(iter([]))
    with pytest.raises(StateError, match="an earlier step failed half way"):
        engine.apply(both)


# ---- the same bytes


FORMS = [("on", 1, "DIV", "plain"), ("on", 3, "DIV", "tiled"), ("on", 4, "MOD", "plain"), ("on", 8, "MOD", "tiled")]
FORMS += [("off", 3, "MOD", "tiled"), ("off", 8, "DIV", "plain")]


@pytest.mark.sampled("on-8-MOD-tiled")
@pytest.mark.parametrize(("stacks_", "devices", "sharding", "layout"), FORMS)
def test_one_hash_on_any_devices_stacked_or_not(stacks_, devices, sharding, layout, mesh_of, monkeypatch):
    monkeypatch.setenv("PENSTOCK_STACKS", stacks_)
    monkeypatch.setenv("PENSTOCK_LAYOUT", layout)
    actual = trained(Engine(config_of(sharding=sharding), mesh_of(devices))).state_hash()
    monkeypatch.delenv("PENSTOCK_VARIANT")  # the CPU's own way
    monkeypatch.delenv("PENSTOCK_LAYOUT")
    assert actual == trained(Engine(config_of(), mesh_of(2))).state_hash()


MIXED = [o.Adagrad(0.1), o.Adam(0.1), o.SGD(0.5), o.RowWiseAdagrad(learning_rate=0.1), o.Adam(0.1, lazy_adam=False)]
MIXED += [o.Adagrad(0.1, use_gradient_accumulation=False), o.FTRL(0.1)]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 200), st.sampled_from([1, 5, 8, 64, 65, 129])), min_size=2, max_size=4),
    picks=st.lists(st.integers(0, len(MIXED) - 1), min_size=1, max_size=2),
    devices=st.sampled_from([1, 2, 3, 8]),
    sharding=st.sampled_from(["DIV", "MOD"]),
    layout=st.sampled_from(["plain", "tiled"]),
    bfloat16=st.booleans(),
    required=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
)
@examples(4, 1)
def test_any_tables_hold_the_same_rows_stacked_or_not(
    sizes, picks, devices, sharding, layout, bfloat16, required, seed, mesh_of
):
    config = config_of(sizes, [MIXED[pick] for pick in picks], sharding, ["t1"] * bfloat16)
    engines = []
    for stacks_, form in (("on", layout), ("off", "plain")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PENSTOCK_STACKS", stacks_)
            patch.setenv("PENSTOCK_LAYOUT", form)
            engines.append(Engine(config, mesh_of(devices), num_required=required, seed=seed))
            trained(engines[-1], range(seed, seed + 2), sizes)
    assert engines[0].state_hash() == engines[1].state_hash()


def test_updating_one_table_leaves_the_others_of_its_stack(mesh_of):
    engine = Engine(config_of(), mesh_of(3))
    before = {name: engine.retrieve_parameters(name) for name in engine.config.table_names}
    rows = np.full((90, 8), 7, np.float32)
    engine.load_parameters("t3", rows, accumulators=rows)
    engine.apply({"t0": (np.array([0, 299]), np.ones((2, 8), np.float32))})
    for name, parts in before.items():
        changed = {
            part: np.flatnonzero((engine.retrieve_parameters(name)[part] != rows_).any(1))
            for part, rows_ in parts.items()
        }
        wanted = {"t0": [0, 299], "t3": list(range(90))}.get(name, [])
        assert all(place.tolist() == wanted for place in changed.values()), name


# ---- in place, and out to disk


@pytest.mark.evidence
@pytest.mark.parametrize("layout", ["plain", "tiled"])
def test_after_warmup_nothing_is_compiled_and_no_stack_copied_while_checkpointing_too(
    layout, compilations, mesh_of, monkeypatch, tmp_path, caplog
):
    monkeypatch.setenv("PENSTOCK_LAYOUT", layout)
    sizes = [(100, 8), (30, 8), (60, 24)]
    engine = Engine(config_of(sizes), mesh_of(8))  # the more devices, the fewer sizes to compile
    before = engine.state_hash()
    with caplog.at_level("INFO", "penstock"):
        count = engine.warmup()
    *ahead, done = [record.args for record in caplog.records if record.msg.startswith("warm-up")]
    assert sum(number for number, _ in ahead) == done[0] == count > 3
    assert engine.state_hash() == before
    pointers = {name: addresses_of(engine.core.tables.table(name)) for name in engine.config.table_names}
    assert pointers["t0"] == pointers["t1"]
    assert compilations
    compilations.clear()
    for step in range(9):
        engine.apply(frame_of(step, sizes, share=[0.01, 0.1, 0.5, 1][step % 4]))
        engine.lookup("t1", range(step + 1))
        engine.load_parameters("t2", np.ones((3, 24)), accumulators=np.ones((3, 24)), ids=[1, 5, 9])
        if step % 4 == 2:
            engine.save(tmp_path / "c")
    assert compilations == []
    assert {name: addresses_of(engine.core.tables.table(name)) for name in engine.config.table_names} == pointers


@pytest.mark.evidence
@pytest.mark.parametrize("first", ["on", "off"])
def test_a_checkpoint_says_nothing_of_stacks(first, mesh_of, monkeypatch, tmp_path):
    wanted = trained(Engine(config_of(), mesh_of(2)), range(4)).state_hash()
    monkeypatch.setenv("PENSTOCK_STACKS", first)
    trained(Engine(config_of(), mesh_of(2))).save(tmp_path / "c")
    monkeypatch.setenv("PENSTOCK_STACKS", {"on": "off", "off": "on"}[first])
    other = trained(Engine(config_of(), mesh_of(2)))
    other.save(tmp_path / "d")
    restored = Engine.restore(tmp_path / "c", mesh_of(3))
    assert trained(restored, range(2, 4)).state_hash() == wanted
    # The bytes, too: data files and manifests.
    written = [{p.name: p.read_bytes() for p in (tmp_path / folder).rglob("*") if p.is_file()} for folder in "cd"]
    assert len(written[0]) > 1
    assert written[0] == written[1]
