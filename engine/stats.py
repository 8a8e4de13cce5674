"""What a run did: counters while it goes on, a frozen Report when it is done. No clock of its own."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.frames import Frame


@dataclass(frozen=True)
class TableReport:
    """rows : gradient rows that entered the gate; distinct : different ids among them."""

    rows: int
    distinct: int


@dataclass(frozen=True)
class ProcessReport:
    """What one process of several did by itself.

    rows, dropped : of its own sources, as in Report
    tables : name → TableReport of the rows that are its own; updated : name → rows that the optimizer was applied to
    held_bytes : most memory that its own sums behind the gate took
    sent_bytes : what it sent to the others
    stage_s : seconds by stage (``Telemetry.stage_s``)
    hot : (table, id, share of its own rows) of the ids that come most often, where somebody looks closer
    """

    rows: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, TableReport] = field(default_factory=dict)
    updated: Mapping[str, int] = field(default_factory=dict)
    held_bytes: int = 0
    sent_bytes: int = 0
    stage_s: Mapping[str, float] = field(default_factory=dict)
    hot: Sequence[tuple[str, int, float]] = ()

    @property
    def own_rows(self) -> int:
        """Gradient rows that entered the gate and are its own, whoever read them."""
        return sum(table.rows for table in self.tables.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        tables = {name: {"rows": t.rows, "distinct": t.distinct} for name, t in self.tables.items()}
        return {**vars(self), "tables": tables}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> ProcessReport:
        return cls(**{**told, "tables": {name: TableReport(**of) for name, of in told["tables"].items()}})


def summed(processes: Sequence[ProcessReport]) -> tuple[dict[str, TableReport], Counter[str]]:
    """The tables of all of them together, and the rows updated: every row has one owner."""
    tables = {
        name: TableReport(
            sum(of.tables[name].rows for of in processes if name in of.tables),
            sum(of.tables[name].distinct for of in processes if name in of.tables),
        )
        for name in processes[0].tables
    }
    updated: Counter[str] = Counter()
    for of in processes:
        updated.update(of.updated)
    return tables, updated


def hottest(processes: Sequence[ProcessReport], most: int) -> list[tuple[str, int, float]]:
    """(table, id, share of all rows), the most frequent first."""
    total = sum(process.own_rows for process in processes) or 1
    found = [(table, one, share * of.own_rows / total) for of in processes for table, one, share in of.hot]
    return sorted(found, key=lambda entry: -entry[2])[:most]


@dataclass(frozen=True)
class Report:
    """What one run did.

    rows : gradient rows read, of stale frames and dropped ones included
    frames : received, stale ones included
    stale : frames dropped because their step was behind; stale_rows : rows read for them
    pending : frames that the gate holds at the end, not applied
    steps : openings of this run; global_step : openings in all
    seconds, rows_per_s : of the run, reading included
    dropped : reason → rows left out
    skipped : frames that were read again and left out, because the checkpoint held them already
    truncated : ids of example streams that sequences were too short for; they are no rows
    verified : whether all of the input was read, carried checksums, and all of them fit; unverified : why it is not
    tables : name → TableReport
    learning_rates : the value of every dynamic tag at the last opening
    held_bytes : most memory that the sums behind the gate took
    state_hash : of the tables after the run, where it was asked for
    notes : what the user should know, a sentence each
    processes : of a job of several, by rank, what each did by itself; else none
    """

    rows: int
    frames: int
    stale: int
    pending: int
    steps: int
    global_step: int
    seconds: float
    rows_per_s: float
    dropped: Mapping[str, int]
    verified: bool
    tables: Mapping[str, TableReport]
    learning_rates: tuple[float, ...] | None = None
    held_bytes: int = 0
    state_hash: str | None = None
    notes: tuple[str, ...] = ()
    skipped: int = 0
    truncated: int = 0
    processes: tuple[ProcessReport, ...] = ()
    stale_rows: int = 0
    unverified: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, as ``--json`` prints them."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain["dropped"] = dict(self.dropped)
        plain["tables"] = {name: {"rows": t.rows, "distinct": t.distinct} for name, t in self.tables.items()}
        plain["notes"] = list(self.notes)
        plain["processes"] = [process.to_dict() for process in self.processes]
        plain["learning_rates"] = None if self.learning_rates is None else list(self.learning_rates)
        return plain


_REPORTED = ("rows", "frames", "stale", "stale_rows", "steps", "held_bytes", "truncated")
_ADDED = ("rows", "frames", "stale", "stale_rows", "steps", "truncated")

FIX_STALE = (
    "if several workers send one step each, use --num-required N; if each source is one worker's log, --merge step"
)


def percent(part: int, whole: int) -> str:
    """``50.0%``; ``under 0.1%`` where rounding would say that it is nothing."""
    return "under 0.1%" if 0 < part < whole / 2000 else f"{part / whole if whole else 0:.1%}"


def too_stale(stale_rows: int, rows: int, most: float | None) -> str | None:
    """What is wrong where stale frames held more than the share ``most`` of the rows read; None where nothing is."""
    if most is None or not rows or stale_rows / rows <= most:
        return None
    return (
        f"{stale_rows:,} of the {rows:,} rows read are of stale frames ({percent(stale_rows, rows)}), more than "
        f"--max-stale {most:g} (max_stale=) allows; {FIX_STALE}"
    )


@dataclass
class Counters:
    """Counted while a run goes on."""

    rows: int = 0
    frames: int = 0
    stale: int = 0
    steps: int = 0
    held_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    stale_rows: int = 0

    def count(self, frame: Frame, admitted: bool = True) -> None:
        """admitted : whether the gate took it in; else it was stale"""
        if not admitted:
            self.stale += 1
            self.stale_rows += frame.num_rows
        self.rows += frame.num_rows
        self.frames += 1
        self.truncated += frame.truncated
        if frame.dropped:
            self.dropped.update(frame.dropped)

    @property
    def num_dropped(self) -> int:
        """Rows left out, whatever the reason."""
        return self.dropped.total()

    def plus(self, other: Counters) -> Counters:
        """Both together."""
        added = {name: getattr(self, name) + getattr(other, name) for name in _ADDED}
        held = max(self.held_bytes, other.held_bytes)
        return Counters(held_bytes=held, dropped=self.dropped + other.dropped, **added)

    def report(self, seconds: float, **rest: Any) -> Report:
        """What was counted, and the rest of the Report."""
        counted = {name: getattr(self, name) for name in _REPORTED}
        rows_per_s = self.rows / seconds if seconds > 0 else 0.0
        return Report(seconds=seconds, rows_per_s=rows_per_s, dropped=dict(self.dropped), **counted, **rest)

    def get_state(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "dropped": dict(self.dropped)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Counters:
        """Raises KeyError or TypeError where it is none."""
        return cls(**{**state, "dropped": Counter(state["dropped"])})

    def notes(self, first_bad: Mapping[str, str]) -> tuple[str, ...]:
        """What the user should know, a sentence each. first_bad : the first row dropped for a reason, where known"""
        notes = [self.stale_note("was" if self.stale == 1 else "were")] if self.stale else []
        for reason, n in self.dropped.items():
            notes.append(
                f"dropped {n} rows, {reason}" + (f"; first: {first_bad[reason]}" if reason in first_bad else "")
            )
        return tuple(notes)

    def stale_note(self, verb: str) -> str:
        """How many frames were stale, their share of the rows, and the flags that fix it."""
        return (
            f"{self.stale:,} of {self.frames:,} frames {verb} stale (step behind the engine's), with "
            f"{self.stale_rows:,} of {self.rows:,} rows ({percent(self.stale_rows, self.rows)}): {FIX_STALE}"
        )


Contributor = int | str | None

# Counts by contributor and by lateness must not grow for as long as a service runs.
MAX_CONTRIBUTORS = 1000
EXACT_LATENESS = 64


def count_by(counts: Counter[Contributor], contributor: Contributor) -> None:
    """Count one more; from MAX_CONTRIBUTORS names on, new ones are counted together as "others"."""
    counts[contributor if contributor in counts or len(counts) < MAX_CONTRIBUTORS else "others"] += 1


def told(counts: Mapping[Contributor, int], most: int = 8) -> str:
    """``worker 0: 2, 'b': 1, unnamed: 1``, the largest first; beyond ``most``, how many there are."""
    largest = sorted(counts.items(), key=lambda of: -of[1])
    text = ", ".join(f"{'unnamed' if who is None else repr(who)}: {n}" for who, n in largest[:most])
    return text + (f" and {len(largest) - most} more" if len(largest) > most else "")


@dataclass
class Stale:
    """What was dropped because its step was behind.

    by_contributor : who sent it → how many
    by_lateness : steps behind → how many; above 64 by the next power of two (65 to 128 count as 128)
    last : the last one in words, or None
    """

    total: int = 0
    by_contributor: Counter[Contributor] = field(default_factory=Counter)
    by_lateness: Counter[int] = field(default_factory=Counter)
    last: str | None = None

    def count(self, contributor: Contributor, local_step: int, global_step: int) -> None:
        late = global_step - local_step
        self.total += 1
        count_by(self.by_contributor, contributor)
        self.by_lateness[late if late <= EXACT_LATENESS else 1 << (late - 1).bit_length()] += 1
        who = "unnamed" if contributor is None else repr(contributor)
        self.last = f"step {local_step} from {who} came at step {global_step}, {late} behind"

    def copy(self) -> Stale:
        return copy.deepcopy(self)

    def get_state(self) -> dict[str, Any]:
        """Plain data, keys of any kind kept: pairs instead of mappings."""
        return {
            "total": self.total,
            "by_contributor": [[who, n] for who, n in self.by_contributor.items()],
            "by_lateness": [[late, n] for late, n in self.by_lateness.items()],
            "last": self.last,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Stale:
        """Raises KeyError, TypeError or ValueError where it is none."""
        return cls(
            int(state["total"]),
            Counter({who: int(n) for who, n in state["by_contributor"]}),
            Counter({int(late): int(n) for late, n in state["by_lateness"]}),
            state["last"],
        )
