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
    "penstock.contrib.connectors.delta_versions",
    "penstock.contrib.connectors.flights",
    "penstock.contrib.connectors.iceberg_versions",
    "penstock.contrib.connectors.kafka_partition",
    "penstock.contrib.connectors.lance_versions",
    "penstock.contrib.connectors.nats_stream",
)
# What ``penstock follow`` writes to, each a TARGET.
TARGETS = (
    "penstock.contrib.targets.delta_lake",
    "penstock.contrib.targets.kafka_topic",
    "penstock.contrib.targets.lance_dataset",
    "penstock.contrib.targets.lmdb_file",
    "penstock.contrib.targets.parquet_folder",
    "penstock.contrib.targets.python_function",
    "penstock.contrib.targets.redis_hashes",
    "penstock.serving.followers.shared_files",
)
# Formats of tables, each a FORMAT.
FORMATS = (
    "penstock.contrib.formats.keras_weights",
    "penstock.contrib.formats.numpy_files",
    "penstock.contrib.formats.orbax_checkpoint",
    "penstock.io.table_formats.parquet_tables",
    "penstock.contrib.formats.safetensors_file",
    "penstock.contrib.formats.tensorflow_checkpoint",
    "penstock.contrib.formats.torch_distributed",
    "penstock.contrib.formats.torch_file",
)
# Kernels for a TPU, by the name of the variant.
KERNELS = {
    "pallas": "penstock.rows.bridge.tensorcore",
    "sparsecore": "penstock.contrib.sparsecore",
}
# What tables, and their core, are where a mesh spans several processes.
PROCESSES = {
    "agreement": "penstock.contrib.meshes.agreement",
    "tables": "penstock.contrib.meshes.process_tables",
    "core": "penstock.contrib.meshes.lockstep",
}
# Metrics, and pages for browsers.
PAGES = {
    "monitoring": "penstock.contrib.pages.monitoring",
    "http_server": "penstock.contrib.pages.http_server",
    "html_report": "penstock.contrib.pages.html_report",
    "id_statistics": "penstock.contrib.pages.id_statistics",
}
# What shows the progress of a run, by the text of ``progress=``.
PROGRESS = {"tqdm": "penstock.contrib.tqdm_bar"}
# What finds an unfinished replay in passes in a checkpoint.
PASSES_OF_ROWS = "penstock.contrib.passes.pass_folder"
# Commands that are part of an integration, by name; the others are modules of ``penstock.cli``.
COMMANDS = {
    "history": "penstock.contrib.history.history",
    "blame": "penstock.contrib.history.blame",
    "branch": "penstock.contrib.history.branch",
    "diff": "penstock.contrib.history.diff",
    "passes": "penstock.contrib.passes.command",
    "job": "penstock.contrib.ray.command",
    "bench": "penstock.bench.command",
}
# The libraries that only some of them need.
EXTRAS = (
    Extra("completion", "shtab", "completion of commands in a shell"),
    Extra("metrics", "prometheus-client", "--ui, --metrics, --metrics-file, --report and penstock.metrics"),
    Extra("otel", "opentelemetry-api", "a span for every step"),
    Extra("tqdm", "tqdm", "a progress bar, also in notebooks"),
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
