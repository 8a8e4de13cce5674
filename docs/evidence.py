"""Tables and plots of the pages in docs/evidence/, from the files of bench/results/, when the site is built.

A page says where with ``<!-- docs/evidence.py: NAME -->``; docs/hooks.py puts it there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from penstock.bench.report import figures
from penstock.bench.report.comparison import share_of_limit
from penstock.bench.report.summary_table import markdown, peers_of
from penstock.bench.tpu.results_page import read_page
from penstock.contrib.pages.svg import COLOURS, MARK, Bar, bars, lines, standalone

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def newest(name: str) -> Any:
    """Return the newest result of a name, in the folder of any machine."""
    path = max(RESULTS.rglob(f"{name}-*.json"), key=lambda path: path.name)
    return json.loads(path.read_text())


@cache
def plots() -> dict[str, str]:
    """Return every plot: name → SVG."""
    compared = {name: standalone(plot) for result in ("bench", "growth") for name, plot in figures(newest(result))}
    return {**compared, "scaling": speed_ups(), "tpu_steps": tpu_steps(), "faults": fault_cases()}


def plots_of(prefix: str, text: str) -> Iterator[str]:
    """Yield the images whose name begins so. text : to be read in their place"""
    for name in plots():
        if name.startswith(prefix):
            yield f"![{name.partition('-')[0]}: {text}](plots/{name}.svg)"


# ---- performance


def compared() -> str:
    """Return penstock next to its peers: the table, the workloads, and the plots."""
    result = newest("bench")
    workloads = {run["workload"]["name"]: run["workload"] for run in result["runs"] if "/" in run["case"]}
    rows = [
        (
            name,
            w["title"],
            f"{w['vocabulary']:,}",
            " to ".join(dict.fromkeys((str(min(w["dims"])), str(max(w["dims"]))))),
            f"{w['unique']:,}",
            f"{w['reuse']:.3g}",
        )
        for name, w in workloads.items()
    ]
    of_workloads = table(("", "a step of 2^20 rows", "ids in all", "dim", "distinct ids a step", "rows per id"), rows)
    images = [
        *plots_of("limit", "the share of the memory limit that penstock and the best peer reach"),
        *plots_of("w", "the time of every peer, as a multiple of penstock's"),
    ]
    return "\n\n".join([markdown(result), of_workloads, *images])


def aims() -> str:
    """Return every figure with its aim."""
    result, recorded = newest("bench"), newest("aims")
    runs = {run["case"]: run for run in result["runs"]}
    rows = []
    for aim in recorded["cases"]:
        run = runs[aim["case"]]
        ratio, peer = min(peers_of(run))
        share = 100 * share_of_limit(run)
        reached = [ratio >= aim["ratio"], *([share >= aim["share"]] if aim["share"] else [])]
        met = "yes" if all(reached) else "the share" if any(reached) else "no"
        figure = f"{ratio:.2f} × {peer.split('_')[0]}" + (f", {share:.0f} % of the limit" if aim["share"] else "")
        wanted = f"{aim['ratio']} ×" + (f", {aim['share']} %" if aim["share"] else "")
        workload, kind = aim["case"].split("/")
        rows.append((f"{workload}, {kind}", figure, wanted, met, "above", "figures-2026-11-22.md"))
    for figure in recorded["figures"]:
        machine = f"{figure['machine']}, {figure['date']}: {figure['noise']}"
        rows.append((*(figure[key] for key in ("what", "measured", "aim", "met")), machine, figure["file"]))
    head = ("", "measured", "aim", "met", "machine and noise", "file in `bench/results/`")
    return table(head, [(*row[:-1], f"`{row[-1]}`") for row in rows])


def growth() -> str:
    machine = newest("growth")["machine"]
    images = plots_of("growth", "nanoseconds per row against the size that grows, and the memory's limit")
    return "\n\n".join([f"{machine['cpu']}, {machine['cpus']} CPUs, {machine['date']}:", *images])


def scaling() -> str:
    """Return the speed-up on many threads by model: the table, and the plot."""
    result = newest("scaling")
    machine, workloads = result["machine"], result["workloads"]
    threads = list(workloads[0]["threads"])[1:]
    rows = [
        (
            each["workload"],
            *(f"{each['threads'][number]['speed_up']:.1f}" for number in threads),
            *(f"{each['limits'][rate]:.0f}" for rate in each["limits"]),
            f"{each['threads']['32']['serial_ms']:.1f} ms",
            f"{each['threads']['32']['chain_ms']:.1f} ms",
        )
        for each in workloads
    ]
    limits = [f"limit at {rate} GB/s" for rate in workloads[0]["limits"]]
    head = ["", *(f"{number} threads" for number in threads), *limits, "serial", "longest chain"]
    images = plots_of("scaling", "speed-up by model against threads, and its limits at 200 GB/s of memory bandwidth")
    source = f"Virtual machine, {machine['cpu']}, {machine['cpus']} CPUs, {machine['date']}:"
    return "\n\n".join([source, table(head, rows), *images])


def speed_ups() -> str:
    """Plot the speed-up by model against threads, with the limit of each workload at 200 GB/s."""
    curves = dict[str, list[tuple[float, float]]]()
    for each in newest("scaling")["workloads"]:
        name, models = each["workload"], each["threads"].items()
        curves[name] = [(float(threads), model["speed_up"]) for threads, model in models]
    for each in newest("scaling")["workloads"]:
        ends = curves[each["workload"]][0][0], curves[each["workload"]][-1][0]
        curves[f"limit of {each['workload']}"] = [(end, each["limits"]["200"]) for end in ends]
    dashed = [name for name in curves if name.startswith("limit")]
    across = "threads; dashed: where 200 GB/s are all in use"
    return standalone(lines(curves, across, "times the speed of one thread, by model", True, dashed=dashed))


# ---- devices


def programs() -> str:
    rows = [
        (f"{p['programs']:,} {p['what']}", p["device"], p["checked"], f"{p['passed']:,} passed", p["date"], p["file"])
        for p in newest("programs")
    ]
    head = ("programs", "device", "checked for", "result", "date", "file in `bench/results/`")
    return table(head, [(*row[:-1], f"`{row[-1]}`") for row in rows])


def steps() -> str:
    """Return the bytes that compiled steps move per line, as multiples of the least, from the compile matrix."""
    shown = ("pallas", "Adam", 128), ("xla", "Adagrad", 128), ("xla", "Adam", 128), ("xla", "Adam", 1024)
    rows = [
        (f"`{variant}`, {optimizer}, dim {dim}", *(of_least(g, variant, optimizer, dim) for g in GENERATIONS))
        for variant, optimizer, dim in shown
    ]
    images = plots_of("tpu_steps", "bytes moved per line by XLA's program and by our kernel, for every generation")
    return "\n\n".join([table(["bytes per line ÷ least", *GENERATIONS], rows), *images])


def of_least(generation: str, variant: str, optimizer: str, dim: int) -> str:
    """Return what a program of the matrix moves per line, as a multiple of the least."""
    case = [generation, variant, optimizer, str(dim)]
    columns = ("generation", "variant", "optimizer", "dim")
    return next(row["× floor"] for row in matrix() if [row[name] for name in columns] == case)


@cache
def matrix() -> list[dict[str, str]]:
    return read_page(RESULTS / "tpu-matrix.md")


def tpu_steps() -> str:
    """Plot the bytes that a compiled step moves per line, by generation: XLA's program next to our kernel."""
    shown = []
    for generation in GENERATIONS:
        xla, ours = (float(of_least(generation, variant, "Adam", 128)) for variant in ("xla", "pallas"))
        shown.append(Bar(generation, xla, f"{xla:.2f}", mark=ours))
    label = "bytes moved per line ÷ the least that Adam needs, dim 128, 4,096 lines"
    return standalone(bars(shown, label, legend={"XLA's program": COLOURS[0], "our kernel": MARK}))


# ---- reliability


def faults() -> str:
    """Return the newest result of each kind of injected fault."""
    rows = [
        (r["what"], f"{r['cases']:,}", str(r["failed"]), r["how"], f"{r['machine']}, {r['date']}")
        for r in newest("faults")
    ]
    images = plots_of("faults", "the cases of each kind of fault, on a log scale")
    return "\n\n".join([table(("", "cases", "failed", "checked", "machine"), rows), *images])


def fault_cases() -> str:
    """Plot the cases of each kind of injected fault."""
    colours = {"no case failed": COLOURS[0], "a case failed": COLOURS[4]}
    kinds = [("a case failed" if r["failed"] else "no case failed") for r in newest("faults")]
    shown = [
        Bar(r["name"], r["cases"], f"{r['cases']:,}", colours[kind])
        for r, kind in zip(newest("faults"), kinds, strict=True)
    ]
    legend = {kind: colour for kind, colour in colours.items() if kind in kinds}
    return standalone(bars(shown, "cases (log scale)", 10.0, True, legend=legend))


TABLES: dict[str, Callable[[], str]] = {
    create.__name__: create for create in (compared, aims, growth, scaling, programs, steps, faults)
}
