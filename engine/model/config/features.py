"""The feature side of ``tf.tpu.experimental.embedding``: FeatureConfig, nested structures of it, and their shapes.

Constructors check the values that a user writes in Python as TensorFlow does. build_features.py converts them to a
proto; this module does not depend on protos or files.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, ValuesView
from dataclasses import dataclass, field
from typing import Any

from penstock.base.errors import ConfigError
from penstock.model.config.tables import TableConfig

Shape = tuple[int | None, ...]
"""A shape of known rank; a dim that is not known is None. A shape of unknown rank is None itself."""


@dataclass(eq=False)
class FeatureConfig:
    """One input feature. Equality is identity: two instances with the same content are two features.

    Parameters
    ----------
    table : TableConfig
        The table that it looks rows up in; several features may share one.
    max_sequence_length : int
        0 combines the ids of an example; a larger value keeps a sequence of at most that length.
    validate_weights_and_indices : bool
        Accepted as in TensorFlow; ids are always validated here.
    output_shape : int, sequence of int or None
        The shape of its activation without the last axis (the table's dim), an int for one axis. None: the batch size
        or the input shape determines it.
    name : str or None
        Its name in errors and example streams; None: its key path in the structure of features.

    Raises
    ------
    ConfigError
        If an argument is invalid.

    References
    ----------
    ``tf.tpu.experimental.embedding.FeatureConfig``

    Examples
    --------
    >>> import penstock as ps
    >>> item = ps.TableConfig(5_000, 16, name="item")
    >>> features = {"clicked": ps.FeatureConfig(item), "bought": ps.FeatureConfig(item, max_sequence_length=5)}
    >>> config = ps.EmbeddingConfig.from_features(features, batch_size=32, optimizer=ps.SGD(0.1))
    >>> [(feature.path, feature.input_shape) for feature in config.features]
    [('bought', (32, 5)), ('clicked', (32,))]
    """

    table: TableConfig
    max_sequence_length: int = 0
    validate_weights_and_indices: bool = field(default=True, repr=False)
    output_shape: Any = None
    name: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.table, TableConfig):
            raise ConfigError(f"table must be a TableConfig, got {self.table!r}")
        if not isinstance(self.max_sequence_length, int) or self.max_sequence_length < 0:
            raise ConfigError(f"max_sequence_length must be an int of at least 0, got {self.max_sequence_length!r}")
        self.output_shape = shape_of(self.output_shape)  # TensorFlow's order: its TypeError precedes the next error
        if not isinstance(self.validate_weights_and_indices, bool):
            got = self.validate_weights_and_indices
            raise ConfigError(f"validate_weights_and_indices must be a bool, got {got!r}")


def shape_of(shape: Any) -> Shape | None:
    """Return a shape as TensorFlow's TensorShape reads it, from None (unknown rank), an int, or ints and None.

    Raise TypeError for another value, ConfigError for a negative dim.
    """
    if shape is None or (hasattr(shape, "rank") and shape.rank is None):
        return None
    try:
        dims = tuple(shape)
    except TypeError:
        dims = (shape,)
    return tuple(_dim(dim, shape) for dim in dims)


def _dim(dim: Any, shape: Any) -> int | None:
    dim = getattr(dim, "value", dim)  # TensorFlow 1 has a class for them
    if dim is None:
        return None
    try:
        number = operator.index(dim)
    except TypeError:
        raise TypeError(f"a shape must be an int or a sequence of ints and None, got {shape!r}") from None
    if number < 0:
        raise ConfigError(f"a shape has no negative dims, got {shape!r}")
    return number


def children(structure: Any) -> list[Any] | None:
    """Return the children of a nested structure in TensorFlow's order (dictionaries by sorted key), None for a leaf."""
    if isinstance(structure, Mapping):
        return [structure[key] for key in sorted(structure)]
    if isinstance(structure, Sequence | ValuesView) and not isinstance(structure, str | bytes):
        return list(structure)
    return None


def flatten(structure: Any) -> list[Any]:
    """Return the leaves of a nested structure in the order of tf.nest.flatten."""
    inside = children(structure)
    return [structure] if inside is None else [leaf for child in inside for leaf in flatten(child)]


def key_paths(structure: Any) -> list[str]:
    """Return every leaf's path in the order of ``flatten``: keys and indices joined by '/', such as 'user/clicks/0'."""
    inside = children(structure)
    if inside is None:
        return [""]
    keys = sorted(structure) if isinstance(structure, Mapping) else getattr(structure, "_fields", range(len(inside)))
    pairs = zip(keys, inside, strict=True)
    return [f"{key}/{path}" if path else str(key) for key, child in pairs for path in key_paths(child)]


def feature_paths(structure: Any, names: Sequence[str | None]) -> list[str]:
    """Return the path of every feature, used in messages, columns and mappings: its name if unique, else its key path.

    structure : of the features, or of their indices
    names : of every feature

    Paths are unique: the feature's index follows a key path that is another feature's name or occurs twice ('user#1').
    """
    taken = {name for name, times in Counter(names).items() if name and times == 1}
    paths = []
    for index, (path, name) in enumerate(zip(key_paths(structure), names, strict=True)):
        if not name or name not in taken:
            name = path or "0"
            name = f"{name}#{index}" if name in taken else name
            taken.add(name)
        paths.append(name)
    return paths


def flatten_like(structure: Any, values: Any) -> list[Any]:
    """Return the ``values`` at the leaves of ``structure``; a value may be a sequence itself (a shape).

    Raise ConfigError if they are not nested alike.
    """
    inside = children(structure)
    if inside is None:
        return [values]
    entries = children(values)
    if entries is None or len(entries) != len(inside):
        raise ConfigError(
            f"per_replica_input_shapes must be nested like the features: expected {len(inside)} entries, got {values!r}"
        )
    return [leaf for child, value in zip(inside, entries, strict=True) for leaf in flatten_like(child, value)]


def pack(structure: Any, leaves: Iterable[Any]) -> Any:
    """Return ``leaves``, in the order of ``flatten``, nested like ``structure``."""
    inside, remaining = children(structure), iter(leaves)
    if inside is None:
        return next(remaining)
    packed = [pack(child, remaining) for child in inside]
    if isinstance(structure, Mapping):
        by_key = dict(zip(sorted(structure), packed, strict=True))
        return {key: by_key[key] for key in structure}
    if isinstance(structure, tuple):
        return type(structure)(*packed) if hasattr(structure, "_fields") else tuple(packed)
    return packed


def output_shapes(
    structure: Any, features: Sequence[FeatureConfig], batch_size: int | None, input_shapes: Any
) -> list[Shape]:
    """Return the shape of every feature's activation without the table's dim, as TensorFlow's TPUEmbedding.build does.

    batch_size : per replica
    input_shapes : nested like the features; takes precedence over batch_size

    Raise ConfigError for a shape that is not fully known, or an output_shape that disagrees with the input.
    """
    if input_shapes is not None and isinstance(input_shapes, int):
        batch_size, input_shapes = input_shapes, None
    incoming: list[Shape | None] = [None] * len(features)
    if input_shapes is not None:
        shapes = [shape_of(shape) for shape in flatten_like(structure, input_shapes)]
        incoming = [_from_input(feature, shape) for feature, shape in zip(features, shapes, strict=True)]
    elif batch_size:
        incoming = [_from_batch(feature, _dim(batch_size, batch_size)) for feature in features]
    paths = feature_paths(structure, [feature.name for feature in features])
    return [_checked(path, feature, shape) for path, feature, shape in zip(paths, features, incoming, strict=True)]


def _from_batch(feature: FeatureConfig, batch_size: int | None) -> Shape:
    if feature.output_shape is None and feature.max_sequence_length > 0:
        return (batch_size, feature.max_sequence_length)
    return (batch_size,)


def _from_input(feature: FeatureConfig, shape: Shape | None) -> Shape:
    """Drop the axis that is combined; for a matrix of ids of a sequence feature, set it to max_sequence_length."""
    if not shape:
        raise ConfigError(f"an input shape needs at least one axis, got {shape}")
    sequence = feature.max_sequence_length > 0 and feature.output_shape is None
    if len(shape) == 2 and shape[-1] != 1 and sequence:
        return (shape[0], feature.max_sequence_length)
    return shape if len(shape) == 1 else shape[:-1]


def _checked(path: str, feature: FeatureConfig, incoming: Shape | None) -> Shape:
    name = f"feature '{path}'"
    own = feature.output_shape
    if own is not None and incoming is not None and not _agree(own, incoming):
        raise ConfigError(f"{name}: output_shape is {list(own)}, but its input gives {list(incoming)}")
    shape = incoming if own is None else own
    if shape is None or None in shape:
        raise ConfigError(
            f"{name}: its shape is not fully known ({'unknown' if shape is None else list(shape)}); give batch_size, "
            "per_replica_input_shapes, or an output_shape without None"
        )
    return shape


def _agree(own: Shape, incoming: Shape) -> bool:
    # A batch size, with or without a sequence axis, does not constrain an output_shape of higher rank.
    if len(incoming) in (1, 2) and len(own) > len(incoming):
        return True
    return len(own) == len(incoming) and all(a == b for a, b in zip(own, incoming, strict=True) if a and b)
