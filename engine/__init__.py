"""penstock: a streaming update engine for embedding tables.

Arrow gradients in, TPU-embedding updates out. Names are loaded when they are first used: importing
penstock loads neither jax nor pyarrow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.accumulators import ConditionalAccumulator, SparseConditionalAccumulator, SparseGradient
    from penstock.config.embedding import EmbeddingConfig
    from penstock.config.lint import Finding
    from penstock.config.optimizers import SGD, Adagrad
    from penstock.config.tables import QuantizationConfig, TableConfig
    from penstock.engine import Engine
    from penstock.errors import (
        CancelledError,
        ConfigError,
        InputError,
        PenstockError,
        StateError,
        TakeTimeoutError,
        TruncatedInputError,
        UsageError,
    )
    from penstock.stats import Report, TableReport

_HOME = {
    "Adagrad": "penstock.config.optimizers",
    "CancelledError": "penstock.errors",
    "ConditionalAccumulator": "penstock.accumulators",
    "ConfigError": "penstock.errors",
    "EmbeddingConfig": "penstock.config.embedding",
    "Engine": "penstock.engine",
    "Finding": "penstock.config.lint",
    "InputError": "penstock.errors",
    "PenstockError": "penstock.errors",
    "QuantizationConfig": "penstock.config.tables",
    "Report": "penstock.stats",
    "SGD": "penstock.config.optimizers",
    "SparseConditionalAccumulator": "penstock.accumulators",
    "SparseGradient": "penstock.accumulators",
    "StateError": "penstock.errors",
    "TableConfig": "penstock.config.tables",
    "TableReport": "penstock.stats",
    "TakeTimeoutError": "penstock.errors",
    "TruncatedInputError": "penstock.errors",
    "UsageError": "penstock.errors",
}

__all__ = [
    "SGD",
    "Adagrad",
    "CancelledError",
    "ConditionalAccumulator",
    "ConfigError",
    "EmbeddingConfig",
    "Engine",
    "Finding",
    "InputError",
    "PenstockError",
    "QuantizationConfig",
    "Report",
    "SparseConditionalAccumulator",
    "SparseGradient",
    "StateError",
    "TableConfig",
    "TableReport",
    "TakeTimeoutError",
    "TruncatedInputError",
    "UsageError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
