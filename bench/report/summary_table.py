"""The table of figures: ``python -m penstock.bench.report.summary_table RESULT.json``, as docs/evidence.py shows it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from penstock.bench.cases import KINDS
from penstock.bench.contestants import DISCARDED, OURS, REPLAY, STATIC
from penstock.bench.workloads import WORKLOADS

NAMES = {
    "coalesce": "coalesce alone",
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rowwise_adagrad": "row-wise Adagrad",
    "adam": "Adam",
    "ftrl": "FTRL",
    "replay": "replay of a file, Adagrad",
    "doput": "DoPut over loopback, Adagrad",
    "dynamic": "dynamic table, Adagrad",
}
WORKLOAD_NAMES = {"w1": "zipf", "w2": "no reuse", "w3": "hot ids", "w4": "32 uneven tables"}


def markdown(result: dict[str, Any]) -> str:
    """Return the table, with machine and versions, for the largest number of threads that was measured."""
    compared = [run for run in result["runs"] if run["case"].split("/")[0] in WORKLOADS]
    threads = max((run["threads"] for run in compared), default=0)
    runs = {run["case"]: run for run in compared if run["threads"] == threads}
    workloads = [w for w in WORKLOADS if any(case.startswith(f"{w}/") for case in runs)]
    heads = [f"{w.upper()} {WORKLOAD_NAMES[w]}" for w in workloads]
    lines = [f"| ms per step | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for kind in KINDS:
        cells = [cell_of(runs.get(f"{w}/{kind}")) for w in workloads]
        if any(cells):
            lines.append(f"| {NAMES[kind]} | {' | '.join(cell or '–' for cell in cells)} |")
    return "\n".join([*lines, "", provenance(result, threads)]) + "\n"


def cell_of(run: dict[str, Any] | None) -> str | None:
    """Return a cell: penstock's median, the ratio to the best peer, and the share of the memory limit."""
    if run is None or OURS not in run["sides"]:
        return None
    ours = run["sides"][OURS]["median_ms"]
    parts = [f"{ours:.3g} ms"]
    peers = peers_of(run)
    if peers:
        ratio, name = min(peers)
        parts.append(f"{ratio:.2g}× {name.split('_')[0]}")
    if REPLAY in run["sides"]:
        parts.append(f"{run['sides'][REPLAY]['ratio']:.0%} of replay's rows/s")
    if DISCARDED in run["sides"]:
        parts.append(f"{run['sides'][DISCARDED]['ratio']:.0%} of a bare DoPut's")
    if STATIC in run["sides"]:
        parts.append(f"{1 / run['sides'][STATIC]['ratio']:.3g}× the static table")
    if "limit_ms" in run:
        parts.append(f"{run['limit_ms'] / ours:.0%} of limit")
    return ", ".join(parts)


def peers_of(run: dict[str, Any]) -> list[tuple[float, str]]:
    """Return (time as a multiple of penstock's, name) of the other libraries."""
    others = {n: side for n, side in run["sides"].items() if not n.startswith(OURS) and n != DISCARDED}
    return [(side["ratio"], n) for n, side in others.items() if "ratio" in side]


def provenance(result: dict[str, Any], threads: int) -> str:
    """Return the machine and the versions, without which the numbers mean nothing."""
    machine, versions = result["machine"], result["versions"]
    ours = [run["sides"][OURS] for run in result["runs"] if run["threads"] == threads and OURS in run["sides"]]
    disturbed = sum(2 * side["clean"] < len(side["samples_ms"]) for side in ours)
    noise = f" Other work on the machine disturbed {disturbed} of {len(ours)} cases." if disturbed else ""
    sides = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "python")
    return (
        f"{threads} threads of {machine['cpu']}, {machine['memory_gb']:g} GB, {machine['system']}, {machine['date']}; "
        f"{result['sizes']['rows']:,} rows a step, "
        f"medians of {result['rounds']} rounds. Python {versions['python']}, {sides}.{noise}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("result", type=Path)
    args = parser.parse_args()
    try:
        print(markdown(json.loads(args.result.read_text())), end="")
    except (OSError, ValueError, KeyError, TypeError) as error:
        kind = f"{args.result} is no result of penstock bench: " if isinstance(error, KeyError | TypeError) else ""
        print(f"penstock.bench.report.summary_table: {kind}{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
