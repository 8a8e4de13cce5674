"""What a user gives for one feature → Lookups: dense, multi-hot and ragged; numpy, jax, Arrow and plain lists.

Every id is checked here, and the error names its feature.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.activations.coo import as_coo, by_sample
from penstock.config.specs import FeatureSpec
from penstock.errors import InputError, UsageError
from penstock.expand import Float32, Int64, Lookups, gains
from penstock.masked_arrays import MASKED, is_masked

Array = npt.NDArray[Any]
DEFAULT_COMBINER = "sum"  # of TensorFlow's enqueue ops, for a configuration that does not say


def lookups(feature: FeatureSpec, who: str, vocabulary_size: int, given: Any, weights: Any = None) -> Lookups:
    """One feature's lookups of one batch.

    who : how messages call the feature
    given : integers of the feature's input shape, one id per sample; with one more axis, several per sample; or
        ragged: an Arrow list array, or a list with a list or array of ids per sample; or CooIds
    weights : floats, shaped like ``given``
    """
    num_rows, length = _rows_of(feature)
    coo = as_coo(given)
    if is_masked(coo or given) or is_masked(weights):
        raise UsageError(f"{who}: {MASKED}")
    if coo is not None:
        shape = feature.input_shape[:-1] if length else feature.input_shape
        ids, lengths, weights = by_sample(coo, weights, who, shape)
    else:
        ids, lengths = _ragged(given, who, "ids", feature, num_rows)
    ids = _checked_ids(ids, who, vocabulary_size)
    samples = np.repeat(np.arange(num_rows), lengths)
    if length:
        if weights is not None:
            raise UsageError(f"{who}: a sequence feature (max_sequence_length {length}) takes no weights")
        return _sequence(ids, samples, lengths, length)
    if weights is not None and coo is None:
        weights = _weights(weights, who, feature, num_rows, lengths)
    by = None if weights is None else _checked_weights(weights, who)
    return Lookups(ids, samples, gains(samples, by, num_rows, feature.combiner or DEFAULT_COMBINER))


def num_samples(feature: FeatureSpec) -> int:
    """Rows of its activation: what its lookups are combined into."""
    return math.prod(feature.input_shape)


def is_sequence(feature: FeatureSpec) -> bool:
    """Whether its ids are kept apart. Where its shape does not end in their number they are combined, as in TensorFlow:
    an output_shape, or an input shape that ends in 1, may say so."""
    length = feature.max_sequence_length
    return length > 0 and len(feature.input_shape) > 1 and feature.input_shape[-1] == length


def _rows_of(feature: FeatureSpec) -> tuple[int, int]:
    """How many lists of ids a batch has, and the positions of each where it is a sequence, else 0."""
    length = feature.max_sequence_length if is_sequence(feature) else 0
    return num_samples(feature) // (length or 1), length


def _sequence(ids: Int64, samples: Int64, lengths: Int64, length: int) -> Lookups:
    """Every position is a sample of its own; what is beyond the length is cut."""
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(len(ids)) - np.repeat(starts, lengths)
    kept = positions < length
    return Lookups(ids[kept], (samples * length + positions)[kept], None, int(len(ids) - kept.sum()))


def _ragged(given: Any, who: str, what: str, feature: FeatureSpec, num_rows: int) -> tuple[Array, Int64]:
    """Flat values and how many each of the rows has."""
    if hasattr(given, "combine_chunks"):  # a pyarrow.ChunkedArray
        given = given.combine_chunks()
    if hasattr(given, "null_count"):
        return _of_arrow(given, who, what, num_rows)
    array = _as_array(given)
    if array is None:
        if not hasattr(given, "__iter__"):
            raise UsageError(f"{who}: expected {what} as an array or a list per sample, got {type(given).__name__}")
        values = [_of_sample(row, who, what) for row in _samples(given, feature)]
        _check_rows(len(values), who, what, num_rows)
        full = [row for row in values if row.size]  # an empty list is float64 to numpy
        return (np.concatenate(full) if full else np.zeros(0, np.int64)), _lengths(values)
    per_row = _ids_per_row(array, who, what, feature, num_rows)
    return array.reshape(-1), np.full(num_rows, per_row, np.int64)


def _samples(given: Any, feature: FeatureSpec) -> list[Any]:
    """One entry per sample, of a list of them, or of lists nested like an input shape of several axes."""
    samples = list(given)
    shape = feature.input_shape[:-1] if is_sequence(feature) else feature.input_shape
    if len(samples) == shape[0] != math.prod(shape):
        for _ in shape[1:]:
            samples = [one for row in samples for one in (row if np.iterable(row) else [row])]
    return samples


def _of_sample(row: Any, who: str, what: str) -> Array:
    try:
        return np.asarray(row).reshape(-1)
    except ValueError as error:
        raise UsageError(f"{who}: expected {what} of a sample as a flat list, got {row}") from error


def _as_array(given: Any) -> Array | None:
    """A rectangular array of numbers; None where it is ragged. An empty list per row is ragged, too."""
    if isinstance(given, list | tuple) and any(np.ndim(row) for row in given if not isinstance(row, list | tuple)):
        return None
    if isinstance(given, list | tuple) and any(isinstance(row, list | tuple) for row in given):
        return None
    array = np.asarray(given)
    return None if array.dtype == object else array


def _ids_per_row(array: Array, who: str, what: str, feature: FeatureSpec, num_rows: int) -> int:
    shape = feature.input_shape[:-1] if is_sequence(feature) else feature.input_shape
    if array.shape == shape:
        return 1
    if array.ndim == len(shape) + 1 and array.shape[:-1] == shape:
        return int(array.shape[-1])
    if array.ndim in (1, 2) and array.shape[0] == num_rows:
        return int(array.shape[1]) if array.ndim == 2 else 1
    wanted = f"{list(shape)} or {[*shape, 'k']}".replace("'", "")
    raise UsageError(f"{who}: expected {what} of shape {wanted}, got {list(array.shape)}")


def _of_arrow(given: Any, who: str, what: str, num_rows: int) -> tuple[Array, Int64]:
    """An Arrow list array, or a flat one with a value per sample. A null list is an empty one."""
    import pyarrow as pa

    _check_rows(len(given), who, what, num_rows)
    if not (pa.types.is_list(given.type) or pa.types.is_large_list(given.type)):
        if not pa.types.is_fixed_size_list(given.type):
            return _without_nulls(given, who, what), np.ones(num_rows, np.int64)
        given = given.cast(pa.list_(given.type.value_type))
    lengths = given.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return _without_nulls(given.flatten(), who, what), lengths


def _without_nulls(values: Any, who: str, what: str) -> Array:
    if values.null_count:
        raise InputError(f"{who}: {what} hold {values.null_count} nulls; leave them out")
    found: Array = values.to_numpy(zero_copy_only=False)
    return found


def _check_rows(got: int, who: str, what: str, num_rows: int) -> None:
    if got != num_rows:
        raise UsageError(f"{who}: expected {what} for {num_rows} samples (its input shape), got {got}")


def _lengths(values: list[Array]) -> Int64:
    return np.array([len(row) for row in values], np.int64)


def _checked_ids(ids: Array, who: str, vocabulary_size: int) -> Int64:
    if not ids.size:
        return np.zeros(0, np.int64)
    if ids.dtype == object and all(isinstance(one, int) for one in ids):  # one lies beyond int64
        wrong = next(one for one in ids if not 0 <= one < vocabulary_size)
        raise InputError(f"{who}: expected 0 <= id < {vocabulary_size}, got {wrong}", reason="id_out_of_range")
    if not np.issubdtype(ids.dtype, np.integer):
        raise UsageError(f"{who}: expected integer ids, got {ids.dtype}")
    bad = (ids < 0) | (ids >= vocabulary_size)
    if bad.any():
        raise InputError(f"{who}: expected 0 <= id < {vocabulary_size}, got {ids[bad][0]}", reason="id_out_of_range")
    return ids.astype(np.int64)


def _weights(weights: Any, who: str, feature: FeatureSpec, num_rows: int, lengths: Int64) -> Array:
    values, found = _ragged(weights, who, "weights", feature, num_rows)
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
