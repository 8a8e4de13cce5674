"""float32 → bfloat16, at random with the right mean, or to the nearest. Over numpy or jax.numpy, with the same bits.

An update is often smaller than half the distance between two values of 16 bits; rounded to the nearest it would be
lost each time. So each element goes up with the probability that makes the mean right. What decides is a hash of
(key, id, element), never a stream of numbers: it does not depend on where a row lies or what else is updated.
"""

from __future__ import annotations

import hashlib
import struct
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

Array = Any  # of the namespace xp

EXPONENT = 0x7F800000
# The largest finite value of 16 bits, as the bits of a float32.
LARGEST = 0x7F7F0000


def key_of(table: str, step: int, turn: int) -> np.uint32:
    """What a table's rounding in one step depends on. turn : which optimizer application of the step it is."""
    digest = hashlib.blake2b(struct.pack("<qq", step, turn) + table.encode(), digest_size=4).digest()
    return np.uint32(int.from_bytes(digest, "little"))


def stochastic(xp: ModuleType, bits: Array, key: Array, ids: Array, elements: Array) -> Array:
    """The bits of float32 values rounded to 16, as bits of float32 whose lower half is 0.

    bits, ids, elements : uint32 of one shape; key : uint32 scalar
    A finite value stays finite; infinities stay, and NaNs stay NaNs.
    """
    chance = _mixed(_mixed(ids ^ key) + elements * xp.uint32(0x9E3779B9)) >> xp.uint32(16)
    upper = xp.uint32(0xFFFF0000)
    size, sign = bits & xp.uint32(0x7FFFFFFF), bits & xp.uint32(0x80000000)
    rounded = xp.minimum((size + chance) & upper, xp.uint32(LARGEST))
    # The payload of a NaN may lie in the lower half alone: its quiet bit keeps it one.
    special = (size & upper) | xp.where(size > EXPONENT, xp.uint32(0x00400000), xp.uint32(0))
    return sign | xp.where(size >= EXPONENT, special, rounded)


def nearest(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """float32 → the nearest values of 16 bits, ties to even, as float32. NumPy only."""
    bits = values.view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)
    special = (bits & np.uint32(EXPONENT)) == EXPONENT
    kept = np.where(np.isnan(values), (bits | np.uint32(0x00400000)), bits) & np.uint32(0xFFFF0000)
    out: npt.NDArray[np.float32] = np.where(special, kept, rounded).astype(np.uint32).view(np.float32)
    return out


def _mixed(bits: Array) -> Array:
    """Every bit of the result depends on every bit given (MurmurHash3's finalizer)."""
    number = bits.dtype.type
    bits = (bits ^ (bits >> number(16))) * number(0x85EBCA6B)
    bits = (bits ^ (bits >> number(13))) * number(0xC2B2AE35)
    return bits ^ (bits >> number(16))
