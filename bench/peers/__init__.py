"""The ways of other libraries, one module per library; a module is imported only if its library is installed.

Each way is what a good user of that library would write. docs/performance.md lists the work that is not timed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

from penstock.bench.contestants import AnyWay
from penstock.errors import UsageError

# Name in --peers → (import name, distribution name, module in this package).
PEERS = {
    "numpy": ("numpy", "numpy", "of_numpy"),
    "jax": ("jax", "jax", "of_jax"),
    "torch": ("torch", "torch", "of_torch"),
    "fbgemm": ("fbgemm_gpu", "fbgemm-gpu-cpu", "of_fbgemm"),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "of_tensorflow"),
    "polars": ("polars", "polars", "of_polars"),
    "duckdb": ("duckdb", "duckdb", "of_duckdb"),
    "pandas": ("pandas", "pandas", "of_pandas"),
    "torchrec": ("torchrec", "torchrec", "of_torchrec"),
    "tfra": ("tensorflow_recommenders_addons", "tensorflow-recommenders-addons", "of_tfra"),
    "jax-tpu-embedding": ("jax_tpu_embedding", "jax-tpu-embedding", "of_jax_tpu_embedding"),
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
    made: list[AnyWay] = module.ways(threads)
    return made
