"""penstock: a streaming update engine for embedding tables.

Arrow gradients in, TPU-embedding updates out. Names are loaded on first use: importing penstock loads
neither jax nor pyarrow.
"""

__version__ = "0.1.0"

# typing.TYPE_CHECKING without its import: the command line cannot handle signals before this file has run.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from penstock.accumulators import ConditionalAccumulator, SparseConditionalAccumulator, SparseGradient
    from penstock.activations.coo import CooIds
    from penstock.activations.deduplication import DeduplicationData
    from penstock.config.embedding import EmbeddingConfig
    from penstock.config.engine_config_pb2 import EngineConfig
    from penstock.config.features import FeatureConfig
    from penstock.config.lint.findings import Finding
    from penstock.config.optimizers import (
        FTRL,
        SGD,
        Adadelta,
        Adagrad,
        AdagradMomentum,
        Adam,
        Assign,
        BoundedAdagrad,
        CenteredRMSProp,
        DynamicLearningRate,
        FrequencyAwareAdagrad,
        FrequencyEstimator,
        Lion,
        MDLAdagradLight,
        Momentum,
        OnlineYogi,
        ProximalAdagrad,
        ProximalYogi,
        RMSProp,
        RowWiseAdagrad,
        UserDefinedProgram,
    )
    from penstock.config.tables import (
        Constant,
        QuantizationConfig,
        RowIdInitializer,
        TableConfig,
        TruncatedNormal,
        Uniform,
    )
    from penstock.dataflow import BlockStage, StageFunction, stage_fn
    from penstock.engine import Engine
    from penstock.errors import (
        CancelledError,
        ConfigError,
        DeltasGoneError,
        InputError,
        PeerError,
        PenstockError,
        ServiceError,
        StateError,
        TakeTimeoutError,
        TruncatedInputError,
        UsageError,
        UsageTypeError,
    )
    from penstock.stats import Report, TableReport

# Module → the public names that load it on first use.
_NAMES = {
    "penstock.activations.coo": ("CooIds",),
    "penstock.activations.deduplication": ("DeduplicationData",),
    "penstock.config.embedding": ("EmbeddingConfig",),
    "penstock.config.engine_config_pb2": ("EngineConfig",),
    "penstock.config.features": ("FeatureConfig",),
    "penstock.config.lint.findings": ("Finding",),
    "penstock.config.optimizers": (
        "FTRL",
        "SGD",
        "Adadelta",
        "Adagrad",
        "AdagradMomentum",
        "Adam",
        "Assign",
        "BoundedAdagrad",
        "CenteredRMSProp",
        "DynamicLearningRate",
        "FrequencyAwareAdagrad",
        "FrequencyEstimator",
        "Lion",
        "MDLAdagradLight",
        "Momentum",
        "OnlineYogi",
        "ProximalAdagrad",
        "ProximalYogi",
        "RMSProp",
        "RowWiseAdagrad",
        "UserDefinedProgram",
    ),
    "penstock.config.tables": (
        "Constant",
        "QuantizationConfig",
        "RowIdInitializer",
        "TableConfig",
        "TruncatedNormal",
        "Uniform",
    ),
    "penstock.engine": ("Engine",),
    "penstock.accumulators": ("ConditionalAccumulator", "SparseConditionalAccumulator", "SparseGradient"),
    "penstock.errors": (
        "CancelledError",
        "ConfigError",
        "DeltasGoneError",
        "InputError",
        "PeerError",
        "PenstockError",
        "ServiceError",
        "StateError",
        "TakeTimeoutError",
        "TruncatedInputError",
        "UsageError",
        "UsageTypeError",
    ),
    "penstock.dataflow": ("BlockStage", "StageFunction", "stage_fn"),
    "penstock.stats": ("Report", "TableReport"),
}
_HOME = {name: room for room, names in _NAMES.items() for name in names}

__all__ = [
    "FTRL",
    "SGD",
    "Adadelta",
    "Adagrad",
    "AdagradMomentum",
    "Adam",
    "Assign",
    "BlockStage",
    "BoundedAdagrad",
    "CancelledError",
    "CenteredRMSProp",
    "ConditionalAccumulator",
    "ConfigError",
    "Constant",
    "CooIds",
    "DeduplicationData",
    "DeltasGoneError",
    "DynamicLearningRate",
    "EmbeddingConfig",
    "Engine",
    "EngineConfig",
    "FeatureConfig",
    "Finding",
    "FrequencyAwareAdagrad",
    "FrequencyEstimator",
    "InputError",
    "Lion",
    "MDLAdagradLight",
    "Momentum",
    "OnlineYogi",
    "PeerError",
    "PenstockError",
    "ProximalAdagrad",
    "ProximalYogi",
    "QuantizationConfig",
    "RMSProp",
    "Report",
    "RowIdInitializer",
    "RowWiseAdagrad",
    "ServiceError",
    "SparseConditionalAccumulator",
    "SparseGradient",
    "StageFunction",
    "StateError",
    "TableConfig",
    "TableReport",
    "TakeTimeoutError",
    "TruncatedInputError",
    "TruncatedNormal",
    "Uniform",
    "UsageError",
    "UsageTypeError",
    "UserDefinedProgram",
    "stage_fn",
]


def __getattr__(name: str) -> "Any":
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module 'penstock' has no attribute '{name}'")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
