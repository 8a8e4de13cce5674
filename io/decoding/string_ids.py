"""Ids that are strings: hashed to keys of dynamic tables, the same wherever they are hashed."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import InputError
from penstock.io.decoding.columns import Bool, Int64, coded, integers
from penstock.io.decoding.role_types import is_text

# Of 64 bits, all but the sign: the key is the same in tables of int64 and of uint64.
_BITS = 2**63 - 1


def hash_ids(values: Any) -> Int64:
    """Hash strings to the keys that ``--hash-ids`` gives them.

    Parameters
    ----------
    values : sequence of str, or array of strings
        Of NumPy, Arrow, or anything that ``pyarrow.array`` takes; no nulls.

    Returns
    -------
    numpy.ndarray
        int64, shape (n,), at least 0: BLAKE2b of 8 bytes over the UTF-8 bytes of a string, little-endian, without its
        highest bit.

    Raises
    ------
    InputError
        If a value is null or no string.

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
        column = values if isinstance(values, pa.Array) else pa.array(values, pa.string())
        column.validate(full=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
        raise InputError(f"hash_ids: expected strings: {error}") from None
    if not holds_text(column.type) or column.null_count:
        raise InputError(f"hash_ids: expected strings without nulls, got {column.type} with {column.null_count} nulls")
    return ids_of(column)[0].astype(np.int64, copy=False)


def holds_text(kind: pa.DataType) -> bool:
    """Return whether a type is text, or a dictionary of it."""
    return is_text(kind.value_type if pa.types.is_dictionary(kind) else kind)


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


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") & _BITS
