"""Interleaved timing: sides are warmed up and timed round by round, each round in another order.

The speed of a machine changes by the minute, so only interleaved sides are compared. A sample during which other
processes used our CPUs is marked as disturbed; it does not count if enough undisturbed ones remain.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.bench import machine
from penstock.bench.contestants import Runner

# CPU time that other processes may use before a sample counts as disturbed: a share of its time, plus clock ticks.
OTHERS_MOST, OTHERS_TICKS_S = 0.05, 0.03
ENOUGH = 3
# A side that takes this many times as long as the second fastest is dropped after ENOUGH rounds.
FAR_BEHIND = 3


@dataclass(frozen=True)
class Sample:
    """One pass over the distinct steps. ms : per step; disturbed : other processes used our CPUs meanwhile"""

    ms: float
    disturbed: bool


@dataclass(frozen=True)
class Timing:
    """The times of a side. samples : all of them; clean : the samples that count"""

    samples: tuple[Sample, ...]

    @property
    def clean(self) -> tuple[Sample, ...]:
        """The undisturbed samples, or all of them if there are fewer than ENOUGH."""
        clean = tuple(s for s in self.samples if not s.disturbed)
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
            "clean": sum(not s.disturbed for s in self.samples),
            "samples_ms": [round(s.ms, 4) for s in self.samples],
        }


def take_turns(sides: Mapping[str, Runner], num_steps: int, rounds: int) -> dict[str, Timing]:
    """Warm up and time every side. A side that is far behind after ENOUGH rounds is dropped."""
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
            if turn == ENOUGH:
                names = in_the_race(samples)
            start = turn % len(names)
            for name in names[start:] + names[:start]:
                samples[name].append(timed(sides[name], steps))
    finally:
        gc.enable()
    return {name: Timing(tuple(side_samples)) for name, side_samples in samples.items()}


def in_the_race(samples: Mapping[str, Sequence[Sample]]) -> list[str]:
    """Return the sides that are not far behind the second fastest, so that at least two remain to compare."""
    least = {name: min(sample.ms for sample in side_samples) for name, side_samples in samples.items()}
    second = sorted(least.values())[:2][-1]
    return [name for name, ms in least.items() if ms <= FAR_BEHIND * second]


def timed(side: Runner, steps: Sequence[int]) -> Sample:
    side.prepare(steps)
    others, started = others_s(), time.perf_counter()
    side.run(steps)
    seconds = time.perf_counter() - started
    return Sample(1e3 * seconds / len(steps), others_s() - others > OTHERS_MOST * seconds + OTHERS_TICKS_S)


def others_s() -> float:
    """Return the seconds that the CPUs of this process spent on other processes, or that the host took away."""
    return machine.busy_s() - time.process_time()
