"""Lookups as coordinates, in any order of samples: as TensorFlow's enqueue ops and sparse tensors have them."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import InputError, UsageError
from penstock.expand import Int64

Array = npt.NDArray[Any]


class CooIds(NamedTuple):
    """One feature's ids of one batch, each with the sample that looks it up.

    rows : integers, shape (n,), the samples, counted over the feature's input shape (of a sequence: without its last
        axis); or (n, k), an index into the samples and then a position, as SparseTensor.indices has them. In any order:
        the ids of one sample keep theirs, or have that of their positions
    ids : integers, shape (n,); weights : floats, shape (n,), or None
    """

    rows: Any
    ids: Any
    weights: Any = None


def as_coo(given: Any) -> CooIds | None:
    """CooIds of themselves, and of what has a SparseTensor's or a RaggedTensor's attributes; else None."""
    if isinstance(given, CooIds):
        return given
    if hasattr(given, "indices") and hasattr(given, "dense_shape"):
        return CooIds(given.indices, given.values)
    if hasattr(given, "row_splits") and hasattr(given, "flat_values"):
        lengths = np.diff(np.asarray(given.row_splits))
        return CooIds(np.repeat(np.arange(len(lengths)), lengths), given.flat_values)
    return None


def by_sample(coo: CooIds, weights: Any, who: str, shape: tuple[int, ...]) -> tuple[Array, Int64, Array | None]:
    """Flat ids, how many each sample has, and flat weights or None.

    shape : of the samples; weights : those given beside the ids, as an array (n,) or of the ids' own kind
    """
    ids = np.asarray(coo.ids).reshape(-1)
    rows, order = _ordered(np.asarray(coo.rows), len(ids), who, shape)
    if weights is not None and coo.weights is not None:
        raise UsageError(f"{who}: weights are given twice, with the ids and beside them")
    by = coo.weights if weights is None else weights
    other = as_coo(by)
    values = None if by is None else np.asarray(by if other is None else other.ids).reshape(-1)
    if values is not None and len(values) != len(ids):
        raise UsageError(f"{who}: {len(ids)} ids and {len(values)} weights")
    lengths = np.bincount(rows, minlength=math.prod(shape)).astype(np.int64)
    return ids[order], lengths, None if values is None else values[order]


def _ordered(rows: Array, number: int, who: str, shape: tuple[int, ...]) -> tuple[Int64, Int64]:
    """The samples, and an order of the lookups in which they ascend."""
    if not np.issubdtype(rows.dtype, np.integer) and rows.size:
        raise UsageError(f"{who}: expected integers as rows, got {rows.dtype}")
    sizes: tuple[int, ...] = (math.prod(shape),)
    flat = rows.ndim == 1
    index = rows.reshape(-1, 1) if flat else rows
    if len(rows) != number or rows.ndim > 2 or (not flat and rows.shape[1] not in (2, len(shape) + 1)):
        wanted = f"[{number}], or [{number}, {len(shape) + 1}] with a position at the end"
        raise UsageError(f"{who}: expected rows of shape {wanted}, got {list(rows.shape)}")
    if not flat:
        sizes = shape if rows.shape[1] == len(shape) + 1 else sizes
        index = rows[:, :-1]
    bad = ((index < 0) | (index >= np.array(sizes))).any(axis=1)
    if bad.any():
        raise InputError(f"{who}: expected rows below {list(sizes)}, got {index[bad][0].tolist()}")
    samples = np.ravel_multi_index(tuple(index.T.astype(np.int64)), sizes)
    keys = (samples,) if flat else (rows[:, -1], samples)
    return samples, np.lexsort(keys)
