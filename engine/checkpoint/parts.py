"""Commits by parts: a data file contains all rows or those of a share; a job writes the one manifest, last.

A share's file names rows by the ids of the whole table (of a dynamic table by its rows), so that any number of shares
can restore a commit. In a job its name contains the attempt of the job: an owner that was given up, and that still runs
where its driver cannot reach it, writes no file of a later attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from typing import Any

import numpy as np

from penstock.base.errors import StateError
from penstock.checkpoint.records import Record
from penstock.checkpoint.store import Commit, DataFile, Folder
from penstock.model.frames import Array
from penstock.rows.key_directory import joined_states
from penstock.rows.shares import AnyShare, Share

_ALIKE = ("global_step", "num_required", "reduction", "seed", "gate", "pipeline", "config")


@dataclass(frozen=True)
class PartRows:
    """The rows in the data files of one writer. shares : of every table; empty: all rows"""

    shares: Mapping[str, AnyShare] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name of the part, as ``DataFile.part`` has it."""
        share = next(iter(self.shares.values()), None)
        return "" if share is None else f"-{share.rank}of{share.count}"

    def file_name(self, attempt: str | None) -> str:
        """Return the part of a file's name between number and kind. attempt : of a job; None: there is no job"""
        return f"{self.name}.{attempt or 0}" if self.shares else ""

    def with_table_ids(self, record: Record) -> Record:
        """Return a record of rows with the ids of the whole table; any other record as it is."""
        if not self.shares or record.kind != "rows":
            return record
        share = self.shares[record.header["table"]]
        if share.num_rows == 0:
            return Record("none", record.header)
        header = dict(record.header)
        if "first" in header:
            header["first"], header["step"] = int(share.ids(header["first"])), header["step"] * share.stride
            return Record(record.kind, header, record.arrays)
        ids = share.ids(np.asarray(record.arrays["ids"], np.int64))
        return Record(record.kind, header, {**record.arrays, "ids": ids})


ALL_ROWS = PartRows()


def join_parts(
    folder: Folder, number: int, parts: Sequence[Commit], contents: Mapping[str, Any] | None = None, keep: int = 3
) -> Commit:
    """Write the manifest that makes the parts of all shares one commit.

    folder : locked by the job; parts : the commit as each share sees it, with the base and the deltas of this share
    contents : of the job, in place of what its shares have, such as the positions
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
    folder.publish_commit(commit)
    folder.tidy(keep, commit)
    return commit


def part_of(name: str) -> tuple[int, int]:
    """Return the share that a part is named after: rank and number of shares."""
    rank, count = name.removeprefix("-").split("of")
    return int(rank), int(count)


def files_for(commit: Commit, shares: Mapping[str, AnyShare]) -> tuple[DataFile, ...]:
    """Return the files of a commit that can contain rows of a share. shares : of every table; empty: all files"""
    if not shares:
        return commit.files
    needed = {part for part in commit.parts if not part or any(_meet(s, *part_of(part)) for s in shares.values())}
    needed = needed or {commit.parts[0]}  # every part has the clock
    return tuple(file for file in commit.files if file.part in needed)


def check_complete(commit: Commit, shares: Mapping[str, AnyShare], place: str) -> None:
    """Raise StateError if a commit lacks the part of a share that has rows of ours. shares : ours; empty: all rows"""
    parts = {part_of(part) for part in commit.parts if part}
    count = max((count for _, count in parts), default=0)
    lacking = (rank for rank in range(count) if (rank, count) not in parts)
    rank = next((rank for rank in lacking if not shares or any(_meet(s, rank, count) for s in shares.values())), None)
    if rank is not None:
        raise StateError(f"{place}: holds {len(parts)} of {count} shares of the rows, without share {rank}")


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
    states: dict[str, list[Mapping[str, Array]]] = {}
    for record in folder.records(commit, commit.last_files):
        if record.kind == "directory":
            states.setdefault(record.header["table"], []).append(record.arrays)
    return {name: joined_states(parts) for name, parts in states.items()}


def _joined_programs(programs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the programs of a table's shares; where these differ, a resumed engine chooses, and reports it."""
    several = {"variant": "auto", "compiler": "shares differ"}
    first = programs[0]
    return {name: first[name] if all(each[name] == first[name] for each in programs) else several for name in first}
