"""penstock: a streaming update engine for embedding tables.

Arrow gradients in, TPU-embedding updates out. Names are loaded when they are first used: importing
penstock loads neither jax nor pyarrow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from penstock.config.embedding import EmbeddingConfig
    from penstock.config.lint import Finding
    from penstock.config.optimizers import SGD, Adagrad
    from penstock.config.tables import QuantizationConfig, TableConfig
    from penstock.engine import Engine
    from penstock.errors import ConfigError, InputError, PenstockError, StateError, TruncatedInputError, UsageError
    from penstock.stats import Report, TableReport

_HOME = {
    "SGD": "penstock.config.optimizers",
    "Adagrad": "penstock.config.optimizers",
    "ConfigError": "penstock.errors",
    "EmbeddingConfig": "penstock.config.embedding",
    "Engine": "penstock.engine",
    "Finding": "penstock.config.lint",
    "InputError": "penstock.errors",
    "PenstockError": "penstock.errors",
    "QuantizationConfig": "penstock.config.tables",
    "Report": "penstock.stats",
    "StateError": "penstock.errors",
    "TableConfig": "penstock.config.tables",
    "TableReport": "penstock.stats",
    "TruncatedInputError": "penstock.errors",
    "UsageError": "penstock.errors",
}

__all__ = [
    "SGD",
    "Adagrad",
    "ConfigError",
    "EmbeddingConfig",
    "Engine",
    "Finding",
    "InputError",
    "PenstockError",
    "QuantizationConfig",
    "Report",
    "StateError",
    "TableConfig",
    "TableReport",
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
