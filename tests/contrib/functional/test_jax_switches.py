"""Switches of JAX's configuration that a program may set: tables are updated as without them."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import penstock as ps
from penstock.contrib.functional import EmbeddingTables
from penstock.rows.bridge import program_cache
from penstock.rows.bridge.programs import row_sharding

# One value of each switch that changes how JAX traces, compiles, runs or reports. Not listed: names of platforms,
# devices, processes, ports and formats of dumps; jax_no_tracing and jax_no_execution, which forbid any program;
# jax_error_checking_behavior_*, for which JAX 0.10 cannot compile a shard_map ahead of its call; and
# jax_array_garbage_collection_guard, which reports the arrays of an engine that is collected.
SWITCHES = {
    "jax_allow_f16_reductions": True,
    "jax_check_static_indices": True,
    "jax_check_tracer_leaks": True,
    "jax_compilation_cache_dir": "cache",
    "jax_cpu_enable_async_dispatch": False,
    "jax_debug_infs": True,
    "jax_debug_key_reuse": True,
    "jax_debug_nans": True,
    "jax_default_device": 1,
    "jax_default_matmul_precision": "bfloat16",
    "jax_default_prng_impl": "rbg",
    "jax_disable_jit": True,
    "jax_disable_most_optimizations": True,
    "jax_disallow_mesh_context_manager": True,
    "jax_embedded_constants_max_bytes": 0,
    "jax_enable_checks": True,
    "jax_enable_custom_prng": True,
    "jax_enable_x64": True,
    "jax_explain_cache_misses": True,
    "jax_explicit_x64_dtypes": "error",
    "jax_high_dynamic_range_gumbel": True,
    "jax_legacy_prng_key": "error",
    "jax_log_compiles": True,
    "jax_mutable_array_checks": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_optimization_level": "O0",
    "jax_remove_size_one_mesh_axis_from_type": True,
    "jax_softmax_custom_jvp": False,
    "jax_threefry_partitionable": False,
    "jax_traceback_filtering": "off",
    "jax_transfer_guard": "disallow",
    "jax_use_direct_linearize": False,
    "jax_use_shardy_partitioner": False,
}
# Of the user's own step, which it compiles: other fusions round sums otherwise.
ROUNDS = {"jax_disable_jit", "jax_disable_most_optimizations", "jax_optimization_level"}

BATCH = {"a": [[1, 2], [], [10], [1, 1]]}
GRADIENTS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def config():
    table = ps.TableConfig(11, 3, name="t", combiner="mean")
    return ps.EmbeddingConfig.from_features({"a": ps.FeatureConfig(table, name="a")}, 4, ps.Adagrad(0.5))


def by_an_engine(mesh):
    program_cache.compiled.cache_clear()
    engine = ps.Engine(config(), mesh, variant="xla")
    for _ in range(2):
        activations, dedup = engine.recv_activations(BATCH)
        engine.send_gradients({"a": GRADIENTS}, deduplication_data=dedup)
    parts = engine.retrieve_parameters("t")
    engine.load_parameters("t", parts.pop("parameters"), **parts)
    rows = engine.lookup("t", [10, 1])
    program_cache.compiled.cache_clear()
    return [activations["a"], rows]


def in_a_step(mesh):
    embedding = EmbeddingTables(config(), mesh)

    @partial(jax.jit, donate_argnums=0)
    def step(tables, lookups, gradients):
        activations = embedding.gather(tables, lookups)
        return embedding.apply(tables, lookups, gradients), activations

    tables, gradients = embedding.create(), jax.device_put({"a": GRADIENTS}, row_sharding(mesh))
    for _ in range(2):
        tables, activations = step(tables, embedding.preprocess(BATCH), gradients)
    parts = embedding.parameters(tables, "t")
    tables = embedding.load(tables, "t", parts.pop("parameters"), **parts)
    return [jax.device_get(activations["a"]), embedding.lookup(tables, "t", [10, 1])]


@pytest.fixture(scope="module")
def expected(mesh_of):
    return by_an_engine(mesh_of(2)), in_a_step(mesh_of(2))


@pytest.fixture
def switch(request, tmp_path):
    """Set a switch for a test."""
    if request.param not in jax.config.values:
        pytest.skip(f"jax {jax.__version__} has no {request.param}")
    value = SWITCHES[request.param]
    value = {"jax_compilation_cache_dir": str(tmp_path), "jax_default_device": jax.devices()[1]}.get(
        request.param, value
    )
    before = jax.config.values[request.param]
    jax.config.update(request.param, value)
    yield request.param
    jax.config.update(request.param, before)
    if request.param == "jax_compilation_cache_dir":
        compilation_cache.reset_cache()  # JAX goes on with the cache that it opened


@pytest.mark.sampled("jax_numpy_rank_promotion")
@pytest.mark.parametrize("switch", SWITCHES, indirect=True)
def test_tables_are_updated_as_without_a_switch(switch, mesh_of, expected):
    of_engine, of_step = expected
    for rows, expected_rows in zip(by_an_engine(mesh_of(2)), of_engine, strict=True):
        assert rows.tobytes() == expected_rows.tobytes()
    for rows, expected_rows in zip(in_a_step(mesh_of(2)), of_step, strict=True):
        np.testing.assert_allclose(rows, expected_rows, rtol=1e-5 if switch in ROUNDS else 0, atol=0)


def test_a_module_of_flax_looks_up_and_updates_where_no_rank_is_promoted(mesh_of):
    pytest.importorskip("flax")
    from penstock.contrib.functional.nnx_embedding import Embedding

    embedding = EmbeddingTables(config(), mesh_of(1))
    with jax.numpy_rank_promotion("raise"):
        module, lookups = Embedding(embedding), embedding.preprocess(BATCH)
        module.update(lookups, jax.grad(lambda rows: rows["a"].sum())(module(lookups)))
    assert changed_rows(embedding, module.tables) == [1, 2, 10]


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning")  # of Keras
def test_a_layer_of_keras_looks_up_and_updates_where_no_rank_is_promoted(mesh_of):
    pytest.importorskip("keras")
    from penstock.contrib.functional.keras_embedding import Embedding

    embedding = EmbeddingTables(config(), mesh_of(1), halves=False)
    with jax.numpy_rank_promotion("raise"):
        layer = Embedding(embedding)
        arrays, lookups = [array.value for array in layer.trainable_variables], layer.preprocess(BATCH)
        updated = jax.grad(lambda arrays: layer.stateless_call(arrays, [], lookups)[0]["a"].sum())(arrays)
        for array, value in zip(layer.trainable_variables, updated, strict=True):
            array.assign(value)
    assert changed_rows(embedding, layer.tables) == [1, 2, 10]


def changed_rows(embedding, tables):
    parts = [embedding.parameters(each, "t")["parameters"] for each in (embedding.create(), tables)]
    return np.flatnonzero((parts[0] != parts[1]).any(axis=1)).tolist()
