"""Dynamic tables on XLA's devices: the programs of a static table, in place, and the bits of the CPU's tables."""

import numpy as np
import pytest
from device_table import addresses_of
from dynamic import ALL_POLICIES, churning_steps, config_of, log_of, push
from engines import stored

import penstock as ps
from penstock.model.updates import UpdateRule
from penstock.rows.bridge.backends import formatted
from penstock.rows.bridge.mesh_selection import make_mesh
from penstock.rows.bridge.program_cache import Programs
from penstock.rows.bridge.sharding import LINES, MAX_BUCKET, WRITE_GROWTH, Layout, buckets
from penstock.rows.bridge.stacking import Stack

XLA = [("xla", "plain"), ("xla", "tiled"), ("pallas", "tiled")]


@pytest.fixture
def on(monkeypatch):
    """on(variant, layout): tables created from now on are of this variant and layout; "" is the CPU's own."""

    def choose(variant, layout):
        monkeypatch.setenv("PENSTOCK_VARIANT", variant)
        monkeypatch.setenv("PENSTOCK_LAYOUT", layout)

    return choose


# The dims are those of no other test: programs compiled before would hide a new one.
@pytest.mark.sampled("xla-plain-11-False")
@pytest.mark.parametrize(
    ("variant", "layout", "dim", "bfloat16"),
    [
        ("xla", "plain", 11, False),
        ("xla", "plain", 13, True),
        ("xla", "tiled", 19, True),
        ("pallas", "tiled", 23, False),
    ],
)
def test_a_dynamic_table_runs_no_program_that_a_static_table_of_its_capacity_has_not(
    variant, layout, dim, bfloat16, on, mesh_of, compilations, tmp_path
):
    on(variant, layout)
    dynamic = config_of(ALL_POLICIES, rows=64, dim=dim)
    static = ps.EmbeddingConfig.from_tables([ps.TableConfig(64, dim, name="user", optimizer=ps.Adagrad(0.1))])
    if bfloat16:
        static, dynamic = stored(static, ["user"]), stored(dynamic, ["user"])
    ps.Engine(static, mesh_of(8)).warmup()  # the more devices, the fewer sizes to compile
    assert compilations
    compilations.clear()
    engine = ps.Engine(dynamic, mesh_of(8), num_required=2)
    pointers = addresses_of(engine.core.tables.table("user"))
    log = log_of(churning_steps(12), dim)
    changes = engine.run([log], checkpoint=tmp_path / "c", every=3, deltas=tmp_path / "d")
    assert changes.tables["user"].keys.admitted > 10
    engine.lookup("user", engine.keys("user"))
    engine.load_parameters("user", np.ones((1, dim)), ids=[-7], accumulators=np.ones((1, dim)))
    assert addresses_of(engine.core.tables.table("user")) == pointers
    ps.Engine.restore(tmp_path / "c", mesh_of(8)).state_hash()
    assert compilations == []


def test_any_number_of_new_rows_takes_one_of_a_few_programs(on, compilations):
    assert len(buckets(MAX_BUCKET, 8, WRITE_GROWTH)) <= 7
    assert len(buckets(MAX_BUCKET, LINES, WRITE_GROWTH)) <= 5
    on("xla", "plain")
    engine = ps.Engine(config_of(rows=5000, dim=17))
    push(engine, range(1000, 1600), dim=17)
    engine.core.wait()
    compilations.clear()
    for new in range(32):  # of 600 keys, whose updates are one program
        push(engine, [*range(1000 + new, 1600), *range(10_000 + 100 * new, 10_000 + 101 * new)], dim=17)
    engine.core.wait()
    assert len(compilations) == 2  # writes of at most 8 and 32 rows


@pytest.mark.sampled("packed-float32-1", "whole-bfloat16-1")
@pytest.mark.parametrize("lanes", [1, 128])
@pytest.mark.parametrize("bfloat16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dims", [(8, 32), (128,), (200,)], ids=["packed", "whole", "wide"])
def test_the_write_of_new_rows_is_in_place_and_needs_no_second_table(dims, bfloat16, lanes, mesh_of):
    if bfloat16 or lanes == 1:
        dims = dims[:1]  # others share no arrays
    rule = UpdateRule("adam", 2)
    layouts = [formatted(Layout(f"t{d}", 200_000, d, 2, 2, False, lanes, bfloat16), "xla") for d in dims]
    stack = Stack.of(layouts, rule)
    memory = Programs(make_mesh(mesh_of(2)), stack, rule, "xla").at("write", 128).memory_analysis()
    num_bytes = sum(layout.nbytes for layout in layouts)
    assert memory.alias_size_in_bytes == num_bytes // 2
    assert memory.temp_size_in_bytes < num_bytes // 10


# ---- stacks


OPTIMIZERS = [ps.Adagrad(0.1), ps.Adagrad(0.1), ps.SGD(0.5), ps.Adagrad(0.1), ps.SGD(0.5)]


def mixed_config():
    """Dynamic and static tables with two optimizers, of two dims."""
    tables = [
        ps.TableConfig(
            20 + number,
            [4, 4, 8, 4, 8][number],
            name=f"t{number}",
            optimizer=optimizer,
            dynamic=None if number in (1, 4) else ALL_POLICIES if number else ps.Dynamic(evict="lru"),
        )
        for number, optimizer in enumerate(OPTIMIZERS)
    ]
    return ps.EmbeddingConfig.from_tables(tables)


def pushed(engine, steps=40):
    for step in range(steps):
        frame = {}
        for number, spec in enumerate(engine.config.tables):
            if (step + number) % 4 == 0:
                continue
            keys = churning_steps(steps, 12, 12, number)[step]
            keys = keys if spec.dynamic is not None else np.unique(keys.view(np.uint64) % 20).astype(np.int64)
            grads = np.random.default_rng(step).standard_normal((len(keys), spec.dim), np.float32)
            frame[spec.name] = keys, grads
        engine.apply(frame)
    return engine


@pytest.mark.evidence
def test_dynamic_tables_share_arrays_with_each_other_and_with_static_tables(on, mesh_of, monkeypatch):
    wanted = pushed(ps.Engine(mixed_config(), num_required=2)).state_hash()
    for variant, layout, stacks, devices in [
        ("xla", "plain", "on", 3),
        ("xla", "tiled", "on", 1),
        ("xla", "tiled", "off", 8),
        ("pallas", "tiled", "on", 2),
    ]:
        on(variant, layout)
        monkeypatch.setenv("PENSTOCK_STACKS", stacks)
        engine = ps.Engine(mixed_config(), mesh_of(devices), num_required=2)
        groups = [[layout.name for layout in group.layouts] for group in engine.core.tables._groups]
        assert groups == ([["t0", "t1", "t3"], ["t2", "t4"]] if stacks == "on" else [[f"t{n}"] for n in range(5)])
        pushed(engine)
        assert engine.state_hash() == wanted
        for table in engine.core.tables.dynamic.values():
            assert table.directory.counts["evicted"] + table.directory.counts["expired"] > 5


# ---- other devices


@pytest.mark.sampled("xla-plain")
@pytest.mark.parametrize(("variant", "layout"), XLA[:2])
def test_a_run_continues_on_any_number_of_devices_with_frames_in_its_gate(variant, layout, on, mesh_of, tmp_path):
    log = log_of(churning_steps(40))
    whole = ps.Engine(config_of(ALL_POLICIES, rows=40), num_required=3)
    whole.run([log])
    on(variant, layout)
    ps.Engine(config_of(ALL_POLICIES, rows=40), mesh_of(1), num_required=3).run([log], checkpoint=tmp_path, limit=10)
    for devices, limit in ((2, 20), (4, 29), (3, None)):
        engine = ps.Engine.restore(tmp_path, mesh_of(devices))
        assert engine.gate.num_accumulated > 0
        engine.run([log], checkpoint=tmp_path, resume=True, limit=limit)
    assert engine.state_hash() == whole.state_hash()
    assert engine.core.tables.dynamic["user"].directory.counts["admitted"] > 60
