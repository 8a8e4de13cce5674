"""How old frames are when a step, a delta and a commit have them, by the times that their streams give them.

Only frames with a time cost anything. ``now_s`` is the only clock, and nothing that is applied or stored depends on it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

# What has frames: the rows that readers look up, the deltas that they receive, and the commits.
STAGES = ROW, DELTA, COMMIT = ("row", "delta", "commit")
# Different times that are counted apart, and groups of frames of one time that the quantiles are of.
MOST_GROUPS = 1024


def now_s() -> float:
    """Return the seconds since 1970."""
    return time.time()


def age_s(frame_time: int | None) -> float | None:
    """Return the seconds since the time of a frame: 0 of one in the future; None of one without a time."""
    return None if frame_time is None else max(0.0, now_s() - frame_time)


class FrameTimes:
    """How many frames have each time, in seconds; beyond MOST_GROUPS of them, neighbours count as the earliest."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self._unit = 1

    def add(self, frame_time: int, num_frames: int = 1) -> None:
        """Count frames of one time."""
        self._count(frame_time, num_frames)
        while len(self.counts) > MOST_GROUPS:
            self._unit *= 2
            before, self.counts = self.counts, {}
            for other, num in before.items():
                self._count(other, num)

    def add_all(self, other: FrameTimes) -> None:
        """Count the frames of another count as well."""
        for frame_time, num_frames in other.counts.items():
            self.add(frame_time, num_frames)

    def _count(self, frame_time: int, num_frames: int) -> None:
        rounded = frame_time - frame_time % self._unit
        self.counts[rounded] = self.counts.get(rounded, 0) + num_frames


@dataclass
class Ages:
    """The ages of frames. num_frames, sum_s : of all; recent : (age in seconds, frames of that age), the last ones"""

    num_frames: int = 0
    sum_s: float = 0.0
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MOST_GROUPS))

    def copy(self) -> Ages:
        return Ages(self.num_frames, self.sum_s, self.recent.copy())

    def quantiles(self, shares: Iterable[float]) -> list[float]:
        """Return the smallest recent ages that such shares of the frames do not exceed. There must be a frame."""
        ages = sorted(self.recent)
        counts = list(accumulate(num_frames for _, num_frames in ages))
        return [ages[bisect_left(counts, share * counts[-1])][0] for share in shares]


class Freshness:
    """The times of an engine's frames. Call every method under the gate's lock.

    newest : stage → the largest time of the frames in its rows; none if unknown
    ages : stage → those of frames when it got them
    """

    def __init__(self) -> None:
        self.newest: dict[str, int] = {}
        self.ages: dict[str, Ages] = {}
        self._waiting = {DELTA: FrameTimes(), COMMIT: FrameTimes()}
        self._begun: dict[str, tuple[FrameTimes, int | None]] = {}

    def stepped(self, times: FrameTimes, newest: int) -> None:
        """Note the frames of a step. newest : the largest time of any frame so far"""
        self._reached(ROW, times, newest)
        for waiting in self._waiting.values():
            waiting.add_all(times)

    def begins(self, stage: str) -> None:
        """Note that a delta or a commit begins, with the frames of all steps since the last one that has ended."""
        times, self._waiting[stage] = self._waiting[stage], FrameTimes()
        if stage in self._begun:
            times.add_all(self._begun[stage][0])
        self._begun[stage] = times, self.newest.get(ROW)

    def ends(self, stage: str) -> None:
        """Note that what began last can be read."""
        if stage in self._begun:
            self._reached(stage, *self._begun.pop(stage))

    def forget(self, stage: str) -> None:
        """Leave the frames so far out of the next delta or commit."""
        self._waiting[stage] = FrameTimes()
        self._begun.pop(stage, None)

    def set_back(self, newest: int | None) -> None:
        """Continue with the rows of another state. newest : the largest time of its frames; None: unknown"""
        self._reached(ROW, FrameTimes(), newest)
        for stage in self._waiting:
            self._waiting[stage] = FrameTimes()

    def restored(self, newest: int | None) -> None:
        """Begin with the rows of a commit. newest : as of ``set_back``"""
        self.newest = {} if newest is None else dict.fromkeys(STAGES, newest)

    def _reached(self, stage: str, times: FrameTimes, newest: int | None) -> None:
        if newest is None:
            self.newest.pop(stage, None)
        else:
            self.newest[stage] = newest
        if times.counts:
            now, ages = now_s(), self.ages.setdefault(stage, Ages())
            for frame_time, num_frames in sorted(times.counts.items()):
                age = max(0.0, now - frame_time)
                ages.num_frames, ages.sum_s = ages.num_frames + num_frames, ages.sum_s + num_frames * age
                ages.recent.append((age, num_frames))
