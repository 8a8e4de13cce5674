"""Any source → record batches, with an error where the input stops before its end or goes on after it.

A source is a path, a directory, ``-`` (standard input), a URI of pyarrow.fs, an open binary file,
anything with ``__arrow_c_stream__``, or an iterable of record batches. It is read as parts (the
files of a directory; most sources are one part), each with its own schema.

Arrow IPC has no checksum and a stream cut at a batch boundary looks complete to Arrow: the end
marker is looked for here. pyarrow stops silently both where the marker is and where the input ends;
``tell()`` after the last batch and after the end tells the two apart (8 bytes, or 4 in files
written before Arrow 0.15).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.ipc
import pyarrow.parquet

from penstock.errors import InputError, TruncatedInputError
from penstock.io.ipc_file import check_ipc_file

ARROW_FILE, PARQUET, FEATHER_V1, GZIP, CONTINUATION = b"ARROW1", b"PAR1", b"FEA1", b"\x1f\x8b", b"\xff\xff\xff\xff"
END_KEY = b"penstock.end"
# A stream of before Arrow 0.15 begins with the length of its schema message: more than this is none.
_MAX_SCHEMA_BYTES = 1 << 26
_PARQUET_ROWS_AT_ONCE = 1 << 16
_ARROW_ERRORS = (pa.ArrowException, OSError, EOFError)


@dataclass(frozen=True)
class Batch:
    """One record batch and where it stood."""

    data: pa.RecordBatch
    index: int | None  # None: the source has no batches of its own (Parquet)
    first_row: int  # of the batch, counted over the part
    ends_frame: bool = False


@dataclass
class Part:
    """One schema and its batches.

    has_boundaries : whether a record batch means something (else frames need columns or a number of rows)
    batches : given the columns wanted, yields them; raises InputError at a damaged or missing end
    """

    name: str
    schema: pa.Schema
    has_boundaries: bool
    batches: Callable[[list[str]], Iterator[Batch]]
    num_rows: int | None = None
    container: str = ""


@dataclass
class Source:
    """Parts in order. ``fraction`` of the bytes read so far, where the length is known."""

    name: str
    parts: Callable[[], Iterator[Part]]
    fraction: Callable[[], float | None] = field(default=lambda: None)


def open_sources(source: Any, allow_missing_end: bool = False) -> list[Source]:
    """One source, or a list or tuple of paths and URIs, as sources in order."""
    if isinstance(source, list | tuple) and source and all(isinstance(s, str | os.PathLike) for s in source):
        return [open_source(s, allow_missing_end) for s in source]
    return [open_source(source, allow_missing_end)]


def open_source(source: Any, allow_missing_end: bool = False) -> Source:
    """Decide how a source is read; nothing is opened yet but what exists is checked."""
    if isinstance(source, str | os.PathLike):
        return _named_source(os.fspath(source), allow_missing_end)
    if isinstance(source, pa.RecordBatch):
        return _batches_source([source], "<record batch>")
    if isinstance(source, pa.RecordBatchReader):
        return _reader_source(source, "<record batch reader>", has_boundaries=True)
    if hasattr(source, "__arrow_c_stream__"):
        return _capsule_source(source)
    if hasattr(source, "read"):
        name = getattr(source, "name", None)
        return _stream_source(source, name if isinstance(name, str) else "<stream>", allow_missing_end)
    if isinstance(source, Iterable):
        return _batches_source(source, "<batches>")
    raise InputError(
        "expected a path, '-', a URI, an object with __arrow_c_stream__, a binary file or an iterable of "
        f"record batches, got {type(source).__name__}"
    )


# ---- files


def _named_source(text: str, allow_missing_end: bool) -> Source:
    if text == "-":
        return _stream_source(sys.stdin.buffer, "<stdin>", allow_missing_end)
    try:
        fs, path = _filesystem(text)
        info = fs.get_file_info(path)
    except _ARROW_ERRORS as error:
        raise InputError(f"cannot open: {error}", source=text) from error
    if info.type == pa.fs.FileType.NotFound:
        raise InputError("no such file or directory", source=text)
    if info.type == pa.fs.FileType.Directory:
        files = _files_of(fs, path, text)
    else:
        files = [(text, path)]
    reading = _Reading()

    def parts() -> Iterator[Part]:
        for number, (name, at) in enumerate(files):
            reading.begin(number, len(files))
            yield _open_file(fs, at, name, reading, allow_missing_end)

    return Source(text, parts, reading.fraction)


def _filesystem(text: str) -> tuple[pa.fs.FileSystem, str]:
    if "://" in text:
        fs, path = pa.fs.FileSystem.from_uri(text)
        return fs, path
    return pa.fs.LocalFileSystem(), os.path.abspath(text)


def _files_of(fs: pa.fs.FileSystem, path: str, name: str) -> list[tuple[str, str]]:
    """A directory's files by name, those of its folders included; hidden ones and marks (_SUCCESS) left out."""
    found = fs.get_file_info(pa.fs.FileSelector(path, recursive=True))
    root = path.rstrip("/") + "/"
    inside = sorted(f.path.removeprefix(root) for f in found if f.type == pa.fs.FileType.File)
    inside = [f for f in inside if not any(step.startswith((".", "_")) for step in f.split("/"))]
    if not inside:
        raise InputError("the directory holds no files", source=name)
    return [(f"{name.rstrip('/')}/{f}", root + f) for f in inside]


class _Reading:
    """How far the reading of a list of files has come."""

    def __init__(self) -> None:
        self._done, self._of = 0, 1
        self._file: Any = None
        self._size = 0

    def begin(self, number: int, of: int) -> None:
        self._done, self._of, self._file = number, of, None

    def opened(self, file: Any, size: int) -> None:
        self._file, self._size = file, size

    def fraction(self) -> float | None:
        inside = 0.0
        if self._file is not None and not self._file.closed and self._size:
            inside = self._file.tell() / self._size
        return (self._done + inside) / self._of


def _open_file(fs: pa.fs.FileSystem, path: str, name: str, reading: _Reading, allow_missing_end: bool) -> Part:
    try:
        if isinstance(fs, pa.fs.LocalFileSystem) and os.path.isfile(path):
            file = pa.memory_map(path) if os.path.getsize(path) else pa.BufferReader(b"")
        elif isinstance(fs, pa.fs.LocalFileSystem):  # a pipe or a device: read once, from front to back
            return _open_stream(open(path, "rb"), name, allow_missing_end)  # noqa: SIM115 (closed when it is dropped)
        else:
            file = fs.open_input_file(path)
        size = file.size()
        reading.opened(file, size)
        if size == 0:
            raise InputError("the file is empty (0 bytes): not even a schema", source=name)
        head = bytes(file.read(8))
        file.seek(0)
    except _ARROW_ERRORS as error:
        raise InputError(f"cannot open: {error}", source=name) from error
    return _open_seekable(file, size, head, name, allow_missing_end)


def _open_seekable(file: Any, size: int, head: bytes, name: str, allow_missing_end: bool) -> Part:
    if head.startswith(ARROW_FILE):
        return _ipc_file_part(file, size, name)
    if head.startswith(PARQUET):
        return _parquet_part(file, size, name)
    return _ipc_stream_part(file, head, name, allow_missing_end)


def _ipc_file_part(file: Any, size: int, name: str) -> Part:
    check_ipc_file(file, size, name)
    try:
        reader = pa.ipc.open_file(file)
    except _ARROW_ERRORS as error:
        raise InputError(f"corrupt Arrow IPC file: {error}", source=name) from error

    def batches(columns: list[str]) -> Iterator[Batch]:
        first_row = 0
        for index in range(reader.num_record_batches):
            try:
                batch, metadata = reader.get_batch_with_custom_metadata(index)
            except _ARROW_ERRORS as error:
                raise InputError(f"corrupt Arrow IPC file: {error}", source=name, batch=index) from error
            yield Batch(batch, index, first_row, _ends_frame(metadata))
            first_row += batch.num_rows

    return Part(name, reader.schema, True, batches, container="Arrow IPC file")


def _parquet_part(file: Any, size: int, name: str) -> Part:
    file.seek(max(0, size - 4))
    if bytes(file.read(4)) != PARQUET:
        raise TruncatedInputError("the Parquet file has no footer: it was cut, or its writer not closed", source=name)
    file.seek(0)
    try:
        parquet = pa.parquet.ParquetFile(file)
    except _ARROW_ERRORS as error:
        raise InputError(f"corrupt Parquet file: {error}", source=name) from error

    def batches(columns: list[str]) -> Iterator[Batch]:
        first_row = 0
        try:
            for batch in parquet.iter_batches(batch_size=_PARQUET_ROWS_AT_ONCE, columns=columns):
                yield Batch(batch, None, first_row)
                first_row += batch.num_rows
        except _ARROW_ERRORS as error:
            raise InputError(f"corrupt Parquet file after row {first_row}: {error}", source=name) from error

    return Part(name, parquet.schema_arrow, False, batches, parquet.metadata.num_rows, "Parquet file")


# ---- streams


class _Forward:
    """A binary stream that is read once: remembers its beginning for the sniff, and how far it is."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._ahead, self._at = stream, b"", 0
        self.closed = False

    def peek(self, num_bytes: int) -> bytes:
        while len(self._ahead) < num_bytes and (more := self._stream.read(num_bytes - len(self._ahead))):
            self._ahead += more
        return self._ahead

    def read(self, num_bytes: int = -1) -> bytes:
        if self._ahead:
            cut = len(self._ahead) if num_bytes < 0 else num_bytes
            out, self._ahead = self._ahead[:cut], self._ahead[cut:]
        else:
            out = self._stream.read(num_bytes) or b""
        self._at += len(out)
        return out

    def tell(self) -> int:
        return self._at

    def close(self) -> None:
        self.closed = True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


def _stream_source(stream: Any, name: str, allow_missing_end: bool) -> Source:
    return Source(name, lambda: iter([_open_stream(stream, name, allow_missing_end)]))


def _open_stream(stream: Any, name: str, allow_missing_end: bool) -> Part:
    forward = _Forward(stream)
    head = forward.peek(8)
    if not head:
        raise InputError("the input is empty (0 bytes): not even a schema", source=name)
    if head.startswith((ARROW_FILE, PARQUET)):
        # These formats are read from their end: keep them on disk, not in memory.
        spool = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the part)
        shutil.copyfileobj(forward, spool)
        size = spool.tell()
        spool.seek(0)
        return _open_seekable(pa.PythonFile(spool, mode="r"), size, head, name, allow_missing_end)
    return _ipc_stream_part(pa.PythonFile(forward, mode="r"), head, name, allow_missing_end)


def _ipc_stream_part(file: Any, head: bytes, name: str, allow_missing_end: bool) -> Part:
    if not head.startswith(CONTINUATION) and not 0 < int.from_bytes(head[:4], "little") < _MAX_SCHEMA_BYTES:
        raise InputError(_what_it_is(head), source=name)
    try:
        reader = pa.ipc.open_stream(file)
    except _ARROW_ERRORS as error:
        if _at_end(file):
            raise TruncatedInputError("the stream was cut inside its schema", source=name) from error
        raise InputError(f"not an Arrow IPC stream: {error}", source=name) from error

    def batches(columns: list[str]) -> Iterator[Batch]:
        index, first_row, end_of_last = 0, 0, file.tell()
        while True:
            try:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
            except StopIteration:
                break
            except _ARROW_ERRORS as error:
                if _at_end(file):
                    raise TruncatedInputError("the stream was cut inside this batch", source=name, batch=index) from (
                        error
                    )
                raise InputError(f"corrupt Arrow IPC stream: {error}", source=name, batch=index) from error
            end_of_last = file.tell()
            yield Batch(batch, index, first_row, _ends_frame(metadata))
            index, first_row = index + 1, first_row + batch.num_rows
        # 8 bytes: the end marker; 4: that of old writers; 0, or a dictionary without its batch: none.
        has_end = file.tell() - end_of_last in (4, 8)
        if not has_end and not allow_missing_end:
            raise TruncatedInputError(
                f"the stream has no end marker after batch {index - 1}: it was cut, or its writer not closed "
                "(--allow-missing-end accepts that)"
                if index
                else "the stream has no end marker after its schema (--allow-missing-end accepts that)",
                source=name,
            )
        if has_end and not _at_end(file):
            raise InputError(
                f"bytes after the end marker (after batch {index - 1}): two streams in one? Give them as two sources",
                source=name,
            )

    return Part(name, reader.schema, True, batches, container="Arrow IPC stream")


def looks_like_arrow(path: str | os.PathLike[str]) -> bool:
    """Whether a local file begins as Arrow IPC or Parquet does."""
    with open(path, "rb") as file:
        head = file.read(8)
    return head.startswith((ARROW_FILE, PARQUET, CONTINUATION, FEATHER_V1))


def _at_end(file: Any) -> bool:
    try:
        return not file.read(1)
    except _ARROW_ERRORS:
        return True


def _what_it_is(head: bytes) -> str:
    if head.startswith(FEATHER_V1):
        return "a Feather V1 file; write it as Arrow IPC (Feather V2)"
    if head.startswith(GZIP):
        return "compressed with gzip; decompress it first (zcat FILE | penstock replay CONFIG -)"
    if len(head) < 8:
        return f"{len(head)} bytes: neither Arrow IPC nor Parquet"
    return "neither an Arrow IPC stream, an Arrow IPC file nor Parquet"


def _ends_frame(metadata: Any) -> bool:
    return metadata is not None and END_KEY in dict(metadata)


# ---- objects


def _reader_source(reader: pa.RecordBatchReader, name: str, has_boundaries: bool) -> Source:
    def batches(columns: list[str]) -> Iterator[Batch]:
        first_row = index = 0
        while True:
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                return
            except _ARROW_ERRORS as error:
                raise InputError(f"the stream failed: {error}", source=name, batch=index) from error
            yield Batch(batch, index, first_row)
            index, first_row = index + 1, first_row + batch.num_rows

    return Source(name, lambda: iter([Part(name, reader.schema, has_boundaries, batches, container="Arrow stream")]))


def _capsule_source(source: Any) -> Source:
    name = f"<{type(source).__module__.split('.')[0]} {type(source).__name__}>"
    try:
        reader = pa.RecordBatchReader.from_stream(source)
    except _ARROW_ERRORS as error:
        raise InputError(f"no stream of record batches: {error}", source=name) from error
    # Tables and query results are cut as their engine pleased: their batches mean nothing.
    return _reader_source(reader, name, has_boundaries=False)


def _batches_source(batches: Iterable[Any], name: str) -> Source:
    def parts() -> Iterator[Part]:
        incoming = iter(batches)
        first = next(incoming, None)
        if first is None:
            return
        _check_batch(first, name, 0)

        def read(columns: list[str]) -> Iterator[Batch]:
            yield Batch(first, 0, 0)
            first_row = first.num_rows
            for index, batch in enumerate(incoming, 1):
                _check_batch(batch, name, index)
                if not batch.schema.equals(first.schema):
                    raise InputError(
                        f"the schema changed: expected {_one_line(first.schema)}, got {_one_line(batch.schema)}",
                        source=name,
                        batch=index,
                    )
                yield Batch(batch, index, first_row)
                first_row += batch.num_rows

        yield Part(name, first.schema, True, read, container="record batches")

    return Source(name, parts)


def _check_batch(batch: Any, name: str, index: int) -> None:
    if not isinstance(batch, pa.RecordBatch):
        raise InputError(f"expected a pyarrow.RecordBatch, got {type(batch).__name__}", source=name, batch=index)


def _one_line(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name}: {f.type}" for f in schema)
