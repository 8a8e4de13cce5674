"""Deduplication data: the unique rows of a forward pass and their uses, for routing gradients back to the rows.

It exists as a typed value and in the form of TensorFlow's ops: a vector of integers, one of floats, and a mask that
describes how to separate their elements (SplitDedupData, MergeDedupData). docs/activations.md documents every element.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.api.activations.batch_shape import num_samples
from penstock.api.activations.nesting import name_of
from penstock.base.array_conversion import as_array
from penstock.base.errors import InputError, StateError, UsageError
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.features import children
from penstock.model.config.id_ranges import ANY_INT64, ANY_UINT64, expected, outside
from penstock.model.frames import Array, Float32, Int64, UInt32

Packed = tuple[Array, Float32, npt.NDArray[np.int32]]
INTEGER, FLOAT = 0, 1  # an element's type in the mask
_FINGERPRINT_WORDS = 8
_HEADER_WORDS = _FINGERPRINT_WORDS + 4  # then step and number, two words each


@dataclass(frozen=True)
class FeatureUses:
    """The lookups of one feature, as indices into the unique rows of its table.

    rows : uint32, shape (n,), index into the table's unique ids; samples : uint32, shape (n,), ascending
    gains : float32, shape (n,), the factor of each row; None: all 1
    truncated : number of ids dropped because they were beyond the sequence length
    """

    rows: UInt32
    samples: UInt32
    gains: Float32 | None
    truncated: int = 0


class UsesByPath(Mapping[str, FeatureUses]):
    """A mapping from a feature's path (``FeatureSpec.path``) to its uses, in the configuration's order.

    If the features are one flat list or tuple, positions (0, 1, …) work, too. A dictionary's order of features may
    differ from the one it is written in, so it has no positions.
    """

    def __init__(self, config: EmbeddingConfig, uses: Sequence[FeatureUses]) -> None:
        self._uses = {feature.path: feature_uses for feature, feature_uses in zip(config.features, uses, strict=True)}
        structure = config.feature_structure
        self._flat = not isinstance(structure, Mapping) and children(structure) in (None, list(range(len(uses))))

    def __getitem__(self, path: str | int) -> FeatureUses:
        paths = list(self._uses)
        if isinstance(path, int | np.integer) and self._flat and 0 <= path < len(paths):
            path = paths[path]
        feature_uses = self._uses.get(path) if isinstance(path, str) else None
        if feature_uses is None:
            raise UsageError(f"no feature {path!r}; ask by name or key path: {', '.join(map(repr, paths))}")
        return feature_uses

    def get(self, path: str, default: Any = None) -> Any:
        return self._uses.get(path, default)

    def __contains__(self, path: object) -> bool:
        return path in self._uses

    def __iter__(self) -> Iterator[str]:
        return iter(self._uses)

    def __len__(self) -> int:
        return len(self._uses)

    def __repr__(self) -> str:
        return f"UsesByPath({', '.join(f'{path!r}: {len(uses.rows)} lookups' for path, uses in self._uses.items())})"


@dataclass(frozen=True)
class DeduplicationData:
    """The lookups of ``recv_activations``, for ``send_gradients`` of the same step.

    Attributes
    ----------
    fingerprint : str
        Digest of the configuration.
    step : int
        The global step of the rows.
    number : int
        Number of the receive.
    unique_ids : mapping of str to numpy.ndarray
        By table: int64, shape (n,), ascending.
    features : mapping of str to FeatureUses
        By path, in the configuration's order.

    References
    ----------
    TensorFlow's ``XlaRecvTPUEmbeddingDeduplicationData``

    Examples
    --------
    >>> import penstock as ps
    >>> item = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), combiner="sum", name="item")
    >>> config = ps.EmbeddingConfig.from_features({"clicked": ps.FeatureConfig(item)}, batch_size=3)
    >>> _, dedup = ps.Engine(config).recv_activations({"clicked": [[7, 3], [], [7]]})
    >>> dedup.unique_ids["item"], dedup.features["clicked"].samples
    (array([3, 7]), array([0, 0, 2], dtype=uint32))
    """

    fingerprint: str
    step: int
    number: int
    unique_ids: Mapping[str, Int64]
    features: Mapping[str, FeatureUses]

    @property
    def truncated(self) -> int:
        """Number of ids dropped beyond sequence lengths, over all features."""
        return sum(uses.truncated for uses in self.features.values())

    def ids(self, feature: Any, table: str) -> Int64:
        """Return the ids that a feature looked up, in order.

        Parameters
        ----------
        feature : str or int
            As in ``features``.
        table : str
            The feature's table.

        Returns
        -------
        numpy.ndarray
            int64, shape (n,).

        Examples
        --------
        >>> import penstock as ps
        >>> item = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), combiner="sum", name="item")
        >>> config = ps.EmbeddingConfig.from_features({"clicked": ps.FeatureConfig(item)}, batch_size=3)
        >>> _, dedup = ps.Engine(config).recv_activations({"clicked": [[7, 3], [], [7]]})
        >>> dedup.ids("clicked", "item")
        array([7, 3, 7])
        """
        return self.unique_ids[table][self.features[feature].rows]

    def pack(self) -> Packed:
        """Return the data in the form of TensorFlow's operations.

        Returns
        -------
        integers : numpy.ndarray
            uint32, or uint64 if an id needs it, shape (n,).
        floats : numpy.ndarray
            float32, shape (m,).
        mask : numpy.ndarray
            int32, shape (elements, 2).

        References
        ----------
        TensorFlow's ``XlaRecvTPUEmbeddingDeduplicationData`` and ``SplitDedupData``

        Examples
        --------
        >>> import penstock as ps
        >>> item = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), combiner="sum", name="item")
        >>> config = ps.EmbeddingConfig.from_features({"clicked": ps.FeatureConfig(item)}, batch_size=3)
        >>> _, dedup = ps.Engine(config).recv_activations({"clicked": [[7, 3], [], [7]]})
        >>> integers, floats, mask = dedup.pack()
        >>> ps.DeduplicationData.unpack(config, integers, floats, mask).ids("clicked", "item")
        array([7, 3, 7])
        """
        return split(list(self._elements()))

    @classmethod
    def unpack(cls, config: EmbeddingConfig, integers: Any, floats: Any, mask: Any) -> DeduplicationData:
        """Rebuild the value from ``pack``'s result.

        Parameters
        ----------
        config : EmbeddingConfig
            That of the engine that received the activations.
        integers, floats, mask : numpy.ndarray
            What ``pack`` returned.

        Returns
        -------
        DeduplicationData

        Raises
        ------
        StateError
            For another configuration's data.
        InputError
            For damaged data.
        """
        elements = merge(integers, floats, mask)
        tables, features = config.table_names, config.features
        expected = len(tables) + 3 * len(features) + 2
        header = elements[-2] if len(elements) == expected else np.zeros(0, np.uint32)
        if len(header) != _HEADER_WORDS + len(features):
            raise InputError(
                f"deduplication data of {len(tables)} tables and {len(features)} features has {expected} elements and "
                f"ends in a header; got {len(elements)} elements, which are not of this configuration"
            )
        words = header.astype(np.uint32)
        check_fingerprint(fingerprint(config), words[:_FINGERPRINT_WORDS].tobytes().hex())
        step, number = (int(value) for value in words[_FINGERPRINT_WORDS:_HEADER_WORDS].view(np.int64))
        unique = {name: ids.astype(np.int64) for name, ids in zip(tables, elements, strict=False)}
        for name, ids in unique.items():
            check_unique_ids(name, ids, config.id_ranges[name][0])
        uses = []
        for index, feature in enumerate(features):
            rows, samples, gains = elements[len(tables) + 3 * index :][:3]
            room = len(unique[feature.table])
            factors = gains.astype(np.float32) if len(gains) else None
            check_uses(name_of(config, index), rows, samples, factors, room, num_samples(feature))
            truncated = int(words[_HEADER_WORDS + index])
            uses.append(FeatureUses(rows.astype(np.uint32), samples.astype(np.uint32), factors, truncated))
        return cls(words[:_FINGERPRINT_WORDS].tobytes().hex(), step, number, unique, UsesByPath(config, uses))

    def _elements(self) -> Iterator[Array]:
        yield from self.unique_ids.values()
        for uses in self.features.values():
            yield uses.rows
            yield uses.samples
            yield np.zeros(0, np.float32) if uses.gains is None else uses.gains
        numbers = np.array([self.step, self.number], np.int64).view(np.uint32)
        truncated = np.array([uses.truncated for uses in self.features.values()], np.uint32)
        yield np.concatenate([np.frombuffer(bytes.fromhex(self.fingerprint), np.uint32), numbers, truncated])
        # TensorFlow refuses even an empty slice at a vector's end, so the last element of both vectors is not empty.
        yield np.ones(1, np.float32)


def fingerprint(config: EmbeddingConfig) -> str:
    """Return the SHA-256 (hex) of the configuration's protobuf message."""
    return hashlib.sha256(config.to_engine_proto().SerializeToString(deterministic=True)).hexdigest()


def check_fingerprint(expected: str, actual: str) -> None:
    """Raise StateError if the fingerprints differ."""
    if actual != expected:
        raise StateError(
            f"the deduplication data is of another configuration ({actual[:12]}…, this engine's is {expected[:12]}…); "
            "send gradients to the engine that gave the activations"
        )


def split(elements: Sequence[Array]) -> Packed:
    """Return rank-1 arrays as two vectors and a mask, as TensorFlow's SplitDedupData does."""
    integers = [e for e in elements if e.dtype.kind in "iu"]
    floats = [e for e in elements if e.dtype.kind == "f"]
    small = all(int(e.min()) >= 0 and int(e.max()) < 1 << 32 for e in integers if e.size)
    kind = np.uint32 if small else np.uint64  # the keys of a dynamic table may be negative, and are taken by their bits
    mask = np.array([(INTEGER if e.dtype.kind in "iu" else FLOAT, len(e)) for e in elements], np.int32).reshape(-1, 2)
    return (
        np.concatenate([np.zeros(0, kind), *(e.astype(kind) for e in integers)]),
        np.concatenate([np.zeros(0, np.float32), *floats]).astype(np.float32),
        mask,
    )


def merge(integers: Any, floats: Any, mask: Any) -> list[Array]:
    """Return the arrays of ``split``, as TensorFlow's MergeDedupData does, with its checks. Raises InputError."""
    *vectors, mask = (as_array(part, "deduplication data", InputError) for part in (integers, floats, mask))
    for name, vector, kinds in (("integers", vectors[0], "iu"), ("floats", vectors[1], "f")):
        if vector.ndim != 1 or (vector.dtype.kind not in kinds and vector.dtype.name != "bfloat16"):
            raise InputError(f"deduplication data: expected a vector of {name}, got {vector.dtype} {vector.shape}")
    if mask.size and (mask.ndim != 2 or mask.shape[1] != 2 or mask.dtype.kind not in "iu"):
        raise InputError(f"deduplication mask: expected integers of shape (elements, 2), got {mask.shape}")
    offsets, elements = [0, 0], []
    for index, (kind, span) in enumerate(mask.reshape(-1, 2).tolist()):
        if kind not in (INTEGER, FLOAT):
            raise InputError(f"deduplication mask, element {index}: expected type 0 or 1, got {kind}")
        vector, start = vectors[kind], offsets[kind]
        if span < 0 or start >= len(vector) or start + span > len(vector):
            raise InputError(
                f"deduplication mask, element {index}: {span} entries from {start} on, but the vector has {len(vector)}"
            )
        elements.append(vector[start : start + span])
        offsets[kind] += span
    left = [len(vector) - offset for vector, offset in zip(vectors, offsets, strict=True)]
    if any(left):
        raise InputError(f"deduplication mask: {left[0]} integers and {left[1]} floats are left over")
    return elements


def check_uses(name: str, rows: Array, samples: Array, gains: Array | None, num_unique: int, num_samples: int) -> None:
    """Raise InputError if one feature's arrays are inconsistent. Code that sums gradients does not check again.

    num_unique : unique ids of its table; num_samples : rows of its activation
    """
    num_gains = len(rows) if gains is None else len(gains)
    if len(rows) != len(samples) or num_gains != len(rows):
        lengths = f"{len(rows)} rows, {len(samples)} samples, {num_gains} gains"
        raise InputError(f"deduplication data of {name}: expected as many of each, got {lengths}")
    for kind, indices, size, unit in (
        ("row", rows, num_unique, "unique ids"),
        ("sample", samples, num_samples, "samples"),
    ):
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < size:
            wrong = indices[(indices < 0) | (indices >= size)][0]
            raise InputError(f"deduplication data of {name}: {kind} {wrong} of {size} {unit}")


def check_unique_ids(table: str, ids: Array, vocabulary_size: int) -> None:
    """Raise InputError for an id outside the table."""
    bad = outside(ids, ANY_INT64 if vocabulary_size == ANY_UINT64 else vocabulary_size)  # the data holds them by bits
    if bad.any():
        raise InputError(
            f"deduplication data of table '{table}': expected {expected(vocabulary_size)}, got {ids[bad][0]}",
            reason="id_out_of_range",
        )
