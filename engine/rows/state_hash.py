"""The hash of a state: of all tables, in order of name, and the global step; the same for one engine and for shares."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from penstock.model.config.specs import TableSpec
from penstock.model.frames import Array, Float32

KeyArrays = tuple[Sequence[Array], int]


def state_hash(
    specs: Mapping[str, TableSpec],
    global_step: int,
    stream: Callable[[str, int], Iterable[Float32]],
    keys: Callable[[str], KeyArrays],
) -> str:
    """Return the SHA-256 (hex) that ``Engine.state_hash`` documents. Copies no table.

    stream : (table, part) → one part of all rows in blocks: in id order; of a dynamic table in order of the mixed key
    keys : dynamic table → the arrays that decide the future of its keys, and its clock
    """
    digest = hashlib.sha256()
    for name, spec in sorted(specs.items()):
        digest.update(name.encode() + b"\0" + struct.pack("<qq", spec.vocabulary_size, spec.dim))
        for part in range(1 + len(spec.slots)):
            for block in stream(name, part):
                digest.update(_as_stored(block, spec.storage_dtype == "bfloat16" and part == 0).data)
        if spec.dynamic is not None:
            arrays, clock = keys(name)
            for array in arrays:
                digest.update(struct.pack("<q", len(array)))
                digest.update(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data)
            digest.update(struct.pack("<q", clock))
    digest.update(struct.pack("<q", global_step))
    return digest.hexdigest()


def _as_stored(block: Float32, bfloat16: bool) -> Array:
    """Return rows as they are stored, little-endian: float32, or the upper 16 bits of each float32 for bfloat16."""
    if not bfloat16:
        return np.ascontiguousarray(block, "<f4")
    return (block.view(np.uint32) >> np.uint32(16)).astype("<u2")
