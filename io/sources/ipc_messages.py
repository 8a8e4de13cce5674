"""Read Arrow's IPC messages as far as needed to refuse a record batch that unpacks to far more than its size.

It is refused before Arrow allocates memory for it: a few kilobytes of lz4 or zstd may stand for gigabytes. Every
compressed buffer begins with its unpacked length: this module adds up those numbers. Gradients hardly compress, so
nothing that a producer writes comes near the limits. Dictionaries stay in memory, so their lengths are added up over
all of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.base.errors import InputError

# Up to here nothing is refused; beyond, a batch may unpack to so many times its bytes.
ALWAYS_BYTES = 1 << 25
MOST_TIMES = 100

SCHEMA, DICTIONARY, BATCH = 1, 2, 3  # kinds of messages
_BUFFER = np.dtype([("offset", "<i8"), ("length", "<i8")])
CONTINUATION = b"\xff\xff\xff\xff"
END_MARKER = CONTINUATION + bytes(4)


class FlatbufferTable:
    """A table of a flatbuffer, the format of messages and footers.

    Raises struct.error, ValueError or IndexError for damaged offsets, or gives wrong numbers.
    """

    def __init__(self, data: bytes | memoryview, offset: int | None = None) -> None:
        """offset : of a table inside; None: the root"""
        self._data = data
        self._offset: int = struct.unpack_from("<I", data, 0)[0] if offset is None else offset
        self._fields = self._offset - struct.unpack_from("<i", data, self._offset)[0]
        if self._fields < 0:
            raise ValueError("a table lies outside the message")

    def field(self, number: int) -> int:
        """Return the offset of a field's value; 0 for an absent field."""
        slot = 4 + 2 * number
        if slot + 2 > struct.unpack_from("<H", self._data, self._fields)[0]:
            return 0
        offset: int = struct.unpack_from("<H", self._data, self._fields + slot)[0]
        return self._offset + offset if offset else 0

    def table(self, number: int) -> FlatbufferTable:
        return FlatbufferTable(self._data, self._follow(self.field(number)))

    def vector(self, number: int, kind: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return a vector of structs."""
        offset, length = self.vector_offset(number)
        return np.frombuffer(self._data, kind, length, offset)

    def vector_offset(self, number: int) -> tuple[int, int]:
        """Return the offset of the first struct of a vector, and their number."""
        offset = self._follow(self.field(number))
        return offset + 4, struct.unpack_from("<I", self._data, offset)[0]

    def _follow(self, offset: int) -> int:
        if not offset:
            raise ValueError("a field is missing")
        return int(offset + struct.unpack_from("<I", self._data, offset)[0])


def check_unpacked(unpacked_bytes: int, packed_bytes: int, source: str) -> None:
    """Raise InputError for a decompression bomb."""
    if unpacked_bytes > max(ALWAYS_BYTES, MOST_TIMES * packed_bytes):
        size = f"{packed_bytes:,} bytes that unpack to {unpacked_bytes:,}"
        raise InputError(f"{size}, more than {MOST_TIMES} times as many: write smaller batches", source=source)


def body_bytes(metadata: bytes) -> int:
    """Return the length of a message's body, as its metadata states it."""
    root = FlatbufferTable(metadata)
    length = int(struct.unpack_from("<q", metadata, root.field(3))[0]) if root.field(3) else 0
    if length < 0:
        raise ValueError(f"a body of {length} bytes")
    return length


def message_kind(metadata: bytes | memoryview) -> int:
    """Return the kind of a message. Raises struct.error, ValueError or IndexError for anything else."""
    offset = FlatbufferTable(metadata).field(1)
    return metadata[offset] if offset else 0


class Messages:
    """The messages of one stream or file, each checked once. is_compressed : whether the last record batch is"""

    def __init__(self, source: str) -> None:
        self._source = source
        self.is_compressed = False
        self._plain = b""  # all before the body of the last record batch without compression; many have the same
        self._unpacked = self._packed = 0  # of all dictionaries so far

    def check(self, metadata: bytes, body: Callable[[], Any]) -> bool:
        """Return whether a message is a dictionary, which another follows. Raises InputError for a bomb.

        body : returns the bytes after the metadata, which are needed if they are compressed
        Raises struct.error or ValueError where the metadata cannot be followed: Arrow reports what is wrong with it.
        """
        kind = message_kind(metadata)
        if kind not in (BATCH, DICTIONARY):
            return False
        batch = FlatbufferTable(metadata).table(2)
        if kind == DICTIONARY:
            batch = batch.table(1)
        self.is_compressed = batch.field(3) != 0
        if self.is_compressed:
            data = memoryview(body())
            unpacked, packed = _unpacked_bytes(batch.vector(2, _BUFFER), data), len(data)
            if kind == DICTIONARY:
                self._unpacked, self._packed = self._unpacked + unpacked, self._packed + packed
                unpacked, packed = self._unpacked, self._packed
            check_unpacked(unpacked, packed, self._source)
        return kind == DICTIONARY

    def check_next(self, file: pa.NativeFile) -> None:
        """Check the messages that Arrow reads next, up to a record batch. The position stays."""
        start, is_dictionary = file.tell(), True
        try:
            if self._plain and file.read(len(self._plain)) == self._plain:
                self.is_compressed = False
                return
            file.seek(start)
            while is_dictionary:
                start_of_message = file.tell()
                head = bytes(file.read(4))
                if head == CONTINUATION:
                    head = bytes(file.read(4))
                (length,) = struct.unpack("<i", head)
                if length <= 0:
                    return
                metadata = bytes(file.read(length))
                start_of_body, num_bytes = file.tell(), body_bytes(metadata)
                is_dictionary = self.check(metadata, partial(file.read_buffer, num_bytes))
                if not is_dictionary and not self.is_compressed:
                    file.seek(start_of_message)
                    self._plain = file.read(start_of_body - start_of_message)
                file.seek(start_of_body + num_bytes)
        except InputError:
            raise
        except (struct.error, ValueError, IndexError, OSError):  # Arrow reports what is wrong
            return
        finally:
            file.seek(start)


def _unpacked_bytes(buffers: np.ndarray[Any, Any], body: Any) -> int:
    """Add up the lengths that the buffers of a body state, if inside it; -1 is a buffer that is not compressed."""
    total = 0
    for offset, length in buffers.tolist():
        if length >= 8 and 0 <= offset <= len(body) - 8:
            (claimed,) = struct.unpack_from("<q", body, offset)
            total += claimed if claimed > 0 else 0
    return total


class Framing:
    """Follows a stream that Arrow reads piece by piece, and checks every body before Arrow receives it.

    Where the pieces are not those of a stream, it follows no further.
    """

    def __init__(self, source: str) -> None:
        self._pieces = _check_pieces(Messages(source))
        self._expected = next(self._pieces)  # bytes of the next piece

    def add(self, piece: bytes) -> None:
        if not self._expected or len(piece) != self._expected:
            self._expected = 0
            return
        try:
            self._expected = self._pieces.send(piece)
        except InputError:
            raise
        except (struct.error, ValueError, IndexError):
            self._expected = 0


def _check_pieces(messages: Messages) -> Generator[int, bytes, None]:
    """Yield the size of every piece of a stream, and receive the piece."""
    while True:
        head = yield 4
        if head == CONTINUATION:  # before Arrow 0.15: the length at once
            head = yield 4
        metadata = yield max(0, struct.unpack("<i", head)[0])
        if num_bytes := body_bytes(metadata):
            body = yield num_bytes
            messages.check(metadata, partial(bytes, body))
