"""What a run did: counters while it goes on, a frozen Report when it is done. No clock of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.frames import Frame


@dataclass(frozen=True)
class TableReport:
    """rows : gradient rows that entered the gate; distinct : different ids among them."""

    rows: int
    distinct: int


@dataclass(frozen=True)
class Report:
    """What one run did.

    rows : gradient rows read, of stale frames and dropped ones included
    frames : received, stale ones included
    stale : frames dropped because their step was behind
    pending : frames that the gate holds at the end, not applied
    steps : openings of this run; global_step : openings in all
    seconds, rows_per_s : of the run, reading included
    dropped : reason → rows left out
    verified : whether all of the input was read, carried checksums, and all of them fit
    tables : name → TableReport
    learning_rates : the value of every dynamic tag at the last opening
    held_bytes : most memory that the sums behind the gate took
    state_hash : of the tables after the run, where it was asked for
    notes : what the user should know, a sentence each
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

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, as ``--json`` prints them."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain["dropped"] = dict(self.dropped)
        plain["tables"] = {name: {"rows": t.rows, "distinct": t.distinct} for name, t in self.tables.items()}
        plain["notes"] = list(self.notes)
        plain["learning_rates"] = None if self.learning_rates is None else list(self.learning_rates)
        return plain


@dataclass
class Counters:
    """Counted while a run goes on."""

    rows: int = 0
    frames: int = 0
    stale: int = 0
    steps: int = 0
    held_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def count(self, frame: Frame) -> None:
        self.rows += frame.num_rows
        self.frames += 1
        self.dropped.update(frame.dropped)

    @property
    def num_dropped(self) -> int:
        """Rows left out, whatever the reason."""
        return self.dropped.total()
