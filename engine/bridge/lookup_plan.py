"""The plan of a batch's lookups in one table, made on the host: which device requests which rows from which.

A plan has exact sizes. ``padded`` gives it as ``Uses``, whose sizes come from a ladder, so that the program of a step
is compiled for few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.bridge.functional_table import Feature, Uses
from penstock.bridge.segment_sums import SegmentSums, SumSizes
from penstock.bridge.sharding import Layout, bucket
from penstock.bridge.stacking import multiple_of
from penstock.errors import UsageError
from penstock.frames import Int64

# From one size to the next: a step of the user's is compiled for each.
GROWTH = 2.0


class LookupSizes(NamedTuple):
    """Padded sizes per device. asked : rows that it requests from one device; lookups; lines : that are requested

    of_samples, of_rows, of_lines : of the sums that result in them
    """

    asked: int
    lookups: int
    lines: int
    of_samples: SumSizes
    of_rows: SumSizes
    of_lines: SumSizes

    def or_more(self, others: LookupSizes) -> LookupSizes:
        simple = map(max, self[:3], others[:3])
        sums = (SumSizes(*map(max, a, b)) for a, b in zip(self[3:], others[3:], strict=True))
        return LookupSizes(*simple, *sums)


class _Asking(NamedTuple):
    """One device's lookups. owners, rows : of the distinct rows, by owner; places : of each among those of its owner

    numbers : of every lookup, the index of its row in these; samples, gains : as in ``Uses``
    of_samples, of_rows : the sums of lookups
    """

    owners: Int64
    rows: npt.NDArray[np.int32]
    places: Int64
    numbers: Int64
    samples: Int64
    gains: npt.NDArray[np.float32]
    of_samples: SegmentSums
    of_rows: SegmentSums


class _Owned(NamedTuple):
    """What is requested of one device. lines : unique, or rows (Layout.by_row); sums : of the rows of each"""

    lines: Int64
    index: Int64  # of every requested row, device by device: its line
    sums: SegmentSums


@dataclass(frozen=True)
class LookupPlan:
    """The lookups of one batch in one table. asking, owned : by device"""

    layout: Layout
    features: tuple[Feature, ...]
    asking: tuple[_Asking, ...]
    owned: tuple[_Owned, ...]

    @classmethod
    def of(cls, layout: Layout, unique_ids: Int64, features: Sequence[Feature], uses: Sequence[Any]) -> LookupPlan:
        """Return the plan. unique_ids : of the table; uses : of the features, as in deduplication data

        Every device has an equal, contiguous share of the samples of each feature. Raises UsageError if that is
        impossible.
        """
        num_devices = layout.num_devices
        for path, shape in features:
            if shape[0] % num_devices:
                raise UsageError(
                    f"feature '{path}': {shape[0]} samples cannot be distributed evenly over {num_devices} devices"
                )
        owners, rows = layout.place(unique_ids)
        asking = [_asking(owners, rows, features, uses, device, num_devices) for device in range(num_devices)]
        owned = []
        for owner in range(num_devices):
            arrived = np.concatenate([request.rows[request.owners == owner] for request in asking])
            lines, index = np.unique(arrived // layout.unit, return_inverse=True)
            owned.append(_Owned(lines, index, SegmentSums.of(index, len(lines))))
        return cls(layout, tuple(features), tuple(asking), tuple(owned))

    @property
    def sizes(self) -> LookupSizes:
        """The smallest sizes of the ladder that fit."""
        asked = max(int(request.places.max(initial=-1)) + 1 for request in self.asking)
        lookups = max(len(request.samples) for request in self.asking)
        lines = bucket(max(len(owned.lines) for owned in self.owned), multiple_of(self.layout.line), GROWTH)
        of_samples, of_rows, of_lines = (
            SumSizes(*map(max, *(sums.sizes for sums in of_devices), SumSizes(0, 0)))
            for of_devices in (
                [request.of_samples for request in self.asking],
                [request.of_rows for request in self.asking],
                [owned.sums for owned in self.owned],
            )
        )
        simple = bucket(asked, growth=GROWTH), bucket(lookups, growth=GROWTH), lines
        return LookupSizes(*simple, of_samples, of_rows, of_lines)

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
        of_samples, of_rows, of_lines = [], [], []
        for device, request in enumerate(self.asking):
            asked[device, request.owners, request.places] = request.rows
            at = request.owners * sizes.asked + request.places
            span = slice(len(request.samples))
            rows[device, span] = at[request.numbers]
            samples[device, span], gains[device, span] = request.samples, request.gains
            of_samples.append(request.of_samples.padded(sizes.of_samples, num_samples, sizes.lookups))
            of_rows.append(request.of_rows.padded(sizes.of_rows, n * sizes.asked, sizes.lookups, segments=at))
        lines = np.tile(beyond + np.arange(sizes.lines, dtype=np.int32), (n, 1))
        places = np.zeros((n, n * sizes.asked), np.int32)
        touched = np.zeros((n, sizes.lines * unit), bool)
        for owner, owned in enumerate(self.owned):
            lines[owner, : len(owned.lines)] = owned.lines
            arrived = asked[:, owner].reshape(-1)
            requested = np.flatnonzero(arrived < beyond * line.group)
            places[owner, requested] = arrived[requested] % unit
            touched[owner, owned.index * unit + places[owner, requested]] = True
            of_lines.append(owned.sums.padded(sizes.of_lines, sizes.lines, n * sizes.asked, values=requested))
        counts = np.array([len(owned.lines) for owned in self.owned], np.int32)
        by_line = touched.reshape(n, sizes.lines, unit)
        sums = [np.stack(parts) for each in (of_samples, of_rows, of_lines) for parts in zip(*each, strict=True)]
        return Uses(asked, rows, samples, gains, lines, counts, places, by_line, *sums, self.features, beyond)


def _asking(
    owners: Any, rows: Any, features: Sequence[Feature], uses: Sequence[Any], device: int, num_devices: int
) -> _Asking:
    """Return the lookups of one device. owners, rows : where the unique ids are"""
    indices, samples, gains, before = [], [], [], 0
    for feature, use in zip(features, uses, strict=True):
        share = _samples(feature, num_devices)
        start, stop = np.searchsorted(use.samples, [device * share, (device + 1) * share]).tolist()
        indices.append(use.rows[start:stop])
        samples.append(use.samples[start:stop].astype(np.int64) - device * share + before)
        gains.append(np.ones(stop - start, np.float32) if use.gains is None else use.gains[start:stop])
        before += share
    index = np.concatenate(indices)
    requested = np.zeros(len(rows), bool)
    requested[index] = True
    distinct = np.flatnonzero(requested)
    distinct = distinct[np.argsort(owners[distinct], kind="stable")]
    numbers = np.empty(len(rows), np.int64)
    numbers[distinct] = np.arange(len(distinct))
    whose = owners[distinct].astype(np.int64)
    places = np.arange(len(distinct)) - np.searchsorted(whose, whose)
    sample, number = np.concatenate(samples), numbers[index]
    sums = SegmentSums.of(sample, before), SegmentSums.of(number, len(distinct))
    return _Asking(whose, rows[distinct], places, number, sample, np.concatenate(gains), *sums)


def _samples(feature: Feature, num_devices: int) -> int:
    """Return how many samples, or positions of sequences, each device has."""
    return int(np.prod(feature.shape)) // num_devices
