"""The order of packages, as ARCHITECTURE.md draws it, and the libraries that only some of them may import."""

# Library → the packages and modules below penstock that may import it when they are loaded.
ALLOWED = {
    "jax": {"bench", "bridge", "functional", "updates.optax_transforms"},
    "jaxlib": set(),
    "pyarrow": {"activations.inputs", "array_conversion", "bench", "cli", "dataflow", "filesystem.file_stores", "io"}
    | {"run", "service", "shares", "table_access", "torch.service_store"},
    "google": {"config", "updates.optimizer_class"},
    "flax": {"functional.nnx_embedding"},
    "keras": {"functional.keras_embedding"},
    "prometheus_client": {"metrics"},
    "ray": {"shares.ray.cluster"},
    "shtab": {"cli.completion"},
}
# Other libraries that the benches measure against: nothing else may know them.
PEERS = ("duckdb", "fbgemm_gpu", "jax_tpu_embedding", "pandas", "polars", "tensorflow")
PEERS += ("tensorflow_recommenders_addons", "torch", "torchrec")
ALLOWED |= {library: {"bench.peers"} for library in PEERS}
ALLOWED["torch"] |= {"bench.torch_steps", "torch"}

# Packages and modules of penstock from high to low, as ARCHITECTURE.md draws them: an import goes down, or to the right
# in its line, never back.
LAYERS = """
__main__   cli   bench
service   ray   shares   dataflow   functional   torch   metrics
engine   activation_access   table_access   run   lockstep   live_reads   deltas   checkpoint   telemetry   planning
core   tables   io   shared
keywords   options   activations   accumulators   pipeline   sampling   gate   stats
bridge   config   learning_rates   threads   array_conversion   control_groups   overflows   initial_rows
integrations   flag_values   validation   lineage
filesystem   svg   updates   frames   pyx   interrupts   forks   errors   events
"""
