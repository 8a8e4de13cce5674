"""Nested features: dictionaries, lists and tuples with a feature at every leaf.

The configuration's nesting decides what is a leaf, so a leaf may itself be a list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config.embedding import EmbeddingConfig
from penstock.config.features import children
from penstock.config.specs import FeatureSpec
from penstock.errors import ConfigError, UsageError, UsageTypeError


def name_of(config: EmbeddingConfig, index: int) -> str:
    """Return a feature's name in messages: ``feature 'user/clicks'``."""
    return f"feature '{config.features[index].path}'"


def features_of(config: EmbeddingConfig) -> tuple[FeatureSpec, ...]:
    """Return the features of a configuration. Raises ConfigError if it has none."""
    if not config.features:
        raise ConfigError(
            "the configuration has no features: make it with EmbeddingConfig.from_features, or add feature_descriptor "
            "to the file"
        )
    return config.features


def structure_for(config: EmbeddingConfig, values: Any) -> Any:
    """Return the nesting required of ``values``, with feature indices at its leaves.

    It is the configuration's nesting, or, if that is flat and ``values`` is a mapping, a mapping by unique names.
    """
    features = features_of(config)
    structure = config.feature_structure
    names = [feature.name for feature in features]
    flat = isinstance(structure, list) and structure == list(range(len(features)))
    if flat and isinstance(values, Mapping) and all(names) and len(set(names)) == len(names):
        return {name: index for index, name in enumerate(names)}
    return structure


def leaves(structure: Any, values: Any, argument: str) -> dict[int, Any]:
    """Return feature index → its entry in ``values``, which must be nested like ``structure``; UsageError if not."""
    by_index: dict[int, Any] = {}
    _collect(structure, values, argument, "", by_index)
    return dict(sorted(by_index.items()))


def _collect(structure: Any, values: Any, argument: str, path: str, by_index: dict[int, Any]) -> None:
    inside = children(structure)
    if inside is None:
        by_index[structure] = values
        return
    name = f"{argument} at '{path}'" if path else argument
    if isinstance(structure, Mapping):
        _check_keys(structure, values, name)
        keys: Sequence[Any] = sorted(structure)
        entries = [values[key] for key in keys]
    else:
        _check_sequence(structure, values, name)
        keys, entries = range(len(inside)), list(values)
    for key, child, value in zip(keys, inside, entries, strict=True):
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
    got, nested = type(values).__name__, f"of {len(structure)}, nested like the features"
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise UsageTypeError(f"{name}: expected a sequence {nested}, got {got}")
    kind = tuple if isinstance(structure, tuple) else list
    fields = getattr(structure, "_fields", None)
    if not isinstance(values, kind) or getattr(values, "_fields", None) != fields:
        named = f"a named tuple ({', '.join(fields)})" if fields else f"a {kind.__name__}"
        raise UsageTypeError(f"{name}: expected {named} {nested}, got a {got}")
    if len(values) != len(structure):
        raise UsageError(f"{name}: expected {len(structure)} entries, nested like the features, got {len(values)}")
