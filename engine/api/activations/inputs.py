"""Conversion of one feature's input to Lookups: dense, multi-hot and ragged; numpy, jax, Arrow and plain lists.

Every id is checked here, and errors name the feature.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from penstock.api.activations.batch_shape import PAD, check_num_samples, num_samples, positions_of_lists, samples_shape
from penstock.api.activations.coo import array_of, by_sample, indices_in_lists, is_coo, numbers_of
from penstock.base.array_conversion import as_arrow, is_arrow
from penstock.base.errors import InputError, UsageError
from penstock.model.combiners import Lookups, gains
from penstock.model.config.id_ranges import ANY_UINT64, exact_integers, expected, key_type_hint, outside
from penstock.model.config.specs import FeatureSpec
from penstock.model.frames import Array, Float32, Int64

DEFAULT_COMBINER = "sum"  # as in TensorFlow's enqueue ops, if the configuration specifies none


def lookups(feature: FeatureSpec, name: str, vocabulary_size: int, batch: Any, weights: Any = None) -> Lookups:
    """Return one feature's lookups for one batch.

    name : the feature's name in messages
    batch : integers of the feature's input shape, one id per sample; with one more axis, several per sample; or
        ragged: an Arrow list array, a RaggedTensor, or a list with a list or array of ids per sample; or CooIds
    weights : floats, shaped like ``batch``
    Raises InputError for bad values, UsageError for wrong types and shapes.
    """
    if is_coo(batch):
        raw_ids, samples, positions, weights = by_sample(batch, weights, name, samples_shape(feature))
        length, lengths = feature.sequence_length, None
    else:
        raw_ids, lengths = _ragged(batch, name, "ids", feature)
        length = positions_of_lists(feature, len(lengths), name, "ids")
        samples, positions = np.repeat(np.arange(len(lengths)), lengths), indices_in_lists(lengths)
    ids = _checked_ids(raw_ids, name, vocabulary_size)
    if length:
        if weights is not None:
            raise UsageError(f"{name}: a sequence feature (of {length} positions) takes no weights")
        # Every position is a separate sample; positions beyond the length are dropped.
        inside = positions < length
        return Lookups(ids[inside], (samples * length + positions)[inside], None, int(len(ids) - inside.sum()))
    if weights is not None and lengths is not None:
        weights = _weights(weights, name, feature, lengths)
    by = None if weights is None else _checked_weights(weights, name)
    return Lookups(ids, samples, gains(samples, by, num_samples(feature), feature.combiner or DEFAULT_COMBINER))


def _ragged(batch: Any, name: str, role: str, feature: FeatureSpec) -> tuple[Array, Int64]:
    """Return flat values and the number of values of each row, int64."""
    if is_arrow(batch):
        return _of_arrow(as_arrow(batch, name, UsageError), name, role, feature)
    if hasattr(batch, "row_splits") and hasattr(batch, "flat_values"):
        return _of_splits(array_of(batch.row_splits, name), array_of(batch.flat_values, name), name, role)
    array = _as_array(batch, name)
    if array is None:
        if not isinstance(batch, list | tuple):
            batch = array_of(batch, name).tolist()  # a frame would yield the names of its columns
        values = [_of_sample(row, name, role) for row in _samples(batch, samples_shape(feature))]
        full = [row for row in values if row.size]  # an empty list is float64 to numpy
        lengths = np.array([len(row) for row in values], np.int64)
        if not full:
            return np.zeros(0, np.int64), lengths
        kinds = {row.dtype.kind for row in full}  # both: float64 to numpy, which would round large keys
        return np.concatenate(full, dtype=object if kinds == {"i", "u"} else None), lengths
    return array.reshape(-1), _of_array(array, name, role, samples_shape(feature))


def _samples(batch: Any, shape: tuple[int, ...]) -> list[Any]:
    """Return one entry per sample from a flat list, or from lists nested like a ``shape`` of several axes."""
    samples = list(batch)
    for axis in range(1, len(shape)):
        whole = all(isinstance(row, list | tuple) or np.ndim(row) for row in samples)
        if len(samples) != math.prod(shape[:axis]) or not whole or any(len(row) != shape[axis] for row in samples):
            break
        samples = [sample for row in samples for sample in row]
    return samples


def _of_sample(row: Any, name: str, role: str) -> Array:
    is_nested = isinstance(row, list | tuple) and any(isinstance(value, list | tuple) for value in row)
    values = np.zeros((0, 0)) if is_nested else numbers_of(row, name)
    if values.ndim > 1:
        raise UsageError(f"{name}: expected {role} of a sample as a flat list, got {row}")
    return values.reshape(-1)


def _of_splits(splits: Array, values: Array, name: str, role: str) -> tuple[Array, Int64]:
    """Return the values and lengths of a RaggedTensor, where sample i has the ids splits[i] to splits[i + 1]."""
    lengths = np.diff(splits).astype(np.int64)
    ends = (0, len(values)) if values.ndim == splits.ndim == 1 else None
    if not len(splits) or (splits[0], splits[-1]) != ends or (lengths < 0).any():
        raise UsageError(f"{name}: expected a RaggedTensor of rank 2, whose row_splits ascend from 0 to its {role}")
    return values, lengths


def _as_array(batch: Any, name: str) -> Array | None:
    """Return a rectangular array of numbers; None if the input is ragged, as are lists with a list per row."""
    if isinstance(batch, list | tuple) and any(isinstance(row, list | tuple) or np.ndim(row) for row in batch):
        return None
    array = numbers_of(batch, name)
    return None if array.dtype == object else array


def _of_array(array: Array, name: str, role: str, shape: tuple[int, ...]) -> Int64:
    """Return how many values each sample has, int64."""
    number = math.prod(shape)
    if array.shape == shape or array.shape == (number,):
        return np.ones(number, np.int64)
    if (array.ndim == len(shape) + 1 and array.shape[:-1] == shape) or (array.ndim == 2 and len(array) == number):
        return np.full(number, array.shape[-1], np.int64)
    shapes = f"{list(shape)} or {[*shape, 'k']}".replace("'", "")
    short = array.ndim in (len(shape), len(shape) + 1) and len(array) < shape[0]
    hint = f"; {PAD}" if short else ""
    raise UsageError(f"{name}: expected {role} of shape {shapes}, got {list(array.shape)}{hint}")


def _of_arrow(batch: Any, name: str, role: str, feature: FeatureSpec) -> tuple[Array, Int64]:
    """Return the values and lengths of an Arrow list array, or of a flat one with a value per sample.

    A null list counts as an empty one. Raises InputError for null values.
    """
    import pyarrow as pa

    if isinstance(batch, pa.ExtensionArray) or pa.types.is_struct(batch.type):  # a tensor, or the columns of a frame
        array = array_of(batch, name)
        return array.reshape(-1), _of_array(array, name, role, samples_shape(feature))
    if not (pa.types.is_list(batch.type) or pa.types.is_large_list(batch.type)):
        if not pa.types.is_fixed_size_list(batch.type):
            check_num_samples(len(batch), math.prod(samples_shape(feature)), name, role)
            return _without_nulls(batch, name, role), np.ones(len(batch), np.int64)
        batch = batch.cast(pa.list_(batch.type.value_type))
    lengths = batch.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return _without_nulls(batch.flatten(), name, role), lengths


def _without_nulls(values: Any, name: str, role: str) -> Array:
    if values.null_count:
        raise InputError(f"{name}: {role} hold {values.null_count} nulls; leave them out")
    array: Array = values.to_numpy(zero_copy_only=False)
    return array


def _checked_ids(ids: Array, name: str, vocabulary_size: int) -> Int64:
    exact = exact_integers(ids, ids)
    if exact is None:
        raise UsageError(f"{name}: expected integer ids, got {ids.dtype}")
    if (bad := outside(exact, vocabulary_size)).any():
        got = int(exact[bad][0])
        problem = f"{name}: expected {expected(vocabulary_size)}, got {got}{key_type_hint(vocabulary_size, got)}"
        raise InputError(problem, reason="id_out_of_range")
    return exact.astype(np.uint64 if vocabulary_size == ANY_UINT64 else np.int64).view(np.int64)


def _weights(weights: Any, name: str, feature: FeatureSpec, lengths: Int64) -> Array:
    values, num_weights = _ragged(weights, name, "weights", feature)
    check_num_samples(len(num_weights), len(lengths), name, "weights")
    if not np.array_equal(num_weights, lengths):
        row = int(np.argmax(num_weights != lengths))
        raise UsageError(f"{name}: sample {row} has {lengths[row]} ids and {num_weights[row]} weights")
    return values


def _checked_weights(values: Array, name: str) -> Float32:
    if values.dtype.kind not in "fiu" and values.dtype.name != "bfloat16":
        raise UsageError(f"{name}: expected float weights, got {values.dtype}")
    with np.errstate(over="ignore"):
        narrowed = values.astype(np.float32)
    if not np.isfinite(narrowed).all():
        index = int(np.argmin(np.isfinite(narrowed)))
        raise InputError(f"{name}: expected weights that are finite as float32, got {values[index]}")
    return narrowed
