"""Read runs of plain record batches from the messages of Arrow IPC, without an object per batch.

Most writers of small batches write the same message again and again, with other numbers. The first batch of a schema is
read by pyarrow, and then its message is a pattern for those that follow.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from penstock.io.sources.batch import Batch, PlainRoles
from penstock.io.sources.ipc_messages import BATCH, CONTINUATION, FlatbufferTable
from penstock.pyx.plain_batches import PlainRows, RepeatedMessages

PREFIX_BYTES = 8  # of a message: the continuation, and the length of its metadata

_NODE_BYTES = _BUFFER_BYTES = 16  # each two int64
_BITMAP = -1


class LateBatch(Batch):
    """A record batch that is not read until its data is used. data_of : reads it"""

    def __init__(self, source: str, data_of: Callable[[], pa.RecordBatch], index: int, first_row: int) -> None:
        self.source, self._data_of, self.index, self.first_row = source, data_of, index, first_row
        self.ends_frame, self.after = False, None

    @cached_property
    def data(self) -> pa.RecordBatch:
        return self._data_of()


@dataclass(eq=False)
class BatchRun:
    """Neighbouring plain batches. index, first_row : of the first one

    offsets : where the message of each begins in ``memory``, and the last one ends
    """

    source: str
    rows: PlainRows
    index: int
    first_row: int
    schema: pa.Schema
    memory: bytes | pa.Buffer
    offsets: list[int]
    ends_frame = is_frame_of_no_rows = False  # metadata would say so

    @property
    def num_rows(self) -> int:
        return self.rows.blocks.num_rows

    def batch(self, number: int, rows_before: int) -> Batch:
        """Return one of the batches, for other ways of reading. rows_before : it, in the run"""
        begin, end = self.offsets[number : number + 2]

        def data_of() -> pa.RecordBatch:
            return pa.ipc.read_record_batch(pa.py_buffer(self.memory)[begin:end], self.schema)

        return LateBatch(self.source, data_of, self.index + number, self.first_row + rows_before)


class PlainMessages:
    """Reads the plain batches of one stream or file, or of several with the same schema.

    first : the message of a batch that pyarrow has read; schema : of all batches; columns : that are read
    """

    def __init__(self, first: bytes, schema: pa.Schema, columns: PlainRoles) -> None:
        self._schema, self.columns = schema, columns
        self._messages = _pattern(first, schema, columns)

    def read(
        self,
        memory: bytes | pa.Buffer,
        begin: int,
        name: str,
        index: int,
        first_row: int,
        spans: npt.NDArray[Any] | None = None,
    ) -> BatchRun | None:
        """Return the batches that begin at an offset; None: the next message is no plain batch.

        spans : int64 (n, 2), where they begin and end; None: one after the other
        """
        if self._messages is None:
            return None
        columns = self.columns
        read = self._messages.read(memory, begin, spans, columns.most_rows, columns.ends_frames)
        return None if read is None else BatchRun(name, read[0], index, first_row, self._schema, memory, read[1])


def _pattern(first: bytes, schema: pa.Schema, columns: PlainRoles) -> RepeatedMessages | None:
    """Return what reads messages like a first one; None if it has columns or features that only pyarrow reads."""
    try:
        head = head_of(first)
        message = FlatbufferTable(head[PREFIX_BYTES:])
        batch = message.table(2)
        if head[PREFIX_BYTES + message.field(1)] != BATCH or message.field(4) or batch.field(3) or batch.field(4):
            return None  # custom metadata, compression, or buffers of views
        (node, num_nodes), (buffer, num_buffers) = batch.vector_offset(1), batch.vector_offset(2)
        numbers, buffers = [(batch.field(0), 1), (message.field(3), 0)], list[tuple[int, int]]()
        values = dict[str, int]()  # column → the buffer of its values
        for field in schema:
            for per_row, bytes_per_row in _arrays(field.type, 1):
                numbers.append((node + _NODE_BYTES * (len(numbers) - 2), per_row))
                sizes = (_BITMAP,) if bytes_per_row is None else (_BITMAP, bytes_per_row)
                buffers += [(buffer + _BUFFER_BYTES * (len(buffers) + k), size) for k, size in enumerate(sizes)]
            values[field.name] = len(buffers) - 1
        if len(numbers) - 2 != num_nodes or len(buffers) != num_buffers or len(values) != len(schema):
            return None
        if not batch.field(0) or not message.field(3):
            return None
        fields = np.array(numbers, np.int64), np.array(buffers, np.int64)
        for array in fields:
            array[:, 0] += PREFIX_BYTES
        mask = np.full(len(head), 255, np.uint8)
        for offset in [*fields[0][:, 0], *fields[1][:, 0], *(fields[1][:, 0] + 8)]:
            mask[offset : offset + 8] = 0
        if any(struct.unpack_from("<q", head, int(offset) + 8)[0] for offset in fields[0][2:, 0]):
            return None  # nulls
        read = [-1 if name is None else values[name] for name in (columns.id, columns.gradient, columns.step)]
        return RepeatedMessages(head, mask, *fields, read[0], read[1], read[2], columns.width)
    except (struct.error, LookupError, ValueError):
        return None


def head_of(data: bytes) -> bytes:
    """Return the first message without its body, or nothing: before Arrow 0.15, messages began otherwise."""
    if len(data) < PREFIX_BYTES or not data.startswith(CONTINUATION):
        return b""
    return data[: PREFIX_BYTES + max(0, struct.unpack_from("<i", data, len(CONTINUATION))[0])]


def _arrays(kind: pa.DataType, per_row: int) -> Iterator[tuple[int, int | None]]:
    """Yield for each array of a column: the numbers that it has for each row, and their bytes; None: it has lists.

    Raises ValueError for columns that are neither numbers nor lists of a fixed size of numbers.
    """
    if pa.types.is_fixed_size_list(kind) and 0 < kind.list_size < 1 << 31 // max(per_row, 1):
        yield per_row, None
        yield from _arrays(kind.value_type, per_row * kind.list_size)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        yield per_row, per_row * kind.bit_width // 8
    else:
        raise ValueError(f"{kind} is not plain")
