"""Checks of the arguments and gradients of conditional accumulators, and their conversion to arrays.

Mistakes are of two kinds. Where TensorFlow crashes or cannot build the op (another dtype, a step that
is not a scalar), the call is refused before it reaches the accumulator. Shapes and ids are checked in
TensorFlow's order and after the stale check, so those functions return the problem instead of raising it.
Sources: conditional_accumulator.h, sparse_conditional_accumulator.h (ValidateShape).
"""

from __future__ import annotations

import math
import operator
from typing import Any, TypeAlias

import numpy as np

from penstock.base.array_conversion import as_array, as_numbers, is_numeric
from penstock.base.errors import InputError, UsageError
from penstock.base.validation import whole
from penstock.model.config.id_ranges import ANY_INT64, exact_integers, outside
from penstock.model.frames import Array, Int64

# A declared shape: None if the rank is unknown; an unknown dim is None.
Partial: TypeAlias = tuple[int | None, ...] | None
DTYPES = ("float16", "float32", "float64")
REDUCTIONS = ("MEAN", "SUM")


def dtype_of(dtype: Any) -> np.dtype[Any]:
    """Return one of the three dtypes that TensorFlow has kernels for. Raises UsageError."""
    try:
        numpy_dtype: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        raise UsageError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}") from None
    if numpy_dtype.name not in DTYPES or not numpy_dtype.isnative:
        raise UsageError(f"dtype: expected one of {', '.join(DTYPES)}, got {numpy_dtype}")
    return numpy_dtype


def shape_of(shape: Any) -> Partial:
    """Return a partial shape: None, or dims with None where unknown (-1 or None). Raises UsageError."""
    if shape is None:
        return None
    try:
        dims = tuple(None if dim is None else operator.index(dim) for dim in shape)
    except TypeError:
        raise UsageError(f"shape: expected None or a sequence of dims (None or -1: unknown), got {shape!r}") from None
    if any(dim is not None and dim < -1 for dim in dims):
        raise UsageError(f"shape: expected dims of at least 0, or -1 where unknown, got {dims}")
    return tuple(None if dim == -1 else dim for dim in dims)


def reduction_of(reduction: Any) -> str:
    if reduction not in REDUCTIONS:
        raise UsageError(f"reduction: expected 'MEAN' or 'SUM', got {reduction!r}")
    return str(reduction)


def sizes_of(grad_shape: Any) -> tuple[int, ...] | None:
    """Return a gradient's declared dense shape, or None. Raises UsageError."""
    if grad_shape is None:
        return None
    try:
        return tuple(whole("grad_shape", dim) for dim in grad_shape)
    except TypeError:
        raise UsageError(f"grad_shape: expected a sequence of integers, got {grad_shape!r}") from None


def timeout_of(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, (int, float)) and value >= 0 and not math.isnan(value):
        return float(value)
    raise UsageError(f"timeout: expected seconds of at least 0, or None, got {value!r}")


def contributor_of(value: Any) -> int | str | None:
    if value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, np.integer):
        return int(value)
    raise UsageError(f"contributor: expected an int, a str or None, got {type(value).__name__}")


def values_of(value: Any, dtype: np.dtype[Any]) -> Array:
    """Return the gradient as an array of dtype; a value that already has a dtype is never cast. Raises InputError."""
    array = as_numbers(value, "gradient", InputError)
    if isinstance(value, (list, tuple, int, float)):
        if not is_numeric(array):
            raise InputError(f"gradient: expected numbers, got {array.dtype}")
        with np.errstate(over="ignore"):  # as TensorFlow does
            return array.astype(dtype)
    if array.dtype != dtype:
        raise InputError(f"gradient: expected {dtype}, got {array.dtype}: cast it first")
    return array


def ids_of(ids: Any) -> Int64:
    """Return ids of any rank as int64. Raises InputError for floats and for ids beyond int64."""
    array = as_array(ids, "ids", InputError)
    exact = exact_integers(ids, array)
    if exact is None:
        raise InputError(f"ids: expected integers, got {array.dtype}")
    if (bad := outside(exact, ANY_INT64)).any():
        raise InputError(f"ids: expected int64, got {exact[bad][0]}")
    return exact.astype(np.int64, copy=False)


def shape_text(shape: Partial) -> str:
    """Return a partial shape as messages print it: ``(?, 3)``."""
    if shape is None:
        return "any shape"
    dims = ", ".join("?" if dim is None else str(dim) for dim in shape)
    return f"({dims},)" if len(shape) == 1 else f"({dims})"


def dense_problem(shape: tuple[int, ...], declared: Partial, sum_shape: tuple[int, ...] | None) -> str | None:
    """Return why a dense gradient is refused, or None. sum_shape : shape of the accumulated sum, if any"""
    if sum_shape is not None and shape != sum_shape:
        return f"gradient: expected shape {sum_shape}, as what is accumulated, got {shape}"
    if declared is not None and (
        len(shape) != len(declared) or any(want not in (None, got) for want, got in zip(declared, shape, strict=True))
    ):
        return f"gradient: expected shape {shape_text(declared)}, got {shape}"
    return None


def sparse_problem(ids: Int64, values: Array, declared: Partial, grad_shape: tuple[int, ...] | None) -> str | None:
    """Return why a sparse gradient is refused regardless of what is accumulated, or None."""
    if ids.ndim != 1:
        return f"ids: expected shape (n,), got {ids.shape}"
    if values.ndim < 1:
        return "gradient: expected at least one axis, (n, ...), got a scalar"
    if len(values) != len(ids):
        return f"gradient: expected as many rows as ids, got {len(ids)} ids and {len(values)} rows"
    if grad_shape is not None and declared is not None:
        fits = len(declared) <= len(grad_shape) and _fits(declared, grad_shape)
        if not fits:
            return f"grad_shape: expected {shape_text(declared)}, got {grad_shape}"
    # Negative ids are accepted, as in TensorFlow.
    if declared and declared[0] is not None and ids.size and ids.max() >= declared[0]:
        return f"ids: expected id < {declared[0]}, got {ids.max()}"
    return None


def sparse_row_problem(values: Array, declared: Partial, dims: tuple[int, ...] | None) -> str | None:
    """Return why rows of that shape are refused, or None. dims : shape of the accumulated rows, if any"""
    if dims is not None:
        return None if values.shape[1:] == dims else f"gradient: expected rows of {dims}, got {values.shape[1:]}"
    if declared is not None and not (len(declared) <= values.ndim and _fits(declared[1:], values.shape[1:])):
        return f"gradient: expected rows of {shape_text(declared[1:])}, got {values.shape[1:]}"
    return None


def _fits(declared: tuple[int | None, ...], shape: tuple[int, ...]) -> bool:
    """Return whether shape matches every known dim; further entries of shape are ignored, as TensorFlow does."""
    return all(want in (None, got) for want, got in zip(declared, shape, strict=False))
