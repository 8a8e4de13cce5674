"""Arrow IPC files, whose end is checked before Arrow opens them; their batches delimit no frames.

A truncated file, or two files in one, would otherwise be read wrongly or cause an obscure error: for
``cat a b`` pyarrow reads b's footer with a's bytes. The footer gives the end of every batch; at most
an end marker and padding may follow the last one.
"""

from __future__ import annotations

import struct
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from penstock.base.errors import InputError, TruncatedInputError
from penstock.io.sources.batch import Batch, Batches, Part, arrow_errors, end_of_frame
from penstock.io.sources.ipc_messages import BATCH, DICTIONARY, SCHEMA, FlatbufferTable, Messages, message_kind
from penstock.io.sources.plain_messages import PlainMessages
from penstock.io.sources.remote_file import RemoteFile

ARROW_FILE = b"ARROW1"
_FIRST_BYTES = 8  # magic, padding
_TAIL_BYTES = 10  # int32 length of the footer, magic
_BLOCK = np.dtype([("offset", "<i8"), ("metadata", "<i4"), ("padding", "<i4"), ("body", "<i8")])
_MAX_GAP_BYTES = 64  # padding between two blocks, and an end marker before the footer
_MAX_SCHEMA_BYTES = 1 << 24
_CORRUPT = "corrupt Arrow IPC file"

Spans = npt.NDArray[np.int64]


def ipc_file_part(file: pa.NativeFile, size: int, name: str) -> Part:
    dictionaries, spans = check_ipc_file(file, size, name)
    messages = Messages(name)
    with arrow_errors(_CORRUPT, name):
        for start in dictionaries:
            _check_at(file, start, messages)
        reader = pa.ipc.open_file(file)
        schema, num_batches = reader.schema, reader.num_record_batches

    def batches(columns: list[str]) -> Batches:
        first_row, is_mapped = 0, isinstance(file, pa.MemoryMappedFile)
        plain, memory, part.done = None, None, 0
        fields = [number for number, column in enumerate(schema.names) if column in columns]
        with arrow_errors(_CORRUPT, name):
            options = pa.ipc.IpcReadOptions(included_fields=fields if len(fields) < len(schema.names) else None)
            only_used = pa.ipc.open_file(file, options=options)
        while part.done < num_batches:
            index, rest = part.done, spans[part.done :]
            if plain is not None and (run := plain.read(memory, 0, name, index, first_row, rest)) is not None:
                part.done += run.num_batches
                yield run
                first_row += run.num_rows
                continue
            with arrow_errors(_CORRUPT, name, index):
                if index < len(spans):
                    _check_at(file, int(spans[index, 0]), messages)
                # Arrow refers to the columns of a mapped file, and copies those of ``included_fields``. It would unpack
                # a compressed column that is not used, and read that of a file that is not mapped.
                refers = is_mapped and not messages.is_compressed
                batch, metadata = (reader if refers else only_used).get_batch_with_custom_metadata(index)
            part.done = index + 1
            yield Batch(name, batch, index, first_row, *end_of_frame(metadata, name, index))
            first_row += batch.num_rows
            if plain is None and refers and part.plain is not None and index < len(spans):
                file.seek(0)
                memory = file.read_buffer()
                message = memory[slice(*spans[index].tolist())].to_pybytes()
                plain = PlainMessages(message, schema, part.plain, batch)

    part = Part(name, schema, False, batches, "Arrow IPC file", num_batches)
    return part


def check_ipc_file(file: pa.NativeFile, size: int, name: str) -> tuple[list[int], Spans]:
    """Raise unless the file ends with a footer that matches it. Leaves the position at 0.

    Returns where the dictionaries begin, and int64 (n, 2), where every record batch begins and ends.
    """
    with arrow_errors(_CORRUPT, name):
        tail = file.read_at(_TAIL_BYTES, max(0, size - _TAIL_BYTES))
        if size < 2 * _TAIL_BYTES or not tail.endswith(ARROW_FILE):
            raise TruncatedInputError(
                "the Arrow IPC file has no footer: it was cut, its writer not closed, or bytes follow its end",
                source=name,
            )
        (length,) = struct.unpack("<i", tail[:4])
        start = size - _TAIL_BYTES - length
        if length <= 0 or start < _FIRST_BYTES:
            raise InputError(f"{_CORRUPT}: a footer of {length} bytes in a file of {size}", source=name)
        blocks = _blocks(file.read_at(length, start))
        every = np.sort(np.concatenate(blocks), order="offset")
        ends = _ends_of_blocks(every, size)
        first = _end_of_schema(file, int(every["offset"][0]) if len(every) else start)
        end = max(first, int(ends.max(initial=0)))
        file.seek(0)
    if end > start:
        raise TruncatedInputError(f"the footer names {end} bytes of batches, the file has {start}", source=name)
    if start - end > _MAX_GAP_BYTES:
        raise InputError(
            f"{start - end} bytes that belong to no batch: two files in one? Give them as two sources", source=name
        )
    gaps = every["offset"] - np.concatenate([[first], ends])[: len(every)]
    if len(gaps) and not 0 <= gaps.min() <= gaps.max() <= _MAX_GAP_BYTES:
        problem = "names bytes twice" if gaps.min() < 0 else f"leaves {gaps.max()} bytes between two batches out"
        raise InputError(f"{_CORRUPT}: the footer {problem}", source=name)
    begins = blocks[1]["offset"]
    return blocks[0]["offset"].tolist(), np.stack([begins, _ends_of_blocks(blocks[1], size)], axis=1)


def _check_at(file: pa.NativeFile, start: int, messages: Messages) -> None:
    """Check a local file; a remote one would have to be read twice."""
    if not isinstance(file, RemoteFile):
        file.seek(start)
        messages.check_next(file)


def _end_of_schema(file: pa.NativeFile, limit: int) -> int:
    """Return the end of the schema message before the batches: it has a length, after a marker since Arrow 0.15.

    polars writes neither, and readers take the schema from the footer: such a message extends up to ``limit``.

    limit : the offset of the first batch, or of the footer
    """
    marker, length = struct.unpack("<Ii", file.read_at(8, _FIRST_BYTES))
    if marker == 0xFFFFFFFF:
        return int(_FIRST_BYTES + 8 + length)
    end, num_bytes = int(_FIRST_BYTES + 4 + marker), limit - _FIRST_BYTES
    if end + _MAX_GAP_BYTES >= limit or num_bytes > _MAX_SCHEMA_BYTES:
        return end
    return limit if _is_only_a_schema(file.read_at(num_bytes, _FIRST_BYTES)) else end


def _is_only_a_schema(data: bytes) -> bool:
    """Return whether these bytes are a schema message without a length, and not also a batch that the footer omits."""
    if message_kind(data) != SCHEMA:
        return False
    prefixes = np.frombuffer(data, "<i4", len(data) // 8 * 2).reshape(-1, 2)  # a message begins at a multiple of 8
    for number in np.flatnonzero((prefixes[:, 0] == -1) & (prefixes[:, 1] > 0)).tolist():
        with suppress(struct.error, ValueError, IndexError):  # not a message
            if message_kind(memoryview(data)[8 * number + 8 :]) in (BATCH, DICTIONARY):
                return False
    return True


def _ends_of_blocks(blocks: npt.NDArray[np.void], size: int) -> npt.NDArray[np.int64]:
    """Return the ends of the blocks of a Footer."""
    if not len(blocks):
        return np.zeros(0, np.int64)
    for name in ("offset", "metadata", "body"):
        if blocks[name].min() < 0 or blocks[name].max() > size:  # so the sum below cannot wrap
            raise ValueError(f"a batch's {name} lies outside the file")
    ends: npt.NDArray[np.int64] = blocks["offset"] + blocks["metadata"] + blocks["body"]
    return ends


def _blocks(footer: bytes) -> list[npt.NDArray[np.void]]:
    """Return the blocks (message locations) of all dictionaries, and of all record batches, of a Footer flatbuffer."""
    root = FlatbufferTable(footer)  # version, schema, dictionaries, recordBatches
    return [root.vector(number, _BLOCK) if root.field(number) else np.empty(0, _BLOCK) for number in (2, 3)]
