"""Convert the Python classes of tables and optimizers to an EngineConfig and the part that only Python can hold.

The message has the fields that TensorFlow's TPUEmbedding writes, plus the settings that its proto has no field for.
build_features.py converts features; lint/proto_rules.py checks the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from penstock.base.errors import ConfigError, UsageError
from penstock.model.config.clipping import Clip, Limit, write_norms
from penstock.model.config.dynamic import write_dynamic
from penstock.model.config.engine_config_pb2 import EngineConfig, GateSettings, TableSettings
from penstock.model.config.lint.source_text import numbers_of
from penstock.model.config.optimizer_protos import optimization_parameters
from penstock.model.config.placement import write_placement
from penstock.model.config.specs import PythonPart
from penstock.model.config.tables import (
    INITIALIZERS,
    QuantizationConfig,
    RowIdInitializer,
    TableConfig,
    TruncatedNormal,
    default_initializer,
    dtype_name,
)
from penstock.model.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration
from penstock.model.gate_policy import GatePolicy
from penstock.model.updates import (
    OWN_OPTIMIZERS,
    SGD,
    DynamicLearningRate,
    FrequencyAwareAdagrad,
    Optimizer,
    UserDefinedProgram,
)
from penstock.model.updates.rule import float32

Built = tuple[EngineConfig, PythonPart]
STORAGE_DTYPES = {
    "float32": TableSettings.UNSPECIFIED,
    "bfloat16": TableSettings.BFLOAT16,
    "int32": TableSettings.INT32,
}

INITIALIZER_TYPES = (RowIdInitializer, *INITIALIZERS.values())


def build_tables(tables: Sequence[TableConfig], optimizer: Optimizer | None) -> Built:
    """Convert tables without features, in their order; leave the TableConfigs unchanged. Raise ConfigError."""
    seen: set[int] = set()
    for index, table in enumerate(tables):
        if not isinstance(table, TableConfig):
            raise ConfigError(f"tables[{index}] must be a TableConfig, got {type(table).__name__}")
        if id(table) in seen:
            raise ConfigError(f"tables[{index}] is the same TableConfig as an earlier one; list each table once")
        seen.add(id(table))
        if dtype_name(table.dtype) == "int32":
            name = table.name if table.name is not None else f"table_{index}"
            raise ConfigError(
                f"table '{name}': a table that is updated must be float32 or bfloat16, got {dtype_name(table.dtype)}"
            )
    return write_tables(named_tables(tables, optimizer), num_hosts=1)


def named_tables(tables: Sequence[TableConfig], common: Optimizer | None) -> list[tuple[TableConfig, str, Optimizer]]:
    """Return every table with its name and its optimizer. Raise ConfigError for two tables of one name."""
    named: dict[Any, tuple[TableConfig, str, Optimizer]] = {}
    for index, table in enumerate(tables):
        name = table.name if table.name is not None else f"table_{index}"
        if not isinstance(name, str):
            raise TypeError(f"a table's name must be a str, got {name!r}")
        if name in named:
            raise ConfigError(f"two tables are named '{name}'; give every table its own name")
        named[name] = table, name, _optimizer(name, table, common)
    return list(named.values())


def write_tables(tables: Sequence[tuple[TableConfig, str, Optimizer]], num_hosts: int) -> Built:
    """Write the tables to a message, in their order."""
    message = EngineConfig()
    config = message.tpu_embedding_configuration
    config.mode = TPUEmbeddingConfiguration.TRAINING
    inputs: dict[Any, int] = {}
    part = PythonPart({}, {}, {}, {})
    for index, (table, name, optimizer) in enumerate(tables):
        _write_table(config.table_descriptor.add(), name, table, optimizer, inputs, num_hosts)
        if callable(table.initializer) and not isinstance(table.initializer, INITIALIZER_TYPES):
            part.initializers[name] = table.initializer
        if isinstance(optimizer, UserDefinedProgram):
            part.programs[name] = optimizer.program
        part.written.update(numbers_of(f"table_descriptor[{index}].optimization_parameters", optimizer))
        settings = _settings(name, table, optimizer)
        if settings.ByteSize() > TableSettings(name=name).ByteSize():
            message.table.append(settings)
    part.schedules.update({tag: rate for rate, tag in inputs.items() if not isinstance(rate, DynamicLearningRate)})
    return message, part


def _optimizer(name: str, table: TableConfig, common: Optimizer | None) -> Optimizer:
    optimizer = common if table.optimizer is None else table.optimizer
    if optimizer is None and not table.trainable and table.until_step is None:
        optimizer = SGD()  # TensorFlow's message has one of each table
    if optimizer is None:
        raise ConfigError(f"table '{name}': no optimizer; give the table one, or the whole configuration")
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"table '{name}': optimizer must be an optimizer instance, got {optimizer!r}")
    return optimizer


def _write_table(
    descriptor: TPUEmbeddingConfiguration.TableDescriptor,
    name: str,
    table: TableConfig,
    optimizer: Optimizer,
    inputs: dict[Any, int],
    num_hosts: int,
) -> None:
    """Fill one descriptor. Add a new dynamic input to ``inputs``, with its tag."""
    tag = _tag(name, optimizer.learning_rate, inputs)
    try:
        descriptor.name = name
        # As in TensorFlow: at least one row for every host.
        descriptor.vocabulary_size = max(table.vocabulary_size, num_hosts)
        descriptor.dimension = table.dim
        descriptor.optimization_parameters.CopyFrom(optimization_parameters(optimizer, tag))
        if isinstance(optimizer, FrequencyAwareAdagrad) and optimizer.step_counter is not None:
            counter = _tag(name, optimizer.step_counter, inputs)
            if counter is None:
                raise ConfigError(f"step_counter must be a callable or None, got {optimizer.step_counter!r}")
            descriptor.optimization_parameters.frequency_aware_adagrad.step_counter.tag = counter
        if table.quantization_config is not None:
            _write_quantization(descriptor, table.quantization_config)
    except TypeError as error:
        raise TypeError(f"table '{name}': a number of {optimizer!r} has the wrong type: {error}") from None
    except ValueError as error:
        raise ConfigError(f"table '{name}': {error}") from None


def _tag(name: str, rate: Any, inputs: dict[Any, int]) -> int | None:
    """Return a dynamic rate's tag. As in TensorFlow, == decides: equal bound methods share a tag, lambdas never.

    TensorFlow looks rates up in a dictionary, so an unhashable one raises TypeError there, too.
    """
    if not callable(rate) and not isinstance(rate, DynamicLearningRate):
        return None
    tag = inputs.setdefault(rate, len(inputs))
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
    # Both bounds are always present, even when they are 0.
    simulated.clipping_limits.lower.value = quantization.lower
    simulated.clipping_limits.upper.value = quantization.upper


def _settings(name: str, table: TableConfig, optimizer: Optimizer) -> TableSettings:
    """Return the table's non-default settings that TensorFlow's message has no field for."""
    settings = TableSettings(name=name)
    _write_initializer(settings, table)
    is_program = isinstance(optimizer, UserDefinedProgram)
    defaults = {} if is_program else dict(type(optimizer)().slots())
    for slot, value in optimizer.slots():
        if slot not in defaults or float32(value) != float32(defaults[slot]):
            settings.slot.add(name=slot, initial_value=value)
    settings.storage_dtype = STORAGE_DTYPES[dtype_name(table.dtype)]
    if table.dynamic is not None:
        write_dynamic(settings, table.dynamic)
    write_placement(settings, table.placement)
    if not table.trainable:
        settings.trainable = False
        settings.on_gradient = TableSettings.REFUSE if table.on_gradient == "refuse" else TableSettings.DROP
        if table.until_step is not None:
            settings.until_step = table.until_step
    if optimizer.parameters_field in OWN_OPTIMIZERS:
        try:
            optimizer.write_parameters(settings)
        except TypeError as error:
            raise TypeError(f"table '{name}': a number of {optimizer!r} has the wrong type: {error}") from None
    return settings


def _write_initializer(settings: TableSettings, table: TableConfig) -> None:
    """Write an ``Initializer`` value, but not the default."""
    start = table.initializer
    if isinstance(start, TruncatedNormal):
        start = TruncatedNormal(float32(start.mean), float32(start.stddev))
    for name, kind in INITIALIZERS.items():
        if isinstance(start, kind) and start != default_initializer(table.dim):
            message = getattr(settings, name)
            for number, field in zip(fields(kind), message.DESCRIPTOR.fields, strict=True):
                setattr(message, field.name, getattr(start, number.name))


def write_settings(
    message: EngineConfig,
    num_required: int | None,
    reduction: str | None,
    columns: Mapping[str, str] | None,
    workers: Any,
    max_staleness: Any,
    clip: Clip | None,
    limit: Limit | None,
) -> None:
    """Write the settings of the gate, of norms and of a stream's columns to ``message``, if there are any."""
    columns = {} if columns is None else columns
    if not isinstance(columns, Mapping) or not all(isinstance(text, str) for pair in columns.items() for text in pair):
        raise ConfigError(f"columns must be a mapping role → name, got {columns!r:.100}")
    for role, name in columns.items():
        message.columns.add(role=role, name=name)
    write_norms(message, clip, limit)
    if num_required is not None:
        if not isinstance(num_required, int) or not 1 <= num_required < 2**31:
            raise ConfigError(f"num_required must be an int of at least 1, got {num_required!r}")
        message.gate.num_required = num_required
    try:
        policy = GatePolicy.of(GatePolicy(), num_required, workers, max_staleness)
    except UsageError as error:
        raise ConfigError(str(error)) from None
    if isinstance(policy.workers, int):
        message.gate.rounds.workers = policy.workers
    elif policy.workers is not None:
        message.gate.rounds.names.extend(policy.workers)
    if max_staleness is not None:
        message.gate.max_staleness = policy.max_staleness
    if reduction is not None:
        if reduction not in ("mean", "sum"):
            raise ConfigError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
        message.gate.reduction = GateSettings.MEAN if reduction == "mean" else GateSettings.SUM
