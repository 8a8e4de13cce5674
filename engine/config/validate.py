"""Whether an EngineConfig makes sense at all: the rules that loading enforces.

What is legal but looks like a mistake is lint.py's; what this version cannot run yet is said when it is asked for.
Every message names the table or feature and says what to do.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable

from penstock.config.engine_config_pb2 import EngineConfig, GateSettings, TableSettings
from penstock.config.optimization_parameters_pb2 import OptimizationParameters
from penstock.config.optimizer_proto import read_limits
from penstock.config.optimizers import OPTIMIZERS
from penstock.config.specs import dynamic_tag
from penstock.config.tables import COMBINERS
from penstock.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration
from penstock.errors import ConfigError


def validate(message: EngineConfig) -> None:
    """ConfigError for the first rule that ``message`` breaks."""
    config = message.tpu_embedding_configuration
    if config.mode not in TPUEmbeddingConfiguration.Mode.values():
        raise ConfigError(f"mode is {config.mode}; use TRAINING")
    if config.sharding_strategy not in TPUEmbeddingConfiguration.ShardingStrategy.values():
        raise ConfigError(f"sharding_strategy is {config.sharding_strategy}; use DIV_DEFAULT or MOD")
    _check_tables(config)
    _check_tags(config)
    _check_features(config)
    _check_table_settings(message)
    _check_feature_settings(message)
    _check_gate(message.gate)


def near(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` where ``name`` looks like one of ``known``, else which there are."""
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=2)
    if close:
        return "; did you mean " + " or ".join(f"'{n}'" for n in close) + "?"
    shown = ", ".join(f"'{n}'" for n in names[:8]) + (", …" if len(names) > 8 else "")
    return f"; there is {shown}" if names else "; there is none"


def _check_tables(config: TPUEmbeddingConfiguration) -> None:
    if not config.table_descriptor:
        raise ConfigError("no tables; a configuration needs at least one table_descriptor")
    seen: dict[str, int] = {}
    for index, table in enumerate(config.table_descriptor):
        if not table.name:
            raise ConfigError(f"table_descriptor[{index}]: name is empty; give every table a name")
        if table.name in seen:
            raise ConfigError(
                f"table_descriptor[{index}]: name '{table.name}' is also that of "
                f"table_descriptor[{seen[table.name]}]; give every table its own name"
            )
        seen[table.name] = index
        if table.vocabulary_size < 1:
            raise ConfigError(
                f"table '{table.name}': vocabulary_size is {table.vocabulary_size}; "
                "set it to the number of rows, at least 1"
            )
        if table.dimension < 1:
            raise ConfigError(
                f"table '{table.name}': dimension is {table.dimension}; set it to the width of a row, at least 1"
            )
        if table.num_features < 0:
            raise ConfigError(f"table '{table.name}': num_features is {table.num_features}; it cannot be negative")
        _check_parameters(f"table '{table.name}'", table.optimization_parameters)


def _check_parameters(table: str, parameters: OptimizationParameters) -> None:
    if parameters.WhichOneof("parameters") is None:
        raise ConfigError(f"{table}: no optimizer; set one in optimization_parameters, e.g. adagrad {{ }}")
    rate = parameters.learning_rate
    if rate.WhichOneof("learning_rate") is None:
        raise ConfigError(f"{table}: no learning rate; set learning_rate {{ constant: … }} or {{ dynamic {{ }} }}")
    if not math.isfinite(rate.constant):
        raise ConfigError(f"{table}: learning rate is {rate.constant}; it must be finite in float32")
    if not math.isfinite(parameters.weight_decay_factor):
        raise ConfigError(f"{table}: weight_decay_factor is {parameters.weight_decay_factor}; it must be finite")
    for field in ("clipping_limits", "gradient_clipping_limits"):
        # Infinite is an open side; NaN would turn every touched row into NaN.
        if any(bound is not None and math.isnan(bound) for bound in read_limits(getattr(parameters, field))):
            raise ConfigError(f"{table}: {field} has a bound that is nan; leave it out to have that side open")


def _check_tags(config: TPUEmbeddingConfiguration) -> None:
    """The tags must be 0, 1, … without a gap; a step counter shares their space."""
    users: dict[int, str] = {}
    for table in config.table_descriptor:
        parameters = table.optimization_parameters
        tag = dynamic_tag(parameters)
        if tag is not None:
            users.setdefault(tag, table.name)
        if parameters.frequency_aware_adagrad.HasField("step_counter"):
            users.setdefault(parameters.frequency_aware_adagrad.step_counter.tag, table.name)
    for expected, tag in enumerate(sorted(users)):
        if tag != expected:
            raise ConfigError(
                f"table '{users[tag]}': dynamic tag {tag}, but tags must be numbered 0, 1, 2, … without "
                f"a gap and {'a tag cannot be negative' if tag < 0 else f'no table uses tag {expected}'}"
            )


def _check_features(config: TPUEmbeddingConfiguration) -> None:
    batch = config.batch_size_per_tensor_core
    if batch < 0:
        raise ConfigError(f"batch_size_per_tensor_core is {batch}; it cannot be negative")
    if not config.feature_descriptor:
        return
    if batch:
        raise ConfigError(
            f"batch_size_per_tensor_core is {batch}, but features are listed; "
            "leave it out, the batch size follows from their input_shape"
        )
    for table in config.table_descriptor:
        if table.num_features:
            raise ConfigError(
                f"table '{table.name}': num_features is {table.num_features}, but features are listed; "
                "leave it out, it follows from them"
            )
    for index, feature in enumerate(config.feature_descriptor):
        who = f"feature '{feature.name}'" if feature.name else f"feature_descriptor[{index}]"
        if not 0 <= feature.table_id < len(config.table_descriptor):
            raise ConfigError(
                f"{who}: table_id is {feature.table_id}; use one of 0 to {len(config.table_descriptor) - 1}"
            )
        if not feature.input_shape or min(feature.input_shape) < 1:
            raise ConfigError(
                f"{who}: input_shape is {list(feature.input_shape)}; it needs at least one number, and each at least 1"
            )


def _check_table_settings(message: EngineConfig) -> None:
    tables = {table.name: table for table in message.tpu_embedding_configuration.table_descriptor}
    seen: set[str] = set()
    for settings in message.table:
        who = f"settings of table '{settings.name}'"
        if settings.name not in tables:
            raise ConfigError(f"{who}: no table has that name{near(settings.name, tables)}")
        if settings.name in seen:
            raise ConfigError(f"{who}: given twice; put them into one table {{ }}")
        seen.add(settings.name)
        if settings.storage_dtype not in TableSettings.StorageDtype.values():
            raise ConfigError(f"{who}: storage_dtype is {settings.storage_dtype}; use FLOAT32")
        _check_initializer(who, settings)
        _check_slots(who, settings, tables[settings.name].optimization_parameters)


def _check_initializer(who: str, settings: TableSettings) -> None:
    chosen = settings.WhichOneof("initializer")
    if chosen is None:
        return
    message = getattr(settings, chosen)
    numbers = [getattr(message, field.name) for field in message.DESCRIPTOR.fields]
    if not all(math.isfinite(number) for number in numbers):
        raise ConfigError(f"{who}: {chosen} has a number that is not finite")
    if chosen == "truncated_normal" and settings.truncated_normal.stddev < 0:
        raise ConfigError(f"{who}: stddev is {settings.truncated_normal.stddev}; it cannot be negative")
    if chosen == "uniform" and settings.uniform.min > settings.uniform.max:
        raise ConfigError(f"{who}: uniform has min {settings.uniform.min} > max {settings.uniform.max}; swap them")


def _check_slots(who: str, settings: TableSettings, parameters: OptimizationParameters) -> None:
    seen: set[str] = set()
    for slot in settings.slot:
        if slot.name in seen:
            raise ConfigError(f"{who}: slot '{slot.name}' is given twice; keep one")
        seen.add(slot.name)
        if not math.isfinite(slot.initial_value):
            raise ConfigError(f"{who}: slot '{slot.name}' starts at {slot.initial_value}; it must be finite")
    algorithm = parameters.WhichOneof("parameters") or ""
    if algorithm not in OPTIMIZERS:
        return  # this version does not know its slots
    known = dict(OPTIMIZERS[algorithm]().slots())  # type: ignore[call-arg]  # every subclass has a default for all
    for slot in settings.slot:
        if slot.name not in known:
            raise ConfigError(f"{who}: {algorithm} has no slot '{slot.name}'{near(slot.name, known)}")
    given = {slot.name: slot.initial_value for slot in settings.slot if slot.HasField("initial_value")}
    try:
        OPTIMIZERS[algorithm](**OPTIMIZERS[algorithm].read_arguments(parameters, given))
    except ConfigError as error:
        raise ConfigError(f"{who}: {error}") from None


def _check_feature_settings(message: EngineConfig) -> None:
    names = Counter(feature.name for feature in message.tpu_embedding_configuration.feature_descriptor)
    seen: set[str] = set()
    for settings in message.feature:
        who = f"settings of feature '{settings.name}'"
        if not settings.name or settings.name not in names:
            raise ConfigError(f"{who}: no feature has that name{near(settings.name, filter(None, names))}")
        if names[settings.name] > 1:
            raise ConfigError(f"{who}: several features have that name; name them apart")
        if settings.name in seen:
            raise ConfigError(f"{who}: given twice; put them into one feature {{ }}")
        seen.add(settings.name)
        if settings.combiner and settings.combiner not in COMBINERS:
            raise ConfigError(f"{who}: combiner is '{settings.combiner}'{near(settings.combiner, COMBINERS)}")
        if settings.max_sequence_length < 0:
            raise ConfigError(f"{who}: max_sequence_length is {settings.max_sequence_length}; use 0 for none")


def _check_gate(gate: GateSettings) -> None:
    if gate.HasField("num_required") and gate.num_required < 1:
        raise ConfigError(f"gate: num_required is {gate.num_required}; it must be at least 1")
    if gate.reduction not in GateSettings.Reduction.values():
        raise ConfigError(f"gate: reduction is {gate.reduction}; use MEAN or SUM")
