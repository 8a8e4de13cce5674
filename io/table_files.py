"""Tables as Parquet, one file each: ``id``, ``row``, then one column per slot, in id order.

``id`` is int64; uint64 in the file of a dynamic table of such keys. A dynamic table's file names its key type.

Reads and writes whole tables only; ``decoding.reader`` reads streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

import penstock.base.interrupts as interrupts
from penstock.base.errors import InputError, listed, short
from penstock.base.filesystem import atomic_files
from penstock.io.decoding.columns import Float32, Int64, float_lists, integers
from penstock.io.decoding.role_types import is_float_list, storage_type
from penstock.io.list_columns import list_column
from penstock.io.sources.batch import arrow_errors
from penstock.io.sources.parquet import open_parquet
from penstock.model.config.id_ranges import expected, key_type_hint, outside
from penstock.model.frames import Array
from penstock.model.row_encodings import FLOAT32, ROWS_KEY, RowEncoding

_ROWS_AT_ONCE = 1 << 16
_NOT_READ = "cannot be read as Parquet"


def table_path(directory: Path, table: str) -> Path:
    """Return the file of a table; characters that are invalid in file names are percent-encoded."""
    return directory / f"{quote(table, safe=' ()[]{}@+=,;!#$&~-_.') if table.strip('.') else quote(table)}.parquet"


class TablesWriter:
    """Writes tables into a directory, all or none: the files get their names when the ``with`` block succeeds.

    written : paths of the files, in the order of the tables
    not_finite : table → how many of its rows are infinite or NaN, and the id of the first; without tables of none
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: list[atomic_files.File] = []
        self.written: list[Path] = []
        self.not_finite: dict[str, tuple[int, int]] = {}

    def __enter__(self) -> TablesWriter:
        atomic_files.make_folders(self._directory)
        return self

    def write(
        self,
        table: str,
        columns: Mapping[str, int],
        blocks: Iterable[tuple[Array, ...]],
        keys: Int64 | npt.NDArray[np.uint64] | None = None,
        rows: RowEncoding = FLOAT32,
    ) -> None:
        """Write one table to disk.

        columns : "row" and the slots, with the floats of each per row; of encoded rows "row" alone, with their bytes
        blocks : (weights, slot, …) of rows in id order, each float32 (n, floats), or encoded
        keys : the ids of all rows, of a dynamic table; None: 0, 1, 2, …
        rows : how the weights are stored
        Raises OSError.
        """
        path = table_path(self._directory, table)
        file = atomic_files.File(path)
        self._files.append(file)
        element = pa.field("element", pa.float32(), nullable=False)
        metadata = {"penstock.table": table}
        if keys is not None:
            metadata["penstock.key_type"] = keys.dtype.name
        fields = [pa.field("id", pa.int64() if keys is None else pa.from_numpy_dtype(keys.dtype), nullable=False)]
        if rows is FLOAT32:
            fields += [pa.field(name, pa.list_(element, dim), nullable=False) for name, dim in columns.items()]
        else:  # not lists of small integers, of which Parquet stores each in 32 bits
            fields.append(pa.field("row", pa.binary(columns["row"]), nullable=False))
            metadata[ROWS_KEY.decode()] = rows.name
        bad = _write_blocks(file, pa.schema(fields, metadata=metadata), blocks, keys, rows)
        if bad:
            self.not_finite[table] = len(bad), int(bad[0] if keys is None else keys[bad[0]])
        file.complete()
        self.written.append(path)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                for file in self._files:
                    file.publish()
                for folder in dict.fromkeys([self._directory, *(file.path.parent for file in self._files)]):
                    atomic_files.sync_folder(folder)
                for path in self.written:
                    atomic_files.discard_orphans(path)
        finally:
            for file in self._files:
                file.give_up()


def _write_blocks(
    file: Any, schema: pa.Schema, blocks: Iterable[tuple[Array, ...]], keys: Any, rows: RowEncoding
) -> list[int]:
    """Return which rows are infinite or NaN."""
    bad: list[int] = []
    with pa.parquet.ParquetWriter(file, schema, compression="none", use_dictionary=False) as writer:
        first = 0
        for block in blocks:
            interrupts.check()
            count = len(block[0])
            ids = np.arange(first, first + count) if keys is None else keys[first : first + count]
            lists = (list_column(values, kind) for values, kind in zip(block, schema.types[1:], strict=True))
            writer.write_batch(pa.RecordBatch.from_arrays([pa.array(ids), *lists], schema=schema))
            bad += (first + rows_not_finite((rows.decode(block[0]), *block[1:]))).tolist()
            first += count
    return bad


def rows_not_finite(parts: Sequence[Float32]) -> Int64:
    """Return the rows with an infinite value or NaN in any of their parts, float32 (n, floats) each: int64 (m,)."""
    indices = [np.zeros(0, np.int64)]
    for first in range(0, len(parts[0]), _ROWS_AT_ONCE):
        of_parts = [np.isfinite(values[first : first + _ROWS_AT_ONCE]).all(axis=1) for values in parts]
        indices.append(first + np.flatnonzero(~np.all(of_parts, axis=0)))
    return np.concatenate(indices)


def read_table(
    directory: Path, table: str, vocabulary_size: int, columns: Mapping[str, int]
) -> Iterator[tuple[Int64, dict[str, Float32]]]:
    """Yield blocks of (ids, column → float32 (n, floats)) of one table's file.

    vocabulary_size : or ANY_INT64 or ANY_UINT64, for a dynamic table
    columns : "row" and the slots, with the floats of each per row; slots that the file lacks are missing from every
        block
    Raises InputError: no file, wrong columns or types, an id twice or outside the vocabulary, values not finite.
    """
    with _open(directory, table) as parquet:
        yield from _read(parquet, str(table_path(directory, table)), table, vocabulary_size, columns)


def read_vectors(path: Path, table: str, vocabulary_size: int, dim: int) -> Iterator[tuple[Int64, Float32]]:
    """Yield blocks of (ids, vectors float32 (n, dim)) of a file with the initial rows of a table.

    vocabulary_size : as for ``read_table``, which raises the same errors; also for values of another type
    """
    name = str(path)
    with ExitStack() as stack:
        with arrow_errors(_NOT_READ, name):
            parquet = stack.enter_context(open_parquet(path))
            _check_schema(parquet.schema_arrow, {"row": dim}, name)
            kind = storage_type(parquet.schema_arrow.field("row").type)
        if kind.value_type != pa.float32():
            problem = f"expected float32, got {kind.value_type}; convert the vectors first"
            raise InputError(problem, source=name, column="row")
        for ids, values in _read(parquet, name, table, vocabulary_size, {"row": dim}):
            yield ids, values["row"]


def _read(
    parquet: pa.parquet.ParquetFile, name: str, table: str, vocabulary_size: int, columns: Mapping[str, int]
) -> Iterator[tuple[Int64, dict[str, Float32]]]:
    first = 0
    with arrow_errors(_NOT_READ, name):
        present = _check_schema(parquet.schema_arrow, columns, name)
        column = parquet.read(["id"])["id"].combine_chunks()
        column.validate(full=True)
    ids = _ids(column, vocabulary_size, table, name)

    def blocks() -> Iterator[pa.RecordBatch]:
        yield from parquet.iter_batches(batch_size=_ROWS_AT_ONCE, columns=present)

    batches = blocks()
    while True:
        interrupts.check()
        with arrow_errors(_NOT_READ, name):
            batch = next(batches, None)
            if batch is None:
                return
            batch.validate(full=True)
        values = {c: _rows(batch.column(c), columns[c], c, name, first, blocks) for c in present}
        yield ids[first : first + batch.num_rows], values
        first += batch.num_rows


def check_table(directory: Path, table: str, columns: Mapping[str, int]) -> list[str]:
    """Make the checks of ``read_table`` that need no rows. Return which of the columns exist. Raises InputError."""
    name = str(table_path(directory, table))
    with _open(directory, table) as parquet, arrow_errors(_NOT_READ, name):
        return _check_schema(parquet.schema_arrow, columns, name)


@contextmanager
def _open(directory: Path, table: str) -> Iterator[pa.parquet.ParquetFile]:
    """Give one table's file. Raises InputError."""
    path = table_path(directory, table)
    if not path.is_file():
        raise InputError(_missing(directory, table), source=str(path))
    with ExitStack() as stack:
        with arrow_errors(_NOT_READ, str(path)):
            parquet = stack.enter_context(open_parquet(path))
        yield parquet


def _missing(directory: Path, table: str) -> str:
    """Return what to do about a table without a file."""
    for parts in (table_path(directory, table), directory / table):
        if parts.is_dir() and any(parts.rglob("*.parquet")):
            join = f"pyarrow.parquet.write_table(pyarrow.parquet.read_table({str(parts)!r}), 'NEW/{table}.parquet')"
            return f"'{parts.name}' is a folder of several files; write it as one: {join}"
    there = sorted(path.name for path in directory.glob("*.parquet") if path.is_file())
    if not there:
        names = listed(sorted(path.name for path in directory.glob("*"))) or "nothing"
        return f"no file for table '{table}'; there: {names}"
    return f"no file for table '{table}'; there: {listed(there)}; --new-tables (new_tables=) keeps its initial rows"


def read_shape(directory: Path, table: str) -> tuple[int, dict[str, int]]:
    """Return the rows of one table's file, and its columns other than the id with their floats. Raises InputError."""
    path = table_path(directory, table)
    with _open(directory, table) as parquet, arrow_errors(_NOT_READ, str(path)):
        schema = parquet.schema_arrow
        _check_float32(schema, str(path))
        kinds = {name: schema.field(name).type for name in schema.names if name != "id"}
        if "row" not in kinds or not pa.types.is_fixed_size_list(kinds["row"]):
            raise InputError("not a table that --out wrote: no column 'row' of lists of one size", source=str(path))
        dims = {name: getattr(kind, "list_size", kinds["row"].list_size) for name, kind in kinds.items()}
        return parquet.metadata.num_rows, dims


def read_keys(directory: Path, table: str) -> npt.NDArray[Any] | None:
    """Return the ids of a dynamic table's file, in its order; None: the table is not dynamic. Raises InputError."""
    with _open(directory, table) as parquet, arrow_errors(_NOT_READ, str(table_path(directory, table))):
        if b"penstock.key_type" not in (parquet.schema_arrow.metadata or {}):
            return None
        keys: npt.NDArray[Any] = parquet.read(["id"])["id"].to_numpy()
        return keys


def _check_schema(schema: pa.Schema, columns: Mapping[str, int], source: str) -> list[str]:
    """Return which of the columns exist."""
    _check_float32(schema, source)
    present = [c for c in columns if c in schema.names]
    for needed in ("id", "row"):
        if needed not in schema.names:
            lists = f"a table has an id and a row, a list of {columns['row']} floats"
            raise InputError(f"no column '{needed}' (has: {', '.join(schema.names)}); {lists}", source=source)
    for name in ("id", *present):
        if len(schema.get_all_field_indices(name)) > 1:
            raise InputError("more than one column has this name", source=source, column=name)
    if not pa.types.is_integer(schema.field("id").type):
        raise InputError(f"expected any integer type, got {schema.field('id').type}", source=source, column="id")
    for name in present:
        kind = schema.field(name).type
        if not is_float_list(storage_type(kind)):
            raise InputError(f"expected a list of {columns[name]} floats, got {kind}", source=source, column=name)
    return present


def _check_float32(schema: pa.Schema, source: str) -> None:
    if ROWS_KEY in (schema.metadata or {}):
        encoding = short(schema.metadata[ROWS_KEY].decode(errors="replace"))
        problem = f"rows of {encoding}, which are for serving; export the checkpoint without --rows"
        raise InputError(problem, source=source)


def _ids(column: pa.Array, vocabulary_size: int, table: str, source: str) -> Int64:
    raw, null = integers(column)
    if null is not None:
        raise InputError("expected an id, got null", source=source, row=int(np.argmax(null)), column="id")
    bad = outside(raw, vocabulary_size)
    if bad.any():
        row = int(np.argmax(bad))
        setting = f"{'vocabulary_size' if vocabulary_size > 0 else 'key_type'} of table '{table}'"
        problem = f"expected {expected(vocabulary_size)} ({setting}), got {raw[row]}"
        problem += key_type_hint(vocabulary_size, int(raw[row]))
        raise InputError(problem, source=source, row=row, column="id")
    if not (raw[1:] > raw[:-1]).all():  # as in a file that was written here
        again = np.ones(len(raw), bool)
        again[np.unique(raw, return_index=True)[1]] = False
        if again.any():
            row = int(np.argmax(again))
            raise InputError(f"id {raw[row]} occurs twice", source=source, row=row, column="id")
    return raw.astype(np.int64, copy=False)


def _num_not_finite(batch: pa.RecordBatch) -> int:
    """Return how many rows of a batch have a value that is not finite."""
    masks = [mask for column in batch.columns if (mask := float_lists(column).not_finite()) is not None]
    return int(np.any(masks, axis=0).sum()) if masks else 0


def _rows(
    column: pa.Array, dim: int, name: str, source: str, first: int, blocks: Callable[[], Iterator[pa.RecordBatch]]
) -> Float32:
    """first : row of the file that the column begins with; blocks : returns those of the file, to be counted"""
    lists = float_lists(column)
    row = lists.first_unlike(dim)
    if row is None:
        return lists.take(slice(0, lists.num_rows), dim)
    if lists.null is not None and lists.null[row]:
        got = "null"
    elif lists.length(row) != dim:
        got = f"{lists.length(row)}"
    else:
        got = (
            f"{lists.of_row(row)}; {sum(map(_num_not_finite, blocks()))} rows of the file are not finite: leave them "
            "out, and they keep their initial values"
        )
    raise InputError(f"expected {dim} finite floats, got {got}", source=source, row=first + row, column=name)
