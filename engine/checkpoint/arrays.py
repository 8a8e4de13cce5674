"""The tables of a checkpoint as arrays, read without an engine or a device."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from penstock.checkpoint.engine_state import rows_of, slot_dim
from penstock.checkpoint.store import Commit, Folder
from penstock.errors import StateError
from penstock.frames import Array, Float32, Int64

WEIGHTS = "parameters"


class SavedTables:
    """The newest complete commit of a folder, with every digest verified. Raises StateError, also if a run removes it.

    tables : name → its entry in the manifest: vocabulary_size, dim, optimizer, slots
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = Folder(path)
        self.commit = self._folder.read_last(self._folder.checked)
        self.tables = {table["name"]: table for table in self.commit.contents["tables"]}

    def parts(self, name: str) -> dict[str, Float32]:
        """Return the weights and slots of one table by name, float32 (rows, floats per row), with one copy in memory.

        Those of a dynamic table are in the order of ``keys``. Raises StateError if the commit lacks a row.
        """
        num_rows, dims = self.tables[name]["vocabulary_size"], self.part_dims(name)
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

    def part_dims(self, name: str) -> dict[str, int]:
        """Return the floats per row of the weights and slots of one table."""
        about = self.tables[name]
        return {WEIGHTS: about["dim"], **dict.fromkeys(about["slots"], slot_dim(about))}

    def keys(self, name: str) -> Array | None:
        """Return the keys of a dynamic table that have a row and are not expired, ascending, in their type; None: it is
        not dynamic."""
        return self._keys_and_rows(name)[0]

    def _keys_and_rows(self, name: str) -> tuple[Array, Int64] | tuple[None, None]:
        settings = self.tables[name].get("dynamic")
        if settings is None:
            return None, None
        state = self._directories[name]
        clock, after = int(state["numbers"][1]), settings["expire_after"]
        present = np.ones(len(state["key"]), bool) if after is None else clock - state["last"].astype(np.int64) <= after
        keys = state["key"][present].view(settings["key_type"])
        order = np.argsort(keys)
        return keys[order], state["row"][present][order].astype(np.int64)

    @cached_property
    def _directories(self) -> dict[str, Mapping[str, Array]]:
        return directories_of(self._folder, self.commit)


def directories_of(folder: Folder, commit: Commit) -> dict[str, Mapping[str, Array]]:
    """Return the saved directory of every dynamic table by name, in the form of ``Directory.get_state``."""
    if not any(table.get("dynamic") for table in commit.contents["tables"]):
        return {}  # without reading files
    records = folder.records(commit, commit.last_files)
    return {record.about["table"]: record.arrays for record in records if record.kind == "directory"}
