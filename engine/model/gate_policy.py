"""What opens a gate: a number of frames of any producers, or in rounds one frame of each worker."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.base.errors import InputError, UsageError, UsageTypeError, listed
from penstock.base.validation import whole
from penstock.model.frames import Contributor, Frame, FrameRun

# Frames of one worker that may wait for those of others, unless the configuration says otherwise.
AHEAD = 2
MOST_WORKERS = 1 << 20
_NUMBERED = re.compile("(rank-)?(0|[1-9][0-9]{0,6})")

Workers = int | tuple[str, ...]


@dataclass(frozen=True)
class GatePolicy:
    """What opens a gate, and which frames it takes.

    num_required : frames that open it; in rounds the number of workers
    max_staleness : how many steps a frame may be behind
    workers : of rounds, a number, or the names; None: no rounds
    ahead : frames of one worker that may wait for those of others
    """

    num_required: int = 1
    max_staleness: int = 0
    workers: Workers | None = None
    ahead: int = AHEAD

    @classmethod
    def of(
        cls,
        before: GatePolicy,
        num_required: Any = None,
        workers: Any = None,
        max_staleness: Any = None,
    ) -> GatePolicy:
        """Return a policy with arguments in place of what it was before; None: as before. Raises UsageError."""
        if workers is not None and num_required is not None:
            raise UsageError("num_required and workers: give one; a round needs one frame of each worker")
        if workers is None and num_required is None:
            count, of_rounds = before.num_required, before.workers
        elif workers is None:
            count, of_rounds = whole("num_required", num_required, 1), None
        else:
            of_rounds = checked_workers(workers)
            count = of_rounds if isinstance(of_rounds, int) else len(of_rounds)
        behind = before.max_staleness if max_staleness is None else whole("max_staleness", max_staleness, 0)
        if of_rounds is not None and behind:
            raise UsageError(f"max_staleness {behind}: rounds take no frame that is behind; give workers or this")
        return cls(count, behind, of_rounds, before.ahead)

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the workers, as messages say them before one was seen; None: no rounds."""
        return tuple(f"rank-{n}" for n in range(self.workers)) if isinstance(self.workers, int) else self.workers

    def names_of_sources(self, num_sources: int) -> list[str] | None:
        """Return the workers that sources without contributors are, in their order; None if they are not."""
        return list(self.names) if self.names is not None and len(self.names) == num_sources else None

    def merge(self, merge: str | None) -> str | None:
        """Return in which order sources are read: in rounds in turn, or all frames of the first one would wait."""
        return "round" if self.workers is not None and merge is None else merge

    def get_state(self) -> dict[str, Any]:
        """Return what a commit says of it besides ``num_required``; nothing if that is all."""
        state: dict[str, Any] = {"max_staleness": self.max_staleness} if self.max_staleness else {}
        if self.workers is not None:
            workers = self.workers if isinstance(self.workers, int) else list(self.workers)
            state["rounds"] = {"workers": workers, "ahead": self.ahead}
        return state

    @classmethod
    def from_state(cls, contents: Mapping[str, Any]) -> GatePolicy:
        """Return the policy of a commit's contents."""
        rounds = contents.get("rounds", {})
        workers = rounds.get("workers")
        workers = tuple(map(str, workers)) if isinstance(workers, list) else workers
        behind = int(contents.get("max_staleness", 0))
        return cls(int(contents["num_required"]), behind, workers, int(rounds.get("ahead", AHEAD)))


def checked_workers(workers: Any) -> Workers:
    """Return the workers of rounds: a number, or names. Raises UsageError."""
    if isinstance(workers, str) or not isinstance(workers, Sequence):
        if isinstance(workers, str):
            raise UsageTypeError(f"workers: expected a number, or a list of names, got the text {workers!r:.100}")
        number = whole("workers", workers, 1)
        if number > MOST_WORKERS:
            raise UsageError(f"workers: expected {MOST_WORKERS:,} at most, got {number:,}")
        return number
    names = tuple(workers)
    for name in names:
        if not isinstance(name, str) or not name:
            raise UsageTypeError(f"workers: expected names, got {name!r:.100}")
    if not names or len({*names}) < len(names):
        raise UsageError(f"workers: expected names that differ, got {listed(names) or 'none'}")
    return names


def frame_in_rounds(frame: Frame, number: int, names: Sequence[str] | None) -> Frame:
    """Return a frame as rounds take it: with the worker of its source, and a message without a frame as one of no rows.

    number : of its source; names : of the workers that the sources are; None: they are none
    """
    if frame.is_void:
        if not frame.position:  # a pause
            return frame
        frame = replace(frame, is_void=False)
    return frame if names is None else frame.named(names[number])


def runs_in_rounds(runs: Iterator[tuple[int, FrameRun]], names: Sequence[str] | None) -> Iterator[tuple[int, FrameRun]]:
    """Yield the frames of runs one by one, as rounds take them."""
    for number, run in runs:
        yield number, run.alone(frame_in_rounds(run.frame(), number, names))


class WorkerNames:
    """Which worker a contributor is. ``spelling`` : of numbered workers, what stands before the number; None: unseen"""

    def __init__(self, workers: Workers) -> None:
        self._workers, self.spelling = workers, None if isinstance(workers, int) else ""
        self._numbers = {} if isinstance(workers, int) else {name: number for number, name in enumerate(workers)}

    @property
    def count(self) -> int:
        return self._workers if isinstance(self._workers, int) else len(self._workers)

    def name(self, number: int) -> str:
        """Return the name of a worker."""
        if isinstance(self._workers, tuple):
            return self._workers[number]
        return f"{'rank-' if self.spelling is None else self.spelling}{number}"

    def number_of(self, name: str) -> int | None:
        """Return the number of the worker of a name; None if there is none."""
        if isinstance(self._workers, tuple):
            return self._numbers.get(name)
        match = _NUMBERED.fullmatch(name)
        spelled = match is not None and self.spelling in (None, match[1] or "")
        return int(match[2]) if match is not None and spelled and int(match[2]) < self.count else None

    def find(self, contributor: Contributor, source: str) -> int:
        """Return the number of a frame's worker. Raises InputError for a frame of somebody else."""
        if contributor is None:
            if self.count == 1:
                return 0
            expected = f"one of {self.count} workers ({listed(map(self.name, range(self.count)))})"
            raise InputError(f"expected a frame of {expected}, got one that names no contributor", source=source)
        text = str(contributor)
        if isinstance(self._workers, tuple):
            number = self._numbers.get(text)
        else:
            number = self._numbered(text, source)
        if number is None:
            expected = listed(map(self.name, range(self.count)))
            raise InputError(f"expected a frame of one of the workers ({expected}), got one of '{text}'", source=source)
        return number

    def _numbered(self, text: str, source: str) -> int | None:
        match = _NUMBERED.fullmatch(text)
        if match is None or int(match[2]) >= self.count:
            return None
        spelling = match[1] or ""
        if self.spelling not in (None, spelling):
            raise InputError(
                f"a frame of worker '{text}', where others are named as '{self.spelling}0'; name all workers alike",
                source=source,
            )
        return int(match[2])

    def see(self, contributor: Contributor) -> None:
        """Note how a worker, one of whose frames is taken, is named."""
        if self.spelling is None and contributor is not None:
            self.spelling = "rank-" if str(contributor).startswith("rank-") else ""
