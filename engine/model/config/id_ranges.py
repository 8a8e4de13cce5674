"""Which integers are ids of a table: those below its vocabulary_size, or any key of a dynamic table."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.base.array_conversion import as_array
from penstock.base.errors import UsageError
from penstock.model.frames import Int64

# In place of a vocabulary_size: every int64, or every uint64, is a key. A uint64 key is stored as an int64 of its bits.
ANY_INT64, ANY_UINT64 = 0, -1
_HASHED = 2**40  # nearly every 64-bit hash is beyond it, and no table has so many rows


def bounds(vocabulary_size: int) -> tuple[int, int]:
    """Return the least id and the integer after the largest. vocabulary_size : or ANY_INT64 or ANY_UINT64"""
    return {ANY_INT64: (-(2**63), 2**63), ANY_UINT64: (0, 2**64)}.get(vocabulary_size, (0, vocabulary_size))


def outside(ids: npt.NDArray[Any], vocabulary_size: int | np.int64 | npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return which integers are no ids. vocabulary_size : of all, or of each; or ANY_INT64 or ANY_UINT64

    ids : of any integer type; or Python's, as objects, with one vocabulary_size
    """
    if ids.dtype == object:
        least, end = bounds(int(vocabulary_size))
        return np.asarray((ids < least) | (ids >= end), np.bool_)
    is_uint64 = ids.dtype == np.uint64
    signed = ids.astype(np.int64, copy=False) if is_uint64 else ids
    below = np.asarray(vocabulary_size, np.int64)
    bad = (signed < 0) | (signed >= below)
    if (below <= 0).any():
        bad = np.where(below > 0, bad, False if is_uint64 else (signed < 0) & (below == ANY_UINT64))
    if is_uint64:
        bad = np.where(below == ANY_UINT64, False, bad | (ids > np.uint64(2**63 - 1)))
    return np.asarray(bad, np.bool_)


def exact_integers(values: Any, array: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """Return ids as integers; None if they are something else. array : of the values, as NumPy converts them

    NumPy makes floats of 2**64 - 1 next to 0, as of all Python integers of which only some exceed int64: these are
    returned as objects.
    """
    if array.dtype.kind in "iu":
        return array
    if not array.size:
        return np.zeros(array.shape, np.int64)
    if array.dtype.kind == "f" and isinstance(values, list | tuple):
        array = np.asarray(values, object)
    is_exact = array.dtype == object and all(isinstance(value, int | np.integer) for value in array.reshape(-1))
    return array if is_exact else None


def expected(vocabulary_size: int, name: str = "id") -> str:
    """Return what was expected, for messages."""
    if vocabulary_size == ANY_INT64:
        return f"an int64 {name}"
    return f"0 <= {name} < {2**64 if vocabulary_size == ANY_UINT64 else vocabulary_size}"


def id_text(vocabulary_size: int, row_id: int) -> str:
    """Return an id as text: the numbers of a browser hold 53 bits of it."""
    return str(row_id % 2**64 if vocabulary_size == ANY_UINT64 else row_id)


def key_type_hint(vocabulary_size: int, value: int) -> str:
    """Return what a message about an id outside a table adds: the ``key_type`` that it needs; "" for a small number."""
    if vocabulary_size == ANY_INT64 and value >= 2**63:
        return '; keys from 2^63 on need key_type="uint64" (in text UINT64)'
    if vocabulary_size == ANY_UINT64:
        return '; negative keys need key_type="int64" (in text INT64)'
    if abs(value) < _HASHED:
        return ""
    need = ', of key_type="uint64" (in text UINT64)' if value >= 2**63 else ""
    return f"; ids that are hashes need a dynamic table{need}"


def integer_ids(table: str, ids: Any, flat: bool = False) -> npt.NDArray[Any]:
    """Return ids as an array of integers, of shape (n,) if they must be ``flat``. Raises UsageError."""
    array = as_array(ids, f"table '{table}', ids", UsageError)
    exact = exact_integers(ids, array)
    if exact is None or (flat and exact.ndim != 1):
        shapes = (" of shape (n,)", f" of {array.shape}") if flat else ("", "")
        raise UsageError(f"table '{table}': expected integer ids{shapes[0]}, got {array.dtype}{shapes[1]}")
    return exact


def valid_ids(table: str, ids: Any, vocabulary_size: int) -> Int64:
    """Return ids as int64, shape (n,). Raises UsageError for an id outside the table.

    vocabulary_size : or ANY_INT64 or ANY_UINT64
    """
    array = integer_ids(table, ids).reshape(-1)
    if array.size and (bad := outside(array, vocabulary_size)).any():
        got = int(array[bad][0])
        hint = key_type_hint(vocabulary_size, got)
        raise UsageError(f"table '{table}': expected {expected(vocabulary_size)}, got {got}{hint}")
    return array.astype(np.uint64 if vocabulary_size == ANY_UINT64 else np.int64).view(np.int64)
