"""Tables sharded by row inside a user's own jitted step: as the engine gives, on any mesh, and the same bits again."""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import penstock as ps
from penstock.activations.exchange import deduplicated
from penstock.bridge.sharded_lookup import Room, apply, ask, lookup, rows_per_shard, sharded_uses

BATCH, ROWS, DIM = 8, 11, 3
ROOM = Room(asked=16, lookups=128, owned=16)


def config_of(combiner="mean", optimizer=None):
    """Two features share a table of a size that no mesh divides."""
    table = ps.TableConfig(ROWS, DIM, name="t", combiner=combiner)
    features = {"a": ps.FeatureConfig(table, name="a"), "b": ps.FeatureConfig(table, name="b")}
    return ps.EmbeddingConfig.from_features(features, BATCH, optimizer or ps.Adagrad(0.5))


def uses_of(config, ids, weights, devices, room=ROOM):
    unique, uses = deduplicated(config, ids, weights)
    return sharded_uses(unique["t"], uses, ROWS, [BATCH, BATCH], devices, room)


def sharded(mesh, whole):
    """A table in blocks of neighbouring rows; what is beyond its end is never looked at."""
    devices = mesh.devices.size
    beyond = devices * rows_per_shard(ROWS, devices) - ROWS
    padded = np.pad(np.asarray(whole), ((0, beyond), (0, 0)), constant_values=np.nan)
    return jax.device_put(padded, NamedSharding(mesh, P("shard")))


@lru_cache
def step_of(mesh, rule):
    """One training step: activations, and table and slots after the update."""

    def local(table, slots, uses):
        share = 2 * BATCH // mesh.devices.size
        activations, back = jax.vjp(lambda rows: lookup(rows, uses, share), ask(table, uses))
        (gradients,) = back(jax.grad(squares)(activations))
        return activations, *apply(rule, table, slots, uses, gradients, 0.5)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("shard"), out_specs=P("shard"), check_vma=False)
    return jax.jit(mapped, donate_argnums=(0, 1))


def by_feature(activations, devices):
    """A device's activations are those of a, then of b."""
    of_device = np.asarray(activations).reshape(devices, 2, BATCH // devices, DIM)
    return {name: of_device[:, number].reshape(BATCH, DIM) for number, name in enumerate("ab")}


def squares(activations):
    return jnp.sum((activations - 1) ** 2)


def made(seed):
    """Ragged ids and weights of both features; repeats, samples without ids, and weights of zero."""
    rng = np.random.default_rng(seed)
    ids = {n: [rng.integers(0, ROWS, rng.integers(0, 5)).tolist() for _ in range(BATCH)] for n in "ab"}
    return ids, {n: [rng.choice([0.0, 0.5, 1.0, 3.0], len(one)) for one in of] for n, of in ids.items()}


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_steps_are_the_engines_to_rounding(mesh_of, devices, combiner):
    config, mesh = config_of(combiner), mesh_of(devices)
    engine, step = ps.Engine(config), step_of(mesh, config.table("t").rule)
    table, slots = (sharded(mesh, whole) for whole in (engine.table("t"), engine.slots("t")["accumulators"]))
    for seed in range(3):
        ids, weights = made(seed)
        seen, dedup = engine.recv_activations(ids, weights)
        activations, table, (slots,) = step(table, (slots,), uses_of(config, ids, weights, devices))
        for name, found in by_feature(activations, devices).items():
            np.testing.assert_allclose(found, seen[name], rtol=1e-4, atol=1e-5)
        engine.send_gradients({n: 2 * (a - 1) for n, a in seen.items()}, deduplication_data=dedup)
    np.testing.assert_allclose(table[:ROWS], engine.table("t"), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(slots[:ROWS], engine.slots("t")["accumulators"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_the_same_mesh_gives_the_same_bits(mesh_of, devices):
    config, mesh = config_of(), mesh_of(devices)
    whole, found = ps.Engine(config).table("t"), []
    for _ in range(2):
        step = step_of(mesh, config.table("t").rule)
        table, slots = sharded(mesh, whole), (sharded(mesh, np.full((ROWS, DIM), 0.1, np.float32)),)
        for seed in range(3):
            _, table, slots = step(table, slots, uses_of(config, *made(seed), devices))
        found.append((np.asarray(table).tobytes(), np.asarray(slots[0]).tobytes()))
    assert found[0] == found[1]


def test_a_step_is_compiled_once_and_changes_its_table_in_place(mesh_of):
    config, mesh = config_of(), mesh_of(2)
    step = step_of.__wrapped__(mesh, config.table("t").rule)
    table, slots = sharded(mesh, np.ones((ROWS, DIM), np.float32)), (sharded(mesh, np.ones((ROWS, DIM), np.float32)),)
    for seed in range(3):
        before = [shard.data.unsafe_buffer_pointer() for shard in table.addressable_shards]
        _, table, slots = step(table, slots, uses_of(config, *made(seed), 2))
        if seed:  # what came from the host is copied once
            assert [shard.data.unsafe_buffer_pointer() for shard in table.addressable_shards] == before
    assert step._cache_size() == 1


def test_rows_without_lookups_and_padding_stay_unchanged(mesh_of):
    config, mesh = config_of(), mesh_of(4)
    whole = np.asarray(ps.Engine(config).table("t"))
    step = step_of(mesh, config.table("t").rule)
    uses = uses_of(config, {"a": [[2]] * BATCH, "b": [[]] * BATCH}, None, 4)
    _, table, _ = step(sharded(mesh, whole), (sharded(mesh, np.ones((ROWS, DIM), np.float32)),), uses)
    table = np.asarray(table)
    assert [row for row in range(ROWS) if not np.array_equal(table[row], whole[row])] == [2]
    assert np.isnan(table[ROWS:]).all()


def test_quantization_is_seen_and_its_gradient_passes_straight_through(mesh_of):
    config, mesh = config_of("sum"), mesh_of(2)
    whole = np.linspace(0, 1, ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)
    uses = uses_of(config, {"a": [[i] for i in range(BATCH)], "b": [[]] * BATCH}, None, 2)

    def local(table, uses):
        rows = ask(table, uses)
        activations, back = jax.vjp(lambda rows: lookup(rows, uses, BATCH, (2, 0.0, 1.0)), rows)
        return activations, jnp.sum(back(jnp.ones_like(activations))[0], keepdims=True)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("shard"), out_specs=P("shard"), check_vma=False)
    activations, total = jax.jit(mapped)(sharded(mesh, whole), uses)
    assert set(np.unique(activations).tolist()) == {0.0, 1.0}
    assert float(np.sum(total)) == BATCH * DIM  # a one for every looked-up value


@pytest.mark.parametrize(
    ("room", "devices", "message"),
    [
        (Room(1, 128, 16), 2, "rows asked of one peer of device 0 do not fit 1"),
        (Room(16, 2, 16), 2, "lookups do not fit 2"),
        (Room(16, 128, 1), 2, "rows that are asked for of device 0 do not fit 1"),
        (ROOM, 3, r"samples \[8, 8\] cannot be dealt to 3 devices evenly"),
    ],
)
def test_padded_sizes_that_are_too_small_are_refused(room, devices, message):
    with pytest.raises(ps.UsageError, match=message):
        uses_of(config_of(), *made(0), devices, room)


def test_the_gradient_is_by_rows_asked_for_and_never_of_the_tables_size(mesh_of):
    config, mesh = config_of(), mesh_of(2)
    uses = uses_of(config, *made(0), 2)
    local = partial(jax.grad(lambda rows, uses: jnp.sum(lookup(rows, uses, BATCH))), jnp.ones((2 * ROOM.asked, DIM)))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("shard"), out_specs=P("shard"), check_vma=False)
    assert jax.jit(mapped)(uses).shape == (2 * 2 * ROOM.asked, DIM)
