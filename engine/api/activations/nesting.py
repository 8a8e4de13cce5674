"""Nested features: dictionaries, lists and tuples with a feature at every leaf.

The configuration's nesting decides what is a leaf, so a leaf may itself be a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.base.errors import ConfigError, UsageError, UsageTypeError
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.features import children
from penstock.model.config.specs import FeatureSpec


def name_of(config: EmbeddingConfig, index: int) -> str:
    """Return a feature's name in messages: ``feature 'user/clicks'``."""
    return f"feature '{config.features[index].path}'"


def features_of(config: EmbeddingConfig) -> tuple[FeatureSpec, ...]:
    """Return the features of a configuration. Raises ConfigError if it has none."""
    if not config.features:
        raise ConfigError(
            "the configuration has no features: create it with EmbeddingConfig.from_features, or add "
            "feature_descriptor to the file"
        )
    return config.features


def structure_for(config: EmbeddingConfig, values: Any) -> Any:
    """Return the nesting that ``values`` must have, with feature indices at its leaves.

    This is the configuration's nesting. If that is a flat list of features with unique names, and ``values`` is a
    mapping, it is a mapping by name.
    """
    features = features_of(config)
    structure = config.feature_structure
    names = [feature.name for feature in features]
    flat = isinstance(structure, list) and structure == list(range(len(features)))
    if flat and isinstance(values, Mapping) and all(names) and len(set(names)) == len(names):
        return {name: index for index, name in enumerate(names)}
    return structure


def leaves(structure: Any, values: Any, argument: str) -> dict[int, Any]:
    """Return feature index → its entry in ``values``. Raises UsageError unless they are nested like ``structure``."""
    by_index: dict[int, Any] = {}
    _collect(structure, values, argument, "", by_index)
    return dict(sorted(by_index.items()))


def _collect(structure: Any, values: Any, argument: str, path: str, by_index: dict[int, Any]) -> None:
    structures = children(structure)
    if structures is None:
        by_index[structure] = values
        return
    name = f"{argument} at '{path}'" if path else argument
    if isinstance(structure, Mapping):
        _check_keys(structure, values, name)
        keys: Sequence[Any] = sorted(structure)
        entries = [values[key] for key in keys]
    else:
        _check_sequence(structure, values, name)
        keys, entries = range(len(structures)), list(values)
    for key, child, value in zip(keys, structures, entries, strict=True):
        _collect(child, value, argument, f"{path}/{key}" if path else str(key), by_index)


def _check_keys(structure: Mapping[Any, Any], values: Any, name: str) -> None:
    if isinstance(values, Mapping) and set(values) == set(structure):
        return
    problem = f"{name}: expected a mapping with the features' keys ({', '.join(map(str, structure))}), got"
    if not isinstance(values, Mapping):
        raise UsageTypeError(f"{problem} {type(values).__name__}")
    raise UsageError(f"{problem} keys {', '.join(map(str, values))}")


def _check_sequence(structure: Sequence[Any], values: Any, name: str) -> None:
    """Raise unless lists match lists and tuples match tuples, as in tf.nest; named tuples need the same fields."""
    got, nesting = type(values).__name__, f"of {len(structure)}, nested like the features"
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise UsageTypeError(f"{name}: expected a sequence {nesting}, got {got}")
    kind = tuple if isinstance(structure, tuple) else list
    fields = getattr(structure, "_fields", None)
    if not isinstance(values, kind) or getattr(values, "_fields", None) != fields:
        expected = f"a named tuple ({', '.join(fields)})" if fields else f"a {kind.__name__}"
        raise UsageTypeError(f"{name}: expected {expected} {nesting}, got a {got}")
    if len(values) != len(structure):
        raise UsageError(f"{name}: expected {len(structure)} entries, nested like the features, got {len(values)}")
