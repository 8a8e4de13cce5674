"""``replay --distributed``: run one of several processes of a job. Only process 0 prints and writes tables."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import penstock.interrupts as interrupts
from penstock.checkpoint.store import Folder
from penstock.cli.options import set_cpu_devices, whole
from penstock.cli.output import Output
from penstock.config.id_ranges import ANY_INT64, ANY_UINT64
from penstock.engine import Engine
from penstock.errors import UsageError
from penstock.io.sources.seekable_source import names_seekable

MAX_PROCESSES = 1024
# The flags that supervise adds when it starts the processes of a job.
FLAGS = ("--distributed", "--coordinator", "--process-id", "--processes")


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the flags of a job. Its processes have the same command line, except for ``--process-id``."""
    several = command.add_argument_group("several processes of one job, all started with the same command")
    several.add_argument(
        "--distributed",
        action="store_true",
        help="run as one of N processes: process i mod N reads source i, and each row is updated by one process; "
        "without the flags below, JAX's cluster detection finds the processes",
    )
    several.add_argument("--coordinator", metavar="HOST:PORT", help="address where process 0 listens at the start")
    several.add_argument("--process-id", type=whole(0), metavar="I", help="number of this process, from 0")
    several.add_argument("--processes", type=whole(1, MAX_PROCESSES), metavar="N", help="number of processes")


@contextmanager
def joined(args: argparse.Namespace) -> Iterator[None]:
    """Join this process to its job for the duration of a command. Set ``args.peers``, to None without a job."""
    args.peers = None
    check_flags(args)
    if not args.distributed:
        yield
        return
    check_tables(args)
    set_cpu_devices(args.devices)
    from penstock.distributed.peers import Peers
    from penstock.distributed.rendezvous import join

    with Peers(*join(args.coordinator, args.process_id, args.processes)) as args.peers:
        # The first signal ends all processes of the job after the same frame; a second ends this process immediately.
        interrupts.leave_to_caller(at_once=True)
        args.looks_closer = bool(args.ui or args.report)
        if not is_first(args):  # only process 0 serves pages, metrics and reports
            args.ui = args.report = args.metrics = args.metrics_file = None
        yield


def check_flags(args: argparse.Namespace) -> None:
    """Raise UsageError if the flags exclude or lack each other, or a value is invalid."""
    values = {flag: getattr(args, flag[2:].replace("-", "_")) for flag in FLAGS[1:]}
    missing = [flag for flag, value in values.items() if value is None]
    if not args.distributed:
        if len(missing) < len(values):
            raise UsageError(f"{next(flag for flag in values if flag not in missing)}: needs --distributed")
        return
    if missing and len(missing) < len(values):
        raise UsageError(f"--distributed: also give {missing[0]}, or none of {', '.join(values)}")
    if not missing and args.process_id >= args.processes:
        raise UsageError(
            f"--process-id {args.process_id}: of {args.processes} processes the last is {args.processes - 1}"
        )
    if not missing and not re.fullmatch(r".+:\d{1,5}", args.coordinator):
        raise UsageError(f"--coordinator {args.coordinator}: expected HOST:PORT, such as 127.0.0.1:7000")
    if any(map(names_seekable, args.sources)):
        raise UsageError("--distributed: one process reads topics and tables with versions; leave the flag out")
    if args.merge == "step":
        raise UsageError("--merge step: several processes take a frame of each source in turn (--merge round)")


def check_tables(args: argparse.Namespace) -> None:
    """Raise UsageError for a dynamic table, before the processes wait for each other."""
    from penstock.config.embedding import EmbeddingConfig

    for name, (size, _) in EmbeddingConfig.load(args.config).id_ranges.items():
        if size in (ANY_INT64, ANY_UINT64):
            raise UsageError(f"--distributed: table '{name}' is dynamic, which several processes cannot hold; run one")


def is_first(args: argparse.Namespace) -> bool:
    """Return whether this process prints and writes the files that a job has only once."""
    return args.peers is None or args.peers.rank == 0


def own_sources(args: argparse.Namespace) -> Sequence[str]:
    """Return the sources that this process reads."""
    sources: Sequence[str] = args.sources
    return sources if args.peers is None else sources[args.peers.rank :: args.peers.count]


def output_of(args: argparse.Namespace) -> Output:
    return Output(args.json, aside=args.deltas == "-") if is_first(args) else _Silent(args.json)


def members_of(peers: Any) -> tuple[Callable[..., Engine], Callable[..., Engine]]:
    """Return the functions that create and restore this process's engine."""
    from penstock.distributed.member import Member

    return partial(Member, peers), partial(Member.restored, peers)


def newest_commit(folder: Path) -> int:
    """Return the number of the last commit in ``folder``, 0 if there is none."""
    return max(Folder(folder).numbers(), default=0)


class _Silent(Output):
    """The output of the other processes: process 0 prints for all of them."""

    def say(self, text: str = "") -> None:
        pass

    def result(self, values: Any) -> None:
        pass
