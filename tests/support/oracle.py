"""A plain NumPy update engine, one row at a time, written from the contract alone: nothing of penstock is used."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from lookup_oracle import Looked, lookups


def coalesce(frames, reduction):
    """frames: lists of (id, float32 row) in arrival order → {id: gradient}, left fold from a copy of the first."""
    sums, held = {}, {}
    for rows in frames:
        for i, g in rows:
            sums[i] = sums[i] + g if i in sums else np.array(g, np.float32)
        for i in {i for i, _ in rows}:
            held[i] = held.get(i, 0) + 1
    return {i: s / np.float32(held[i]) if reduction == "mean" else s for i, s in sums.items()}


# ---- frames


class Example(NamedTuple):
    """A row of an example stream. ``features``: name → Looked."""

    features: dict
    step: int | None = None
    contributor: object = None
    rates: list | None = None


def cut(batches, contribution_rows=None):
    """Batches of a source, lists of examples → frames, lists of (place in the source, example)."""
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
    """A frame with bad rows, where they are errors. ``frame``: its number; ``rows``: these lookups."""

    def __init__(self, frame, rows):
        super().__init__(frame, rows)
        self.frame, self.rows = frame, rows


@dataclass
class Engine:
    """tables : name → Table; schedules : tag → function of the global step, for rates that nothing else gives."""

    tables: dict
    features: list
    num_required: int = 1
    reduction: str = "mean"
    schedules: dict = field(default_factory=dict)
    global_step: int = 0
    held: list = field(default_factory=list)
    last_rates: dict = field(default_factory=dict)
    deltas: list = field(default_factory=list)  # (table, step, id, row) of every row that a step changed

    def is_stale(self, local_step):
        return local_step is not None and local_step < self.global_step

    def push(self, rows, rates):
        """One frame that is not stale. rows: table → [(id, gradient)]. Whether the gate opened."""
        self.held.append(rows)
        self.last_rates = rates
        if len(self.held) < self.num_required:
            return False
        self.open()
        return True

    def open(self):
        rates = {tag: schedule(self.global_step) for tag, schedule in self.schedules.items()} | self.last_rates
        for name, table in self.tables.items():
            with np.errstate(all="ignore"):
                gradients = coalesce([rows.get(name, []) for rows in self.held], self.reduction)
                table.step(gradients, rates)
            changed = [(name, self.global_step + 1, i, table.weights[i].tolist()) for i in sorted(gradients)]
            self.deltas.extend(changed)
        self.held = []
        self.global_step += 1

    def looked_up(self, frame):
        """Every lookup of a frame in order, example by example and feature by feature; and how many were cut off."""
        results, truncated = [], 0
        for row, example in frame:
            for feature in self.features:
                shape = self.tables[feature.table].weights.shape
                with np.errstate(all="ignore"):
                    first, beyond = lookups(row, feature, *shape, example.features.get(feature.name, Looked(None)))
                results += first
                truncated += beyond
        return results, truncated

    def run(self, frames, drops_bad_rows=False, call_rates=None, flush=False):
        """Frames of ``cut``; call_rates: tag → rate, before the stream's. Raises BadFrameError, or returns counts."""
        counts = Counter()
        bad_rows = []
        for number, frame in enumerate(frames):
            actual, truncated = self.looked_up(frame)
            bad = [entry for entry in actual if entry.reason]
            if bad and not drops_bad_rows:
                raise BadFrameError(number, bad)
            bad_rows += bad
            counts.update(rows=len(actual), frames=1, truncated=truncated)
            example = frame[0][1]
            if self.is_stale(example.step):
                counts["stale"] += 1
                continue
            rows = {}
            for item in actual:
                if not item.reason:
                    rows.setdefault(item.table, []).append((item.id, item.gradient))
            rates = dict(enumerate(example.rates or [])) | (call_rates or {})
            counts["steps"] += self.push(rows, rates)
        if flush and self.held:
            self.open()
            counts["steps"] += 1
        return counts, bad_rows
