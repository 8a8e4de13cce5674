"""The integrations, by module: each is loaded from here, when it is used, and imported by nothing outside of them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple


class Extra(NamedTuple):
    """An extra of penstock. package : that it installs; purpose : the parts of penstock that need it"""

    name: str
    package: str
    purpose: str


# Sources that a URI names, each a SOURCE.
SOURCES = (
    "penstock.io.connectors.delta_versions",
    "penstock.io.connectors.flights",
    "penstock.io.connectors.iceberg_versions",
    "penstock.io.connectors.kafka_partition",
    "penstock.io.connectors.lance_versions",
    "penstock.io.connectors.nats_stream",
)
# What ``penstock follow`` writes to, each a TARGET.
TARGETS = (
    "penstock.io.targets.delta_lake",
    "penstock.io.targets.kafka_topic",
    "penstock.io.targets.lance_dataset",
    "penstock.io.targets.lmdb_file",
    "penstock.io.targets.parquet_folder",
    "penstock.io.targets.python_function",
    "penstock.io.targets.redis_hashes",
    "penstock.io.targets.shared_files",
)
# Formats of tables, each a FORMAT.
FORMATS = (
    "penstock.io.formats.keras_weights",
    "penstock.io.formats.numpy_files",
    "penstock.io.formats.orbax_checkpoint",
    "penstock.io.formats.parquet_tables",
    "penstock.io.formats.safetensors_file",
    "penstock.io.formats.tensorflow_checkpoint",
    "penstock.io.formats.torch_distributed",
    "penstock.io.formats.torch_file",
)
# Kernels for a TPU, by the name of the variant.
KERNELS = {
    "pallas": "penstock.bridge.pallas.tensorcore",
    "sparsecore": "penstock.bridge.pallas.sparsecore",
}
# What tables, and their core, are where a mesh spans several processes.
PROCESSES = {
    "agreement": "penstock.bridge.processes.agreement",
    "tables": "penstock.bridge.processes.process_tables",
    "core": "penstock.lockstep",
}
# Metrics, and pages for browsers.
PAGES = {
    "monitoring": "penstock.cli.pages.monitoring",
    "http_server": "penstock.cli.pages.http_server",
    "html_report": "penstock.cli.pages.html_report",
    "id_statistics": "penstock.cli.pages.id_statistics",
}
# What finds an unfinished replay in passes in a checkpoint.
PASSES_OF_ROWS = "penstock.shares.pass_folder"
# Commands that are part of an integration, by name; the others are modules of ``penstock.cli``.
COMMANDS = {
    "history": "penstock.cli.history",
    "blame": "penstock.cli.blame",
    "branch": "penstock.cli.branch",
    "diff": "penstock.cli.diff",
    "passes": "penstock.cli.passes",
    "job": "penstock.cli.job",
    "bench": "penstock.cli.bench",
}
# The libraries that only some of them need.
EXTRAS = (
    Extra("completion", "shtab", "completion of commands in a shell"),
    Extra("metrics", "prometheus-client", "--ui, --metrics, --metrics-file, --report and penstock.metrics"),
    Extra("otel", "opentelemetry-api", "a span for every step"),
    Extra("kafka", "confluent-kafka", "gradients from Kafka, and follow into Kafka"),
    Extra("nats", "nats-py", "gradients from NATS"),
    Extra("delta", "deltalake", "gradients from Delta Lake, and follow into it"),
    Extra("iceberg", "pyiceberg", "gradients from Iceberg"),
    Extra("lance", "pylance", "gradients from Lance, and follow into it"),
    Extra("lmdb", "lmdb", "follow into LMDB"),
    Extra("redis", "redis", "follow into Redis"),
    Extra("orbax", "orbax-checkpoint", "import and export of Orbax"),
    Extra("safetensors", "safetensors", "import and export of safetensors"),
    Extra("tensorflow", "tensorflow", "import of checkpoints of TensorFlow"),
    Extra("flax", "flax", "tables in a step of Flax"),
    Extra("keras", "keras", "tables in a model of Keras, and import of its weights"),
    Extra("torch", "torch", "penstock.torch, import and export of its files"),
    Extra("ray", "ray", "jobs on a Ray cluster"),
)


def declared(modules: Iterable[str], name: str) -> list[Any]:
    """Return what each of the modules declares under a name."""
    return [getattr(import_module(module), name) for module in modules]
