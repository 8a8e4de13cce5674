"""The cases by name: ``w1/adagrad`` is a workload and a kind, ``growth/rows`` a series of sizes.

A case consists of one or more points; a growth case has one for each size. This module draws and measures nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from penstock.base.errors import UsageError
from penstock.bench.contestants import SLOTS
from penstock.bench.distributions import reused, uniform, zipf
from penstock.bench.workloads import STEP_ROWS, WORKLOADS, TableSize, Workload, make, one_table, with_batches_of

KINDS = ("coalesce", "sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl", "replay", "doput", "dynamic")
COMPARED = tuple(f"{workload}/{kind}" for workload in WORKLOADS for kind in KINDS)
GROWTH = tuple(f"growth/{size}" for size in ("vocabulary", "rows", "dim", "reuse", "tables", "threads", "batch"))
KEYS = tuple(f"keys/{kind}" for kind in ("lookup", "insert", "stream", "admit", "evict"))
CASES = (*COMPARED, *KEYS, *GROWTH, "latency", "frames", "startup", "reads", "rollback")

LATENCY_ROWS, LATENCY_STEPS = 100, 200
CHANGED_ROWS = 1_000_000
NUM_KEYS, KEYS_DIM = 10_000_000, 16
# How many tables with slots, of the size of the workload's, take turns; more than one where a case has two sides.
TABLES = {"doput": 2.0, "dynamic": 2.2, "evict": 4.0}
KEY_BYTES = 50  # of a directory, per key


@dataclass(frozen=True)
class Sizes:
    """Sizes. rows : of a step; scale : of the vocabularies of w1 to w4; short : fewer and smaller growth sizes"""

    rows: int = STEP_ROWS
    scale: float = 1.0
    short: bool = False

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


SHORT = Sizes(rows=1 << 16, scale=1 / 64, short=True)


@dataclass(frozen=True)
class Point:
    """One measurement. x : the size that grows, in a growth case; threads : set if the case determines them"""

    case: str
    kind: str
    workload: Workload
    x: int | None = None
    threads: int | None = None

    @property
    def num_bytes(self) -> int:
        """Minimum memory that penstock needs: the steps, the tables with their slots, and the sums in the gate."""
        parts = (1 + SLOTS.get(self.kind, 1)) * TABLES.get(self.kind, 1.0)
        tables = 0 if self.kind == "coalesce" else int(parts * self.workload.table_bytes)
        if self.kind == "dynamic" or self.case in KEYS:
            tables += KEY_BYTES * sum(table.vocabulary_size for table in self.workload.tables)
        return (self.workload.num_steps + 2) * self.workload.step_bytes + tables


def select(patterns: Sequence[str]) -> list[str]:
    """Return the cases that match any of the names or globs, in the order of CASES; without patterns, the compared
    ones. Raises UsageError for a pattern without a match."""
    for pattern in patterns:
        if not any(fnmatchcase(case, pattern) for case in CASES):
            near = difflib.get_close_matches(pattern, CASES, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(
                f"case '{pattern}': there is none of that name{meant} "
                "(w1 to w4 with /coalesce, /sgd, /adagrad …, keys/…, growth/…, latency, reads …; penstock bench --list)"
            )
    return [c for c in CASES if (any(fnmatchcase(c, p) for p in patterns) if patterns else c in COMPARED)]


def points(case: str, sizes: Sizes, cpus: int) -> list[Point]:
    """Return the points of a case. cpus : usable CPUs, the largest size of growth/threads"""
    if case in COMPARED:
        name, kind = case.split("/")
        return [Point(case, kind, make(name, sizes.rows, sizes.scale))]
    if case == "latency":
        workload = one_table("latency", "100 rows a step", 1_000_000, 32, LATENCY_ROWS, zipf(1.1), LATENCY_STEPS)
        return [Point(case, "latency", workload)]
    if case in ("frames", "startup"):
        return [Point(case, case, one_table("frames", "frames of 100 rows", 1_000_000, 16, 100, zipf(1.1), 64))]
    if case == "reads":
        return [Point(case, case, one_table("reads", "reads of 100 rows", 1_000_000, 32, 100, uniform, 1))]
    if case == "rollback":
        rows = 1 << 16 if sizes.short else CHANGED_ROWS
        return [Point(case, case, one_table(case, f"{rows:,} changed rows", rows, 32, rows, reused(1), 1))]
    subject = case.split("/")[1]
    if case in KEYS:
        num_keys, num_steps = max(1024, round(NUM_KEYS * sizes.scale)), 1 if subject == "evict" else 3
        title = f"{num_keys:,} keys"
        name = "turnover" if subject == "evict" else "keys"  # cases of one name share their steps
        return [Point(case, subject, one_table(name, title, num_keys, KEYS_DIM, sizes.rows, uniform, num_steps))]
    if subject == "threads":
        counts = sorted({1, *(n for n in (2, 4, 8, 16, 32, 64) if n < cpus), cpus})
        return [Point(case, "adagrad", make("w1", sizes.rows, sizes.scale), n, n) for n in counts]
    if subject == "batch":
        w1 = make("w1", sizes.rows, sizes.scale)
        return [Point(case, "adagrad", with_batches_of(w1, n), n) for n in (8192, 16384, 32768, 65536)]
    return [Point(case, "adagrad", workload, x) for x, workload in _growing(subject, sizes.short)]


def _growing(subject: str, short: bool) -> list[tuple[int, Workload]]:
    """Return (size, workload) of a growth case; only that one size changes."""
    rows = STEP_ROWS >> (4 if short else 2)
    if subject == "vocabulary":
        xs = [10**n for n in range(4, 7 if short else 9)]
        return [(x, _grown(subject, f"{x:,} ids of dim 8", x, 8, rows, zipf(1.1))) for x in xs]
    if subject == "rows":
        xs = [10**n for n in range(3, 6 if short else 8)]
        return [(x, _grown(subject, f"{x:,} rows a step", 1_000_000, 16, x, zipf(1.1))) for x in xs]
    if subject == "dim":
        xs = [2**n for n in range(8 if short else 10)]
        return [(x, _grown(subject, f"dim {x}", 100_000, x, rows // 2, zipf(1.1))) for x in xs]
    if subject == "reuse":
        xs = [1, 3, 10, 30, 100, 300, 1000]
        return [(x, _grown(subject, f"every id {x} times", 1_000_000, 32, rows, reused(x))) for x in xs]
    assert subject == "tables"
    xs = [1, 3, 10, 30, 100] if short else [1, 3, 10, 30, 100, 300, 1000]
    return [(x, _many(x, rows)) for x in xs]


def _grown(name: str, title: str, vocabulary_size: int, dim: int, rows: int, draw: Any) -> Workload:
    # One step of 10^7 rows needs no others to cycle through: it exceeds every cache.
    return one_table(name, title, vocabulary_size, dim, rows, draw, 3 if rows <= STEP_ROWS else 1)


def _many(num: int, rows: int) -> Workload:
    size = max(1, 1_000_000 // num)
    tables = [TableSize(f"table_{i:04}", size, 16, rows // num, uniform) for i in range(num)]
    return replace(make("w4"), name="tables", title=f"{num} tables, 1,000,000 ids in all", tables=tuple(tables))
