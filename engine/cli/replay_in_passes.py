"""``penstock replay --passes``: each pass over the sources keeps one share of the rows in memory."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import penstock.interrupts as interrupts
from penstock.cli.terminal.engine_options import Checked
from penstock.cli.terminal.options import make_devices
from penstock.cli.terminal.output import Output, ProgressLine, count, place_text, writing
from penstock.cli.terminal.replay_report import say_end, say_report, written_aside
from penstock.deltas import DeltaOptions
from penstock.errors import InputError, StaleInputError, UsageError
from penstock.passes.multi_pass import MultiPass, PassOptions, check_seekable
from penstock.run import RunOptions

# What watches one engine, or does not end.
_WITHOUT = ("ray", "follow", "ui", "metrics", "metrics_file", "report")
# Flags with the names of PassOptions; of the others, those of every pass are read as RunOptions.
_OWN = ["memory", "resume", "every", "num_required", "reduction", "seed", "threads", "init", "on_bad_row", "flush"]
_OWN += ["limit", "max_stale", "deltas"]


def replay_in_passes(args: argparse.Namespace) -> int:
    """Run the replay of ``--passes``."""
    for flag in _WITHOUT:
        if getattr(args, flag):
            raise UsageError(f"--{flag.replace('_', '-')}: not with --passes")
    if args.memory is not None and args.passes is not None:
        raise UsageError("--memory: belongs to --passes auto, which chooses how many passes fit")
    if args.checkpoint is None and args.out is None:
        raise UsageError("--passes: name a folder for the rows, with --checkpoint DIR or --out DIR")
    check_seekable(args.sources)
    checked = Checked(args)
    form = {name: value for name, value in checked.deltas.items() if name != "deltas"}
    if "per_rows" in form or "per_seconds" in form:
        raise UsageError("--deltas-per: with --passes, expected steps=N")
    names = {field.name for field in fields(RunOptions) if field.name in args} - {*_OWN, "checkpoint"}
    reading = {name: getattr(args, name) for name in names}
    given = {**reading, "columns": checked.columns, "learning_rates": checked.rates}
    given["max_message"] = args.max_message << 20
    progress, out = ProgressLine(), Output(args.json, aside=args.deltas == "-")
    with _folder(args) as folder, writing(folder):
        replay = MultiPass(
            checked.config,
            args.sources,
            make_devices(args.devices),
            PassOptions(
                **{name: getattr(args, name) for name in _OWN},
                passes=args.passes,
                checkpoint=folder,
                run=given,
                form=DeltaOptions(**form, numbered=True),
                progress=progress,
            ),
        )
        kept = written_aside(args, checked.quarantine)
        try:
            report = replay.run()
            interrupts.check()
        except KeyboardInterrupt:
            stays = f"its passes are in {place_text(folder)} (--resume continues)"
            done = "; ".join(
                [stays if args.checkpoint else "nothing was written", *kept[: checked.quarantine is not None]]
            )
            raise KeyboardInterrupt(f"interrupted in a replay of {replay.count} passes; {done}") from None
        except StaleInputError as error:
            done = f"committed to {place_text(folder)} at step {replay.global_step}"
            lost = ["--out was not written"] if args.out else []
            raise InputError("; ".join([str(error), *lost, *([done] if args.checkpoint else []), *kept])) from None
        finally:
            progress.clear()
        tables = replay.tables()
        if not args.no_hash:
            report = replace(report, state_hash=tables.hash(replay.global_step))
        files = tables.write(args.out) if args.out is not None else []
    say_report(out, report)
    out.say(f"passes    {count(replay.count)}")
    say_end(out, args, report, checked.quarantine, files, [], passes=replay.count)
    return 0


@contextmanager
def _folder(args: argparse.Namespace) -> Iterator[Path]:
    """Yield the folder of the commit: that of ``--checkpoint``, else one next to ``--out`` that does not outlive it."""
    if args.checkpoint is not None:
        yield args.checkpoint
        return
    folder: Path = args.out.absolute().with_name(f".{args.out.name}.passes")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
