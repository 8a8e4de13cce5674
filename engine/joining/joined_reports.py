"""The reports and snapshots of all shares as one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.metrics import MAX_HOT
from penstock.sampling import Moment
from penstock.stats import CacheReport, KeyReport, TableReport
from penstock.telemetry import Snapshot


def joined_tables(reports: Sequence[Mapping[str, TableReport]]) -> dict[str, TableReport]:
    """Return the tables of all shares. Sums are exact: every row has one owner."""
    joined = {}
    for name in reports[0]:
        found = [of[name] for of in reports]
        distinct = [of.distinct for of in found if of.distinct is not None]
        keys = [of.keys for of in found if of.keys is not None]
        caches = [of.cache for of in found if of.cache is not None]
        joined[name] = TableReport(
            sum(of.rows for of in found),
            sum(distinct) if distinct else None,
            _joined_keys(keys) if keys else None,
            CacheReport(**_totals(caches)) if caches else None,
        )
    return joined


def joined_variants(variants: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the variant of each table; where shares differ, all of theirs. variants : of each share by table"""
    return {name: ", ".join(sorted({of[name] for of in variants})) for name in variants[0]}


def joined_problems(problems: Sequence[Sequence[str]]) -> list[str]:
    """Return the distinct problems of programs, each with its first share. problems : of each share"""
    first: dict[str, int] = {}
    for rank, of in enumerate(problems):
        for problem in of:
            first.setdefault(problem, rank)
    return [f"share {rank}: {problem}" for problem, rank in first.items()]


def _totals(shares: Sequence[Any]) -> dict[str, Any]:
    return {name: sum(getattr(of, name) for of in shares) for name in vars(shares[0])}


def _joined_keys(shares: Sequence[KeyReport]) -> KeyReport:
    totals = _totals(shares)
    rows = sum(of.keys / of.load for of in shares if of.load)  # shares without a key count as nothing
    return KeyReport(**{**totals, "load": totals["keys"] / rows if rows else 0.0})


def joined_snapshots(shares: Sequence[Snapshot]) -> Snapshot:
    """Return the snapshot of all shares. Each counts all frames and steps, and its own rows of tables."""
    first, updated = shares[0], Counter[str]()
    for of in shares:
        updated.update(of.updated)
    return replace(
        first,
        counters=replace(first.counters, held_bytes=sum(of.counters.held_bytes for of in shares)),
        tables=joined_tables([of.tables for of in shares]),
        updated=updated,
        num_steps=sum(of.num_steps for of in shares),
        recent_s=[seconds for of in shares for seconds in of.recent_s],
        stage_s={stage: sum(of.stage_s[stage] for of in shares) for stage in first.stage_s},
        num_compiles=sum(of.num_compiles for of in shares),
        problems=joined_problems([of.problems for of in shares]),
        moments=[_joined_moment(of) for of in zip(*(of.moments for of in shares), strict=False)],
        hot=_joined_hot(shares),
    )


def _joined_moment(shares: Sequence[Moment]) -> Moment:
    """Return a moment that all shares noted at the same frame: norms are the root mean square over their rows."""
    norms: dict[str, float] = {}
    for name in sorted({name for of in shares for name in of.norms}):
        found = [of.norms[name] for of in shares if name in of.norms]
        norms[name] = math.sqrt(sum(norm * norm for norm in found) / len(found))
    return replace(shares[0], norms=norms)


def _joined_hot(shares: Sequence[Snapshot]) -> list[tuple[str, int, float]]:
    rows = [sum(table.rows for table in of.tables.values()) for of in shares]
    every = max(1, sum(rows))
    hot = [(table, one, share * n / every) for of, n in zip(shares, rows, strict=True) for table, one, share in of.hot]
    return sorted(hot, key=lambda of: -of[2])[:MAX_HOT]
