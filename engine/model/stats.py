"""The statistics of a run: counters while it runs, a frozen Report at its end. It reads no clock."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from penstock.base.html_tables import html_table
from penstock.model.frames import Contributor, Frame, count_by


class GateProgress(Protocol):
    """What a progress callback sees of a gate."""

    @property
    def num_required(self) -> int | None: ...
    @property
    def num_accumulated(self) -> int: ...
    @property
    def global_step(self) -> int: ...


@dataclass(frozen=True)
class KeyReport:
    """The keys of a dynamic table at the end of a run, and what became of keys during it.

    Attributes
    ----------
    keys : int
        Keys with a row.
    expired_waiting : int
        Those of them that are expired and wait for their sweep.
    waiting : int
        Keys that wait for admission.
    directory_bytes : int
        Memory of keys and waiting keys.
    load : float
        Keys as a share of the rows of the table.
    admitted, expired, evicted : int
        In the run: keys at its start + admitted - expired - evicted + rolled_back = keys.
    returned : int
        Admitted keys that had a row before and lost it recently.
    rejected : int
        Keys that were due and found no room.
    unadmitted_rows : int
        Gradient rows of keys that were not admitted, which are lost.
    rolled_back : int
        Keys that rollbacks brought back, less those that they removed.
    """

    keys: int
    expired_waiting: int
    waiting: int
    directory_bytes: int
    load: float
    admitted: int
    expired: int
    evicted: int
    returned: int
    rejected: int
    unadmitted_rows: int
    rolled_back: int = 0


@dataclass(frozen=True)
class CacheReport:
    """The rows of a cached table that the updates of a run found on the devices, and those that they moved.

    Attributes
    ----------
    places : int
        Rows that have room on the devices.
    hits : int
        Updated rows that were there.
    up, down : int
        Rows that were moved to the devices, and back to the host.
    bytes : int
        Of both moves.
    waited_ms : float
        Milliseconds that the host waited for rows to come down.

    Notes
    -----
    An update of more rows than there are places is carried out in several, which count separately.
    """

    places: int
    hits: int
    up: int
    down: int
    bytes: int
    waited_ms: float

    @property
    def waited_s(self) -> float:
        return self.waited_ms / 1000


@dataclass(frozen=True)
class TableReport:
    """The counts of one table in a run.

    Attributes
    ----------
    rows : int
        Gradient rows that entered the gate.
    distinct : int or None
        Distinct ids among them; None: a dynamic table.
    keys : KeyReport or None
        Of a dynamic table; None: it is not dynamic.
    cache : CacheReport or None
        Of a cached table; None: it is placed elsewhere.

    Examples
    --------
    >>> import penstock as ps
    >>> import pyarrow as pa
    >>> table = ps.TableConfig(8, 2, optimizer=ps.SGD(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> engine.run(pa.table({"step": [0, 0], "id": [5, 5], "gradient": [[1.0, 2.0]] * 2})).tables["user"]
    TableReport(rows=2, distinct=1, keys=None, cache=None)
    """

    rows: int
    distinct: int | None
    keys: KeyReport | None = None
    cache: CacheReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data.

        Returns
        -------
        dict
            With ``keys`` for a dynamic table, else with ``distinct``; with ``cache`` for a cached one.
        """
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> TableReport:
        """Return the report that ``to_dict`` described.

        Parameters
        ----------
        plain : mapping
            What ``to_dict`` returned.

        Returns
        -------
        TableReport
        """
        keys, cache = plain.get("keys"), plain.get("cache")
        return cls(
            plain["rows"],
            plain.get("distinct"),
            None if keys is None else KeyReport(**keys),
            None if cache is None else CacheReport(**cache),
        )


@dataclass(frozen=True)
class Report:
    """The result of one run.

    Attributes
    ----------
    rows : int
        Gradient rows read, including stale frames and dropped rows.
    frames : int
        Frames received, including stale ones.
    stale : int
        Frames dropped because their step was behind.
    pending : int
        Frames buffered in the gate at the end, not applied.
    steps : int
        Openings of the gate in this run.
    global_step : int
        Openings in total, and rollbacks.
    seconds, rows_per_s : float
        Of the run, including reading.
    dropped : mapping of str to int
        Reason → dropped rows; ``frozen:NAME`` are valid gradients of a frozen table.
    verified : bool
        Whether all of the input was read and had matching checksums.
    tables : mapping of str to TableReport
        By name.
    learning_rates : tuple of float or None
        The value of every dynamic tag at the last opening.
    held_bytes : int
        Peak memory of the sums behind the gate.
    state_hash : str or None
        Of the tables after the run, if requested.
    notes : tuple of str
        Hints for the user, a sentence each.
    skipped : int
        Frames that were read again and skipped, because the checkpoint already contains them.
    truncated : int
        Ids of example streams beyond ``max_sequence_length``; they do not count as rows.
    stale_rows : int
        Rows read for stale frames.
    unverified : str or None
        The reason why the input is not verified.
    variants : mapping of str to str
        Table → the variant that updates it (docs/devices.md).
    device_problems : int
        Problems of the programs, described in ``notes``.
    rolled_back : int
        Frames dropped from the gate by rollbacks.
    not_finite : int
        Rows whose weights or slots an update made infinite or NaN; only of tables with the variant ``host``.
    first_not_finite : str
        Table and id of the first of them; "" if there is none.
    late : int
        Frames applied although their step was behind (``max_staleness``).
    absent : mapping of str to int
        Of rounds, worker → steps that it had no frame for.
    clipped_steps, clipped_rows : int
        Steps whose gradients were scaled down to ``clip.global_norm``, and rows scaled down to ``clip.row_norm``.
    limited : mapping of str to int
        Contributor → frames whose norm exceeded its ``limit``; those left out count in ``dropped`` as ``norm_limit``.
    gradient_norms : mapping of str to float
        With ``clip`` or ``limit``, table → norm of its gradients in the last step, before they were scaled down.
    contributor_norms : mapping of str to float
        With ``limit``, contributor → median of the norms of its last frames.
    update_norms : mapping of str to float
        With ``clip`` or ``limit``, table → root mean square of the changes of some of its rows, in the last step that
        was sampled.

    Examples
    --------
    >>> import penstock as ps
    >>> import pyarrow as pa
    >>> table = ps.TableConfig(8, 2, optimizer=ps.SGD(0.1), name="user")
    >>> engine = ps.Engine(ps.EmbeddingConfig.from_tables([table]))
    >>> rows = {"step": [1, 1, 0], "id": [5, 3, 5], "gradient": [[1.0, 2.0]] * 3}
    >>> engine.gate.set_global_step(1)
    >>> report = engine.run(pa.table(rows))
    >>> report.rows, report.frames, report.stale, report.stale_rows, report.steps, report.global_step
    (3, 2, 1, 1, 1, 2)
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
    stale_rows: int = 0
    unverified: str | None = None
    variants: Mapping[str, str] = field(default_factory=dict)
    device_problems: int = 0
    rolled_back: int = 0
    not_finite: int = 0
    first_not_finite: str = ""
    late: int = 0
    absent: Mapping[str, int] = field(default_factory=dict)
    clipped_steps: int = 0
    clipped_rows: int = 0
    limited: Mapping[str, int] = field(default_factory=dict)
    gradient_norms: Mapping[str, float] = field(default_factory=dict)
    contributor_norms: Mapping[str, float] = field(default_factory=dict)
    update_norms: Mapping[str, float] = field(default_factory=dict, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, as ``--json`` prints it.

        Returns
        -------
        dict
            Of dicts, lists, strings and numbers.
        """
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        tables = {name: table.to_dict() for name, table in self.tables.items()}
        return {**plain, "tables": tables}

    def _repr_html_(self) -> str:
        """Return two tables for notebooks: the counts of the run, without those that are zero, and of its tables."""
        counts = {name: value for name, value in vars(self).items() if name not in ("tables", "variants")}
        shown = [(name, value) for name, value in counts.items() if value or name in _ALWAYS_SHOWN]
        tables = {name: {**table.to_dict(), "variant": self.variants.get(name)} for name, table in self.tables.items()}
        for table in tables.values():
            table |= table.pop("keys", {}) | table.pop("cache", {})
        head = list(dict.fromkeys(column for table in tables.values() for column in table))
        rows = [(name, *map(table.get, head)) for name, table in tables.items()]
        return html_table(("Report", ""), shown) + html_table(("table", *head), rows)


_ALWAYS_SHOWN = ("rows", "frames", "steps", "global_step", "verified")
FIX_STALE = (
    "if several workers send one step each, use --num-required N or --workers; if each source is one worker's log, "
    "--merge step; if each of N files has one table, both, with the files as sources (DIR/*/* in place of DIR)"
)


def not_finite_note(num_rows: int, first: str) -> str:
    """Return a sentence: how many rows updates have made infinite or NaN, and which was the first."""
    return f"{num_rows:,} rows became infinite or NaN by updates; first: {first} (docs/bad_rows.md)"


def percent(part: int, whole: int) -> str:
    """Return a share as ``50.0%``, or ``under 0.1%`` for one that would round to zero."""
    return "under 0.1%" if 0 < part < whole / 2000 else f"{part / whole if whole else 0:.1%}"


def too_stale(stale_rows: int, rows: int, most: float | None) -> str | None:
    """Return an error message if stale frames contain more than the share ``most`` of the rows read; else None."""
    if most is None or not rows or stale_rows / rows <= most:
        return None
    return (
        f"{stale_rows:,} of the {rows:,} rows read are of stale frames ({percent(stale_rows, rows)}), more than "
        f"--max-stale {most:g} (max_stale=) allows; {FIX_STALE}"
    )


# A reason of dropped rows, before the name of their table.
FROZEN = "frozen:"
NORM_LIMIT = "norm_limit"  # a reason of dropped rows


@dataclass
class Counters:
    """The counters of a run, or of frames outside runs. Fields as in Report."""

    rows: int = 0
    frames: int = 0
    stale: int = 0
    steps: int = 0
    held_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    stale_rows: int = 0
    rolled_back: int = 0
    not_finite: int = 0
    first_not_finite: str = ""
    late: int = 0
    clipped_steps: int = 0
    clipped_rows: int = 0
    limited: Counter[Contributor] = field(default_factory=Counter)

    def count(self, frame: Frame, admitted: bool = True) -> None:
        """Count one frame. admitted : whether the gate admitted it; if not, it was stale"""
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
        """Dropped rows, for any reason."""
        return self.dropped.total()

    def plus(self, other: Counters) -> Counters:
        """Return the sum of both; of ``held_bytes`` the larger."""
        added = {name: count + getattr(other, name) for name, count in vars(self).items()}
        first = self.first_not_finite or other.first_not_finite
        return Counters(**{**added, "held_bytes": max(self.held_bytes, other.held_bytes), "first_not_finite": first})

    def report(self, seconds: float, **rest: Any) -> Report:
        """Return the Report with these counters. rest : its other fields"""
        rows_per_s = self.rows / seconds if seconds > 0 else 0.0
        return Report(seconds=seconds, rows_per_s=rows_per_s, **self.get_state(), **rest)

    def get_state(self) -> dict[str, Any]:
        """Return the counters as plain data."""
        return {**vars(self), "dropped": dict(self.dropped), "limited": dict(self.limited)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Counters:
        """Return the counters of a ``get_state``. Raises KeyError or TypeError if the state is malformed."""
        return cls(**{**state, "dropped": Counter(state["dropped"]), "limited": Counter(state.get("limited", {}))})

    def notes(self, first_bad: Mapping[str, str]) -> tuple[str, ...]:
        """Return hints for the user, a sentence each. first_bad : reason → the first row dropped for it, if known"""
        notes = [self.stale_note("was" if self.stale == 1 else "were")] if self.stale else []
        if self.rolled_back:
            notes.append(f"rollbacks dropped {self.rolled_back:,} of {self.frames:,} frames, which were in the gate")
        if self.not_finite:
            notes.append(not_finite_note(self.not_finite, self.first_not_finite))
        for reason, n in self.dropped.items():
            first = f"; first: {first_bad[reason]}" if reason in first_bad else ""
            frozen = reason.removeprefix(FROZEN)
            what = f"{reason}{first}" if frozen == reason else f"gradients of table '{frozen}', which is frozen"
            notes.append(f"dropped {n} rows, {what}")
        return tuple(notes)

    def stale_note(self, verb: str) -> str:
        """Return a sentence: the number of stale frames, their share of the rows, and the flags that fix it."""
        return (
            f"{self.stale:,} of {self.frames:,} frames {verb} stale (step behind the engine's), with "
            f"{self.stale_rows:,} of {self.rows:,} rows ({percent(self.stale_rows, self.rows)}): {FIX_STALE}"
        )


# Counts by lateness must not grow for as long as a service runs.
EXACT_LATENESS = 64


@dataclass
class Stale:
    """The counts of contributions dropped as stale.

    by_contributor : contributor → count
    by_lateness : steps behind → count; above 64 by the next power of two (65 to 128 count as 128)
    last : a description of the last one, or None
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
        """Return the counts as plain data: pairs instead of mappings, so that keys keep their types."""
        return {
            "total": self.total,
            "by_contributor": [[who, n] for who, n in self.by_contributor.items()],
            "by_lateness": [[late, n] for late, n in self.by_lateness.items()],
            "last": self.last,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Stale:
        """Return the counts of a ``get_state``. Raises KeyError, TypeError or ValueError if the state is malformed."""
        return cls(
            int(state["total"]),
            Counter({who: int(n) for who, n in state["by_contributor"]}),
            Counter({int(late): int(n) for late, n in state["by_lateness"]}),
            state["last"],
        )
