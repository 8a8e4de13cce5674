"""The report of a replay as text and JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.base.errors import MOST_LISTED
from penstock.cli.output import Output, cache_texts, count, frames_text, input_text, keys_texts, place_text
from penstock.model.stats import FROZEN, NORM_LIMIT, Report, TableReport


def _ids_text(table: TableReport) -> str:
    return "" if table.distinct is None else f" of {count(table.distinct)} ids"


def say_report(out: Output, report: Report) -> None:
    """Print the report as text."""
    out.say(f"rows      {count(report.rows)} in {report.seconds:.2f} s ({count(report.rows_per_s)} rows/s)")
    out.say(f"frames    {frames_text(report.frames, report.steps, report.stale, report.pending)}")
    if report.truncated:
        out.say(f"truncated {count(report.truncated)} ids beyond the length of their sequence")
    if report.skipped:
        out.say(f"resumed   after {count(report.skipped)} frames, step {count(report.global_step - report.steps)}")
    tables = list(report.tables.items())
    if len(tables) > MOST_LISTED:
        tables.sort(key=lambda item: -item[1].rows)
    out.say_tables("table     ", [f"{name}: {count(table.rows)} rows{_ids_text(table)}" for name, table in tables])
    out.say_tables("keys      ", keys_texts(dict(tables)))
    out.say_tables("cache     ", cache_texts(dict(tables)))
    if report.learning_rates is not None:
        out.say("rates     " + ", ".join(f"tag {tag} = {rate:g}" for tag, rate in enumerate(report.learning_rates)))
    out.say_all("note      ", report.notes)
    out.say(f"input     {input_text(report)}")
    if report.state_hash is not None:
        out.say(f"state     {report.state_hash}")


def say_end(
    out: Output,
    args: argparse.Namespace,
    report: Report,
    quarantine: Path | None,
    files: Sequence[Path],
    shown: Sequence[Path],
    **more: Any,
) -> None:
    """Print what a replay wrote, and its result. files : of ``--out``; shown : pages; more : fields of the result"""
    if quarantine is not None:
        num_bad = sum(
            n for reason, n in report.dropped.items() if reason != NORM_LIMIT and not reason.startswith(FROZEN)
        )
        out.say(f"wrote     {quarantine}: {count(num_bad)} bad rows")
    if args.deltas is not None:
        out.say(f"wrote     {place_text(args.deltas)}: the deltas up to step {count(report.global_step)}")
    if args.checkpoint is not None:
        out.say(f"committed {place_text(args.checkpoint)}, step {count(report.global_step)}")
    out.say_tables("wrote     ", [str(file) for file in files])
    out.say_all("wrote     ", shown)
    aside = {} if quarantine is None else {"quarantine": str(quarantine)}
    if args.deltas is not None:
        aside["deltas"] = place_text(args.deltas)
    out.result({**report.to_dict(), "out": [str(f) for f in files], **aside, **more})


def written_aside(args: argparse.Namespace, quarantine: Path | None) -> list[str]:
    """Return which files other than a commit remain after a run that was stopped."""
    texts = [] if quarantine is None else [f"bad rows are in {quarantine}"]
    if args.deltas is not None:
        texts.append(f"the deltas of every whole frame are in {place_text(args.deltas)}")
    return texts
