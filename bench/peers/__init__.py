"""The ways of other libraries, one module per library; a module is imported only if its library is installed.

Each way is the code that an experienced user of that library would write. bench/README.md lists the untimed work.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

from penstock.base.errors import UsageError
from penstock.bench.contestants import AnyWay

# Name in --peers → (import name, distribution name, module in this package).
PEERS = {
    "numpy": ("numpy", "numpy", "numpy_peer"),
    "jax": ("jax", "jax", "jax_peer"),
    "torch": ("torch", "torch", "torch_peer"),
    "fbgemm": ("fbgemm_gpu", "fbgemm-gpu-cpu", "fbgemm_peer"),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow_peer"),
    "polars": ("polars", "polars", "polars_peer"),
    "duckdb": ("duckdb", "duckdb", "duckdb_peer"),
    "pandas": ("pandas", "pandas", "pandas_peer"),
    "torchrec": ("torchrec", "torchrec", "torchrec_peer"),
    "tfra": ("tensorflow_recommenders_addons", "tensorflow-recommenders-addons", "tfra_peer"),
    "jax-tpu-embedding": ("jax_tpu_embedding", "jax-tpu-embedding", "jax_tpu_embedding_peer"),
}
ALL, NONE = "all", "none"


def chosen(text: str | None) -> tuple[list[str], bool]:
    """Return the names in ``--peers``, and whether slow ways take part. None: installed peers, without slow ways."""
    if text is None or text == ALL:
        return list(PEERS), text == ALL
    if text == NONE:
        return [], False
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise UsageError(f"--peers {unknown[0]}: expected {', '.join(PEERS)}, {ALL} or {NONE}")
    return names, True


def missing(names: Sequence[str]) -> list[str]:
    """Return the peers that are not installed."""
    return [name for name in names if importlib.util.find_spec(PEERS[name][0]) is None]


def ways(name: str, threads: int) -> list[AnyWay]:
    """Return all ways of one peer. Importing its library may raise anything."""
    module = importlib.import_module(f"penstock.bench.peers.{PEERS[name][2]}")
    result: list[AnyWay] = module.ways(threads)
    return result
