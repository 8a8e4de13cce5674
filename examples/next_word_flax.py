"""A next-word model in Flax NNX whose embedding table is updated inside the jitted step.

The table is updated by the same optax transform as the dense reference (``ps.updates.from_optax``), but only in the
rows of the batch. The reference is the same model with the table as an ``nnx.Param``: with the same seeds and batches,
the losses of every epoch agree. ``--compile-for v5e`` instead compiles the step for a TPU, for a table of a million
rows; ``h200`` for a GPU.

    python examples/next_word_flax.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import next_words as n
import optax
from flax import nnx

import penstock as ps


class Model(nnx.Module):
    """The dense part: from the average of two words' rows to a score for every word."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(n.DIM, n.HIDDEN, rngs=rngs)
        self.scores = nnx.Linear(n.HIDDEN, n.WORDS, rngs=rngs)

    def __call__(self, activations: jax.Array) -> jax.Array:
        return self.scores(nnx.relu(self.hidden(activations)))


class NextWord(Model):
    """With a table of penstock."""

    def __init__(self, tables: ps.functional.EmbeddingTables, rngs: nnx.Rngs) -> None:
        from penstock.contrib.functional.nnx_embedding import Embedding

        super().__init__(rngs)
        self.embedding = Embedding(tables)


class Dense(Model):
    """With the table as an array of parameters."""

    def __init__(self, rows: Any, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.rows = nnx.Param(jax.numpy.asarray(rows))


def loss_of(model: Model, activations: jax.Array, following: Any) -> jax.Array:
    # Not by integer labels, whose gradient a GPU would scatter by atomic operations.
    return optax.softmax_cross_entropy(model(activations), jax.nn.one_hot(following, n.WORDS)).mean()


def step(model: NextWord, optimizer: nnx.Optimizer, uses: Any, following: Any) -> jax.Array:
    activations = model.embedding(uses)["pair"]
    differentiated = nnx.value_and_grad(loss_of, argnums=(0, 1))
    loss, (by_model, by_activations) = differentiated(model, activations, following)
    optimizer.update(model, by_model)
    model.embedding.update(uses, {"pair": by_activations})
    return loss


def dense_step(model: Dense, optimizer: nnx.Optimizer, pairs: Any, following: Any) -> jax.Array:
    loss, by_model = nnx.value_and_grad(lambda m: loss_of(m, m.rows[pairs].mean(axis=1), following))(model)
    optimizer.update(model, by_model)
    return loss


def new_model(rows: int = n.WORDS) -> tuple[NextWord, nnx.Optimizer]:
    rule = ps.updates.from_optax(optax.adagrad(n.RATE))
    tables = ps.functional.EmbeddingTables(n.config(rows), rules={"word": rule})
    model = NextWord(tables, nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adagrad(n.RATE), wrt=nnx.Param)


def train(epochs: int = n.EPOCHS) -> tuple[list[float], list[float]]:
    """Return the mean loss of every epoch, of the model with a table of penstock and of the dense reference."""
    model, optimizer = new_model()
    tables = model.embedding.embedding_tables
    dense = Dense(tables.parameters(model.embedding.tables, "word")["parameters"], nnx.Rngs(0))
    by_dense = nnx.Optimizer(dense, optax.adagrad(n.RATE), wrt=nnx.Param)
    prepared = [(tables.preprocess({"pair": pairs}), following) for pairs, following in n.batches()]
    return epochs_of(step, model, optimizer, prepared, epochs), epochs_of(
        dense_step, dense, by_dense, n.batches(), epochs
    )


def epochs_of(step: Callable[..., Any], model: Any, optimizer: Any, batches: Sequence[Any], epochs: int) -> list[float]:
    jitted = nnx.jit(step, donate_argnums=(0, 1))
    # Every loss is awaited: on CPU devices, programs that exchange rows block each other's threads if many are queued.
    totals = [sum(float(jitted(model, optimizer, *batch)) for batch in batches) for _ in range(epochs)]
    return [total / len(batches) for total in totals]


def compile_for(device: str) -> int:
    """Compile a step for a device; return an exit code."""
    n.prepare_compiling(device)
    model, optimizer = new_model(rows=1_000_000)
    uses = model.embedding.embedding_tables.preprocess({"pair": n.batches()[0][0]})
    structure, state = nnx.split((model, optimizer))

    def pure(state: Any, uses: Any, following: Any) -> Any:
        model, optimizer = nnx.merge(structure, state)
        loss = step(model, optimizer, uses, following)
        return nnx.state((model, optimizer)), loss

    program = n.compiled_for(device, pure, state, uses, n.batches()[0][1])
    return n.report(program, model.embedding.tables)


if __name__ == "__main__":
    sys.exit(n.main(train, compile_for))
