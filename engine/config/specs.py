"""What the rest of the engine reads: one frozen value per table and per feature, made from a valid EngineConfig.

Everything here is derived; the proto message stays the truth. Numbers are the float32 that the proto carries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.engine_config_pb2 import EngineConfig, FeatureSettings, TableSettings
from penstock.config.optimization_parameters_pb2 import OptimizationParameters
from penstock.config.optimizer_proto import accumulates, optimizer_from_proto
from penstock.config.optimizers import DynamicLearningRate, LearningRate, Optimizer, update_rule
from penstock.config.rounding import float32
from penstock.config.tables import Constant, Initializer, TruncatedNormal, Uniform, default_initializer
from penstock.errors import ConfigError
from penstock.updates import UpdateRule

Schedules = Mapping[int, Callable[[], Any]]


@dataclass(frozen=True)
class TableSpec:
    """One table, ready to be laid out and updated.

    learning_rate : the constant one, or None where ``tag`` says which value of each step it is
    initializer : a value, or the callable (shape, dtype) -> array that a TableConfig was given
    slots : (name, initial value) in TensorFlow's order
    accumulate : the gradients of an id are summed before the update, which then happens once
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


@dataclass(frozen=True)
class FeatureSpec:
    """One input feature. ``combiner`` is None where the configuration does not say; 0 is "not a sequence"."""

    name: str
    table: str
    input_shape: tuple[int, ...]
    combiner: str | None = None
    max_sequence_length: int = 0


def dynamic_tag(parameters: OptimizationParameters) -> int | None:
    """The tag of a dynamic learning rate, None for a constant one. Presence decides: tag 0 is an empty message."""
    rate = parameters.learning_rate
    return rate.dynamic.tag if rate.WhichOneof("learning_rate") == "dynamic" else None


def table_settings(message: EngineConfig, name: str) -> TableSettings:
    """The settings of a table; empty ones where there are none."""
    return next((settings for settings in message.table if settings.name == name), TableSettings())


def table_spec(
    message: EngineConfig, index: int, schedules: Schedules, initializers: Mapping[str, Callable[..., Any]]
) -> TableSpec:
    """The spec of table ``index``; ConfigError where this version cannot run it."""
    table = message.tpu_embedding_configuration.table_descriptor[index]
    parameters, settings = table.optimization_parameters, table_settings(message, table.name)
    if settings.storage_dtype == TableSettings.BFLOAT16:
        raise ConfigError(
            f"table '{table.name}': storage_dtype BFLOAT16 is not yet supported by this version (supported: FLOAT32)"
        )
    tag = dynamic_tag(parameters)
    constant = parameters.learning_rate.constant
    rate: LearningRate = constant if tag is None else schedules.get(tag, DynamicLearningRate(tag))
    given = {slot.name: slot.initial_value for slot in settings.slot if slot.HasField("initial_value")}
    try:
        optimizer = optimizer_from_proto(parameters, rate, given)
    except ConfigError as error:
        raise ConfigError(f"table '{table.name}': {error}") from None
    return TableSpec(
        name=table.name,
        vocabulary_size=table.vocabulary_size,
        dim=table.dimension,
        optimizer=optimizer,
        learning_rate=constant if tag is None else None,
        tag=tag,
        initializer=initializers.get(table.name) or _initializer(settings, table.dimension),
        slots=tuple((name, float32(value)) for name, value in optimizer.slots()),
        rule=update_rule(optimizer),
        accumulate=accumulates(parameters),
    )


def _initializer(settings: TableSettings, dim: int) -> Initializer:
    match settings.WhichOneof("initializer"):
        case "truncated_normal":
            return TruncatedNormal(settings.truncated_normal.mean, settings.truncated_normal.stddev)
        case "uniform":
            return Uniform(settings.uniform.min, settings.uniform.max)
        case "constant":
            return Constant(settings.constant.value)
        case _:
            return default_initializer(dim)


def feature_specs(message: EngineConfig) -> tuple[FeatureSpec, ...]:
    """The features in their order; where none are listed but batch sizes are, one per table, as TensorFlow has it."""
    config = message.tpu_embedding_configuration
    tables = config.table_descriptor
    if not config.feature_descriptor:
        batch = config.batch_size_per_tensor_core
        return tuple(
            FeatureSpec(table.name, table.name, (batch * table.num_features,))
            for table in tables
            if batch > 0 and table.num_features > 0
        )
    settings = {feature.name: feature for feature in message.feature}
    return tuple(
        FeatureSpec(
            name=feature.name,
            table=tables[feature.table_id].name,
            input_shape=tuple(feature.input_shape),
            combiner=settings.get(feature.name, FeatureSettings()).combiner or None,
            max_sequence_length=settings.get(feature.name, FeatureSettings()).max_sequence_length,
        )
        for feature in config.feature_descriptor
    )
