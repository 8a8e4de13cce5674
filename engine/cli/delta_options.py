"""``--deltas`` and its companion flags: where deltas are written, and with which slots and how often."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from penstock.cli.options import Parser
from penstock.errors import UsageError
from penstock.io.storage.delta_sink import check_new, is_stream

UNITS = ("steps", "rows", "seconds")


def add_delta_options(command: Parser) -> None:
    """Add the flags that select where and how deltas are written."""
    deltas = command.add_argument_group("deltas")
    deltas.add_argument(
        "--deltas",
        metavar="FILE|URI",
        help="write the rows that change, step by step, to a new file (a log with checksums), a pipe, a URI, or - "
        "for standard output",
    )
    deltas.add_argument(
        "--deltas-slots",
        metavar="all|NAME,NAME",
        help="with the optimizer's slots: all of them, or those named (default: none)",
    )
    deltas.add_argument(
        "--deltas-per",
        metavar="UNIT=N",
        help="one delta per N steps, rows or seconds, with the last value of every row that changed (default: steps=1)",
    )


def deltas_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags as arguments of ``Engine.run``. Raise UsageError for flags that exclude each other."""
    if args.deltas is None:
        for flag in ("slots", "per"):
            if getattr(args, f"deltas_{flag}"):
                raise UsageError(f"--deltas-{flag}: say where deltas go: --deltas FILE")
        return {}
    if args.deltas == "-" and args.json:
        raise UsageError("--deltas - and --json both want standard output; give --deltas a file or a pipe")
    if is_stream(args.deltas) and args.checkpoint is not None:
        raise UsageError(
            f"--deltas {args.deltas}: with --checkpoint deltas go into a file, which --resume goes on with"
        )
    return {"deltas": args.deltas, "slots": _slots(args.deltas_slots), **_per(args.deltas_per)}


def file_of_deltas(args: argparse.Namespace) -> Path | None:
    """Return the file that ``--deltas`` names; None for a stream. Raise UsageError if it exists, without --resume."""
    if args.deltas is None or is_stream(args.deltas):
        return None
    file = Path(args.deltas)
    if not args.resume:
        check_new(file)
    return file


def _slots(text: str | None) -> bool | list[str]:
    return text == "all" or (text.split(",") if text else False)


def _per(text: str | None) -> dict[str, float]:
    if text is None:
        return {}
    unit, _, number = text.partition("=")
    try:
        value = float(number) if unit == "seconds" else int(number)
    except ValueError:
        value = -1
    if unit not in UNITS or not (0 <= value < float("inf") if unit == "seconds" else value >= 1):
        raise UsageError(f"--deltas-per {text}: expected steps=N, rows=N or seconds=N, such as steps=100")
    return {f"per_{unit}": value}
