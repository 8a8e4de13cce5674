"""The kernel for SparseCores: rows instead of lines, with XLA's bits, in every path that updates tables."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import row_kernel
from device_table import bytes_of, rule_of, some_rows, started, table_of
from jax.experimental.pallas import tpu as pltpu
from row_kernel import some_steps

import penstock as ps
from penstock.cli import doctor
from penstock.contrib import sparsecore
from penstock.contrib.functional.embedding_tables import EmbeddingTables
from penstock.model.updates import UPDATES
from penstock.rows.bridge import backends, canary, program_cache, tensorcore
from penstock.rows.bridge.mesh_selection import make_mesh
from penstock.rows.bridge.row_format import WITHOUT_KERNEL
from penstock.rows.bridge.sharding import Layout

RULES = sorted(set(UPDATES) - WITHOUT_KERNEL["sparsecore"])
# Dims that fill registers, whose rows divide lines or do not.
DIMS = (8, 16, 24, 32, 40, 64, 96, 120, 128)
# Tables of two stacks, and one whose rows fill no registers.
TABLES = {"a": (300, 16), "b": (70, 16), "c": (100, 48), "d": (90, 12)}
DEVICE = ps.Placement()
SHARED = program_cache.compiled


def compiled_anew(monkeypatch):
    """Compile kernels anew, other programs not."""
    kernels = lru_cache(SHARED.__wrapped__)
    monkeypatch.setattr(program_cache, "compiled", lambda *key: (kernels if "sparsecore" in key else SHARED)(*key))


@pytest.fixture
def interpreted(monkeypatch):
    """interpreted(how): the kernel runs that way, in blocks of 8 rows; it is compiled anew, other programs are not."""

    def set_up(how=True):
        monkeypatch.setattr(tensorcore, "INTERPRET", how)
        monkeypatch.setattr(sparsecore, "BLOCK", 8)
        monkeypatch.setattr(sparsecore, "SUBCORES", 1)
        monkeypatch.setattr(sparsecore, "apply", sparsecore.apply.__wrapped__)
        compiled_anew(monkeypatch)

    return set_up


def by_both(mesh_of, rule, dim, ids, grads, rows=600):
    """The parts of a table after a step: by XLA, and by the kernel."""
    tables = [started(table_of(mesh_of, rule, rows, dim, variant=name)) for name in ("xla", "sparsecore")]
    for table in tables:
        table.apply(ids, grads, 0.1)
    assert tables[1].backend.variant == "sparsecore"
    return [bytes_of(table) for table in tables]


@pytest.mark.sampled("adagrad")
@pytest.mark.parametrize("name", RULES)
def test_the_kernel_has_xlas_bits_for_every_rule(name, interpreted, mesh_of):
    interpreted()
    by_xla, by_kernel = by_both(
        mesh_of, rule_of(name), 8, *some_rows(0, 37, 600, 8)
    )  # the last of five blocks has pads
    assert by_kernel == by_xla


@pytest.mark.evidence
@pytest.mark.parametrize("name", ["adam", "row_wise_adagrad"])
@pytest.mark.parametrize("dim", DIMS)
def test_the_kernel_has_xlas_bits_for_every_dim_that_fills_registers(dim, name, interpreted, mesh_of):
    interpreted()
    by_xla, by_kernel = by_both(mesh_of, rule_of(name), dim, *some_rows(0, 27, 600, dim))
    assert by_kernel == by_xla


@pytest.mark.evidence
@pytest.mark.parametrize("name", ["adagrad", "row_wise_adagrad"])
def test_all_rows_of_a_line_may_be_in_one_step_in_any_blocks(name, interpreted, mesh_of):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

    interpreted(pltpu.InterpretParams(detect_races=True))
    rng = np.random.default_rng(0)
    ids = rng.permutation(64).astype(np.int64)  # the first four lines; neighbours are in different blocks
    by_xla, by_kernel = by_both(mesh_of, rule_of(name), 8, ids, rng.standard_normal((64, 8), np.float32), 1024)
    assert by_kernel == by_xla
    assert interpreter.races is not None
    assert not interpreter.races.races_found


# ---- the numbers of rows that a subcore has no instruction for, and tables that it cannot update


def test_the_root_in_software_is_within_two_units_of_the_last_place():
    values = np.float32(10.0) ** np.linspace(-37, 38, 20_001, dtype=np.float32)
    values = np.concatenate([values, np.arange(5000, dtype=np.float32), [np.float32(np.inf), np.float32(np.nan)]])
    right, actual = np.sqrt(values), np.asarray(sparsecore.software_root(values))
    assert (np.abs(right.view(np.int32) - actual.view(np.int32)) <= 2).all()
    assert np.isnan(sparsecore.software_root(np.float32([-1.0, -np.inf]))).all()


@pytest.mark.parametrize(
    ("kind", "dims"),
    [
        ("TPU v5", [8, 16, 24, 32, 48, 64, 96, 128]),
        ("TPU v6 lite", [8, 16, 24, 32, 48, 64, 96, 128]),
        ("TPU7x", [16, 32, 48, 64, 96, 128]),
        ("TPU v5 lite", []),
        ("TPU v4", []),
    ],
)
def test_rows_that_share_lines_and_fill_registers_are_possible_where_there_are_sparsecores(kind, dims):
    tried = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
    lines = {dim: Layout("t", 100, dim, 1, 1, False, 128).line for dim in tried}
    assert [dim for dim, line in lines.items() if sparsecore.fits(line, kind)] == dims


def test_three_buffers_of_rows_and_gradients_fit_a_subcore():
    for dim in DIMS:
        for slots, row_slots in ((0, False), (1, False), (1, True), (2, False), (3, False)):
            line = Layout("t", 100, dim, slots, 1, False, 128, row_slots=row_slots).line
            rows = sparsecore.block_of(line)
            numbers = 2 * dim + slots * (1 if row_slots else dim) + sparsecore.num_lists(line)
            assert 3 * 4 * rows * numbers <= 192 << 10
            assert rows % 16 == 0  # as many numbers as fill registers


def test_16_bit_weights_programs_of_users_and_several_processes_are_left_to_others(mesh_of):
    mesh, rule = make_mesh(mesh_of(1)), rule_of("adagrad")
    layout = Layout("t", 100, 8, 1, 1, False, 128)
    assert backends.possible("sparsecore", mesh, layout, rule)
    assert not backends.possible("sparsecore", mesh, layout, rule, processes=object())
    assert not backends.possible("sparsecore", mesh, layout, rule_of("user_defined_program"))
    assert not backends.possible("sparsecore", mesh, Layout("t", 100, 8, 1, 1, False, 128, True), rule)


# ---- engines, with a program of XLA in the place of the kernel


@pytest.fixture
def emulated(monkeypatch, tmp_path):
    """emulated(**faults): a machine with a TPU that has SparseCores, and a kernel with these faults"""

    def set_up(**faults):
        monkeypatch.setattr(backends, "platform", lambda mesh: "tpu")
        monkeypatch.setattr(sparsecore, "apply", partial(row_kernel.apply, **faults))
        monkeypatch.setattr(sparsecore, "local_apply", partial(row_kernel.local_apply, **faults))
        monkeypatch.setattr(sparsecore, "SUBCORES", 1)
        monkeypatch.setattr(canary, "verdicts", lambda: tmp_path / "verdicts")
        canary.failure.cache_clear()
        compiled_anew(monkeypatch)

    yield set_up
    canary.failure.cache_clear()


ADAM = ps.Adam(0.1)
BOTH_KINDS_OF_SLOTS = pytest.mark.parametrize("optimizer", [ADAM, ps.RowWiseAdagrad(0.1)], ids=["adam", "row_wise"])


def an_engine(mesh, tables=TABLES, placement=DEVICE, optimizer=ADAM, **arguments):
    configs = [
        ps.TableConfig(rows, dim, name=name, optimizer=optimizer, placement=placement)
        for name, (rows, dim) in tables.items()
    ]
    return ps.Engine(ps.EmbeddingConfig.from_tables(configs), mesh, seed=3, **arguments)


def after(engine, steps):
    for step in steps:
        engine.apply(step)
    return engine.state_hash()


@pytest.mark.evidence
@BOTH_KINDS_OF_SLOTS
def test_steps_lookups_and_loaded_rows_of_an_engine_are_xlas(optimizer, emulated, mesh_of, tmp_path):
    emulated()
    hashes, steps = [], list(some_steps(TABLES))
    for variant in ("xla", "sparsecore"):
        engine = an_engine(mesh_of(2), optimizer=optimizer, variant=dict.fromkeys("abc", variant) | {"d": "xla"})
        hashes.append([after(engine, steps), engine.lookup("a", np.arange(300)).tobytes()])
        engine.save(tmp_path / variant)
        engine = ps.Engine.restore(tmp_path / variant, mesh=mesh_of(3))
        hashes[-1].append(after(engine, steps[:1]))
        variants = engine.run([], table="a").variants
        assert variants == dict.fromkeys("abc", variant) | {"d": "xla"}
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    ("faults", "finding"),
    [
        ({}, "; SparseCores work if requested"),
        ({"loses_neighbours": True}, "; SparseCores fail their canary: step 0: line"),
    ],
)
def test_doctor_says_whether_sparsecores_work(faults, finding, emulated, mesh_of):
    mesh = make_mesh(mesh_of(1))
    assert doctor.sparsecores(mesh) == ""  # on a CPU
    emulated(**faults)
    assert doctor.sparsecores(mesh).startswith(finding)
    assert ("roots in software" in doctor.sparsecores(mesh)) == (not faults and not sparsecore.has_root())


@pytest.mark.evidence
@BOTH_KINDS_OF_SLOTS
def test_rows_of_a_cached_table_are_updated_at_their_places(optimizer, emulated, mesh_of):
    emulated()
    tables, hashes = {"a": (300, 16)}, []
    for variant, placement in (("xla", DEVICE), ("sparsecore", ps.Placement("cached", 40 * 4 * 16 * 3))):
        engine = an_engine(mesh_of(2), variant=variant, tables=tables, placement=placement, optimizer=optimizer)
        hashes.append(after(engine, some_steps(tables, 4, 0.2)))
        assert engine.run([], table="a").variants == {"a": variant}
    assert hashes[0] == hashes[1]


@pytest.mark.evidence
@BOTH_KINDS_OF_SLOTS
@pytest.mark.parametrize(("devices", "dim"), [(1, 8), (2, 24)])
def test_a_users_own_step_updates_rows(devices, dim, optimizer, emulated, mesh_of, monkeypatch):
    emulated()
    table = ps.TableConfig(60, dim, name="t", combiner="mean")
    features = {name: ps.FeatureConfig(table, name=name) for name in "ab"}
    config = ps.EmbeddingConfig.from_features(features, 8, optimizer)
    parameters = []
    for variant in ("xla", "sparsecore"):
        monkeypatch.setenv("PENSTOCK_VARIANT", variant)
        embedding, rng = EmbeddingTables(config, mesh_of(devices)), np.random.default_rng(0)
        tables = embedding.create()
        assert tables["t"].format.variant == variant

        @partial(jax.jit, donate_argnums=0)
        def step(tables, uses, embedding=embedding):
            def loss(activations):
                return sum(jnp.sum((leaf - 1) ** 2) for leaf in jax.tree.leaves(activations))

            return embedding.apply(tables, uses, jax.grad(loss)(embedding.gather(tables, uses)))

        for _ in range(2):
            ids = {name: [rng.integers(0, 60, rng.integers(0, 5)).tolist() for _ in range(8)] for name in "ab"}
            tables = step(tables, embedding.preprocess(ids))
        parameters.append(embedding.parameters(tables, "t"))
    for part, expected in parameters[0].items():
        np.testing.assert_allclose(parameters[1][part], expected, rtol=1e-6, atol=1e-7)
