"""``penstock log``: list the commits and the tags of a checkpoint."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.checkpoint.arrays import changed_rows
from penstock.checkpoint.source_positions import Positions
from penstock.checkpoint.store import Commit, Folder, Tag
from penstock.checkpoint.versions import all_commits, commits
from penstock.cli.command_line import Parser
from penstock.cli.output import Output, count, several, size_text

EXAMPLE = "penstock log run1"


def add(command: Parser) -> None:
    command.add_argument("checkpoint", metavar="DIR", help="a checkpoint, also while a run commits to it")


def run(args: argparse.Namespace, out: Output) -> None:
    folder = Folder(args.checkpoint)
    listed = all_commits(folder)
    tags, present = folder.tags(), list(commits(folder))
    entries = list(_entries(folder, present, listed[::-1]))
    pins = [_pin(tag, present) for tag in tags]
    out.say(f"{folder.path}: {several(len(entries), 'commit')}, {several(len(tags), 'tag')}")
    for entry in entries:
        names = f"  {', '.join(entry['tags'])}" if entry["tags"] else ""
        rows = "all" if entry["base"] else "?" if entry["rows"] is None else count(entry["rows"])
        texts = f"commit {entry['commit']}: step {entry['step']}, {rows} rows, {size_text(entry['bytes'])}"
        out.say(f"  {texts}, {_time_text(entry['written_s'])}{names}")
    for pin in pins:
        note = f": {pin['note']}" if pin["note"] else ""
        out.say(f"  tag {pin['tag']}: step {pin['step']}, pins {size_text(pin['pinned_bytes'])}{note}")
    newest = listed[-1][0]
    positions, parent = Positions.from_state(newest.contents["positions"]), None
    version = str(positions.version(newest.step))
    if (lineage := positions.lineage) is not None:
        out.say(f"  version {version}, {several(len(lineage.epochs), 'epoch')}")
        if lineage.parent is not None:
            parent = {"version": str(lineage.parent.version), "commit": lineage.parent.commit}
            out.say(f"  branch of version {lineage.parent.version}")
    out.result({"commits": entries, "tags": pins, "version": version, "parent": parent})


def _entries(folder: Folder, present: list[Commit], listed: list[tuple[Commit, list[str]]]) -> Iterator[dict[str, Any]]:
    """Yield every commit as plain data. present : those with a manifest of their commit; listed : all, with tags"""
    for commit, names in listed:
        yield {
            "commit": commit.number,
            "step": commit.step,
            "tags": names,
            "base": all(file.parent is None for file in commit.last_files),
            "rows": changed_rows(folder, commit),
            "bytes": sum(file.num_bytes for file in commit.last_files),
            "written_s": folder.files.written_s(commit.files[-1].name),
            "only_tagged": all(commit.digests != other.digests for other in present),
        }


def _pin(tag: Tag, present: list[Commit]) -> Mapping[str, Any]:
    """Return a tag as plain data. pinned_bytes : in files that no commit needs"""
    needed = {file.name for commit in present for file in commit.files}
    pinned = sum(file.num_bytes for file in tag.commit.files if file.name not in needed)
    return {
        "tag": tag.name,
        "step": tag.commit.step,
        "commit": tag.commit.number,
        "note": tag.note,
        "tagged_s": tag.tagged_s,
        "bytes": tag.commit.num_bytes,
        "pinned_bytes": pinned,
    }


def _time_text(seconds: float | None) -> str:
    return "missing" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
