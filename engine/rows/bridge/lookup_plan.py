"""The plan of a batch's lookups in one table, made on the host: which device requests which rows from which.

A plan has exact sizes. ``padded`` gives it as ``Uses``, whose sizes come from a ladder, so that the program of a step
is compiled for few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.errors import UsageError
from penstock.model.frames import Int64
from penstock.rows.bridge.functional_table import Feature, Uses
from penstock.rows.bridge.segment_sums import RUN, SegmentSums, SumSizes
from penstock.rows.bridge.sharding import Layout, bucket
from penstock.rows.bridge.stacking import multiple_of

# From one size to the next: a step of the user's is compiled for each.
GROWTH = 2.0


class LookupSizes(NamedTuple):
    """Padded sizes per device. asked : rows that it requests from one device; lookups; lines : that are requested

    sums : of samples, of requested rows, and of lines
    """

    asked: int
    lookups: int
    lines: int
    sums: tuple[SumSizes, ...]

    def or_more(self, others: LookupSizes) -> LookupSizes:
        asked, lookups, lines = map(max, self[:3], others[:3])
        return LookupSizes(asked, lookups, lines, tuple(map(SumSizes.or_more, self.sums, others.sums)))


class _Asking(NamedTuple):
    """One device's lookups. owners, rows : of the distinct rows, by owner; places : of each among those of its owner

    numbers : of every lookup, the index of its row in these; samples, gains : as in ``Uses``
    """

    owners: Int64
    rows: npt.NDArray[np.int32]
    places: Int64
    numbers: Int64
    samples: Int64
    gains: npt.NDArray[np.float32]


class _Sums(NamedTuple):
    """How the devices sum: of_samples, of_rows : lookups, on each asking device; of_lines : rows, on each owner"""

    of_samples: Sequence[SegmentSums]
    of_rows: Sequence[SegmentSums]
    of_lines: Sequence[SegmentSums]


@dataclass(frozen=True)
class LookupPlan:
    """The lookups of one batch in one table. asking : by device; sums : by gathers, None: by scatters"""

    layout: Layout
    features: tuple[Feature, ...]
    asking: tuple[_Asking, ...]
    owned: tuple[
        tuple[Int64, Int64], ...
    ]  # of every device: lines (or rows: Layout.by_row), of each row: index in them
    sums: _Sums | None

    @classmethod
    def of(
        cls, layout: Layout, unique_ids: Int64, features: Sequence[Feature], uses: Sequence[Any], by_gathers: bool
    ) -> LookupPlan:
        """Return the plan. unique_ids : of the table; uses : of the features, as in deduplication data

        by_gathers : whether devices sum so, see segment_sums.py
        Every device has an equal, contiguous share of the samples of each feature. Raises UsageError if that is
        impossible.
        """
        num_devices = layout.num_devices
        for path, shape in features:
            if shape[0] % num_devices:
                raise UsageError(
                    f"feature '{path}': {shape[0]} samples cannot be distributed evenly over {num_devices} devices"
                )
        owners, rows = layout.locate(unique_ids)
        asking = [_asking(owners, rows, features, uses, device, num_devices) for device in range(num_devices)]
        owned = []
        for owner in range(num_devices):
            arrived = np.concatenate([request.rows[request.owners == owner] for request in asking])
            owned.append(np.unique(arrived // layout.unit, return_inverse=True))
        sums = None
        if by_gathers:
            num_samples = sum(_samples(feature, num_devices) for feature in features)
            sums = _Sums(
                [SegmentSums.of(request.samples, num_samples) for request in asking],
                [SegmentSums.of(request.numbers, len(request.rows)) for request in asking],
                [SegmentSums.of(index, len(lines)) for lines, index in owned],
            )
        return cls(layout, tuple(features), tuple(asking), tuple(owned), sums)

    @property
    def sizes(self) -> LookupSizes:
        """The smallest sizes of the ladder that fit."""
        asked = max(int(request.places.max(initial=-1)) + 1 for request in self.asking)
        lookups = max(len(request.samples) for request in self.asking)
        lines = bucket(max(len(lines) for lines, _ in self.owned), multiple_of(self.layout.line), GROWTH)
        by_device = self.sums or ()
        of_sums = tuple(reduce(SumSizes.or_more, (sums.sizes for sums in devices)) for devices in by_device)
        return LookupSizes(bucket(asked, growth=GROWTH), bucket(lookups, growth=GROWTH), lines, of_sums)

    def padded(self, sizes: LookupSizes) -> Uses:
        """Return the plan as NumPy arrays of these sizes, none of them smaller than ``self.sizes``."""
        n, line, unit = len(self.asking), self.layout.line, self.layout.unit
        beyond, num_samples = self.layout.lines_per_device, sum(_samples(feature, n) for feature in self.features)
        if beyond * line.group + sizes.lines > np.iinfo(np.int32).max:
            raise UsageError(f"table '{self.layout.name}': {sizes.lines} lines at once exceed int32; use more devices")
        asked = np.full((n, n, sizes.asked), beyond * line.group, np.int32)
        rows = np.full((n, sizes.lookups), n * sizes.asked, np.int32)
        samples = np.full((n, sizes.lookups), num_samples, np.int32)
        gains = np.zeros((n, sizes.lookups), np.float32)
        for device, request in enumerate(self.asking):
            asked[device, request.owners, request.places] = request.rows
            span = slice(len(request.samples))
            rows[device, span] = (request.owners * sizes.asked + request.places)[request.numbers]
            samples[device, span], gains[device, span] = request.samples, request.gains
        lines = np.tile(beyond + np.arange(sizes.lines, dtype=np.int32), (n, 1))
        cells = np.full((n, n * sizes.asked), sizes.lines * unit, np.int32)
        touched = np.zeros((n, sizes.lines * unit), bool)
        for owner, (numbers, index) in enumerate(self.owned):
            lines[owner, : len(numbers)] = numbers
            arrived = asked[:, owner].reshape(-1)
            requested = np.flatnonzero(arrived < beyond * line.group)
            cells[owner, requested] = index * unit + arrived[requested] % unit
            touched[owner, cells[owner, requested]] = True
        counts = np.array([len(numbers) for numbers, _ in self.owned], np.int32)
        by_line = touched.reshape(n, sizes.lines, unit)
        sums = self._padded_sums(sizes, num_samples, cells < sizes.lines * unit)
        return Uses(asked, rows, samples, gains, lines, counts, cells, by_line, self.features, beyond, *sums)

    def _padded_sums(self, sizes: LookupSizes, num_samples: int, requested: npt.NDArray[np.bool_]) -> list[Any]:
        """Return the last arrays of ``Uses``. requested : (devices, devices * A), without pads"""
        n, num_asked = len(self.asking), requested.shape[1]
        if self.sums is None:
            return [np.zeros((n, 0, width), np.int32) for width in (1, RUN)] * 3
        samples_sizes, rows_sizes, lines_sizes = sizes.sums
        of_samples = [sums.padded(samples_sizes, num_samples, sizes.lookups) for sums in self.sums.of_samples]
        of_rows = [
            sums.padded(rows_sizes, num_asked, sizes.lookups, segments=request.owners * sizes.asked + request.places)
            for sums, request in zip(self.sums.of_rows, self.asking, strict=True)
        ]
        of_lines = [
            sums.padded(lines_sizes, sizes.lines, num_asked, values=np.flatnonzero(of_device))
            for sums, of_device in zip(self.sums.of_lines, requested, strict=True)
        ]
        return [
            np.stack(arrays) for devices in (of_samples, of_rows, of_lines) for arrays in zip(*devices, strict=True)
        ]


def _asking(
    owners: Any, rows: Any, features: Sequence[Feature], uses: Sequence[Any], device: int, num_devices: int
) -> _Asking:
    """Return the lookups of one device. owners, rows : where the unique ids are"""
    indices, samples, gains, before = [], [], [], 0
    for feature, use in zip(features, uses, strict=True):
        of_device = _samples(feature, num_devices)
        start, stop = np.searchsorted(use.samples, [device * of_device, (device + 1) * of_device]).tolist()
        indices.append(use.rows[start:stop])
        samples.append(use.samples[start:stop].astype(np.int64) - device * of_device + before)
        gains.append(np.ones(stop - start, np.float32) if use.gains is None else use.gains[start:stop])
        before += of_device
    index = np.concatenate(indices)
    requested = np.zeros(len(rows), bool)
    requested[index] = True
    distinct = np.flatnonzero(requested)
    distinct = distinct[np.argsort(owners[distinct], kind="stable")]
    numbers = np.empty(len(rows), np.int64)
    numbers[distinct] = np.arange(len(distinct))
    whose = owners[distinct].astype(np.int64)
    places = np.arange(len(distinct)) - np.searchsorted(whose, whose)
    return _Asking(whose, rows[distinct], places, numbers[index], np.concatenate(samples), np.concatenate(gains))


def _samples(feature: Feature, num_devices: int) -> int:
    """Return how many samples, or positions of sequences, each device has."""
    return int(np.prod(feature.shape)) // num_devices
