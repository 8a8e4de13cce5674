"""``materialized`` for Keras: a model to deploy, with ``keras.layers.Embedding`` in place of the tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from penstock.api.activations.nesting import leaves
from penstock.base.errors import UsageError, UsageTypeError
from penstock.contrib.functional.deployed_lookups import activation_of, forward_rows
from penstock.contrib.functional.keras_embedding import Embedding
from penstock.model.config.features import flatten, key_paths, pack


def materialized(model: keras.Model, weighted: bool = False) -> keras.Model:
    """Return a copy of a functional model with ``keras.layers.Embedding`` in place of its tables, ready to deploy.

    Parameters
    ----------
    model : keras.Model
        A functional model over the ``inputs()`` of its layers of tables. It stays as it is.
    weighted : bool
        Whether each id has a weight.

    Returns
    -------
    keras.Model
        For ``save``, ``export`` and ``predict``, not compiled. It has layers and operations of Keras and those of the
        model only, and takes ids where the model takes lookups.

    Raises
    ------
    UsageTypeError
        If ``model`` is no functional model, or a class derived from ``Embedding`` replaces ``call``.
    UsageError
        If it has no layer of tables, one inside of another layer, or one whose ``inputs()`` are not inputs of the model
        as they are.

    Notes
    -----
    In place of a layer's lookups, the copy takes ids, nested like the features of its configuration: int32, the input
    shape of the feature with any batch size, and one more axis of ids unless it is a sequence, with −1 where a sample
    has fewer. If ``weighted``, a leaf that is no sequence is a tuple of ids and weights of the same shape.

    Examples
    --------
    >>> import jax, keras
    >>> import numpy as np
    >>> import penstock as ps
    >>> from penstock.functional.keras_embedding import Embedding, materialized
    >>> item = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), combiner="sum", name="item")
    >>> config = ps.EmbeddingConfig.from_features({"clicked": ps.FeatureConfig(item)}, batch_size=2)
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("shard",))
    >>> layer = Embedding(ps.functional.EmbeddingTables(config, mesh, halves=False))
    >>> inputs = layer.inputs()
    >>> deployed = materialized(keras.Model(inputs, layer(inputs)["clicked"]))
    >>> deployed.predict_on_batch({"clicked": np.array([[7, 3], [7, -1]])}).tolist()
    [[2.0, 2.0], [1.0, 1.0]]
    """
    if not isinstance(model, keras.Model) or not hasattr(model, "operations"):
        raise UsageTypeError(
            f"materialized: expected a functional model, keras.Model(inputs, outputs), got {type(model).__name__}"
        )
    layers = [layer for layer in model.layers if isinstance(layer, Embedding)]
    every = [part for part in model._flatten_layers() if isinstance(part, Embedding)]  # noqa: SLF001
    inner = [part.name for part in every if part not in layers]
    if inner or not layers:
        problem = f"has layer '{inner[0]}' inside of another one" if inner else "has no layer of tables"
        raise UsageError(f"materialized: model '{model.name}' {problem}; call layers of tables in the model itself")
    inputs, others = model.input, list(model.inputs)
    tensors, activations = list[Any](), list[Any]()
    for layer in layers:
        if type(layer).call is not Embedding.call:
            raise UsageTypeError(
                f"materialized: {type(layer).__name__} replaces the call of Embedding, which the copy would lack; use "
                "a plain Embedding, and a layer behind it"
            )
        calls = _calls(layer, model)
        lookups = {id(tensor) for call in calls for tensor in call.input_tensors}
        ids = _inputs(layer, weighted, f"{layer.name}_" if len(layers) > 1 else "")
        inputs, others = _with_ids(inputs, lookups, ids), [tensor for tensor in others if id(tensor) not in lookups]
        if not calls or any(id(tensor) in lookups for tensor in keras.tree.flatten(inputs)):
            raise UsageError(
                f"materialized: expected the inputs() of layer '{layer.name}', nested as they are, as inputs of model "
                f"'{model.name}'"
            )
        activated = _activations(layer, ids)
        for call in calls:
            tensors, activations = [*tensors, *call.output_tensors], [*activations, *activated]
    # From the activations on, the copy has the layers of the model, with weights of its own.
    known = {id(tensor) for tensor in (*tensors, *others)}
    outputs = keras.tree.map_structure(
        lambda output: keras.layers.Identity()(output) if id(output) in known else output, model.output
    )
    rest = keras.Model([*tensors, *others], outputs, name=model.name)
    copied = keras.models.clone_model(rest)
    copied.set_weights(rest.get_weights())
    return keras.Model(inputs, copied([*activations, *others]))


def _calls(layer: Embedding, model: keras.Model) -> list[Any]:
    """Return the nodes of a model's graph where it calls a layer with inputs of its own."""
    inputs = {id(tensor) for tensor in model.inputs}
    return [
        node
        for node in layer._inbound_nodes  # noqa: SLF001 - Keras has no other way to them
        if inputs.issuperset(id(tensor) for tensor in node.input_tensors)
    ]


def _with_ids(inputs: Any, lookups: set[int], ids: Any) -> Any:
    """Return nested inputs with ids in place of the part that is the lookups of a layer. lookups : of its tensors"""
    if {id(tensor) for tensor in keras.tree.flatten(inputs)} == lookups:
        return ids
    if isinstance(inputs, Mapping):
        return {key: _with_ids(part, lookups, ids) for key, part in inputs.items()}
    if isinstance(inputs, list | tuple):
        return [_with_ids(part, lookups, ids) for part in inputs]
    return inputs


def _inputs(layer: Embedding, weighted: bool, prefix: str) -> Any:
    """Return inputs for ids, nested like the features of a layer. prefix : of their names"""
    config = layer.embedding_tables.config
    structure = config.feature_structure
    inputs = []
    for index, path in zip(flatten(structure), key_paths(structure), strict=True):
        feature, name = config.features[index], prefix + (path.replace("/", "_") or "ids")
        shape = (*feature.input_shape[1:], *(() if feature.sequence_length else (None,)))
        ids = keras.Input(shape, dtype="int32", name=name)
        has_weights = weighted and not feature.sequence_length
        inputs.append((ids, keras.Input(shape, dtype="float32", name=f"{name}_weights")) if has_weights else ids)
    return pack(structure, inputs)


def _activations(layer: Embedding, inputs: Any) -> list[Any]:
    """Return the activations of ids, in the order of the layer's own."""
    tables, embeddings = layer.embedding_tables, {}
    for name in tables.features:
        rows = forward_rows(tables, layer.tables, name)
        embedding = keras.layers.Embedding(*rows.shape, dtype="float32", name=f"{layer.name}_{name}".replace("/", "_"))
        embedding.trainable = layer.trainable and tables.config.table(name).trainable
        embedding.build()
        embedding.set_weights([rows])
        embeddings[name] = embedding
    structure, activations = tables.config.feature_structure, {}
    for index, given in leaves(structure, inputs, "features").items():
        feature = tables.config.features[index]
        ids, weights = given if isinstance(given, tuple) else (given, None)
        activation = activation_of(feature, ids, weights, embeddings[feature.table], keras.ops)
        activations[index] = keras.ops.cast(activation, layer.compute_dtype)
    flat: list[Any] = keras.tree.flatten(pack(structure, (activations[index] for index in flatten(structure))))
    return flat
