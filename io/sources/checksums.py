"""The checksums of penstock's logs: their coverage, and the check of a batch that was just read.

Any Arrow reader can read a log. The schema's metadata has ``penstock.log`` = 1; every batch has the custom metadata
``penstock.batch`` (its number, from 0) and ``penstock.crc``; the last one, empty, also has ``penstock.closed``
(the number of batches before it). The value of ``penstock.crc`` is ``crc32:`` and eight lower-case hex digits: the
CRC-32 of zlib over all bytes of the log from its first to the last one of this batch, where the digits of this
checksum and of all before it count as zeros.

So schema, dictionaries, validity, offsets, values, padding, numbers and the framing of messages are covered, and so
is the order of the batches: one that is swapped, repeated, missing or of another log changes all that follow. A
CRC-32 detects every flip of a single bit. The end marker is not covered: Arrow does not recognize a damaged one as an
end, which the reader of streams reports. Only the IPC stream is verified, not copies by other programs.

Writes nothing (``io.log`` does) and reads no file: ``ipc_stream`` reads streams and detects their end.
"""

from __future__ import annotations

import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from penstock.base.errors import InputError

LOG_KEY, BATCH_KEY, CRC_KEY, CLOSED_KEY = b"penstock.log", b"penstock.batch", b"penstock.crc", b"penstock.closed"
VERSION = b"1"
PREFIX, _ZEROS = b"crc32:", b"00000000"
_DAMAGED = "checksum differs: the batch was damaged after it was written"
_NO_RECORD = (
    "the batch carries no checksum, as every batch of a penstock log does: it was damaged, or another program wrote "
    "the log anew (then take 'penstock.log' out of the schema's metadata)"
)

_STATED = re.compile(rb"\x0e\0\0\0" + PREFIX + rb"([0-9a-f]{8})\0")

Pieces = Sequence[Any]  # any object with the buffer protocol


class RawBytes(ABC):
    """The bytes of a stream, as far as its file was read."""

    def check_next(self) -> None:  # noqa: B027 (what cannot be read twice is checked when it arrives)
        """Raise InputError if the next messages are a decompression bomb."""

    def whole(self) -> pa.Buffer | None:
        """Return the whole stream, if it lies in memory."""
        return None

    @abstractmethod
    def last_read(self) -> bytes:
        """Return the 8 bytes before the file's position."""

    @abstractmethod
    def take(self) -> Pieces:
        """Return all bytes read since the last call, or since the start."""

    def forget(self) -> None:  # noqa: B027 (what lies in memory is not kept)
        """Stop keeping bytes for ``take``."""


class LogCheck:
    """Checks the batches of one log in their order.

    closed : whether the closing record was seen
    """

    def __init__(self, raw: RawBytes, name: str, version: bytes | None, verifies: bool = True) -> None:
        """version : the value of ``penstock.log`` in the schema's metadata; verifies : bytes, not only order"""
        if version not in (None, VERSION):
            shown = version.decode(errors="backslashreplace") if version else "(none)"
            raise InputError(f"a penstock log of version {shown}; this penstock reads version 1", source=name)
        self._raw, self._name, self._crc, self._verifies = raw, name, 0, verifies
        if not verifies:
            raw.forget()
        self.closed = False

    def is_data(self, metadata: Any, index: int) -> bool:
        """Check a batch that was just read; return False for the closing record. Raises InputError."""
        record = {} if metadata is None else dict(metadata)
        pieces = self._raw.take() if self._verifies else ()
        if self.closed:
            raise self._error("a batch follows the log's closing record", index)
        if BATCH_KEY not in record or CRC_KEY not in record:
            raise self._error(_NO_RECORD, index)
        if record[BATCH_KEY] != str(index).encode():
            raise self._error(_misplaced(record[BATCH_KEY], index), index)
        if self._verifies:
            self._check(pieces, record[CRC_KEY].removeprefix(PREFIX), index)
        self.closed = CLOSED_KEY in record
        if self.closed and record[CLOSED_KEY] != str(index).encode():
            raise self._error("the closing record names another number of batches", index)
        return not self.closed

    def _check(self, pieces: Pieces, stated: bytes, index: int) -> None:
        try:
            self._crc = crc_of(pieces, *find_digits(pieces, stated), self._crc)
        except LookupError:
            raise self._error(_DAMAGED, index) from None
        if stated != digits_of(self._crc):
            raise self._error(_DAMAGED, index)

    def _error(self, problem: str, index: int) -> InputError:
        return InputError(problem, source=self._name, batch=index)


def log_check(raw: RawBytes, name: str, schema: pa.Schema, metadata: Any, verifies: bool = True) -> LogCheck | None:
    """Return the check that a stream needs, None if it is not a log.

    metadata : of its first batch. It alone identifies a log too, since the mark in the schema may be damaged.
    """
    version = (schema.metadata or {}).get(LOG_KEY)
    if version is None and (metadata is None or BATCH_KEY not in dict(metadata)):
        return None
    return LogCheck(raw, name, version, verifies)


def is_log(schema: pa.Schema) -> bool:
    """Return whether a stream's schema has the mark of a log."""
    return LOG_KEY in (schema.metadata or {})


# ---- bytes


def digits_of(crc: int) -> bytes:
    return f"{crc:08x}".encode()


def find_digits(pieces: Pieces, digits: bytes) -> tuple[int, int]:
    """Find a checksum's first digits: the index of the piece and the offset in it. Raises LookupError.

    Searches for a string of the metadata: its length, the text and a zero byte.
    """
    for number, piece in enumerate(pieces):
        for hit in _STATED.finditer(piece):
            if hit[1] == digits:
                return number, hit.start(1)
    raise LookupError(digits)


def crc_of(pieces: Pieces, number: int, offset: int, crc: int) -> int:
    """Extend the running checksum by the pieces. Eight bytes of one of them count as zeros (the character)."""
    for here, piece in enumerate(pieces):
        data = memoryview(piece)
        if here == number:
            crc = zlib.crc32(_ZEROS, zlib.crc32(data[:offset], crc))
            data = data[offset + len(_ZEROS) :]
        crc = zlib.crc32(data, crc)
    return crc


def _misplaced(digits: bytes, expected: int) -> str:
    """Return the error message for a batch whose number differs from its position in the log."""
    if not digits.isdigit() or len(digits) > 18:
        return f"expected batch {expected} of the log, got {digits.decode(errors='backslashreplace')}"
    number = int(digits)
    if number < expected:
        return f"expected batch {expected} of the log, got {number}: delivered again, or out of order"
    missing = f"batch {expected} is" if number == expected + 1 else f"batches {expected} to {number - 1} are"
    return f"expected batch {expected} of the log, got {number}: a gap, {missing} missing or out of order"
