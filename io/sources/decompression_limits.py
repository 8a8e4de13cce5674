"""Whether a compressed record batch unpacks to far more than it is: looked at before Arrow makes room for it.

A few kilobytes of lz4 or zstd may stand for gigabytes. Every compressed buffer says first how long it will be; those
numbers are added up here, and Arrow is not asked where they are out of all proportion. Gradients hardly compress, so
nothing that a producer writes comes near the limits. Dictionaries stay, so theirs are added up over all of them.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import InputError

# Up to here nothing is asked; beyond, a batch may unpack to so many times its bytes.
ALWAYS_BYTES = 1 << 25
MOST_TIMES = 100

SCHEMA, DICTIONARY, BATCH = 1, 2, 3  # kinds of messages
_BUFFER = np.dtype([("offset", "<i8"), ("length", "<i8")])
_CONTINUATION = b"\xff\xff\xff\xff"


def is_bomb(unpacked_bytes: int, packed_bytes: int) -> bool:
    return unpacked_bytes > max(ALWAYS_BYTES, MOST_TIMES * packed_bytes)


def bomb(unpacked_bytes: int, packed_bytes: int, source: str) -> InputError:
    size = f"{packed_bytes:,} bytes that unpack to {unpacked_bytes:,}"
    return InputError(f"{size}, more than {MOST_TIMES} times as many: write smaller batches", source=source)


def body_bytes(metadata: bytes) -> int:
    """How long the body of a message says it is."""
    root = _Table.root(metadata)
    length = int(struct.unpack_from("<q", metadata, root.field(3))[0]) if root.field(3) else 0
    if length < 0:
        raise ValueError(f"a body of {length} bytes")
    return length


def message_kind(metadata: bytes | memoryview) -> int:
    """What a message is. Raises struct.error, ValueError or IndexError where it is none."""
    at = _Table.root(metadata).field(1)
    return metadata[at] if at else 0


class Messages:
    """The messages of one stream or file, each looked at once."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._unpacked = self._packed = 0  # of all dictionaries so far

    def check(self, metadata: bytes, body: Any) -> bool:
        """Whether a message is a dictionary, which another follows. Raises InputError where it is a bomb.

        Raises struct.error or ValueError where the metadata cannot be followed: Arrow will say what is wrong with it.
        """
        kind = message_kind(metadata)
        if kind not in (BATCH, DICTIONARY):
            return False
        batch = _Table.root(metadata).table(2)
        if kind == DICTIONARY:
            batch = batch.table(1)
        if batch.field(3):  # compressed
            unpacked, packed = _unpacked_bytes(batch.vector(2), body), len(body)
            if kind == DICTIONARY:
                self._unpacked, self._packed = self._unpacked + unpacked, self._packed + packed
                unpacked, packed = self._unpacked, self._packed
            if is_bomb(unpacked, packed):
                raise bomb(unpacked, packed, self._source)
        return kind == DICTIONARY

    def check_next(self, file: pa.NativeFile) -> None:
        """Look at the messages that Arrow reads next, up to a record batch. The position stays."""
        start = file.tell()
        try:
            while self._check_one(file):
                pass
        except InputError:
            raise
        except (struct.error, ValueError, IndexError, OSError):  # Arrow will say what is wrong
            return
        finally:
            file.seek(start)

    def _check_one(self, file: pa.NativeFile) -> bool:
        head = bytes(file.read(4))
        if head == _CONTINUATION:
            head = bytes(file.read(4))
        (length,) = struct.unpack("<i", head)
        if length <= 0:
            return False
        metadata = bytes(file.read(length))
        return self.check(metadata, memoryview(file.read_buffer(body_bytes(metadata))))


def _unpacked_bytes(buffers: np.ndarray[Any, Any], body: Any) -> int:
    """What the buffers of a body say; one that lies outside it says nothing. -1: that buffer is not compressed."""
    total = 0
    for offset, length in buffers.tolist():
        if length >= 8 and 0 <= offset <= len(body) - 8:
            (claimed,) = struct.unpack_from("<q", body, offset)
            total += claimed if claimed > 0 else 0
    return total


class Framing:
    """Follows a stream that Arrow reads piece by piece, and looks at every body before Arrow gets it.

    Where the pieces are not those of a stream it looks no further.
    """

    def __init__(self, source: str) -> None:
        self._messages = Messages(source)
        self._metadata = b""
        self._expected = 4  # bytes of the piece that comes next
        self._step = self._begin

    def seen(self, piece: bytes) -> None:
        if self._expected and len(piece) != self._expected:
            self._expected = 0
        if not self._expected:
            return
        try:
            self._step(piece)
        except InputError:
            raise
        except (struct.error, ValueError, IndexError):
            self._expected = 0

    def _begin(self, piece: bytes) -> None:
        if piece != _CONTINUATION:  # of before Arrow 0.15: the length at once
            self._length(piece)
            return
        self._expected, self._step = 4, self._length

    def _length(self, piece: bytes) -> None:
        self._expected, self._step = max(0, struct.unpack("<i", piece)[0]), self._head

    def _head(self, piece: bytes) -> None:
        self._metadata = piece
        self._expected, self._step = body_bytes(piece), self._body
        if not self._expected:
            self._expected, self._step = 4, self._begin

    def _body(self, piece: bytes) -> None:
        self._messages.check(self._metadata, piece)
        self._expected, self._step = 4, self._begin


class _Table:
    """A flatbuffer's table, as far as it is needed here. Damaged offsets give struct.error or wrong numbers."""

    def __init__(self, data: bytes | memoryview, at: int) -> None:
        self._data, self._at = data, at
        self._fields = at - struct.unpack_from("<i", data, at)[0]
        if self._fields < 0:
            raise ValueError("a table lies outside the message")

    @classmethod
    def root(cls, data: bytes | memoryview) -> _Table:
        return cls(data, struct.unpack_from("<I", data, 0)[0])

    def field(self, number: int) -> int:
        """Where a field's value lies; 0 where it is left out."""
        slot = 4 + 2 * number
        if slot + 2 > struct.unpack_from("<H", self._data, self._fields)[0]:
            return 0
        offset: int = struct.unpack_from("<H", self._data, self._fields + slot)[0]
        return self._at + offset if offset else 0

    def table(self, number: int) -> _Table:
        return _Table(self._data, self._follow(number))

    def vector(self, number: int) -> np.ndarray[Any, Any]:
        at = self._follow(number)
        return np.frombuffer(self._data, _BUFFER, struct.unpack_from("<I", self._data, at)[0], at + 4)

    def _follow(self, number: int) -> int:
        at = self.field(number)
        if not at:
            raise ValueError("a field is missing")
        return int(at + struct.unpack_from("<I", self._data, at)[0])
