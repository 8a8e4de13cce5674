"""What does it cost to lay out a step for several devices, and what would coalescing by device save of it?

Lays out 131,072 distinct rows of 10 million (Adagrad, on lines of a TPU) on one thread and on two, best of 30. Then
whole steps on two threads, on the host only: rows are summed, placed on 8 devices and laid out; each distinct row
occurs as often as "uses" says. Sums kept by device from the intake on would be in the order of their devices: they need
no ordering and are laid out faster. "Saved" contains no cost of keeping them so: placing every row, not every sum.

    python bench/experiments/device_layout.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.bridge.feeding.dispatcher import RING, Arena, LayoutTeam
from penstock.bridge.feeding.packing import Packer, Routing
from penstock.bridge.sharding import Layout
from penstock.bridge.stacking import Stack, TableRows
from penstock.frames import Frame, Rows
from penstock.pipeline import Pipeline, TableStore
from penstock.pyx import partition
from penstock.updates import UpdateRule

DISTINCT, VOCABULARY, THREADS, DEVICES, TURNS = 131_072, 10_000_000, 2, 8, 30
RULE = UpdateRule("adagrad", 1)


def main() -> None:
    print("| dim | devices | M rows/s, 1 thread | 2 threads | bytes per row |\n|---|---|---|---|---|")
    for dim in (8, 32, 128):
        for devices in (1, DEVICES):
            rates, num_bytes = zip(*(rate(dim, devices, threads) for threads in (1, THREADS)), strict=True)
            print(f"| {dim} | {devices} | {rates[0]:.1f} | {rates[1]:.1f} | {num_bytes[0]:.1f} |", flush=True)
    print(
        "\n| dim | uses | sum | place | order | lay out | lay out in order | saved |\n|---|---|---|---|---|---|---|---|"
    )
    for dim in (32, 128):
        for uses in (1, 3, 8):
            measured = step(dim, uses)
            *today, in_order = measured
            saved = (today[2] + today[3] - in_order) / sum(today)
            times = " | ".join(f"{seconds * 1e3:.2f} ms" for seconds in measured)
            print(f"| {dim} | {uses} | {times} | {saved:.1%} |", flush=True)


def rate(dim: int, devices: int, threads: int) -> tuple[float, float]:
    """Return the millions of rows per second that are laid out, and the bytes sent per row."""
    laying, rng = Laying(dim, devices, threads), np.random.default_rng(0)
    ids = rng.permutation(VOCABULARY)[:DISTINCT]
    rows = [TableRows(0, ids, rng.standard_normal((DISTINCT, dim), np.float32))]
    seconds = best_of(lambda: laying.lay_out(laying.packer.route(rows)))
    return DISTINCT / seconds / 1e6, laying.num_bytes / DISTINCT


def step(dim: int, uses: int) -> list[float]:
    """Return the seconds of the work of a step.

    That is summing, placing sums on devices and lines, ordering them by device, laying them out, and laying them out
    where they are in that order already.
    """
    laying, rng = Laying(dim, DEVICES, THREADS), np.random.default_rng(0)
    ids = rng.permutation(np.repeat(rng.permutation(VOCABULARY)[:DISTINCT], uses))
    frame = Frame({"t": (Rows(ids, rng.standard_normal((len(ids), dim), np.float32)),)}, len(ids))
    pipeline = Pipeline({"t": TableStore(VOCABULARY, dim, accumulate=True, mean=False)}, THREADS)

    def sums() -> list[TableRows]:
        pipeline.add(frame, lambda: None)
        (coalesced,) = pipeline.drain()["t"]
        return [TableRows(0, *part) for part in coalesced.parts]

    summed = best_of(sums)
    rows = sums()
    routed = laying.packer.route(rows)
    together = TableRows(0, *(np.concatenate([one[of] for one in rows])[routed.order] for of in (1, 2)))
    ordered = laying.packer.route([together])
    order = best_of(lambda: partition.by_device(routed.devices, DEVICES))
    place = best_of(lambda: laying.packer.route(rows)) - order
    return [summed, place, order, *(best_of(lambda of=of: laying.lay_out(of)) for of in (routed, ordered))]  # type: ignore[misc]


class Laying:
    """Lays out rows in a ring of arenas. num_bytes : that the last step sends"""

    def __init__(self, dim: int, devices: int, threads: int) -> None:
        layout = Layout("t", VOCABULARY, dim, RULE.num_slots, devices, True, 128)
        self.packer = Packer(Stack.of([layout], RULE), LayoutTeam(threads))
        self._arenas = [Arena() for _ in range(RING)]
        self.num_bytes = 0

    def lay_out(self, routed: Routing) -> None:
        self.num_bytes = 0
        for entries in self.packer.slices(routed):
            self._arenas.append(self._arenas.pop(0))
            self._arenas[0].begin()
            self._count(self.packer.pack(routed, entries, self._arenas[0].room).arguments)

    def _count(self, sent: Sequence[Any]) -> None:
        self.num_bytes += sum(array.nbytes for array in sent)


def best_of(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls."""
    seconds = []
    for _ in range(TURNS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


if __name__ == "__main__":
    main()
