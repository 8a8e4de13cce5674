"""Flags from the table of options, what several commands make of them, and a parser with one-line errors."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.base.errors import UsageError, close_names
from penstock.model.command_options import options_of
from penstock.model.gate_policy import GatePolicy

if TYPE_CHECKING:
    from penstock.model.config.embedding import EmbeddingConfig

# One module per command, named after it, with add(parser), run(args, out) → exit code or None, and an EXAMPLE. The
# summaries are here, so that ``penstock --help`` loads none of them.
COMMANDS = {
    "demo": "make a small log with a known answer, replay it and check the result",
    "replay": "apply a gradient log to the tables of a configuration",
    "passes": "replay a log whose tables exceed memory: read it several times, each time for one share of the rows",
    "job": "replay logs on a Ray cluster, whose processes each hold one share of the rows",
    "validate": "check a configuration, and sources against it, without applying anything",
    "plan": "show what capacity, filters and expiry of dynamic tables would do to a log",
    "inspect": "show what a configuration, a gradient stream, a table file or a checkpoint holds",
    "synth": "write a synthetic gradient log, and a configuration that fits it in the same folder",
    "log": "list the commits and the tags of a checkpoint",
    "tag": "give a commit of a checkpoint a name, which keeps it",
    "history": "show the values of one row in every commit of a checkpoint that is kept",
    "blame": "list the frames of a log that contain one row",
    "rollback": "step a service, or a checkpoint, forward to the rows of an earlier commit",
    "branch": "start a new checkpoint with a commit of another one, without a copy where that is possible",
    "import": "start a checkpoint with the tables of another library: of torch, TorchRec, TensorFlow, Keras, NumPy, …",
    "export": "write the tables of a checkpoint for other libraries: as Parquet, safetensors, a torch file, …",
    "diff": "show where two checkpoints differ: the first place and the largest difference; exit 1 if they do",
    "bench": "measure penstock against other libraries and against the memory of this machine, side by side",
    "serve": "receive gradients over Arrow Flight and serve deltas, tables and rows",
    "status": "show what a running service has done and holds",
    "drain": "let a running service take no more frames, commit, and end",
    "follow": "keep a store, a table or a function up to date with the deltas of a service",
    "doctor": "report what this machine gives penstock, what will be slow here and why; exit 1 if it cannot run",
    "completion": "print a script that completes commands and flags in bash, zsh or fish",
}


# Mode → the command whose flags are the options that work in it.
COMMAND_OF = {"run": "replay", "passes": "passes", "job": "job", "serve": "serve", "check": "validate"}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that accepts no abbreviated flags and raises UsageError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"allow_abbrev": False}))
        self.commands: dict[str, Parser] = {}

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help)")

    def flags(self) -> list[str]:
        """Return every flag of this parser."""
        return [flag for action in self._actions for flag in action.option_strings]


def parse(top: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse ``argv``, with sources allowed on both sides of a flag (argparse stops at the first flag)."""
    first = next((word for word in argv if not word.startswith("-")), None)
    before = argv[: argv.index(first)] if first is not None else argv
    for word in before:
        if word.startswith("-") and word not in top.flags():
            top.error(f"unknown flag {word}{_near(word, top.flags())}; flags of a command come after it")
    if first is not None and first not in top.commands:
        top.error(f"unknown command '{first}'{_near(first, top.commands)}; there are: {', '.join(top.commands)}")
    args, rest = top.parse_known_args(argv)
    if args.command is None:
        top.error(f"give a command: {', '.join(top.commands)}")
    command = top.commands[args.command]
    unknown = [word for word in rest if word.startswith("-") and word != "-"]
    if unknown:
        flag = unknown[0].partition("=")[0]
        command.error(f"unknown flag {flag}{_elsewhere(flag) or _near(flag, command.flags())}")
    if rest and not hasattr(args, "sources"):
        command.error(f"unexpected argument '{rest[0]}'")
    if rest:
        args.sources = [*args.sources, *rest]
    return args


def _elsewhere(flag: str) -> str:
    """Return "; it is a flag of COMMAND, …" for a flag that other commands have, "" if there is none."""
    for option in options_of().values():
        if option.flag is not None and option.flag_name == flag:
            commands = [f"penstock {command}" for mode, command in COMMAND_OF.items() if mode in option.modes]
            return f"; it is a flag of {', '.join(commands)}"
    return ""


def _near(word: str, candidates: Iterable[str]) -> str:
    """Return "; did you mean CANDIDATE?" for a similar flag or command, "" if there is none."""
    names = {name.strip("-"): name for name in candidates}
    begin = [name for name in names.values() if name.startswith(word) and word.strip("-")]
    near = begin or [names[name] for name in close_names(word.strip("-"), names)]
    return f"; did you mean {near[0]}?" if near else ""


def add_command(commands: Any, name: str, module: Any) -> None:
    """Add a command's parser, with ``--json`` and an example under ``--help``."""
    summary = COMMANDS[name]
    command: Parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  {module.EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--json", action="store_true", help="one JSON object on stdout; text goes to stderr")
    command.set_defaults(run=module.run)
    module.add(command)


def add_sources(command: Parser, nargs: str = "+", read_again: bool = False) -> None:
    """Add CONFIG and SOURCE…. nargs : of the sources; read_again : whether they must be such as can be read again"""
    from penstock.io.registry import either
    from penstock.io.sources.source_kinds import source_kinds

    command.add_argument("config", metavar="CONFIG", help="TPUEmbeddingConfiguration or EngineConfig, text or binary")
    command.add_argument(
        "sources",
        metavar="SOURCE",
        nargs=nargs,
        default=[],
        help="Arrow IPC stream or file, Parquet file, directory or URI"
        if read_again
        else "Arrow IPC stream or file, Parquet file, directory, URI, or - for standard input; read in this order. "
        f"Or {either(kind.form for kind in source_kinds())}",
    )


def add_flags(command: Parser, *modes: str) -> dict[str, Any]:
    """Add the flags of the options that work in any of the modes. Return the groups that they are in, by title."""
    groups: dict[str, Any] = {"": command}
    for option in options_of().values():
        if option.flag is not None and option.modes.intersection(modes):
            if option.group not in groups:
                groups[option.group] = command.add_argument_group(option.group)
            add_flag(groups[option.group], option.name)
    return groups


def add_flag(to: Any, name: str) -> None:
    """Add the flag of an option; the parsed arguments have it under the option's name."""
    option = options_of()[name]
    flag, arguments = option.flag, dict[str, Any](dest=name, help=option.flag_help)
    assert flag is not None
    if not flag.metavar and not flag.choices:
        to.add_argument(option.flag_name, action="store_false" if option.default else "store_true", **arguments)
        return
    arguments |= {"metavar": flag.metavar or None, "type": flag.parse, "choices": flag.choices or None}
    if name in PAIRS:
        to.add_argument(option.flag_name, action=Pairs, default={}, **arguments)
    elif flag.repeated:
        to.add_argument(option.flag_name, action="append", default=[], **arguments)
    else:
        nargs = "?" if flag.bare else None
        to.add_argument(option.flag_name, default=option.default, nargs=nargs, const=flag.bare, **arguments)


def keywords_of(args: argparse.Namespace, mode: str, *concerns: type) -> dict[str, Any]:
    """Return the flags that are options of some concerns in a mode, as keywords."""
    return {name: getattr(args, name) for name in options_of(mode, *concerns) if name in args}


def policy_of(args: argparse.Namespace, config: EmbeddingConfig) -> GatePolicy:
    """Return what opens the gate, by the flags and the configuration. Raises UsageError."""
    return GatePolicy.of(config.gate_policy, args.num_required, args.workers, args.max_staleness)


# The repeated flags whose values are pairs, by the name of their mapping: the form of a value, the types of both sides.
PAIRS: dict[str, tuple[str, type, type]] = {
    "columns": ("ROLE=NAME, such as gradient=grad", str, str),
    "learning_rates": ("TAG=VALUE, two numbers, such as 0=0.05", int, float),
    "rename": ("OLD=NEW, two names of tables", str, str),
    "names": ("NAME=TABLE, a name in the source and a table", str, str),
}


class Pairs(argparse.Action):
    """Collects the values of a flag of PAIRS in a mapping. Raises UsageError for an invalid one, or two of one key."""

    def __call__(self, parser: Any, args: argparse.Namespace, text: Any, flag: str | None = None) -> None:
        form, key_type, value_type = PAIRS[self.dest]
        pairs: dict[Any, Any] = getattr(args, self.dest)
        left, _, right = text.partition("=")
        right.encode()  # raises UnicodeEncodeError here, where the flag is at fault and not the stream
        try:
            key, value = key_type(left), value_type(right)
        except ValueError:
            key = value = ""
        if "" in (key, value):
            raise UsageError(f"{flag} {text}: expected {form}")
        if key in pairs and pairs[key] != value:
            before, after = (f"'{each}'" if value_type is str else f"{each:g}" for each in (pairs[key], value))
            raise UsageError(f"{flag} {key}: given twice, as {before} and as {after}")
        setattr(args, self.dest, {**pairs, key: value})


def check_reading(args: argparse.Namespace) -> tuple[bool, Path | None]:
    """Return whether bad rows are dropped, and the file for them, before anything is read.

    Raise UsageError for invalid flags, or if standard input is listed twice, since it can be read only once.
    """
    from penstock.io.decoding.role_types import check_columns
    from penstock.io.quarantine import parse_on_bad_row

    check_columns(args.columns)
    mode, file = parse_on_bad_row(args.on_bad_row)
    if args.sources.count("-") > 1:
        raise UsageError("- (standard input) can be given only once")
    return mode != "error", file


def make_devices(count: int | None) -> Any:
    """Return the first ``count`` accelerators (default all), or without any so many parts of the host's memory.

    Raise UsageError if there are fewer devices, or jax finds none that it may use; CapacityError if the limits of
    memory leave no room for jax's threads.
    """
    from penstock.rows.bridge.mesh_selection import default_mesh

    return default_mesh(count)
