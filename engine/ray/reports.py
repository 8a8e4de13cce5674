"""The reports of all shares as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.stats import KeyReport, TableReport


def joined_tables(reports: Sequence[Mapping[str, TableReport]]) -> dict[str, TableReport]:
    """Return the tables of all shares. Sums are exact: every row has one owner."""
    joined = {}
    for name in reports[0]:
        found = [of[name] for of in reports]
        distinct = [of.distinct for of in found if of.distinct is not None]
        keys = [of.keys for of in found if of.keys is not None]
        num_rows = sum(of.rows for of in found)
        joined[name] = TableReport(num_rows, sum(distinct) if distinct else None, _joined_keys(keys) if keys else None)
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


def _joined_keys(shares: Sequence[KeyReport]) -> KeyReport:
    totals = {name: sum(getattr(of, name) for of in shares) for name in vars(shares[0])}
    rows = sum(of.keys / of.load for of in shares if of.load)  # shares without a key count as nothing
    return KeyReport(**{**totals, "load": totals["keys"] / rows if rows else 0.0})
