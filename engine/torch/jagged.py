"""Jagged features in and out: torchrec's KeyedJaggedTensor by its attributes, or a dict; results as torchrec's.

torchrec is not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from penstock.errors import UsageError, UsageTypeError, listed


class Jagged(NamedTuple):
    """One feature of a batch. values : (n,); offsets : (batch + 1,), on the CPU; weights : (n,) or None"""

    values: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None


def jagged_features(features: Any, names: Iterable[str]) -> dict[str, Jagged]:
    """Return the named features. Raises UsageError if one is missing or its offsets do not fit its values."""
    if isinstance(features, Mapping):
        jagged = {name: _of_pair(name, features[name]) for name in names if name in features}
    elif hasattr(features, "keys") and hasattr(features, "values"):
        jagged = _of_keyed(features)
    else:
        raise UsageTypeError(
            "features: expected a KeyedJaggedTensor, or a dict of name → (values, offsets), got "
            f"{type(features).__name__}"
        )
    for name in names:
        if name not in jagged:
            raise UsageError(f"features: no '{name}'; got {', '.join(jagged) or 'none'}")
    return jagged


def _of_pair(name: str, pair: Any) -> Jagged:
    if not isinstance(pair, tuple | list) or len(pair) not in (2, 3):
        raise UsageTypeError(f"feature '{name}': expected (values, offsets) or (values, offsets, weights)")
    values, offsets, weights = (*pair, None)[:3]
    if not isinstance(values, torch.Tensor) or values.dim() != 1:
        raise UsageTypeError(f"feature '{name}': expected values of shape (n,), a Tensor")
    expected = f"feature '{name}': expected integer offsets of shape (batch + 1,), as with include_last_offset=True,"
    return Jagged(values, _checked_offsets(expected, torch.as_tensor(offsets), len(values)), weights)


def _checked_offsets(expected: str, offsets: torch.Tensor, count: int) -> torch.Tensor:
    """Return offsets on the CPU as int64. expected : begins the text of a UsageError; count : of the values"""
    problem = ""
    if offsets.dim() != 1 or not len(offsets):
        problem = f"shape {tuple(offsets.shape)}"
    elif offsets.is_floating_point() or offsets.is_complex() or offsets.dtype == torch.bool:
        problem = str(offsets.dtype)
    else:
        offsets = offsets.to("cpu", torch.int64)
        if offsets[0] != 0 or offsets[-1] != count:
            problem = f"{int(offsets[0])} to {int(offsets[-1])}"
        elif (offsets.diff() < 0).any():
            index = int((offsets.diff() < 0).nonzero()[0])
            problem = f"{int(offsets[index + 1])} after {int(offsets[index])}"
    if problem:
        raise UsageError(f"{expected} that ascend from 0 to {count}, the number of values; got {problem}")
    return offsets


def _of_keyed(features: Any) -> dict[str, Jagged]:
    """Return the features of a KeyedJaggedTensor: each has the same number of samples."""
    if getattr(features, "variable_stride_per_key", lambda: False)():
        raise UsageError("features: every key of the KeyedJaggedTensor needs the same number of samples")
    keys, values = list(features.keys()), features.values()
    weights = features.weights_or_none()
    if hasattr(features, "offsets"):
        offsets = features.offsets()
    else:
        lengths = features.lengths().to("cpu", torch.int64)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    offsets = _checked_offsets("features: expected integer lengths, with offsets", offsets, len(values))
    stride, rest = divmod(len(offsets) - 1, max(len(keys), 1))
    if rest:
        raise UsageError(
            f"features: expected the same number of samples for each of {len(keys)} keys, got {len(offsets) - 1} "
            "lengths in all"
        )
    jagged = {}
    for number, key in enumerate(keys):
        part = offsets[number * stride : (number + 1) * stride + 1]
        begin, end = int(part[0]), int(part[-1])
        jagged[key] = Jagged(values[begin:end], part - begin, None if weights is None else weights[begin:end])
    return jagged


class KeyedTensor:
    """Pooled embeddings by feature, as torchrec's class of this name.

    Parameters
    ----------
    keys : sequence of str
        The features.
    tensors : sequence of Tensor
        Of each feature: shape (batch, dim).
    """

    def __init__(self, keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = dict(zip(keys, tensors, strict=True))

    def keys(self) -> list[str]:
        """Return the features."""
        return list(self._tensors)

    def values(self) -> torch.Tensor:
        """Return all embeddings, shape (batch, sum of dims)."""
        return torch.cat(list(self._tensors.values()), dim=1)

    def length_per_key(self) -> list[int]:
        """Return the dim of every feature."""
        return [tensor.shape[1] for tensor in self._tensors.values()]

    def offset_per_key(self) -> list[int]:
        """Return the first column of every feature in ``values``, and the number of columns."""
        return list(accumulate(self.length_per_key(), initial=0))

    def to_dict(self) -> dict[str, torch.Tensor]:
        """Return feature → embeddings, shape (batch, dim)."""
        return dict(self._tensors)

    def __getitem__(self, key: str) -> torch.Tensor:
        if key not in self._tensors:
            raise KeyError(f"no feature '{key}'; expected one of {listed(self._tensors)}")
        return self._tensors[key]

    def __repr__(self) -> str:
        return f"KeyedTensor({ {key: tuple(tensor.shape) for key, tensor in self._tensors.items()} })"


class JaggedTensor:
    """The embeddings of one feature's ids, as torchrec's class of this name.

    Parameters
    ----------
    values : Tensor
        Shape (n, dim).
    offsets : Tensor
        int64, shape (batch + 1,): where the rows of every sample begin.
    """

    def __init__(self, values: torch.Tensor, offsets: torch.Tensor) -> None:
        self._values, self._offsets = values, offsets

    def values(self) -> torch.Tensor:
        """Return the embeddings of all samples, shape (n, dim)."""
        return self._values

    def offsets(self) -> torch.Tensor:
        """Return where the rows of every sample begin, shape (batch + 1,)."""
        return self._offsets

    def lengths(self) -> torch.Tensor:
        """Return the number of ids of every sample, shape (batch,)."""
        return self._offsets.diff()

    def to_dense(self) -> list[torch.Tensor]:
        """Return the embeddings of every sample, shape (length, dim)."""
        return list(self._values.split(self.lengths().tolist()))

    def __repr__(self) -> str:
        return f"JaggedTensor({tuple(self._values.shape)}, {len(self._offsets) - 1} samples)"
