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
from penstock.io.sources.ipc_messages import BATCH, CONTINUATION, DICTIONARY, FlatbufferTable, body_bytes
from penstock.pyx.coded_rows import CodedRows
from penstock.pyx.plain_batches import PlainRows, RepeatedMessages

PREFIX_BYTES = 8  # of a message: the continuation, and the length of its metadata

_NODE_BYTES = _BUFFER_BYTES = 16  # each two int64
_BITMAP = _ANY = -1


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
    """Neighbouring plain batches, or one of several tables. index, first_row : of the first one

    read : the rows
    offsets : where the message of each begins in ``memory``, and the last one ends
    dictionary : of several tables: their names by code; else None
    """

    source: str
    read: PlainRows | CodedRows
    index: int
    first_row: int
    schema: pa.Schema
    memory: bytes | pa.Buffer
    offsets: list[int]
    dictionary: pa.Array | None
    ends_frame = is_frame_of_no_rows = False  # metadata would say so

    @property
    def rows(self) -> PlainRows:
        assert isinstance(self.read, PlainRows)
        return self.read

    @property
    def coded(self) -> CodedRows:
        assert isinstance(self.read, CodedRows)
        return self.read

    @property
    def num_batches(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_rows(self) -> int:
        return self.read.num_rows if isinstance(self.read, CodedRows) else self.read.blocks.num_rows

    def batch(self, number: int = 0, rows_before: int = 0) -> Batch:
        """Return one of the batches, for other ways of reading. rows_before : it, in the run"""
        begin, end = self.offsets[number : number + 2]

        def data_of() -> pa.RecordBatch:
            return _read(pa.py_buffer(self.memory)[begin:end], self.schema, self.dictionary)

        return LateBatch(self.source, data_of, self.index + number, self.first_row + rows_before)


class PlainMessages:
    """Reads the plain batches of one stream or file, or of several with the same schema.

    message : of a batch that pyarrow has read, and dictionaries before it; schema : of all batches
    columns : that are read
    batch : of that message; None: all rows are of one table
    """

    def __init__(
        self, message: bytes, schema: pa.Schema, columns: PlainRoles, batch: pa.RecordBatch | None = None
    ) -> None:
        self._schema, self.columns = schema, columns
        self._messages = _pattern(message, schema, columns)
        self._dictionary: pa.Array | None = None
        if batch is not None:
            self.follow(batch)

    def follow(self, batch: pa.RecordBatch) -> None:
        """Take the dictionary of a batch that pyarrow has read: a stream may replace it."""
        if self.columns.table_column is not None:
            self._dictionary = batch.column(self.columns.table_column).dictionary

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
        if read is None:
            return None
        return BatchRun(name, read[0], index, first_row, self._schema, memory, read[1], self._dictionary)


def _pattern(message: bytes, schema: pa.Schema, columns: PlainRoles) -> RepeatedMessages | None:
    """Return what reads messages like a first one; None if it has columns or features that only pyarrow reads."""
    try:
        head = _head_of_batch(message)
        message_table = FlatbufferTable(head[PREFIX_BYTES:])
        batch = message_table.table(2)
        if head[PREFIX_BYTES + message_table.field(1)] != BATCH or message_table.field(4):
            return None  # custom metadata
        if batch.field(3) or batch.field(4):
            return None  # compression, or buffers of views
        (node, num_nodes), (buffer, num_buffers) = batch.vector_offset(1), batch.vector_offset(2)
        numbers, buffers = [(batch.field(0), 1), (message_table.field(3), 0)], list[tuple[int, int]]()
        values = dict[str, int]()  # column → the buffer of its values
        for field in schema:
            kind = field.type
            if field.name == columns.table_column:
                kind = kind.index_type
            for per_row, sizes in _arrays(kind, 1, field.name == columns.gradient and not columns.width):
                numbers.append((node + _NODE_BYTES * (len(numbers) - 2), per_row))
                buffers += [(buffer + _BUFFER_BYTES * (len(buffers) + k), size) for k, size in enumerate(sizes)]
            values[field.name] = len(buffers) - 1
        if len(numbers) - 2 != num_nodes or len(buffers) != num_buffers or len(values) != len(schema):
            return None
        if not batch.field(0) or not message_table.field(3):
            return None
        fields = np.array(numbers, np.int64), np.array(buffers, np.int64)
        for array in fields:
            array[:, 0] += PREFIX_BYTES
        mask = np.full(len(head), 255, np.uint8)
        for offset in [*fields[0][:, 0], *fields[1][:, 0], *(fields[1][:, 0] + 8)]:
            mask[offset : offset + 8] = 0
        if any(struct.unpack_from("<q", head, int(offset) + 8)[0] for offset in fields[0][2:, 0]):
            return None  # nulls
        names = columns.id, columns.gradient, columns.step, columns.table_column
        of_id, of_gradient, of_step, of_table = (-1 if name is None else values[name] for name in names)
        return RepeatedMessages(head, mask, *fields, of_id, of_gradient, of_step, columns.width, of_table)
    except (struct.error, LookupError, ValueError):
        return None


def _head_of_batch(message: bytes) -> bytes:
    """Return the first message without its body that is no dictionary."""
    head = head_of(message)
    while head and head[PREFIX_BYTES + FlatbufferTable(head[PREFIX_BYTES:]).field(1)] == DICTIONARY:
        message = message[len(head) + body_bytes(head[PREFIX_BYTES:]) :]
        head = head_of(message)
    return head


def _read(message: pa.Buffer, schema: pa.Schema, dictionary: pa.Array | None) -> pa.RecordBatch:
    """Return the batch of a message. dictionary : of its only dictionary-encoded column, None: it has none"""
    if dictionary is None:
        return pa.ipc.read_record_batch(message, schema)
    # pyarrow takes a dictionary from a stream only, but a message has codes as it has a column of integers.
    number = next(number for number, kind in enumerate(schema.types) if pa.types.is_dictionary(kind))
    field = schema.field(number)
    batch = pa.ipc.read_record_batch(message, schema.set(number, field.with_type(field.type.index_type)))
    names = pa.DictionaryArray.from_arrays(batch.column(number), dictionary, ordered=field.type.ordered, safe=False)
    return batch.set_column(number, field, names)


def head_of(data: bytes) -> bytes:
    """Return the first message without its body, or nothing: before Arrow 0.15, messages began otherwise."""
    if len(data) < PREFIX_BYTES or not data.startswith(CONTINUATION):
        return b""
    return data[: PREFIX_BYTES + max(0, struct.unpack_from("<i", data, len(CONTINUATION))[0])]


def _arrays(kind: pa.DataType, per_row: int, any_length: bool = False) -> Iterator[tuple[int, list[int]]]:
    """Yield for each array of a column how many numbers it has for each row, and the bytes of its buffers for each row.

    any_length : it is of lists of any length. Raises ValueError for columns that are neither numbers nor lists of a
    fixed size of numbers.
    """
    if any_length:
        yield 1, [_BITMAP, 8 if pa.types.is_large_list(kind) else 4]
        yield _ANY, [_BITMAP, _ANY]
    elif pa.types.is_fixed_size_list(kind) and 0 < kind.list_size < 1 << 31 // max(per_row, 1):
        yield per_row, [_BITMAP]
        yield from _arrays(kind.value_type, per_row * kind.list_size)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        yield per_row, [_BITMAP, per_row * kind.bit_width // 8]
    else:
        raise ValueError(f"{kind} is not plain")
