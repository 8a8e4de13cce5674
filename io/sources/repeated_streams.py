"""Read many short Arrow IPC streams of one schema: messages, each a whole stream with one record batch."""

from __future__ import annotations

import struct

import pyarrow as pa
import pyarrow.ipc

from penstock.io.sources.batch import RAISED
from penstock.io.sources.ipc_messages import BATCH, FlatbufferTable, body_bytes, message_kind
from penstock.io.sources.ipc_stream import CONTINUATION, END_MARKER

_PREFIX_BYTES = 8  # of a message: the continuation, and the length of its metadata
_BODY_COMPRESSION, _CUSTOM_METADATA = 3, 4


class RepeatedStreams:
    """Reads streams in memory, in place, that begin with the same schema message as a first one.

    first : a whole stream; schema : of it
    """

    def __init__(self, first: bytes, schema: pa.Schema) -> None:
        self._schema = schema
        is_old = not first.startswith(CONTINUATION)  # before Arrow 0.15: no other stream begins like that one
        self._head = first if is_old else first[: _PREFIX_BYTES + _metadata_bytes(first, 0)]
        # Of the last batch that was read; batches with as many rows have the same.
        self._metadata, self._body_bytes = b"", 0

    def read(self, stream: bytes) -> pa.RecordBatch | None:
        """Return the record batch of a stream.

        None: it has another schema, several batches, dictionaries, compression or damage; ``open_bytes`` reads it, and
        reports what is wrong.
        """
        if not (stream.startswith(self._head) and stream.endswith(END_MARKER)):
            return None
        try:
            start = len(self._head)
            body = start + _PREFIX_BYTES + _metadata_bytes(stream, start)
            metadata = stream[start + _PREFIX_BYTES : body]
            if metadata != self._metadata:
                if not _is_plain(metadata):
                    return None
                self._metadata, self._body_bytes = metadata, body_bytes(metadata)
            if body + self._body_bytes + len(END_MARKER) != len(stream):
                return None
            return pa.ipc.read_record_batch(pa.py_buffer(stream)[start:], self._schema)
        except RAISED:
            return None


def _metadata_bytes(stream: bytes, offset: int) -> int:
    length: int = struct.unpack_from("<i", stream, offset + 4)[0]
    return length


def _is_plain(metadata: bytes) -> bool:
    """Return whether a message is a record batch without compression and custom metadata."""
    if message_kind(metadata) != BATCH or FlatbufferTable(metadata).field(_CUSTOM_METADATA):
        return False
    return FlatbufferTable(metadata).table(2).field(_BODY_COMPRESSION) == 0
