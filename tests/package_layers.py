"""The order of packages, as ARCHITECTURE.md draws it, and the libraries that only some of them may import."""

# Other libraries that the benches measure against: nothing else may know them.
PEERS = {
    "duckdb",
    "fbgemm_gpu",
    "jax_tpu_embedding",
    "pandas",
    "polars",
    "tensorflow",
    "tensorflow_recommenders_addons",
    "torch",
    "torchrec",
}
OUTSIDE = {"flax", "jax", "jaxlib", "keras", "pyarrow", "google", "numpy", "prometheus_client", "ray", "shtab", *PEERS}

# Packages and modules of penstock from high to low, as ARCHITECTURE.md draws them: an import goes down, or to the right
# in its line, never back.
LAYERS = """
__main__   cli   bench
service   passes   ray   joining   dataflow   functional   metrics
engine   table_access   run   processes   deltas   checkpoint   telemetry   planning
core   routing   tables   io
options   activations   accumulators   pipeline   sampling   gate   stats
bridge   config   learning_rates   threads
frames   validation   flag_values   filesystem   plots   updates   caching   pyx   interrupts   errors
"""
