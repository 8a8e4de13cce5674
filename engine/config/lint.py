"""What is legal in a configuration but looks like a mistake, or will be refused later: findings, never errors.

The rules stand in RULES with their code, severity and title; a rule's code is never used again for another one.
PS1xx are about the whole configuration, PS2xx about one table's optimization parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.config.engine_config_pb2 import EngineConfig, TableSettings
from penstock.config.optimization_parameters_pb2 import OptimizationParameters
from penstock.config.optimizer_proto import accumulates, read_limits
from penstock.config.optimizers import OPTIMIZERS
from penstock.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration

RULES: dict[str, tuple[str, str]] = {
    "PS101": ("warning", "mode is UNSPECIFIED"),
    "PS102": ("info", "mode is INFERENCE"),
    "PS103": ("warning", "a table that no feature uses"),
    "PS104": ("warning", "features neither listed nor counted for every table"),
    "PS105": ("error", "a storage dtype this version cannot run"),
    "PS201": ("error", "an optimizer this version cannot run"),
    "PS202": ("warning", "weight clip limits are reversed"),
    "PS203": ("warning", "gradient clip limits are reversed"),
    "PS204": ("warning", "weight decay that does not shrink weights"),
    "PS205": ("warning", "decay times learning rate, without a decay factor"),
    "PS206": ("warning", "gradient clipping without gradient accumulation"),
    "PS207": ("warning", "a constant learning rate of 0 or below"),
}


@dataclass(frozen=True)
class Finding:
    """One finding of a rule.

    code : a key of RULES
    severity : "error" (this version will refuse it), "warning" (probably a mistake) or "info"
    where : the field, as a path from the TPUEmbeddingConfiguration (``table[…]``: from the EngineConfig)
    message, fix : what is there and what it leads to; what to do
    """

    code: str
    severity: str
    where: str
    message: str
    fix: str


def lint(message: EngineConfig) -> list[Finding]:
    """All findings about a valid ``message``: the whole first, then table by table."""
    config = message.tpu_embedding_configuration
    found = [*_mode(config), *_features(config), *_storage(message)]
    for index, table in enumerate(config.table_descriptor):
        where = f"table_descriptor[{index}].optimization_parameters"
        found += _algorithm(where, table.name, table.optimization_parameters)
        found += _limits(where, table.name, table.optimization_parameters)
        found += _decay(where, table.name, table.optimization_parameters)
    return found


def _finding(code: str, where: str, message: str, fix: str) -> Finding:
    return Finding(code, RULES[code][0], where, message, fix)


def _mode(config: TPUEmbeddingConfiguration) -> Iterator[Finding]:
    if config.mode == TPUEmbeddingConfiguration.UNSPECIFIED:
        yield _finding("PS101", "mode", "mode is UNSPECIFIED, which TensorFlow refuses to run", "set mode: TRAINING")
    if config.mode == TPUEmbeddingConfiguration.INFERENCE:
        yield _finding(
            "PS102", "mode", "mode is INFERENCE: updates are refused", "set mode: TRAINING if the tables are to change"
        )


def _features(config: TPUEmbeddingConfiguration) -> Iterator[Finding]:
    if not config.feature_descriptor:
        counted = [table.num_features > 0 for table in config.table_descriptor]
        counted.append(config.batch_size_per_tensor_core > 0)
        if any(counted) and not all(counted):
            yield _finding(
                "PS104",
                "feature_descriptor",
                "batch_size_per_tensor_core and num_features are set in part, which TensorFlow refuses",
                "list the features in feature_descriptor, or set both for every table, or neither",
            )
        return
    used = {feature.table_id for feature in config.feature_descriptor}
    for index, table in enumerate(config.table_descriptor):
        if index not in used:
            yield _finding(
                "PS103",
                f"table_descriptor[{index}]",
                f"table '{table.name}' is used by no feature, which TensorFlow refuses",
                f"add a feature_descriptor with table_id: {index}, or remove the table",
            )


def _storage(message: EngineConfig) -> Iterator[Finding]:
    for index, settings in enumerate(message.table):
        if settings.storage_dtype == TableSettings.BFLOAT16:
            yield _finding(
                "PS105",
                f"table[{index}].storage_dtype",
                f"table '{settings.name}': BFLOAT16 is not yet supported",
                "remove storage_dtype, or set it to FLOAT32",
            )


def _algorithm(where: str, table: str, parameters: OptimizationParameters) -> Iterator[Finding]:
    algorithm = parameters.WhichOneof("parameters") or ""
    if algorithm not in OPTIMIZERS:
        supported = ", ".join(sorted(OPTIMIZERS))
        yield _finding(
            "PS201",
            f"{where}.{algorithm}",
            f"table '{table}': optimizer '{algorithm}' is not yet supported by this version",
            f"use one of: {supported}",
        )
    rate = parameters.learning_rate
    if rate.WhichOneof("learning_rate") == "constant" and rate.constant <= 0:
        effect = "no update changes a weight by its gradient" if rate.constant == 0 else "updates climb the loss"
        yield _finding(
            "PS207",
            f"{where}.learning_rate.constant",
            f"table '{table}': learning rate is {rate.constant:g}: {effect}",
            "set a constant above 0, or a dynamic tag",
        )


def _limits(where: str, table: str, parameters: OptimizationParameters) -> Iterator[Finding]:
    for code, field in (("PS202", "clipping_limits"), ("PS203", "gradient_clipping_limits")):
        lower, upper = read_limits(getattr(parameters, field))
        if lower is not None and upper is not None and lower > upper:
            yield _finding(
                code,
                f"{where}.{field}",
                f"table '{table}': lower {lower:g} is above upper {upper:g}, so every value becomes {upper:g}",
                "swap the limits",
            )
    if parameters.HasField("gradient_clipping_limits") and not accumulates(parameters):
        yield _finding(
            "PS206",
            f"{where}.gradient_accumulation_status",
            f"table '{table}': gradients are clipped but not accumulated, so each part is clipped for itself",
            "set gradient_accumulation_status: ENABLED, or remove gradient_clipping_limits",
        )


def _decay(where: str, table: str, parameters: OptimizationParameters) -> Iterator[Finding]:
    factor, times_rate = parameters.weight_decay_factor, parameters.multiply_weight_decay_factor_by_learning_rate
    if factor < 0 or (factor >= 1 and not times_rate):
        effect = "grows" if factor < 0 else "zeroes" if factor == 1 else "flips the sign of"
        yield _finding(
            "PS204",
            f"{where}.weight_decay_factor",
            f"table '{table}': a decay factor of {factor:g} {effect} every touched weight (w becomes w - factor*w)",
            "use a small factor above 0, e.g. 0.0001",
        )
    if times_rate and factor == 0:
        yield _finding(
            "PS205",
            f"{where}.multiply_weight_decay_factor_by_learning_rate",
            f"table '{table}': there is no weight_decay_factor to multiply",
            "set weight_decay_factor, or remove the flag",
        )
