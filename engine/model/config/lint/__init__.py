"""Lint: findings, never exceptions, about legal but suspicious settings and settings that a later step refuses.

This module has the rules about the whole configuration, optimizer_rules.py those about one table's optimizer, and
findings.py their codes. For a configuration that loading refuses, lint reports only those errors, since no other
rule could be trusted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping

from penstock.model.config.engine_config_pb2 import EngineConfig
from penstock.model.config.lint.findings import RULES, Finding
from penstock.model.config.lint.optimizer_rules import lint_table
from penstock.model.config.lint.proto_rules import WHOLE, broken
from penstock.model.config.lint.runnable import refusals
from penstock.model.config.lint.source_text import Scan
from penstock.model.config.proto_views import table_messages
from penstock.model.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration

__all__ = ["RULES", "Finding", "lint"]


def lint(
    message: EngineConfig,
    written: Mapping[str, float] | None = None,
    programs: Collection[str] = (),
    scan: Scan | None = None,
) -> list[Finding]:
    """Return all findings about ``message``: first about the whole, then table by table.

    written : path -> number as written, before float32
    programs : the tables that have a Python program
    scan : of the text that the message was read from
    """
    findings = list(broken(message)) or list(_legal(message, written or {}, programs))
    if scan is None:
        return findings
    return [dataclasses.replace(finding, line=scan.line_of(finding.where)) for finding in findings]


def _legal(message: EngineConfig, written: Mapping[str, float], programs: Collection[str]) -> Iterator[Finding]:
    config = message.tpu_embedding_configuration
    yield from _mode(config)
    yield from _features(config)
    yield from _hosts(config)
    written_of: dict[str, dict[str, float]] = {}
    for path, number in written.items():
        table_path, parameters, field = path.partition(".optimization_parameters.")
        if not parameters:
            table_path, _, field = path.partition(".")
        written_of.setdefault(table_path, {})[field] = number
    for table in table_messages(message):
        yield from refusals(table, programs)
        settings = written_of.get(f"table[{table.settings_index}]", {})
        own = {field: number for field, number in settings.items() if field.startswith(f"{table.algorithm}.")}
        yield from lint_table(table, written_of.get(f"table_descriptor[{table.index}]", {}) | own)


def _mode(config: TPUEmbeddingConfiguration) -> Iterator[Finding]:
    if config.mode == TPUEmbeddingConfiguration.UNSPECIFIED:
        problem = "mode is UNSPECIFIED, which TensorFlow refuses to run"
        yield WHOLE.finding("PS101", "mode", problem, "set mode: TRAINING")
    if config.mode == TPUEmbeddingConfiguration.INFERENCE:
        problem, fix = "mode is INFERENCE: updates are refused", "set mode: TRAINING if the tables are to change"
        yield WHOLE.finding("PS102", "mode", problem, fix)
    if config.pipeline_execution_with_tensor_core and config.mode != TPUEmbeddingConfiguration.TRAINING:
        field = "pipeline_execution_with_tensor_core"
        problem = f"{field} means nothing in mode {TPUEmbeddingConfiguration.Mode.Name(config.mode)}"
        yield WHOLE.finding("PS107", field, problem, "set mode: TRAINING, or remove it")


def _features(config: TPUEmbeddingConfiguration) -> Iterator[Finding]:
    if not config.feature_descriptor:
        counted = [table.num_features > 0 for table in config.table_descriptor]
        counted.append(config.batch_size_per_tensor_core > 0)
        if any(counted) and not all(counted):
            yield WHOLE.finding(
                "PS104",
                "feature_descriptor",
                "batch_size_per_tensor_core and num_features are set in part, which TensorFlow refuses",
                "list the features in feature_descriptor, or set both for every table, or neither",
            )
        return
    used = {feature.table_id for feature in config.feature_descriptor}
    for index, table in enumerate(config.table_descriptor):
        if index not in used:
            yield WHOLE.finding(
                "PS103",
                f"table_descriptor[{index}]",
                f"table '{table.name}' is used by no feature, which TensorFlow refuses",
                f"add a feature_descriptor with table_id: {index}, or remove the table",
            )


def _hosts(config: TPUEmbeddingConfiguration) -> Iterator[Finding]:
    for index, table in enumerate(config.table_descriptor):
        if table.vocabulary_size < config.num_hosts:
            yield WHOLE.finding(
                "PS106",
                f"table_descriptor[{index}].vocabulary_size",
                f"table '{table.name}' has {table.vocabulary_size} rows for {config.num_hosts} hosts; TensorFlow "
                "cannot load a table of which some host has no row",
                f"set vocabulary_size: {config.num_hosts}, as TensorFlow's own classes do",
            )
