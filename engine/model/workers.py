"""The workers of rounds: whose a frame is, and frames as rounds take them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.base.errors import InputError, listed
from penstock.model.frames import Contributor, Frame, FrameRun
from penstock.model.gate_policy import Workers

_NUMBERED = re.compile("(rank-)?(0|[1-9][0-9]{0,6})")


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
        self._workers = workers
        self._numbers: dict[str, int] = {}  # by name, once the names are known
        self.spelling = None if isinstance(workers, int) else ""

    @property
    def spelling(self) -> str | None:
        return self._spelling

    @spelling.setter
    def spelling(self, spelling: str | None) -> None:
        self._spelling = spelling
        self._numbers = {} if spelling is None else {self.name(number): number for number in range(self.count)}

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
        if self.spelling is not None:
            return self._numbers.get(name)
        match = _NUMBERED.fullmatch(name)
        return int(match[2]) if match is not None and int(match[2]) < self.count else None

    def find(self, contributor: Contributor, source: str) -> int:
        """Return the number of a frame's worker. Raises InputError for a frame of somebody else."""
        if contributor is None:
            if self.count == 1:
                return 0
            expected = f"one of {self.count} workers ({listed(map(self.name, range(self.count)))})"
            raise InputError(f"expected a frame of {expected}, got one that names no contributor", source=source)
        text = str(contributor)
        number = self._numbers.get(text)
        if number is None and isinstance(self._workers, int):
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
