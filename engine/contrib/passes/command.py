"""``penstock passes``: each pass over the sources keeps one share of the rows in memory."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import penstock.base.interrupts as interrupts
from penstock.base.errors import InputError, StaleInputError, UsageError
from penstock.cli.command_line import Parser, add_flags, add_sources, keywords_of, make_devices
from penstock.cli.output import Output, ProgressLine, count, place_text, writing
from penstock.cli.replay_flags import Checked
from penstock.cli.replay_report import say_end, say_report, written_aside
from penstock.contrib.passes.multi_pass import MultiPass, check_seekable
from penstock.model.command_options import PassOptions, options_of
from penstock.model.options import WatchingOptions

EXAMPLE = "penstock passes tables.pbtxt log.arrows --passes 4 --checkpoint parts --every 10"


def add(command: Parser) -> None:
    add_sources(command, read_again=True)
    add_flags(command, "passes")
    # Passes read files to their end, and nothing watches them.
    command.set_defaults(follow=False, patience=0.0, **dict.fromkeys(options_of("run", WatchingOptions)))


def run(args: argparse.Namespace, out: Output) -> None:
    if args.memory is not None and args.passes != "auto":
        raise UsageError("--memory: belongs to --passes auto, which chooses how many passes fit")
    if args.checkpoint is None and args.out is None:
        raise UsageError("name a folder for the rows, with --checkpoint DIR or --out DIR")
    check_seekable(args.sources)
    checked = Checked(args)
    keywords = keywords_of(args, "passes", PassOptions)
    progress = ProgressLine()
    with _folder(args) as folder, writing(folder):
        replay = MultiPass(
            checked.config,
            args.sources,
            make_devices(args.devices),
            PassOptions(**{**keywords, "checkpoint": folder, "progress": progress}),
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
        if args.state_hash:
            report = replace(report, state_hash=tables.hash(replay.global_step))
        files = tables.write(args.out) if args.out is not None else []
    say_report(out, report)
    out.say(f"passes    {count(replay.count)}")
    say_end(out, args, report, checked.quarantine, files, [], passes=replay.count)


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
