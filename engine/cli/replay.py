"""``penstock replay``: apply a gradient log to tables."""

from __future__ import annotations

import argparse
import logging
import os
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import penstock.interrupts as interrupts
from penstock.checkpoint.store import Folder
from penstock.cli.pages.monitoring import Watching, add_watching_options
from penstock.cli.terminal.engine_options import (
    Checked,
    add_checkpoint_options,
    add_delta_options,
    add_machine_options,
    add_reading_options,
    add_replay_gate_options,
    add_table_options,
    check_checkpoint,
    check_no_passes,
    deltas_of,
    file_of_deltas,
)
from penstock.cli.terminal.options import (
    add_command,
    columns_of,
    learning_rates_of,
    make_devices,
    whole,
)
from penstock.cli.terminal.output import Output, ProgressLine, check_writable, place_text, writing
from penstock.cli.terminal.replay_report import say_end, say_report, written_aside
from penstock.config.embedding import EmbeddingConfig
from penstock.engine import Engine
from penstock.errors import InputError, StaleInputError, UsageError
from penstock.io.sources.seekable_source import names_seekable
from penstock.passes.memory import MOST_PASSES
from penstock.run import RunOptions

# Of ``--passes``: the flag is not given. None is "auto".
ONE_RUN = 0


def number_of_passes(text: str) -> int | None:
    """Parse ``--passes``."""
    return None if text == "auto" else whole(1, MOST_PASSES)(text)


def add(commands: Any) -> None:
    command = add_command(
        commands,
        "replay",
        run,
        "penstock replay tables.pbtxt monday.arrows tuesday.arrows --num-required 4 --out tables",
    )
    command.add_argument("config", metavar="CONFIG", help="TPUEmbeddingConfiguration or EngineConfig, text or binary")
    command.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="+",
        help="Arrow IPC stream or file, Parquet file, directory, URI, or - for standard input; read in this order. "
        "Or kafka://BROKER:PORT/TOPIC, nats://HOST:PORT/STREAM, delta:URI, lance:URI, iceberg:CATALOG/NAMESPACE.TABLE",
    )
    add_table_options(command)
    add_reading_options(command)
    command.add_argument(
        "--follow", action="store_true", help="read topics and tables with versions on, until a signal"
    )
    add_replay_gate_options(command)
    add_checkpoint_options(command, "checkpoint", "at the end only")
    add_delta_options(command)
    add_watching_options(command)
    machine = add_machine_options(command)
    machine.add_argument("--no-hash", action="store_true", help="do not compute the state hash")
    passes = command.add_argument_group("tables larger than memory (docs/placement.md)")
    passes.add_argument(
        "--passes",
        type=number_of_passes,
        default=ONE_RUN,
        metavar="K|auto",
        help="read the sources K times, each time for one share of the rows; auto: as often as memory requires",
    )
    passes.add_argument(
        "--memory",
        type=whole(1),
        metavar="BYTES",
        help="of --passes auto (default: what limits and other processes leave)",
    )
    cluster = command.add_argument_group("a job on a Ray cluster (docs/ray.md)")
    cluster.add_argument("--ray", metavar="ADDRESS", help="of the cluster; auto: this machine's; local: start one here")
    cluster.add_argument("--shares", type=whole(1), metavar="N", help="owners of the rows, each with a share")
    cluster.add_argument("--readers", type=whole(1), metavar="M", help="readers of the sources (default: N)")
    cluster.add_argument("--accelerator", choices=("gpu", "tpu"), help="give each share one GPU or TPU chip to itself")


def run(args: argparse.Namespace) -> int:
    if args.passes is not ONE_RUN:
        from penstock.cli.replay_in_passes import replay_in_passes

        return replay_in_passes(args)
    if args.memory is not None:
        raise UsageError("--memory: belongs to --passes auto")
    if args.ray is not None:
        return replay_on_ray(args)
    for flag in ("shares", "readers", "accelerator"):
        if getattr(args, flag) is not None:
            raise UsageError(f"--{flag}: belongs to a job on a cluster: --ray ADDRESS")
    return replay(args)


# Flags of a single process, or of what a cluster has in another form.
_NOT_ON_RAY = ("devices", "report", "follow", "as_files")


def replay_on_ray(args: argparse.Namespace) -> int:
    """Run the job of ``--ray``; the driver is this process."""
    from penstock.ray.job import NOT_OF_JOBS, Job

    for flag in _NOT_ON_RAY:
        if getattr(args, flag):
            raise UsageError(f"--{flag.replace('_', '-')}: not with --ray")
    if args.shares is None:
        raise UsageError("--ray: give the number of shares, --shares N")
    if args.merge == "step" or "-" in args.sources:
        raise UsageError("--ray: takes a frame of each source in turn (--merge round), from files and URIs")
    for source in args.sources:
        if names_seekable(source):
            scheme = source.partition(":")[0]
            raise UsageError(f"--ray: {scheme}: one process reads topics and tables with versions, without --ray")
    deltas = deltas_of(args)
    if "per_rows" in deltas or "per_seconds" in deltas:
        raise UsageError("--deltas-per: with --ray, expected steps=N")
    check_checkpoint(args)
    if (file := file_of_deltas(args)) is not None:
        check_writable(file.parent)
    given = {field.name: getattr(args, field.name) for field in fields(RunOptions) if field.name in args}
    options = {name: value for name, value in given.items() if name not in NOT_OF_JOBS}
    out, place = Output(args.json, aside=args.deltas == "-"), args.checkpoint or args.out or args.deltas
    job = Job(
        EmbeddingConfig.load(args.config),
        [source if "://" in source else os.path.abspath(source) for source in args.sources],
        **{**options, "columns": columns_of(args), "learning_rates": learning_rates_of(args), **deltas},
        **{name: getattr(args, name) for name in ("shares", "readers", "num_required", "reduction", "seed")},
        init=None if args.init is None else os.path.abspath(args.init),
        address=args.ray,
        accelerator=args.accelerator,
        threads=args.threads or 1,
        out=args.out,
        state_hash=not args.no_hash,
    )
    watching = Watching(args, job)
    job.progress = lambda *_: watching.tick()
    failures = logging.StreamHandler()  # a line per failure of an actor or node, to standard error
    logging.getLogger("penstock").addHandler(failures)
    try:
        with watching, writing(place) if place else nullcontext():
            report = job.run()
    finally:
        logging.getLogger("penstock").removeHandler(failures)
    say_report(out, report)
    out.result(report.to_dict())
    return 0


def replay(args: argparse.Namespace) -> int:
    checked = Checked(args)
    check_no_passes(args)
    quarantine, deltas = checked.quarantine, checked.deltas
    # Most flags have the names of the arguments that they are.
    options = {field.name: getattr(args, field.name) for field in fields(RunOptions) if field.name in args}
    options["max_message"] = args.max_message << 20
    out = Output(args.json, aside=args.deltas == "-")
    engine = make_engine(args, checked.config)
    watching = Watching(args, engine)
    progress = ProgressLine()  # created here because its clock starts now
    try:
        place = args.checkpoint or args.deltas
        with watching, writing(place) if place else nullcontext():
            report = engine.run(
                args.sources,
                columns=checked.columns,
                learning_rates=checked.rates,
                progress=watching.then_tick(progress),
                **options,
                **deltas,
            )
        interrupts.check()  # hashing and writing large tables takes long
    except KeyboardInterrupt:
        kept = (
            f"committed to {place_text(args.checkpoint)} (--resume continues)"
            if args.checkpoint
            else "nothing was written"
        )
        kept = "; ".join([kept, *written_aside(args, quarantine)])
        raise KeyboardInterrupt(f"interrupted after step {engine.global_step}; {kept}") from None
    except StaleInputError as error:
        step = f"committed to {place_text(args.checkpoint)} at step {engine.global_step}"
        kept = step if args.checkpoint else "nothing was committed"
        kept = "; ".join([*(["--out was not written"] if args.out else []), kept, *written_aside(args, quarantine)])
        raise InputError(f"{error}; {kept}") from None
    finally:
        progress.clear()
    if not args.no_hash:
        report = replace(report, state_hash=engine.state_hash())
    files: list[Path] = []
    if args.out is not None:
        with writing(args.out):
            files = engine.write_tables(args.out)
    shown = watching.report(report)
    say_report(out, report)
    say_end(out, args, report, quarantine, files, shown)
    return 0


def make_engine(args: argparse.Namespace, config: EmbeddingConfig) -> Engine:
    """Return an engine restored from the last commit with --resume, else a new one, from --seed and --init."""
    mesh = make_devices(args.devices)
    gate = {"num_required": args.num_required, "reduction": args.reduction}
    if args.resume and Folder(args.checkpoint).numbers():
        return Engine.restore(args.checkpoint, mesh, args.threads, config=config, **gate)
    engine = Engine(config, mesh, seed=args.seed, threads=args.threads, **gate)
    if args.init is not None:
        engine.read_tables(args.init)
    return engine
