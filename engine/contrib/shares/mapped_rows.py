"""The rows of a commit in its data files: read where they are mapped, without an engine and without a copy of a table.

Pages of a file are no memory of the process: the system reads them on demand and drops them when it needs room. So
tables that exceed memory can be hashed and written. What a row needs next to its floats, where it is and the state of
its key, is in mapped files as well. A directory exists only while its share is opened, so one is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from penstock.base.errors import StateError
from penstock.checkpoint.arrays import records_of
from penstock.checkpoint.records import Record
from penstock.checkpoint.store import Commit, Folder
from penstock.contrib.shares import WholeTables, mapped_array
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.frames import Array, Float32, Int64
from penstock.rows.key_directory import make_directory
from penstock.rows.shares import shares_of
from penstock.rows.state_hash import KeyArrays

# Where a row is: the number of its record, and its place there.
_PLACE = np.dtype([("record", np.int32), ("row", np.int32)])
_MISSING = -1


class MappedShare:
    """The rows of one share of a commit, as ``WholeTables`` reads them.

    folder : of the commit, and of the mapped files, which have no names
    """

    def __init__(self, folder: Folder, commit: Commit, config: EmbeddingConfig, rank: int) -> None:
        parts, self._seed, mod = commit.parts, commit.contents["seed"], config.sharding_strategy == "MOD"
        self._specs = specs = {spec.name: spec for spec in config.tables}
        self._shares = shares = shares_of(config.tables, mod, self._seed, rank, len(parts))
        self._scratch, files = Path(folder.path), [file for file in commit.files if file.part == parts[rank]]
        self._rows: dict[str, list[Float32]] = {name: [] for name in specs}
        self._places = {name: mapped_array(_PLACE, shares[name].num_rows, self._scratch) for name in specs}
        for places in self._places.values():
            places["record"] = _MISSING
        self._keys: dict[str, tuple[Int64, KeyArrays]] = {}
        for file in files:
            for record in records_of(folder, commit, file):
                if record.kind == "rows":
                    self._add(record)
                elif record.kind == "directory" and file == files[-1]:
                    self._keys[record.header["table"]] = self._read_keys(record.header["table"], record.arrays)
        for name, places in self._places.items():
            if name not in self._keys and (places["record"] == _MISSING).any():
                file_name = folder.files.file(files[-1].name)
                raise StateError(f"{file_name}: table '{name}' lacks a row; restore another commit")

    def rows_in_hash_order(self, name: str) -> tuple[Int64, KeyArrays]:
        """Return the rows of a dynamic table in the order of the state hash, as ``read_rows`` takes them; its keys."""
        return self._keys[name]

    def read_rows(self, name: str, part: int, rows: Int64) -> Float32:
        """Return one part of rows by their numbers in the share, float32 (n, floats of the part)."""
        dims, places = self._specs[name].part_dims, self._places[name][rows]
        first = sum(dims[:part])
        values = np.empty((len(rows), dims[part]), np.float32)
        order = np.argsort(places["record"], kind="stable")
        records, starts = np.unique(places["record"][order], return_index=True)
        for record, indices in zip(records.tolist(), np.split(order, starts[1:]), strict=True):
            values[indices] = self._rows[name][record][places["row"][indices], first : first + values.shape[1]]
        return values

    def _add(self, record: Record) -> None:
        """Add a block of rows, which replace those of earlier records."""
        name, rows, ids = record.header["table"], record.arrays["rows"], record.ids
        share = self._shares[name]
        numbers = ids - share.ids(0) if self._specs[name].dynamic else share.locate(np.ascontiguousarray(ids))[1]
        places = self._places[name]
        places["record"][numbers] = len(self._rows[name])
        places["row"][numbers] = np.arange(len(rows))
        self._rows[name].append(rows)

    def _read_keys(self, name: str, state: Mapping[str, Array]) -> tuple[Int64, KeyArrays]:
        """Return what ``rows_in_hash_order`` does, in mapped files."""
        share = self._shares[name]
        directory = make_directory(self._specs[name], self._seed, share=(share.rank, share.count))
        rows = directory.set_state({key: np.array(array) for key, array in state.items()})
        saved = np.zeros(max(1, share.num_rows), np.int64)  # the number of each row of the directory in the files
        saved[rows] = np.asarray(state["row"], np.int64) - share.ids(0)
        state, waiting = directory.state(expired=False), directory.candidates()
        arrays = (state["key"], state["last"], state.get("count"), *waiting.values())
        keys = [self._mapped(array) for array in arrays if array is not None]
        return self._mapped(saved[state["row"]]), (keys, directory.clock)

    def _mapped(self, array: Array) -> Array:
        copy = mapped_array(array.dtype, len(array), self._scratch)
        copy[:] = array
        return copy


def mapped_tables(folder: Folder, commit: Commit, config: EmbeddingConfig) -> WholeTables:
    """Return the tables of a commit whose shares committed together."""
    mapped = [MappedShare(folder, commit, config, rank) for rank in range(len(commit.parts))]
    return WholeTables(config, mapped, Path(folder.path))
