"""TableSpec and FeatureSpec: the frozen values per table and feature that the engine derives from a valid EngineConfig.

The proto message remains the source of truth. Numbers are the float32 values that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from penstock.base.errors import ConfigError
from penstock.model.config.dynamic import Dynamic, read_dynamic
from penstock.model.config.engine_config_pb2 import EngineConfig, FeatureSettings, TableSettings
from penstock.model.config.features import feature_paths
from penstock.model.config.lint.runnable import refusals
from penstock.model.config.optimizer_protos import read_optimizer
from penstock.model.config.placement import ON_DEVICES, Placement, read_placement
from penstock.model.config.proto_views import TableMessage, read_limits
from penstock.model.config.tables import INITIALIZERS, Constant, Initializer, default_initializer
from penstock.model.updates import (
    SGD,
    DynamicLearningRate,
    FrequencyEstimator,
    LearningRate,
    Optimizer,
    UpdateRule,
    update_rule,
)
from penstock.model.updates.rule import float32


class PythonPart(NamedTuple):
    """The parts of a configuration that no message can hold: callables, nesting and unrounded numbers.

    schedules : tag -> the callable learning rate (or step counter)
    initializers : table -> the callable (shape, dtype) -> array
    programs : table -> the function of its UserDefinedProgram
    written : path in the message -> the number as written, before float32
    feature_structure : the nesting of the features, with the index of each at its leaf; None if unknown
    drawn_as : of a renamed table -> its first name
    step : the global step: which tables are still frozen
    """

    schedules: dict[int, Callable[..., Any]]
    initializers: dict[str, Callable[..., Any]]
    programs: dict[str, Callable[..., Any]]
    written: dict[str, float]
    feature_structure: Any = None
    drawn_as: Mapping[str, str] = {}
    step: int = 0


# TensorFlow's name for a table's weights, as distinct from its slots.
WEIGHTS = "parameters"

# Per row of a cached table: 20 of RowCache, and a mark of CachedTables.
CACHE_ROW_BYTES = 21


@dataclass(frozen=True)
class Quantization:
    """The simulated quantization of a forward pass: ``num_buckets`` levels from lower to upper, both included."""

    num_buckets: int
    lower: float
    upper: float


@dataclass(frozen=True)
class TableSpec:
    """One table, ready to be laid out and updated; ``EmbeddingConfig.table`` returns it.

    Attributes
    ----------
    name : str
        The table's name.
    vocabulary_size, dim : int
        Rows, and float32 values per row.
    optimizer : Optimizer
        As configured.
    learning_rate : float or None
        The constant rate; None if it is dynamic.
    tag : int or None
        The index of a dynamic rate among the values of each step; None if the rate is constant.
    initializer : Initializer or callable
        An ``Initializer`` value, or the TableConfig's callable (shape, dtype) -> array.
    slots : tuple of (str, float)
        Name and initial value of each slot, in TensorFlow's order.
    rule : UpdateRule
        The constants of the update.
    accumulate : bool
        Whether the gradients of an id are summed before a single update.
    storage_dtype : {"float32", "bfloat16"}
        Of the weights.
    quantization : Quantization or None
        Simulated in the forward pass; the table itself is not quantized.
    dynamic : Dynamic or None
        Ids are any 64-bit keys, of which vocabulary_size have a row at once; None: ids are below vocabulary_size.
    placement : Placement
        Where rows and slots lie.
    trainable : bool
        False: frozen. ``slots`` is then empty, and no rule is ever applied.
    refuses_gradients : bool
        Of a frozen table: gradients for it are errors, and not dropped.
    until_step : int or None
        The step from which on a frozen table is trained; None: it stays as it is.
    drawn_as : str
        The name that initial rows and the hashes of keys depend on: the first name of a table that was renamed.
    """

    name: str
    vocabulary_size: int
    dim: int
    optimizer: Optimizer
    learning_rate: float | None
    tag: int | None
    initializer: Initializer | Callable[..., Any]
    slots: tuple[tuple[str, float], ...]
    rule: UpdateRule
    accumulate: bool
    storage_dtype: str = "float32"
    quantization: Quantization | None = None
    dynamic: Dynamic | None = None
    placement: Placement = ON_DEVICES
    trainable: bool = True
    refuses_gradients: bool = False
    until_step: int | None = None
    drawn_as: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "drawn_as", self.drawn_as or self.name)

    @property
    def id_type(self) -> str:
        """The type of ids, as NumPy and Arrow name it."""
        return "int64" if self.dynamic is None else self.dynamic.key_type

    @property
    def weights_bytes(self) -> int:
        """The bytes that the weights need at least, in any layout."""
        return self.vocabulary_size * self.dim * (2 if self.storage_dtype == "bfloat16" else 4)

    @property
    def slots_bytes(self) -> int:
        """The bytes that all slots need at least, in any layout."""
        return self.vocabulary_size * sum(self.part_dims[1:]) * 4

    @property
    def row_bytes(self) -> int:
        """The bytes of one row with its slots, without padding."""
        return (self.weights_bytes + self.slots_bytes) // self.vocabulary_size

    @property
    def places(self) -> int:
        """The rows of a cached table that are on the devices at a time."""
        assert self.placement.device_bytes is not None
        return min(self.vocabulary_size, max(1, self.placement.device_bytes // self.row_bytes))

    @property
    def cache_bytes(self) -> int:
        """The bytes that a cached table needs on the host next to its rows: which of them is where."""
        return CACHE_ROW_BYTES * self.vocabulary_size if self.placement.where == "cached" else 0

    @property
    def part_dims(self) -> tuple[int, ...]:
        """The floats per row of the weights, then of each slot."""
        return (self.dim, *(self.rule.slot_dim(self.dim, slot) for slot in range(len(self.slots))))

    @property
    def slot_dims(self) -> dict[str, int]:
        """The floats per row of each slot, by its name."""
        return dict(zip(dict(self.slots), self.part_dims[1:], strict=True))


@dataclass(frozen=True)
class FeatureSpec:
    """One input feature.

    combiner : "mean", "sum" or "sqrtn"; None if the configuration does not specify it
    path : identifies the feature in messages and columns: its name or key path (``features.feature_paths``); not part
        of equality, since it follows from names and nesting
    """

    name: str
    table: str
    input_shape: tuple[int, ...]
    combiner: str | None = None
    max_sequence_length: int = 0
    path: str = field(default="", compare=False)

    @property
    def sequence_length(self) -> int:
        """The number of positions of a sequence; 0 if the ids of a sample are combined.

        As in TensorFlow, ids are combined unless the input shape ends in max_sequence_length: an output_shape, or an
        input shape that ends in 1, overrides max_sequence_length.
        """
        length, shape = self.max_sequence_length, self.input_shape
        return length if len(shape) > 1 and shape[-1] == length else 0


def table_spec(table: TableMessage, part: PythonPart) -> TableSpec:
    """Return the spec of a table. Raise ConfigError if this version cannot run it."""
    refused = next(refusals(table, part.programs), None)
    if refused is not None:
        raise ConfigError(str(refused))
    if table.settings.HasField("dynamic") and table.name in part.initializers:
        raise ConfigError(
            f"table '{table.name}': a dynamic table cannot start from a Python callable, which draws all rows at once; "
            "use a TruncatedNormal, Uniform, Constant, RowIdInitializer or FromFile"
        )
    optimizer, starts = optimizer_of(table, part), table.initial_values
    until = table.until_step
    trainable = table.is_trainable or (until is not None and part.step >= until)
    return TableSpec(
        name=table.name,
        vocabulary_size=table.descriptor.vocabulary_size,
        dim=table.descriptor.dimension,
        optimizer=optimizer,
        learning_rate=table.parameters.learning_rate.constant if table.tag is None else None,
        tag=table.tag,
        initializer=part.initializers.get(table.name) or _initializer(table),
        slots=tuple((name, float32(starts.get(name, value))) for name, value in optimizer.slots() if trainable),
        rule=update_rule(optimizer if trainable else SGD()),
        accumulate=table.accumulates,
        storage_dtype="bfloat16" if table.settings.storage_dtype == TableSettings.BFLOAT16 else "float32",
        quantization=_quantization(table),
        dynamic=read_dynamic(table.settings),
        placement=read_placement(table.settings),
        trainable=trainable,
        refuses_gradients=not trainable and table.settings.on_gradient == TableSettings.REFUSE,
        until_step=until,
        drawn_as=part.drawn_as.get(table.name, ""),
    )


def optimizer_of(table: TableMessage, part: PythonPart) -> Optimizer:
    """Return the optimizer of a table as an instance of its class, whether it can be run or not."""
    tag, constant = table.tag, table.parameters.learning_rate.constant
    rate: LearningRate = constant if tag is None else part.schedules.get(tag, DynamicLearningRate(tag))
    return read_optimizer(table, rate, part.programs.get(table.name))


def _quantization(table: TableMessage) -> Quantization | None:
    simulated = table.parameters.simulated_quantization
    if not simulated.enabled:
        return None
    lower, upper = read_limits(simulated.clipping_limits)
    assert lower is not None  # refusals() checks it
    assert upper is not None
    return Quantization(simulated.num_buckets, lower, upper)


def _initializer(table: TableMessage) -> Initializer:
    chosen = table.settings.WhichOneof("initializer")
    if chosen is not None:
        message = getattr(table.settings, chosen)
        return INITIALIZERS[chosen](*(getattr(message, field.name) for field in message.DESCRIPTOR.fields))
    if table.algorithm == FrequencyEstimator.parameters_field:
        # Rows are distances between hits; a row that has not been hit holds the largest.
        return Constant(table.parameters.frequency_estimator.max_delta)
    return default_initializer(table.descriptor.dimension)


def feature_specs(message: EngineConfig, structure: Any = None) -> tuple[FeatureSpec, ...]:
    """Return the features in order; if only batch sizes are given, one per table, as in TensorFlow.

    structure : their nesting; None if they are a list
    """
    config = message.tpu_embedding_configuration
    tables, batch = config.table_descriptor, config.batch_size_per_tensor_core
    by_name = {settings.name: settings for settings in message.feature if not settings.HasField("feature_id")}
    by_id = {settings.feature_id: settings for settings in message.feature if settings.HasField("feature_id")}
    specs = []
    for index, feature in enumerate(config.feature_descriptor):
        settings = by_id.get(index) or by_name.get(feature.name) or FeatureSettings()
        specs.append(
            FeatureSpec(
                name=feature.name,
                table=tables[feature.table_id].name,
                input_shape=tuple(feature.input_shape),
                combiner=settings.combiner or None,
                max_sequence_length=settings.max_sequence_length,
            )
        )
    if not config.feature_descriptor and batch > 0:
        counted = [table for table in tables if table.num_features > 0]
        specs = [FeatureSpec(table.name, table.name, (batch * table.num_features,)) for table in counted]
    paths = feature_paths(specs if structure is None else structure, [spec.name for spec in specs])
    return tuple(replace(spec, path=path) for spec, path in zip(specs, paths, strict=True))
