"""Lookups as coordinates, in any order of samples, as in TensorFlow's enqueue ops and sparse tensors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from penstock.api.activations.batch_shape import check_num_samples
from penstock.base.array_conversion import as_array
from penstock.base.errors import InputError, UsageError
from penstock.model.config.id_ranges import exact_integers
from penstock.model.frames import Array, Int64


class CooIds(NamedTuple):
    """One feature's ids for one batch, each with the sample that looks it up.

    Parameters
    ----------
    rows : array_like of int, shape (n,) or (n, k)
        In any order. Of shape (n,): the sample of each id, counted over the feature's input shape (for a sequence,
        without its last axis). Of shape (n, k): an index into the samples, then a position, as in SparseTensor.indices.
    ids : array_like of int, shape (n,)
        The ids.
    weights : array_like of float, shape (n,), or None
        The weight of each id.

    Notes
    -----
    The ids of a sample are ordered by position, else as given. In a sequence each id is at its position, or without
    positions at the next free one.

    References
    ----------
    ``tf.SparseTensor`` and TensorFlow's enqueue operations

    Examples
    --------
    >>> import penstock as ps
    >>> item = ps.TableConfig(8, 2, ps.RowIdInitializer(), ps.SGD(0.5), combiner="sum", name="item")
    >>> config = ps.EmbeddingConfig.from_features({"clicked": ps.FeatureConfig(item)}, batch_size=3)
    >>> activations, _ = ps.Engine(config).recv_activations({"clicked": ps.CooIds(rows=[2, 0, 0], ids=[7, 3, 1])})
    >>> activations["clicked"]
    array([[4., 4.],
           [0., 0.],
           [7., 7.]], dtype=float32)
    """

    rows: Any
    ids: Any
    weights: Any = None


class PlacedIds(NamedTuple):
    """Ids in the order of their samples, then of their positions.

    ids : shape (n,), any dtype; samples : int64, shape (n,), ascending; positions : int64, shape (n,), from 0;
    weights : shape (n,), any dtype, or None
    """

    ids: Array
    samples: Int64
    positions: Int64
    weights: Array | None


def is_coo(batch: Any) -> bool:
    """Return whether the value is CooIds or has a SparseTensor's attributes."""
    return isinstance(batch, CooIds) or (hasattr(batch, "indices") and hasattr(batch, "dense_shape"))


def by_sample(batch: Any, weights: Any, name: str, shape: tuple[int, ...]) -> PlacedIds:
    """Return coordinates in the order of their samples.

    batch : a value that ``is_coo``; name : for messages; shape : of the samples
    weights : given in addition to the ids, as an array (n,) or as coordinates; or None
    Raises UsageError, InputError.
    """
    coo = _as_coo(batch, name, "ids", shape)
    ids, rows = numbers_of(coo.ids, name).reshape(-1), array_of(coo.rows, name)
    samples, positions = _indices(rows, len(ids), name, shape)
    if weights is not None and coo.weights is not None:
        raise UsageError(f"{name}: weights are given twice, with the ids and as an argument")
    by = coo.weights if weights is None else weights
    if is_coo(by):
        by = _as_coo(by, name, "weights", shape)
        if not np.array_equal(array_of(by.rows, name), rows):
            raise UsageError(f"{name}: the weights are of other indices than the ids; give both in the same order")
        by = by.ids
    values = None if by is None else array_of(by, name).reshape(-1)
    if values is not None and len(values) != len(ids):
        raise UsageError(f"{name}: {len(ids)} ids and {len(values)} weights")
    order = np.argsort(samples, kind="stable") if positions is None else np.lexsort((positions, samples))
    samples = samples[order]
    placed = indices_in_lists(np.bincount(samples)) if positions is None else positions[order]
    return PlacedIds(ids[order], samples, placed, None if values is None else values[order])


def array_of(values: Any, name: str) -> Array:
    """Return values as an array. Raises UsageError. name : of the feature, for the message"""
    return as_array(values, name, UsageError)


def numbers_of(values: Any, name: str) -> Array:
    """Return numbers as an array; integers that NumPy would round, because some exceed int64, as Python's."""
    array = array_of(values, name)
    if array.dtype == np.float64 and array.size and isinstance(values, list | tuple):
        exact = exact_integers(values, array)
        return array if exact is None else exact
    return array


def indices_in_lists(lengths: Int64) -> Int64:
    """Return the index of each entry in its list: 0, 1, … per list, int64. lengths : int64, shape (lists,)"""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _as_coo(batch: Any, name: str, role: str, shape: tuple[int, ...]) -> CooIds:
    """Return CooIds unchanged, or those of a SparseTensor, whose dense_shape must match the batch."""
    if isinstance(batch, CooIds):
        return batch
    dense = tuple(array_of(batch.dense_shape, name).tolist())
    check_num_samples(math.prod(dense[:-1]), math.prod(shape), name, role)
    if len(dense) not in (2, len(shape) + 1) or (len(dense) > 2 and dense[:-1] != shape):
        expected = f"{[*shape, 'k']}".replace("'", "")
        raise UsageError(f"{name}: expected {role} of dense_shape {expected}, got {list(dense)}")
    return CooIds(batch.indices, batch.values)


def _indices(rows: Array, number: int, name: str, shape: tuple[int, ...]) -> tuple[Int64, Int64 | None]:
    """Return the sample of every lookup, int64 (n,), and its position, int64 (n,), or None without positions."""
    if not np.issubdtype(rows.dtype, np.integer) and rows.size:
        raise UsageError(f"{name}: expected integers as rows, got {rows.dtype}")
    sizes: tuple[int, ...] = (math.prod(shape),)
    flat = rows.ndim == 1
    index = rows.reshape(-1, 1) if flat else rows
    if len(rows) != number or rows.ndim > 2 or (not flat and rows.shape[1] not in (2, len(shape) + 1)):
        expected = f"[{number}], or [{number}, {len(shape) + 1}] with a position at the end"
        raise UsageError(f"{name}: expected rows of shape {expected}, got {list(rows.shape)}")
    positions = None
    if not flat:
        sizes = shape if rows.shape[1] == len(shape) + 1 else sizes
        index, positions = rows[:, :-1], rows[:, -1].astype(np.int64)
        if len(positions) and positions.min() < 0:
            raise InputError(f"{name}: expected positions of at least 0, got {positions.min()}")
    bad = ((index < 0) | (index >= np.array(sizes))).any(axis=1)
    if bad.any():
        raise InputError(f"{name}: expected rows below {list(sizes)}, got {index[bad][0].tolist()}")
    return np.ravel_multi_index(tuple(index.T.astype(np.int64)), sizes), positions
