"""Parquet files: read a few row groups' pages at a time; their batches mean nothing.

Of ``cat a b`` any reader takes b's footer with a's bytes, which look the same where both came from one
writer. So the bytes between the last column and the footer are accounted for.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet

from penstock.errors import InputError, TruncatedInputError
from penstock.io.parts import Batch, Batches, Part, arrow_errors

MAGIC = b"PAR1"
_TAIL_BYTES = 8  # uint32 length of the footer, magic
_ROWS_AT_ONCE = 1 << 16
_READ_BYTES = 1 << 20
_NOT_READ = "corrupt Parquet file"


def parquet_part(file: pa.NativeFile, size: int, name: str) -> Part:
    # A mapped file is read where it lies; of others, a whole column of a row group would be read at once.
    buffer_bytes = 0 if isinstance(file, pa.MemoryMappedFile) else _READ_BYTES
    with arrow_errors(_NOT_READ, name):
        file.seek(max(0, size - len(MAGIC)))
        if bytes(file.read(len(MAGIC))) != MAGIC or size < 12:
            problem = "the Parquet file has no footer: it was cut, or its writer not closed"
            raise TruncatedInputError(problem, source=name)
        file.seek(0)
        parquet = pa.parquet.ParquetFile(file, buffer_size=buffer_bytes)
        schema, num_rows = parquet.schema_arrow, parquet.metadata.num_rows
        if _holds_two(file, size, parquet.metadata):
            raise InputError("two Parquet files in one? Give them as two sources", source=name)
    num_done = 0

    def batches(columns: list[str]) -> Batches:
        nonlocal num_done
        num_done = 0
        with arrow_errors(_NOT_READ, name):
            incoming = parquet.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns)
        while True:
            with arrow_errors(f"{_NOT_READ} after row {num_done}", name):
                batch = next(incoming, None)
            if batch is None:
                return
            first_row, num_done = num_done, num_done + batch.num_rows
            yield Batch(batch, None, first_row)

    def fraction() -> float:
        return num_done / num_rows if num_rows else 1.0

    return Part(name, schema, False, batches, num_rows, "Parquet file", fraction)


def _holds_two(file: pa.NativeFile, size: int, metadata: Any) -> bool:
    """Whether a file ends inside this one: its magic and another's lie back to back.

    Where a file of n bytes precedes, n bytes more lie between the last column and the footer than the
    footer knows of; so the other's end is looked for in the first n bytes, which without page
    indexes are none.
    """
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    end = max((_start(c) + c.total_compressed_size for c in columns), default=len(MAGIC))
    unknown = size - _TAIL_BYTES - metadata.serialized_size - end
    at, seam = 0, MAGIC * 2
    while at < unknown:
        file.seek(at)
        if seam in bytes(file.read(_READ_BYTES + len(seam))):
            return True
        at += _READ_BYTES
    return False


def _start(column: Any) -> int:
    start: int = column.data_page_offset
    return min(start, column.dictionary_page_offset) if column.has_dictionary_page else start
