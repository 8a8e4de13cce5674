"""Other libraries' ways, one module per library; a module is imported only where its library is installed.

Each way is what a good user of that library would write. What is outside the timing stands in docs/performance.md.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

from penstock.bench.contestants import Way
from penstock.errors import UsageError

# What --peers calls it → (what must be importable, what is installed, the module here).
PEERS = {
    "numpy": ("numpy", "numpy", "of_numpy"),
    "jax": ("jax", "jax", "of_jax"),
    "torch": ("torch", "torch", "of_torch"),
    "fbgemm": ("fbgemm_gpu", "fbgemm-gpu-cpu", "of_fbgemm"),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "of_tensorflow"),
    "polars": ("polars", "polars", "of_polars"),
    "duckdb": ("duckdb", "duckdb", "of_duckdb"),
    "jax-tpu-embedding": ("jax_tpu_embedding", "jax-tpu-embedding", "of_jax_tpu_embedding"),
}
ALL, NONE = "all", "none"


def chosen(text: str | None) -> tuple[list[str], bool]:
    """``--peers`` → names, and whether slow ways take part. None: those that are installed, without slow ways."""
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
    """Those of the peers that are not installed."""
    return [name for name in names if importlib.util.find_spec(PEERS[name][0]) is None]


def ways(name: str, threads: int) -> list[Way]:
    """All ways of one peer; imports its library, which may fail in any way a library can."""
    module = importlib.import_module(f"penstock.bench.peers.{PEERS[name][2]}")
    made: list[Way] = module.ways(threads)
    return made
