"""A next-word model in Keras whose embedding table is updated inside the step that ``model.fit`` compiles.

The reference is the same model with ``keras.layers.Embedding``, whose gradients and updates are dense: with the same
seeds, batches and optimizer (Adagrad), the losses of every epoch agree. ``--compile-for v5e`` instead compiles the
step for a TPU, for a table of a million rows; ``h200`` for a GPU.

    KERAS_BACKEND=jax python examples/next_word_keras.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import keras
import next_words as n
import numpy as np

import penstock as ps
from penstock.contrib.functional.keras_embedding import Embedding


class Model(keras.Model):
    """The dense part: from the average of two words' rows to a score for every word."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(0)
        self.hidden = keras.layers.Dense(n.HIDDEN, "relu")
        self.scores = keras.layers.Dense(n.WORDS)


class NextWord(Model):
    """With a table of penstock."""

    def __init__(self, tables: ps.functional.EmbeddingTables) -> None:
        super().__init__()
        self.embedding = Embedding(tables)

    def call(self, uses: Any) -> Any:
        return self.scores(self.hidden(self.embedding(uses)["pair"]))


class Dense(Model):
    """With a dense table."""

    def __init__(self, rows: np.ndarray) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(*rows.shape, embeddings_initializer=lambda *_, **__: rows)

    def call(self, pairs: Any) -> Any:
        return self.scores(self.hidden(keras.ops.mean(self.embedding(pairs), axis=1)))


class Batches(keras.utils.PyDataset):
    """Batches in a fixed order."""

    def __init__(self, batches: Sequence[tuple[Any, Any]]) -> None:
        super().__init__()
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.batches[index]


def compiled(model: Model) -> Model:
    optimizer = keras.optimizers.Adagrad(n.RATE, initial_accumulator_value=0.1)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def new_model(rows: int = n.WORDS) -> NextWord:
    one_device = jax.sharding.Mesh(jax.devices()[:1], ("shard",))
    return compiled(NextWord(ps.functional.EmbeddingTables(n.config(rows), one_device, halves=False)))


def train(epochs: int = n.EPOCHS) -> tuple[list[float], list[float]]:
    """Return the mean loss of every epoch, of the model with a table of penstock and of the dense reference."""
    model = new_model()
    tables = model.embedding.embedding_tables
    dense = compiled(Dense(tables.parameters(model.embedding.tables, "word")["parameters"]))
    prepared = [(model.embedding.preprocess({"pair": pairs}), following) for pairs, following in n.batches()]
    fitted = [
        one.fit(Batches(batches), epochs=epochs, shuffle=False, verbose=0)
        for one, batches in ((model, prepared), (dense, n.batches()))
    ]
    losses, reference = (history.history["loss"] for history in fitted)
    return losses, reference


def compile_for(device: str) -> int:
    """Compile the step of ``fit`` for a device; return an exit code."""
    n.prepare_compiling(device)
    model = new_model(rows=1_000_000)
    pairs, following = n.batches()[0]
    uses = model.embedding.preprocess({"pair": pairs})
    model(uses)  # creates the dense weights
    model.optimizer.build(model.trainable_variables)
    model.train_on_batch(uses, following)  # and the metrics
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([variable.value for variable in group] for group in groups)
    program = n.compiled_for(device, model.train_step, state, (uses, following))
    return n.report(program, model.embedding.tables)


if __name__ == "__main__":
    sys.exit(n.main(train, compile_for))
