"""A result against an earlier one of the same machine: ``penstock bench --against RESULT.json``.

Two runs are minutes or days apart, and the speed of a machine drifts. Each run measures the memory limit anew, so
compare the shares of the limit rather than the times.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.base.errors import InputError, UsageError
from penstock.bench import machine
from penstock.bench.contestants import OURS

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
    """Raise UsageError if a result was measured on another machine. instead : the advice at the end of the message"""
    old, new = result["machine"], machine.describe()
    if machine.folder_of(old) != machine.folder_of(new):
        raise UsageError(f"{path}: measured on {machine.named(old)}; this is {machine.named(new)}: {instead}")


def compared(old: dict[str, Any], runs: list[Run]) -> Iterator[str]:
    """Yield a line per case that both results have, with equal rows and threads: times, and shares of the limit."""
    old_runs = {_key(run): run for run in old["runs"] if OURS in run["sides"]}
    for run in runs:
        old_run = old_runs.get(_key(run)) if OURS in run["sides"] else None
        if old_run is not None:
            new_side, old_side = run["sides"][OURS], old_run["sides"][OURS]
            overlap = new_side["min_ms"] <= old_side["max_ms"] and old_side["min_ms"] <= new_side["max_ms"]
            shares = ""
            if "limit_ms" in run and "limit_ms" in old_run:
                shares = f"; {share_of_limit(old_run):.0%} of the limit then, {share_of_limit(run):.0%} now"
            size = f" {run['x']:,}" if run["x"] is not None else ""
            yield (
                f"{run['case']}{size}, {machine.threads_text(run['threads'])}: {old_side['median_ms']:.3f} ms then, "
                f"{new_side['median_ms']:.3f} now: {old_side['median_ms'] / new_side['median_ms']:.2f} times as fast"
                f"{' (the ranges overlap)' if overlap else ''}{shares}"
            )


def share_of_limit(run: Run) -> float:
    return float(run["limit_ms"] / run["sides"][OURS]["median_ms"])


def _key(run: Run) -> tuple[Any, ...]:
    workload = run.get("workload", {})
    return run["case"], run["x"], run["threads"], workload.get("rows"), workload.get("vocabulary")
