"""Flags of the commands that run an engine or read sources. Those of deltas are for replay alone.

``Checked`` contains a replay's, checked before any table is allocated.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from penstock.checkpoint.store import PASSES, Folder
from penstock.cli.terminal.options import (
    MAX_DEVICES,
    MAX_THREADS,
    Parser,
    add_end_option,
    add_row_options,
    check_sources,
    columns_of,
    learning_rates_of,
    number,
    whole,
)
from penstock.cli.terminal.output import check_writable, place_text
from penstock.config.embedding import EmbeddingConfig
from penstock.deltas import DeltaOptions, form_of
from penstock.errors import UsageError
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.sources.opening import open_sources
from penstock.io.sources.seekable_source import check_order
from penstock.io.storage import quarantine
from penstock.io.storage.delta_sink import check_new, is_stream
from penstock.learning_rates import check_given
from penstock.passes.pass_folder import PassFolder

DELTA_UNITS = ("steps", "rows", "seconds")


def add_table_options(command: Parser) -> None:
    """Add the flags for the initial tables and for the folder that they are written to."""
    command.add_argument("--out", type=Path, metavar="DIR", help="write DIR/<table>.parquet at the end")
    command.add_argument("--init", type=Path, metavar="DIR", help="start from tables that --out wrote, or Orbax")
    command.add_argument(
        "--seed", type=whole(), default=0, metavar="N", help="of the tables' initial values (default 0)"
    )


def add_gate_options(command: Parser) -> Any:
    """Add the gate's flags. Return their group, to which a command may add more."""
    gate = command.add_argument_group("the gate")
    gate.add_argument(
        "--num-required",
        type=whole(1),
        metavar="N",
        help="frames that make a step (default: the configuration's, or 1)",
    )
    gate.add_argument(
        "--reduction",
        choices=("mean", "sum"),
        help="mean: divide a row's sum by the frames that held it (default: the configuration's, or mean)",
    )
    gate.add_argument(
        "--learning-rate",
        action="append",
        default=[],
        metavar="TAG=VALUE",
        help="value of a dynamic learning rate; once per tag of the configuration",
    )
    return gate


def add_replay_gate_options(command: Parser) -> None:
    """Add the flags of commands that read sources to their end: frame order, limit, bad rows and stale frames."""
    gate = add_gate_options(command)
    gate.add_argument(
        "--merge",
        choices=("step", "round"),
        help="step: merge sources that are sorted by step, one per worker; round: a frame of each source in turn",
    )
    gate.add_argument("--flush", action="store_true", help="apply the frames that wait in the gate at the end")
    gate.add_argument("--limit", type=whole(0), metavar="FRAMES", help="stop after that many frames")
    gate.add_argument(
        "--on-bad-row",
        default="error",
        metavar="error|drop|quarantine=FILE",
        help="error (default): stop before the frame; drop: leave the row out and count it; quarantine=FILE: also "
        "write it to a new Arrow file, to be repaired and replayed",
    )
    gate.add_argument(
        "--max-stale",
        type=number("a share from 0 to 1", 0, 1),
        metavar="SHARE",
        help="exit 3 and do not write --out if stale frames held more than this share of the rows, 0 to 1 (default: 1)",
    )


def folder_or_uri(text: str) -> Path | str:
    """Return a path, or a URI as it is."""
    return text if "://" in text else Path(text)


def add_checkpoint_options(command: Parser, title: str, otherwise: str) -> Any:
    """Add the checkpoint flags and return their group. otherwise : when a commit happens without ``--every``"""
    saving = command.add_argument_group(title)
    saving.add_argument(
        "--checkpoint", type=folder_or_uri, metavar="DIR", help="commit the state with its position to DIR, or to a URI"
    )
    saving.add_argument("--every", type=whole(1), metavar="N", help=f"after every N steps (default: {otherwise})")
    saving.add_argument(
        "--resume", action="store_true", help="continue from the last commit in DIR, or from the start if there is none"
    )
    return saving


def add_reading_options(command: argparse.ArgumentParser) -> None:
    """Add the flags for reading sources."""
    reading = command.add_argument_group("reading")
    add_row_options(reading)
    reading.add_argument(
        "--contribution-rows",
        type=whole(1),
        metavar="N",
        help="a frame is N rows: needed for Parquet without a 'step' column",
    )
    add_end_option(reading)
    reading.add_argument(
        "--patience",
        type=number("seconds, at least 0", 0, 86_400),
        default=60.0,
        metavar="S",
        help="seconds to retry while a broker, or the server of a table, is gone (default 60)",
    )
    reading.add_argument(
        "--max-message",
        type=whole(1),
        default=64,
        metavar="MB",
        help="largest message of a broker (default 64)",
    )
    reading.add_argument(
        "--as-files", action="store_true", help="read all files of a directory that is a Delta, Lance or Iceberg table"
    )


def reading_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of ``add_reading_options`` that are options of ReadOptions."""
    return {
        "contribution_rows": args.contribution_rows,
        "allow_missing_end": args.allow_missing_end,
        "patience_s": args.patience,
        "max_message": args.max_message << 20,
        "as_files": args.as_files,
    }


def add_machine_options(command: Parser) -> Any:
    """Add the flags for devices and threads, and return their group."""
    machine = command.add_argument_group("machine")
    machine.add_argument(
        "--devices",
        type=whole(1, MAX_DEVICES),
        metavar="N",
        help="devices that share the tables; on a CPU, create this many (default: all accelerators, or 1)",
    )
    machine.add_argument(
        "--threads",
        type=whole(1, MAX_THREADS),
        metavar="N",
        help="threads of the host (default: one per CPU; results do not depend on it)",
    )
    return machine


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
        "--deltas-last",
        action="store_true",
        help="with the clock when each key of a dynamic table occurred last, which tells whether it has expired",
    )
    deltas.add_argument(
        "--deltas-per",
        metavar="UNIT=N",
        help="one delta per N steps, rows or seconds, with the last value of every row that changed (default: steps=1)",
    )


def deltas_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags as arguments of ``Engine.run``. Raise UsageError for flags that exclude each other."""
    if args.deltas is None:
        for flag in ("slots", "last", "per"):
            if getattr(args, f"deltas_{flag}"):
                raise UsageError(f"--deltas-{flag}: name a file for deltas: --deltas FILE")
        return {}
    if args.deltas == "-" and args.json:
        raise UsageError("--deltas - and --json both want standard output; give --deltas a file or a pipe")
    if is_stream(args.deltas) and args.checkpoint is not None:
        raise UsageError(f"--deltas {args.deltas}: with --checkpoint deltas go into a file, which --resume continues")
    form = {"slots": _slots(args.deltas_slots), "last": args.deltas_last}
    return {"deltas": args.deltas, **form, **_per(args.deltas_per)}


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
    if unit not in DELTA_UNITS or not (0 <= value < float("inf") if unit == "seconds" else value >= 1):
        raise UsageError(f"--deltas-per {text}: expected steps=N, rows=N or seconds=N, such as steps=100")
    return {f"per_{unit}": value}


class Checked:
    """The flags of a replay on one machine. Invalid ones and missing files are reported before tables are allocated."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.columns, self.rates = columns_of(args), learning_rates_of(args)
        _, self.quarantine = quarantine.parse_on_bad_row(args.on_bad_row)
        check_sources(args.sources)
        self.config = EmbeddingConfig.load(args.config)
        check_given(self.rates, self.config.num_tags)
        ReadOptions(self.config.id_ranges, table=args.table)
        sources = open_sources(args.sources, args.allow_missing_end, args.as_files, args.patience)
        if sources:
            check_order(sources, args.merge, args.follow)
        check_checkpoint(args)
        if self.quarantine is not None and not args.resume:
            quarantine.check_new(self.quarantine)
        self.deltas = deltas_of(args)
        if self.deltas:
            form = {name: value for name, value in self.deltas.items() if name != "deltas"}
            form_of(self.config.tables, DeltaOptions(**form))
        files = (self.quarantine, file_of_deltas(args))
        for place in (args.out, args.checkpoint, args.report, *(file and file.parent for file in files)):
            if place is not None:
                check_writable(place)


def check_checkpoint(args: argparse.Namespace) -> None:
    """Raise UsageError if the checkpoint flags lack each other, or this run may not commit to DIR."""
    if args.checkpoint is None:
        for flag in ("every", "resume"):
            if getattr(args, flag):
                raise UsageError(f"--{flag}: name a checkpoint: --checkpoint DIR")
    else:
        Folder(args.checkpoint).check_place(args.resume)


def check_no_passes(args: argparse.Namespace) -> None:
    """Raise UsageError if the checkpoint to resume is that of an unfinished replay in passes."""
    if args.resume and "://" not in str(args.checkpoint):
        numbers = Folder(args.checkpoint).numbers()
        count = PassFolder(Path(args.checkpoint) / PASSES).unfinished(numbers[-1] if numbers else None)
        if count is not None:
            unfinished = f"contains an unfinished replay in passes; resume it with --passes {count}"
            raise UsageError(f"{place_text(args.checkpoint)}: {unfinished}")
