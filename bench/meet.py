"""Sides in turns: warmed up, timed round by round, each round in another order.

A machine's speed changes by the minute, so only sides that took turns are compared. A sample during which our
threads waited for a CPU is marked; where enough others remain, it does not count.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.bench.sides import Side

WAITED_MOST = 0.05  # of the wall time, summed over threads
ENOUGH = 3


@dataclass(frozen=True)
class Sample:
    """One pass over the distinct steps. ms : of one step; waited : share of it that threads stood in the run queue"""

    ms: float
    waited: float


@dataclass(frozen=True)
class Timing:
    """What a side took for a step. clean : samples that count; all are kept"""

    samples: tuple[Sample, ...]

    @property
    def clean(self) -> tuple[Sample, ...]:
        """The undisturbed samples, or all where fewer than ENOUGH are."""
        clean = tuple(s for s in self.samples if s.waited <= WAITED_MOST)
        return clean if len(clean) >= ENOUGH else self.samples

    @property
    def median_ms(self) -> float:
        return statistics.median(s.ms for s in self.clean)

    def as_json(self) -> dict[str, Any]:
        times = [s.ms for s in self.clean]
        return {
            "median_ms": self.median_ms,
            "min_ms": min(times),
            "max_ms": max(times),
            "clean": sum(s.waited <= WAITED_MOST for s in self.samples),
            "samples_ms": [round(s.ms, 4) for s in self.samples],
        }


def take_turns(sides: Mapping[str, Side], num_steps: int, rounds: int) -> dict[str, Timing]:
    """Time every side; all have been warmed up by one pass."""
    steps = range(num_steps)
    for side in sides.values():
        side.prepare(steps)
        side.run(steps)
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    names = list(sides)
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            start = turn % len(names)
            for name in names[start:] + names[:start]:
                samples[name].append(timed(sides[name], steps))
    finally:
        gc.enable()
    return {name: Timing(tuple(of)) for name, of in samples.items()}


def timed(side: Side, steps: Sequence[int]) -> Sample:
    side.prepare(steps)
    waited, started = run_queue_s(), time.perf_counter()
    side.run(steps)
    seconds = time.perf_counter() - started
    return Sample(1e3 * seconds / len(steps), max(0.0, run_queue_s() - waited) / seconds)


def run_queue_s() -> float:
    """Seconds that the threads of this process have waited for a CPU; 0 where the system does not say."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[1])
        except (OSError, IndexError, ValueError):  # a thread that has just ended
            continue
    return total / 1e9
