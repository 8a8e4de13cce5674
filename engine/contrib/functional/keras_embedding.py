"""Embedding tables as a Keras layer, for ``model.fit`` on the JAX backend, and batches that are prepared for it."""

from __future__ import annotations

import ast
import base64
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

try:
    import keras
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "penstock.functional.keras_embedding needs the package keras: pip install 'penstock[keras]'", name=error.name
    ) from error

from penstock.base.errors import UsageError, UsageTypeError, listed
from penstock.contrib.functional.embedding_tables import EmbeddingTables
from penstock.contrib.functional.keras_optimizers import BackwardPasses, TableArray
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.engine_config_pb2 import EngineConfig
from penstock.model.config.features import flatten, pack
from penstock.model.config.specs import WEIGHTS, PythonPart
from penstock.model.config.tables import Initializer
from penstock.model.frames import Float32
from penstock.model.updates import OptaxRule
from penstock.rows.bridge import Table, Uses
from penstock.rows.bridge.functional_table import PARTS

# Of each array of lookups: its number of axes and its type. Gains are the bits of float32, as a model whose policy is
# mixed rounds floats.
_FORMS = dict.fromkeys(PARTS, (2, "int32")) | {
    "asked": (3, "int32"),
    "counts": (1, "int32"),
    "touched": (3, "bool"),
    **{part: (3, "int32") for part in PARTS if part.endswith(("_terms", "_nodes"))},
}


@keras.saving.register_keras_serializable(package="penstock")
class Embedding(keras.layers.Layer):  # type: ignore[misc]
    """The tables of a configuration as a layer; from the lookups of ``preprocess`` to activations.

    Parameters
    ----------
    embedding_tables : EmbeddingTables
        On one device, created with ``halves=False``.
    seed : int
        Seed of the initial rows.
    **options : object
        Arguments of ``keras.layers.Layer``.

    Raises
    ------
    UsageError
        For tables that it cannot train: over several devices, in halves of words, with a dynamic learning rate, or with
        an optax rule that counts steps. At the first batch, for an optimizer that would change the updated rows
        (``gradient_accumulation_steps``, ``use_ema``, ``MultiOptimizer``) and for a layer that is called twice.

    Notes
    -----
    The backward pass updates the tables by their own optimizers, and Keras stores the updated arrays where it would
    otherwise apply a gradient (``overwrite_with_gradient``). So ``model.fit`` needs no change, and the optimizer of
    ``model.compile`` is that of the dense part. Use the layer once per step: two updates do not add up.

    Tables have float32, and activations the compute dtype of the layer's policy. If the optimizer scales the loss, rows
    move by the unscaled gradients: the layer adds a loss of 0, whose gradient is the scale.

    ``weights``, and so ``summary`` and ``get_weights``, have the rows of every table and its slots in id order, as
    files have them, whatever their layout on the device is.

    Examples
    --------
    >>> import jax, keras
    >>> import numpy as np
    >>> import penstock as ps
    >>> from penstock.functional.keras_embedding import Embedding, PreparedBatches
    >>> item = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), combiner="sum", name="item")
    >>> config = ps.EmbeddingConfig.from_features({"clicked": ps.FeatureConfig(item)}, batch_size=2)
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("shard",))
    >>> layer = Embedding(ps.functional.EmbeddingTables(config, mesh, halves=False))
    >>> inputs = layer.inputs()
    >>> model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)["clicked"]))
    >>> model.compile("sgd", "mse")
    >>> batches = PreparedBatches(layer, [({"clicked": [[7, 3], [7]]}, np.zeros((2, 1)))])
    >>> history = model.fit(batches, verbose=0)
    >>> layer.weights[0].shape, layer.embedding_tables.lookup(layer.tables, "item", [5])
    ((8, 2), array([[1., 1.]], dtype=float32))
    """

    def __init__(self, embedding_tables: EmbeddingTables, seed: int = 0, **options: Any) -> None:
        if keras.backend.backend() != "jax":
            raise UsageError(f"expected Keras's JAX backend (KERAS_BACKEND=jax), got {keras.backend.backend()}")
        _check_distribution()
        super().__init__(**options)
        self.embedding_tables, self.seed = embedding_tables, seed
        tables = embedding_tables.create(seed)
        _check(embedding_tables, tables)
        self._num_lines = {name: len(table.arrays[0]) for name, table in tables.items()}  # on the only device
        leaves, self._structure = jax.tree.flatten(tables)
        self._passes = BackwardPasses(self.name)
        self._lookup = _lookup_of(embedding_tables, self._structure, self._passes)
        with keras.name_scope(self.name, caller=self):
            self._arrays = [TableArray(self._passes, leaf, f"array_{number}") for number, leaf in enumerate(leaves)]
        for array in self._arrays:  # which Keras now lists as variables that the layer can freeze and thaw
            array.trainable = self.trainable
        self._views = [TablePart(self, name, part) for name in tables for part in embedding_tables.part_shapes(name)]
        self.built = True

    @property
    def tables(self) -> dict[str, Table]:
        """The tables by name, for ``EmbeddingTables.parameters`` and ``lookup``."""
        tables: dict[str, Table] = jax.tree.unflatten(self._structure, [array.value for array in self._arrays])
        return tables

    def load(self, tables: Mapping[str, Table]) -> None:
        """Replace the tables, for example by those that ``EmbeddingTables.load`` returns.

        Parameters
        ----------
        tables : mapping of str to Table
            By name.
        """
        for array, leaf in zip(self._arrays, jax.tree.leaves(dict(tables)), strict=True):
            array.assign(leaf)

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
        _check_distribution()
        uses = self.embedding_tables.preprocess(features, weights)
        lookups = {name: {part: getattr(table_uses, part) for part in PARTS} for name, table_uses in uses.items()}
        for arrays in lookups.values():
            arrays["gains"] = arrays["gains"].view(np.int32)
        return lookups

    def inputs(self) -> dict[str, dict[str, Any]]:
        """Return the inputs of a functional model for what ``preprocess`` returns.

        Returns
        -------
        dict of str to dict of str to keras.KerasTensor
            By table and array: of any size, as the sizes of lookups grow.
        """
        return {
            name: {
                part: keras.Input(batch_shape=(None,) * axes, dtype=dtype, name=f"{self.name}_{name}_{part}")
                for part, (axes, dtype) in _FORMS.items()
            }
            for name in self.embedding_tables.features
        }

    def __call__(self, uses: Any, *arguments: Any, **options: Any) -> Any:
        """Return the activations of a batch. Raises UsageTypeError for anything but its lookups, such as ids."""
        tables = self.embedding_tables.features
        fits = isinstance(uses, Mapping) and uses.keys() == tables.keys()
        if not fits or not all(isinstance(use, Mapping) and use.keys() == set(PARTS) for use in uses.values()):
            raise UsageTypeError(
                f"layer '{self.name}': expected the lookups of a batch, got something else; give fit a PreparedBatches "
                "of the layer and your batches of ids, or call preprocess(features)"
            )
        return super().__call__(uses, *arguments, **options)

    def call(self, uses: Mapping[str, Mapping[str, jax.Array]]) -> Any:
        """Return the activations of a batch.

        Parameters
        ----------
        uses : mapping
            What ``preprocess`` returned.

        Returns
        -------
        nested like the configuration's features
            In the compute dtype, the feature's input shape followed by dim.
        """
        features, table_uses = self.embedding_tables.features, {}
        for name, use in uses.items():
            if not all(isinstance(size, int) for array in use.values() for size in array.shape):
                raise UsageTypeError(
                    f"layer '{self.name}': lookups of any size cannot be exported; export what "
                    "penstock.functional.keras_embedding.materialized(model) returns, which takes ids"
                )
            parts = {**use, "gains": jax.lax.bitcast_convert_type(use["gains"], jnp.float32)}
            table_uses[name] = Uses(**parts, features=features[name], num_lines=self._num_lines[name])
        self._passes.count = 0
        arrays = [array.value for array in self._arrays]
        activations, loss = self._lookup(arrays, table_uses)
        # Inside a function that keras.remat or a program of the user traces, Keras would keep a tracer of it.
        if isinstance(loss, jax.core.Tracer) and _trace_of(loss) is _trace_of(arrays[0]):
            self.add_loss(keras.ops.cast(loss, keras.config.floatx()))
        return jax.tree.map(lambda rows: rows.astype(self.compute_dtype), activations)

    def rematerialized_call(self, layer_call: Any, *arguments: Any, **options: Any) -> Any:
        """Return the call itself: a lookup has nothing to compute again."""
        return layer_call

    def compute_output_spec(self, uses: Any) -> Any:
        """Return the shapes of the activations, nested like the configuration's features."""
        config = self.embedding_tables.config
        activations = [
            keras.KerasTensor((*feature.input_shape, config.table(feature.table).dim), self.compute_dtype)
            for feature in config.features
        ]
        structure = config.feature_structure
        return pack(structure, (activations[index] for index in flatten(structure)))

    # ---- what Keras lists and saves

    @property
    def weights(self) -> list[TablePart]:
        """The rows and slots of every table."""
        return self._views

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of the tables and the seed, for ``model.save``. Raises UsageError."""
        tables = self.embedding_tables
        for name, rule in tables.rules.items():
            if isinstance(rule, OptaxRule) or not isinstance(tables.config.table(name).initializer, Initializer):
                kind = "optax rule" if isinstance(rule, OptaxRule) else "initializer"
                raise UsageError(
                    f"layer '{self.name}', table '{name}': its {kind} is a Python function, which a file cannot "
                    "hold; keep the code that builds the model, with save_weights and load_weights"
                )
        message = tables.config.to_engine_proto().SerializeToString(deterministic=True)
        # Keras would store a tuple as a list.
        structure = repr(tables.config.feature_structure)
        own = {"tables": base64.b64encode(message).decode(), "structure": structure, "seed": self.seed}
        return {**super().get_config(), **own}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Embedding:
        """Return the layer of a saved model, on the first device."""
        options = dict(config)
        message = EngineConfig.FromString(base64.b64decode(options.pop("tables")))
        structure = ast.literal_eval(options.pop("structure"))
        tables = EmbeddingConfig(message, PythonPart({}, {}, {}, {}, structure))
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("shard",))
        return cls(EmbeddingTables(tables, mesh, halves=False), **options)

    def save_own_variables(self, store: Any) -> None:
        """Save every part in id order: a file fits any device."""
        for number, part in enumerate(self._views):
            store[str(number)] = part.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Load what ``save_own_variables`` saved. Raises UsageError for the rows of other tables."""
        wanted = [tuple(part.shape) for part in self._views]
        got = [tuple(store[number].shape) for number in sorted(store.keys(), key=int)]
        if got != wanted:
            raise UsageError(
                f"layer '{self.name}': the file has arrays of shapes {listed(map(str, got))}, expected "
                f"{listed(map(str, wanted))}; build the model with the tables that were saved"
            )
        by_table: dict[str, dict[str, Float32]] = {}
        for number, part in enumerate(self._views):
            by_table.setdefault(part.table, {})[part.part] = np.asarray(store[str(number)], np.float32)
        for name, parts in by_table.items():
            self._load_parts(name, parts)

    def _load_parts(self, name: str, parts: Mapping[str, Float32]) -> None:
        slots = {part: values for part, values in parts.items() if part != WEIGHTS}
        self.load(self.embedding_tables.load(self.tables, name, parts[WEIGHTS], **slots))


class TablePart:
    """The weights or a slot of a table as Keras lists it: in id order and without padding.

    Parameters
    ----------
    layer : Embedding
        Whose table it is.
    table, part : str
        The names of the table, and of the part as ``EmbeddingTables.parameters`` has it.

    Attributes
    ----------
    shape : tuple of int
        (vocabulary_size, floats per row).
    trainable : bool
        Whether it is the weights, of a layer and a table that are trained.
    """

    dtype = "float32"
    regularizer = constraint = None
    overwrite_with_gradient = True

    def __init__(self, layer: Embedding, table: str, part: str) -> None:
        self._layer, self.table, self.part = layer, table, part
        self.shape = layer.embedding_tables.part_shapes(table)[part]
        self.name, self.path = f"{table}.{part}", f"{layer.name}/{table}.{part}"

    @property
    def trainable(self) -> bool:
        config = self._layer.embedding_tables.config
        return self.part == WEIGHTS and bool(self._layer.trainable) and config.table(self.table).trainable

    def numpy(self) -> Float32:
        """Return a copy of the rows."""
        return self._layer.embedding_tables.parameters(self._layer.tables, self.table)[self.part]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.numpy(), dtype)

    def assign(self, values: Any) -> None:
        """Set the rows."""
        parts = self._layer.embedding_tables.parameters(self._layer.tables, self.table)
        self._layer._load_parts(self.table, {**parts, self.part: np.asarray(values, np.float32)})


class PreparedBatches(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of ids as the lookups that a layer takes, prepared by threads while the model trains.

    Parameters
    ----------
    layer : Embedding
        Which prepares them.
    batches : sequence or keras.utils.PyDataset
        Each item: the features of a batch, then its labels, sample weights and the like.
    combine : callable or None
        (lookups, *rest of the item) → what ``fit`` takes, for models with other inputs. None: a tuple of them.
    **options : object
        Arguments of ``keras.utils.PyDataset``, such as ``workers``.

    Raises
    ------
    UsageError
        For ``use_multiprocessing``: lookups are on the device of this process.
    UsageTypeError
        For batches without numbers, such as a generator.

    Examples
    --------
    >>> import jax, keras
    >>> import numpy as np
    >>> import penstock as ps
    >>> from penstock.functional.keras_embedding import Embedding, PreparedBatches
    >>> item = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), name="item")
    >>> config = ps.EmbeddingConfig.from_features({"clicked": ps.FeatureConfig(item)}, batch_size=2)
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("shard",))
    >>> layer = Embedding(ps.functional.EmbeddingTables(config, mesh, halves=False))
    >>> batches = PreparedBatches(layer, [({"clicked": [[7, 3], [7]]}, np.zeros((2, 1)))], workers=2)
    >>> lookups, labels = batches[0]
    >>> list(lookups), labels.shape
    (['item'], (2, 1))
    """

    def __init__(
        self, layer: Embedding, batches: Sequence[Any], combine: Callable[..., Any] | None = None, **options: Any
    ) -> None:
        if options.get("use_multiprocessing"):
            raise UsageError("PreparedBatches: lookups are on the device of this process; use threads (workers=4)")
        if not (hasattr(batches, "__len__") and hasattr(batches, "__getitem__")):
            raise UsageTypeError(
                f"PreparedBatches: expected a sequence or a PyDataset of batches, got {type(batches).__name__}; give "
                "fit a generator of (layer.preprocess(features), labels) instead"
            )
        super().__init__(**options)
        self._layer, self._batches = layer, batches
        self._combine: Callable[..., Any] = combine or (lambda *item: item)

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Any:
        features, *rest = self._batches[index]
        return self._combine(self._layer.preprocess(features), *rest)

    def on_epoch_begin(self) -> None:
        self._forward("on_epoch_begin")

    def on_epoch_end(self) -> None:
        self._forward("on_epoch_end")

    def _forward(self, event: str) -> None:
        if isinstance(self._batches, keras.utils.PyDataset):
            getattr(self._batches, event)()


def _trace_of(array: jax.Array) -> Any:
    return getattr(array, "_trace", None)


def _lookup_of(embedding_tables: EmbeddingTables, structure: Any, passes: BackwardPasses) -> Any:
    """Return a function (arrays, uses) → activations and a loss of 0.

    Its gradient by the arrays is the updated arrays. The gradient of the loss of 0 is the factor that scales the loss.
    """

    @jax.custom_vjp
    def lookup(arrays: list[jax.Array], uses: Mapping[str, Uses]) -> Any:
        return embedding_tables.gather(jax.tree.unflatten(structure, arrays), uses), jnp.zeros((), jnp.float32)

    def forward(arrays: Any, uses: Any) -> tuple[Any, Any]:
        arrays, uses = jax.tree.map(lambda primal: primal.value, (arrays, uses))
        return lookup(arrays, uses), (arrays, uses)

    def backward(residuals: Any, cotangents: Any) -> tuple[Any, None]:
        arrays, uses = residuals
        gradients, scale = cotangents
        passes.count += 1
        passes.has_scale = not isinstance(scale, SymbolicZero)
        gradients = jax.tree.map(partial(_unscaled, scale=scale if passes.has_scale else 1.0), gradients)
        return jax.tree.leaves(embedding_tables.apply(jax.tree.unflatten(structure, arrays), uses, gradients)), None

    lookup.defvjp(forward, backward, symbolic_zeros=True)
    return lookup


def _unscaled(gradient: Any, scale: Any) -> jax.Array:
    """Return a gradient of a scaled loss divided by the scale; not a number where it overflowed.

    So clipping makes no finite update of it, and LossScaleOptimizer finds that it has to skip the step.
    """
    if isinstance(gradient, SymbolicZero):
        return jnp.zeros(gradient.shape, gradient.dtype)
    overflowed = jnp.isinf(gradient) & (scale != 1)
    unscaled: jax.Array = gradient / jnp.where(overflowed, gradient, scale)  # a constant NaN trips jax_debug_nans
    return unscaled


def _check_distribution() -> None:
    """Raise UsageError if Keras distributes batches over several devices."""
    distribution = keras.distribution.distribution()
    if distribution is not None and math.prod(distribution.device_mesh.shape) > 1:
        raise UsageError(
            f"a Keras layer has its tables on one device, and {type(distribution).__name__} distributes each batch "
            "over several; call keras.distribution.set_distribution(None), or use EmbeddingTables in your own step"
        )


def _check(embedding_tables: EmbeddingTables, tables: Mapping[str, Table]) -> None:
    """Raise UsageError for tables that the layer cannot train."""
    if embedding_tables.mesh.size > 1:
        raise UsageError(
            f"a Keras layer needs its tables on one device, got {embedding_tables.mesh.size}; choose one: "
            'EmbeddingTables(config, jax.sharding.Mesh(jax.devices()[:1], ("shard",)), halves=False)'
        )
    for name, table in tables.items():
        if any(array.dtype != "float32" for array in table.arrays):
            raise UsageError(f"table '{name}': halves of words have no gradient; use EmbeddingTables(…, halves=False)")
        if table.numbers:
            raise UsageError(
                f"table '{name}': a Keras layer cannot count the steps of its optax rule; use EmbeddingTables"
            )
        if embedding_tables.config.table(name).tag is not None:
            raise UsageError(f"table '{name}': a Keras layer needs a constant learning rate; use EmbeddingTables")
