"""The tables of a checkpoint as arrays, read without an engine or a device."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base.errors import CommitGoneError, StateError
from penstock.base.filesystem.state_files import open_regular
from penstock.checkpoint.manifests import trusting
from penstock.checkpoint.parts import directories_of
from penstock.checkpoint.records import Record, read_records
from penstock.checkpoint.store import Commit, DataFile, Folder
from penstock.checkpoint.versions import NamedCommit
from penstock.io.table_files import rows_not_finite
from penstock.model.config.specs import WEIGHTS
from penstock.model.frames import Array, Float32, Int64
from penstock.model.row_encodings import FLOAT32, RowEncoding
from penstock.model.updates import row_slots_of


class SavedTables:
    """A commit of a checkpoint, with every digest verified. Raises StateError, also if a run removes it.

    path : ``DIR``, of which the newest complete commit is read, or ``DIR@VERSION``
    tables : name → its entry in the manifest: vocabulary_size, dim, optimizer, slots
    rows : how the weights are stored
    not_finite : name → how many rows that ``parts`` has returned are infinite or NaN, and the id of the first one; only
        of tables that have some
    """

    rows = FLOAT32

    def __init__(self, path: str | os.PathLike[str]) -> None:
        version = NamedCommit.of(path)
        self._folder = version.folder
        self.commit = version.read(self._folder.checked)
        self._where = f"{self._folder.path}, commit {self.commit.number}"
        self.tables = {table["name"]: table for table in self.commit.contents["tables"]}
        self.not_finite: dict[str, tuple[int, int]] = {}

    def parts(self, name: str) -> dict[str, Float32]:
        """Return the weights and slots of one table by name, float32 (rows, floats per row), with one copy in memory.

        Those of a dynamic table are in the order of ``keys``. Raises StateError if the commit lacks a row.
        """
        num_rows, dims = self.tables[name]["vocabulary_size"], self.part_dims(name)
        if num_rows * dims[WEIGHTS] * 2 > sum(file.num_bytes for file in self.commit.files):  # 16-bit weights
            raise StateError(f"{self._where}: table '{name}' has more rows than the files can contain")
        with trusting(self._where):
            parts = self._parts(name, num_rows, dims)
        self.not_finite |= _not_finite(name, list(parts.values()), self.keys(name))
        return parts

    def _parts(self, name: str, num_rows: int, dims: Mapping[str, int]) -> dict[str, Float32]:
        parts = {key: np.zeros((num_rows, dim), np.float32) for key, dim in dims.items()}
        known = np.zeros(num_rows, bool)
        for table, ids, saved in rows_of(self._folder, self.commit):
            if table == name:
                known[ids] = True
                for whole, block in zip(parts.values(), saved, strict=True):
                    whole[ids] = block
        if not known.all():
            raise StateError(f"{self._folder.path}: table '{name}' lacks row {int(np.argmin(known))}")
        if (rows := self._keys_and_rows(name)[1]) is not None:
            parts = {key: whole[rows] for key, whole in parts.items()}
        return parts

    def num_rows(self, name: str) -> int:
        """Return the rows of one table that ``parts`` returns."""
        keys = self.keys(name)
        return int(self.tables[name]["vocabulary_size"]) if keys is None else len(keys)

    def part_dims(self, name: str) -> dict[str, int]:
        """Return the floats per row of the weights and slots of one table."""
        return part_dims(self.tables[name])

    def keys(self, name: str) -> Array | None:
        """Return the keys of a dynamic table that have a row and are not expired, ascending, in their type; None: it is
        not dynamic."""
        with trusting(self._where):
            return self._keys_and_rows(name)[0]

    def _keys_and_rows(self, name: str) -> tuple[Array, Int64] | tuple[None, None]:
        settings = self.tables[name].get("dynamic")
        if settings is None:
            return None, None
        return keys_and_rows(self._directories[name], settings)

    @cached_property
    def _directories(self) -> dict[str, Mapping[str, Array]]:
        return directories_of(self._folder, self.commit)


class EncodedTables:
    """The tables of a commit for serving: their weights in fewer bits, without slots. Attributes as of SavedTables."""

    def __init__(self, saved: SavedTables, rows: RowEncoding) -> None:
        self._saved, self.rows, self.tables = saved, rows, saved.tables
        self.keys, self.num_rows = saved.keys, saved.num_rows
        self.not_finite: dict[str, tuple[int, int]] = {}

    def parts(self, name: str) -> dict[str, Array]:
        """Return the weights of one table, uint8 (rows, bytes per row)."""
        weights = self.rows.encode(self._saved.parts(name)[WEIGHTS])
        self.not_finite |= _not_finite(name, [self.rows.decode(weights)], self.keys(name))
        return {WEIGHTS: weights}

    def part_dims(self, name: str) -> dict[str, int]:
        return {WEIGHTS: self.rows.row_bytes(self.tables[name]["dim"])}


def _not_finite(name: str, parts: Sequence[Float32], keys: Array | None) -> dict[str, tuple[int, int]]:
    """Return the entry of a table in ``not_finite``; {} if it has none."""
    bad = rows_not_finite(parts)
    return {name: (len(bad), int(bad[0] if keys is None else keys[bad[0]]))} if len(bad) else {}


def rows_of(folder: Folder, commit: Commit) -> Iterator[tuple[str, Int64, list[Float32]]]:
    """Yield (table, ids, parts) of every block of a commit, older blocks first.

    ids : int64 (n,); parts : the weights, then each slot, float32 (n, floats per row). Raises StateError.
    """
    yield from rows_in(folder.records(commit, commit.files))


def rows_in(records: Iterable[Record]) -> Iterator[tuple[str, Int64, list[Float32]]]:
    """Yield (table, ids, parts) of every block among records, as ``rows_of`` does."""
    for record in records:
        if record.kind == "rows":
            ends = np.cumsum(record.header["dims"])
            parts = np.split(record.arrays["rows"], ends[:-1], axis=1)
            yield record.header["table"], record.ids, parts


def keys_and_rows(state: Mapping[str, Array], settings: Mapping[str, Any]) -> tuple[Array, Int64]:
    """Return the keys of a directory that are not expired, ascending, and their rows.

    state : of the directory; settings : of its table, as the manifest has them
    """
    clock, after = int(state["numbers"][1]), settings["expire_after"]
    present = np.ones(len(state["key"]), bool) if after is None else clock - state["last"].astype(np.int64) <= after
    keys = state["key"][present].view(settings["key_type"])
    order = np.argsort(keys)
    return keys[order], state["row"][present][order].astype(np.int64)


def records_of(folder: Folder, commit: Commit, file: DataFile) -> Iterator[Record]:
    """Yield the records of a file of a commit. Of a local file, pages are read on demand. Raises StateError."""
    if not isinstance(folder.path, Path):
        yield from folder.records(commit, [file])
        return
    path = folder.path / file.name
    try:
        with open_regular(path) as data:
            mapped = mmap.mmap(data.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        folder.checked(commit, sizes_only=True)  # raises, with the reason
        raise
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise StateError(f"{path}: cannot be read ({error})") from error
    yield from read_records(mapped, path)


def changed_rows(folder: Folder, commit: Commit) -> int | None:
    """Return how many rows a commit wrote, from the headers of its last files. Raises StateError.

    None: all rows, at a URI, where each block of them would be a request; or a run has removed a file.
    """
    if not isinstance(folder.path, Path) and all(file.parent is None for file in commit.last_files):
        return None
    with contextlib.suppress(CommitGoneError):
        records = folder.records(commit, commit.last_files, only_shapes=True)
        return sum(len(record.arrays["rows"]) for record in records if record.kind == "rows")
    return None


def part_dims(table: Mapping[str, Any]) -> dict[str, int]:
    """Return the floats per row of the weights and slots of a table. table : its entry in the manifest"""
    dim, slots, of_rows = int(table["dim"]), table["slots"], row_slots_of(table["optimizer"])
    first_of_rows = len(slots) - of_rows
    return {WEIGHTS: dim, **{slot: dim if number < first_of_rows else 1 for number, slot in enumerate(slots)}}
