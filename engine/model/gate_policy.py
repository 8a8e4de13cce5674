"""What opens a gate: a number of frames of any producers, or in rounds one frame of each worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.base.errors import UsageError, UsageTypeError, listed
from penstock.base.validation import whole

# Frames of one worker that may wait for those of others, unless the configuration says otherwise.
AHEAD = 2
MOST_WORKERS = 1 << 20

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
