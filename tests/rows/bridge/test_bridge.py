"""Tables on devices: in place, nothing compiled twice, the same start and the same rows on any mesh."""

import math

import jax
import numpy as np
import pytest
from device_table import addresses_of, device_table, shapes_of, some_rows
from engines import config_of, stored
from evidence import examples
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.engine import Engine
from penstock.base.errors import ConfigError
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.placement import Placement
from penstock.model.config.tables import TableConfig
from penstock.model.updates import SGD, Adagrad, Ops, UpdateRule, update
from penstock.pyx.initial_rows import philox_key
from penstock.rows.bridge.mesh_selection import make_mesh
from penstock.rows.bridge.program_cache import Programs
from penstock.rows.bridge.sharding import MAX_BUCKET, NUM_SHARDS, STAGED_ON_GPU, Layout, bucket, buckets, largest_bucket
from penstock.rows.bridge.stacking import Stack
from penstock.rows.initializers import InitialRows

DEVICES = [1, 2, 3, 4, 8]
both_variants = pytest.mark.parametrize("variant", ["host", "xla"])


def table_of(mesh, variant, rows=5000, dim=8, slots=(0.1,), mod=False):
    layout = Layout("t", rows, dim, len(slots), mesh.size, mod)
    rule = UpdateRule("adagrad", 1) if slots else UpdateRule("stochastic_gradient_descent", 0)
    return device_table(mesh, layout, rule, slots, variant=variant)


@pytest.mark.sampled("3-host", "8-xla")
@both_variants
@pytest.mark.parametrize("devices", DEVICES)
def test_an_update_never_moves_or_copies_a_table(devices, variant, mesh_of):
    table = table_of(mesh_of(devices), variant)
    table.fill(lambda ids: np.ones((len(ids), 8), np.float32))
    pointers = addresses_of(table)
    assert len(set(pointers)) == devices
    sizes = [1, 101, 900, 2901]  # XLA compiles a program for each
    for step in range(30):
        table.apply(*some_rows(step, sizes[step % 4], 5000, 8), 0.1)
        table.read(np.arange(3))  # what was read must not keep the table from being donated
    table.wait()
    assert addresses_of(table) == pointers


@pytest.mark.parametrize("algorithm", ["adagrad", "row_wise_adagrad"])
@pytest.mark.parametrize("devices", [1, 3])
def test_the_device_program_aliases_its_table_and_needs_no_second_one(devices, algorithm, mesh_of):
    mesh, rule = make_mesh(mesh_of(devices)), UpdateRule(algorithm, 1)
    layout = Layout("t", 200_000, 32, 1, devices, False, row_slots=rule.row_slots)
    memory = Programs(mesh, Stack.of([layout], rule), rule, "xla").at("apply", 256).memory_analysis()
    assert memory.alias_size_in_bytes == layout.nbytes // devices
    assert memory.temp_size_in_bytes < 1 << 20


NON_LAZY = UpdateRule("adam", 2, (("beta1", 0.5), ("beta2", 0.75), ("epsilon", 0.25)), non_lazy=True)


def whole_table(rows, dim, devices, variant):
    """A table whose optimizer is not lazy, and its rows, all ones."""
    layout = Layout("t", rows, dim, 2, devices.size, False)
    table = device_table(devices, layout, NON_LAZY, (1.0, 1.0), variant=variant)
    table.fill(lambda ids: np.ones((len(ids), dim), np.float32))
    return table


@pytest.mark.sampled("3-host", "3-xla")
@both_variants
@pytest.mark.parametrize("devices", [1, 3, 8])
def test_an_update_of_every_row_moves_no_table_and_each_row_once(devices, variant, mesh_of):
    # On few devices more rows each than are swept at once, and no multiple of that.
    table = whole_table(30_011, 4, mesh_of(devices), variant)
    pointers, seen = addresses_of(table), np.ones((30_011, 4), np.float32)
    momenta = velocities = seen
    for step in range(3):
        ids, grads = some_rows(step, [100, 0, 30_011][step], 30_011, 4)
        whole = np.zeros_like(seen)
        whole[ids] = grads
        seen, (momenta, velocities) = update(Ops(np), NON_LAZY, np.float32(0.1), whole, seen, (momenta, velocities))
        table.apply(ids, grads, 0.1)
    table.wait()
    assert addresses_of(table) == pointers
    for part, wanted in enumerate((seen, momenta, velocities)):
        assert table.read(np.arange(30_011), part).tobytes() == wanted.tobytes()


@both_variants
def test_an_update_of_every_row_compiles_nothing_in_a_steady_state(variant, compilations, mesh_of):
    table = whole_table(5000, 4, mesh_of(2), variant)
    for size in (3, 700):
        table.apply(*some_rows(size, size, 5000, 4), 0.1)
    table.wait()  # compiled when it is dispatched, by another thread
    compilations.clear()
    for step in range(10):
        table.apply(*some_rows(step, [3, 0, 700][step % 3] - step % 2 * (step % 3 > 1), 5000, 4), 0.1 * step)
    table.wait()
    assert compilations == []


def test_a_steady_state_compiles_nothing_whatever_the_rate(compilations):
    config = EmbeddingConfig.from_tables(
        [TableConfig(5000, 8, name="t", optimizer=Adagrad(lambda step: 0.1 / (1 + step)))]
    )
    engine = Engine(config)
    sizes = [3, 90, 700, 2500]
    for step, size in enumerate(sizes):
        engine.apply({"t": some_rows(step, size, 5000, 8)})
    jax.jit(lambda x: x + 44)(1.0)
    assert compilations  # the listener hears
    compilations.clear()
    for step in range(40):
        # Other sizes, of the same buckets; another learning rate in every step.
        engine.apply({"t": some_rows(step, sizes[step % 4] - step % 3, 5000, 8)})
    assert engine.global_step == 44
    assert compilations == []


def test_few_buckets_serve_all_sizes():
    buckets = sorted({bucket(n) for n in range(1, MAX_BUCKET + 1)})
    assert all(b % 8 == 0 for b in buckets)
    assert len(buckets) <= 24
    assert all(n <= bucket(n) for n in range(MAX_BUCKET + 1))
    assert buckets[-1] == MAX_BUCKET
    padding = [bucket(n) / n for n in range(256, MAX_BUCKET)]
    assert np.mean(padding) < 1.3


@pytest.mark.parametrize(
    ("dim", "slots", "rows"),
    [(8, 2, 1 << 20), (32, 1, 1 << 20), (128, 0, 1 << 20), (128, 2, 327_680), (200, 2, 196_608), (4096, 2, MAX_BUCKET)],
)
def test_a_gpu_updates_as_many_rows_at_once_as_it_may_stage(dim, slots, rows):
    line = Layout("t", 10_000_000, dim, slots, 1, False).line
    assert largest_bucket("gpu", line) == rows
    assert rows * line.nbytes(1) <= STAGED_ON_GPU or rows == MAX_BUCKET
    assert buckets(rows, largest=rows)[-1] == rows
    assert {largest_bucket(platform, line) for platform in ("cpu", "tpu")} == {MAX_BUCKET}


@both_variants
@pytest.mark.parametrize("mod", [False, True])
def test_a_step_of_more_rows_than_a_bucket_updates_every_row_once(mod, variant, mesh_of):
    table = table_of(mesh_of(2), variant, rows=150_000, dim=2, slots=(), mod=mod)
    table.apply(np.arange(150_000), np.ones((150_000, 2), np.float32), 1.0)
    assert all((block == -1).all() for block in table.stream())


@given(
    st.integers(1, 4000),
    st.sampled_from([1, 2, 3, 5, 8]),
    st.booleans(),
    st.lists(st.integers(0, 3999), min_size=1, max_size=50),
)
@examples(60, 15)
def test_every_id_has_its_own_place(vocabulary, devices, mod, ids):
    layout = Layout("t", vocabulary, 4, 0, devices, mod)
    ids = np.unique(np.array(ids) % vocabulary)
    devices_of, rows = layout.locate(ids)
    assert len(set(zip(devices_of.tolist(), rows.tolist(), strict=True))) == len(ids)
    assert rows.max() < layout.rows_per_device


def test_padding_of_the_layout_is_bounded():
    for vocabulary in (1, 1000, 10**6, 10**9):
        for devices in (1, 3, 8, 1024):
            layout = Layout("t", vocabulary, 4, 1, devices, False)
            assert shapes_of(layout)[0][0] <= (vocabulary + NUM_SHARDS) * (1 + devices / NUM_SHARDS)


def test_a_table_too_large_for_its_devices_is_refused_before_memory_is_asked_for():
    with pytest.raises(ConfigError, match=r"table 't': \d+ rows per device do not fit 32-bit row numbers; use more"):
        Layout("t", 2**33, 4, 1, 2, False)


@pytest.mark.parametrize("placement", [Placement(), Placement("cached", 1), Placement("cached", 2**60)], ids=str)
def test_tables_that_cannot_fit_the_machine_are_refused_before_it_runs_out_of_memory(placement):
    tables = [TableConfig(1_900_000_000, 64, name="t", placement=placement)]
    config = EmbeddingConfig.from_tables(tables, Adagrad(0.1))
    with pytest.raises(MemoryError, match=r"the tables with their slots need 97\d\.\d GB, this machine has"):
        Engine(config)


def test_settings_of_the_callers_jax_programs_do_not_change_updates(mesh_of):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    config = EmbeddingConfig.from_tables([TableConfig(800, 4, name="t")], Adagrad(0.1))
    ids, grads = some_rows(0, 50, 800, 4)
    plain = Engine(config, mesh_of(1))
    plain.apply({"t": (ids, grads)})
    with jax.set_mesh(mesh), jax.transfer_guard("disallow"):
        engine = Engine(config, mesh)
        engine.apply({"t": (ids, grads)})
        assert engine.state_hash() == plain.state_hash()
        copy = engine.table("t")
    assert copy.sharding.mesh.axis_names == ("x", "y")
    assert not copy.sharding.is_fully_replicated
    assert np.asarray(copy).tobytes() == plain.lookup("t", range(800)).tobytes()
    # On the caller's mesh: it goes together with the caller's own arrays.
    own = jax.device_put(np.ones((800, 4), np.float32), copy.sharding)
    assert jax.jit(lambda a, b: a + b)(copy, own).shape == (800, 4)


# ---- the start


def engine_of(mesh, seed=0, sharding="DIV", rows=1003):
    return Engine(stored(config_of(SGD(0.1), "ab", 5, rows), sharding=sharding), mesh, seed=seed)


def test_the_start_depends_on_seed_table_and_row_and_on_no_mesh(mesh_of):
    hashes = {engine_of(mesh_of(n), sharding=s).state_hash() for n in DEVICES for s in ("DIV", "MOD")}
    assert len(hashes) == 1
    assert engine_of(mesh_of(1), seed=1).state_hash() not in hashes
    engine = engine_of(mesh_of(1))
    assert engine.lookup("a", [0]).tolist() != engine.lookup("b", [0]).tolist()
    # A longer table begins with the same rows.
    assert (
        engine_of(mesh_of(1), rows=2000).lookup("a", range(1003)).tobytes() == engine.lookup("a", range(1003)).tobytes()
    )


def drawn_rows(seed, table, ids, dim):
    rows, key = np.empty((len(ids), dim), np.float32), philox_key(b"start", seed, table).hex()
    InitialRows("normal", 1 / math.sqrt(dim), 0.0, key).fill(np.asarray(ids), rows)
    return rows


def test_the_start_is_tensorflows_truncated_normal():
    drawn = drawn_rows(0, "t", range(50_000), 8)
    assert abs(drawn).max() <= 2 / math.sqrt(8)
    assert abs(drawn.mean()) < 2e-3
    # The standard deviation of a normal truncated at two of them is 0.8796 of it.
    assert abs(drawn.std() * math.sqrt(8) - 0.87963) < 2e-3
    quarter = np.quantile(drawn * math.sqrt(8), [0.25, 0.75])
    assert np.abs(quarter - [-0.63999, 0.63999]).max() < 0.01


def test_the_start_is_the_same_on_every_machine():
    # Philox bits and IEEE arithmetic only: these bytes were drawn once and must not change.
    drawn = drawn_rows(0, "user", [123, 124], 3)
    assert drawn.view(np.uint32).tolist() == KNOWN_START


KNOWN_START = [[3200302284, 1046095747, 1031344117], [1034113585, 3204824481, 1040860739]]


@pytest.mark.parametrize("devices", DEVICES)
def test_table_is_a_copy_in_id_order_sharded_where_the_mesh_divides_it(devices, mesh_of):
    engine = engine_of(mesh_of(devices), rows=1200)
    copy = engine.table("a")
    assert copy.shape == (1200, 5)
    assert np.asarray(copy).tobytes() == engine.lookup("a", range(1200)).tobytes()
    assert copy.sharding.is_fully_replicated == (devices == 1)
    assert engine_of(mesh_of(devices)).table("a").sharding.is_fully_replicated
    engine.apply({"a": some_rows(0, 10, 1200, 5)})  # a live copy is no view
    assert np.asarray(copy).tobytes() != np.asarray(engine.table("a")).tobytes()
