"""Memory that a producer and a service on one machine share: batches go through it, and past the network's copies.

The service makes it for one stream and says where it is, with a key that stands in it: who finds the key there is on
the same machine, and the same user, since the kernel opens it for nobody else. It has no name in any folder: when both
have let it go, however they ended, it is gone.

The producer alone says where its batches lie. The service believes nothing of it: it copies so many bytes from there,
and looks at its copy, which nobody can change any more. What was copied may be written over.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import InputError
from penstock.io.flight_messages import Place
from penstock.io.parts import arrow_errors
from penstock.io.unpacking import Messages

# Only Linux has memory without a name that another process may open.
try:
    import fcntl

    _SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
except (ImportError, AttributeError):
    _SEALS = 0

NAME = "penstock"
# The key comes first, batches begin where a cache line does.
KEY_BYTES, _LINE = 32, 64
# Below this a batch goes with its message: copies are not what such a one costs.
WORTH_SHARING_BYTES = 1 << 16


class Memory:
    """The service's side. Raises OSError where the system has none."""

    def __init__(self, num_bytes: int) -> None:
        if not _SEALS:
            raise OSError("this system has no memory that processes share without a name")
        self._num_bytes, self._key = num_bytes, secrets.token_bytes(KEY_BYTES)
        self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, num_bytes)
            os.pwrite(self._fd, self._key, 0)
            # A producer cannot make it longer than was allowed, nor so short that a read of it would be of nothing.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            # Mapped: half a millisecond less than pread for 5 MB (docs/performance.md).
            self._map = mmap.mmap(self._fd, num_bytes, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self._fd)
            raise

    def offer(self) -> dict[str, Any]:
        """What the producer needs to know."""
        return {"pid": os.getpid(), "fd": self._fd, "bytes": self._num_bytes, "key": self._key.hex()}

    def batch(self, place: Place, schema: pa.Schema, name: str) -> pa.RecordBatch:
        """A copy of the batch that lies there. Raises InputError. name : of the stream"""
        offset, length = place
        if not (KEY_BYTES <= offset <= self._num_bytes and 0 < length <= self._num_bytes - offset):
            raise InputError(
                f"{length} bytes at {offset} of the shared memory, which has {self._num_bytes}", source=name
            )
        body = pa.allocate_buffer(length)
        # Not through memoryview, which holds the interpreter's lock while it copies.
        np.copyto(np.frombuffer(body, np.uint8), np.frombuffer(self._map, np.uint8, length, offset))
        with arrow_errors("no batch in the shared memory", name):
            file = pa.BufferReader(body)
            reader = pa.ipc.open_stream(file)
            if not reader.schema.equals(schema):
                raise InputError("a batch in the shared memory has another schema than its stream", source=name)
            Messages(name).check_next(file)
            try:
                return reader.read_next_batch()
            except StopIteration:
                raise InputError("no batch in the shared memory", source=name) from None

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)


class Room:
    """The producer's side: the memory as a ring, of which what the service has copied is free again."""

    def __init__(self, memory: mmap.mmap, num_bytes: int) -> None:
        self._memory, self._end = memory, num_bytes
        self._held: deque[Place] = deque()  # not copied yet, oldest first
        self._next = _LINE
        self._num_taken = 0

    @classmethod
    def found(cls, offer: Mapping[str, Any]) -> Room | None:
        """The memory that a service offers; None where it is out of reach, or another one: that of another machine."""
        try:
            pid, fd, num_bytes = (int(offer[word]) for word in ("pid", "fd", "bytes"))
            path = f"/proc/{pid}/fd/{fd}"
            # What else may lie there is not even opened.
            if not os.readlink(path).startswith(f"/memfd:{NAME} ") or num_bytes <= _LINE:
                return None
            with open(path, "r+b", buffering=0) as file:
                memory = mmap.mmap(file.fileno(), num_bytes)
            if not secrets.compare_digest(memory[:KEY_BYTES], bytes.fromhex(offer["key"])):
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return cls(memory, num_bytes)

    def size_of(self, batch: pa.RecordBatch) -> int | None:
        """The bytes that a batch takes; None where it does not go here."""
        if batch.nbytes < WORTH_SHARING_BYTES:
            return None
        sink = pa.MockOutputStream()
        _write(sink, batch)
        size = int(sink.size())
        return size if size <= self._end - _LINE else None

    def has(self, size: int) -> bool:
        """Whether there is room for so many bytes now."""
        return self._begin(size) is not None

    def put(self, batch: pa.RecordBatch, size: int) -> Place:
        """Write a batch where there is room for its size."""
        offset = self._begin(size)
        assert offset is not None
        _write(pa.FixedSizeBufferWriter(pa.py_buffer(memoryview(self._memory)[offset : offset + size])), batch)
        place = Place(offset, size)
        self._held.append(place)
        self._next = offset + -(-size // _LINE) * _LINE
        return place

    def taken(self, count: int) -> None:
        """The service has copied so many batches of this stream."""
        while self._held and self._num_taken < count:
            self._held.popleft()
            self._num_taken += 1

    def _begin(self, size: int) -> int | None:
        """Where so many bytes may be written. Those that are held lie in a run that may go over the end."""
        if not self._held:
            return _LINE
        oldest = self._held[0].offset
        if self._next <= oldest:
            return self._next if self._next + size <= oldest else None
        if self._next + size <= self._end:
            return self._next
        return _LINE if _LINE + size <= oldest else None


def _write(sink: pa.NativeFile, batch: pa.RecordBatch) -> None:
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
