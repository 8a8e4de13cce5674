"""The digests of a commit's files and manifest, per version of the checkpoint format."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np

# Format version of new commits.
VERSION = 3
_BLOCK_BYTES, _LEAVES = 128, 4
_TREE: dict[str, Any] = {"fanout": _LEAVES, "depth": 2, "inner_size": 64}


class Digest(Protocol):
    """The part of hashlib's interface that commits use."""

    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


class Blake2bp:
    """BLAKE2bp, truncated to 32 bytes: leaf n % 4 hashes block n of 128 bytes, and the root hashes the leaves."""

    def __init__(self) -> None:
        self._leaves = [
            hashlib.blake2b(node_offset=leaf, last_node=leaf == _LEAVES - 1, **_TREE) for leaf in range(_LEAVES)
        ]
        self._rest = b""

    def update(self, data: bytes | memoryview, /) -> None:
        data = self._rest + bytes(data)
        whole = len(data) - len(data) % (_BLOCK_BYTES * _LEAVES)
        stripes = np.frombuffer(data, np.uint8, whole).reshape(-1, _LEAVES, _BLOCK_BYTES)
        for number, leaf in enumerate(self._leaves):
            leaf.update(np.ascontiguousarray(stripes[:, number]).data)
        self._rest = data[whole:]

    def hexdigest(self) -> str:
        root = hashlib.blake2b(node_depth=1, last_node=True, **_TREE)
        for number, leaf in enumerate(self._leaves):
            complete = leaf.copy()
            complete.update(self._rest[number * _BLOCK_BYTES : (number + 1) * _BLOCK_BYTES])
            root.update(complete.digest())
        return root.hexdigest()[:64]


# Format version → digest. Version 2 is read, never written.
DIGESTS: Mapping[int, Callable[[], Digest]] = {VERSION: partial(hashlib.blake2b, digest_size=32), 2: Blake2bp}


def digest_of(data: bytes, version: int = VERSION) -> str:
    digest = DIGESTS[version]()
    digest.update(data)
    return digest.hexdigest()
