"""The pure functions for a user's own jitted step: their gradient, their update, under jit and shard_map."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from lookups import RAGGED, config_of

import penstock as ps
from penstock.bridge.lookup import apply, gather, lookup, padded_uses, row_gradients

WEIGHTS = [[0.5, 0.25], [], [3], [1, 0.3, 0.7]]


def engine_of(combiner="mean", optimizer=None):
    return ps.Engine(config_of(combiner, optimizer=optimizer or ps.Adagrad(0.5)))


def uses_of(engine, ids=RAGGED, weights=WEIGHTS, num_unique=8, num_lookups=10):
    activations, dedup = engine.recv_activations([ids], weights and [weights])
    return activations[0], dedup, padded_uses(dedup.unique_ids["t"], dedup.features[0], 6, 4, num_unique, num_lookups)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_a_jitted_step_does_what_the_engine_does(combiner):
    engine = engine_of(combiner)
    table, slots = engine.table("t"), tuple(engine.slots("t").values())
    seen, dedup, uses = uses_of(engine)
    rule, target = engine.config.table("t").rule, jnp.ones((4, 2))

    def loss(activations):
        return jnp.sum((activations - target) ** 2)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(table, slots, uses):
        activations, back = jax.vjp(lambda rows: lookup(rows, uses, 4), gather(table, uses))
        (gradients,) = back(jax.grad(loss)(activations))
        return activations, *apply(rule, table, slots, uses.unique, gradients, 0.5)

    activations, table, slots = step(table, slots, uses)
    np.testing.assert_allclose(activations, seen, rtol=1e-6)
    engine.send_gradients([np.asarray(jax.grad(loss)(jnp.asarray(seen)))], deduplication_data=dedup)
    np.testing.assert_allclose(table, engine.table("t"), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slots[0], engine.slots("t")["accumulators"], rtol=1e-5, atol=1e-6)


def test_the_gradient_is_that_of_the_dense_table():
    engine = engine_of()
    table = engine.table("t")
    _, dedup, uses = uses_of(engine)

    def ours(rows):
        return jnp.sum(jnp.sin(lookup(rows, uses, 4)))

    def plain(table):  # without our gradient, by jax's own of a gather
        feature = dedup.features[0]
        rows = table[dedup.ids(0, "t")] * feature.gains[:, None]
        return jnp.sum(jnp.sin(jax.ops.segment_sum(rows, jnp.asarray(feature.samples, jnp.int32), 4)))

    found = np.zeros((6, 2), np.float32)
    unique = dedup.unique_ids["t"]
    gradients = jax.grad(ours)(gather(table, uses))
    found[unique] = gradients[: len(unique)]
    np.testing.assert_allclose(found, jax.grad(plain)(table), rtol=1e-5, atol=1e-6)
    assert not np.any(gradients[len(unique) :])  # pads


def test_quantization_is_seen_and_its_gradient_passes_straight_through():
    uses = uses_of(engine_of("sum"), [[0], [1], [2], [2]], None)[2]
    rows = jnp.linspace(0, 1, 16).reshape(8, 2)
    activations, back = jax.vjp(lambda rows: lookup(rows, uses, 4, (2, 0.0, 1.0)), rows)
    assert set(np.asarray(activations).reshape(-1).tolist()) <= {0.0, 1.0}
    assert back(jnp.ones((4, 2)))[0][:4, 0].tolist() == [1, 1, 2, 0]


def test_under_shard_map_every_device_has_its_own_batch(mesh_of):
    engine, mesh = engine_of("sum"), mesh_of(2)
    table = engine.table("t")
    first, second = (uses_of(engine, ids, None) for ids in (RAGGED, RAGGED[::-1]))
    both = jax.tree.map(lambda *parts: np.stack(parts), first[2], second[2])

    def local(table, uses):
        return lookup(gather(table, uses), uses, 4)[None]

    def of_device(table, uses):
        return local(table, jax.tree.map(lambda part: part[0], uses))

    mapped = jax.jit(jax.shard_map(of_device, mesh=mesh, in_specs=(P(), P("shard")), out_specs=P("shard")))
    found = mapped(np.asarray(table), both)
    np.testing.assert_allclose(found, np.stack([first[0], second[0]]), rtol=1e-6)


def test_sizes_stay_the_same_so_that_nothing_is_compiled_again():
    engine = engine_of()
    table = engine.table("t")
    step = jax.jit(lambda table, uses: row_gradients(lookup(gather(table, uses), uses, 4), uses, 8))
    for ids in (RAGGED, [[5], [], [], []], [[], [], [], []]):
        step(table, uses_of(engine, ids, None)[2])
    assert step._cache_size() == 1


def test_padding_too_small_and_non_lazy_updates_are_refused():
    with pytest.raises(ps.UsageError, match="5 unique ids do not fit 4"):
        uses_of(engine_of(), num_unique=4)
    with pytest.raises(ps.UsageError, match="6 lookups do not fit 5"):
        uses_of(engine_of(), num_lookups=5)
    engine = engine_of(optimizer=ps.Adam(lazy_adam=False))
    with pytest.raises(ps.UsageError, match="adam with non-lazy updates changes every row"):
        apply(engine.config.table("t").rule, jnp.ones((6, 2)), (), np.zeros(0, np.int32), jnp.ones((0, 2)), 0.5)
