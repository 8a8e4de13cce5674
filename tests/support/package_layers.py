"""The order of packages, as ARCHITECTURE.md draws it, and the libraries that only some of them may import."""

# Library → the packages and modules below penstock that may import it when they are loaded.
ALLOWED = {
    "jax": {"bench", "rows.bridge", "contrib.functional", "contrib.meshes", "contrib.sparsecore"}
    | {"contrib.formats.orbax_checkpoint", "model.updates.optax_transforms"},
    "jaxlib": set(),
    "pyarrow": {
        "api",
        "base.array_conversion",
        "base.filesystem.file_stores",
        "bench",
        "cli",
        "contrib",
        "io",
        "serving",
    },
    "google": {"model.config", "model.updates.optimizer_class"},
    "flax": {"contrib.functional.nnx_embedding", "contrib.functional.nnx_materialized"},
    "keras": {f"contrib.functional.keras_{module}" for module in ("embedding", "materialized", "optimizers")},
    "prometheus_client": {"contrib.pages.metrics"},
    "ray": {"contrib.ray.cluster"},
    "shtab": {"cli.completion"},
    "tqdm": {"contrib.tqdm_bar"},
    "IPython": set(),
}
# Other libraries that the benches measure against: nothing else may know them.
PEERS = ("duckdb", "fbgemm_gpu", "jax_tpu_embedding", "pandas", "polars", "tensorflow")
PEERS += ("tensorflow_recommenders_addons", "torch", "torchrec")
ALLOWED |= {library: {"bench.peers"} for library in PEERS}
ALLOWED["torch"] |= {"bench.torch_steps", "contrib.torch"}

# The packages at the top of penstock from high to low: an import goes down, never back.
ORDER = [
    "__main__",
    "bench",
    "contrib",
    "cli",
    "serving",
    "api",
    "checkpoint",
    "core",
    "rows",
    "io",
    "model",
    "pyx",
    "base",
]
# Import paths that stay, as modules of five lines, and where they lead: one module or several.
FORMER = {
    "penstock.torch": "penstock.contrib.torch",
    "penstock.functional": "penstock.contrib.functional",
    **{
        f"penstock.functional.{library}_embedding": " ".join(
            f"penstock.contrib.functional.{library}_{module}" for module in ("embedding", "materialized")
        )
        for library in ("keras", "nnx")
    },
    "penstock.ray": "penstock.contrib.ray.job",
    "penstock.metrics": "penstock.contrib.pages.metrics",
    "penstock.dataflow": "penstock.contrib.dataflow",
    "penstock.updates": "penstock.model.updates",
    "penstock.bridge": "penstock.rows.bridge",
    "penstock.errors": "penstock.base.errors",
    "penstock.accumulators": "penstock.contrib.accumulators",
    "penstock.shares": "penstock.contrib.shares",
    "penstock.engine": "penstock.api.engine",
    "penstock.learning_rates": "penstock.model.learning_rates",
    "penstock.stats": "penstock.model.stats",
    "penstock.shared.table_writer": "penstock.serving.shared.table_writer",
    "penstock.io.flight": "penstock.serving.flight",
    "penstock.io.targets.target": "penstock.serving.followers.target",
    "penstock.io.targets.follower": "penstock.serving.followers.follower",
}
