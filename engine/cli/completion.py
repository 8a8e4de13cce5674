"""``penstock completion SHELL``: a script for the shell, made from the commands and flags that there are."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable
from typing import Any

from penstock.cli.options import Parser, add_command
from penstock.cli.output import Output

SHELLS = ("bash", "zsh", "fish")

# Which words are wanted is asked in the same way by both; where none are, file names complete: sources, folders and
# configurations are files.
CASES = """
{values}
    *) case "$at $command $word" in
        "1 "*) wanted="{commands}" ;;
{flags}
        esac ;;
    esac"""
BASH = """# penstock {version}: eval "$(penstock completion bash)", or put this into /etc/bash_completion.d/penstock
_penstock() {{
    local at=$COMP_CWORD command=${{COMP_WORDS[1]}} word=${{COMP_WORDS[COMP_CWORD]}} wanted=
    case "$command ${{COMP_WORDS[COMP_CWORD-1]}}" in{cases}
    mapfile -t COMPREPLY < <(compgen -W "$wanted" -- "$word")
}}
complete -o default -F _penstock penstock
"""
ZSH = """#compdef penstock
# penstock {version}: eval "$(penstock completion zsh)" after compinit, or put this into a file _penstock in $fpath
_penstock() {{
    local at=$((CURRENT-1)) command=${{words[2]}} word=${{words[CURRENT]}} wanted=
    case "$command ${{words[CURRENT-1]}}" in{cases}
    if [[ -n $wanted ]]; then compadd -- ${{=wanted}}; else _files; fi
}}
compdef _penstock penstock
"""


def add(commands: Any) -> None:
    command = add_command(
        commands,
        "completion",
        run,
        "print a script that completes commands and flags in bash, zsh or fish",
        "penstock completion bash > ~/.local/share/bash-completion/completions/penstock",
    )
    command.add_argument("shell", choices=SHELLS, help="whose script")


def run(args: argparse.Namespace) -> int:
    # The one command that needs the others: the whole tree, loaded when it runs and not before.
    top: Parser = importlib.import_module("penstock.cli.main").parser()
    script = {"bash": bash, "zsh": zsh, "fish": fish}[args.shell](top)
    out = Output(args.json)
    if args.json:
        out.result({"shell": args.shell, "script": script})
    else:
        out.say(script.rstrip("\n"))
    return 0


def options(command: Parser) -> list[argparse.Action]:
    """What has flags; what it says of itself is said in ``--help``."""
    return [action for action in command._actions if action.option_strings]


def cases(top: Parser) -> str:
    """One case per flag with choices, and one per command for its flags."""
    values, flags = [], []
    for name, command in top.commands.items():
        chosen = [action for action in command._actions if action.choices]
        for action in chosen:
            wanted = joined(action.choices or ())
            values += [f'    "{name} {flag}") wanted="{wanted}" ;;' for flag in action.option_strings]
        flags.append(f'        *" {name} -"*) wanted="{joined(command.flags())}" ;;')
        flags += [
            f'        *" {name} "*) wanted="{joined(a.choices or ())}" ;;' for a in chosen if not a.option_strings
        ]
    return CASES.format(commands=joined(top.commands), values="\n".join(values), flags="\n".join(flags))


def bash(top: Parser) -> str:
    return BASH.format(version=version(), cases=cases(top))


def zsh(top: Parser) -> str:
    return ZSH.format(version=version(), cases=cases(top))


def fish(top: Parser) -> str:
    """One line per command and flag."""
    lines = [
        f"# penstock {version()}: penstock completion fish > ~/.config/fish/completions/penstock.fish",
        f'complete -c penstock -n __fish_use_subcommand -f -a "{" ".join(top.commands)}"',
    ]
    for name, command in top.commands.items():
        seen = f'complete -c penstock -n "__fish_seen_subcommand_from {name}"'
        for action in options(command):
            names = " ".join(f"-l {flag[2:]}" for flag in action.option_strings if flag.startswith("--"))
            values = f' -x -a "{joined(action.choices)}"' if action.choices else " -r" if action.nargs != 0 else ""
            lines.append(f"{seen} {names}{values} -d '{quoted(action.help or '')}'")
        lines += [f'{seen} -f -a "{joined(a.choices)}"' for a in command._actions if not a.option_strings and a.choices]
    return "\n".join(lines) + "\n"


def joined(words: Iterable[Any]) -> str:
    return " ".join(map(str, words))


def quoted(text: str) -> str:
    """Inside fish's single quotes."""
    return text.replace("%%", "%").replace("\\", "\\\\").replace("'", "\\'")


def version() -> str:
    import penstock

    return penstock.__version__
