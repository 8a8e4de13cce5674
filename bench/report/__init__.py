"""The report of a result: a folder with result.json, the plots, and one self-contained page.

``python -m penstock.bench.report RESULT.json… --plots DIR`` draws the plots of saved results, as in docs/.
"""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.bench.cases import GROWTH
from penstock.bench.contestants import OURS
from penstock.bench.machine import named, threads_text
from penstock.bench.report import plots
from penstock.bench.report.comparison import check_machine, read_result
from penstock.bench.report.summary_table import cell_of, peers_of
from penstock.bench.workloads import WORKLOADS
from penstock.contrib.pages.svg import SCHEME, standalone

# Tables, and on a narrow screen plots, scroll in their sections.
STYLE = f"""{SCHEME}body{{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:60rem;
margin:2rem auto;padding:0 1rem;overflow-wrap:anywhere}}section{{overflow-x:auto;margin:1rem 0}}
table{{border-collapse:collapse;overflow-wrap:normal}}
td,th{{padding:.2rem .7rem;border-bottom:1px solid var(--line);text-align:right}}td+td{{white-space:nowrap}}
td:first-child,th:first-child{{text-align:left}}svg{{width:100%;height:auto}}.bad{{color:var(--bad)}}
@media(max-width:32rem){{svg{{min-width:32rem}}}}"""


def check_folder(folder: Path) -> None:
    """Raise UsageError if a folder has the report of another machine, InputError if its result cannot be read."""
    path = folder / "result.json"
    if path.exists():
        check_machine(read_result(path), path, "give another directory, so that the results of two are not mixed")


def write_report(folder: Path, result: dict[str, Any]) -> Path:
    """Write the report, and return the path of its page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    pictures = []
    for name, picture in figures(result):
        (folder / f"{name}.svg").write_text(standalone(picture))
        pictures.append(picture)
    index = folder / "index.html"
    index.write_text(page(result, pictures))
    return index


def figures(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, SVG) of every plot that the result has numbers for."""
    runs = [run for run in result["runs"] if OURS in run["sides"]]
    cpu = result["machine"]["cpu"]
    for threads in sorted({run["threads"] for run in runs}):
        threads_runs = [run for run in runs if run["threads"] == threads]
        for workload in WORKLOADS:
            case_runs = [r for r in threads_runs if r["case"].startswith(f"{workload}/")]
            if any(peers_of(run) for run in case_runs):
                title = f"{workload}, {case_runs[0]['workload']['title']}; {threads_text(threads)} of {cpu}"
                yield f"{workload}-{threads}", plots.ratios(title, case_runs)
        compared = [r for r in threads_runs if r["case"].split("/")[0] in WORKLOADS]
        if compared:
            title = f"share of the memory's limit; {threads_text(threads)} of {cpu}"
            yield f"limit-{threads}", plots.shares(title, compared)
    for case in GROWTH:
        case_runs = [run for run in runs if run["case"] == case]
        if case_runs:
            yield case.replace("/", "-"), plots.growth(case.split("/")[1], case_runs)


# ---- the page


def page(result: dict[str, Any], pictures: list[str]) -> str:
    description = result["machine"]
    machine = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in description.items())
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        "<title>penstock bench</title>",
        f"<style>{STYLE}</style><h1>penstock bench</h1>",
        f"<p>{escape(named(description))}<br>{escape(machine)}<br>{escape(versions)}<br>{result['rounds']} rounds, "
        f"{result['sizes']['rows']:,} rows a step.</p>",
        *problems(result),
        *(f"<section>{picture}</section>" for picture in pictures),
        "<h2>Every case</h2>",
        *(run_table(run) for run in result["runs"]),
    ]
    return "\n".join(parts) + "\n"


def problems(result: dict[str, Any]) -> Iterator[str]:
    """Yield the failures, and the peers that did not take part."""
    if result["failed"]:
        yield f"<p class=bad>Our own result is wrong or missing in: {escape(', '.join(result['failed']))}</p>"
    if result.get("absent"):
        yield f"<p>Not installed: {escape(', '.join(result['absent']))}</p>"
    for name, problem in (result["unusable"] | result["died"]).items():
        yield f"<p>Skipped, {escape(name)}: {escape(problem)}</p>"


def run_table(run: dict[str, Any]) -> str:
    size = f" {run['x']:,}" if run["x"] is not None else ""
    lines = [f"<h3>{escape(run['case'])}{size}, {threads_text(run['threads'])}</h3>"]
    if OURS in run["sides"]:
        w = run["workload"]
        lines.append(
            f"<p>{escape(w['title'])}: {w['rows']:,} rows, {w['unique']:,} distinct ids (reuse {w['reuse']:g}), "
            f"{w['step_mb']:g} MB of gradients, {w['tables_mb']:g} MB of weights. {escape(cell_of(run) or '')}</p>"
            "<section><table><tr><th>side<th>median ms<th>least<th>most<th>samples (clean)<th>times ours</tr>"
        )
        for name, side in sorted(run["sides"].items(), key=lambda item: item[1]["median_ms"]):
            lines.append(
                f"<tr><td>{escape(name)}<td>{side['median_ms']:.3f}<td>{side['min_ms']:.3f}"
                f"<td>{side['max_ms']:.3f}<td>{len(side['samples_ms'])} ({side['clean']})"
                f"<td>{format(side['ratio'], '.2f') if 'ratio' in side else ''}</tr>"
            )
        if "limit_ms" in run:
            limit = f"the memory's limit for {threads_text(run['threads'])}"
            lines.append(f"<tr><td>{limit}<td>{run['limit_ms']:.3f}<td><td><td><td></tr>")
        lines.append("</table></section>")
    lines += [f"<p class=bad>{escape(n)} failed, not timed: {escape(p)}</p>" for n, p in run["failed"].items()]
    return "\n".join(lines)


def escape(text: Any) -> str:
    return html.escape(str(text))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the plots of saved results.")
    parser.add_argument("results", nargs="+", metavar="RESULT.json")
    parser.add_argument("--plots", required=True, metavar="DIR", help="where NAME.svg goes, a file per question")
    args = parser.parse_args()
    folder = Path(args.plots)
    folder.mkdir(parents=True, exist_ok=True)
    for result in args.results:
        for name, picture in figures(json.loads(Path(result).read_text())):
            (folder / f"{name}.svg").write_text(standalone(picture))
