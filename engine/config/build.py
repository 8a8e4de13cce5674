"""From the Python classes to an EngineConfig: TableConfigs and optimizers in, message and callables out.

Writes what TensorFlow's TPUEmbedding writes for its tables, and beside it the little that its proto cannot hold.
Whether the result makes sense is asked in validate.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.config.engine_config_pb2 import EngineConfig, GateSettings, TableSettings
from penstock.config.optimizer_proto import optimization_parameters
from penstock.config.optimizers import DynamicLearningRate, Optimizer
from penstock.config.rounding import float32
from penstock.config.tables import (
    Constant,
    QuantizationConfig,
    TableConfig,
    TruncatedNormal,
    Uniform,
    default_initializer,
    dtype_name,
)
from penstock.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration
from penstock.errors import ConfigError

Built = tuple[EngineConfig, dict[int, Callable[[], Any]], dict[str, Callable[..., Any]]]


def build(
    tables: Sequence[TableConfig], optimizer: Optimizer | None, num_required: int | None, reduction: str | None
) -> Built:
    """The message, the schedules by tag, and the initializers by table name that only Python can hold."""
    message = EngineConfig()
    config = message.tpu_embedding_configuration
    config.mode = TPUEmbeddingConfiguration.TRAINING
    rates: list[Any] = []
    initializers: dict[str, Callable[..., Any]] = {}
    for index, table in enumerate(tables):
        if not isinstance(table, TableConfig):
            raise ConfigError(f"tables[{index}] must be a TableConfig, got {type(table).__name__}")
        if any(table is other for other in tables[:index]):
            raise ConfigError(f"tables[{index}] is the same TableConfig as an earlier one; list each table once")
        name = table.name if table.name is not None else f"table_{index}"
        _write_table(config.table_descriptor.add(), name, table, optimizer, rates)
        if not isinstance(table.initializer, TruncatedNormal | Uniform | Constant):
            initializers[name] = table.initializer
        settings = _settings(name, table, _optimizer(name, table, optimizer))
        if settings.ByteSize() > TableSettings(name=name).ByteSize():
            message.table.append(settings)
    _write_gate(message, num_required, reduction)
    schedules = {tag: rate for tag, rate in enumerate(rates) if not isinstance(rate, DynamicLearningRate)}
    return message, schedules, initializers


def _optimizer(name: str, table: TableConfig, common: Optimizer | None) -> Optimizer:
    optimizer = common if table.optimizer is None else table.optimizer
    if optimizer is None:
        raise ConfigError(f"table '{name}': no optimizer; give the table one, or the whole configuration")
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"table '{name}': optimizer must be an optimizer instance, got {optimizer!r}")
    return optimizer


def _write_table(
    descriptor: TPUEmbeddingConfiguration.TableDescriptor,
    name: str,
    table: TableConfig,
    common: Optimizer | None,
    rates: list[Any],
) -> None:
    """Fill one descriptor; a dynamic learning rate not seen before is appended to ``rates``, its tag is its place."""
    if not isinstance(name, str):
        raise TypeError(f"a table's name must be a str, got {name!r}")
    if dtype_name(table.dtype) != "float32":
        raise ConfigError(f"table '{name}': a table that is updated must be float32, got {dtype_name(table.dtype)}")
    optimizer = _optimizer(name, table, common)
    tag = _tag(name, optimizer.learning_rate, rates)
    try:
        descriptor.name = name
        descriptor.vocabulary_size = table.vocabulary_size
        descriptor.dimension = table.dim
        descriptor.optimization_parameters.CopyFrom(optimization_parameters(optimizer, tag))
        if table.quantization_config is not None:
            _write_quantization(descriptor, table.quantization_config)
    except TypeError as error:
        raise TypeError(f"table '{name}': a number of {optimizer!r} has the wrong type: {error}") from None
    except ValueError as error:
        raise ConfigError(f"table '{name}': {error}") from None


def _tag(name: str, rate: Any, rates: list[Any]) -> int | None:
    """Rates are told apart by ==, as TensorFlow does: equal bound methods share a tag, two lambdas never do."""
    if not callable(rate) and not isinstance(rate, DynamicLearningRate):
        return None
    if rate not in rates:
        rates.append(rate)
    tag = rates.index(rate)
    if isinstance(rate, DynamicLearningRate) and rate.tag != tag:
        raise ConfigError(
            f"table '{name}': learning rate has tag {rate.tag} but is number {tag} by first use; "
            f"use DynamicLearningRate({tag}), or order the tables by their tags"
        )
    return tag


def _write_quantization(
    descriptor: TPUEmbeddingConfiguration.TableDescriptor, quantization: QuantizationConfig
) -> None:
    simulated = descriptor.optimization_parameters.simulated_quantization
    simulated.enabled = True
    simulated.num_buckets = quantization.num_buckets
    # Both bounds are always present, also at 0.
    simulated.clipping_limits.lower.value = quantization.lower
    simulated.clipping_limits.upper.value = quantization.upper


def _settings(name: str, table: TableConfig, optimizer: Optimizer) -> TableSettings:
    """What the table has that differs from the defaults and that TensorFlow's message has no field for."""
    settings = TableSettings(name=name)
    match table.initializer:
        case TruncatedNormal(mean, stddev):
            if TruncatedNormal(float32(mean), float32(stddev)) != default_initializer(table.dim):
                settings.truncated_normal.mean = mean
                settings.truncated_normal.stddev = stddev
        case Uniform(minimum, maximum):
            settings.uniform.min = minimum
            settings.uniform.max = maximum
        case Constant(value):
            settings.constant.value = value
    defaults = dict(type(optimizer)().slots())  # type: ignore[call-arg]  # every subclass has a default for all
    for slot, value in optimizer.slots():
        if float32(value) != float32(defaults[slot]):
            settings.slot.add(name=slot, initial_value=value)
    return settings


def _write_gate(message: EngineConfig, num_required: int | None, reduction: str | None) -> None:
    if num_required is not None:
        if not isinstance(num_required, int) or not 1 <= num_required < 2**31:
            raise ConfigError(f"num_required must be an int of at least 1, got {num_required!r}")
        message.gate.num_required = num_required
    if reduction is not None:
        if reduction not in ("mean", "sum"):
            raise ConfigError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
        message.gate.reduction = GateSettings.MEAN if reduction == "mean" else GateSettings.SUM
