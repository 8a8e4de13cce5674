"""``penstock history``: the values of one row in every commit of a checkpoint that is kept."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.base.flag_values import local_path
from penstock.checkpoint.row_history import RowVersion, row_history
from penstock.checkpoint.store import Commit
from penstock.checkpoint.versions import NamedCommit, all_commits
from penstock.cli.arrow_file import write_arrow
from penstock.cli.command_line import Parser
from penstock.cli.output import Output
from penstock.model.config.specs import WEIGHTS
from penstock.model.frames import Float32

EXAMPLE = "penstock history run1 --table user --id 4711"
_MOST_VALUES = 6


def add(command: Parser) -> None:
    command.add_argument("checkpoint", metavar="DIR", help="a checkpoint, also while a run commits to it")
    command.add_argument("--table", required=True, metavar="T", help="the table of the row")
    command.add_argument("--id", required=True, type=int, metavar="N", help="the id of the row")
    command.add_argument("--out", type=local_path, metavar="FILE", help="also write an Arrow stream, or FILE.arrow")


def run(args: argparse.Namespace, out: Output) -> None:
    folder = NamedCommit.of(args.checkpoint).folder

    def read(_: Commit) -> list[dict[str, Any]]:
        commits = all_commits(folder)
        history = row_history(folder, [commit for commit, _ in commits], args.table, args.id)
        return [_fields(version, names) for version, (_, names) in zip(history, commits, strict=True)]

    versions = folder.read_last(read, lambda: all_commits(folder)[0][0])
    out.say(f"{folder.path}: id {args.id} of table '{args.table}'")
    for version in versions:
        names = f"  {', '.join(version['tags'])}" if version["tags"] else ""
        out.say(f"  commit {version['commit']}: step {version['step']}, {_text(version)}{names}")
    if args.out is not None:
        _write(args.out, versions)
        out.say(f"wrote     {args.out}")
    out.result({"table": args.table, "id": args.id, "versions": [_plain(version) for version in versions]})


def _fields(version: RowVersion, tags: list[str]) -> dict[str, Any]:
    parts = dict(version.parts or {})
    return {
        "commit": version.commit.number,
        "step": version.commit.step,
        "tags": tags,
        "change": (version.change or {}).get(WEIGHTS),
        "row": parts.pop(WEIGHTS, None),
        "slots": parts,
    }


def _text(version: dict[str, Any]) -> str:
    row = version["row"]
    if row is None:
        return "no row"
    change = "" if version["change"] is None else f"changed by {version['change']:.6g}, "
    values = ", ".join(f"{value:.6g}" for value in row[:_MOST_VALUES])
    return f"{change}[{values}{', …' if len(row) > _MOST_VALUES else ''}]"


def _plain(version: dict[str, Any]) -> dict[str, Any]:
    """Return the fields for JSON, which has no NaN: values are text, which round-trips exactly."""
    slots = {name: _texts(values) for name, values in version["slots"].items()}
    row, change = version["row"], version["change"]
    texts = {"row": None if row is None else _texts(row), "change": None if change is None else str(change)}
    return {**version, **texts, "slots": slots}


def _texts(values: Float32) -> list[str]:
    return [str(value) for value in values]


def _write(path: Path, versions: list[dict[str, Any]]) -> None:
    fields = {"commit": pa.int64(), "step": pa.int64(), "tags": pa.list_(pa.utf8()), "change": pa.float64()}
    slots = [name for version in versions for name in version["slots"]]
    fields |= dict.fromkeys(["row", *slots], pa.list_(pa.float32()))
    write_arrow(path, [version | version["slots"] for version in versions], fields)
