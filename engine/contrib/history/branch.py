"""``penstock branch``: start a new checkpoint with a commit of another one."""

from __future__ import annotations

import argparse
import sys
import time

import penstock.base.interrupts as interrupts
from penstock.checkpoint.versions import NamedCommit, branch
from penstock.cli.command_line import Parser
from penstock.cli.output import Output, place_text, size_text, writing
from penstock.model.version import Lineage

EXAMPLE = "penstock branch run1 experiment --at good"
_REDRAW_S = 0.2


def add(command: Parser) -> None:
    command.add_argument("checkpoint", metavar="DIR", help="a checkpoint, also while a run commits to it")
    command.add_argument("new", metavar="NEWDIR", help="a new or empty folder, or a URI")
    command.add_argument("--at", metavar="VERSION", help="a tag or a step (default: the newest commit)")


def run(args: argparse.Namespace, out: Output) -> None:
    chosen = NamedCommit.of(args.checkpoint, args.at)
    drawn_s = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal drawn_s
        interrupts.check()
        if sys.stderr.isatty() and time.monotonic() - drawn_s > _REDRAW_S:
            drawn_s = time.monotonic()
            print(f"\r{size_text(done)} of {size_text(total)}  ", end="", file=sys.stderr, flush=True)

    with writing(args.new):
        commit = branch(chosen, args.new, progress)
    lineage = Lineage.from_state(commit.contents["positions"])
    assert lineage is not None  # a branch begins one
    version = lineage.at(commit.step)
    out.say(f"branched  {place_text(args.new)}: step {commit.step}, commit {commit.number} of {chosen.folder.path}")
    out.say(f"version   {version}")
    result = {"global_step": commit.step, "commit": commit.number, "version": str(version)}
    out.result({"branch": place_text(args.new), **result})
