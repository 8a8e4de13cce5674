"""The plots of a report: bars of how much longer peers took, and curves of ours against a size. Needs matplotlib.

Each function takes runs of a result and gives a figure; only drawing lives here.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from penstock.bench.report.readme_table import peers_of

OURS = "penstock"
Run = dict[str, Any]

INK, PALE, OUR_COLOUR = "#333333", "#dddddd", "#1b6ca8"
COLOURS = {
    "numpy": "#9aa5b1",
    "jax": "#7b9e89",
    "torch": "#d98032",
    "fbgemm": "#b5533c",
    "tf": "#e0b84c",
    "polars": "#8a7fb8",
    "duckdb": "#c7a4c9",
}
AXES = {
    "vocabulary": "ids in the vocabulary",
    "rows": "gradient rows per step",
    "dim": "floats per row",
    "reuse": "rows per distinct id",
    "tables": "tables that share the rows",
    "threads": "threads",
    "batch": "rows per record batch",
}


def ratios(title: str, runs: Sequence[Run]) -> Figure:
    """One workload: for every kind the peers, as multiples of our time. runs : of one number of threads"""
    bars: list[tuple[str, str, float] | None] = []
    for run in runs:
        peers = sorted(peers_of(run))
        if peers:
            kind = run["kind"].replace("_", "-")
            bars += [(kind if not n else "", name, ratio) for n, (ratio, name) in enumerate(peers)]
            bars.append(None)  # a gap before the next kind
    bars = bars[:-1]
    figure = Figure(figsize=(8, 0.9 + 0.24 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    for y, bar in enumerate(bars):
        if bar is not None:
            kind, name, ratio = bar
            axes.barh(y, ratio - 1, left=1, color=COLOURS.get(name.split("_")[0], PALE), height=0.8)
            axes.text(max(ratio, 1) * 1.04, y, f"{ratio:.3g}×  {name}", va="center", fontsize=8, color=INK)
            axes.text(-0.01, y, kind, va="center", ha="right", transform=axes.get_yaxis_transform(), color=INK)
    axes.axvline(1, color=OUR_COLOUR, linewidth=2)
    most = max((bar[2] for bar in bars if bar), default=1.0)
    least = min((bar[2] for bar in bars if bar), default=1.0)
    axes.set_xscale("log")
    axes.set_xlim(min(0.8, least * 0.9), max(2.0, most) * 4)  # room for the names at the bars' ends
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_yticks([])
    one_two_five(axes.xaxis)
    axes.set_xlabel("time of the peer ÷ time of penstock (log scale; the line is penstock)")
    finish(axes, title)
    return figure


def growth(what: str, runs: Sequence[Run]) -> Figure:
    """Ours against the size that grows: nanoseconds per row, with the memory's limit beneath."""
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    for threads in sorted({run["threads"] for run in runs}) if what != "threads" else [None]:
        of = [r for r in runs if OURS in r["sides"] and threads in (None, r["threads"])]
        curve(axes, of, f"penstock, {threads} threads" if threads else OURS)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(AXES[what])
    axes.set_ylabel("ns per gradient row")
    one_two_five(axes.yaxis)
    if what not in ("vocabulary", "rows"):  # those go in powers of ten, as the axis writes them by itself
        axes.set_xticks(sorted({run["x"] for run in runs}))
        plain(axes.xaxis)
    axes.legend(frameon=False, fontsize=8)
    finish(axes, f"growth with {AXES[what]}")
    return figure


def curve(axes: Any, runs: Sequence[Run], label: str) -> None:
    """One line with its spread, and the limit where there is one."""
    xs = [run["x"] for run in runs]
    per_row = [1e6 / run["workload"]["rows"] for run in runs]
    ours = [run["sides"][OURS] for run in runs]
    (line,) = axes.plot(xs, [s["median_ms"] * f for s, f in zip(ours, per_row, strict=True)], "o-", label=label)
    low, high = ([s[end] * f for s, f in zip(ours, per_row, strict=True)] for end in ("min_ms", "max_ms"))
    axes.fill_between(xs, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    if all("limit_ms" in run for run in runs):
        limits = [run["limit_ms"] * f for run, f in zip(runs, per_row, strict=True)]
        axes.plot(xs, limits, "--", color=INK, linewidth=1, label="memory's limit")


def shares(title: str, runs: Sequence[Run]) -> Figure:
    """How much of the memory's limit ours and the best peer reach, case by case."""
    of = [run for run in runs if OURS in run["sides"] and "limit_ms" in run]
    figure = Figure(figsize=(8, 0.9 + 0.3 * len(of)), layout="constrained")
    axes = figure.add_subplot()
    for y, run in enumerate(of):
        ours = 100 * run["limit_ms"] / run["sides"][OURS]["median_ms"]
        axes.barh(y, ours, color=OUR_COLOUR, height=0.7)
        axes.text(ours + 0.5, y, f"{ours:.0f} %", va="center", fontsize=8, color=INK)
        peers = [run["sides"][name]["median_ms"] for _, name in peers_of(run)]
        if peers:
            best = 100 * run["limit_ms"] / min(peers)
            axes.plot([best, best], [y - 0.35, y + 0.35], color=COLOURS["torch"], linewidth=3)
    axes.set_yticks(range(len(of)), [run["case"] for run in of], fontsize=8)
    axes.set_ylim(len(of) - 0.4, -0.6)
    axes.margins(x=0.08)  # for the numbers at the bars' ends
    axes.set_xlabel("share of the memory's limit, %  (orange mark: the best peer)")
    finish(axes, title)
    return figure


def svg(figure: Figure, name: str) -> str:
    """The same text for the same numbers. name : makes its ids its own among several on a page"""
    drawn = io.StringIO()
    with rc_context({"svg.hashsalt": name}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines()) + "\n"


def one_two_five(axis: Any) -> None:
    """Ticks at 1, 2, 5, 10 …: a log scale that spans less than a power of ten has no other."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    plain(axis)


def plain(axis: Any) -> None:
    """Numbers as people write them, also on a log scale."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def finish(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="both", color=PALE, linewidth=0.5)
    axes.set_axisbelow(True)
