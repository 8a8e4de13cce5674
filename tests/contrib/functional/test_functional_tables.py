"""Tables inside a user's own jitted step: as the engine gives, on any mesh, in any layout, and the same bits again."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_table import addresses
from jax.sharding import PartitionSpec as P

import penstock as ps
from penstock.base.errors import ConfigError, UsageError
from penstock.contrib.functional.embedding_tables import EmbeddingTables
from penstock.rows.bridge import apply, functional_table, gather

BATCH, ROWS, DIM = 8, 11, 3


def config_of(combiner="mean", optimizer=None, **of_table):
    """Two features share a table of a size that no mesh divides."""
    table = ps.TableConfig(ROWS, DIM, name="t", combiner=combiner, **of_table)
    features = {"a": ps.FeatureConfig(table, name="a"), "b": ps.FeatureConfig(table, name="b")}
    return ps.EmbeddingConfig.from_features(features, BATCH, optimizer or ps.Adagrad(0.5))


def batch_of(seed):
    """Ragged ids and weights of both features; repeats, samples without ids, and weights of zero."""
    rng = np.random.default_rng(seed)
    ids = {n: [rng.integers(0, ROWS, rng.integers(0, 5)).tolist() for _ in range(BATCH)] for n in "ab"}
    return ids, {n: [rng.choice([0.0, 0.5, 1.0, 3.0], len(item)) for item in row_id] for n, row_id in ids.items()}


def squares(activations):
    return sum(jnp.sum((leaf - 1) ** 2) for leaf in jax.tree.leaves(activations))


def step_of(embedding):
    @partial(jax.jit, donate_argnums=0)
    def step(tables, uses):
        activations = embedding.gather(tables, uses)
        return embedding.apply(tables, uses, jax.grad(squares)(activations)), activations

    return step


def agrees(embedding, tables, engine, rtol=1e-4):
    for part, expected in engine.retrieve_parameters("t").items():
        np.testing.assert_allclose(embedding.parameters(tables, "t")[part], expected, rtol=rtol, atol=1e-5)


def trains_like_an_engine(config, mesh, num_steps=3):
    engine, embedding = ps.Engine(config, mesh), EmbeddingTables(config, mesh)
    tables, step = embedding.create(), step_of(embedding)
    agrees(embedding, tables, engine, rtol=0)
    for seed in range(num_steps):
        ids, weights = batch_of(seed)
        seen, dedup = engine.recv_activations(ids, weights)
        tables, activations = step(tables, embedding.preprocess(ids, weights))
        for name in "ab":
            np.testing.assert_allclose(activations[name], seen[name], rtol=1e-4, atol=1e-5)
        engine.send_gradients({n: 2 * (a - 1) for n, a in seen.items()}, deduplication_data=dedup)
    agrees(embedding, tables, engine)


@pytest.mark.sampled("sum-1")
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_steps_are_the_engines_to_rounding(mesh_of, devices, combiner):
    trains_like_an_engine(config_of(combiner), mesh_of(devices))


@pytest.mark.sampled("optimizer0-1")
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("optimizer", [ps.SGD(0.1), ps.Adam(0.1), ps.FTRL(0.1), ps.RowWiseAdagrad(0.1)])
def test_steps_of_tables_whose_rows_share_lines_are_the_engines(mesh_of, monkeypatch, devices, optimizer):
    monkeypatch.setenv("PENSTOCK_LAYOUT", "tiled")
    trains_like_an_engine(config_of(optimizer=optimizer), mesh_of(devices))


@pytest.mark.sampled("1-plain")
@pytest.mark.parametrize("layout", ["plain", "tiled"])
@pytest.mark.parametrize("devices", [1, 4])
def test_sums_as_on_a_gpu_are_the_engines_and_no_scatter_adds(mesh_of, monkeypatch, devices, layout):
    monkeypatch.setenv("PENSTOCK_SUMS", "gathers")
    monkeypatch.setenv("PENSTOCK_LAYOUT", layout)
    trains_like_an_engine(config_of(), mesh_of(devices), num_steps=2)
    embedding = EmbeddingTables(config_of(), mesh_of(devices))
    lookups = embedding.preprocess(*batch_of(0))
    assert "scatter-add" not in str(jax.make_jaxpr(step_of(embedding))(embedding.create(), lookups))


def test_our_kernel_updates_a_table_in_the_users_step(mesh_of, monkeypatch):
    monkeypatch.setenv("PENSTOCK_VARIANT", "pallas")
    config = config_of()
    assert EmbeddingTables(config, mesh_of(2)).create()["t"].format.variant == "pallas"
    trains_like_an_engine(config, mesh_of(2), num_steps=1)


def test_a_mesh_of_several_axes_distributes_the_rows_over_all():
    trains_like_an_engine(config_of(), jax.sharding.Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("x", "y")), 2)


@pytest.mark.evidence
def test_a_mesh_of_explicit_axes_distributes_the_rows_too():
    trains_like_an_engine(config_of(), jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]))


@pytest.mark.promise("Updates happen in place, and a steady state compiles nothing")
@pytest.mark.parametrize("layout", ["plain", "tiled"])
def test_steps_are_in_place_and_compiled_once_after_the_largest_batch(mesh_of, monkeypatch, layout):
    monkeypatch.setenv("PENSTOCK_LAYOUT", layout)
    embedding = EmbeddingTables(config_of(), mesh_of(2))
    tables, step = embedding.create(), step_of(embedding)
    for seed in (1, 0, 2, 3):
        embedding.preprocess(*batch_of(seed))
    for seed in range(3):
        before = addresses(tables)
        tables, _ = step(tables, embedding.preprocess(*batch_of(seed)))
        assert addresses(tables) == before
    tables, _ = step(tables, embedding.preprocess({"a": [[]] * BATCH, "b": [[]] * BATCH}))
    assert step._cache_size() == 1


def test_a_scan_over_batches_gives_the_bits_of_a_step_per_batch(mesh_of):
    embedding = EmbeddingTables(config_of(), mesh_of(2))
    ids, weights = zip(*(batch_of(seed) for seed in range(4)), strict=True)
    many = embedding.preprocess_steps(ids, weights)
    tables, step = embedding.create(), step_of(embedding)
    scanned, _ = jax.jit(lambda tables: jax.lax.scan(step, tables, many))(embedding.create())
    for seed in range(4):
        tables, _ = step(tables, embedding.preprocess(*batch_of(seed)))
    for array, other in zip(scanned["t"].arrays, tables["t"].arrays, strict=True):
        assert np.asarray(array).tobytes() == np.asarray(other).tobytes()


def test_inside_shard_map_a_device_has_its_share_of_the_batch(mesh_of):
    config, mesh = config_of(), mesh_of(2)
    embedding, rule = EmbeddingTables(config, mesh), config.table("t").rule
    uses = embedding.preprocess(*batch_of(0))["t"]

    def local(table, uses):
        activations = gather(table, uses)
        assert activations["a"].shape == (BATCH // 2, DIM)
        return apply(rule, table, uses, jax.grad(squares)(activations), 0.5), activations["b"]

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("shard"), out_specs=P("shard"), check_vma=False)
    table, activations = jax.jit(mapped)(embedding.create()["t"], uses)
    tables, expected = step_of(embedding)(embedding.create(), {"t": uses})
    assert np.asarray(activations).tobytes() == np.asarray(expected["b"]).tobytes()
    for array, other in zip(table.arrays, tables["t"].arrays, strict=True):
        assert np.asarray(array).tobytes() == np.asarray(other).tobytes()


@pytest.mark.sampled("grad")
@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd, lambda loss: jax.jit(jax.grad(jax.checkpoint(loss)))])
def test_a_gradient_by_the_tables_is_refused_and_the_activations_are_named(mesh_of, transform):
    embedding = EmbeddingTables(config_of(), mesh_of(1))  # jacfwd takes the square of their size
    tables, uses = embedding.create(), embedding.preprocess(*batch_of(0))
    with pytest.raises(TypeError, match="Differentiate the loss by the activations that gather returns") as refused:
        transform(lambda tables: squares(embedding.gather(tables, uses)))(tables)
    assert isinstance(refused.value, UsageError)

    def updated(tables):
        return embedding.apply(tables, uses, {name: jnp.ones((BATCH, DIM)) for name in "ab"})

    with pytest.raises(TypeError, match="a table has no gradient"):
        transform(lambda tables: jnp.sum(updated(tables)["t"].arrays[0]))(tables)


def test_a_gradient_by_other_arguments_passes_the_tables(mesh_of):
    embedding = EmbeddingTables(config_of(), mesh_of(2))
    tables, uses = embedding.create(), embedding.preprocess(*batch_of(0))

    def loss(scale, tables):
        activations = embedding.gather(tables, uses)
        updated = embedding.apply(tables, uses, jax.grad(squares)(activations))
        return scale * squares(activations), updated

    (value, _), slope = jax.jit(jax.value_and_grad(loss, has_aux=True))(2.0, tables)
    np.testing.assert_allclose(slope, value / 2, rtol=1e-6)


def test_a_batch_of_more_lines_than_a_dispatch_takes_is_updated_in_parts(mesh_of, monkeypatch):
    monkeypatch.setattr(functional_table, "largest_bucket", lambda *_: 4)
    trains_like_an_engine(config_of(), mesh_of(1))


@pytest.mark.evidence
def test_quantization_is_seen_and_its_gradient_passes_straight_through(mesh_of):
    config = config_of("sum", ps.SGD(1.0), quantization_config=ps.QuantizationConfig(2, 0.0, 1.0))
    embedding = EmbeddingTables(config, mesh_of(2))
    start = np.linspace(0, 1, ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)
    tables = embedding.load(embedding.create(), "t", start)
    uses = embedding.preprocess({"a": [[i] for i in range(BATCH)], "b": [[]] * BATCH})
    activations = jax.jit(embedding.gather)(tables, uses)
    assert set(np.unique(activations["a"]).tolist()) == {0.0, 1.0}
    tables = embedding.apply(tables, uses, jax.tree.map(jnp.ones_like, activations))
    np.testing.assert_array_equal(embedding.parameters(tables, "t")["parameters"][:BATCH], start[:BATCH] - 1)


def test_a_sequence_has_an_activation_per_position(mesh_of):
    table = ps.TableConfig(ROWS, DIM, name="t")
    features = {"s": ps.FeatureConfig(table, max_sequence_length=3, name="s")}
    config = ps.EmbeddingConfig.from_features(features, 2, ps.SGD(1.0))
    batch = {"s": [[1, 2], [3, 4, 5]]}
    embedding = EmbeddingTables(config, mesh_of(2))
    tables, uses = embedding.create(), embedding.preprocess(batch)
    activations = jax.jit(embedding.gather)(tables, uses)
    expected, _ = ps.Engine(config).recv_activations(batch)
    assert activations["s"].shape == (2, 3, DIM)
    assert np.asarray(activations["s"]).tobytes() == expected["s"].tobytes()


@pytest.mark.parametrize("devices", [1, 8])
def test_lookups_for_evaluation_take_any_number_of_ids(mesh_of, devices):
    embedding = EmbeddingTables(config_of(), mesh_of(devices))
    tables = embedding.create(seed=3)
    tables, _ = step_of(embedding)(tables, embedding.preprocess(*batch_of(0)))
    rows = embedding.parameters(tables, "t")["parameters"]
    for ids in ([], [7], [10, 3, 3], np.random.default_rng(0).integers(0, ROWS, 10_000)):
        np.testing.assert_array_equal(embedding.lookup(tables, "t", ids), rows[np.asarray(ids, int)])
    with pytest.raises(UsageError, match="expected 0 <= id < 11"):
        embedding.lookup(tables, "t", [3, 11])
    with pytest.raises(UsageError, match="no table 'u'"):
        embedding.lookup(tables, "u", [3])


def test_ids_in_place_of_lookups_and_calls_of_the_host_in_jit_are_refused_in_a_sentence(mesh_of):
    embedding = EmbeddingTables(config_of(), mesh_of(1))
    tables, ids = embedding.create(), jnp.zeros((BATCH, 2), int)
    features = {"a": ids, "b": ids}
    for uses in (features, ids, {"t": ids}):
        with pytest.raises(ps.UsageTypeError, match=r"gather: expected the lookups of a batch.*call preprocess"):
            embedding.gather(tables, uses)
        with pytest.raises(ps.UsageTypeError, match="gather: expected the lookups of a batch"):
            jax.jit(embedding.gather)(tables, uses)
    with pytest.raises(ps.UsageTypeError, match=r"preprocess: runs on the host.*outside of the jitted function"):
        jax.jit(embedding.preprocess)(features)
    with pytest.raises(ps.UsageTypeError, match="preprocess: runs on the host"):
        jax.jit(lambda row_id: embedding.preprocess({name: [[row_id]] * BATCH for name in "ab"}))(jnp.int32(3))
    with pytest.raises(ps.UsageTypeError, match="lookup: runs on the host"):
        jax.jit(lambda row_ids: embedding.lookup(tables, "t", row_ids))(ids[0])


def test_threads_prepare_batches_at_once(mesh_of):
    embedding = EmbeddingTables(config_of(), mesh_of(1))
    tables, batches = embedding.create(), [batch_of(seed) for seed in range(12)]
    with ThreadPoolExecutor(4) as pool:
        lookups = list(pool.map(lambda batch: embedding.preprocess(*batch), batches))
    for batch, uses in zip(batches, lookups, strict=True):
        alone = EmbeddingTables(config_of(), mesh_of(1)).preprocess(*batch)
        expected = jax.tree.leaves(embedding.gather(tables, alone))
        for got, wanted in zip(jax.tree.leaves(embedding.gather(tables, uses)), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_a_frozen_table_keeps_its_rows_and_starts_from_vectors(mesh_of, tmp_path):
    vectors = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    np.save(tmp_path / "vectors.npy", vectors)
    config = config_of(initializer=ps.FromFile(tmp_path / "vectors.npy"), trainable=False)
    embedding = EmbeddingTables(config, mesh_of(1))
    tables, step = embedding.create(), step_of(embedding)
    tables, _ = step(tables, embedding.preprocess(*batch_of(0)))
    assert embedding.parameters(tables, "t").keys() == {"parameters"}
    np.testing.assert_array_equal(embedding.parameters(tables, "t")["parameters"], vectors)


@pytest.mark.parametrize(
    ("frozen", "problem"),
    [
        ({"until_step": 5}, "it is trained from a step on"),
        ({"on_gradient": "refuse"}, "it refuses gradients"),
    ],
)
def test_other_frozen_tables_need_an_engine(mesh_of, frozen, problem):
    with pytest.raises(UsageError, match=f"table 't': {problem} .*; send its gradients to an Engine"):
        EmbeddingTables(config_of(trainable=False, **frozen), mesh_of(1))


@pytest.mark.parametrize(("name", "setting"), [("clip", ps.Clip(1.0)), ("limit", ps.Limit(2.0))])
def test_norms_of_gradients_need_an_engine(mesh_of, name, setting):
    tables = [ps.TableConfig(ROWS, DIM, name="t", optimizer=ps.SGD(0.1))]
    features = {"a": ps.FeatureConfig(tables[0], name="a")}
    config = ps.EmbeddingConfig.from_features(features, BATCH, **{name: setting})
    with pytest.raises(ConfigError, match=f"{name}: penstock\\.functional knows no norms of gradients"):
        EmbeddingTables(config, mesh_of(1))
