"""Files of object stores, read in few large requests: the next block is in flight while one is read.

A store answers after tens of milliseconds, however little is requested. A file is divided into blocks, and each is one
request. Its end, where the footers of Arrow and Parquet are, is requested together with its first block. A reader names
the ranges that it reads in order, such as the chunks of a column of Parquet. Of each such sequence two blocks are held,
and those between it and another one that is behind it.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

import penstock.base.interrupts as interrupts

# The fewest bytes of a block, unless the file is shorter. A block is shorter than two of these.
BLOCK_BYTES = 8 << 20
_END_BYTES = 1 << 20
_ALIGNMENT = 64
# Blocks that stay, the last ones that were requested; others stay while a sequence has them before it.
_HELD = 2
_TICK_S = 0.1

Range = tuple[int, int]
T = TypeVar("T")


class ThreadCall(Generic[T]):
    """A call in a thread of its own, which ends with it. The interpreter waits for such threads at its end."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._future = ThreadPoolExecutor(1, "penstock-read-ahead").submit(call)

    def result(self) -> T:
        while not wait([self._future], _TICK_S).done:
            interrupts.check()
        return self._future.result()


class _Request(ThreadCall[bytes]):
    """A range of a file. Its result has fewer bytes if the file was truncated since it was opened."""

    def __init__(self, file: Any, start: int, stop: int) -> None:
        self.start = start
        super().__init__(lambda: file.read_at(stop - start, start))


class _Sequence:
    """Ranges that are read in order. blocks : that contain them, in order; current : which of them is being read"""

    def __init__(self, ranges: Sequence[Range], block_bytes: int, num_bytes: int) -> None:
        self._begins, self._ends = list[int](), list[int]()
        self.blocks, last, self.current = list[int](), 0, 0
        for begin, end in ranges:
            begin, end = max(begin, last), min(end, num_bytes)  # those of a damaged footer may be anywhere
            if begin < end:
                self._begins.append(begin)
                self._ends.append(end)
                self.blocks += range(begin // block_bytes, -(-end // block_bytes))
                last = end
        self.blocks = list(dict.fromkeys(self.blocks))
        self._numbers = {block: number for number, block in enumerate(self.blocks)}

    def __contains__(self, position: int) -> bool:
        number = bisect_right(self._begins, position) - 1
        return number >= 0 and position < self._ends[number]

    def read(self, block: int) -> list[int]:
        """Note that a block is being read. Returns the next one."""
        self.current = self._numbers[block]
        return self.blocks[self.current + 1 : self.current + 2]

    def needs(self, block: int) -> bool:
        return self._numbers.get(block, -1) >= self.current


class Blocks(io.RawIOBase):
    """The blocks of a file, as a file object. num_bytes : of the file

    file : as pyarrow.fs opens it. Before ``read_in_order``, nothing is read ahead
    """

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file, self.num_bytes = file, file.size()
        self._end_begin = self.num_bytes - (_END_BYTES if self.num_bytes > BLOCK_BYTES else 0)
        size = self._end_begin // max(1, self._end_begin // BLOCK_BYTES)
        self._block_bytes = -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
        self._position = 0
        self._requests: dict[int, _Request] = {}  # by number of the block
        self._sequences: list[_Sequence] = []
        if self.num_bytes:
            self._request(0)
        self._end = _Request(file, self._end_begin, self.num_bytes) if self._end_begin < self.num_bytes else None

    def read_in_order(self, sequences: Sequence[Sequence[Range]] | None = None) -> None:
        """Read ahead. sequences : ranges of bytes, each sequence read in order; None: the whole file is one"""
        sequences = [[(0, self.num_bytes)]] if sequences is None else sequences
        self._sequences = [_Sequence(ranges, self._block_bytes, self._end_begin) for ranges in sequences]
        for sequence in self._sequences:
            for block in sequence.blocks[:1]:
                self._request(block)

    def _request(self, block: int) -> _Request:
        if block not in self._requests:
            begin = block * self._block_bytes
            self._requests[block] = _Request(self._file, begin, min(begin + self._block_bytes, self._end_begin))
        return self._requests[block]

    def _at(self, position: int) -> _Request:
        """Return the request whose range contains a position, and begin the one that follows in its sequence."""
        if self._end is not None and position >= self._end_begin:
            return self._end
        block = position // self._block_bytes
        request = self._request(block)
        for sequence in self._sequences:
            if position in sequence:
                for following in sequence.read(block):
                    self._request(following)
        for other in list(self._requests)[:-_HELD]:
            if other != block and not any(sequence.needs(other) for sequence in self._sequences):
                del self._requests[other]
        return request

    # ---- a file object

    def read(self, num_bytes: int = -1) -> bytes:
        left = self.num_bytes - self._position
        left, pieces = left if num_bytes < 0 else min(left, num_bytes), list[bytes]()
        while left > 0:
            request = self._at(self._position)
            begin = self._position - request.start
            piece = request.result()[begin : begin + left]
            if not piece:
                break
            pieces.append(piece)
            self._position += len(piece)
            left -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self.num_bytes)[whence]
        return self._position

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        """Drop the blocks. The file is not closed, since a thread may read it: it closes with its last reference."""
        super().close()
        self._requests.clear()
