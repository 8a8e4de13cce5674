"""The rows of one cached table that a log moves to the device and back, without the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.model.config.specs import TableSpec
from penstock.model.frames import Int64
from penstock.rows.bridge.row_cache import RowCache


@dataclass
class CacheForecast:
    """What becomes of the rows of a cached table under one choice.

    num_rows : of the table; device_bytes, look_ahead : of its placement; places : rows that the device has room for
    hits : rows of steps that were on the device; up : those that were not; down : those that made room
    bytes : of the rows that moved up and down, with their slots
    """

    num_rows: int
    device_bytes: int
    look_ahead: int
    places: int
    hits: int = 0
    up: int = 0
    down: int = 0
    bytes: int = 0


class CachedRows:
    """Follows the rows of one cached table through the openings of a log.

    rows_of : ids of a use → their rows in the table
    """

    def __init__(self, spec: TableSpec, rows_of: Callable[[Int64], Int64]) -> None:
        placement = spec.placement
        assert placement.device_bytes is not None
        assert placement.look_ahead is not None
        self.forecast = CacheForecast(spec.vocabulary_size, placement.device_bytes, placement.look_ahead, spec.places)
        self._rows_of, self._row_bytes = rows_of, spec.row_bytes
        self._cache = RowCache(spec.vocabulary_size, spec.places, is_tolerant=spec.dynamic is not None)
        self._num_foreseen = 0  # openings, of the one that comes next on

    def foresee(self, num_known: int, uses_of: Callable[[int], Sequence[Int64]]) -> None:
        """Look ahead.

        num_known : openings, of the one that comes next on; uses_of : the number of one of them → its uses, by their
            ids. It is called once per opening: a plan may know many
        """
        if not self.forecast.look_ahead:
            return
        end = min(num_known, self.forecast.look_ahead + 1)
        for number in range(self._num_foreseen, end):
            for ids in uses_of(number):
                self._cache.foresee(self._rows_of(ids))
        self._num_foreseen = end

    def step(self, uses: Sequence[Int64]) -> None:
        """Use the rows of one opening."""
        forecast = self.forecast
        for ids in uses:
            for moves in self._cache.use(self._rows_of(ids)):
                forecast.up += len(moves.up)
                forecast.hits += len(moves.places) - len(moves.up)
                forecast.down += len(moves.down_rows)
        forecast.bytes = (forecast.up + forecast.down) * self._row_bytes
        self._num_foreseen = max(0, self._num_foreseen - 1)
