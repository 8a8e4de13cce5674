"""Which rows of a table belong to which share of a job, and the numbers that they have there. Knows no values.

A static table's ids are partitioned by the configuration's strategy, as over shards (``pyx.partition``): MOD round
robin, DIV in contiguous runs. A dynamic table's keys belong to virtual shards, of which a share has a contiguous run.
A share keeps its rows as a separate table, whose rows count from 0: its sums and marks are as large as its share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.base.errors import UsageError
from penstock.base.validation import whole
from penstock.model.config.specs import TableSpec
from penstock.model.frames import Frame, Int64, Overflows, Rows, fingerprint, sum_error
from penstock.model.overflows import without_overflows
from penstock.pyx import partition
from penstock.pyx.keys import key_owners

Numbers = TypeVar("Numbers", int, Int64)


@dataclass(frozen=True)
class AnyShare(ABC):
    """The rows of one table in one share. rank : of the share; count : number of shares

    stride : distance between the whole table's rows that are neighbours here
    """

    rank: int
    count: int

    @property
    def stride(self) -> int:
        return 1

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """Rows in this share; 0 is possible, because a table can have fewer rows than there are shares."""

    @property
    def held_rows(self) -> int:
        """Rows of the table that this share keeps: one that no id has, if the share has none."""
        return max(1, self.num_rows)

    @abstractmethod
    def locate(self, ids: Int64) -> tuple[Int64, Int64]:
        """Return the share of each of these valid ids, and the id's number there: int64 (n,) each."""

    @abstractmethod
    def ids(self, numbers: Numbers) -> Numbers:
        """Return the ids of numbers here; beyond the vocabulary for a row that no id has."""

    def select(self, ids: Int64) -> tuple[Int64, Int64]:
        """Return the positions of the ids in this share, and their numbers here: int64 (m,) each."""
        ranks, numbers = self.locate(ids)
        indices: npt.NDArray[np.int64] = np.flatnonzero(ranks == self.rank)
        return indices, numbers[indices]

    def among(self, rank: int, count: int) -> Self:
        """Return another share of the same table."""
        return replace(self, rank=rank, count=count)


@dataclass(frozen=True)
class Share(AnyShare):
    """The rows of a static table in one share. mod : MOD, else DIV"""

    vocabulary_size: int
    mod: bool

    @property
    def num_rows(self) -> int:
        quotient, remainder = divmod(self.vocabulary_size, self.count)
        return quotient + (self.rank < remainder)

    @property
    def _first(self) -> int:
        quotient, remainder = divmod(self.vocabulary_size, self.count)
        return self.rank if self.mod else self.rank * quotient + min(self.rank, remainder)

    @property
    def stride(self) -> int:
        return self.count if self.mod else 1

    def locate(self, ids: Int64) -> tuple[Int64, Int64]:
        return partition.locate(ids, self.vocabulary_size, self.count, self.mod)

    def ids(self, numbers: Numbers) -> Numbers:
        return numbers * self.stride + self._first


@dataclass(frozen=True)
class KeyShare(AnyShare):
    """The rows of a dynamic table in one share. Its ids are keys, which have no numbers: ``locate`` returns the keys.

    ``ids`` returns which rows of the whole table the rows here are.
    table, capacity, seed : of the whole table; table : the name that it is drawn as
    """

    table: str
    capacity: int
    seed: int

    @property
    def num_rows(self) -> int:
        return key_owners.owned_rows(self.capacity, self.rank, self.count)[1]

    def locate(self, ids: Int64) -> tuple[Int64, Int64]:
        return key_owners.owners(ids, self.seed, self.table, self.capacity, self.count), ids

    def ids(self, numbers: Numbers) -> Numbers:
        return numbers + key_owners.owned_rows(self.capacity, self.rank, self.count)[0]


def checked_share(share: object) -> tuple[int, int]:
    """Return (rank, count) of a share. Raises UsageError."""
    if not isinstance(share, tuple | list) or len(share) != 2:
        raise UsageError(f"share: expected (rank, count), got {share!r}")
    rank, count = whole("share's rank", share[0], 0), whole("share's count", share[1], 1)
    if rank >= count:
        raise UsageError(f"share: of {count} shares the last is {count - 1}, got {rank}")
    return rank, count


def shares_of(specs: Iterable[TableSpec], mod: bool, seed: int, rank: int, count: int) -> dict[str, AnyShare]:
    """Return one share of every table, by name. mod : the configuration's strategy is MOD; else DIV"""
    return {
        spec.name: Share(rank, count, spec.vocabulary_size, mod)
        if spec.dynamic is None
        else KeyShare(rank, count, spec.drawn_as, spec.vocabulary_size, seed)
        for spec in specs
    }


def reduced(frame: Frame, shares: Mapping[str, AnyShare], alone: bool) -> Frame:
    """Return a whole frame reduced to the rows of a share, with their numbers there; everything else is as it was.

    Every table that the frame contains stays in it, so that the frames of a table have the same numbers in every share.
    alone : whether its sums are those of a step
    Raises InputError for a bad row in any share.
    """
    frame = frame.audited()
    if alone:
        frame = without_overflows(frame)
    rows = {name: tuple(_reduced(block, shares[name]) for block in blocks) for name, blocks in frame.rows.items()}

    def reject(overflows: Overflows) -> Frame:
        whole = {}
        for name, masks in overflows.items():
            whole[name] = [np.zeros(len(block.ids), np.bool_) for block in frame.rows[name]]
            for block, mask, of_block in zip(frame.rows[name], masks, whole[name], strict=True):
                of_block[shares[name].select(np.ascontiguousarray(block.ids))[0][mask]] = True
        frame.without(whole)  # raises with the place of the row, if such rows are errors
        # The other shares do not see this sum of several frames, and could not drop the row too.
        raise sum_error(frame, whole)

    return replace(frame, rows=rows, fingerprint=fingerprint(frame), audit=None, reject=reject)


def _reduced(block: Rows, share: AnyShare) -> Rows:
    indices, numbers = share.select(np.ascontiguousarray(block.ids))
    which = indices if block.which is None else block.which[indices]
    return Rows(numbers, block.grads, which, None if block.gains is None else block.gains[indices])
