"""A small two-tower recommender in plain JAX, its embedding tables in penstock.

Users have a history of clicked items (a ragged feature, averaged) and an id; items have an id and tags (weighted,
sqrtn). Each tower is a dense layer over its features' activations; the score of a pair is the towers' dot product, and
the loss is the cross entropy of whether the pair was clicked. Every step: ``recv_activations`` → ``jax.grad`` of the
model by its parameters and by the activations → SGD of the dense part here (with optax if it is installed, as by
``pip install 'penstock[examples]'``, else written out), ``send_gradients`` for the tables.

The same training also runs with the tables inside the jitted step (``ps.functional``), and with tables as ordinary JAX
parameters, dense gradients and Adagrad. Losses and tables must agree up to rounding, and the loss must fall. Clicks are
drawn from hidden vectors, so the model can learn.

    python examples/two_tower.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import penstock as ps

try:
    import optax
except ImportError:
    optax = None

Dense = dict[str, jax.Array]
USERS, ITEMS, TAGS, DIM, HIDDEN = 60, 80, 40, 8, 16
BATCH, STEPS, MOST = 64, 300, 4  # MOST: ids of one sample
DENSE_RATE, TABLE_RATE, ACCUMULATOR = 1.0, 0.3, 1e-4
TABLES = {"user": (USERS, "mean"), "item": (ITEMS, "mean"), "tag": (TAGS, "sqrtn")}
FEATURES = {"user_id": "user", "history": "item", "item_id": "item", "tags": "tag"}


def main() -> int:
    losses, reference, apart = train()
    in_step = np.abs(train_in_one_step() - losses).max()
    first, last = np.mean(losses[:20]), np.mean(losses[-20:])
    print(f"{STEPS} steps of {BATCH} pairs: loss {first:.4f} at first, {last:.4f} at last")
    print("dense part by " + ("plain SGD" if optax is None else f"optax {optax.__version__}"))
    print(f"against dense tables: losses differ by {np.abs(losses - reference).max():.1e}, rows by {apart:.1e}")
    print(f"against tables inside the jitted step: losses differ by {in_step:.1e}")
    good = last < 0.3 * first and in_step < 1e-4 and np.abs(losses - reference).max() < 1e-4 and apart < 1e-3
    print("good" if good else "BAD")
    return 0 if good else 1


def train() -> tuple[np.ndarray, np.ndarray, float]:
    """Return the loss of every step, those of the dense reference, and the largest difference of a final weight."""
    engine, dense = ps.Engine(config(), seed=1), new_dense_part()
    tables = {name: jnp.asarray(engine.table(name)) for name in TABLES}
    accumulators = {name: jnp.full_like(table, ACCUMULATOR) for name, table in tables.items()}
    start, descend = dense_optimizer()
    state = start(dense)
    reference, reference_step = (dense, state, tables, accumulators), dense_reference(descend)
    losses, reference_losses = [], []
    for ids, weights, clicked in batches():
        activations, dedup = engine.recv_activations(ids, weights)
        loss, (of_dense, of_activations) = gradients(dense, activations, clicked)
        dense, state = descend(dense, state, of_dense)
        engine.send_gradients(of_activations, deduplication_data=dedup)
        losses.append(loss)
        reference_loss, reference = reference_step(reference, matrices(ids, weights), clicked)
        reference_losses.append(reference_loss)
    apart = max(float(jnp.abs(engine.table(name) - reference[2][name]).max()) for name in TABLES)
    return np.array(losses), np.array(reference_losses), apart


def train_in_one_step() -> np.ndarray:
    """Return the loss of every step, with the tables inside the jitted step instead of in an engine."""
    embedding, (start, descend) = ps.functional.EmbeddingTables(config()), dense_optimizer()
    tables, dense = embedding.create(seed=1), new_dense_part()
    state, losses = start(dense), []

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(tables, dense, state, uses, clicked):
        activations = embedding.gather(tables, uses)
        loss, (of_dense, of_activations) = jax.value_and_grad(loss_of, argnums=(0, 1))(dense, activations, clicked)
        dense, state = descend(dense, state, of_dense)
        return embedding.apply(tables, uses, of_activations), dense, state, loss

    for ids, weights, clicked in batches():
        uses = embedding.preprocess(ids, weights)
        tables, dense, state, loss = step(tables, dense, state, uses, clicked)
        losses.append(loss)
    return np.array(losses)


def config() -> ps.EmbeddingConfig:
    tables = {name: ps.TableConfig(rows, DIM, name=name, combiner=by) for name, (rows, by) in TABLES.items()}
    features = {name: ps.FeatureConfig(tables[table], name=name) for name, table in FEATURES.items()}
    optimizer = ps.Adagrad(TABLE_RATE, initial_accumulator_value=ACCUMULATOR)
    return ps.EmbeddingConfig.from_features(features, BATCH, optimizer)


# ---- the model


def new_dense_part() -> Dense:
    keys = jax.random.split(jax.random.key(2))
    return {
        tower: jax.random.normal(key, (2 * DIM, HIDDEN)) / np.sqrt(2 * DIM)
        for tower, key in zip(("user", "item"), keys, strict=True)
    }


def loss_of(dense: Dense, activations: dict[str, jax.Array], clicked: jax.Array) -> jax.Array:
    user = jnp.concatenate([activations["user_id"], activations["history"]], axis=1) @ dense["user"]
    item = jnp.concatenate([activations["item_id"], activations["tags"]], axis=1) @ dense["item"]
    score = jnp.sum(user * item, axis=1)
    return jnp.mean(jax.nn.softplus(score) - clicked * score)


gradients = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1)))


def dense_optimizer() -> tuple[Callable[[Dense], Any], Callable[[Dense, Any, Dense], tuple[Dense, Any]]]:
    """Return two functions: the optimizer's initial state, and (parameters, state, gradients) → (parameters, state)."""
    if optax is None:
        return (lambda _: ()), lambda dense, state, by: (
            jax.tree.map(lambda p, g: p - DENSE_RATE * g, dense, by),
            state,
        )
    sgd = optax.sgd(DENSE_RATE)

    def descend(dense: Dense, state: Any, by: Dense) -> tuple[Dense, Any]:
        updates, state = sgd.update(by, state, dense)
        return optax.apply_updates(dense, updates), state

    return sgd.init, descend


# ---- the same with dense tables


def matrices(ids: dict[str, list], weights: dict[str, list | None]) -> dict[str, np.ndarray]:
    """Return the lookups and the combiner of every feature as a matrix (batch, rows of its table)."""
    lookups = {}
    for name, table in FEATURES.items():
        rows, combiner = TABLES[table]
        lookups[name] = np.zeros((BATCH, rows), np.float32)
        for sample, of_sample in enumerate(ids[name]):
            w = np.ones(len(of_sample)) if weights[name] is None else np.array(weights[name][sample])
            divisor = w.sum() if combiner == "mean" else np.sqrt((w**2).sum())
            np.add.at(lookups[name][sample], of_sample, w / divisor if divisor else w)
    return lookups


def dense_reference(descend: Callable[[Dense, Any, Dense], tuple[Dense, Any]]) -> Callable[..., Any]:
    """Return one step with tables as parameters, gradients of the tables' size, and Adagrad."""

    @partial(jax.jit, donate_argnums=0)
    def step(whole, by, clicked):
        dense, state, tables, accumulators = whole

        def loss(dense, tables):
            return loss_of(dense, {name: by[name] @ tables[table] for name, table in FEATURES.items()}, clicked)

        value, (of_dense, of_tables) = jax.value_and_grad(loss, argnums=(0, 1))(dense, tables)
        accumulators = jax.tree.map(lambda a, g: a + g * g, accumulators, of_tables)
        tables = jax.tree.map(lambda t, g, a: t - TABLE_RATE * g / jnp.sqrt(a), tables, of_tables, accumulators)
        return value, (*descend(dense, state, of_dense), tables, accumulators)

    return step


# ---- the clicks


def batches():
    """Yield (ids by feature, weights by feature, clicked) of every step."""
    rng = np.random.default_rng(0)
    taste, kind = rng.normal(size=(USERS, 3)), rng.normal(size=(ITEMS, 3))
    tags_of = [rng.choice(TAGS, rng.integers(0, MOST), replace=False).tolist() for _ in range(ITEMS)]
    likes = [np.argsort(-kind @ taste[user])[:20] for user in range(USERS)]
    for _ in range(STEPS):
        users, items = rng.integers(0, USERS, BATCH), rng.integers(0, ITEMS, BATCH)
        ids = {
            "user_id": users[:, None],
            "history": [rng.choice(likes[user], rng.integers(0, MOST + 1)).tolist() for user in users],
            "item_id": items[:, None],
            "tags": [tags_of[item] for item in items],
        }
        weights = dict.fromkeys(FEATURES) | {"tags": [[1 / (1 + n) for n in range(len(t))] for t in ids["tags"]]}
        yield ids, weights, np.float32(np.sum(taste[users] * kind[items], axis=1) > 0)


if __name__ == "__main__":
    sys.exit(main())
