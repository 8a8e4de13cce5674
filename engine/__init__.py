"""penstock: a streaming update engine for embedding tables.

Arrow gradients in, TPU-embedding updates out. Names are loaded on first use: importing penstock loads
neither jax nor pyarrow.
"""

__version__ = "0.1.0"

# Module → its public names. `make stub` writes them into __init__.pyi, for type checkers.
_NAMES = {
    "penstock": "bridge functional updates",
    "penstock.accumulators": "ConditionalAccumulator SparseConditionalAccumulator SparseGradient",
    "penstock.activations.coo": "CooIds",
    "penstock.activations.deduplication": "DeduplicationData",
    "penstock.checkpoint.versions": "tag",
    "penstock.config.dynamic": "Dynamic",
    "penstock.config.embedding": "EmbeddingConfig",
    "penstock.config.engine_config_pb2": "EngineConfig",
    "penstock.config.features": "FeatureConfig",
    "penstock.config.lint.findings": "Finding",
    "penstock.config.placement": "Placement",
    "penstock.config.tables": "Constant QuantizationConfig RowIdInitializer TableConfig TruncatedNormal Uniform",
    "penstock.dataflow": "BlockStage StageFunction stage_fn",
    "penstock.engine": "Engine",
    "penstock.errors": "CancelledError CapacityError ConfigError DeltasGoneError InputError PeerError PenstockError "
    "ReadTimeoutError ServiceError ServiceTimeoutError StateError TakeTimeoutError TruncatedInputError UsageError "
    "UsageTypeError",
    "penstock.io.decoding.string_ids": "hash_ids",
    "penstock.io.flight": "connect",
    "penstock.shared.table_reader": "Reader",
    "penstock.stats": "Report TableReport",
    "penstock.updates": "DynamicLearningRate",
    "penstock.updates.adagrad_family": "Adagrad AdagradMomentum BoundedAdagrad FrequencyAwareAdagrad MDLAdagradLight "
    "ProximalAdagrad RowWiseAdagrad",
    "penstock.updates.ftrl": "FTRL OnlineYogi ProximalYogi",
    "penstock.updates.moments": "Adadelta Adam CenteredRMSProp Lion Momentum RMSProp",
    "penstock.updates.stateless": "Assign FrequencyEstimator SGD UserDefinedProgram",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    import importlib

    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'penstock' has no attribute '{name}'")
    if module == "penstock":
        return importlib.import_module(f"penstock.{name}")
    globals()[name] = value = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
