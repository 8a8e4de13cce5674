"""penstock: a streaming update engine for embedding tables.

Arrow gradients in, TPU-embedding updates out. Names are loaded on first use: importing penstock loads
neither jax nor pyarrow.
"""

__version__ = "0.1.0"

# Module → its public names. `make stub` writes them into __init__.pyi, for type checkers.
_NAMES = {
    "penstock.contrib": "functional",
    "penstock.model": "updates",
    "penstock.rows": "bridge",
    "penstock.contrib.accumulators": "ConditionalAccumulator SparseConditionalAccumulator SparseGradient",
    "penstock.api.activations.coo": "CooIds",
    "penstock.api.activations.deduplication": "DeduplicationData",
    "penstock.checkpoint.versions": "tag",
    "penstock.model.config.clipping": "Clip Limit",
    "penstock.model.config.dynamic": "Dynamic",
    "penstock.model.config.embedding": "EmbeddingConfig",
    "penstock.model.config.engine_config_pb2": "EngineConfig",
    "penstock.model.config.features": "FeatureConfig",
    "penstock.model.config.lint.findings": "Finding",
    "penstock.model.config.placement": "Placement",
    "penstock.model.config.tables": (
        "Constant FromFile QuantizationConfig RowIdInitializer TableConfig TruncatedNormal Uniform"
    ),
    "penstock.contrib.dataflow": "BlockStage StageFunction stage_fn",
    "penstock.api.engine": "Engine",
    "penstock.base.errors": "CancelledError CapacityError ConfigError DeltasGoneError InputError PeerError "
    "PenstockError ReadTimeoutError ServiceError ServiceTimeoutError StateError TakeTimeoutError TruncatedInputError "
    "UsageError UsageTypeError",
    "penstock.io.decoding.string_ids": "hash_ids",
    "penstock.serving.flight": "connect",
    "penstock.serving.shared.table_reader": "Reader",
    "penstock.model.stats": "Report TableReport",
    "penstock.model.version": "Version",
    "penstock.model.updates": "DynamicLearningRate",
    "penstock.model.updates.adagrad_family": "Adagrad AdagradMomentum BoundedAdagrad FrequencyAwareAdagrad "
    "MDLAdagradLight ProximalAdagrad RowWiseAdagrad TorchAdagrad",
    "penstock.model.updates.ftrl": "FTRL OnlineYogi ProximalYogi",
    "penstock.model.updates.moments": "Adadelta Adam CenteredRMSProp Lion Momentum PartialRowWiseAdam RMSProp",
    "penstock.model.updates.stateless": "Assign FrequencyEstimator SGD UserDefinedProgram",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    import importlib

    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'penstock' has no attribute '{name}'")
    loaded = importlib.import_module(module)
    globals()[name] = value = getattr(loaded, name, None) or importlib.import_module(f"{module}.{name}")
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
