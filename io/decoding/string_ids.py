"""Ids that are strings: hashed to keys of dynamic tables, the same wherever they are hashed."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.base.array_conversion import as_array, as_arrow, is_arrow
from penstock.base.errors import InputError
from penstock.base.validation import MASKED, is_masked
from penstock.io.decoding.columns import Bool, Int64, coded, integers
from penstock.io.decoding.role_types import is_text

# Of 64 bits, all but the sign: the key is the same in tables of int64 and of uint64.
_BITS = 2**63 - 1


def hash_ids(values: Any) -> Int64:
    """Hash strings to the keys that ``--hash-ids`` gives them.

    Parameters
    ----------
    values : sequence of str or bytes, or array of strings
        Of NumPy, Arrow, pandas, polars or TensorFlow; no nulls. A string and its UTF-8 bytes have the same key.

    Returns
    -------
    numpy.ndarray
        int64, shape (n,), at least 0: BLAKE2b of 8 bytes over the bytes of a value, little-endian, without its highest
        bit.

    Raises
    ------
    InputError
        If a value is null or no string.

    Notes
    -----
    Arrays of NumPy's dtypes ``U`` and ``S`` do not hold zero bytes at the end of a value, which are their padding.

    References
    ----------
    RFC 7693. Any implementation of BLAKE2b gives the same keys.

    Examples
    --------
    >>> import penstock as ps
    >>> ps.hash_ids(["alice", "bob", "alice"])
    array([ 709973135221123661, 1343311534342534004,  709973135221123661])
    """
    try:
        column = _column(values)
        column.validate(full=True)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise InputError(f"hash_ids: expected strings: {error}") from None
    if not len(column):
        return np.zeros(0, np.int64)
    if not holds_text(column.type):
        raise InputError(f"hash_ids: expected strings, got {column.type}")
    ids, null = ids_of(column)
    if null is not None:
        raise InputError(f"hash_ids: expected strings without nulls, got {null.sum()} nulls")
    return ids.astype(np.int64, copy=False)


def _column(values: Any) -> pa.Array:
    """Return strings as a column. Raises ValueError, TypeError or Arrow's errors."""
    if isinstance(values, str | bytes):
        raise TypeError(f"got one {type(values).__name__}; give a list of them")
    if is_masked(values):
        raise ValueError(MASKED)
    if is_arrow(values):
        return as_arrow(values)
    if hasattr(values, "__array__"):
        values = as_array(values)
        if values.ndim != 1:
            raise ValueError(f"got an array of shape {values.shape}; expected (n,)")
        values = values.tolist()  # Arrow would take the padding of NumPy's byte strings as part of the values
    encoded = [value.encode() if isinstance(value, str) else value for value in values]
    return pa.array(encoded, from_pandas=True)  # NaN is the null of pandas' strings


def holds_text(kind: pa.DataType) -> bool:
    """Return whether a type is text or bytes, or a dictionary of them."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    return is_text(kind) or is_bytes or bool(pa.types.is_fixed_size_binary(kind))


def hashing_hint(kind: pa.DataType) -> str:
    """Return what to do about ids of a type that are no integers."""
    return "; --hash-ids hashes strings to keys of dynamic tables" if holds_text(kind) else ""


def ids_of(column: pa.Array) -> tuple[npt.NDArray[Any], Bool | None]:
    """Return the ids of a validated column of integers, or the hashes of strings; and which are null (None: none)."""
    if not holds_text(column.type):
        return integers(column)
    codes, names = coded(column)
    hashes = np.array([*map(_hash, names), 0], np.int64)
    null = codes < 0
    return hashes[codes], null if null.any() else None


def _hash(value: str | bytes) -> int:
    data = value.encode() if isinstance(value, str) else value
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") & _BITS
