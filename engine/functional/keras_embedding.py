"""Embedding tables as a Keras layer, for ``model.fit`` on the JAX backend."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import keras

from penstock.bridge import Table, Uses
from penstock.bridge.functional_table import PARTS
from penstock.errors import UsageError
from penstock.functional.embedding_tables import EmbeddingTables


class Embedding(keras.layers.Layer):  # type: ignore[misc]
    """The tables of a configuration as a layer; from the lookups of ``preprocess`` to activations.

    Parameters
    ----------
    embedding_tables : EmbeddingTables
        On one device, created with ``halves=False``.
    seed : int
        Of the initial rows.
    **options : object
        Of ``keras.layers.Layer``.

    Raises
    ------
    UsageError
        For tables that it cannot train: over several devices, in halves of words, with a dynamic learning rate, or with
        an optax rule that counts steps.

    Notes
    -----
    The backward pass updates the tables by their own optimizers, and Keras stores the updated arrays where it would
    otherwise apply a gradient (``overwrite_with_gradient``). So ``model.fit`` needs no change, and the optimizer of
    ``model.compile`` is that of the dense part. Use the layer once per step: two updates do not add up.
    """

    def __init__(self, embedding_tables: EmbeddingTables, seed: int = 0, **options: Any) -> None:
        if keras.backend.backend() != "jax":
            raise UsageError(f"expected Keras's JAX backend (KERAS_BACKEND=jax), got {keras.backend.backend()}")
        super().__init__(**options)
        self.embedding_tables = embedding_tables
        tables = embedding_tables.create(seed)
        _check(embedding_tables, tables)
        self._num_lines = {name: len(table.arrays[0]) for name, table in tables.items()}  # on the only device
        leaves, self._structure = jax.tree.flatten(tables)
        self._lookup = _lookup_of(embedding_tables, self._structure)
        for number, leaf in enumerate(leaves):
            array = self.add_weight(
                shape=leaf.shape, dtype="float32", initializer=_starting_with(leaf), name=f"array_{number}"
            )
            array.overwrite_with_gradient = True
        self.built = True

    @property
    def tables(self) -> dict[str, Table]:
        """The tables by name, for ``EmbeddingTables.parameters``."""
        tables: dict[str, Table] = jax.tree.unflatten(self._structure, [array.value for array in self.weights])
        return tables

    def preprocess(self, features: Any, weights: Any = None) -> dict[str, dict[str, jax.Array]]:
        """Return what ``EmbeddingTables.preprocess`` returns, but as dictionaries, which Keras needs.

        Parameters
        ----------
        features, weights : nested like the configuration's features
            As for ``Engine.recv_activations``.

        Returns
        -------
        dict of str to dict of str to jax.Array
            By table and array.
        """
        uses = self.embedding_tables.preprocess(features, weights)
        return {name: {part: getattr(table_uses, part) for part in PARTS} for name, table_uses in uses.items()}

    def call(self, uses: Mapping[str, Mapping[str, jax.Array]]) -> Any:
        """Return the activations of a batch.

        Parameters
        ----------
        uses : mapping
            What ``preprocess`` returned.

        Returns
        -------
        nested like the configuration's features
            float32, the feature's input shape followed by dim.
        """
        features = self.embedding_tables.features
        return self._lookup(
            [array.value for array in self.weights],
            {name: Uses(**use, features=features[name], num_lines=self._num_lines[name]) for name, use in uses.items()},
        )


def _lookup_of(embedding_tables: EmbeddingTables, structure: Any) -> Any:
    """Return a function (arrays, uses) → activations, whose gradient by the arrays is the updated arrays."""

    @jax.custom_vjp
    def lookup(arrays: list[jax.Array], uses: Mapping[str, Uses]) -> Any:
        return embedding_tables.gather(jax.tree.unflatten(structure, arrays), uses)

    def forward(arrays: list[jax.Array], uses: Mapping[str, Uses]) -> tuple[Any, Any]:
        return lookup(arrays, uses), (arrays, uses)

    def backward(residuals: Any, gradients: Any) -> tuple[Any, None]:
        arrays, uses = residuals
        return jax.tree.leaves(embedding_tables.apply(jax.tree.unflatten(structure, arrays), uses, gradients)), None

    lookup.defvjp(forward, backward)
    return lookup


def _starting_with(array: jax.Array) -> Any:
    return partial(lambda value, shape, dtype=None: value, array)


def _check(embedding_tables: EmbeddingTables, tables: Mapping[str, Table]) -> None:
    """Raise UsageError for tables that the layer cannot train."""
    if embedding_tables.mesh.size > 1:
        raise UsageError(f"a Keras layer needs its tables on one device, got {embedding_tables.mesh.size}")
    for name, table in tables.items():
        if any(array.dtype != "float32" for array in table.arrays):
            raise UsageError(f"table '{name}': halves of words have no gradient; use EmbeddingTables(…, halves=False)")
        if table.numbers:
            raise UsageError(
                f"table '{name}': a Keras layer cannot count the steps of its optax rule; use EmbeddingTables"
            )
        if embedding_tables.config.table(name).tag is not None:
            raise UsageError(f"table '{name}': a Keras layer needs a constant learning rate; use EmbeddingTables")
