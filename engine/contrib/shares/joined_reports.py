"""The reports and snapshots of all shares as one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from penstock.core.sampling import IDS_PER_TABLE, MAX_TABLES, Moment
from penstock.core.telemetry import MetricsSnapshot
from penstock.model.stats import CacheReport, Counters, KeyReport, Report, TableReport

Counted = TypeVar("Counted", Counters, Report)


def joined_tables(reports: Sequence[Mapping[str, TableReport]]) -> dict[str, TableReport]:
    """Return the tables of all shares. Sums are exact: every row has one owner."""
    joined = {}
    for name in reports[0]:
        tables = [report[name] for report in reports]
        distinct = [table.distinct for table in tables if table.distinct is not None]
        keys = [table.keys for table in tables if table.keys is not None]
        caches = [table.cache for table in tables if table.cache is not None]
        joined[name] = TableReport(
            sum(table.rows for table in tables),
            sum(distinct) if distinct else None,
            _joined_keys(keys) if keys else None,
            CacheReport(**_totals(caches)) if caches else None,
        )
    return joined


def joined_counters(shares: Sequence[Counted]) -> Counted:
    """Return the counters, or reports, of all shares: each counts all frames and steps, and its own sums and rows."""
    return replace(
        shares[0],
        held_bytes=sum(share.held_bytes for share in shares),
        not_finite=sum(share.not_finite for share in shares),
        first_not_finite=next((share.first_not_finite for share in shares if share.not_finite), ""),
    )


def joined_variants(variants: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the variant of each table; where shares differ, all of theirs. variants : of each share by table"""
    return {name: ", ".join(sorted({by_table[name] for by_table in variants})) for name in variants[0]}


def joined_problems(problems: Sequence[Sequence[str]]) -> list[str]:
    """Return the distinct problems of programs, each with its first share. problems : of each share"""
    first: dict[str, int] = {}
    for rank, share_problems in enumerate(problems):
        for problem in share_problems:
            first.setdefault(problem, rank)
    return [f"share {rank}: {problem}" for problem, rank in first.items()]


def _totals(shares: Sequence[Any]) -> dict[str, Any]:
    return {name: sum(getattr(share, name) for share in shares) for name in vars(shares[0])}


def _joined_keys(shares: Sequence[KeyReport]) -> KeyReport:
    totals = _totals(shares)
    rows = sum(share.keys / share.load for share in shares if share.load)  # shares without a key count as nothing
    return KeyReport(**{**totals, "load": totals["keys"] / rows if rows else 0.0})


def joined_snapshots(shares: Sequence[MetricsSnapshot]) -> MetricsSnapshot:
    """Return the snapshot of all shares. Each counts all frames and steps, and its own rows of tables."""
    first, updated = shares[0], Counter[str]()
    for share in shares:
        updated.update(share.updated)
    return replace(
        first,
        counters=joined_counters([share.counters for share in shares]),
        tables=joined_tables([share.tables for share in shares]),
        updated=updated,
        num_steps=sum(share.num_steps for share in shares),
        recent_s=[seconds for share in shares for seconds in share.recent_s],
        stage_s={stage: sum(share.stage_s[stage] for share in shares) for stage in first.stage_s},
        update_norms=_joined_norms([share.update_norms for share in shares]),
        num_compiles=sum(share.num_compiles for share in shares),
        problems=joined_problems([share.problems for share in shares]),
        moments=[_joined_moment(moments) for moments in zip(*(share.moments for share in shares), strict=False)],
        hot=_joined_hot(shares),
    )


def _joined_moment(shares: Sequence[Moment]) -> Moment:
    """Return a moment that all shares noted at the same frame."""
    return replace(shares[0], norms=_joined_norms([share.norms for share in shares]))


def _joined_norms(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the norms of tables that are root mean squares over the rows of each share."""
    joined: dict[str, float] = {}
    for table in sorted({table for share in shares for table in share}):
        norms = [share[table] for share in shares if table in share]
        joined[table] = math.sqrt(sum(norm * norm for norm in norms) / len(norms))
    return joined


def _joined_hot(shares: Sequence[MetricsSnapshot]) -> list[tuple[str, int, float]]:
    rows = Counter({name: sum(share.tables[name].rows for share in shares) for name in shares[0].tables})
    joined: dict[str, list[tuple[str, int, float]]] = {name: [] for name, _ in rows.most_common(MAX_TABLES)}
    for share in shares:
        for name, row_id, fraction in share.hot:
            if name in joined:  # every row has one owner
                joined[name].append((name, row_id, fraction * share.tables[name].rows / max(1, rows[name])))
    return [row for hot in joined.values() for row in sorted(hot, key=lambda row: -row[2])[:IDS_PER_TABLE]]
