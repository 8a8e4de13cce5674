"""``penstock job``: replay logs on a Ray cluster; the driver is this process."""

from __future__ import annotations

import argparse
import logging
import os
from contextlib import nullcontext

from penstock.base.errors import UsageError
from penstock.cli.command_line import Parser, add_flags, add_sources, keywords_of
from penstock.cli.output import Output, check_writable, writing
from penstock.cli.replay_flags import check_checkpoint, check_deltas, file_of_deltas
from penstock.cli.replay_report import say_report
from penstock.cli.watching import check_library, watching
from penstock.contrib.ray.job import Job
from penstock.io.sources.source_kinds import source_kind
from penstock.model.command_options import JobOptions
from penstock.model.config.embedding import EmbeddingConfig

EXAMPLE = "penstock job tables.pbtxt a.arrows b.arrows --ray auto --shares 8 --num-required 2 --checkpoint state"


def add(command: Parser) -> None:
    add_sources(command, read_again=True)
    add_flags(command, "job")
    command.set_defaults(report=None)  # of one engine


def run(args: argparse.Namespace, out: Output) -> None:
    check_library(args)
    if args.shares is None:
        raise UsageError("give the number of shares, --shares N")
    for source in args.sources:
        kind = source_kind(source)
        if source == "-" or (kind is not None and kind.grows):
            raise UsageError(
                f"{source.partition(':')[0]}: a job opens its sources on each machine; penstock replay reads standard "
                "input, topics and tables with versions"
            )
    check_deltas(args)
    check_checkpoint(args)
    if (file := file_of_deltas(args)) is not None:
        check_writable(file.parent)
    place = args.checkpoint or args.out or args.deltas
    keywords = keywords_of(args, "job", JobOptions) | {
        "init": None if args.init is None else os.path.abspath(args.init),
        "threads": args.threads or 1,
    }
    job = Job(
        EmbeddingConfig.load(args.config),
        [source if "://" in source else os.path.abspath(source) for source in args.sources],
        **keywords,
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
