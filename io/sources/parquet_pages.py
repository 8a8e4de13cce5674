"""The columns and pages of a Parquet file, read before Arrow reads them.

pyarrow does not expose all of it, ends the process on some damaged footers, and allocates whatever size a page states.
This module reads the few fields needed: the location of the columns' chunks, their numbers of values, and the sizes
that their pages state.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.io.sources.ipc_messages import check_unpacked
from penstock.io.sources.thrift import read_struct

_MAX_ROWS_AT_ONCE = 1 << 16
_VALUES_AT_ONCE = 1 << 22  # 16 MiB of floats; reading holds several times that
_HEADER_BYTES = 1 << 16  # of a page's header, which may hold the smallest and largest of its texts
_FLOAT_BYTES = 4

# Field numbers of the footer, down to where the chunks of the columns lie.
_ROW_GROUPS, _COLUMNS, _NUM_ROWS, _META_DATA = 4, 1, 3, 3
_VALUES, _BYTES, _DATA_PAGE, _DICTIONARY_PAGE = 5, 7, 9, 11
_CHUNK = {_VALUES: int, _BYTES: int, _DATA_PAGE: int, _DICTIONARY_PAGE: int}
_FOOTER = {_ROW_GROUPS: [{_COLUMNS: [{_META_DATA: _CHUNK}], _NUM_ROWS: int}]}

# Of a page's header.
_UNPACKED, _PACKED, _DATA_V1, _DATA_V2, _PAGE_VALUES = 2, 3, 5, 8, 1
_PAGE = {_UNPACKED: int, _PACKED: int, _DATA_V1: {_PAGE_VALUES: int}, _DATA_V2: {_PAGE_VALUES: int}}


@dataclass(frozen=True)
class ColumnChunk:
    """One column of one row group. start, end : bytes of the file"""

    start: int
    end: int
    num_values: int


@dataclass(frozen=True)
class Group:
    num_rows: int
    chunks: tuple[ColumnChunk, ...]

    def of(self, columns: Sequence[int]) -> Group:
        """Return the group with some of its columns, by their numbers."""
        return Group(self.num_rows, tuple(self.chunks[number] for number in columns if number < len(self.chunks)))


def read_groups(footer: bytes) -> list[Group]:
    """Return the row groups. Raises ValueError or IndexError for a damaged footer."""
    return [
        Group(group.get(_NUM_ROWS, 0), tuple(_chunk(column.get(_META_DATA, {})) for column in group.get(_COLUMNS, [])))
        for group in read_struct(footer, _FOOTER)[0].get(_ROW_GROUPS, [])
    ]


def _chunk(fields: dict[int, Any]) -> ColumnChunk:
    start: int = fields.get(_DATA_PAGE, 0)
    start = min(start, fields.get(_DICTIONARY_PAGE) or start)
    return ColumnChunk(start, start + int(fields.get(_BYTES, 0)), fields.get(_VALUES, 0))


def rows_at_once(groups: list[Group]) -> int:
    """Return the number of rows per batch: fewer if they are long."""
    longest = max((c.num_values // max(1, g.num_rows) for g in groups for c in g.chunks), default=1)
    return max(1, min(_MAX_ROWS_AT_ONCE, _VALUES_AT_ONCE // max(1, longest)))


def check_pages(file: pa.NativeFile, groups: list[Group], source: str) -> None:
    """Raise InputError for a page, or a row, that unpacks to far more than its size. Leaves the position at 0."""
    for group in groups:
        for chunk in group.chunks:
            num_values = _walk(file, chunk, source)
            row_bytes = max(num_values, chunk.num_values) // max(1, group.num_rows) * _FLOAT_BYTES
            check_unpacked(row_bytes, chunk.end - chunk.start, source)
    file.seek(0)


def _walk(file: pa.NativeFile, chunk: ColumnChunk, source: str) -> int:
    """Count the values of the pages, as far as they can be followed: Arrow reports what is wrong after that."""
    offset, num_values = chunk.start, 0
    while 0 <= offset < chunk.end:
        try:
            page, length = read_struct(file.read_at(min(_HEADER_BYTES, chunk.end - offset), offset), _PAGE)
            unpacked, packed = page[_UNPACKED], page[_PACKED]
        except (ValueError, LookupError, OSError, struct.error):
            break
        check_unpacked(unpacked, packed, source)
        if packed < 0:
            break
        for kind in (_DATA_V1, _DATA_V2):
            num_values += page.get(kind, {}).get(_PAGE_VALUES, 0)
        offset += length + packed
    return num_values
