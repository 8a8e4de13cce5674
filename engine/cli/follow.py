"""``penstock follow``: keep a store, a table or a function up to date with the deltas of a service."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict

import penstock.base.interrupts as interrupts
from penstock.base.errors import listed
from penstock.base.flag_values import local_path, number
from penstock.cli.command_line import Parser, add_flag
from penstock.cli.output import Output, count, duration, several
from penstock.cli.status import TIMEOUT_S, client_of
from penstock.model.row_encodings import ENCODINGS, FLOAT32
from penstock.serving.followers.follower import Follower, Progress
from penstock.serving.followers.target_kinds import open_target, target_forms, target_kind, target_kinds

EXAMPLE = "penstock follow grpc://127.0.0.1:8815 --into redis://127.0.0.1:6379/0"
DAY_S = 86_400.0
# With --once: the command that waits for its end has to learn that the service is gone.
ONCE_S = 60.0


def add(command: Parser) -> None:
    command.add_argument("address", metavar="ADDRESS", help="of the service: grpc://HOST:PORT or grpc+tls://HOST:PORT")
    command.add_argument(
        "--into",
        required=True,
        metavar="TARGET",
        help=f"{target_forms()} (in Python)",
    )
    command.add_argument(
        "--state",
        type=local_path,
        metavar="FILE",
        help="of a function: the number of the last delta that it returned from",
    )
    command.add_argument("--once", action="store_true", help="end when all that is published is applied")
    command.add_argument(
        "--interval",
        type=number("seconds, at least 0.01", 0.01, DAY_S),
        metavar="S",
        help=f"seconds between two transactions, each with all changes since the last ({_default_intervals()})",
    )
    command.add_argument(
        "--patience",
        type=number("seconds, at least 0", 0, DAY_S),
        metavar="S",
        help="seconds to retry while the service or the target is gone or full (default: for ever; with --once 60)",
    )
    command.add_argument(
        "--rows", choices=ENCODINGS, default=FLOAT32.name, help="how the target stores rows (default: float32)"
    )
    command.add_argument("--replace", action="store_true", help="overwrite a target with the tables of another job")
    for name in ("log_level", "log_format"):
        add_flag(command, name)


def _default_intervals() -> str:
    names: dict[float, list[str]] = {kind.interval_s: [] for kind in target_kinds()}
    for kind in target_kinds():
        names[kind.interval_s].append(kind.title)
    (shortest, _), *others = names.items()
    return "; ".join([f"default {shortest:g}", *(f"{each:g} for {listed(names[each])}" for each, _ in others)])


def run(args: argparse.Namespace, out: Output) -> None:
    target = open_target(args.into, args.state)
    patience_s = args.patience if args.patience is not None else ONCE_S if args.once else math.inf
    with client_of(args.address, TIMEOUT_S, patience_s) as client:
        interval_s = target_kind(args.into).interval_s if args.interval is None else args.interval
        follower = Follower(client, target, patience_s, interval_s, args.replace, rows=args.rows)

        def say_start() -> None:
            step = count(follower.progress.step or 0)
            out.say(f"following {client.connection.uri} into {target.name}, step {step}", flush=True)

        try:
            follower.run(args.once, say_start)
        except KeyboardInterrupt:
            if not interrupts.is_terminated():
                step = follower.progress.step
                has = "it holds nothing, or was not read yet"
                if step is not None:
                    has = f"it has the rows of step {count(step)}"
                raise KeyboardInterrupt(f"interrupted; {target.name}: {has}") from None
        finally:
            target.close()
    say_end(follower.progress, out)


def say_end(progress: Progress, out: Output) -> None:
    applied = f"{several(progress.deltas, 'delta')} in {several(progress.transactions, 'transaction')}"
    out.say(f"applied   {applied}: {several(progress.rows, 'row')}, {count(progress.removed)} removed")
    if progress.full_copies:
        out.say(f"taken     all tables, {several(progress.full_copies, 'time')}")
    if progress.set_back:
        out.say(f"set back  {several(progress.set_back, 'time')}: the target held an earlier state")
    out.say(f"step      {count(progress.step or 0)}")
    age = progress.age_s
    if age is not None:
        out.say(f"age       {duration(age)} since the time of the newest frame")
    version = None if progress.version is None else str(progress.version)
    out.result({"step": progress.step, **asdict(progress), "age_s": age, "version": version})
