"""The rows of a cached table that are on the device, their places there, and which of them make room for others.

A victim is a row that the use does not need: the one whose next use is farthest, where an unknown next use is farther
than every known one; among equals the one whose last use is oldest; then the one with the smallest mix.
docs/placement.md states the rule. Victims among the keys of a dynamic table are chosen in pyx/keys/shard_decisions.pyx.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from penstock.io.synthetic_ids import mixed
from penstock.model.frames import Int64

# Ranks order victims, smallest first: minus the number of the known next use, or the number of the last use less this.
UNKNOWN = 1 << 62
# Entries that outlived their rank are dropped when there are this many times as many entries as places.
MOST_ENTRIES = 4


class Moves(NamedTuple):
    """The moves of one chunk of a use.

    positions : which rows of the use are in the chunk
    places : of these rows, int64 (n,), in that order
    up : positions in the chunk of the rows that go up, int64, ascending
    down_rows, down_places : the victims, int64 (m,) each; rows that go up take these places
    """

    positions: Int64 | slice
    places: Int64
    up: Int64
    down_rows: Int64
    down_places: Int64


class RowCache:
    """Which rows of one table are on the device, and in which places.

    num_rows : of the table; places : rows that the device has room for, at least 1
    is_tolerant : whether a use may have other rows than foreseen; False: such a use forgets all that was foreseen

    Memory in bytes: 12 per row of the table that was ever used (20 if tolerant), at most 100 per place, and 24 per
    foreseen row.
    """

    def __init__(self, num_rows: int, places: int, *, is_tolerant: bool = False) -> None:
        assert places > 0
        self.num_places = places
        self._is_tolerant = is_tolerant
        # By row; zeros take no memory until a row is used.
        self._place = np.zeros(num_rows, np.int32)  # plus 1; 0: not on the device
        # Where a row is foreseen first and last: positions, which count from 1. Those before ``_begin`` are over.
        self._latest = np.zeros(num_rows, np.int64)
        self._first = np.zeros(num_rows if is_tolerant else 0, np.int64)
        # By place.
        self._row, self._last, self._rank = (np.zeros(places, np.int64) for _ in range(3))
        self._num_filled = self._now = 0
        # Foreseen rows, the position of the next use of each (0: none is foreseen), and the number of the use.
        self._ahead = np.zeros((3, 1024), np.int64)
        self._origin = self._begin = self._end = 1  # positions: of column 0, of the first row, after the last
        self._ends: deque[int] = deque()  # of the foreseen uses
        self._num_foreseen = 0
        # rank → places, and the last use of each when it got this rank: an entry whose rank or last use differs is old.
        self._entries: dict[int, list[tuple[Int64, Int64]]] = {}
        self._ranks: list[int] = []  # a heap
        self._num_entries = 0
        self._has_entries = False  # there are none until rows first have to make room
        self._ordered = 0  # the rank whose first entry is in the order of victims

    def places_of(self, rows: Int64) -> Int64:
        """Return the places of rows, int64 (n,); −1: not on the device."""
        return self._place[rows].astype(np.int64) - 1

    def rows_at(self, places: Int64) -> Int64:
        """Return the rows at places, int64 (n,)."""
        return self._row[places]

    def foresee(self, rows: Int64) -> None:
        """Append the distinct rows, int64 (n,), of the next use that is not foreseen yet."""
        self._num_foreseen += 1
        positions = self._reserve(len(rows))
        self._ahead[0, positions - self._origin] = rows
        self._ahead[1, positions - self._origin] = 0
        self._ahead[2, positions - self._origin] = self._num_foreseen
        before = self._latest[rows]
        self._latest[rows] = positions
        is_known = before >= self._begin
        self._ahead[1, before[is_known] - self._origin] = positions[is_known]
        rows, positions = rows[~is_known], positions[~is_known]
        if self._is_tolerant:
            self._first[rows] = positions
        places = self.places_of(rows)
        places = places[places >= 0]
        self._enter(places, np.full(len(places), -self._num_foreseen))

    def forget(self) -> None:
        """Forget what was foreseen."""
        if not self._ends:
            return
        self._ends.clear()
        self._begin = self._end
        filled = slice(self._num_filled)
        self._rank[filled] = self._last[filled] - UNKNOWN
        self._rebuild()

    def use(self, rows: Int64) -> Iterator[Moves]:
        """Use distinct rows, int64 (n,): the first foreseen use, if any is foreseen.

        Yields the moves of each chunk of at most ``num_places`` rows; carry them out before you request the next.
        """
        following = self._begin_use(rows)
        if not len(rows):
            return
        if len(rows) <= self.num_places:
            yield self._moved(rows, following, slice(None))
            return
        order = np.lexsort((rows, self._place[rows] == 0))  # the resident first
        for first in range(0, len(rows), self.num_places):
            positions = order[first : first + self.num_places]
            yield self._moved(rows[positions], following[positions], positions)

    # ---- the future

    def _begin_use(self, rows: Int64) -> Int64:
        """Take the first foreseen use off the foreseen ones. Returns where each row is foreseen next."""
        if not self._ends:
            return np.zeros(len(rows), np.int64)
        foreseen: Int64
        following: Int64
        foreseen, following = self._ahead[:2, self._begin - self._origin : self._ends[0] - self._origin]
        if not self._is_tolerant:
            if not np.array_equal(rows, foreseen):
                order, theirs = np.argsort(rows), np.argsort(foreseen)
                if not np.array_equal(rows[order], foreseen[theirs]):
                    self.forget()
                    return np.zeros(len(rows), np.int64)
                following = following[theirs][np.argsort(order)]
            self._next_use()
            return following
        self._first[foreseen] = following
        self._next_use()
        places = self.places_of(foreseen)
        resident = places >= 0
        places = places[resident]
        self._enter(places, self._ranks_of(following[resident], self._last[places]))  # if foreseen in vain
        return self._first[rows]

    def _next_use(self) -> None:
        self._entries.pop(len(self._ends) - 1 - self._num_foreseen, None)
        self._begin = self._ends.popleft()

    def _ranks_of(self, following: Int64, last: Int64) -> Int64:
        """Return the ranks of rows by where they are foreseen next, else by their last use."""
        is_known = following >= self._begin
        ranks = last - UNKNOWN
        ranks[is_known] = -self._ahead[2, following[is_known] - self._origin]
        return ranks

    def _reserve(self, num_rows: int) -> Int64:
        """Append a use of so many rows, and return their positions."""
        live, room = self._end - self._begin, self._ahead.shape[1]
        if self._end - self._origin + num_rows > room:
            uses = self._ahead[:, self._begin - self._origin : self._end - self._origin]
            if 2 * (live + num_rows) > room:
                self._ahead = np.zeros((3, 2 * (live + num_rows)), np.int64)
            self._ahead[:, :live] = uses.copy()
            self._origin = self._begin
        first, self._end = self._end, self._end + num_rows
        self._ends.append(self._end)
        return np.arange(first, self._end)

    # ---- victims

    def _moved(self, rows: Int64, following: Int64, positions: Int64 | slice) -> Moves:
        """Make room for a chunk of at most ``num_places`` rows, and let it in. following : where it is foreseen next"""
        self._now += 1
        places = self.places_of(rows)
        up = np.flatnonzero(places < 0)
        num_free = min(len(up), self.num_places - self._num_filled)
        if len(up) > num_free and not self._has_entries:
            self._has_entries = True
            self._rebuild()
        self._last[places[places >= 0]] = self._now  # these are no victims
        victims = self._victims(len(up) - num_free)
        down_rows = self._row[victims]
        self._place[down_rows] = 0
        taken = np.concatenate((np.arange(self._num_filled, self._num_filled + num_free), victims))
        self._num_filled += num_free
        places[up] = taken
        self._row[taken] = rows[up]
        self._place[rows[up]] = taken + 1
        self._last[places] = self._now
        self._enter(places, self._ranks_of(following, self._last[places]))
        if self._num_entries > MOST_ENTRIES * self.num_places:
            self._rebuild()
        return Moves(positions, places, up, down_rows, victims)

    def _victims(self, count: int) -> Int64:
        """Return the places of so many victims, and take them off the entries."""
        chosen = [np.empty(0, np.int64)]
        while count:
            rank = self._ranks[0]
            is_ordered = rank == self._ordered and len(self._entries.get(rank, ())) == 1
            places = np.concatenate(
                [
                    chosen[0],
                    *(p[(self._rank[p] == rank) & (self._last[p] == last)] for p, last in self._entries.get(rank, ())),
                ]
            )
            if not len(places):
                heapq.heappop(self._ranks)
                self._entries.pop(rank, None)
                self._ordered = 0
                continue
            if self._is_tolerant:
                places = np.unique(places)  # a rank that a row left and got again is there twice
            if len(places) > count and (self._is_tolerant or not is_ordered):
                # Of one last use, in an order that has nothing to do with the rows: as directories spread their keys.
                places = places[np.lexsort((mixed(self._row[places].view(np.uint64)), self._last[places]))]
            chosen.append(places[:count])
            rest = places[count:]
            count -= len(chosen[-1])
            self._entries[rank] = [(rest, self._last[rest])]
            self._ordered = rank
        return np.concatenate(chosen)

    def _enter(self, places: Int64, ranks: Int64) -> None:
        """Give places their ranks."""
        self._rank[places] = ranks
        if not self._has_entries:
            return
        self._num_entries += len(places)
        is_known = ranks > -UNKNOWN // 2
        for indices in (np.flatnonzero(is_known), np.flatnonzero(~is_known)):
            if len(indices):
                self._group(places[indices], ranks[indices])

    def _group(self, places: Int64, ranks: Int64) -> None:
        """Enter places by rank."""
        least = ranks.min()
        if (span := ranks.max() - least) > 0:
            # NumPy sorts 16 bits in linear time.
            order = np.argsort((ranks - least).astype(np.uint16) if span < 1 << 16 else ranks, kind="stable")
            places, ranks = places[order], ranks[order]
        last = self._last[places]
        firsts = np.flatnonzero(np.diff(ranks, prepend=least - 1))
        bounds = [*firsts.tolist(), len(places)]
        for rank, begin, end in zip(ranks[firsts].tolist(), bounds, bounds[1:], strict=False):
            if rank not in self._entries:
                self._entries[rank] = []
                heapq.heappush(self._ranks, rank)
            self._entries[rank].append((places[begin:end], last[begin:end]))

    def _rebuild(self) -> None:
        """Enter every place anew, without old entries."""
        self._entries.clear()
        self._ranks.clear()
        self._num_entries = self._ordered = 0
        self._enter(np.arange(self._num_filled), self._rank[: self._num_filled].copy())
