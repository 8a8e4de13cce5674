"""The tables of an engine to files and from files: Parquet, and Orbax checkpoints."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from penstock.errors import CapacityError, InputError, StateError, UsageError
from penstock.frames import Float32, Int64
from penstock.io.table_files import TablesWriter, check_table, read_table, table_path
from penstock.tables.orbax import is_orbax, load_tree, parts_of
from penstock.tables.table_set import TableSet

Block = tuple[str, Int64, Mapping[int, Float32]]  # the arguments of ``TableSet.set_rows``


def write_tables(tables: TableSet, directory: str | os.PathLike[str]) -> list[Path]:
    """Write one Parquet file per table, all of them or none; return their paths.

    Over several processes the first one writes; the others read along, and return none.
    """
    tables.check_all_rows("a file of --out")
    processes = tables.processes
    if processes is not None and processes.rank:
        for name in tables.specs:
            deque(_blocks(tables.table(name).stream, len(tables.parts(name))), maxlen=0)
        processes.agree("the end of write_tables")
        return []
    with TablesWriter(Path(directory)) as writer:
        for name in tables.specs:
            columns, dynamic = _columns(tables, name), tables.dynamic.get(name)
            keys, stream = (None, tables.whole_table(name).stream) if dynamic is None else dynamic.sorted()
            writer.write(name, columns, _blocks(stream, len(columns)), keys)
    if processes is not None:
        processes.agree("the end of write_tables")
    return writer.written


def _blocks(stream: Callable[[int], Iterable[Float32]], num_parts: int) -> Iterator[tuple[Float32, ...]]:
    """Yield the rows of all parts of a table, block by block."""
    return zip(*(stream(part) for part in range(num_parts)), strict=True)


def reading(tables: TableSet, directory: str | os.PathLike[str], new_tables: bool) -> Callable[[], None]:
    """Return a callable that sets every row in the files of ``write_tables``, or all rows from an Orbax checkpoint.

    new_tables : keep the rows of tables that are not there
    Parquet files are checked for presence and columns now, and row by row when the callable runs.
    """
    path = Path(directory)
    if is_orbax(path):
        blocks: Iterable[Block] = list(_orbax_tables(tables, path, new_tables))
    else:
        names = [name for name in tables.specs if not new_tables or table_path(path, name).exists()]
        if not names:
            raise InputError("no file for any table of the configuration", source=str(path))
        for name in names:
            check_table(path, name, _columns(tables, name))
        blocks = _parquet_blocks(tables, path, names)

    def read() -> None:
        try:
            for name, ids, values in blocks:
                rows, own_values = tables.select_own(name, ids, list(values.values()))
                tables.set_rows(name, rows, dict(zip(values, own_values, strict=True)))
        except CapacityError as error:  # after other rows were set
            raise StateError(f"{path}: {error}") from None

    return read


def _columns(tables: TableSet, name: str) -> dict[str, int]:
    """Return the columns of a table's file, in the order of the table's parts, with the floats of each per row."""
    return dict(zip(["row", *list(tables.parts(name))[1:]], tables.table(name).part_dims, strict=True))


def _parquet_blocks(tables: TableSet, directory: Path, names: Iterable[str]) -> Iterator[Block]:
    for name in names:
        columns, spec, dynamic = _columns(tables, name), tables.specs[name], tables.dynamic.get(name)
        size = spec.vocabulary_size if dynamic is None else dynamic.id_range
        parts = {column: part for part, column in enumerate(columns)}
        for ids, rows in read_table(directory, name, size, columns):
            yield name, ids, {parts[column]: values for column, values in rows.items()}


def _orbax_tables(tables: TableSet, directory: Path, new_tables: bool) -> Iterator[Block]:
    for name in tables.dynamic:
        raise UsageError(f"table '{name}' is dynamic, and an Orbax checkpoint has no keys: load files that --out wrote")
    tree = load_tree(directory)
    for name in tables.specs:
        if new_tables and name not in tree:
            continue
        table, parts = tables.whole_table(name), tables.parts(name)
        num_rows = table.layout.vocabulary_size
        by_name = parts_of(tree, directory, name, num_rows, dict(zip(parts, table.part_dims, strict=True)))
        ids = np.arange(num_rows)
        yield name, ids, {parts[key]: rows for key, rows in by_name.items()}
