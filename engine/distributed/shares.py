"""Which rows of a table are whose, and where a process keeps its own. Knows no values.

The configuration's strategy deals ids to processes as it deals them to shards (``pyx.partition``): MOD round robin,
DIV in contiguous runs. A process keeps its rows as a table of their own, whose ids count from 0; what it does on its
devices, holds behind its gate and marks for a commit is as large as its share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from penstock.pyx import partition

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Numbers = TypeVar("Numbers", int, Int64)
Draw = Callable[[int, int], Float32]

# Rows of the whole table that are drawn at once to find a share's among them.
_DRAWN_ROWS = 1 << 14


@dataclass(frozen=True)
class Share:
    """One process's rows of one table. rank : of the process; count : how many there are; mod : MOD, else DIV."""

    vocabulary_size: int
    mod: bool
    rank: int
    count: int

    @property
    def num_rows(self) -> int:
        """May be none: a table can have fewer rows than there are processes."""
        quotient, remainder = divmod(self.vocabulary_size, self.count)
        return quotient + (self.rank < remainder)

    @property
    def held_rows(self) -> int:
        """Of the table that this process keeps: one that nobody asks for, where it has none."""
        return max(1, self.num_rows)

    @property
    def _first(self) -> int:
        quotient, remainder = divmod(self.vocabulary_size, self.count)
        return self.rank if self.mod else self.rank * quotient + min(self.rank, remainder)

    @property
    def stride(self) -> int:
        """How far apart the ids of neighbours here are."""
        return self.count if self.mod else 1

    def locate(self, ids: Int64) -> tuple[Int64, Int64]:
        """The rank that has each of these valid ids, and the id's number there."""
        return partition.locate(ids, self.vocabulary_size, self.count, self.mod)

    def mine(self, ids: Int64) -> tuple[Int64, Int64]:
        """Which of these ids are this process's (their places), and their numbers here."""
        ranks, numbers = self.locate(ids)
        places = np.flatnonzero(ranks == self.rank)
        return places, numbers[places]

    def ids(self, numbers: Numbers) -> Numbers:
        """Back from numbers here; what lies beyond the vocabulary is the row that nobody asks for."""
        return numbers * self.stride + self._first

    def drawn(self, draw: Draw) -> Draw:
        """What draws a range of the whole table's rows, as what draws a range of this share's."""

        at_once = max(1, _DRAWN_ROWS // self.stride)

        def mine(first: int, count: int) -> Float32:
            starts = range(first, first + count, at_once)
            return np.concatenate([self._drawn(draw, at, min(at_once, first + count - at)) for at in starts])

        return mine

    def _drawn(self, draw: Draw, first: int, count: int) -> Float32:
        start = first * self.stride + self._first
        # The row that nobody asks for may lie beyond a table that a callable made.
        start = min(start, self.vocabulary_size - 1)
        stop = min(start + (count - 1) * self.stride + 1, self.vocabulary_size)
        return np.ascontiguousarray(draw(start, stop - start)[:: self.stride])
