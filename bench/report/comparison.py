"""A result against an earlier one of the same machine: ``penstock bench --against RESULT.json``.

Two runs are minutes or days apart, and the speed of a machine drifts: the share of the memory's limit, which each run
measures for itself, says more than the times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.bench import machine
from penstock.bench.contestants import OURS
from penstock.errors import InputError, UsageError

Run = dict[str, Any]


def read_result(path: Path) -> dict[str, Any]:
    """Return a result that ``penstock bench --report`` wrote. Raises OSError, InputError."""
    try:
        result = json.loads(path.read_text())
        if result["penstock_bench"] == 1 and isinstance(result["machine"], dict) and isinstance(result["runs"], list):
            return dict(result)
    except (ValueError, KeyError, TypeError):
        pass
    raise InputError("no result of penstock bench; give a result.json that --report wrote", source=str(path))


def check_machine(result: dict[str, Any], path: Path, instead: str) -> None:
    """Raise UsageError if a result was measured on another machine. instead : what to do then"""
    its, here = result["machine"], machine.describe()
    if machine.folder_of(its) != machine.folder_of(here):
        raise UsageError(f"{path}: measured on {machine.named(its)}; this is {machine.named(here)}: {instead}")


def compared(old: dict[str, Any], runs: list[Run]) -> Iterator[str]:
    """Yield a line per case that both results have, with equal rows and threads: times, and shares of the limit."""
    before = {_key(run): run for run in old["runs"] if OURS in run["sides"]}
    for run in runs:
        was = before.get(_key(run)) if OURS in run["sides"] else None
        if was is not None:
            mine, its = run["sides"][OURS], was["sides"][OURS]
            overlap = mine["min_ms"] <= its["max_ms"] and its["min_ms"] <= mine["max_ms"]
            shares = ""
            if "limit_ms" in run and "limit_ms" in was:
                then, now = (one["limit_ms"] / one["sides"][OURS]["median_ms"] for one in (was, run))
                shares = f"; {then:.0%} of the limit then, {now:.0%} now"
            size = f" {run['x']:,}" if run["x"] is not None else ""
            yield (
                f"{run['case']}{size}, {machine.threads_text(run['threads'])}: {its['median_ms']:.3f} ms then, "
                f"{mine['median_ms']:.3f} now: {its['median_ms'] / mine['median_ms']:.2f} times as fast"
                f"{' (the ranges overlap)' if overlap else ''}{shares}"
            )


def _key(run: Run) -> tuple[Any, ...]:
    of = run.get("workload", {})
    return run["case"], run["x"], run["threads"], of.get("rows"), of.get("vocabulary")
