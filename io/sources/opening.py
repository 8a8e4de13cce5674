"""Convert any source to its parts: choose how to read it, and walk directories.

A source is a path, a directory, ``-`` (standard input), a URI of pyarrow.fs, of a flight, of a topic or of a table
with versions, an open binary file, anything with ``__arrow_c_stream__``, a dataset, a lazy frame, or an iterable of
record batches. It is read as parts (the files of a directory; most sources are one part), each with its own schema. How
bytes become batches is defined in ``files`` and ``ipc_stream``; ``in_memory`` converts objects.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pyarrow as pa
import pyarrow.fs

from penstock.base.errors import InputError, UsageError, close_names
from penstock.base.filesystem.file_stores import place_of
from penstock.io.sources.batch import Batch, Part, Parts, Source, arrow_errors
from penstock.io.sources.file_names import check_distinct, filesystem_of, is_mark, keys_of, matches, with_keys
from penstock.io.sources.files import open_file
from penstock.io.sources.in_memory import parts_of_batches, parts_of_reader, reader_of_capsule, scan_of, stream_part
from penstock.io.sources.ipc_file import ARROW_FILE
from penstock.io.sources.ipc_messages import CONTINUATION
from penstock.io.sources.ipc_stream import FEATHER_V1, open_stream
from penstock.io.sources.parquet import ENCRYPTED, PARQUET
from penstock.io.sources.remote_file import opening_file
from penstock.io.sources.source_kinds import source_kind

__all__ = ["Batch", "Part", "Source", "looks_like_arrow", "open_source", "open_sources", "read_once"]

PATIENCE_S = 60.0


def open_sources(
    source: Any, allow_missing_end: bool = False, as_files: bool = False, patience_s: float = PATIENCE_S
) -> list[Source]:
    """One source, or a list or tuple of sources, in order. A list that holds record batches is one source.

    A topic is as many sources as it has partitions. as_files, patience_s : as in ReadOptions
    """
    opened: list[Source] = []
    for each in expanded(source):
        kind = source_kind(each)
        opened += [open_source(each, allow_missing_end, as_files)] if kind is None else kind.open(each, patience_s)
    return opened


def expanded(source: Any) -> list[Any]:
    """Return a source, or a list or tuple of sources, as a list, with the matches in place of each glob.

    Raises InputError for a glob that nothing matches.
    """
    several = isinstance(source, list | tuple) and source and not any(isinstance(s, pa.RecordBatch) for s in source)
    return [name for each in (source if several else (source,)) for name in matches(each)]


def open_source(source: Any, allow_missing_end: bool = False, as_files: bool = False) -> Source:
    """Choose how to read a source and check that it exists, without opening it."""
    if isinstance(source, Source):
        return source
    if isinstance(source, str | os.PathLike):
        return _named_source(os.fsdecode(source), allow_missing_end, as_files)
    if isinstance(source, pa.RecordBatch):
        return Source("<record batch>", lambda: parts_of_batches([source], "<record batch>"), is_ready=True)
    if isinstance(source, pa.RecordBatchReader):
        return _one_part("<record batch reader>", lambda name, _: stream_part(source, name, has_boundaries=True))
    name = f"<{type(source).__module__.split('.')[0]} {type(source).__name__}>"
    if hasattr(source, "__arrow_c_stream__"):
        reader = reader_of_capsule(source, name)
        # An engine chooses the batches of tables and query results: they delimit no frames.
        is_ready = isinstance(source, pa.Table)
        return Source(name, lambda: parts_of_reader(reader, name), is_ready=is_ready)
    if (scanned := scan_of(source)) is not None:
        return _one_part(name, lambda name, _: scanned(name))
    if callable(getattr(source, "read", None)):
        stream_name = getattr(source, "name", None)
        return _stream_source(source, stream_name if isinstance(stream_name, str) else "<stream>", allow_missing_end)
    if isinstance(source, Iterable) and not isinstance(source, bytes | bytearray | memoryview | dict):
        is_ready = isinstance(source, list | tuple)
        return Source("<batches>", lambda: parts_of_batches(source, "<batches>"), is_ready=is_ready)
    raise InputError(
        "expected a path, '-', a URI, an object with __arrow_c_stream__, a dataset, a lazy frame, a binary file or an "
        f"iterable of record batches, got {type(source).__name__}"
    )


def read_once(name: str) -> str | None:
    """Return the kind of a named source that can be read only once; None: it can be read again."""
    if name == "-":
        return "standard input"
    if (kind := source_kind(name)) is not None:
        return kind.read_once
    if "://" in name:
        return None
    mode = os.stat(name).st_mode if os.path.exists(name) else stat.S_IFREG
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "a pipe"


def check_not_read(sources: Any, outputs: Iterable[str | os.PathLike[str]]) -> None:
    """Raise UsageError if a file to write is a file of a source, which it would replace."""
    existing = {(status.st_dev, status.st_ino): file for file, status in _statuses(outputs)}
    for source in expanded(sources) if existing else ():
        if isinstance(source, str | os.PathLike) and source_kind(source) is None and "://" not in os.fspath(source):
            path = os.fsdecode(source)
            files = (
                [file for _, file in _files_of(pa.fs.LocalFileSystem(), path, path)] if os.path.isdir(path) else [path]
            )
            for _, status in _statuses(files):
                if (file := existing.get((status.st_dev, status.st_ino))) is not None:
                    raise UsageError(
                        f"{file}: is read as a source, and would be replaced; give the output another place"
                    )


def _statuses(files: Iterable[str | os.PathLike[str]]) -> Iterator[tuple[str | os.PathLike[str], os.stat_result]]:
    for file in files:
        with suppress(OSError):  # a file to write may be missing; another is reported when it is opened
            if stat.S_ISREG((status := os.stat(file)).st_mode):
                yield file, status


def looks_like_arrow(path: str | os.PathLike[str]) -> bool:
    """Return whether a local file begins like Arrow IPC or Parquet."""
    with open(path, "rb") as file:
        head = file.read(8)
    return head.startswith((ARROW_FILE, PARQUET, ENCRYPTED, CONTINUATION, FEATHER_V1))


def _stream_source(stream: Any, name: str, allow_missing_end: bool) -> Source:
    return _one_part(name, lambda name, stack: open_stream(stream, name, stack, allow_missing_end))


def _one_part(name: str, open_part: Callable[[str, ExitStack], Part]) -> Source:
    def parts() -> Parts:
        with ExitStack() as stack:
            yield open_part(name, stack)

    return Source(name, parts)


def _named_source(text: str, allow_missing_end: bool, as_files: bool) -> Source:
    if text == "-":
        return _stream_source(sys.stdin.buffer, "<stdin>", allow_missing_end)
    if not text:
        raise InputError("expected a path, got an empty name")
    if (kind := source_kind(text)) is not None:
        return kind.open(text, PATIENCE_S)[0]
    name = place_of(text)
    with arrow_errors("cannot open", name):
        fs, path = filesystem_of(text)
        kind = fs.get_file_info(path).type
        if kind == pa.fs.FileType.NotFound:
            raise InputError(f"no such file or directory{_near(text)}", source=name)
        try:
            if kind == pa.fs.FileType.Directory and not as_files:
                _check_no_table(fs, path, name)
            files = _files_of(fs, path, name) if kind == pa.fs.FileType.Directory else [(name, path)]
        except UnicodeDecodeError:
            problem = "the name of a file in it is not UTF-8, and Arrow knows no other names; rename it"
            raise InputError(problem, source=name) from None

    keys = keys_of([file_name for file_name, _ in files])

    def parts() -> Parts:
        opening, is_remote = None, not isinstance(fs, pa.fs.LocalFileSystem)
        for number, (file_name, file_path) in enumerate(files, 1):
            with ExitStack() as stack:
                part = open_file(fs, file_path, file_name, stack, allow_missing_end, opening)
                opening = opening_file(fs, files[number][1]) if is_remote and number < len(files) else None
                yield with_keys(part, keys(file_name))

    return Source(name, parts, len(files), is_ready=read_once(text) is None)


def _near(text: str) -> str:
    """Return a hint: a similar name in the same folder, or the kinds of source."""
    folder, name = os.path.split(text)
    try:
        names = [] if "://" in text else os.listdir(folder or ".")
    except OSError:
        names = []
    near = close_names(name, names, cutoff=0.75)
    if near:
        return f"; did you mean '{os.path.join(folder, near[0])}'?"
    return "; give an Arrow or Parquet file, a directory of them, or a URI"


def _check_no_table(fs: pa.fs.FileSystem, path: str, name: str) -> None:
    """Raise UsageError for a directory that is a table with versions: its files also hold rows that were replaced."""
    spellings = {
        "_delta_log": f"delta:{name}",
        "_versions": f"lance:{name}",
        ".hoodie": "a copy of its rows (Hudi is not read)",
    }
    for entry in fs.get_file_info(pa.fs.FileSelector(path)):
        spelling = spellings.get(entry.base_name)
        if entry.base_name == "metadata" and any(
            file.path.endswith(".metadata.json") for file in fs.get_file_info(pa.fs.FileSelector(entry.path))
        ):
            spelling = "iceberg:CATALOG/NAMESPACE.TABLE"
        if spelling is not None and entry.type == pa.fs.FileType.Directory:
            raise UsageError(f"{name}: is a table with versions; give {spelling}, or --as-files for all of its files")


def _files_of(fs: pa.fs.FileSystem, path: str, name: str) -> list[tuple[str, str]]:
    """Return a directory's files by name, including subfolders, without hidden files and marks (_SUCCESS)."""
    entries = fs.get_file_info(pa.fs.FileSelector(path, recursive=True))
    root = path.rstrip("/") + "/"
    inside = sorted(f.path.removeprefix(root) for f in entries if f.type == pa.fs.FileType.File)
    inside = [f for f in inside if not any(map(is_mark, f.split("/")))]
    if not inside:
        raise InputError("the directory holds no files", source=name)
    if isinstance(fs, pa.fs.LocalFileSystem):
        check_distinct([root + file for file in inside], name)
    return [(f"{name.rstrip('/')}/{f}", root + f) for f in inside]
