"""The plots of a report: bars of the peers' times relative to penstock's, and curves of penstock's time by size.

Each function takes runs of a result and returns SVG.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.bench.contestants import OURS
from penstock.bench.report.summary_table import peers_of
from penstock.contrib.pages.svg import COLOURS, MARK, Bar, bars, lines

Run = dict[str, Any]

PEERS = ("numpy", "jax", "torch", "fbgemm", "tf", "polars", "duckdb")
COLOUR_OF = dict(zip(PEERS, COLOURS[1:], strict=True))
AXES = {
    "vocabulary": "ids in the vocabulary",
    "rows": "gradient rows per step",
    "dim": "floats per row",
    "reuse": "rows per distinct id",
    "tables": "tables that share the rows",
    "threads": "threads",
    "batch": "rows per record batch",
}


def ratios(title: str, runs: Sequence[Run]) -> str:
    """Plot one workload: for every kind the peers' times as multiples of ours. runs : of one number of threads"""
    rows, legend = [], {}
    for run in runs:
        for n, (ratio, name) in enumerate(sorted(peers_of(run))):
            kind = "" if n else run["kind"].replace("_", "-")
            library = name.split("_")[0]
            legend[library] = COLOUR_OF.get(library, COLOURS[-1])
            rows.append(Bar(kind, ratio, f"{ratio:.3g}×  {name}", legend[library]))
    axis = "time of the peer ÷ time of penstock (log scale; bars start at penstock)"
    return bars(rows, axis, 1.0, True, title, legend)


def growth(subject: str, runs: Sequence[Run]) -> str:
    """Plot penstock's nanoseconds per row against the size that grows, with the memory limit."""
    curves, bands, limits = {}, {}, {}
    for threads in sorted({run["threads"] for run in runs}) if subject != "threads" else [None]:
        name = f"penstock, {threads} threads" if threads else OURS
        ordered = sorted((r for r in runs if threads in (None, r["threads"])), key=lambda run: run["x"])
        curves[name] = [(run["x"], per_row(run, run["sides"][OURS]["median_ms"])) for run in ordered]
        sides = [(run, run["sides"][OURS]) for run in ordered]
        bands[name] = [(per_row(run, side["min_ms"]), per_row(run, side["max_ms"])) for run, side in sides]
        if all("limit_ms" in run for run in ordered):
            limits[f"memory's limit, {threads} threads" if threads else "memory's limit"] = [
                (run["x"], per_row(run, run["limit_ms"])) for run in ordered
            ]
    return lines(curves | limits, AXES[subject], "ns per gradient row", True, True, bands, limits)


def per_row(run: Run, milliseconds: float) -> float:
    """Return the nanoseconds per row."""
    return float(1e6 * milliseconds / run["workload"]["rows"])


def shares(title: str, runs: Sequence[Run]) -> str:
    """Plot the share of the memory limit that penstock and the best peer reach, case by case."""
    rows = []
    for run in runs:
        if "limit_ms" in run:
            share, *peers = (
                100 * run["limit_ms"] / run["sides"][name]["median_ms"]
                for name in (OURS, *(n for _, n in peers_of(run)))
            )
            rows.append(Bar(run["case"], share, f"{share:.0f} %", mark=max(peers, default=None)))
    legend = {OURS: COLOURS[0], **({"the best peer": MARK} if any(row.mark is not None for row in rows) else {})}
    return bars(rows, "share of the memory's limit, %", title=title, legend=legend)
