"""Jagged features in and out: torchrec's KeyedJaggedTensor by its attributes, or a dict; results as torchrec's.

torchrec is not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from penstock.base.errors import UsageError, UsageTypeError, listed


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
    return Jagged(values, _checked_offsets(expected, torch.as_tensor(offsets, device="cpu"), len(values)), weights)


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
    """Pooled embeddings by feature, with the methods of torchrec's class of this name that read or move.

    Parameters
    ----------
    keys : sequence of str
        The features.
    tensors : sequence of Tensor
        Embeddings of each feature: shape (batch, dim).
    """

    def __init__(self, keys: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = dict(zip(keys, tensors, strict=True))

    def keys(self) -> list[str]:
        """Return the features."""
        return list(self._tensors)

    def values(self) -> torch.Tensor:
        """Return all embeddings, shape (batch, sum of dims)."""
        return torch.cat(list(self._tensors.values()), dim=1)

    def key_dim(self) -> int:
        """Return the dimension of ``values`` that the features share."""
        return 1

    def device(self) -> torch.device:
        """Return the device of the embeddings."""
        return self.values().device

    def to(self, device: torch.device, non_blocking: bool = False) -> KeyedTensor:
        """Return the embeddings on a device.

        Parameters
        ----------
        device : torch.device
            The device.
        non_blocking : bool
            As in torch.

        Returns
        -------
        KeyedTensor
        """
        moved = [tensor.to(device, non_blocking=non_blocking) for tensor in self._tensors.values()]
        return KeyedTensor(self.keys(), moved)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Record the stream of the embeddings, as torch does.

        Parameters
        ----------
        stream : torch.cuda.Stream
            That uses them.
        """
        for tensor in self._tensors.values():
            tensor.record_stream(stream)

    @staticmethod
    def regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[torch.Tensor]:
        """Return the embeddings of groups of features, each group joined along the dims.

        Parameters
        ----------
        keyed_tensors : sequence of KeyedTensor
            Ours or torchrec's, all of one batch.
        groups : sequence of sequences of str
            The features of every group, in order.

        Returns
        -------
        list of Tensor
            Embeddings of every group: shape (batch, sum of dims).
        """
        tensors = {key: tensor for each in keyed_tensors for key, tensor in each.to_dict().items()}
        for key in (key for group in groups for key in group if key not in tensors):
            raise KeyError(f"no feature '{key}'; expected one of {listed(tensors)}")
        return [torch.cat([tensors[key] for key in group], dim=1) for group in groups]

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Return what ``regroup`` does, by the names of the groups.

        Parameters
        ----------
        keyed_tensors, groups
            As for ``regroup``.
        keys : sequence of str
            The names.

        Returns
        -------
        dict of str to Tensor
        """
        if len(groups) != len(keys):
            raise UsageError("Groups and keys should have same length")
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

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
    """The embeddings of one feature's ids, with the methods of torchrec's class of this name that read or move.

    Parameters
    ----------
    values : Tensor
        Shape (n, dim).
    offsets : Tensor
        int64, shape (batch + 1,): where the rows of every sample begin.
    weights : Tensor or None
        Shape (n,): the ids, if the collection has ``need_indices=True``, as in torchrec.
    """

    def __init__(self, values: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        self._values, self._offsets, self._weights = values, offsets, weights

    def values(self) -> torch.Tensor:
        """Return the embeddings of all samples, shape (n, dim)."""
        return self._values

    def offsets(self) -> torch.Tensor:
        """Return where the rows of every sample begin, shape (batch + 1,)."""
        return self._offsets

    def lengths(self) -> torch.Tensor:
        """Return the number of ids of every sample, shape (batch,)."""
        return self._offsets.diff()

    def offsets_or_none(self) -> torch.Tensor | None:
        """Return ``offsets``."""
        return self._offsets

    def lengths_or_none(self) -> torch.Tensor | None:
        """Return ``lengths``."""
        return self.lengths()

    def weights(self) -> torch.Tensor:
        """Return the weights, shape (n,). Raises UsageError if there are none."""
        if self._weights is None:
            raise UsageError("This (Keyed)JaggedTensor doesn't have weights.")  # torchrec's words
        return self._weights

    def weights_or_none(self) -> torch.Tensor | None:
        """Return the weights, shape (n,); None if there are none."""
        return self._weights

    def device(self) -> torch.device:
        """Return the device of the embeddings."""
        return self._values.device

    def to(self, device: torch.device, non_blocking: bool = False) -> JaggedTensor:
        """Return the embeddings on a device.

        Parameters
        ----------
        device : torch.device
            The device.
        non_blocking : bool
            As in torch.

        Returns
        -------
        JaggedTensor
        """
        parts = self._values, self._offsets, self._weights
        return JaggedTensor(*[None if part is None else part.to(device, non_blocking=non_blocking) for part in parts])

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Record the stream of the tensors, as torch does.

        Parameters
        ----------
        stream : torch.cuda.Stream
            That uses them.
        """
        for part in (self._values, self._offsets, self._weights):
            if part is not None:
                part.record_stream(stream)

    def to_dense(self) -> list[torch.Tensor]:
        """Return the embeddings of every sample, shape (length, dim)."""
        return list(self._values.split(self.lengths().tolist()))

    def to_dense_weights(self) -> list[torch.Tensor] | None:
        """Return the weights of every sample, shape (length,); None if there are none."""
        return None if self._weights is None else list(self._weights.split(self.lengths().tolist()))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> torch.Tensor:
        """Return the embeddings of all samples with one length: longer samples are truncated, shorter ones padded.

        Parameters
        ----------
        desired_length : int or None
            The length; None: that of the longest sample.
        padding_value : float
            The padding.

        Returns
        -------
        Tensor
            Shape (batch, length, dim).
        """
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> torch.Tensor | None:
        """Return the weights of all samples as ``to_padded_dense`` returns embeddings; None if there are none.

        Parameters
        ----------
        desired_length, padding_value
            As for ``to_padded_dense``.

        Returns
        -------
        Tensor or None
            Shape (batch, length).
        """
        return None if self._weights is None else self._padded(self._weights, desired_length, padding_value)

    def _padded(self, tensor: torch.Tensor, length: int | None, padding_value: float) -> torch.Tensor:
        lengths = self.lengths()
        if length is None:
            length = max(lengths.tolist(), default=0)
        places = torch.arange(length, device=lengths.device)
        is_there = places < lengths[:, None]
        padded = tensor.new_full((len(lengths), length, *tensor.shape[1:]), padding_value)
        padded[is_there] = tensor[(self._offsets[:-1, None] + places)[is_there]]
        return padded

    def __repr__(self) -> str:
        return f"JaggedTensor({tuple(self._values.shape)}, {len(self._offsets) - 1} samples)"
