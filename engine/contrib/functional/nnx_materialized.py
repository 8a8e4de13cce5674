"""``materialized`` for Flax NNX: a model to deploy, with ``nnx.Embed`` in place of the tables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from penstock.api.activations.nesting import leaves, name_of, structure_for
from penstock.base.errors import UsageError, UsageTypeError
from penstock.contrib.functional.deployed_lookups import activation_of, forward_rows
from penstock.contrib.functional.nnx_embedding import Embedding
from penstock.model.config.features import flatten, pack


def materialized(model: nnx.Module) -> nnx.Module:
    """Return a copy of a model with ``nnx.Embed`` in place of its tables, ready to deploy.

    Parameters
    ----------
    model : flax.nnx.Module
        The model, which stays as it is; also an ``Embedding`` alone.

    Returns
    -------
    flax.nnx.Module
        For ``jax.export`` and checkpoints: the rows are ``nnx.Param``, at ``tables`` and the table's name.

    Raises
    ------
    UsageTypeError
        If ``model`` is no module of NNX, or a class derived from ``Embedding`` replaces ``__call__``.

    Notes
    -----
    What was an ``Embedding`` takes ids where that takes lookups, in a jitted function, too, and for batches of any
    size: ``embedding(features, weights=None)``. A leaf of ``features`` is one id per sample, integers of the feature's
    input shape, or one more axis of ids, with −1 where a sample has fewer; weights have the shapes of the ids. An id
    beyond its table reads NaN.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import penstock as ps
    >>> from penstock.functional.nnx_embedding import Embedding, materialized
    >>> item = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), combiner="sum", name="item")
    >>> config = ps.EmbeddingConfig.from_features({"clicked": ps.FeatureConfig(item)}, batch_size=8)
    >>> deployed = materialized(Embedding(ps.functional.EmbeddingTables(config)))
    >>> ids = jnp.array([[7, 3], [7, -1]])
    >>> deployed({"clicked": ids})["clicked"].tolist()
    [[2.0, 2.0], [1.0, 1.0]]
    >>> program = jax.export.export(jax.jit(lambda ids: deployed({"clicked": ids})))(ids)
    >>> program.call(ids)["clicked"].shape
    (2, 2)
    """
    if not isinstance(model, nnx.Module):
        raise UsageTypeError(f"materialized: expected a flax.nnx.Module, got {type(model).__name__}")

    def twin(path: Any, node: Any) -> Any:
        return MaterializedEmbedding(node) if isinstance(node, Embedding) else node

    graph, state = nnx.split(nnx.recursive_map(twin, model))
    # Arrays of the model may be donated to its next step.
    copied: nnx.Module = nnx.merge(graph, jax.tree.map(jnp.copy, state))
    return copied


class MaterializedEmbedding(nnx.Module):  # type: ignore[misc]
    """What an Embedding becomes."""

    def __init__(self, embedding: Embedding) -> None:
        if type(embedding).__call__ is not Embedding.__call__:
            raise UsageTypeError(
                f"materialized: {type(embedding).__name__} replaces the __call__ of Embedding, which the copy would "
                "lack; call a plain Embedding from a module around it"
            )
        self.config = embedding.embedding_tables.config
        self.tables = nnx.Dict()
        for name in embedding.embedding_tables.features:
            rows = jnp.asarray(forward_rows(embedding.embedding_tables, embedding.tables, name))
            self.tables[name] = nnx.Embed(*rows.shape, rngs=nnx.Rngs(0), embedding_init=nnx.initializers.zeros_init())
            self.tables[name].embedding[...] = rows

    def __call__(self, features: Any, weights: Any = None) -> Any:
        """Return the activations of a batch of ids, nested like the configuration's features."""
        structure = structure_for(self.config, features)
        ids = leaves(structure, features, "features")
        gains = {} if weights is None else leaves(structure, weights, "weights")
        activations = {index: self._activation(index, ids[index], gains.get(index)) for index in ids}
        return pack(structure, (activations[index] for index in flatten(structure)))

    def _activation(self, index: int, ids: Any, weights: Any) -> jax.Array:
        feature = self.config.features[index]
        num_axes, is_sequence = len(feature.input_shape), feature.sequence_length > 0
        ids = jnp.asarray(ids)
        if ids.ndim not in ((num_axes,) if is_sequence else (num_axes, num_axes + 1)):
            raise UsageError(
                f"{name_of(self.config, index)}: expected ids of {num_axes} axes"
                f"{'' if is_sequence else ', or one more'}, got shape {list(ids.shape)}"
            )
        if weights is not None:
            if is_sequence or jnp.shape(weights) != ids.shape:
                expected = "none for a sequence" if is_sequence else f"shape {list(ids.shape)}, that of its ids"
                raise UsageError(
                    f"weights of {name_of(self.config, index)}: expected {expected}, got {list(jnp.shape(weights))}"
                )
            weights = jnp.asarray(weights, jnp.float32)
        if not is_sequence and ids.ndim == num_axes:
            ids, weights = ids[..., None], None if weights is None else weights[..., None]
        activation: jax.Array = activation_of(feature, ids, weights, self.tables[feature.table], jnp)
        return activation
