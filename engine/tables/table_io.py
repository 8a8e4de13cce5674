"""The tables of an engine to files and from files: Parquet, and Orbax checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from penstock.errors import CapacityError, StateError, UsageError
from penstock.frames import Float32, Int64
from penstock.io.storage.table_files import TablesWriter, check_table, read_table
from penstock.tables.orbax import is_orbax, load_tree, parts_of

if TYPE_CHECKING:
    from penstock.bridge.device_tables import DeviceTable
    from penstock.tables.dynamic_table import DynamicTable

Block = tuple[str, Int64, Mapping[int, Float32]]  # the arguments of ``Tables.set_rows``


class Tables(Protocol):
    """The part of a TableSet that files need."""

    @property
    def specs(self) -> Mapping[str, Any]: ...
    @property
    def dynamic(self) -> Mapping[str, DynamicTable]: ...
    def table(self, name: str) -> DeviceTable: ...
    def whole(self, name: str) -> DeviceTable: ...
    def parts(self, name: str) -> dict[str, int]: ...
    def own(self, name: str, ids: Int64, values: Float32) -> tuple[Int64, Float32]: ...
    def set_rows(self, name: str, ids: Int64, values: Mapping[int, Float32]) -> None: ...


def write_tables(tables: Tables, directory: str | os.PathLike[str]) -> list[Path]:
    """Write one Parquet file per table, all of them or none; return their paths."""
    with TablesWriter(Path(directory)) as writer:
        for name in tables.specs:
            table, slots, dynamic = tables.table(name), list(tables.parts(name))[1:], tables.dynamic.get(name)
            keys, stream = (None, tables.whole(name).stream) if dynamic is None else dynamic.sorted()
            blocks = zip(*(stream(part) for part in range(table.num_parts)), strict=True)
            writer.write(name, table.layout.dim, slots, blocks, keys)
    return writer.written


def reading(tables: Tables, directory: str | os.PathLike[str]) -> Callable[[], None]:
    """Return a callable that sets every row in the files of ``write_tables``, or all rows from an Orbax checkpoint.

    Parquet files are checked for presence and columns now, and row by row when the callable runs.
    """
    path = Path(directory)
    if is_orbax(path):
        blocks: Iterable[Block] = list(_orbax_tables(tables, path))
    else:
        for name in tables.specs:
            check_table(path, name, tables.table(name).layout.dim, _columns(tables, name))
        blocks = _parquet_blocks(tables, path)

    def read() -> None:
        try:
            for name, ids, values in blocks:
                found = {part: tables.own(name, ids, rows) for part, rows in values.items()}
                numbers = next((numbers for numbers, _ in found.values()), ids)
                tables.set_rows(name, numbers, {part: rows for part, (_, rows) in found.items()})
        except CapacityError as error:  # after other rows were set
            raise StateError(f"{path}: {error}") from None

    return read


def _columns(tables: Tables, name: str) -> list[str]:
    """Return the columns of a table's file, in the order of the table's parts."""
    return ["row", *list(tables.parts(name))[1:]]


def _parquet_blocks(tables: Tables, directory: Path) -> Iterator[Block]:
    for name in tables.specs:
        columns, spec, dynamic = _columns(tables, name), tables.specs[name], tables.dynamic.get(name)
        size = spec.vocabulary_size if dynamic is None else dynamic.id_range
        for ids, found in read_table(directory, name, size, spec.dim, columns):
            yield name, ids, {columns.index(column): values for column, values in found.items()}


def _orbax_tables(tables: Tables, directory: Path) -> Iterator[Block]:
    for name in tables.dynamic:
        raise UsageError(f"table '{name}' is dynamic, and an Orbax checkpoint has no keys: load files that --out wrote")
    tree = load_tree(directory)
    for name in tables.specs:
        layout, parts = tables.whole(name).layout, tables.parts(name)
        found = parts_of(tree, directory, name, (layout.vocabulary_size, layout.dim), list(parts))
        ids = np.arange(layout.vocabulary_size)
        yield name, ids, {parts[key]: rows for key, rows in found.items()}
