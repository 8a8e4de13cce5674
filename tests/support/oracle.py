"""A plain NumPy update engine, one row at a time, written from the docs alone: it imports nothing of penstock."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from lookup_oracle import Looked, lookups


def coalesce(frames, reduction):
    """Return {id: gradient}: a left fold of each id's rows, from a copy of the first.

    frames : lists of (id, float32 row) in arrival order
    """
    sums, num_frames = {}, {}
    for rows in frames:
        for i, g in rows:
            sums[i] = sums[i] + g if i in sums else np.array(g, np.float32)
        for i in {i for i, _ in rows}:
            num_frames[i] = num_frames.get(i, 0) + 1
    return {i: s / np.float32(num_frames[i]) if reduction == "mean" else s for i, s in sums.items()}


# ---- frames


class Example(NamedTuple):
    """A row of an example stream. ``features``: name → Looked."""

    features: dict
    step: int | None = None
    contributor: object = None
    rates: list | None = None


def split_frames(batches, contribution_rows=None):
    """Return the frames of a source's batches (lists of examples): lists of (row number in the source, example)."""
    rows = [(n, example) for n, example in enumerate(example for batch in batches for example in batch)]
    if rows and rows[0][1].step is not None:
        frames = []
        for n, example in rows:
            key = (example.step, example.contributor)
            if frames and key == (frames[-1][-1][1].step, frames[-1][-1][1].contributor):
                frames[-1].append((n, example))
            else:
                frames.append([(n, example)])
        return frames
    if contribution_rows is not None:
        return [rows[n : n + contribution_rows] for n in range(0, len(rows), contribution_rows)]
    sizes = [len(batch) for batch in batches if batch]
    ends = np.cumsum([0, *sizes]).tolist()
    return [rows[start:end] for start, end in pairwise(ends)]


# ---- the engine


def sgd(lr, g, w):
    return w - lr * g, ()


def adagrad(lr, g, w, accumulators):
    accumulators = accumulators + g * g
    return w - lr * g / np.sqrt(accumulators), (accumulators,)


def momentum(lr, g, w, momenta):
    momenta = np.float32(0.9) * momenta + g
    return w - lr * momenta, (momenta,)


@dataclass
class Table:
    """rate : a number, or the tag of a dynamic rate; update : one of the functions above."""

    weights: np.ndarray
    slots: list
    update: object
    rate: float | None
    tag: int | None = None

    def step(self, gradients, rates):
        lr = np.float32(self.rate if self.tag is None else rates[self.tag])
        for i, g in gradients.items():
            self.weights[i], new = self.update(lr, g, self.weights[i], *(slot[i] for slot in self.slots))
            for slot, row in zip(self.slots, new, strict=True):
                slot[i] = row


class BadFrameError(Exception):
    """A frame has bad rows, and the run does not drop them. ``frame``: its number; ``rows``: the bad lookups."""

    def __init__(self, frame, rows):
        super().__init__(frame, rows)
        self.frame, self.rows = frame, rows


@dataclass
class Engine:
    """tables : name → Table; schedules : tag → function of the global step, for tags without another rate."""

    tables: dict
    features: list
    num_required: int = 1
    reduction: str = "mean"
    schedules: dict = field(default_factory=dict)
    global_step: int = 0
    accumulated: list = field(default_factory=list)  # frames since the last step
    sums: dict = field(default_factory=lambda: defaultdict(dict))  # table → those of the accumulated frames, by id
    last_rates: dict = field(default_factory=dict)
    deltas: list = field(default_factory=list)  # (table, step, id, row) of every row that a step changed

    def is_stale(self, local_step):
        return local_step is not None and local_step < self.global_step

    def push(self, rows, rates):
        """Push one frame that is not stale. Return whether the gate opened. rows : table → [(id, gradient)]"""
        self.accumulated.append(rows)
        self.last_rates = rates
        if len(self.accumulated) < self.num_required:
            return False
        self.open()
        return True

    def open(self):
        rates = {tag: schedule(self.global_step) for tag, schedule in self.schedules.items()} | self.last_rates
        for name, table in self.tables.items():
            with np.errstate(all="ignore"):
                gradients = coalesce([rows.get(name, []) for rows in self.accumulated], self.reduction)
                table.step(gradients, rates)
            changed = [(name, self.global_step + 1, i, table.weights[i].tolist()) for i in sorted(gradients)]
            self.deltas.extend(changed)
        self.accumulated = []
        self.sums.clear()
        self.global_step += 1

    def lookups_of(self, frame):
        """Return the lookups of a frame, example by example and feature by feature, and how many were truncated."""
        results, truncated = [], 0
        for row, example in frame:
            for feature in self.features:
                shape = self.tables[feature.table].weights.shape
                looked = example.features.get(feature.name, Looked(None))
                with np.errstate(all="ignore"):
                    feature_lookups, num_truncated = lookups(row, feature, *shape, looked)
                results += feature_lookups
                truncated += num_truncated
        return results, truncated

    @np.errstate(all="ignore")
    def overflowing(self, frame_lookups):
        """Return the good lookups with which a sum leaves the finite range, and the sums without them."""
        refused, sums = [], defaultdict(dict, {name: dict(of_table) for name, of_table in self.sums.items()})
        for lookup in frame_lookups:
            if not lookup.reason:
                total = sums[lookup.table].get(lookup.id, np.float32(-0.0)) + lookup.gradient
                if np.isfinite(total).all():
                    sums[lookup.table][lookup.id] = total
                else:
                    refused.append(lookup)
        return refused, sums

    def run(self, frames, drops_bad_rows=False, call_rates=None, flush=False):
        """Apply frames of ``split_frames``. Return counts and bad lookups. Raises BadFrameError.

        call_rates : tag → rate, which overrides the stream's
        """
        counts = Counter()
        bad_rows = []
        for number, frame in enumerate(frames):
            frame_lookups, truncated = self.lookups_of(frame)
            bad = [lookup for lookup in frame_lookups if lookup.reason]
            if bad and not drops_bad_rows:
                raise BadFrameError(number, bad)
            bad_rows += bad
            counts.update(rows=len(frame_lookups), frames=1, truncated=truncated)
            example = frame[0][1]
            if self.is_stale(example.step):
                counts["stale"] += 1
                continue
            refused, sums = self.overflowing(frame_lookups)
            over = [lookup._replace(reason="sum_not_finite") for lookup in refused]
            if over and not drops_bad_rows:
                raise BadFrameError(number, over[:1])
            bad_rows += over
            self.sums = sums
            rows = {}
            for lookup in frame_lookups:
                if not lookup.reason and not any(lookup is each for each in refused):
                    rows.setdefault(lookup.table, []).append((lookup.id, lookup.gradient))
            rates = dict(enumerate(example.rates or [])) | (call_rates or {})
            counts["steps"] += self.push(rows, rates)
        if flush and self.accumulated:
            self.open()
            counts["steps"] += 1
        return counts, bad_rows
