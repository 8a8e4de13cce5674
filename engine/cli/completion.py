"""``penstock completion SHELL``: print the shell's completion script, which shtab derives from the parser."""

from __future__ import annotations

import argparse
import importlib

from penstock.cli.command_line import Parser
from penstock.cli.output import Output
from penstock.io.registry import Library

EXAMPLE = "penstock completion bash > ~/.local/share/bash-completion/completions/penstock"
SHELLS = ("bash", "zsh", "fish")


def add(command: Parser) -> None:
    command.add_argument("shell", choices=SHELLS, help="whose script")


def run(args: argparse.Namespace, out: Output) -> None:
    shtab = Library("shtab", "completion").load("completion")
    top: Parser = importlib.import_module("penstock.cli.main").parser()  # imported here so that --help loads no command
    for command in top.commands.values():
        for action in command._actions:
            metavar = str(action.metavar or "")
            if not action.choices and (not action.option_strings or "FILE" in metavar or "DIR" in metavar):
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            action.metavar = metavar.replace(":", "\\:") or None  # shtab does not escape it in zsh's specifications
    script = shtab.complete(top, args.shell)
    if args.json:
        out.result({"shell": args.shell, "script": script})
    else:
        out.say(script.rstrip("\n"))
