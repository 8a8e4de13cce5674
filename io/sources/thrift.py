"""Thrift's compact protocol, as far as a Parquet footer needs it: some fields of a struct, the rest skipped.

Does not depend on Parquet. Damaged bytes give wrong values, IndexError or ValueError, never an endless loop.
"""

from __future__ import annotations

from typing import Any

# The requested form of a value: int, a dict of field number → requested form, or such a dict in a list.
Requested = Any

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS = (4, 5, 6)
_KINDS: dict[type, tuple[int, ...]] = {type: _INTEGERS, dict: (_STRUCT,), list: (_LIST,)}
_LENGTHS = {_BYTE: 1, _DOUBLE: 8}
_MAX_DEPTH = 32


def read_struct(data: bytes, requested: dict[int, Requested]) -> tuple[dict[int, Any], int]:
    """Return the requested fields that exist, and the size of the struct; ValueError if a field has another type."""
    cursor = _Cursor(data)
    return cursor.struct(requested, 0), cursor.at


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self._data, self.at = data, 0

    def struct(self, requested: dict[int, Requested], depth: int) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while kind := self._byte():
            delta, kind = kind >> 4, kind & 15
            number = number + delta if delta else self._zigzag()
            if kind in (_TRUE, _FALSE):  # the value is in the type
                continue
            value = self._value(kind, requested.get(number), depth + 1)
            if number in requested:
                fields[number] = value
        return fields

    def _value(self, kind: int, requested: Requested, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        if requested is not None and kind not in _KINDS[type(requested)]:
            raise ValueError(f"a field is of type {kind}")
        if kind in _INTEGERS:
            return self._zigzag()
        if kind == _STRUCT:
            return self.struct(requested or {}, depth)
        if kind in (_LIST, _SET):
            return self._list(requested[0] if requested else None, depth)
        if kind == _MAP:
            self._map(depth)
        elif kind == _BINARY:
            self._skip(self._varint())
        elif kind in _LENGTHS:
            self._skip(_LENGTHS[kind])
        else:
            raise ValueError(f"no type {kind}")
        return None

    def _list(self, requested: Requested, depth: int) -> list[Any]:
        header = self._byte()
        length, kind = header >> 4, header & 15
        if length == 15:
            length = self._varint()
        values: list[Any] = []
        if kind in (_TRUE, _FALSE):
            self._skip(length)
            return values
        for _ in range(length):
            value = self._value(kind, requested, depth + 1)
            if requested is not None:
                values.append(value)
        return values

    def _map(self, depth: int) -> None:
        if length := self._varint():
            kinds = self._byte()
            for _ in range(length):
                for kind in (kinds >> 4, kinds & 15):
                    self._skip(1) if kind in (_TRUE, _FALSE) else self._value(kind, None, depth + 1)

    def _byte(self) -> int:
        value = self._data[self.at]
        self.at += 1
        return value

    def _skip(self, num_bytes: int) -> None:
        self.at += num_bytes
        if self.at > len(self._data):
            raise IndexError("cut inside a value")

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
            if shift > 63:
                raise ValueError("an integer of more than 64 bits")
        return value | byte << shift

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
