"""A table in the host's memory whose rows are updated on the devices.

The host has a table of all rows; the devices have a smaller one, with places for some of them. Rows of a step that have
no place go up before its update, to the places of others, which come down. The devices do this in order: a copy of the
rows that come down, writes of those that go up, the update. The host waits for rows to come down as late as it can: two
steps later, or when it needs one of them.

Every row is in one of four states. It lies in the host's table; or at a place; or it is coming down, in a copy that the
host has not stored yet; or it is new, and only its initial weights are kept.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.model.frames import Float32, Int64
from penstock.model.updates.rule import Rate
from penstock.rows.bridge.backend_tables import BackendTables, parts_of, row_ids
from penstock.rows.bridge.row_cache import Moves, RowCache
from penstock.rows.bridge.row_format import without_marks


@dataclass
class Moved:
    """Rows that updates found on the devices or moved, and seconds that the host waited for rows to come down."""

    hits: int = 0
    up: int = 0
    down: int = 0
    waited_s: float = 0.0


class _Descent(NamedTuple):
    """Rows that come down. parts : float32 (n, floats of all parts), complete after ``wait``"""

    rows: Int64
    parts: Float32
    wait: Callable[[], object]


class _NewRows(NamedTuple):
    """Rows that were created since the last update. rows : ascending; weights : float32 (n, dim)"""

    rows: Int64
    weights: Float32


NO_ROWS = _NewRows(np.empty(0, np.int64), np.empty((0, 0), np.float32))


class CachedTables:
    """One table of all rows on the host, and places for some of them on the devices: BackendTables of one member.

    host : with the table of all rows; device : with a table whose rows are the places; both have no other table

    cache : which row has which place; moved : counts since ``start_counting``
    """

    def __init__(self, host: BackendTables, device: BackendTables, cache: RowCache) -> None:
        self._host, self._device, self.cache = host, device, cache
        self.mesh, self.layouts = device.mesh, host.layouts
        self.compiler, self.problems = device.compiler, device.problems
        self.copies_any_number = host.copies_any_number and device.copies_any_number
        (layout,) = host.layouts
        self._num_floats = sum(layout.part_dims)
        self._keys: Callable[[Int64], Int64] = layout.ids
        self._descents: deque[_Descent] = deque()
        self._is_descending = np.zeros(layout.vocabulary_size, bool)
        self._new = NO_ROWS
        if layout.bfloat16:
            device.key_by(0, lambda places: self._keys(cache.rows_at(places)))
        self.start_counting()

    def start_counting(self) -> None:
        """Reset the counts."""
        self.moved = Moved()

    @property
    def variant(self) -> str:
        return self._device.variant

    @property
    def arrays(self) -> tuple[Any, ...]:
        """Those of the devices, then the host's."""
        return (*self._device.arrays, *self._host.arrays)

    def key_by(self, member: int, keys: Callable[[Int64], Int64]) -> None:
        self._keys = keys

    def warm(self) -> int:
        return self._device.warm() + self._host.warm()

    def wait(self) -> None:
        self._device.wait()
        self._host.wait()

    # ---- updates

    def apply(self, updates: Sequence[tuple[int, Sequence[Any], Rate]], step: int = 0, application: int = 0) -> None:
        for _, segments, rate in updates:
            several = [(ids, sums) for ids, sums in segments]
            rows = np.concatenate([ids for ids, _ in several])
            for moves in self.cache.use(rows):
                self._move(rows[moves.positions], moves)
                self._device.apply([(0, _placed(several, moves), rate)], step, application)

    def _move(self, rows: Int64, moves: Moves) -> None:
        """Move rows up and others down. rows : those that are updated next"""
        self.moved.hits += len(rows) - len(moves.up)
        self.moved.up += len(moves.up)
        self.moved.down += len(moves.down_rows)
        self._settle(0 if self._is_descending[rows[moves.up]].any() else 1)
        if len(moves.down_rows):
            parts = np.empty((len(moves.down_rows), self._num_floats), np.float32)
            wait = self._device.copy_rows(0, moves.down_places, parts)
            self._descents.append(_Descent(moves.down_rows, parts, wait))
            self._is_descending[moves.down_rows] = True
        up = moves.up
        if len(self._new.rows):
            indices, is_new = self._find_new(rows[up])
            if is_new.any():
                self._device.create_rows(0, moves.places[up[is_new]], [self._new.weights[indices]])
                self._new = _NewRows(np.delete(self._new.rows, indices), np.delete(self._new.weights, indices, axis=0))
            up = up[~is_new]
        if len(up):
            parts = np.empty((len(up), self._num_floats), np.float32)
            self._host.copy_rows(0, rows[up], parts)()
            self._device.put(0, moves.places[up], parts)

    def _find_new(self, rows: Int64) -> tuple[Int64, npt.NDArray[np.bool_]]:
        """Return where the new ones among rows are in ``_new``, and which of the rows are new: bool (n,)."""
        indices = np.searchsorted(self._new.rows, rows).clip(max=len(self._new.rows) - 1)
        is_new = self._new.rows[indices] == rows
        return indices[is_new], is_new

    def _settle(self, most: int = 0) -> None:
        """Store the rows that come down on the host, in order, until at most so many descents are left."""
        while len(self._descents) > most:
            rows, parts, wait = self._descents[0]
            began_s = time.perf_counter()
            wait()
            self.moved.waited_s += time.perf_counter() - began_s
            self._host.put(0, rows, parts)
            self._is_descending[rows] = False
            self._descents.popleft()

    # ---- rows wherever they are

    def _places(self, rows: Int64) -> Int64:
        """Return the places of rows, −1: the host has the row, which is stored there."""
        if len(self._new.rows):
            self._store_new()
        places = self.cache.places_of(rows)
        if self._descents and self._is_descending[rows].any():
            self._settle()
        return places

    def _store_new(self) -> None:
        """Store the new rows on the host."""
        rows, weights = self._new
        if self._is_descending[rows].any():
            self._settle()
        self._host.create_rows(0, rows, [weights])
        self._new = NO_ROWS

    def create_rows(self, member: int, ids: Int64, weights: Iterable[Float32]) -> None:
        if not len(ids):
            return
        places = self._places(ids)
        here, values = places >= 0, np.concatenate(list(weights))
        if here.any():  # rows of keys that have just lost them
            self._device.create_rows(0, places[here], [values[here]])
        order = np.flatnonzero(~here)[np.argsort(ids[~here])]
        self._new = _NewRows(ids[order], values[order])

    def write(self, member: int, ids: Int64 | int, values: Float32, part: int) -> None:
        rows = row_ids(ids, len(values))
        places = self._places(rows)
        here = places >= 0
        if self.variant != "host":  # as a table on the devices stores them
            values = without_marks(values)
        if not here.any():
            self._host.write(0, ids, values, part)
        else:
            self._device.write(0, places[here], values[here], part)
            self._host.write(0, rows[~here], values[~here], part)

    def put(self, member: int, ids: Int64, rows: Float32) -> None:
        for part, values in enumerate(parts_of(rows, self.layouts[0])):
            self.write(member, ids, values, part)

    def read(self, member: int, ids: Int64 | int, out: Float32, part: int) -> None:
        places = self._places(row_ids(ids, len(out)))
        here = np.flatnonzero(places >= 0)
        if len(here) < len(out):
            self._host.read(0, ids, out, part)
        if len(here):
            rows = np.empty((len(here), out.shape[1]), np.float32)
            self._device.read(0, places[here], rows, part)
            out[here] = rows

    def copy_rows(self, member: int, ids: Int64, out: Float32) -> Callable[[], object]:
        rows = ids[: len(out)]
        places = self._places(rows)
        of_device, of_host = np.flatnonzero(places >= 0), np.flatnonzero(places < 0)
        if not len(of_device):
            return self._host.copy_rows(0, rows, out)
        copies = []
        for indices, tables, numbers in (
            (of_device, self._device, places[of_device]),
            (of_host, self._host, rows[of_host]),
        ):
            parts = np.empty((len(indices), out.shape[1]), np.float32)
            copies.append((indices, parts, tables.copy_rows(0, numbers, parts)))

        def wait() -> None:
            for indices, parts, ready in copies:
                ready()
                out[indices] = parts

        return wait


def _placed(segments: Sequence[tuple[Int64, Float32]], moves: Moves) -> list[tuple[Int64, Float32]]:
    """Return the sums of a chunk by place. segments : of the whole use, by row"""
    if isinstance(moves.positions, slice):
        ends = np.cumsum([len(ids) for ids, _ in segments])[:-1]
        return [(places, sums) for places, (_, sums) in zip(np.split(moves.places, ends), segments, strict=True)]
    return [(moves.places, np.concatenate([sums for _, sums in segments])[moves.positions])]
