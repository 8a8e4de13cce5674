"""The end of an Arrow IPC file, looked at before Arrow opens it.

A file that was cut, or two files in one, would otherwise be read wrongly or blamed obscurely: of
``cat a b`` pyarrow reads b's footer with a's bytes. The footer says where every batch ends; what
follows the last one is at most an end marker and padding.
"""

from __future__ import annotations

import struct
from typing import Any

from penstock.errors import InputError, TruncatedInputError

MAGIC = b"ARROW1"
_TAIL_BYTES = 10  # int32 length of the footer, magic
_BLOCK = struct.Struct("<qi4xq")  # offset, metadata length, body length
_MAX_GAP_BYTES = 64  # end marker and padding between the last block and the footer


def check_ipc_file(file: Any, size: int, name: str) -> None:
    """Raise unless the file ends with a footer that fits it. Leaves the position at 0."""
    file.seek(max(0, size - _TAIL_BYTES))
    tail = bytes(file.read(_TAIL_BYTES))
    if size < 2 * _TAIL_BYTES or not tail.endswith(MAGIC):
        raise TruncatedInputError(
            "the Arrow IPC file has no footer: it was cut, its writer not closed, or bytes follow its end", source=name
        )
    (length,) = struct.unpack("<i", tail[:4])
    start = size - _TAIL_BYTES - length
    if length <= 0 or start < len(MAGIC):
        raise InputError(f"corrupt Arrow IPC file: a footer of {length} bytes in a file of {size}", source=name)
    file.seek(start)
    footer = bytes(file.read(length))
    file.seek(0)
    try:
        end = max((offset + meta + body for offset, meta, body in _blocks(footer)), default=None)
    except (struct.error, IndexError, ValueError) as error:
        raise InputError(f"corrupt Arrow IPC file: the footer cannot be read ({error})", source=name) from error
    if end is None:
        return
    if end > start:
        raise TruncatedInputError(f"the footer names {end} bytes of batches, the file has {start}", source=name)
    if start - end > _MAX_GAP_BYTES:
        raise InputError(
            f"{start - end} bytes that belong to no batch: two files in one? Give them as two sources", source=name
        )


def _blocks(footer: bytes) -> list[tuple[int, int, int]]:
    """The (offset, metadata length, body length) of every dictionary and record batch of a Footer flatbuffer."""
    table = _u32(footer, 0)
    vtable = table - _i32(footer, table)
    blocks = []
    for number in (2, 3):  # Footer: version, schema, dictionaries, recordBatches
        slot = 4 + 2 * number
        if vtable < 0 or slot + 2 > struct.unpack_from("<H", footer, vtable)[0]:
            continue
        offset = struct.unpack_from("<H", footer, vtable + slot)[0]
        if not offset:
            continue
        vector = table + offset + _u32(footer, table + offset)
        count = _u32(footer, vector)
        if count * _BLOCK.size > len(footer):
            raise ValueError(f"{count} blocks do not fit {len(footer)} bytes")
        blocks += [_BLOCK.unpack_from(footer, vector + 4 + i * _BLOCK.size) for i in range(count)]
    return blocks


def _u32(data: bytes, at: int) -> int:
    if at < 0:
        raise ValueError("offset before the start")
    value: int = struct.unpack_from("<I", data, at)[0]
    return value


def _i32(data: bytes, at: int) -> int:
    value: int = struct.unpack_from("<i", data, at)[0]
    return value
