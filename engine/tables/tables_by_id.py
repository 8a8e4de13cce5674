"""The tables of one engine as they are read and written, by id: looked up, loaded, hashed, and written to files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.config.specs import TableSpec
from penstock.errors import UsageError, listed
from penstock.frames import Array, Float32, Int64
from penstock.tables.dynamic_table import DynamicTable, TableKeys, valid_ids
from penstock.tables.orbax import WEIGHTS
from penstock.tables.shares import AnyShare
from penstock.tables.state_hash import KeyArrays, state_hash
from penstock.tables.table_io import checked_parts, write_tables
from penstock.updates import Ops, quantize

if TYPE_CHECKING:
    from penstock.bridge.device_tables import DeviceTable
    from penstock.bridge.processes.agreement import Processes


class TablesById:
    """The tables of a TableSet by id.

    specs : of the whole tables, by name
    dynamic : those of them that are dynamic
    shares : which rows are here, by table; empty: all
    processes : that the mesh spans; None: only this one
    """

    specs: Mapping[str, TableSpec]
    dynamic: TableKeys
    shares: Mapping[str, AnyShare] = {}
    processes: Processes | None = None
    _tables: dict[str, DeviceTable]

    def table(self, name: str) -> DeviceTable:
        """Return a table on the devices. Raises UsageError for a name missing from the configuration."""
        if not isinstance(name, str) or name not in self._tables:
            raise UsageError(f"no table '{name}' in the configuration ({listed(self._tables)})")
        return self._tables[name]

    def parts(self, name: str) -> dict[str, int]:
        """Map names to parts of the device table: the weights first, then the slots in TensorFlow's order."""
        self.table(name)
        return {key: part for part, key in enumerate([WEIGHTS, *(slot for slot, _ in self.specs[name].slots)])}

    def num_rows(self, name: str) -> int:
        """Return how many rows of a table are here."""
        return self.shares[name].num_rows if name in self.shares else self.specs[name].vocabulary_size

    def ids(self, name: str, numbers: Int64) -> Int64:
        """Return the ids of rows of a static table by their numbers here; keys as they are."""
        share = self.shares.get(name)
        return numbers if share is None or name in self.dynamic else share.ids(numbers)

    def all_ids(self, name: str) -> range:
        """Return the ids of all rows of a static table that are here."""
        share = self.shares.get(name)
        if share is None:
            return range(self.specs[name].vocabulary_size)
        return range(share.ids(0), share.ids(share.num_rows), share.stride)

    def numbers(self, name: str, ids: Int64) -> Int64:
        """Return the numbers of ids of this share."""
        return self.shares[name].locate(ids)[1] if name in self.shares else ids

    def by_id(self, name: str, sums: Mapping[str, Array]) -> dict[str, Array]:
        """Return accumulated sums (``TableStore.get_state``) by the ids of the whole table."""
        share = self.shares.get(name)
        if share is None or name in self.dynamic:
            return dict(sums)
        return {key: share.ids(array) if key.endswith(".ids") else array for key, array in sums.items()}

    def own(self, name: str, ids: Int64, parts: list[Float32]) -> tuple[Int64, list[Float32]]:
        """Return the numbers of those of some ids whose rows are here, and some parts of their rows."""
        if name not in self.shares:
            return ids, parts
        places, numbers = self.shares[name].select(np.ascontiguousarray(ids))
        return numbers, [rows[places] for rows in parts]

    def lookup(self, name: str, ids: Int64, forward: bool) -> Float32:
        """Return the weights of ids, float32 (n, dim); ids may repeat.

        ids : as ``valid_ids`` returns them
        forward : return them as a forward pass sees them, that is, quantized where the table is
        """
        rows = (self.dynamic.get(name) or self.table(name)).read(ids)
        seen = self.specs[name].quantization if forward else None
        if seen is None:
            return rows
        return np.asarray(quantize(Ops(np), rows, seen.num_buckets, seen.lower, seen.upper), np.float32)

    def whole(self, name: str) -> DeviceTable:
        """Return a table on the devices whose rows are all of its ids. Raises UsageError for a dynamic table."""
        table = self.table(name)
        if name in self.dynamic:
            raise UsageError(f"table '{name}' is dynamic: its rows are read by key, with keys() and lookup()")
        if name in self.shares:
            raise UsageError(
                f"table '{name}': only share {self.share_text(name)} of its rows is here; look up its ids, or "
                "read the tables of the whole job"
            )
        return table

    def dynamic_table(self, name: str) -> DynamicTable:
        """Return a dynamic table. Raises UsageError for another one."""
        self.table(name)
        if name not in self.dynamic:
            raise UsageError(f"table '{name}' is not dynamic: its ids are all below {self.specs[name].vocabulary_size}")
        return self.dynamic[name]

    def retrieve(self, name: str) -> dict[str, Float32]:
        """Return a table's weights and slots by name, float32 (vocabulary_size, floats per row) in id order."""
        table = self.whole(name)
        return {key: np.concatenate(list(table.stream(part))) for key, part in self.parts(name).items()}

    def checked(self, name: str, rows: Any, ids: Any, slots: Mapping[str, Any]) -> tuple[Int64, dict[int, Float32]]:
        """Return the arguments of ``load_parameters`` as ids and part → values. Raises UsageError."""
        table, parts = self.table(name), self.parts(name)
        if ids is None and name in self.dynamic:
            raise UsageError(f"table '{name}' is dynamic: name the keys of the rows, with ids=")
        if ids is None:
            self.whole(name)
        row_ids = np.arange(table.layout.vocabulary_size) if ids is None else self.valid_ids(name, ids)
        if ids is not None and len(np.unique(row_ids)) != len(row_ids):
            raise UsageError(f"table '{name}': an id occurs twice in ids")
        return row_ids, checked_parts(name, list(parts), {WEIGHTS: rows, **slots}, len(row_ids), table.part_dims)

    def set_rows(self, name: str, ids: Int64, values: Mapping[int, Float32]) -> None:
        """Set rows of a table. values : part → float32 rows, as ``checked`` returns them

        Raises CapacityError if a dynamic table has no room; nothing has changed then.
        """
        if name in self.dynamic:
            ids = self.dynamic[name].admit(ids)
        self.set_stored_rows(name, ids, values)

    def set_stored_rows(self, name: str, rows: Int64, values: Mapping[int, Float32]) -> None:
        """Set rows of a table by their numbers: their ids, unless the table is dynamic."""
        for part, block in values.items():
            self.table(name).write(rows, np.ascontiguousarray(block), part)

    def hash(self, global_step: int) -> str:
        """Return the SHA-256 (hex) of all tables, in order of name, and the step; see ``Engine.state_hash``."""

        def stream(name: str, part: int) -> Iterable[Float32]:
            return (self.dynamic.get(name) or self.table(name)).stream(part)

        self._check_whole("the state hash")
        return state_hash(self.specs, global_step, stream, lambda name: self.dynamic[name].key_arrays())

    def in_order(self, name: str) -> tuple[Int64, KeyArrays]:
        """Return the rows of a dynamic table here in the order of the state hash, as ``read_rows`` takes them, and its
        keys."""
        state = self.dynamic[name].directory.state(expired=False)
        return state["row"].astype(np.int64), self.dynamic[name].key_arrays()

    def read_rows(self, name: str, part: int, rows: Int64) -> Float32:
        """Return one part of rows by their numbers here, float32 (n, floats of the part)."""
        return self.table(name).read(rows, part)

    def write(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write one Parquet file per table, all of them or none; return their paths."""
        self._check_whole("a file of --out")
        return write_tables(self, directory)

    def valid_ids(self, name: str, ids: Any) -> Int64:
        """Return ids as numbers of rows here, int64 (n,); keys as they are.

        Raises UsageError for an id outside the table, or of another share.
        """
        self.table(name)
        size = self.specs[name].vocabulary_size
        valid = valid_ids(name, ids, self.dynamic[name].id_range if name in self.dynamic else size)
        if name not in self.shares:
            return valid
        ranks, numbers = self.shares[name].locate(valid)
        other = ranks != self.shares[name].rank
        if other.any():
            raise UsageError(
                f"table '{name}': id {np.asarray(ids).reshape(-1)[other][0]} belongs to share {ranks[other][0]}, and "
                f"share {self.share_text(name)} is here"
            )
        return numbers

    def share_text(self, name: str) -> str:
        """Return which share of a table is here, for messages."""
        return f"{self.shares[name].rank} of {self.shares[name].count}"

    def _check_whole(self, subject: str) -> None:
        for name in self.shares:
            raise UsageError(f"{subject} is of whole tables, and only share {self.share_text(name)} of them is here")
