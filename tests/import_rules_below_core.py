"""What each module below the core may import; ``import_rules`` has the others."""

BASICS = {"penstock.config", "penstock.errors", "penstock.frames", "penstock.stats"}
SUMS = {"penstock.pyx.accumulator", "penstock.pyx.frame_accumulate"}

BELOW_CORE = [
    (
        "penstock.tables.dynamic_table",
        {
            *BASICS,
            "penstock.bridge",
            "penstock.pyx.keys.directory_plan",
            "penstock.tables.initializers",
            "penstock.tables.key_directory",
            "penstock.validation",
        },
        {"numpy"},
    ),
    ("penstock.tables.key_directory", {*BASICS, "penstock.pyx.keys"}, {"numpy"}),
    (
        "penstock.tables.table_keys",
        {"penstock.frames", "penstock.stats", "penstock.tables.dynamic_table", "penstock.tables.initializers"},
        set(),
    ),
    # What an engine would do to the keys of a log, without its tables: no jax.
    (
        "penstock.planning",
        {
            *BASICS,
            "penstock.gate",
            "penstock.interrupts",
            "penstock.io.decoding.reader",
            "penstock.pipeline",
            "penstock.accumulators.frame_gate",
            "penstock.planning",
            "penstock.pyx.keys",
            "penstock.tables.key_directory",
        },
        {"numpy"},
    ),
    ("penstock.tables.orbax", {"penstock.errors", "penstock.frames", "penstock.io.storage.table_files"}, {"numpy"}),
    (
        "penstock.tables.shares",
        {
            "penstock.config.specs",
            "penstock.errors",
            "penstock.frames",
            "penstock.pyx.keys.key_owners",
            "penstock.pyx.partition",
            "penstock.validation",
        },
        {"numpy"},
    ),
    ("penstock.tables.state_hash", {"penstock.config.specs", "penstock.frames"}, {"numpy"}),
    (
        "penstock.tables.tables_by_id",
        {
            "penstock.bridge.device_tables",
            "penstock.config.specs",
            "penstock.errors",
            "penstock.frames",
            "penstock.tables",
            "penstock.updates",
            "penstock.validation",
        },
        {"numpy"},
    ),
    # What the readers of a job load: no jax.
    (
        "penstock.routing",
        {
            "penstock.config",
            "penstock.frames",
            "penstock.pyx.partition",
            "penstock.io.storage.table_files",
            "penstock.routing",
            "penstock.tables.shares",
            "penstock.tables.state_hash",
            *SUMS,
        },
        {"numpy", "pyarrow"},
    ),
    (
        "penstock.tables.table_io",
        {
            "penstock.errors",
            "penstock.frames",
            "penstock.io.storage.table_files",
            "penstock.tables.orbax",
            "penstock.bridge.device_tables",
            "penstock.tables.dynamic_table",
        },
        {"numpy"},
    ),
    (
        "penstock.tables.table_set",
        {
            "penstock.bridge",
            "penstock.config",
            "penstock.frames",
            "penstock.tables.dynamic_table",
            "penstock.tables.initializers",
            "penstock.tables.key_directory",
            "penstock.tables.shares",
            "penstock.tables.table_keys",
            "penstock.tables.tables_by_id",
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
    ("penstock.activations.combiners", {"penstock.frames", "penstock.pyx.row_sums"}, {"numpy"}),
    ("penstock.plots", {"penstock.plots"}, set()),
    ("penstock.validation", {"penstock.errors"}, set()),
    ("penstock.errors", set(), set()),
    ("penstock.tables", set(), set()),
    ("penstock.frames", {"penstock.errors", "penstock.pyx.buffer_pool"}, {"numpy"}),
    ("penstock.updates", {"penstock.updates"}, set()),
    (
        "penstock.tables.initializers",
        {"penstock.config", "penstock.errors", "penstock.frames", "penstock.pyx.initial_rows"},
        {"numpy"},
    ),
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
        "penstock.accumulators.frame_gate",
        {"penstock.errors", "penstock.frames", "penstock.gate", "penstock.stats"},
        set(),
    ),
    ("penstock.accumulators.storage", {"penstock.frames", "penstock.pyx.buffer_pool", *SUMS}, {"numpy"}),
    ("penstock.accumulators.gradient_checks", {"penstock.errors", "penstock.frames", "penstock.validation"}, {"numpy"}),
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
        {"penstock.errors", "penstock.frames", "penstock.pyx.buffer_pool", "penstock.threads", *SUMS},
        {"numpy"},
    ),
]
