"""Flatbuffers, as far as Arrow's messages and footers need them. Damaged offsets give errors or wrong numbers."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt


class Table:
    """A table of a flatbuffer. Raises struct.error, ValueError or IndexError for damaged offsets."""

    def __init__(self, data: bytes | memoryview, at: int | None = None) -> None:
        """at : of a table inside; None: the root"""
        self._data = data
        self._at: int = struct.unpack_from("<I", data, 0)[0] if at is None else at
        self._fields = self._at - struct.unpack_from("<i", data, self._at)[0]
        if self._fields < 0:
            raise ValueError("a table lies outside the message")

    def field(self, number: int) -> int:
        """Return the offset of a field's value; 0 for an absent field."""
        slot = 4 + 2 * number
        if slot + 2 > struct.unpack_from("<H", self._data, self._fields)[0]:
            return 0
        offset: int = struct.unpack_from("<H", self._data, self._fields + slot)[0]
        return self._at + offset if offset else 0

    def table(self, number: int) -> Table:
        return Table(self._data, self._follow(self.field(number)))

    def vector(self, number: int, kind: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a vector of structs."""
        at = self._follow(self.field(number))
        return np.frombuffer(self._data, kind, struct.unpack_from("<I", self._data, at)[0], at + 4)

    def _follow(self, at: int) -> int:
        if not at:
            raise ValueError("a field is missing")
        return int(at + struct.unpack_from("<I", self._data, at)[0])
