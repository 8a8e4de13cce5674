"""The integrations, by module: each is loaded from here, when it is used, and imported by nothing outside of them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

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
# What knows of an unfinished replay in passes.
PASSES_OF_ROWS = "penstock.shares.pass_folder"
# Commands that are part of an integration, by name; the others are modules of ``penstock.cli``.
COMMANDS = {
    "history": "penstock.cli.history",
    "blame": "penstock.cli.blame",
    "branch": "penstock.cli.branch",
    "diff": "penstock.cli.diff",
    "bench": "penstock.cli.bench",
}


def declared(modules: Iterable[str], name: str) -> list[Any]:
    """Return what each of the modules declares under a name."""
    return [getattr(import_module(module), name) for module in modules]
