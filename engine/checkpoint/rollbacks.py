"""A rollback: the tables step forward to the rows and keys of an earlier commit, in an engine, or in a folder alone.

Both write the same commit: its chain is that of the earlier commit and one file without rows, so it costs no copy of
the tables. Everything that is no table continues: the step, the positions of sources and producers, the lineage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.base.errors import StateError
from penstock.checkpoint.arrays import records_of, rows_in
from penstock.checkpoint.manifests import CLOCK_OFFSET, NO_TURNS, VECTORS, num_pending, trusting
from penstock.checkpoint.parts import directories_of
from penstock.checkpoint.records import MAGIC, Record
from penstock.checkpoint.store import REPEATS, Commit, DataFile, Folder
from penstock.checkpoint.table_changes import setting_text
from penstock.checkpoint.versions import NamedCommit
from penstock.core.engine_core import EngineCore
from penstock.model.frames import Float32, Int64
from penstock.model.version import Lineage


class SavedState:
    """The rows and keys of a commit, verified, for an engine whose tables are the same.

    now : tables, seed and vectors of the engine, as the contents of a commit have them. Raises StateError.
    """

    def __init__(self, folder: Folder, commit: Commit, now: Mapping[str, Any]) -> None:
        self._folder, self.commit = folder, commit
        self.place = f"{folder.path}, commit {commit.number}"
        with trusting(self.place):
            check_same(commit, now, self.place)
            folder.checked(commit)
            self.directories = directories_of(folder, commit)
            # Mapped now, local files stay whatever becomes of their names.
            local_files = commit.files if isinstance(folder.path, Path) else ()
            self._mapped = {file: list(records_of(folder, commit, file)) for file in local_files}

    def replace(self, core: EngineCore) -> dict[str, Int64]:
        """Replace rows and keys, and return the ids of the changed ones of every table."""
        tables = core.tables
        rows_now = {name: table.replace_keys(self.directories[name]) for name, table in tables.dynamic.items()}
        unread = {name: np.ones(spec.vocabulary_size, bool) for name, spec in tables.held.specs.items()}
        changed: dict[str, list[Int64]] = {name: [] for name in unread}
        for name, rows, parts in self._newest_first():
            if name in rows_now:
                rows = rows_now[name][rows]
            else:
                rows, parts = tables.held.select(name, rows, parts)
            needed = (rows >= 0) & unread[name][rows]
            if not needed.any():
                continue
            rows, parts = _selected(rows, parts, needed)
            unread[name][rows] = False
            differs = np.zeros(len(rows), bool)
            for part, values in enumerate(parts):
                differs |= (tables.read_rows(name, part, rows).view(np.int32) != values.view(np.int32)).any(axis=1)
            if differs.any():
                rows, parts = _selected(rows, parts, differs)
                tables.set_stored_rows(name, rows, dict(enumerate(parts)))
                changed[name].append(rows)
        joined = {name: np.concatenate([np.zeros(0, np.int64), *several]) for name, several in changed.items()}
        return {
            name: tables.dynamic[name].rows_replaced(rows) if name in rows_now else rows
            for name, rows in joined.items()
        }

    def _newest_first(self) -> Iterator[tuple[str, Int64, list[Float32]]]:
        """Yield blocks as ``rows_of`` does, those of newer files first: no row occurs twice in one file."""
        for file in reversed(self.commit.files):
            yield from rows_in(self._mapped.get(file) or records_of(self._folder, self.commit, file))


def _selected(rows: Int64, parts: list[Float32], mask: npt.NDArray[np.bool_]) -> tuple[Int64, list[Float32]]:
    """Return the rows of a mask, and their values in C order; without a copy if it has all of them."""
    if mask.all():
        return rows, [np.ascontiguousarray(values) for values in parts]
    return rows[mask], [values[mask] for values in parts]


class Rollback(NamedTuple):
    """What a rollback did. target : the commit that it went back to

    step : the new global step; num_frames : dropped from the gate
    """

    target: Commit
    step: int
    num_frames: int


def roll_back_folder(place: str | os.PathLike[str], name: str | int) -> Rollback:
    """Write a commit whose tables are those of an earlier version, under the folder's lock.

    Raises UsageError if a run or service has locked the folder, StateError, and OSError; nothing has changed then.
    """
    version = NamedCommit.of(place, name)
    folder = version.folder
    folder.must_load()  # raises before a folder is created
    with folder.locked():
        try:
            folder.tidy()
            newest, target = folder.must_load(), version.load()
            commit_place = f"{folder.path}, commit {target.number}"
            with trusting(commit_place):
                check_same(target, newest.contents, commit_place)
                folder.checked(target)
                number, contents = folder.next_number(), _stepped(newest, target)
                files = [_without_rows(folder, number, target, part, contents[CLOCK_OFFSET]) for part in target.parts]
            commit = Commit(number, (*target.chain, *files), contents)
            folder.publish_commit(commit)
            return Rollback(target, commit.step, num_pending(newest.contents))
        except BaseException:
            with suppress(OSError, StateError):
                folder.tidy()  # removes what no manifest lists
            raise


def clock_offset(target: Commit, step: int) -> int:
    """Return the offset of the clock of tables that take the state of a commit at a step."""
    return step - target.step + int(target.contents[CLOCK_OFFSET])


def check_same(commit: Commit, now: Mapping[str, Any], place: str) -> None:
    """Raise StateError if the tables of a commit are others than those that would be rolled back to it.

    now : contents of a commit with these
    """
    saved, here = ({table["name"]: table for table in contents["tables"]} for contents in (commit.contents, now))
    for name in saved.keys() ^ here.keys():
        raise StateError(f"{place}: table '{name}' is {'not there' if name in here else 'gone now'}{_RATHER}")
    for name in saved:
        vectors = [contents.get(VECTORS, {}).get(name, ["", ""])[1] for contents in (commit.contents, now)]
        if vectors[0] != vectors[1]:
            raise StateError(f"{place}: table '{name}' starts from other vectors there{_RATHER}")
        then, current = ({"dynamic": {}, "drawn_as": name, "trainable": True, **table[name]} for table in (saved, here))
        if then["trainable"] != current["trainable"]:
            words = [("frozen", "trained")[table["trainable"]] for table in (then, current)]
            raise StateError(f"{place}: table '{name}' is {words[0]} there and {words[1]} now{_RATHER}")
        for key in ("dim", "optimizer", "slots", "storage_dtype", "dynamic", "vocabulary_size", "drawn_as"):
            if then[key] != current[key]:
                raise StateError(
                    f"{place}: table '{name}' has {key} {setting_text(then[key], current[key])} there and "
                    f"{setting_text(current[key], then[key])} now{_RATHER}"
                )
    if commit.contents["seed"] != now["seed"]:
        raise StateError(f"{place}: its seed is {commit.contents['seed']}, and {now['seed']} now{_RATHER}")


_RATHER = "; a rollback changes rows and keys only: penstock branch starts a checkpoint with another version"


def _stepped(newest: Commit, target: Commit) -> dict[str, Any]:
    """Return the contents of the newest commit, one step later, with an empty gate and the clock of the target."""
    before, step = newest.contents, newest.step + 1
    counters, time = dict(before["counters"]), target.contents["pipeline"].get("time")
    if dropped := num_pending(before):
        counters["rolled_back"] += dropped
    pipeline = {name: value for name, value in before["pipeline"].items() if name != "time"}
    positions, lineage = before["positions"], Lineage.from_state(before["positions"])
    if lineage is not None:  # a reader may have other rows of this step, of commits that are gone since
        positions = {**positions, **lineage.started(newest.step).get_state()}
    return {
        **{name: value for name, value in before.items() if name != REPEATS},
        "global_step": step,
        "changed_step": step,
        "gate": {**before["gate"], "global_step": step, "num_accumulated": 0, "contributors": []},
        **({"turns": {**before["turns"], **NO_TURNS}} if "turns" in before else {}),
        "pipeline": pipeline if time is None else {**pipeline, "time": time},
        "counters": counters,
        "positions": positions,
        CLOCK_OFFSET: clock_offset(target, step),
    }


def _without_rows(folder: Folder, number: int, target: Commit, part: str, clock_offset: int) -> DataFile:
    """Write a file that follows those of a part of the target: with its keys, and no frame in the gate."""
    last = next(file for file in reversed(target.chain) if file.part == part)
    (state,) = (file for file in target.last_files if file.part == part)
    records = [Record("begin", {"parent": last.digest})]
    for record in folder.records(target, [state]):
        if record.kind in ("store", "directory"):
            records.append(replace(record, arrays={}) if record.kind == "store" else record)
    records += [Record("clock", {"offset": clock_offset}), Record("end")]
    pieces = chain([MAGIC], *(record.pieces() for record in records))
    return folder.write_data(f"{number:08}{part}.delta", last.digest, pieces)
