"""The folder of an unfinished replay in passes, inside that of its checkpoint: what it was begun with, and each pass.

It contains ``replay.json``; of every pass a folder with its commits and, if deltas are wanted, a log of them; and of
every pass that has ended a JSON file with its report and where it ended. The commit of the whole replay supersedes it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.base.errors import StateError, UsageError, unreleased
from penstock.base.filesystem import atomic_files
from penstock.base.filesystem.append_file import part_of
from penstock.base.filesystem.state_files import read_json
from penstock.checkpoint.store import Commit, Folder

# The key and the number of the format of ``replay.json``.
KEY, FORMAT = "penstock.passes", 1


class PassFolder:
    """What the passes of a replay have done so far. path : need not exist"""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._replay = path / "replay.json"

    def begin(self, flags: Mapping[str, Any], base: Commit | None, resume: bool, choose: Callable[[], int]) -> int:
        """Return the number of passes, of a new replay or of the one to resume, which must have the same flags.

        flags : that decide the result, as plain data; base : the commit that the replay continues; None: it begins anew
        choose : returns the number of passes of a new replay
        """
        begun = self._begun()
        number, digests = (None, []) if base is None else (base.number, list(base.digests))
        # After going back to an older commit, another commit may have the number of the one that the passes began with.
        is_same = begun is not None and begun["digests"] == digests
        if begun is None or not resume or not is_same or self.unfinished(number) is None:
            self.remove()  # of a replay that was given up, or that has committed since
            count = choose()
            atomic_files.make_folders(self.path)
            _write(self._replay, {KEY: FORMAT, "base": number, "digests": digests, "passes": count, "flags": flags})
            return count
        plain = json.loads(json.dumps(flags))
        for name, value in plain.items():
            before = begun["flags"][name]
            if before != value:
                raise UsageError(
                    f"{self.path}: contains a replay in passes with {name} {before}, not {value}; "
                    "resume it with the same flags, or remove this folder"
                )
        return int(begun["passes"])

    def unfinished(self, base: int | None) -> int | None:
        """Return the number of passes of a replay that was interrupted; None: there is none. base : as for ``begin``"""
        begun = self._begun()
        return None if begun is None or begun["base"] != base else int(begun["passes"])

    def _begun(self) -> dict[str, Any] | None:
        """Return what ``begin`` recorded; None: nothing was begun. Raises StateError."""
        begun = _read(self._replay)
        if begun is not None and begun.get(KEY) != FORMAT:
            raise unreleased(self._replay, f"remove {self.path} and replay again")
        return begun

    def commits(self, rank: int) -> Path:
        """Return the folder of the commits of a pass."""
        return self.path / str(rank)

    def deltas(self, rank: int) -> Path:
        return self.path / f"{rank}.deltas"

    def ended(self, rank: int) -> dict[str, Any] | None:
        """Return what ``end`` recorded; None: the pass has not ended."""
        return _read(self.path / f"{rank}.json")

    def linked_into(self, folder: Folder, number: int, count: int) -> list[Commit]:
        """Give the files of every pass a second name, as files of commit ``number`` of a folder. Return the parts."""
        parts = []
        for rank in range(count):
            own, files = Folder(self.commits(rank)), []
            commit = own.newest()
            assert commit is not None
            for index, file in enumerate(commit.files):
                named = replace(file, name=f"{number:08}{file.part}.{index:x}.{file.name.rpartition('.')[2]}")
                target = Path(folder.files.file(named.name))
                atomic_files.remove(target)  # of a replay that was killed here
                atomic_files.link(Path(own.files.file(file.name)), target)
                files.append(named)
            parts.append(Commit(number, tuple(files), commit.contents))
        atomic_files.sync_folder(Path(folder.path))
        return parts

    def end(self, rank: int, record: Mapping[str, Any]) -> None:
        """Record, durably, that a pass has ended. record : plain data"""
        _write(self.path / f"{rank}.json", record)

    def forget(self, rank: int) -> None:
        """Remove what a pass has done: it read other frames than the first."""
        atomic_files.remove_folder(self.commits(rank))
        for path in (self.deltas(rank), part_of(self.deltas(rank))):
            atomic_files.remove(path)

    def remove(self) -> None:
        """Remove the folder. What it was begun with goes first: the rest is nothing without it."""
        atomic_files.remove(self._replay)
        atomic_files.remove_folder(self.path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise ValueError("expected an object")
        return content
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StateError(f"{path}: damaged ({error}); remove {os.fspath(path.parent)} and replay again") from error


def _write(path: Path, record: Mapping[str, Any]) -> None:
    with atomic_files.publishing(path) as file:
        file.write(json.dumps(record).encode())
