"""The results of the matrix as a page, and that page as rows for the table and the plot of docs/evidence/devices.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path

from penstock.bench.tpu.step_cases import LINES, ROWS, Case, Result

HEAD = """# The compile matrix of TPU steps

Written by `make tpu-matrix` on {date}, with jax {jax} and the libtpu that it pins: {count} programs. Unless
a row says otherwise, a program has {rows:,} rows over all chips and {lines:,} lines per chip. "4 hosts" is a
v5e:4x4 topology.

- × floor: the bytes as a multiple of weights and slots of a line, read and written once, its gradient and its number
- × row floor: the same, if a step touches one row of each line
- bundles per line: instructions that the kernel issues for a line of a full block, where they were counted
- temporary: further memory of the program, besides its arguments

"""
COLUMNS = "generation optimizer dim variant bytes_per_line ×_floor ×_row_floor bundles_per_line temporary compiled_in"
Bundles = Mapping[Case, float]


def markdown_table(results: Sequence[Result], bundles: Bundles) -> str:
    """Return a row per result. bundles : per line, of the cases that were listed"""
    columns = [column.replace("_", " ") for column in COLUMNS.split()]
    return "\n".join(
        [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(row_of(result, bundles) for result in results)]
    )


def row_of(result: Result, bundles: Bundles) -> str:
    case, moved = result.case, result.bytes_per_line
    measured = ["; ".join(result.failed), "", ""]
    if not result.failed and moved is not None:
        measured = [f"{moved:,.0f}", f"{moved / result.floor:.2f}", f"{moved / result.row_floor:.2f}"]
    listed = f"{bundles[case]:.1f}" if case in bundles else ""
    ends = [f"{result.temp_bytes / 1e6:.2f} MB", f"{result.seconds:.1f} s"]
    return f"| {' | '.join([case.generation, case.title, str(case.dim), case.variant, *measured, listed, *ends])} |"


def read_results(path: Path | None) -> dict[Case, Result]:
    """Return the results of an earlier run."""
    results = {}
    for line in path.read_text().splitlines() if path is not None and path.exists() else ():
        result = json.loads(line)
        case = Case(**result.pop("case"))
        results[case] = Result(case, **{**result, "failed": tuple(result["failed"])})
    return results


def bundles_in(path: Path | None) -> dict[Case, float]:
    """Return the results of ``bundles``."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else ()
    return {Case(**entry["case"]): entry["bundles"] for entry in map(json.loads, lines)}


def write(path: Path, results: Sequence[Result], bundles: Bundles) -> None:
    """Write the results as a page, which replaces an earlier one."""
    head = HEAD.format(date=date.today(), jax=version("jax"), rows=ROWS, lines=LINES, count=len(results))
    path.write_text(f"{head}{markdown_table(results, bundles)}\n")


def read_page(path: Path) -> list[dict[str, str]]:
    """Return the rows of a page that ``write`` has written: column → text."""
    rows = [line.strip("| ").split(" | ") for line in path.read_text().splitlines() if line.startswith("| ")]
    head, *body = ([cell.strip() for cell in row] for row in rows)
    return [dict(zip(head, row, strict=True)) for row in body]
