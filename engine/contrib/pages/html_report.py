"""``--report DIR``: a self-contained HTML page, and its numbers as JSON."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import penstock
from penstock.base.errors import MOST_LISTED
from penstock.base.html_tables import html_table
from penstock.cli.output import count, input_text, size_text, writing
from penstock.contrib.pages.svg import MAX_LEGEND, SCHEME, Bar, Points, bars, lines, short
from penstock.core.sampling import Hot, Moment, Probe, hot_ids, tables_of, thinned
from penstock.core.telemetry import Telemetry
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.id_ranges import id_text
from penstock.model.stats import Report

Section = tuple[str, str, str]  # heading, note, content as HTML

# On a narrow screen plots scroll in their sections: smaller ones could not be read.
STYLE = f"""{SCHEME}body{{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:72rem;
margin:0 auto;padding:1rem}}h1{{font-size:1.4rem;overflow-wrap:anywhere}}h2{{font-size:1rem;margin:0}}
p{{margin:.2rem 0}}p.note{{color:var(--pale);font-size:.85rem}}
main{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(26rem,100%),1fr));gap:.8rem}}
section{{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.8rem 1rem;min-width:0;
overflow-x:auto}}table{{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}}
td,th{{padding:.15rem .5rem;text-align:right;border-bottom:1px solid var(--line);font-weight:normal}}
td:first-child,th:first-child{{text-align:left;overflow-wrap:anywhere;min-width:5rem}}th{{color:var(--pale)}}
td+td{{white-space:nowrap}}td:first-child+td:last-child{{white-space:normal;overflow-wrap:anywhere}}
svg{{width:100%;height:auto}}.bad{{color:var(--bad)}}
@media(max-width:32rem){{svg{{min-width:32rem}}td,th{{padding:.15rem .25rem}}}}"""

STAGES = {"read": "reading, decoding", "sum": "checking, summing", "step": "optimizer", "save": "checkpoint"}
CURVE_POINTS, FLOW_POINTS = 200, 80
# An interval between two moments is a gap in the flow's line if it exceeds both IDLE_S and IDLE_RATIO times the median.
IDLE_S, IDLE_RATIO = 1.0, 5.0
# Fields of KeyReport, in the order of the page.
KEY_COLUMNS = ["keys", "admitted", "returned", "expired", "evicted", "rejected", "waiting"]
KEY_COLUMNS += ["unadmitted_rows", "expired_waiting"]
KEY_HEADINGS = {"unadmitted_rows": "rows not admitted", "expired_waiting": "expired waiting"}


def write_page(folder: Path, title: str, sections: Iterable[Section], numbers: Mapping[str, Any]) -> Path:
    """Write index.html and report.json to ``folder``, and return the path of the page. Raises OSError.

    A section without content is omitted.
    """
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>",
        f"<h1>{html.escape(title)}</h1>",
        f"<p class=note>penstock {penstock.__version__}; the numbers are in report.json</p>",
        "<main>",
        *(
            f"<section><h2>{html.escape(heading)}</h2><p class=note>{html.escape(note)}</p>{content}</section>"
            for heading, note, content in sections
            if content
        ),
        "</main>",
    ]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n")
        index = folder / "index.html"
        index.write_text("\n".join(parts) + "\n", encoding="utf-8")
    return index


def run_sections(report: Report, config: EmbeddingConfig, watch: Telemetry, probe: Probe) -> Iterator[Section]:
    """Yield the sections about a run. watch, probe : of its engine"""
    moments, hot = probe.moments, probe.hot
    notes = "".join(f"<p class=bad>{html.escape(note)}</p>" for note in report.notes)
    yield "Summary", "", html_table(("", ""), _facts(report)) + notes
    yield (
        "Where the time went",
        "seconds of the run's own thread",
        bars([Bar(STAGES[s], t, f"{short(t)} s") for s, t in watch.stage_s.items()]),
    )
    flow = flow_of(thinned(moments, FLOW_POINTS))
    yield "Flow", "gradient rows read per second, over the run", lines({"rows": flow}, "seconds", "rows/s")
    yield (
        "How far rows moved",
        "L2 norm of a touched row's change in one step, root mean square over sampled rows, by table",
        lines(_largest(norms_of(moments), report), "step", "change", log_y=True),
    )
    yield "Learning rates", "of every dynamic tag, over steps", lines(rates_of(moments), "step", "rate")
    yield (
        "Dropped",
        "rows dropped by reason, and stale frames: totals up to each step",
        lines(drops_of(moments), "step", ""),
    )
    yield "Tables", "reuse: gradient rows per row that the optimizer updated", _tables(report, watch.updated)
    yield (
        "Keys of dynamic tables",
        "admitted, expired and evicted in this run; waiting: not admitted yet",
        _keys(report),
    )
    yield (
        "How often ids occur",
        f"share of the rows by the id's rank, from a sample of {count(hot.sampled)} rows over the whole run",
        lines(sampled_ranks(hot), "rank", "share of the table's rows", log_x=True, log_y=True),
    )
    most = [
        (name, id_text(config.id_ranges[name][0], row_id), f"{fraction:.2%}")
        for name, row_id, fraction in hot_ids(hot.samples)
    ]
    yield (
        "Hot ids",
        "the most frequent ids of each table, and their share of its rows, from the same sample",
        html_table(("table", "id", "of rows"), most) if most else "",
    )


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    yield "rows", f"{count(report.rows)} in {report.seconds:.2f} s ({count(report.rows_per_s)} rows/s)"
    yield "frames", f"{count(report.frames)}, of them {count(report.stale)} stale, {count(report.pending)} pending"
    yield "steps", f"{count(report.steps)} (global step {count(report.global_step)})"
    yield "rows dropped", ", ".join(f"{count(n)} {reason}" for reason, n in report.dropped.items()) or "none"
    yield "input", input_text(report)
    if report.state_hash:
        yield "state", report.state_hash


def _tables(report: Report, updated: Mapping[str, int]) -> str:
    """Return one row per table; if there are more than MOST_LISTED, those with the most rows and the number omitted."""
    tables = list(report.tables.items())
    if len(tables) > MOST_LISTED:
        tables.sort(key=lambda item: -item[1].rows)
    rows = []
    for name, report_of_table in tables:
        num_rows, updates = report_of_table.rows, updated.get(name, 0)
        distinct = "–" if report_of_table.distinct is None else count(report_of_table.distinct)
        reuse = f"{num_rows / updates:.2f}" if updates else "–"
        rows.append((name, count(num_rows), distinct, count(updates), reuse))
    return _first_rows(("table", "rows", "distinct ids", "updates", "reuse"), rows)


def _keys(report: Report) -> str:
    """Return a row for each dynamic table, up to MOST_LISTED with the most keys; "" if there is none."""
    tables = [(name, table.keys) for name, table in report.tables.items() if table.keys]
    tables.sort(key=lambda item: -item[1].keys)
    rows = []
    for name, keys in tables:
        numbers = [count(getattr(keys, column)) for column in KEY_COLUMNS]
        rows.append((name, *numbers, f"{keys.load:.0%}", size_text(keys.directory_bytes)))
    headings = [KEY_HEADINGS.get(name, name) for name in KEY_COLUMNS]
    return _first_rows(("table", *headings, "full", "directory"), rows) if rows else ""


def _first_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of the first MOST_LISTED rows, and of the number of those omitted."""
    more = [(f"… {count(len(rows) - MOST_LISTED)} more",)] if len(rows) > MOST_LISTED else []
    return html_table(head, [*rows[:MOST_LISTED], *more])


def flow_of(moments: Sequence[Moment]) -> Points:
    """Return (seconds, rows per second) of the interval before each moment; NaN for an interval that is a gap."""
    spans = [(a, b) for a, b in pairwise(moments) if b.seconds > a.seconds]
    usual_s = float(np.median([b.seconds - a.seconds for a, b in spans])) if spans else 0.0
    longest_s = max(IDLE_S, IDLE_RATIO * usual_s)
    return [
        (b.seconds, (b.rows - a.rows) / (b.seconds - a.seconds) if b.seconds - a.seconds <= longest_s else math.nan)
        for a, b in spans
    ]


def norms_of(moments: Sequence[Moment]) -> dict[str, Points]:
    names = dict.fromkeys(name for moment in moments for name in moment.norms)
    # A sampled step without the table is a gap in its line; steps that were not sampled are not.
    return {name: [(m.step, m.norms.get(name, math.nan)) for m in moments if m.norms] for name in names}


def rates_of(moments: Sequence[Moment]) -> dict[str, Points]:
    tags = max((len(moment.rates) for moment in moments), default=0)
    return {f"tag {tag}": [(m.step, m.rates[tag]) for m in moments if len(m.rates) > tag] for tag in range(tags)}


def drops_of(moments: Sequence[Moment]) -> dict[str, Points]:
    reasons = dict.fromkeys(reason for moment in moments for reason in moment.dropped)
    curves: dict[str, Points] = {r: [(m.step, m.dropped.get(r, 0)) for m in moments] for r in reasons}
    if moments and moments[-1].stale:
        curves["stale frames"] = [(m.step, m.stale) for m in moments]
    return curves


def sampled_ranks(hot: Hot) -> dict[str, Points]:
    """Return table → (rank, fraction) of ids sampled at least twice; others only reflect the size of the sample."""
    tables = list(tables_of(hot.samples).items())[:MAX_LEGEND]
    return {name: frequencies(table.rows[table.times > 1], float(table.rows.sum())) for name, table in tables}


def _largest(curves: Mapping[str, Points], report: Report) -> dict[str, Points]:
    names = sorted(curves, key=lambda name: -report.tables[name].rows)[:MAX_LEGEND]
    return {name: curves[name] for name in names}


# ---- frequencies of ids, also for the page of inspect


def frequencies(times: npt.NDArray[Any], total: float | None = None) -> Points:
    """Return (rank, fraction of all rows) of ids, thinned for a logarithmic axis.

    times : rows per id; total : all rows; None: the sum of ``times``
    """
    descending = np.sort(times)[::-1]
    ranks = spaced_ranks(len(descending))
    total = max(1.0, float(descending.sum())) if total is None else total
    return [(float(rank), float(descending[rank - 1] / total)) for rank in ranks]


def covered(times: npt.NDArray[np.int64]) -> Points:
    """Return (percent of the ids, most frequent first; percent of all rows with these ids). times : rows per id"""
    sums = np.cumsum(np.sort(times)[::-1])
    if not len(sums):
        return []
    return [(100.0 * rank / len(sums), 100.0 * float(sums[rank - 1] / sums[-1])) for rank in spaced_ranks(len(sums))]


def spaced_ranks(most: int) -> list[int]:
    """Return ranks from 1 to ``most``, evenly spaced on a logarithmic axis."""
    return np.unique(np.geomspace(1, most, CURVE_POINTS).astype(np.int64)).tolist() if most else []
