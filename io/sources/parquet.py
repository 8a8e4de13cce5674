"""Parquet files, read a few pages at a time; their batches delimit no frames.

For ``cat a b`` every reader uses b's footer with a's bytes, which look alike if one writer wrote both. This module
therefore accounts for the bytes between the last column and the footer.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet

from penstock.base.errors import InputError, TruncatedInputError
from penstock.io.sources.batch import Batch, Batches, Part, arrow_errors
from penstock.io.sources.parquet_pages import Group, check_pages, read_groups, rows_at_once
from penstock.io.sources.remote_file import RemoteFile

PARQUET, ENCRYPTED = b"PAR1", b"PARE"
_TAIL_BYTES = 8  # uint32 length of the footer, magic
_READ_BYTES = 1 << 20
_NOT_READ = "corrupt Parquet file"


def parquet_part(file: pa.NativeFile, size: int, name: str) -> Part:
    with arrow_errors(_NOT_READ, name):
        footer = _footer(file, size, name)
        groups = read_groups(footer)
        if _holds_two(file, size - _TAIL_BYTES - len(footer), groups):
            raise InputError("two Parquet files in one? Give them as two sources", source=name)
        parquet = open_parquet(file)
        schema, num_rows = parquet.schema_arrow, parquet.metadata.num_rows

    def batches(columns: list[str]) -> Batches:
        part.done = 0
        with arrow_errors(_NOT_READ, name):
            used = [group.of(_leaves(parquet.schema, columns)) for group in groups]
            if isinstance(file, RemoteFile):  # to check its pages, it would have to be read twice
                chunks = zip(*[group.chunks for group in used], strict=False)
                file.blocks.read_in_order([[(chunk.start, chunk.end) for chunk in of_column] for of_column in chunks])
            else:
                check_pages(file, used, name)
            incoming = parquet.iter_batches(batch_size=rows_at_once(groups), columns=columns)
        while True:
            with arrow_errors(f"{_NOT_READ} after row {part.done}", name):
                batch = next(incoming, None)
            if batch is None:
                return
            first_row, part.done = part.done, part.done + batch.num_rows
            yield Batch(name, batch, None, first_row)

    part = Part(name, schema, False, batches, "Parquet file", num_rows)
    return part


def _leaves(schema: pa.parquet.ParquetSchema, columns: list[str]) -> list[int]:
    """Return the numbers of Parquet's columns that are, or are parts of, these columns."""
    inside = tuple(f"{column}." for column in columns)
    paths = [schema.column(number).path for number in range(len(schema))]
    return [number for number, path in enumerate(paths) if path in columns or path.startswith(inside)]


def open_parquet(file: Any) -> pa.parquet.ParquetFile:
    """Read a mapped file in place, and others a buffer at a time instead of a whole row group at once.

    file : a path, which is mapped, or an open file
    """
    mapped = not isinstance(file, pa.NativeFile) or isinstance(file, pa.MemoryMappedFile)
    buffer_bytes = 0 if mapped else _READ_BYTES
    return pa.parquet.ParquetFile(file, memory_map=mapped, buffer_size=buffer_bytes, pre_buffer=False)


def _footer(file: pa.NativeFile, size: int, name: str) -> bytes:
    """Read the footer."""
    tail = file.read_at(_TAIL_BYTES, max(0, size - _TAIL_BYTES))
    if size < len(PARQUET) + _TAIL_BYTES or not tail.endswith(PARQUET):
        problem = "the Parquet file has no footer: it was cut, or its writer not closed"
        raise TruncatedInputError(problem, source=name)
    length = int.from_bytes(tail[:4], "little")
    if not 0 < length <= size - _TAIL_BYTES - len(PARQUET):
        raise InputError(f"{_NOT_READ}: a footer of {length} bytes in a file of {size}", source=name)
    return bytes(file.read_at(length, size - _TAIL_BYTES - length))


def _holds_two(file: pa.NativeFile, num_bytes: int, groups: list[Group]) -> bool:
    """Return whether another file ends inside this one: its magic and the next one's are adjacent.

    Where a file of n bytes precedes, n bytes more lie between the last column and the footer than the
    footer knows of; so the other's end is looked for in the first n bytes, which without page
    indexes and filters are none.

    num_bytes : up to the footer
    """
    chunks = [chunk for group in groups for chunk in group.chunks]
    unknown = num_bytes - max((chunk.end for chunk in chunks), default=len(PARQUET))
    seam, has_seam, offset = PARQUET * 2, False, 0
    while offset < unknown and not has_seam:
        has_seam = seam in file.read_at(_READ_BYTES + len(seam), offset)
        offset += _READ_BYTES
    file.seek(0)
    return has_seam
