"""Features as a user nests them: dictionaries, lists and tuples with a feature at every leaf.

The configuration's own nesting decides what is a leaf, so that a leaf may be a list itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config.embedding import EmbeddingConfig
from penstock.config.features import children
from penstock.config.specs import FeatureSpec
from penstock.errors import ConfigError, UsageError, UsageTypeError


def name_of(config: EmbeddingConfig, index: int) -> str:
    """How messages call a feature: ``feature 'user'``, or by its number where it has no name."""
    name = config.features[index].name
    return f"feature '{name}'" if name else f"feature {index}"


def features_of(config: EmbeddingConfig) -> tuple[FeatureSpec, ...]:
    """The features of a configuration. ConfigError where it has none."""
    if not config.features:
        raise ConfigError(
            "the configuration has no features: make it with EmbeddingConfig.from_features, or add feature_descriptor "
            "to the file"
        )
    return config.features


def structure_for(config: EmbeddingConfig, values: Any) -> Any:
    """The nesting that ``values`` must have: the configuration's, or a mapping by name where it has none of its own.

    At its leaves the numbers of the features.
    """
    features = features_of(config)
    structure = config.feature_structure
    names = [feature.name for feature in features]
    flat = isinstance(structure, list) and structure == list(range(len(features)))
    if flat and isinstance(values, Mapping) and all(names) and len(set(names)) == len(names):
        return {name: index for index, name in enumerate(names)}
    return structure


def leaves(structure: Any, values: Any, what: str) -> dict[int, Any]:
    """Feature → what stands for it in ``values``, which must be nested like ``structure``. UsageError if not."""
    found: dict[int, Any] = {}
    _collect(structure, values, what, found)
    return dict(sorted(found.items()))


def _collect(structure: Any, values: Any, what: str, found: dict[int, Any]) -> None:
    inside = children(structure)
    if inside is None:
        found[structure] = values
        return
    if isinstance(structure, Mapping):
        if not isinstance(values, Mapping) or set(values) != set(structure):
            keys = ", ".join(map(str, structure))
            wanted = f"{what}: expected a mapping with the features' keys ({keys}), got"
            if not isinstance(values, Mapping):
                raise UsageTypeError(f"{wanted} {type(values).__name__}")
            raise UsageError(f"{wanted} keys {', '.join(map(str, values))}")
        for key in sorted(structure):
            _collect(structure[key], values[key], what, found)
        return
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        wanted = f"expected a sequence of {len(inside)}, nested like the features"
        raise UsageTypeError(f"{what}: {wanted}, got {type(values).__name__}")
    if len(values) != len(inside):
        raise UsageError(f"{what}: expected {len(inside)} entries, nested like the features, got {len(values)}")
    for child, value in zip(inside, values, strict=True):
        _collect(child, value, what, found)
