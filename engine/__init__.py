"""penstock: a streaming update engine for embedding tables.

Arrow gradients in, TPU-embedding updates out. Names are loaded on first use: importing penstock loads
neither jax nor pyarrow.
"""

__version__ = "0.1.0"

# Module → the public names that load it on first use. ``__init__.pyi`` declares them for type checkers.
_NAMES = {
    "penstock.activations.coo": ("CooIds",),
    "penstock.activations.deduplication": ("DeduplicationData",),
    "penstock.checkpoint.versions": ("tag",),
    "penstock.config.dynamic": ("Dynamic",),
    "penstock.config.embedding": ("EmbeddingConfig",),
    "penstock.config.engine_config_pb2": ("EngineConfig",),
    "penstock.config.features": ("FeatureConfig",),
    "penstock.config.lint.findings": ("Finding",),
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
        "ReadTimeoutError",
        "ServiceError",
        "StateError",
        "TakeTimeoutError",
        "TruncatedInputError",
        "UsageError",
        "UsageTypeError",
    ),
    "penstock.io.decoding.string_ids": ("hash_ids",),
    "penstock.dataflow": ("BlockStage", "StageFunction", "stage_fn"),
    "penstock.io.flight": ("connect",),
    "penstock.shared.table_reader": ("Reader",),
    "penstock.stats": ("Report", "TableReport"),
    "penstock.updates": ("DynamicLearningRate",),
}
# Packages with a public interface of their own.
_PACKAGES = ("bridge", "functional", "updates")
_MODULES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> object:
    import importlib

    if name == "__all__":
        return sorted([*_MODULES, *_PACKAGES, *_optimizers()])
    if name in _PACKAGES:
        return importlib.import_module(f"penstock.{name}")
    if name in _MODULES:
        value = getattr(importlib.import_module(_MODULES[name]), name)
    elif name.startswith("_") or (value := _optimizers().get(name)) is None:
        raise AttributeError(f"module 'penstock' has no attribute '{name}'")
    globals()[name] = value
    return value


def _optimizers() -> dict[str, object]:
    """Return every optimizer's class by name. A class that its module lists needs no entry here."""
    from penstock.updates import OPTIMIZERS

    return {optimizer.__name__: optimizer for optimizer in OPTIMIZERS.values()}


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})  # type: ignore[misc]
