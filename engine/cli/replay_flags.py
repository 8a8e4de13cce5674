"""The flags of a replay, checked together, before any table is allocated."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

from penstock.api.deltas import form_of
from penstock.base.errors import UsageError
from penstock.base.filesystem.append_file import check_new
from penstock.base.integrations import PASSES_OF_ROWS
from penstock.base.validation import INT64_MAX
from penstock.checkpoint.store import PASSES, Folder
from penstock.checkpoint.versions import check_no_version
from penstock.cli.command_line import check_reading
from penstock.cli.output import check_writable, place_text
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.delta_sink import is_stream
from penstock.io.sources.opening import check_not_read, open_sources
from penstock.io.sources.seekable_source import check_order
from penstock.io.table_files import table_path
from penstock.model.command_options import options_of
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.learning_rates import check_given
from penstock.model.options import DeltaOptions, TableChangeOptions


def check_deltas(args: argparse.Namespace) -> None:
    """Raise UsageError for flags of deltas that exclude each other."""
    if args.deltas is None:
        for name, option in options_of("run", DeltaOptions).items():
            if getattr(args, name, option.default) != option.default:
                raise UsageError(f"{option.flag_name}: name a file for deltas: --deltas FILE")
        return
    if args.deltas == "-" and args.json:
        raise UsageError("--deltas - and --json both want standard output; give --deltas a file or a pipe")
    if is_stream(args.deltas) and args.checkpoint is not None:
        raise UsageError(
            f"--deltas {place_text(args.deltas)}: with --checkpoint deltas go into a file, which --resume continues"
        )


def file_of_deltas(args: argparse.Namespace) -> Path | None:
    """Return the file that ``--deltas`` names; None for a stream. Raise UsageError if it exists, without --resume."""
    if args.deltas is None or is_stream(args.deltas):
        return None
    file = Path(args.deltas)
    if not args.resume:
        check_new(file)
    return file


class Checked:
    """The flags of a replay on one machine. Invalid ones and missing files are reported before tables are allocated."""

    def __init__(self, args: argparse.Namespace) -> None:
        _, self.quarantine = check_reading(args)
        self.config = EmbeddingConfig.load(args.config)
        check_given(args.learning_rates, self.config.num_tags)
        ReadOptions.of_config(self.config, {"table": args.table})
        sources = open_sources(args.sources, args.allow_missing_end, args.as_files, args.patience)
        if sources:
            check_order(sources, args.merge, args.follow)
        check_checkpoint(args)
        if self.quarantine is not None and not args.resume:
            check_new(self.quarantine)
        check_deltas(args)
        if args.deltas is not None:
            form_of(self.config.at_step(INT64_MAX).tables, DeltaOptions.among(vars(args)))
        tables = [] if args.out is None else [table_path(args.out, name) for name in self.config.table_names]
        check_not_read(args.sources, [*tables, *([] if args.metrics_file is None else [args.metrics_file])])
        files = (self.quarantine, file_of_deltas(args))
        for place in (args.out, args.checkpoint, args.report, *(file and file.parent for file in files)):
            check_writable(place)


def check_checkpoint(args: argparse.Namespace) -> None:
    """Raise UsageError if the checkpoint flags lack each other, or this run may not commit to DIR."""
    if args.checkpoint is None:
        for flag in ("every", "resume"):
            if getattr(args, flag):
                raise UsageError(f"--{flag}: name a checkpoint: --checkpoint DIR")
    if not args.resume:
        for name, option in options_of("restore", TableChangeOptions).items():
            if getattr(args, name, None) and not (name == "new_tables" and args.init is not None):
                raise UsageError(f"{option.flag_name}: the tables of a commit change when it is resumed: add --resume")
    if args.checkpoint is not None:
        check_no_version(args.checkpoint)
        folder = Folder(args.checkpoint)
        folder.check_place(args.resume)
        folder.check_unlocked()


def check_no_passes(args: argparse.Namespace) -> None:
    """Raise UsageError if the checkpoint to resume is that of an unfinished replay in passes."""
    if args.resume and "://" not in str(args.checkpoint):
        numbers = Folder(args.checkpoint).numbers()
        passes = import_module(PASSES_OF_ROWS).PassFolder(Path(args.checkpoint) / PASSES)
        count = passes.unfinished(numbers[-1] if numbers else None)
        if count is not None:
            unfinished = f"contains an unfinished replay in passes; resume it with penstock passes --passes {count}"
            raise UsageError(f"{place_text(args.checkpoint)}: {unfinished}")
