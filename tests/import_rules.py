"""What each module may import: the packages table of ARCHITECTURE.md, module by module."""

from import_rules_below_core import BASICS, BELOW_CORE
from package_layers import OUTSIDE

STEPS = {"penstock.pipeline", "penstock.tables.table_set"}

# room → what its modules may import of penstock (prefixes) and of the packages in OUTSIDE.
# The row with the longest prefix of a module's name is its room.
ROOMS = [
    ("penstock.pyx", {"penstock.pyx"}, {"numpy"}),
    (
        "penstock.io",
        {
            "penstock.io",
            "penstock.pyx.arrow_c_data",
            "penstock.pyx.run_lengths",
            "penstock.activations.combiners",
            "penstock.filesystem",
            "penstock.frames",
            "penstock.config",
            "penstock.errors",
            "penstock.validation",
            "penstock.interrupts",
        },
        {"numpy", "pyarrow"},
    ),
    ("penstock.filesystem", {"penstock.filesystem", "penstock.interrupts"}, set()),
    ("penstock.filesystem.file_stores", {"penstock.filesystem"}, {"pyarrow"}),
    (
        "penstock.config",
        {"penstock.config", "penstock.errors", "penstock.filesystem.atomic_files", "penstock.updates"},
        {"google", "numpy"},
    ),
    (
        "penstock.bridge",
        {
            "penstock.bridge",
            "penstock.pyx.partition",
            "penstock.pyx.update",
            "penstock.updates",
            "penstock.errors",
        },
        {"jax", "numpy"},
    ),
    # Peers live in their own room, plots in theirs; what decides about threads is loaded before anything else.
    ("penstock.bench.machine", set(), set()),
    ("penstock.bench.child", {"penstock.bench"}, {"jax", "pyarrow"}),
    ("penstock.bench.peers", {"penstock.bench", "penstock.errors"}, OUTSIDE),
    ("penstock.bench.report", {"penstock.bench", "penstock.errors", "penstock.plots"}, set()),
    ("penstock.bench", {"penstock"}, {"jax", "numpy", "pyarrow"}),
    (
        "penstock.checkpoint",
        {
            *BASICS,
            "penstock.validation",
            "penstock.checkpoint",
            "penstock.core",
            "penstock.filesystem.descriptors",
            "penstock.filesystem.file_stores",
            "penstock.io.storage.delta_sink",
            "penstock.io.storage.quarantine",
            "penstock.io.decoding.reader",
            "penstock.pyx.dirty_bits",
            "penstock.tables.key_directory",
            "penstock.tables.shares",
        },
        {"numpy"},
    ),
    (
        "penstock.service",
        {
            "penstock.checkpoint",
            "penstock.deltas",
            "penstock.engine",
            "penstock.errors",
            "penstock.filesystem.descriptors",
            "penstock.frames",
            "penstock.io",
            "penstock.learning_rates",
            "penstock.service",
            "penstock.stats",
        },
        {"numpy", "pyarrow"},
    ),
    (
        "penstock.ray",
        {
            *BASICS,
            "penstock.checkpoint",
            "penstock.core",
            "penstock.deltas",
            "penstock.engine",
            "penstock.interrupts",
            "penstock.io",
            "penstock.learning_rates",
            "penstock.ray",
            "penstock.routing",
            "penstock.tables.state_hash",
            "penstock.validation",
        },
        {"numpy", "pyarrow"},
    ),
    ("penstock.ray.cluster", {*BASICS, "penstock.interrupts", "penstock.ray", "penstock.tables.state_hash"}, {"ray"}),
    ("penstock.cli", {"penstock"}, {"jax", "pyarrow", "numpy"}),
    ("penstock.cli.completion", {"penstock.cli"}, {"shtab"}),
    ("penstock.__main__", {"penstock.cli", "penstock.interrupts"}, set()),
    ("penstock.interrupts", set(), set()),
    # The composition root of the library; jax only through the bridge.
    ("penstock.engine", {"penstock"}, {"numpy"}),
    (
        "penstock.dataflow",
        {"penstock.validation", "penstock.config.embedding", "penstock.deltas", "penstock.engine", "penstock.run"},
        {"pyarrow"},
    ),
    (
        "penstock.deltas",
        {
            "penstock.config.specs",
            "penstock.core",
            "penstock.errors",
            "penstock.frames",
            "penstock.io.storage.delta_format",
            "penstock.checkpoint.dirty_rows",
            "penstock.validation",
        },
        {"numpy", "pyarrow"},
    ),
    (
        "penstock.run",
        {
            "penstock.accumulators.frame_gate",
            "penstock.validation",
            "penstock.checkpoint",
            "penstock.core",
            "penstock.deltas",
            "penstock.frames",
            "penstock.interrupts",
            "penstock.io",
            "penstock.learning_rates",
            "penstock.stats",
            "penstock.telemetry",
        },
        {"pyarrow"},
    ),
    # The core knows none of its observers.
    (
        "penstock.core",
        {
            "penstock.config.embedding",
            "penstock.errors",
            "penstock.frames",
            "penstock.gate",
            "penstock.learning_rates",
            "penstock.stats",
            *STEPS,
        },
        {"numpy"},
    ),
    ("penstock.processes", {*BASICS, "penstock.core", "penstock.learning_rates", *STEPS}, {"numpy"}),
    (
        "penstock.table_access",
        {"penstock.core", "penstock.errors", "penstock.frames", "penstock.tables.table_io", "penstock.validation"},
        {"numpy", "pyarrow"},
    ),
    *BELOW_CORE,
]
