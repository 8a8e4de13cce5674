"""``penstock replay``: apply a gradient log to tables."""

from __future__ import annotations

import argparse
import logging
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import penstock.interrupts as interrupts
from penstock.checkpoint.store import Folder
from penstock.checkpoint.table_changes import TableChanges
from penstock.cli.command_line import (
    Parser,
    add_flags,
    check_mode,
    keywords_of,
    make_devices,
    pairs_of,
)
from penstock.cli.output import Output, ProgressLine, check_writable, place_text, writing
from penstock.cli.replay_flags import Checked, check_checkpoint, check_no_passes, deltas_of, file_of_deltas
from penstock.cli.replay_report import say_end, say_report, written_aside
from penstock.cli.watching import check_library, watching
from penstock.config.embedding import EmbeddingConfig
from penstock.engine import Engine
from penstock.errors import InputError, StaleInputError, UsageError
from penstock.io.registry import either
from penstock.io.sources.source_kinds import source_kind, source_kinds
from penstock.options import JOB_CONCERNS, SOURCE, TableChangeKeywords
from penstock.shared.folder import SharedFolder

EXAMPLE = "penstock replay tables.pbtxt monday.arrows tuesday.arrows --num-required 4 --out tables"


def add(command: Parser) -> None:
    command.add_argument("config", metavar="CONFIG", help="TPUEmbeddingConfiguration or EngineConfig, text or binary")
    command.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="+",
        help="Arrow IPC stream or file, Parquet file, directory, URI, or - for standard input; read in this order. "
        f"Or {either(kind.form for kind in source_kinds())}",
    )
    add_flags(command, "run", "job", "passes")


def run(args: argparse.Namespace, out: Output) -> None:
    if args.passes is not None:
        from penstock.cli.replay_in_passes import replay_in_passes

        replay_in_passes(args, out)
    elif args.address is not None:
        replay_on_ray(args, out)
    else:
        replay(args, out)


def replay_on_ray(args: argparse.Namespace, out: Output) -> None:
    """Run the job of ``--ray``; the driver is this process."""
    from penstock.shares.ray.job import Job

    check_mode(args, "job", allowed={"merge"})
    check_library(args)
    if args.shares is None:
        raise UsageError("--ray: give the number of shares, --shares N")
    if args.merge == "step" or "-" in args.sources:
        raise UsageError("--ray: takes a frame of each source in turn (--merge round), from files and URIs")
    for source in args.sources:
        if (kind := source_kind(source)) is not None and kind.grows:
            scheme = source.partition(":")[0]
            raise UsageError(f"--ray: {scheme}: one process reads topics and tables with versions, without --ray")
    deltas = deltas_of(args, "job")
    check_checkpoint(args)
    if (file := file_of_deltas(args)) is not None:
        check_writable(file.parent)
    place = args.checkpoint or args.out or args.deltas
    keywords = keywords_of(args, "job", *JOB_CONCERNS) | {
        "init": None if args.init is None else os.path.abspath(args.init),
        "threads": args.threads or 1,
    }
    job = Job(
        EmbeddingConfig.load(args.config),
        [source if "://" in source else os.path.abspath(source) for source in args.sources],
        **keywords | deltas,
    )
    watched = watching(args, job)
    job.progress = lambda *_: watched.tick()
    failures = logging.StreamHandler()  # a line per failure of an actor or node, to standard error
    logging.getLogger("penstock").addHandler(failures)
    try:
        with watched, writing(place) if place else nullcontext():
            report = job.run()
    finally:
        logging.getLogger("penstock").removeHandler(failures)
    say_report(out, report)
    out.result(report.to_dict())


def replay(args: argparse.Namespace, out: Output) -> None:
    checked = Checked(args, "run")
    check_no_passes(args)
    quarantine = checked.quarantine
    keywords = keywords_of(args, "run", *SOURCE) | checked.deltas
    engine = make_engine(args, checked.config)
    if engine.is_shared:
        engine.publish()
    watched = watching(args, engine)
    progress = ProgressLine()  # created here because its clock starts now
    try:
        place = args.checkpoint or args.deltas
        with watched, writing(place) if place else nullcontext():
            report = engine.run(args.sources, progress=watched.then_tick(progress), **keywords)
        interrupts.check()  # hashing and writing large tables takes long
    except KeyboardInterrupt:
        kept = "nothing was written"
        if args.checkpoint:
            kept = f"committed to {place_text(args.checkpoint)} (--resume continues)"
        kept = "; ".join([kept, *written_aside(args, quarantine)])
        raise KeyboardInterrupt(f"interrupted after step {engine.global_step}; {kept}") from None
    except StaleInputError as error:
        step = f"committed to {place_text(args.checkpoint)} at step {engine.global_step}"
        kept = step if args.checkpoint else "nothing was committed"
        kept = "; ".join([*(["--out was not written"] if args.out else []), kept, *written_aside(args, quarantine)])
        raise InputError(f"{error}; {kept}") from None
    finally:
        progress.clear()
    if args.state_hash:
        report = replace(report, state_hash=engine.state_hash())
    files: list[Path] = []
    if args.out is not None:
        with writing(args.out):
            files = engine.write_tables(args.out)
    shown = watched.report(report, engine)
    say_report(out, report)
    say_end(out, args, report, quarantine, files, shown)


def make_engine(args: argparse.Namespace, config: EmbeddingConfig) -> Engine:
    """Return an engine restored from the last commit with --resume, else a new one, from --seed and --init.

    ``Engine.publish`` shows the rows of --shared.
    """
    mesh = make_devices(args.devices)
    gate = {"num_required": args.num_required, "reduction": args.reduction}
    changes = keywords_of(args, "restore", TableChangeKeywords)
    folder = None if args.shared is None else SharedFolder(args.shared)
    if args.resume and Folder(args.checkpoint).numbers():
        return Engine.restore(args.checkpoint, mesh, args.threads, config=config, shared=folder, **gate, **changes)
    if args.resume:
        TableChanges(**changes).check_commit(place_text(args.checkpoint))
    engine = Engine(config, mesh, seed=args.seed, threads=args.threads, shared=folder, **gate)
    if args.init is not None:
        engine.read_tables(args.init, args.new_tables, learning_rates=pairs_of(args, "learning_rates"))
    return engine
