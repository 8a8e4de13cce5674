"""Data files: a sequence of records, each a header and its arrays, little-endian. Independent of folders and tables.

A file is MAGIC and records; a record is the length of its header (uint32), the header (JSON, UTF-8), and
the bytes of the arrays that the header lists, each in C order. The last record's kind is "end". The digest in the
commit protects the bytes: verify it before you read a file.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from penstock.base.errors import StateError
from penstock.base.filesystem.state_files import parsed_json
from penstock.model.frames import Array, Int64

MAGIC = b"PSTKROWS\x01\x00\x00\x00"  # the last four bytes: the version of this format
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Record:
    """One record of a data file. kind : its type; header : its other fields; arrays : by name, in memory"""

    kind: str
    header: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)

    @property
    def ids(self) -> Int64:
        """The ids of a block of rows, int64 (n,)."""
        if "first" not in self.header:
            return self.arrays["ids"]
        first, step = self.header["first"], self.header["step"]
        return np.arange(first, first + len(self.arrays["rows"]) * step, step)

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the bytes of the record for a file."""
        arrays = {name: _little(array) for name, array in self.arrays.items()}
        shapes = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
        header = json.dumps({"kind": self.kind, **self.header, "arrays": shapes}).encode()
        yield _LENGTH.pack(len(header)) + header
        for array in arrays.values():
            yield array.reshape(-1).view(np.uint8).data


def _little(array: Array) -> Array:
    """Return the array little-endian and in C order, without a copy if it is so already."""
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)


def read_records(file: BinaryIO | mmap.mmap, place: object, only_shapes: bool = False) -> Iterator[Record]:
    """Yield the records of a file whose digest matches, with the last one. Raises StateError if they are malformed.

    file : buffered; or mapped: the arrays then look into it, and the system reads their pages on demand
    place : for messages
    only_shapes : do not read the arrays, which are zeros
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise StateError(f"{place}: not a data file of this version's checkpoints")
    file.seek(0, os.SEEK_END)
    num_bytes = file.tell()
    file.seek(len(MAGIC))
    length = file.read(_LENGTH.size)
    while length:
        try:
            header = parsed_json(file.read(*_LENGTH.unpack(length)))
            shapes = header.pop("arrays")
            arrays = {name: _read_array(file, dtype, shape, num_bytes, only_shapes) for name, dtype, shape in shapes}
            record = Record(header.pop("kind"), header, arrays)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
            raise StateError(f"{place}: its records do not add up ({error}); restore another commit") from error
        yield record
        length = file.read(_LENGTH.size)


def _read_array(file: Any, dtype: str, shape: list[int], num_bytes: int, only_shapes: bool) -> Array:
    if math.prod(shape) * np.dtype(dtype).itemsize > num_bytes:
        raise ValueError("an array is longer than its file")
    if only_shapes:
        zeros = np.broadcast_to(np.zeros((), dtype), shape)
        file.seek(zeros.nbytes, os.SEEK_CUR)
        return zeros
    array = np.empty(0 if isinstance(file, mmap.mmap) else shape, dtype)
    if isinstance(file, mmap.mmap):
        if count := math.prod(shape):
            array = np.frombuffer(file, dtype, count, file.tell())
            file.seek(array.nbytes, os.SEEK_CUR)
        array = array.reshape(shape)
    elif file.readinto(array.reshape(-1).view(np.uint8).data) != array.nbytes:
        raise ValueError("an array was cut")
    return array.astype(array.dtype.newbyteorder("="), copy=False)
