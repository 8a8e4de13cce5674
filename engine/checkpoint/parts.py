"""Commits of a job: every share writes the data file of its rows, and the job writes the one manifest, last.

A share's file names rows by the ids of the whole table (of a dynamic table by its rows), so that any number of shares
can restore a commit. Its name contains the attempt of the job: an owner that was given up, and that still runs where
its driver cannot reach it, writes no file of a later attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import gcd
from typing import Any

import numpy as np

from penstock.checkpoint.incremental import Contents, Saved, Saver
from penstock.checkpoint.records import Record
from penstock.checkpoint.ring_buffer import Ring
from penstock.checkpoint.store import Commit, DataFile, Folder
from penstock.checkpoint.writer import CommitWriter
from penstock.errors import StateError
from penstock.frames import Array
from penstock.tables.key_directory import joined_states
from penstock.tables.shares import AnyShare, Share

_ALIKE = ("global_step", "num_required", "reduction", "seed", "gate", "pipeline", "config")


@dataclass(frozen=True)
class Part:
    """A share's part of a commit. files : its base and its deltas; contents : of the commit, as this share sees it"""

    files: tuple[DataFile, ...]
    contents: Mapping[str, Any]


class PartWriter(CommitWriter):
    """Writes a share's data file of a commit, and no manifest."""

    def __init__(
        self, folder: Folder, draft: Commit, keep: int, ring: Ring, shares: Mapping[str, AnyShare], attempt: str
    ) -> None:
        self._shares, self.part, self.attempt = shares, part_name(shares), f".{attempt}"
        super().__init__(folder, draft, keep, ring)

    def _made(self) -> Commit:
        return Commit(self._draft.number, (*self._draft.files, self._written()), self._draft.contents)

    def _kept(self, record: Record) -> Record:
        """Name rows by the ids of the whole table."""
        if record.kind != "rows":
            return record
        share = self._shares[record.about["table"]]
        if share.num_rows == 0:
            return Record("none", record.about)
        about = dict(record.about)
        if "first" in about:
            about["first"], about["step"] = int(share.ids(about["first"])), about["step"] * share.stride
            return Record(record.kind, about, record.arrays)
        ids = share.ids(np.asarray(record.arrays["ids"], np.int64))
        return Record(record.kind, about, {**record.arrays, "ids": ids})


class PartSaver(Saver):
    """A Saver of a share, whose folder belongs to the job.

    last : the newest commit, with the files of this share
    """

    def __init__(
        self,
        folder: Folder,
        tables: Mapping[str, Saved],
        describe: Callable[[], Contents],
        last: Commit | None,
        delta: bool,
        timed: Callable[[], AbstractContextManager[Any]],
        shares: Mapping[str, AnyShare],
    ) -> None:
        super().__init__(folder, tables, describe, last, delta, timed)
        self._shares, self._attempt = shares, ""

    def write(self, number: int, attempt: str) -> Part:
        """Write this share's data file of commit ``number``; return it with those before it."""
        self._next_number, self._attempt = number, attempt
        self._ring.touch()
        try:
            self.commit()
        finally:
            self._ring.let_go()
        assert self.last is not None
        return Part(self.last.files, self.last.contents)

    def _new_writer(self, draft: Commit) -> CommitWriter:
        return PartWriter(self.folder, draft, self._keep, self._ring, self._shares, self._attempt)


class LonePartWriter(PartWriter):
    """Writes a share's data file of a commit, and its manifest: no other share commits to this folder."""

    _made = CommitWriter._made


class LonePartSaver(PartSaver):
    """A Saver of a share that commits alone."""

    def _new_writer(self, draft: Commit) -> CommitWriter:
        return LonePartWriter(self.folder, draft, self._keep, self._ring, self._shares, "0")


def join_parts(
    folder: Folder, number: int, parts: Sequence[Part], contents: Mapping[str, Any] | None = None, keep: int = 3
) -> Commit:
    """Write the manifest that makes the parts of all shares one commit.

    folder : locked by the job; contents : of the job, in place of what its shares have, such as the positions
    keep : number of commits to keep in the folder, with this one
    Raises StateError if the shares are not in the same state.
    """
    first = parts[0].contents
    for rank, part in enumerate(parts):
        for name in _ALIKE:
            if part.contents[name] != first[name]:
                raise StateError(f"share {rank} and share 0 differ in {name}: {part.contents[name]}, {first[name]}")
    # The last step that changed a row changed one of some share.
    changed_step = max(part.contents["changed_step"] for part in parts)
    programs = _joined_programs([part.contents["programs"] for part in parts])
    joined = {**first, "changed_step": changed_step, "programs": programs, **(contents or {})}
    commit = Commit(number, tuple(file for part in parts for file in part.files), joined)
    folder.name(commit)
    folder.tidy(keep, commit)
    return commit


def part_name(shares: Mapping[str, AnyShare]) -> str:
    """Return the name of a share's part, as ``DataFile.part`` names it. shares : of every table"""
    share = next(iter(shares.values()))
    return f"-{share.rank}of{share.count}"


def part_of(name: str) -> tuple[int, int]:
    """Return the share that a part is named after: rank and number of shares."""
    rank, count = name.removeprefix("-").split("of")
    return int(rank), int(count)


def files_for(commit: Commit, shares: Mapping[str, AnyShare]) -> tuple[DataFile, ...]:
    """Return the files of a commit that can contain rows of a share. shares : of every table; empty: all files"""
    if not shares:
        return commit.files
    met = {part for part in commit.parts if not part or any(_meet(of, *part_of(part)) for of in shares.values())}
    met = met or {commit.parts[0]}  # every part has the clock
    return tuple(file for file in commit.files if file.part in met)


def _meet(share: AnyShare, rank: int, count: int) -> bool:
    """Return whether a share and another one, of another number of shares, have rows in common."""
    if isinstance(share, Share) and share.mod:
        return (share.rank - rank) % gcd(share.count, count) == 0
    other = share.among(rank, count)
    return share.ids(0) < other.ids(0) + other.num_rows and other.ids(0) < share.ids(0) + share.num_rows


def directories_of(folder: Folder, commit: Commit) -> dict[str, Mapping[str, Array]]:
    """Return the saved directory of every dynamic table by name, in the form of ``Directory.get_state``."""
    if not any(table.get("dynamic") for table in commit.contents["tables"]):
        return {}  # without reading files
    found: dict[str, list[Mapping[str, Array]]] = {}
    for record in folder.records(commit, commit.last_files):
        if record.kind == "directory":
            found.setdefault(record.about["table"], []).append(record.arrays)
    return {name: joined_states(parts) for name, parts in found.items()}


def _joined_programs(programs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the programs of a table's shares; where these differ, a resumed engine chooses, and reports it."""
    several = {"variant": "auto", "compiler": "shares differ"}
    return {name: its if all(of[name] == its for of in programs) else several for name, its in programs[0].items()}
