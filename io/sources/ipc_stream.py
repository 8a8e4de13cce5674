"""Binary streams that can be read only once, and Arrow IPC streams, including mapped ones.

Arrow IPC has no checksums, and a stream that was truncated at a batch boundary looks complete to Arrow, so
this module checks the end marker. pyarrow stops silently both at the marker and at the end of the input;
``tell()`` after the last batch and after the end distinguishes the two (8 bytes, or 4 in files
written before Arrow 0.15). penstock's logs have checksums: ``checksums`` verifies every batch.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from penstock.base.errors import InputError, PenstockError, TruncatedInputError
from penstock.io.sources.batch import RAISED, Batch, Batches, Part, arrow_errors, end_of_frame, input_error
from penstock.io.sources.checksums import Pieces, RawBytes, is_log, log_check
from penstock.io.sources.ipc_file import ARROW_FILE, ipc_file_part
from penstock.io.sources.ipc_messages import CONTINUATION, END_MARKER, Framing, Messages
from penstock.io.sources.parquet import ENCRYPTED, PARQUET, parquet_part
from penstock.io.sources.plain_messages import PlainMessages
from penstock.io.table_formats.unread_formats import ENCRYPTED_PARQUET

FEATHER_V1, GZIP = b"FEA1", b"\x1f\x8b"
# A stream from before Arrow 0.15 begins with the length of its schema message and the offset of its root:
# larger values are something else.
_MAX_SCHEMA_BYTES, _MAX_ROOT = 1 << 26, 256
# A stated length is trusted up to here; beyond, memory grows only with the data that arrives.
_READ_BYTES = 1 << 26
_OPEN_END = "it was cut, or its writer not closed (--allow-missing-end accepts that)"


class Forward(RawBytes):
    """A binary stream for Arrow: reads are full, and the first and last bytes are remembered.

    Keeps the bytes read, without a copy, until ``take`` or ``forget``.
    """

    def __init__(self, stream: Any, name: str) -> None:
        self._stream, self._name = stream, name
        self._ahead, self._last, self._at = b"", b"", 0
        self._kept: list[bytes] | None = []
        self._framing: Framing | None = None
        self.closed = False

    def peek(self, num_bytes: int) -> bytes:
        """Return the first bytes without reading them."""
        self._ahead += self._pull(num_bytes - len(self._ahead))
        return self._ahead

    def read(self, num_bytes: int = -1) -> bytes:
        ready = len(self._ahead) if num_bytes < 0 else num_bytes
        out, self._ahead = self._ahead[:ready], self._ahead[ready:]
        out += self._pull(max(num_bytes - len(out), 0) if num_bytes >= 0 else -1)
        self._at += len(out)
        self._last = out[-8:] if len(out) >= 8 else (self._last + out)[-8:]
        if self._kept is not None:
            self._kept.append(out)
        if self._framing is not None:
            self._framing.add(out)
        return out

    def expect_messages(self) -> None:
        """Begin to check batches before Arrow receives them: from here on it reads a stream."""
        self._framing = Framing(self._name)

    def last_read(self) -> bytes:
        return self._last

    def take(self) -> Pieces:
        pieces, self._kept = self._kept or [], []
        return pieces

    def forget(self) -> None:
        self._kept = None

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self.closed = True  # the stream itself belongs to the caller

    def _pull(self, num_bytes: int) -> bytes:
        """Read that many bytes, fewer only at the end: a pipe or a socket delivers them in pieces."""
        pieces: list[bytes] = []
        while num_bytes:
            with arrow_errors("cannot be read", self._name):
                piece = self._stream.read(min(num_bytes, _READ_BYTES) if num_bytes > 0 else _READ_BYTES)
                if not isinstance(piece, bytes | bytearray | memoryview | None):
                    got = f"one whose read() gives {type(piece).__name__}"
                    raise InputError(f"expected a binary file, got {got}", source=self._name)
                if piece and 0 < num_bytes < len(piece):
                    raise InputError(f"read({num_bytes}) gives {len(piece)} bytes", source=self._name)
            if not piece:
                break
            pieces.append(bytes(piece))
            num_bytes -= len(piece) if num_bytes > 0 else 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Mapped(RawBytes):
    """The raw bytes of a mapped file, or of a buffer, read in place."""

    def __init__(self, file: pa.NativeFile, name: str) -> None:
        self._file, self._messages, self._taken = file, Messages(name), 0

    def check_next(self) -> None:
        self._messages.check_next(self._file)

    def whole(self) -> pa.Buffer:
        place = self._file.tell()
        self._file.seek(0)
        memory = self._file.read_buffer()
        self._file.seek(place)
        return memory

    def last_read(self) -> bytes:
        return bytes(self._file.read_at(8, self._file.tell() - 8))

    def take(self) -> Pieces:
        start, self._taken = self._taken, self._file.tell()
        self._file.seek(start)
        return [self._file.read_buffer(self._taken - start)]


def open_stream(stream: Any, name: str, stack: ExitStack, allow_missing_end: bool) -> Part:
    """Return a stream's part, for any container. The stack closes its open files; the stream stays open."""
    forward = Forward(stream, name)
    with arrow_errors("cannot be read", name):
        seekable = bool(getattr(stream, "seekable", bool)()) and stream.tell() == 0
    head = forward.peek(8)
    if not head:
        raise InputError("the input is empty (0 bytes): not even a schema", source=name)
    if not head.startswith((ARROW_FILE, PARQUET)):
        forward.expect_messages()
        file = stack.enter_context(pa.PythonFile(forward, mode="r"))
        return ipc_stream_part(file, head, forward, name, allow_missing_end)
    # These two are read from their end.
    if seekable:
        with arrow_errors("cannot be read", name):
            stream.seek(0, 2)
            size = stream.tell()
            stream.seek(0)
        file = pa.PythonFile(stream, mode="r")  # not on the stack: closing it would close the caller's file
    else:
        forward.forget()
        file, size = _spooled(forward, stack)
    return (ipc_file_part if head.startswith(ARROW_FILE) else parquet_part)(file, size, name)


def open_bytes(data: bytes, name: str, allow_missing_end: bool) -> Part:
    """Return the part of a whole stream in memory, whose batches are read in place."""
    file = pa.BufferReader(data)
    return ipc_stream_part(file, data[:8], Mapped(file, name), name, allow_missing_end)


def _spooled(forward: Forward, stack: ExitStack) -> tuple[pa.NativeFile, int]:
    """Copy the rest of a stream to a file without a name, on disk. Raises OSError if there is no space."""
    with tempfile.NamedTemporaryFile(prefix="penstock-") as spool:
        shutil.copyfileobj(forward, spool, 1 << 20)
        spool.flush()
        return stack.enter_context(pa.memory_map(spool.name)), spool.tell()


def ipc_stream_part(
    file: pa.NativeFile,
    head: bytes,
    raw: RawBytes,
    name: str,
    allow_missing_end: bool,
    size: int | None = None,
) -> Part:
    """head : its first 8 bytes; raw : the bytes read so far; size : None if unknown."""
    _check_head(head, name)
    with arrow_errors("not an Arrow IPC stream", name):
        try:
            reader = pa.ipc.open_stream(file)
            schema = reader.schema
        except Exception as error:
            _raise_where_cut(file, error, TruncatedInputError("the stream was cut inside its schema", source=name))
            raise

    def batches(columns: list[str]) -> Batches:
        index, first_row, end_of_last = 0, 0, file.tell()
        check = log_check(raw, name, schema, None, part.verifies)
        part.has_checksums = check is not None
        memory = None if part.plain is None else raw.whole()
        plain: PlainMessages | None = None
        while True:
            begin = file.tell()
            if plain is not None and (run := plain.read(memory, begin, name, index, first_row)) is not None:
                part.done = end_of_last = run.offsets[-1]
                file.seek(end_of_last)
                yield run
                index, first_row = index + run.num_batches, first_row + run.num_rows
                continue
            if (read := _next_batch(reader, file, raw, name, index)) is None:
                break
            batch, metadata = read
            part.done = end_of_last = file.tell()
            if not index and check is None and (check := log_check(raw, name, schema, metadata, part.verifies)) is None:
                raw.forget()
            part.has_checksums = check is not None
            if check is not None and not check.is_data(metadata, index):
                continue
            yield Batch(name, batch, index, first_row, *end_of_frame(metadata, name, index))
            index, first_row = index + 1, first_row + batch.num_rows
            if plain is not None:
                plain.follow(batch)
            elif check is None and part.plain is not None and memory is not None:
                plain = PlainMessages(memory[begin:end_of_last].to_pybytes(), schema, part.plain, batch)
        part.done = file.tell()
        beyond = part.done - end_of_last
        # 8 bytes: the end marker; 4: that of old writers; 0: none; more: dictionaries without a batch after them.
        has_end = beyond in (4, 8) or (beyond > 8 and raw.last_read() == END_MARKER)
        place = f"after batch {index - 1}" if index else "after its schema"
        if check is not None and not check.closed and not allow_missing_end:
            raise TruncatedInputError(f"the log has no closing record {place}: {_OPEN_END}", source=name)
        if not has_end and not allow_missing_end:
            raise TruncatedInputError(f"the stream has no end marker {place}: {_OPEN_END}", source=name)
        if has_end and not _at_end(file):
            problem = f"bytes follow the end marker ({place}): two streams in one? Give them as two sources"
            raise InputError(problem, source=name)
        part.verified = check is not None and check.closed and has_end and part.verifies

    container = "log with checksums (Arrow IPC stream)" if is_log(schema) else "Arrow IPC stream"
    part = Part(name, schema, True, batches, container, size)
    return part


def _next_batch(
    reader: pa.ipc.RecordBatchStreamReader, file: pa.NativeFile, raw: RawBytes, name: str, index: int
) -> tuple[pa.RecordBatch, Any] | None:
    try:  # no context manager: batches may be small
        raw.check_next()
        try:
            batch, metadata = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            return None
        except Exception as error:
            problem = "the stream was cut inside this batch"
            _raise_where_cut(file, error, TruncatedInputError(problem, source=name, batch=index))
            raise
    except PenstockError:
        raise
    except RAISED as error:
        raise input_error(error, "corrupt Arrow IPC stream", name, index) from error
    return batch, metadata


def _raise_where_cut(file: pa.NativeFile, error: Exception, cut: TruncatedInputError) -> None:
    """Raise ``cut`` if the input has ended, and so has no end marker, unless the error is already one of penstock's."""
    if not isinstance(error, PenstockError) and _at_end(file):
        raise cut from error


def _at_end(file: pa.NativeFile) -> bool:
    try:
        with arrow_errors("", ""):
            return not file.read(1)
    except InputError:
        return True


def _check_head(head: bytes, name: str) -> None:
    if head.startswith(CONTINUATION):
        return
    if head.startswith(FEATHER_V1):
        kind = "a Feather V1 file; write it as Arrow IPC (Feather V2)"
    elif head.startswith(ENCRYPTED):
        kind = ENCRYPTED_PARQUET
    elif head.startswith(GZIP):
        kind = "compressed with gzip; decompress it first (zcat FILE | penstock replay CONFIG -)"
    elif len(head) < 8:
        kind = f"{len(head)} bytes: neither Arrow IPC nor Parquet"
    elif 0 < int.from_bytes(head[:4], "little") < _MAX_SCHEMA_BYTES and int.from_bytes(head[4:], "little") < _MAX_ROOT:
        return
    else:
        kind = "neither an Arrow IPC stream, an Arrow IPC file nor Parquet; write it as one of them"
    raise InputError(kind, source=name)
