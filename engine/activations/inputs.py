"""Conversion of one feature's input to Lookups: dense, multi-hot and ragged; numpy, jax, Arrow and plain lists.

Every id is checked here, and errors name the feature.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.activations.batch_shape import PAD, check_num_samples, num_samples, positions_of_lists, samples_shape
from penstock.activations.coo import by_sample, is_coo, places
from penstock.config.specs import FeatureSpec
from penstock.errors import InputError, UsageError
from penstock.frames import Float32, Int64
from penstock.tables.combiners import Lookups, gains
from penstock.validation import MASKED, is_masked

Array = npt.NDArray[Any]
DEFAULT_COMBINER = "sum"  # as in TensorFlow's enqueue ops, if the configuration specifies none


def lookups(feature: FeatureSpec, who: str, vocabulary_size: int, given: Any, weights: Any = None) -> Lookups:
    """Return one feature's lookups for one batch.

    who : the feature's name in messages
    given : integers of the feature's input shape, one id per sample; with one more axis, several per sample; or
        ragged: an Arrow list array, a RaggedTensor, or a list with a list or array of ids per sample; or CooIds
    weights : floats, shaped like ``given``
    Raises InputError for bad values, UsageError for wrong types and shapes.
    """
    if is_masked(given) or is_masked(weights):
        raise UsageError(f"{who}: {MASKED}")
    if is_coo(given):
        raw_ids, samples, positions, weights = by_sample(given, weights, who, samples_shape(feature))
        length, lengths = feature.sequence_length, None
    else:
        raw_ids, lengths = _ragged(given, who, "ids", feature)
        length = positions_of_lists(feature, len(lengths), who, "ids")
        samples, positions = np.repeat(np.arange(len(lengths)), lengths), places(lengths)
    ids = _checked_ids(raw_ids, who, vocabulary_size)
    if length:
        if weights is not None:
            raise UsageError(f"{who}: a sequence feature (of {length} positions) takes no weights")
        # Every position is a separate sample; positions beyond the length are dropped.
        kept = positions < length
        return Lookups(ids[kept], (samples * length + positions)[kept], None, int(len(ids) - kept.sum()))
    if weights is not None and lengths is not None:
        weights = _weights(weights, who, feature, lengths)
    by = None if weights is None else _checked_weights(weights, who)
    return Lookups(ids, samples, gains(samples, by, num_samples(feature), feature.combiner or DEFAULT_COMBINER))


def _ragged(given: Any, who: str, what: str, feature: FeatureSpec) -> tuple[Array, Int64]:
    """Return flat values and the number of values of each row, int64."""
    if hasattr(given, "combine_chunks"):  # a pyarrow.ChunkedArray
        given = given.combine_chunks()
    if hasattr(given, "null_count"):
        return _of_arrow(given, who, what, feature)
    if hasattr(given, "row_splits") and hasattr(given, "flat_values"):
        if is_masked([given.row_splits, given.flat_values]):
            raise UsageError(f"{who}: {MASKED}")
        return _of_splits(np.asarray(given.row_splits), np.asarray(given.flat_values), who, what)
    array = _as_array(given)
    if array is None:
        if not hasattr(given, "__iter__"):
            raise UsageError(f"{who}: expected {what} as an array or a list per sample, got {type(given).__name__}")
        values = [_of_sample(row, who, what) for row in _samples(given, samples_shape(feature))]
        full = [row for row in values if row.size]  # an empty list is float64 to numpy
        return (np.concatenate(full) if full else np.zeros(0, np.int64)), _lengths(values)
    return array.reshape(-1), _of_array(array, who, what, samples_shape(feature))


def _samples(given: Any, shape: tuple[int, ...]) -> list[Any]:
    """Return one entry per sample from a flat list, or from lists nested like a ``shape`` of several axes."""
    samples = list(given)
    for axis in range(1, len(shape)):
        whole = all(isinstance(row, list | tuple) or np.ndim(row) for row in samples)
        if len(samples) != math.prod(shape[:axis]) or not whole or any(len(row) != shape[axis] for row in samples):
            break
        samples = [one for row in samples for one in row]
    return samples


def _of_sample(row: Any, who: str, what: str) -> Array:
    try:
        values = np.asarray(row)
    except ValueError:  # lists of different lengths
        values = np.zeros((0, 0))
    if values.ndim > 1:
        raise UsageError(f"{who}: expected {what} of a sample as a flat list, got {row}")
    return values.reshape(-1)


def _of_splits(splits: Array, values: Array, who: str, what: str) -> tuple[Array, Int64]:
    """Return the values and lengths of a RaggedTensor, where sample i has the ids splits[i] to splits[i + 1]."""
    lengths = np.diff(splits).astype(np.int64)
    ends = (0, len(values)) if values.ndim == splits.ndim == 1 else None
    if not len(splits) or (splits[0], splits[-1]) != ends or (lengths < 0).any():
        raise UsageError(f"{who}: expected a RaggedTensor of rank 2, whose row_splits ascend from 0 to its {what}")
    return values, lengths


def _as_array(given: Any) -> Array | None:
    """Return a rectangular array of numbers; None if the input is ragged, as are lists with a list per row."""
    if isinstance(given, list | tuple) and any(np.ndim(row) for row in given if not isinstance(row, list | tuple)):
        return None
    if isinstance(given, list | tuple) and any(isinstance(row, list | tuple) for row in given):
        return None
    array = np.asarray(given)
    return None if array.dtype == object else array


def _of_array(array: Array, who: str, what: str, shape: tuple[int, ...]) -> Int64:
    """Return how many values each sample has, int64."""
    number = math.prod(shape)
    if array.shape == shape or array.shape == (number,):
        return np.ones(number, np.int64)
    if (array.ndim == len(shape) + 1 and array.shape[:-1] == shape) or (array.ndim == 2 and len(array) == number):
        return np.full(number, array.shape[-1], np.int64)
    wanted = f"{list(shape)} or {[*shape, 'k']}".replace("'", "")
    short = array.ndim in (len(shape), len(shape) + 1) and len(array) < shape[0]
    hint = f"; {PAD}" if short else ""
    raise UsageError(f"{who}: expected {what} of shape {wanted}, got {list(array.shape)}{hint}")


def _of_arrow(given: Any, who: str, what: str, feature: FeatureSpec) -> tuple[Array, Int64]:
    """Return the values and lengths of an Arrow list array, or of a flat one with a value per sample.

    A null list counts as an empty one. Raises InputError for null values.
    """
    import pyarrow as pa

    if not (pa.types.is_list(given.type) or pa.types.is_large_list(given.type)):
        if not pa.types.is_fixed_size_list(given.type):
            check_num_samples(len(given), math.prod(samples_shape(feature)), who, what)
            return _without_nulls(given, who, what), np.ones(len(given), np.int64)
        given = given.cast(pa.list_(given.type.value_type))
    lengths = given.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return _without_nulls(given.flatten(), who, what), lengths


def _without_nulls(values: Any, who: str, what: str) -> Array:
    if values.null_count:
        raise InputError(f"{who}: {what} hold {values.null_count} nulls; leave them out")
    found: Array = values.to_numpy(zero_copy_only=False)
    return found


def _lengths(values: list[Array]) -> Int64:
    return np.array([len(row) for row in values], np.int64)


def _checked_ids(ids: Array, who: str, vocabulary_size: int) -> Int64:
    if not ids.size:
        return np.zeros(0, np.int64)
    if ids.dtype == object and all(isinstance(one, int) for one in ids):  # at least one is beyond int64
        wrong = next(one for one in ids if not 0 <= one < vocabulary_size)
        raise InputError(f"{who}: expected 0 <= id < {vocabulary_size}, got {wrong}", reason="id_out_of_range")
    if not np.issubdtype(ids.dtype, np.integer):
        raise UsageError(f"{who}: expected integer ids, got {ids.dtype}")
    bad = (ids < 0) | (ids >= vocabulary_size)
    if bad.any():
        raise InputError(f"{who}: expected 0 <= id < {vocabulary_size}, got {ids[bad][0]}", reason="id_out_of_range")
    return ids.astype(np.int64)


def _weights(weights: Any, who: str, feature: FeatureSpec, lengths: Int64) -> Array:
    values, found = _ragged(weights, who, "weights", feature)
    check_num_samples(len(found), len(lengths), who, "weights")
    if not np.array_equal(found, lengths):
        row = int(np.argmax(found != lengths))
        raise UsageError(f"{who}: sample {row} has {lengths[row]} ids and {found[row]} weights")
    return values


def _checked_weights(values: Array, who: str) -> Float32:
    if values.dtype.kind not in "fiu" and values.dtype.name != "bfloat16":
        raise UsageError(f"{who}: expected float weights, got {values.dtype}")
    with np.errstate(over="ignore"):
        narrowed = values.astype(np.float32)
    if not np.isfinite(narrowed).all():
        at = int(np.argmin(np.isfinite(narrowed)))
        raise InputError(f"{who}: expected weights that are finite as float32, got {values[at]}")
    return narrowed
