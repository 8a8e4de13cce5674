"""``penstock replay``: apply a gradient log to tables."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import penstock.base.interrupts as interrupts
from penstock.api.engine import Engine
from penstock.base.errors import InputError, StaleInputError
from penstock.checkpoint.store import Folder
from penstock.checkpoint.table_changes import TableChanges
from penstock.cli.command_line import (
    Parser,
    add_flags,
    add_sources,
    keywords_of,
    make_devices,
)
from penstock.cli.output import Output, ProgressLine, place_text, writing
from penstock.cli.replay_flags import Checked, check_no_passes
from penstock.cli.replay_report import say_end, say_report, written_aside
from penstock.cli.watching import check_library, watching
from penstock.model.command_options import RunOptions
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.options import TableChangeOptions
from penstock.rows.shared.folder import SharedFolder

EXAMPLE = "penstock replay tables.pbtxt monday.arrows tuesday.arrows --num-required 4 --out tables"


def add(command: Parser) -> None:
    add_sources(command)
    add_flags(command, "run")


def run(args: argparse.Namespace, out: Output) -> None:
    check_library(args)
    checked = Checked(args)
    check_no_passes(args)
    quarantine = checked.quarantine
    keywords = keywords_of(args, "run", RunOptions)
    engine = make_engine(args, checked.config)
    if engine.core.turns is not None:
        engine.core.turns.most_bytes = args.queued_memory
    if engine.is_shared:
        engine.publish()
    watched = watching(args, engine)
    progress = ProgressLine(watched.tick)  # created here because its clock starts now
    try:
        place = args.checkpoint or args.deltas
        with watched, writing(place) if place else nullcontext():
            report = engine.run(args.sources, progress=progress, **keywords)
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
    gate = {name: getattr(args, name) for name in ("num_required", "workers", "max_staleness", "reduction")}
    changes = keywords_of(args, "restore", TableChangeOptions)
    folder = None if args.shared is None else SharedFolder(args.shared)
    if args.resume and Folder(args.checkpoint).numbers():
        return Engine.restore(args.checkpoint, mesh, args.threads, config=config, shared=folder, **gate, **changes)
    if args.resume:
        TableChanges(**changes).check_commit(place_text(args.checkpoint))
    engine = Engine(config, mesh, seed=args.seed, threads=args.threads, shared=folder, **gate)
    if args.init is not None:
        engine.read_tables(args.init, args.new_tables, learning_rates=args.learning_rates)
    return engine
