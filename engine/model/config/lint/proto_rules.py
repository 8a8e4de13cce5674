"""The rules about a TPUEmbeddingConfiguration that loading enforces, as findings.

settings_rules.py checks the fields that an EngineConfig adds. runnable.py reports legal settings that cannot be run,
the other modules of this package suspicious ones. Every message names the table or feature.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.base.errors import ConfigError
from penstock.model.config.engine_config_pb2 import EngineConfig
from penstock.model.config.lint.findings import (
    MAX_NAME_BYTES,
    Finding,
    Subject,
    subject_of_optimizer,
    subject_of_parameters,
)
from penstock.model.config.lint.settings_rules import broken_settings
from penstock.model.config.proto_views import TableMessage, read_limits, table_messages
from penstock.model.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration

WHOLE = Subject()


def validate(message: EngineConfig) -> None:
    """Raise ConfigError for the first rule that ``message`` breaks."""
    first = next(broken(message), None)
    if first is not None:
        raise ConfigError(str(first))


def broken(message: EngineConfig) -> Iterator[Finding]:
    """Yield a finding for every rule that ``message`` breaks."""
    long_names = list(_names(message))
    if long_names:  # the other rules would repeat them
        yield from long_names
        return
    config, tables = message.tpu_embedding_configuration, table_messages(message)
    yield from WHOLE.unknown(config, "mode", "use TRAINING")
    yield from WHOLE.unknown(config, "sharding_strategy", "use DIV_DEFAULT or MOD")
    yield from _tables(tables)
    yield from _tags(tables)
    yield from _features(config)
    yield from broken_settings(message, tables)


def _names(message: EngineConfig) -> Iterator[Finding]:
    """Check the length of every name."""
    config = message.tpu_embedding_configuration
    named: list[tuple[str, str, Iterable[Any]]] = [
        ("table_descriptor", "name", config.table_descriptor),
        ("feature_descriptor", "name", config.feature_descriptor),
        ("table", "name", message.table),
        *((f"table[{index}].slot", "name", settings.slot) for index, settings in enumerate(message.table)),
        ("feature", "name", message.feature),
        ("feature", "combiner", message.feature),
        ("columns", "role", message.columns),
        ("columns", "name", message.columns),
    ]
    for parent, field, children in named:
        for index, child in enumerate(children):
            name = getattr(child, field)
            if len(name) * 4 > MAX_NAME_BYTES and (num_bytes := len(name.encode())) > MAX_NAME_BYTES:
                subject = Subject(f"{parent}[{index}]", f"{parent}[{index}]")
                problem = f"{field} '{name[:40]}…' has {num_bytes} bytes"
                yield subject.finding("PS023", field, problem, f"use at most {MAX_NAME_BYTES}")


def _tables(tables: Sequence[TableMessage]) -> Iterator[Finding]:
    if not tables:
        fix = "a configuration needs at least one table_descriptor"
        yield WHOLE.finding("PS001", "table_descriptor", "no tables", fix)
    seen: dict[str, str] = {}
    for table in tables:
        path, descriptor = f"table_descriptor[{table.index}]", table.descriptor
        unnamed, subject = Subject(path, path), Subject(path, f"table '{table.name}'")
        if not table.name:
            yield unnamed.finding("PS002", "name", "name is empty", "give every table a name")
        elif table.name in seen:
            problem = f"name '{table.name}' is also that of {seen[table.name]}"
            yield unnamed.finding("PS003", "name", problem, "give every table its own name")
        seen.setdefault(table.name, path)
        yield from subject.below("PS004", descriptor, "vocabulary_size", 1, "set it to the number of rows, at least 1")
        yield from subject.below("PS005", descriptor, "dimension", 1, "set it to the width of a row, at least 1")
        yield from subject.below("PS006", descriptor, "num_features", 0, "it cannot be negative")
        yield from _parameters(table)


def _parameters(table: TableMessage) -> Iterator[Finding]:
    subject, parameters = subject_of_parameters(table), table.parameters
    theirs, ours = parameters.WhichOneof("parameters"), table.settings.WhichOneof("optimizer")
    if theirs is not None and ours is not None:
        yield subject.finding("PS007", theirs, f"has two optimizers, {theirs} and {ours}", "keep one of them")
    elif not table.algorithm:
        yield subject.finding("PS007", "", "no optimizer", "set one in optimization_parameters, e.g. adagrad { }")
    if parameters.learning_rate.WhichOneof("learning_rate") is None:
        yield subject.finding("PS008", "", "no learning rate", "set learning_rate { constant: … } or { dynamic { } }")
    yield from _not_finite(subject, table)


def _not_finite(subject: Subject, table: TableMessage) -> Iterator[Finding]:
    """Yield findings about numbers of a table that are not finite in float32; limits may be infinite."""
    rate, decay = table.parameters.learning_rate.constant, table.parameters.weight_decay_factor
    common = {"learning_rate.constant": ("learning rate", rate), "weight_decay_factor": ("weight_decay_factor", decay)}
    for field, (name, value) in common.items():
        if not math.isfinite(value):
            yield subject.finding("PS009", field, f"{name} is {value}", "it must be finite in float32")
    for field in ("clipping_limits", "gradient_clipping_limits"):
        # An infinite bound means an open side; a NaN bound would turn every touched row into NaN.
        if any(bound is not None and math.isnan(bound) for bound in read_limits(getattr(table.parameters, field))):
            problem = f"{field} has a bound that is nan"
            yield subject.finding("PS009", field, problem, "leave it out to have that side open")
    for name, value in table.hyper_parameters.items():
        if not math.isfinite(value):
            field, fix = f"{table.algorithm}.{name}", "leave it out, or give a number that is finite in float32"
            yield subject_of_optimizer(table).finding("PS009", field, f"{field} is {value}", fix)


def _tags(tables: Sequence[TableMessage]) -> Iterator[Finding]:
    """Check that tags are 0, 1, … without a gap; learning rates and step counters share one numbering."""
    users: dict[int, tuple[TableMessage, str]] = {}
    for table in tables:
        for field, tag in table.tags.items():
            users.setdefault(tag, (table, field))
    for expected, tag in enumerate(sorted(users)):
        if tag != expected:
            table, field = users[tag]
            why = "a tag cannot be negative" if tag < 0 else f"no table uses tag {expected}"
            problem = f"dynamic tag {tag}, but tags must be numbered 0, 1, 2, … without a gap and {why}"
            yield subject_of_parameters(table).finding("PS010", field, problem, "number the tags of all tables from 0")
            return


def _features(config: TPUEmbeddingConfiguration) -> Iterator[Finding]:
    batch, tables = config.batch_size_per_tensor_core, config.table_descriptor
    yield from WHOLE.below("PS006", config, "batch_size_per_tensor_core", 0, "it cannot be negative")
    if not config.feature_descriptor:
        return
    if batch > 0:
        yield WHOLE.finding(
            "PS012",
            "batch_size_per_tensor_core",
            f"batch_size_per_tensor_core is {batch}, but features are listed",
            "leave it out, the batch size follows from their input_shape",
        )
    for index, table in enumerate(tables):
        if table.num_features > 0:
            problem = f"num_features is {table.num_features}, but features are listed"
            subject = Subject(f"table_descriptor[{index}]", f"table '{table.name}'")
            yield subject.finding("PS012", "num_features", problem, "leave it out, it follows from them")
    for index, feature in enumerate(config.feature_descriptor):
        path = f"feature_descriptor[{index}]"
        subject = Subject(path, f"feature '{feature.name}'" if feature.name else path)
        if not 0 <= feature.table_id < len(tables):
            problem, fix = f"table_id is {feature.table_id}", f"use one of 0 to {len(tables) - 1}"
            yield subject.finding("PS013", "table_id", problem, fix)
        if not feature.input_shape or min(feature.input_shape) < 1:
            problem = f"input_shape is {list(feature.input_shape)}"
            yield subject.finding("PS014", "input_shape", problem, "it needs at least one number, and each at least 1")
