"""penstock: a streaming update engine for embedding tables.

Arrow gradients in, TPU-embedding updates out. Names are loaded on first use: importing penstock loads
neither jax nor pyarrow.
"""

__version__ = "0.1.0"

# Module → the public names that load it on first use. ``__init__.pyi`` declares them for type checkers.
_NAMES = {
    "penstock.activations.coo": ("CooIds",),
    "penstock.activations.deduplication": ("DeduplicationData",),
    "penstock.config.dynamic": ("Dynamic",),
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
    "penstock.config.placement": ("Placement",),
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
        "CapacityError",
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
# Packages with a public interface of their own.
_PACKAGES = ("bridge", "functional", "updates")
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted([*_MODULES, *_PACKAGES])


def __getattr__(name: str) -> object:
    import importlib

    if name in _PACKAGES:
        return importlib.import_module(f"penstock.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'penstock' has no attribute '{name}'")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
