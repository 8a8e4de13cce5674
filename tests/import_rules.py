"""What each module may import: the packages table of ARCHITECTURE.md, module by module."""

# Other libraries that the benches measure against: nothing else may know them.
PEERS = {"torch", "fbgemm_gpu", "tensorflow", "polars", "duckdb", "jax_tpu_embedding"}
OUTSIDE = {"jax", "jaxlib", "pyarrow", "google", "numpy", "prometheus_client", "shtab", *PEERS}

# Packages and modules of penstock from high to low, as ARCHITECTURE.md draws them: an import goes down, or to the right
# in its line, never back.
LAYERS = """
__main__   cli   bench
service   distributed   dataflow   metrics
engine   table_access   run   deltas   checkpoint   telemetry
core   tables   io
activations   accumulators   pipeline   sampling   gate   stats
bridge   config   learning_rates   threads
frames   validation   filesystem   plots   updates   pyx   interrupts   errors
"""

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
    (
        "penstock.config",
        {"penstock.config", "penstock.errors", "penstock.filesystem.atomic_files", "penstock.updates"},
        {"google", "numpy"},
    ),
    (
        "penstock.bridge",
        {
            "penstock.bridge",
            "penstock.pyx.id_table",
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
    ("penstock.bench.report", {"penstock.bench", "penstock.plots"}, set()),
    ("penstock.bench", {"penstock"}, {"jax", "numpy", "pyarrow"}),
    (
        "penstock.checkpoint",
        {
            "penstock.validation",
            "penstock.checkpoint",
            "penstock.config",
            "penstock.core",
            "penstock.errors",
            "penstock.frames",
            "penstock.filesystem.atomic_files",
            "penstock.filesystem.descriptors",
            "penstock.io.storage.delta_sink",
            "penstock.io.storage.quarantine",
            "penstock.io.decoding.reader",
            "penstock.pyx.dirty_bits",
            "penstock.stats",
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
        "penstock.distributed",
        {
            "penstock.bridge.device_tables",
            "penstock.checkpoint",
            "penstock.config",
            "penstock.core",
            "penstock.deltas",
            "penstock.distributed",
            "penstock.engine",
            "penstock.errors",
            "penstock.frames",
            "penstock.interrupts",
            "penstock.io",
            "penstock.pyx.partition",
            "penstock.learning_rates",
            "penstock.tables.initializers",
            "penstock.tables.table_set",
            "penstock.stats",
            "penstock.telemetry",
        },
        {"numpy", "pyarrow"},
    ),
    ("penstock.distributed.rendezvous", {"penstock.errors", "penstock.interrupts"}, {"jax"}),
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
            "penstock.validation",
            "penstock.checkpoint",
            "penstock.core",
            "penstock.deltas",
            "penstock.frames",
            "penstock.interrupts",
            "penstock.io",
            "penstock.learning_rates",
            "penstock.pipeline",
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
            "penstock.pipeline",
            "penstock.stats",
            "penstock.tables.table_set",
        },
        {"numpy"},
    ),
    ("penstock.table_access", {"penstock.core", "penstock.frames", "penstock.validation"}, {"numpy"}),
    ("penstock.tables.orbax", {"penstock.errors", "penstock.frames"}, {"numpy"}),
    (
        "penstock.tables.table_set",
        {
            "penstock.tables.orbax",
            "penstock.config",
            "penstock.bridge",
            "penstock.errors",
            "penstock.frames",
            "penstock.tables.initializers",
            "penstock.io.storage.table_files",
            "penstock.validation",
            "penstock.updates",
        },
        {"numpy"},
    ),
    (
        "penstock.activations",
        {
            "penstock.activations",
            "penstock.config",
            "penstock.errors",
            "penstock.frames",
            "penstock.gate",
            "penstock.validation",
        },
        {"numpy", "pyarrow"},
    ),
    ("penstock.activations.combiners", {"penstock.frames", "penstock.pyx.scaled_rows"}, {"numpy"}),
    ("penstock.plots", {"penstock.plots"}, set()),
    ("penstock.validation", {"penstock.errors"}, set()),
    ("penstock.errors", set(), set()),
    ("penstock.tables", set(), set()),
    ("penstock.frames", {"penstock.pyx.buffer_pool"}, {"numpy"}),
    ("penstock.updates", {"penstock.updates"}, set()),
    ("penstock.tables.initializers", {"penstock.config", "penstock.errors", "penstock.frames"}, {"numpy"}),
    ("penstock.learning_rates", {"penstock.errors"}, set()),
    ("penstock.stats", {"penstock.frames"}, set()),
    ("penstock.sampling", {"penstock.frames", "penstock.gate", "penstock.stats"}, {"numpy"}),
    (
        "penstock.telemetry",
        {"penstock.core", "penstock.frames", "penstock.gate", "penstock.sampling", "penstock.stats"},
        set(),
    ),
    # jax through the bridge: who asks for metrics has an engine.
    (
        "penstock.metrics",
        {"penstock.bridge.compile_counter", "penstock.engine", "penstock.stats"},
        {"prometheus_client"},
    ),
    ("penstock.gate", {"penstock.frames", "penstock.validation", "penstock.errors", "penstock.stats"}, set()),
    (
        "penstock.accumulators.storage",
        {"penstock.frames", "penstock.pyx.accumulator", "penstock.pyx.frame_accumulate"},
        {"numpy"},
    ),
    (
        "penstock.accumulators.gradient_checks",
        {"penstock.errors", "penstock.frames", "penstock.validation"},
        {"numpy"},
    ),
    (
        "penstock.accumulators.conditional",
        {"penstock.errors", "penstock.gate", "penstock.accumulators.gradient_checks", "penstock.stats"},
        set(),
    ),
    (
        "penstock.accumulators",
        {
            "penstock.accumulators.conditional",
            "penstock.errors",
            "penstock.frames",
            "penstock.accumulators.gradient_checks",
            "penstock.stats",
            "penstock.accumulators.storage",
        },
        {"numpy"},
    ),
    ("penstock.threads", {"penstock.validation"}, set()),
    (
        "penstock.pipeline",
        {
            "penstock.threads",
            "penstock.frames",
            "penstock.gate",
            "penstock.pyx.frame_accumulate",
            "penstock.pyx.accumulator",
            "penstock.stats",
            "penstock.errors",
        },
        {"numpy"},
    ),
]
