"""The rules about a TPUEmbeddingConfiguration that loading enforces, as findings.

settings_rules.py checks the fields that an EngineConfig adds. runnable.py reports legal settings that cannot be run,
the other modules of this package suspicious ones. Every message names the table or feature.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from penstock.config.engine_config_pb2 import EngineConfig
from penstock.config.lint.findings import Finding, finding
from penstock.config.lint.settings_rules import broken_settings
from penstock.config.optimization_parameters_pb2 import OptimizationParameters
from penstock.config.optimizers import OPTIMIZERS, OWN_OPTIMIZERS
from penstock.config.optimizers.proto_conversion import algorithm_of, dynamic_tag, read_limits, settings_of
from penstock.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration
from penstock.errors import ConfigError

FINITE = "leave it out, or give a number that is finite in float32"


def validate(message: EngineConfig) -> None:
    """Raise ConfigError for the first rule that ``message`` breaks."""
    first = next(broken(message), None)
    if first is not None:
        raise ConfigError(str(first))


def broken(message: EngineConfig) -> Iterator[Finding]:
    """Yield a finding for every rule that ``message`` breaks."""
    config = message.tpu_embedding_configuration
    yield from _enums(config)
    yield from _tables(message)
    yield from _tags(config)
    yield from _features(config)
    yield from broken_settings(message)


def _enums(config: TPUEmbeddingConfiguration) -> Iterator[Finding]:
    if config.mode not in TPUEmbeddingConfiguration.Mode.values():
        yield finding("PS011", "mode", f"mode is {config.mode}", "use TRAINING")
    if config.sharding_strategy not in TPUEmbeddingConfiguration.ShardingStrategy.values():
        yield finding(
            "PS011",
            "sharding_strategy",
            f"sharding_strategy is {config.sharding_strategy}",
            "use DIV_DEFAULT or MOD",
        )


def _tables(message: EngineConfig) -> Iterator[Finding]:
    tables = message.tpu_embedding_configuration.table_descriptor
    if not tables:
        yield finding("PS001", "table_descriptor", "no tables", "a configuration needs at least one table_descriptor")
    seen: dict[str, int] = {}
    for index, table in enumerate(tables):
        where = f"table_descriptor[{index}]"
        if not table.name:
            yield finding("PS002", f"{where}.name", f"{where}: name is empty", "give every table a name")
        elif table.name in seen:
            yield finding(
                "PS003",
                f"{where}.name",
                f"{where}: name '{table.name}' is also that of table_descriptor[{seen[table.name]}]",
                "give every table its own name",
            )
        seen.setdefault(table.name, index)
        yield from _sizes(where, table)
        yield from _parameters(where, message, index)


def _sizes(where: str, table: TPUEmbeddingConfiguration.TableDescriptor) -> Iterator[Finding]:
    who = f"table '{table.name}'"
    if table.vocabulary_size < 1:
        yield finding(
            "PS004",
            f"{where}.vocabulary_size",
            f"{who}: vocabulary_size is {table.vocabulary_size}",
            "set it to the number of rows, at least 1",
        )
    if table.dimension < 1:
        yield finding(
            "PS005",
            f"{where}.dimension",
            f"{who}: dimension is {table.dimension}",
            "set it to the width of a row, at least 1",
        )
    if table.num_features < 0:
        yield finding(
            "PS006", f"{where}.num_features", f"{who}: num_features is {table.num_features}", "it cannot be negative"
        )


def _parameters(where: str, message: EngineConfig, index: int) -> Iterator[Finding]:
    table = message.tpu_embedding_configuration.table_descriptor[index]
    parameters, who = table.optimization_parameters, f"table '{table.name}'"
    where += ".optimization_parameters"
    own = settings_of(message, table.name).WhichOneof("optimizer")
    if algorithm_of(message, index) is None:
        yield finding("PS007", where, f"{who}: no optimizer", "set one in optimization_parameters, e.g. adagrad { }")
    elif own is not None and parameters.WhichOneof("parameters") is not None:
        yield finding(
            "PS007",
            f"{where}.{parameters.WhichOneof('parameters')}",
            f"{who}: has two optimizers, {parameters.WhichOneof('parameters')} and {own}",
            "keep one of them",
        )
    if parameters.learning_rate.WhichOneof("learning_rate") is None:
        yield finding(
            "PS008",
            where,
            f"{who}: no learning rate",
            "set learning_rate { constant: … } or { dynamic { } }",
        )
    yield from not_finite(where, who, parameters)


def not_finite(where: str, who: str, parameters: OptimizationParameters) -> Iterator[Finding]:
    """Yield findings about numbers of ``parameters`` that are not finite in float32; limits may be infinite."""
    rate = parameters.learning_rate.constant
    if not math.isfinite(rate):
        yield finding(
            "PS009",
            f"{where}.learning_rate.constant",
            f"{who}: learning rate is {rate}",
            "it must be finite in float32",
        )
    if not math.isfinite(parameters.weight_decay_factor):
        yield finding(
            "PS009",
            f"{where}.weight_decay_factor",
            f"{who}: weight_decay_factor is {parameters.weight_decay_factor}",
            "it must be finite in float32",
        )
    for field in ("clipping_limits", "gradient_clipping_limits"):
        # An infinite bound means an open side; a NaN bound would turn every touched row into NaN.
        if any(bound is not None and math.isnan(bound) for bound in read_limits(getattr(parameters, field))):
            yield finding(
                "PS009",
                f"{where}.{field}",
                f"{who}: {field} has a bound that is nan",
                "leave it out to have that side open",
            )
    algorithm = parameters.WhichOneof("parameters")
    for name in OPTIMIZERS[algorithm].fields() if algorithm in OPTIMIZERS.keys() - OWN_OPTIMIZERS else ():
        value = getattr(getattr(parameters, algorithm or ""), name)
        if not math.isfinite(value):
            yield finding("PS009", f"{where}.{algorithm}.{name}", f"{who}: {algorithm}.{name} is {value}", FINITE)


def _tags(config: TPUEmbeddingConfiguration) -> Iterator[Finding]:
    """Check that tags are 0, 1, … without a gap; learning rates and step counters share one numbering."""
    users: dict[int, tuple[str, str]] = {}
    for index, table in enumerate(config.table_descriptor):
        parameters, where = table.optimization_parameters, f"table_descriptor[{index}].optimization_parameters"
        tag = dynamic_tag(parameters)
        if tag is not None:
            users.setdefault(tag, (table.name, f"{where}.learning_rate.dynamic.tag"))
        counter = parameters.frequency_aware_adagrad
        if counter.HasField("step_counter"):
            users.setdefault(
                counter.step_counter.tag, (table.name, f"{where}.frequency_aware_adagrad.step_counter.tag")
            )
    for expected, tag in enumerate(sorted(users)):
        if tag != expected:
            name, where = users[tag]
            why = "a tag cannot be negative" if tag < 0 else f"no table uses tag {expected}"
            yield finding(
                "PS010",
                where,
                f"table '{name}': dynamic tag {tag}, but tags must be numbered 0, 1, 2, … without a gap and {why}",
                "number the tags of all tables from 0",
            )
            return


def _features(config: TPUEmbeddingConfiguration) -> Iterator[Finding]:
    batch, tables = config.batch_size_per_tensor_core, config.table_descriptor
    if batch < 0:
        yield finding(
            "PS006",
            "batch_size_per_tensor_core",
            f"batch_size_per_tensor_core is {batch}",
            "it cannot be negative",
        )
    if not config.feature_descriptor:
        return
    if batch > 0:
        yield finding(
            "PS012",
            "batch_size_per_tensor_core",
            f"batch_size_per_tensor_core is {batch}, but features are listed",
            "leave it out, the batch size follows from their input_shape",
        )
    for index, table in enumerate(tables):
        if table.num_features > 0:
            yield finding(
                "PS012",
                f"table_descriptor[{index}].num_features",
                f"table '{table.name}': num_features is {table.num_features}, but features are listed",
                "leave it out, it follows from them",
            )
    for index, feature in enumerate(config.feature_descriptor):
        where = f"feature_descriptor[{index}]"
        who = f"feature '{feature.name}'" if feature.name else where
        if not 0 <= feature.table_id < len(tables):
            yield finding(
                "PS013",
                f"{where}.table_id",
                f"{who}: table_id is {feature.table_id}",
                f"use one of 0 to {len(tables) - 1}",
            )
        if not feature.input_shape or min(feature.input_shape) < 1:
            yield finding(
                "PS014",
                f"{where}.input_shape",
                f"{who}: input_shape is {list(feature.input_shape)}",
                "it needs at least one number, and each at least 1",
            )
