"""``replay --distributed``: one of several processes that replay together. Only process 0 prints and writes tables."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import penstock.interrupts as interrupts
from penstock.checkpoint.store import Folder
from penstock.cli.options import set_cpu_devices, whole
from penstock.cli.output import Output
from penstock.config.embedding import EmbeddingConfig
from penstock.engine import Engine
from penstock.errors import UsageError

MAX_PROCESSES = 1024
# What a job's own flags are called, for whoever starts its processes (supervise).
FLAGS = ("--distributed", "--coordinator", "--process-id", "--processes")


def add_options(command: argparse.ArgumentParser) -> None:
    """Every process of a job gets the same command line, but for its number."""
    several = command.add_argument_group("several processes, each of which is given the same command")
    several.add_argument(
        "--distributed",
        action="store_true",
        help="be one of several processes: source i is read by process i mod N, rows go to their owners; without the "
        "flags below as JAX's cluster detection says",
    )
    several.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens while all find each other")
    several.add_argument("--process-id", type=whole(0), metavar="I", help="which one this is, from 0")
    several.add_argument("--processes", type=whole(1, MAX_PROCESSES), metavar="N", help="how many there are")


@contextmanager
def joined(args: argparse.Namespace) -> Iterator[None]:
    """Around a command: this process is part of its job. Sets ``args.peers``: the job, or None where there is none."""
    args.peers = None
    check_flags(args)
    if not args.distributed:
        yield
        return
    set_cpu_devices(args.devices)
    from penstock.bridge.rendezvous import join
    from penstock.distributed.peers import Peers

    with Peers(*join(args.coordinator, args.process_id, args.processes)) as args.peers:
        # A signal ends the whole job after the same frame everywhere; a second one this process, at once.
        interrupts.leave_to_caller(at_once=True)
        args.looks_closer = bool(args.ui or args.report)
        if not is_first(args):  # what is shown of a job is shown by process 0
            args.ui = args.report = args.metrics = args.metrics_file = None
        yield


def check_flags(args: argparse.Namespace) -> None:
    """Raise UsageError where the flags do not go together."""
    given = {flag: getattr(args, flag[2:].replace("-", "_")) for flag in FLAGS[1:]}
    missing = [flag for flag, value in given.items() if value is None]
    if not args.distributed:
        if len(missing) < len(given):
            raise UsageError(f"{next(flag for flag in given if flag not in missing)}: needs --distributed")
        return
    if missing and len(missing) < len(given):
        raise UsageError(f"--distributed: also give {missing[0]}, or none of {', '.join(given)}")
    if not missing and args.process_id >= args.processes:
        raise UsageError(
            f"--process-id {args.process_id}: of {args.processes} processes the last is {args.processes - 1}"
        )
    if not missing and not re.fullmatch(r".+:\d{1,5}", args.coordinator):
        raise UsageError(f"--coordinator {args.coordinator}: expected HOST:PORT, such as 127.0.0.1:7000")
    if args.merge == "step":
        raise UsageError("--merge step: several processes take a frame of each source in turn (--merge round)")


def is_first(args: argparse.Namespace) -> bool:
    """Whether this process is the one that speaks and writes what is one file."""
    return args.peers is None or args.peers.rank == 0


def own_sources(args: argparse.Namespace) -> Sequence[str]:
    """The sources that this process reads."""
    sources: Sequence[str] = args.sources
    return sources if args.peers is None else sources[args.peers.rank :: args.peers.count]


def output_of(args: argparse.Namespace) -> Output:
    return Output(args.json, aside=args.deltas == "-") if is_first(args) else _Silent(args.json)


def member_of(args: argparse.Namespace, config: EmbeddingConfig, mesh: Any) -> Engine:
    """This process's engine, from the last commit or anew."""
    from penstock.distributed.member import Member

    gate = {"num_required": args.num_required, "reduction": args.reduction}
    if args.resume and Folder(args.checkpoint).numbers():
        engine = Member.restored(args.peers, args.checkpoint, mesh, args.threads, config=config, **gate)
    else:
        engine = Member(args.peers, config, mesh, seed=args.seed, threads=args.threads, **gate)
        if args.init is not None:
            engine.read_tables(args.init)
    if args.looks_closer:
        engine.watch.look_closer()
    return engine


def newest_commit(folder: Path) -> int:
    """The number of the last commit there; 0 where there is none."""
    return max(Folder(folder).numbers(), default=0)


class _Silent(Output):
    """Process 0 says it all."""

    def say(self, text: str = "") -> None:
        pass

    def result(self, values: Any) -> None:
        pass
