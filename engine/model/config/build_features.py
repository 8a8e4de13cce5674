"""Convert nested FeatureConfigs and the arguments of a TPU strategy to a complete EngineConfig.

build.py converts tables and optimizers; features.py computes the shapes of features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.base.errors import ConfigError
from penstock.model.config.build import Built, named_tables, write_tables
from penstock.model.config.engine_config_pb2 import EngineConfig
from penstock.model.config.features import FeatureConfig, Shape, flatten, output_shapes, pack
from penstock.model.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration
from penstock.model.updates import Optimizer


class Strategy(NamedTuple):
    """The arguments that a TPU strategy supplies in TensorFlow."""

    num_hosts: int = 1
    num_replicas: int = 1
    num_cores_per_replica: int | None = None
    pipeline_execution_with_tensor_core: bool = False


def build_features(
    structure: Any, optimizer: Optimizer | None, batch_size: int | None, input_shapes: Any, strategy: Strategy
) -> Built:
    """Convert features and their tables as TensorFlow's TPUEmbedding does; leave both unchanged. Raise ConfigError."""
    features = flatten(structure)
    for index, feature in enumerate(features):
        if not isinstance(feature, FeatureConfig):
            raise ConfigError(f"feature {index} must be a FeatureConfig, got {feature!r}")
    tables = list({id(feature.table): feature.table for feature in features}.values())
    named = named_tables(tables, optimizer)  # TensorFlow's order: check names and optimizers before shapes
    shapes = output_shapes(structure, features, batch_size, input_shapes)
    message, part = write_tables(named, strategy.num_hosts)
    _write_strategy(message.tpu_embedding_configuration, strategy)
    ids = {id(table): index for index, table in enumerate(tables)}
    for feature, shape in zip(features, shapes, strict=True):
        _write_feature(message.tpu_embedding_configuration, feature, ids[id(feature.table)], shape)
    _write_feature_settings(message, features)
    return message, part._replace(feature_structure=pack(structure, range(len(features))))


def _write_strategy(config: TPUEmbeddingConfiguration, strategy: Strategy) -> None:
    cores = strategy.num_cores_per_replica
    try:
        config.num_hosts = strategy.num_hosts
        config.num_tensor_cores = strategy.num_replicas * (cores or 1)
        config.pipeline_execution_with_tensor_core = strategy.pipeline_execution_with_tensor_core
        if cores:
            config.spmd_sharding.enabled = True
            config.spmd_sharding.num_cores_per_replica = cores
    except ValueError as error:
        raise ConfigError(f"num_hosts, num_replicas or num_cores_per_replica: {error}") from None


def _write_feature(config: TPUEmbeddingConfiguration, feature: FeatureConfig, table_id: int, shape: Shape) -> None:
    descriptor = config.feature_descriptor.add()
    if feature.name:
        descriptor.name = feature.name
    descriptor.table_id = table_id
    try:
        descriptor.input_shape.extend(dim for dim in shape if dim is not None)
    except ValueError as error:
        raise ConfigError(f"feature '{feature.name}': {error}") from None


def _write_feature_settings(message: EngineConfig, features: Sequence[FeatureConfig]) -> None:
    """Write every feature's combiner and sequence length, keyed by its name if that is unique, else by its index."""
    names = Counter(feature.name for feature in features)
    for index, feature in enumerate(features):
        settings = message.feature.add(combiner=feature.table.combiner, max_sequence_length=feature.max_sequence_length)
        if feature.name and names[feature.name] == 1:
            settings.name = feature.name
        else:
            settings.feature_id = index
