"""Embedding tables as a Flax NNX module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

try:
    from flax import nnx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "penstock.functional.nnx_embedding needs the package flax: pip install 'penstock[flax]'", name=error.name
    ) from error

from penstock.contrib.functional.embedding_tables import EmbeddingTables
from penstock.rows.bridge import Table, Uses


class EmbeddingTable(nnx.Variable[jax.Array]):  # type: ignore[misc]
    """An array of a table. It is no ``nnx.Param``: ``nnx.grad`` and optimizers leave it alone."""


class Embedding(nnx.Module):  # type: ignore[misc]
    """The tables of a configuration as a module: it looks up activations, and updates the tables by their gradients.

    Parameters
    ----------
    embedding_tables : EmbeddingTables
        Which prepares the batches (``preprocess``).
    seed : int
        Seed of the initial rows.

    Notes
    -----
    Differentiate the loss by the model and by the activations, update the dense part by your optimizer, and the tables
    by ``update``, all in one jitted step; donate the model to update them in place::

        @nnx.jit(donate_argnums=(0, 1))
        def step(model, optimizer, uses, labels):
            activations = model.embedding(uses)
            loss, (by_model, by_activations) = nnx.value_and_grad(loss_of, argnums=(0, 1))(model, activations, labels)
            optimizer.update(model, by_model)
            model.embedding.update(uses, by_activations)
            return loss

    Examples
    --------
    >>> import jax
    >>> import penstock as ps
    >>> from flax import nnx
    >>> from penstock.functional.nnx_embedding import Embedding
    >>> item = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), combiner="sum", name="item")
    >>> config = ps.EmbeddingConfig.from_features({"clicked": ps.FeatureConfig(item)}, batch_size=8)
    >>> embedding_tables = ps.functional.EmbeddingTables(config)
    >>> embedding = Embedding(embedding_tables)
    >>> uses = embedding_tables.preprocess({"clicked": [[7, 3], [7], *[[]] * 6]})
    >>> @nnx.jit(donate_argnums=0)
    ... def step(embedding, uses):
    ...     embedding.update(uses, embedding(uses))  # the gradient of half the sum of squares
    >>> step(embedding, uses)
    >>> embedding_tables.lookup(embedding.tables, "item", [7, 3])
    array([[-0.5, -0.5],
           [ 0. ,  0. ]], dtype=float32)
    """

    def __init__(self, embedding_tables: EmbeddingTables, seed: int = 0) -> None:
        self.embedding_tables = embedding_tables
        leaves, self._structure = jax.tree.flatten(embedding_tables.create(seed))
        self.arrays = nnx.List([EmbeddingTable(leaf) for leaf in leaves])

    @property
    def tables(self) -> dict[str, Table]:
        """The tables by name, as ``EmbeddingTables`` takes them; outside of a step, for ``parameters``, too."""
        tables: dict[str, Table] = jax.tree.unflatten(self._structure, [array[...] for array in self.arrays])
        return tables

    def __call__(self, uses: Mapping[str, Uses]) -> Any:
        """Return the activations of a batch.

        Parameters
        ----------
        uses : mapping of str to Uses
            What ``EmbeddingTables.preprocess`` returned.

        Returns
        -------
        nested like the configuration's features
            float32, the feature's input shape followed by dim.
        """
        return self.embedding_tables.gather(self.tables, uses)

    def update(self, uses: Mapping[str, Uses], gradients: Any, learning_rates: Any = None) -> None:
        """Update the rows of a batch by the gradients of its activations; see ``EmbeddingTables.apply``.

        Parameters
        ----------
        uses : mapping of str to Uses
            What ``EmbeddingTables.preprocess`` returned.
        gradients : nested like the configuration's features
            Gradients of the activations.
        learning_rates : mapping of int to float, sequence of float or None
            The rate of this step by dynamic tag.
        """
        self.load(self.embedding_tables.apply(self.tables, uses, gradients, learning_rates))

    def load(self, tables: Mapping[str, Table]) -> None:
        """Replace the tables, for example by those that ``EmbeddingTables.load`` returns.

        Parameters
        ----------
        tables : mapping of str to Table
            By name.
        """
        for array, leaf in zip(self.arrays, jax.tree.leaves(dict(tables)), strict=True):
            array[...] = leaf
