"""``penstock tag``: give a commit of a checkpoint a name, which keeps it."""

from __future__ import annotations

import argparse

from penstock.base.errors import UsageError
from penstock.base.flag_values import whole
from penstock.checkpoint.versions import MOST_NOTE, NamedCommit, delete_tag, make_tag
from penstock.cli.command_line import Parser
from penstock.cli.output import Output, writing

EXAMPLE = 'penstock tag run1 good --note "before the new producers"'


def add(command: Parser) -> None:
    command.add_argument("checkpoint", metavar="DIR", help="a checkpoint, also while a run commits to it")
    command.add_argument("name", metavar="NAME", nargs="?", help="letters, digits, '.', '_' and '-', a letter first")
    command.add_argument("--step", type=whole(0), metavar="N", help="of the commit (default: the newest commit)")
    command.add_argument("--note", default="", metavar="TEXT", help=f"shown by log; at most {MOST_NOTE} characters")
    command.add_argument("--move", action="store_true", help="move a tag of this name here")
    command.add_argument("--delete", metavar="NAME", help="delete a tag; the next commit removes what only it needed")


def run(args: argparse.Namespace, out: Output) -> None:
    if (args.delete is None) == (args.name is None):
        raise UsageError("tag: name a tag, or one to delete: penstock tag DIR NAME, penstock tag DIR --delete NAME")
    version = NamedCommit.of(args.checkpoint, args.step)
    with writing(args.checkpoint):
        if args.delete is not None:
            delete_tag(version.folder, args.delete)
            out.say(f"deleted   {args.delete}")
            out.result({"deleted": args.delete})
            return
        tag = make_tag(version.folder, version.load, args.name, args.note, args.move)
    out.say(f"tagged    {tag.name}: step {tag.commit.step}, commit {tag.commit.number} of {version.folder.path}")
    out.result({"tag": tag.name, "global_step": tag.commit.step, "commit": tag.commit.number, "note": tag.note})
