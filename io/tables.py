"""Tables as Parquet, one file each: ``id`` int64, ``row``, then one column per slot, in id order."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from penstock.errors import InputError

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

_ROWS_AT_ONCE = 1 << 16


def table_path(directory: Path, table: str) -> Path:
    """The file of a table; characters that no file name may hold are percent-encoded."""
    return directory / f"{quote(table, safe=' ()[]{}@+=,;!#$&~-_.') if table.strip('.') else quote(table)}.parquet"


def write_table(
    directory: Path, table: str, dim: int, slots: Sequence[str], blocks: Iterable[tuple[Float32, ...]]
) -> Path:
    """Write one table.

    blocks : (weights, slot, …) of rows in id order, each float32 (n, dim)
    The file appears under its name only when it is whole and on disk. Raises OSError.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = table_path(directory, table)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.part")
    rows = pa.list_(pa.field("element", pa.float32(), nullable=False), dim)
    fields = [pa.field("id", pa.int64(), nullable=False)]
    fields += [pa.field(name, rows, nullable=False) for name in ("row", *slots)]
    schema = pa.schema(fields, metadata={"penstock.table": table})
    try:
        with open(unfinished, "wb") as file:
            with pa.parquet.ParquetWriter(file, schema, compression="none", use_dictionary=False) as writer:
                first = 0
                for block in blocks:
                    count = len(block[0])
                    columns: list[pa.Array] = [pa.array(np.arange(first, first + count))]
                    for values in block:
                        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
                        columns.append(pa.FixedSizeListArray.from_arrays(flat, type=rows))
                    writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
                    first += count
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def read_table(
    directory: Path, table: str, vocabulary_size: int, dim: int, columns: Sequence[str]
) -> Iterator[tuple[Int64, dict[str, Float32]]]:
    """Blocks of (ids, column → float32 (n, dim)) of one table's file.

    columns : "row" and the slots; slots that the file lacks are left out of every block
    Raises InputError: no file, wrong columns or types, an id twice or outside the vocabulary, values not finite.
    """
    path = table_path(directory, table)
    name = str(path)
    if not path.exists():
        raise InputError(f"no file for table '{table}'", source=name)
    seen = np.zeros(vocabulary_size, bool)
    try:
        parquet = pa.parquet.ParquetFile(path)
        schema = parquet.schema_arrow
        for needed in ("id", "row"):
            if needed not in schema.names:
                raise InputError(f"no column '{needed}' (has: {', '.join(schema.names)})", source=name)
        wanted = [c for c in columns if c in schema.names]
        if not pa.types.is_integer(schema.field("id").type):
            raise InputError(f"expected any integer type, got {schema.field('id').type}", source=name, column="id")
        first = 0
        for batch in parquet.iter_batches(batch_size=_ROWS_AT_ONCE, columns=["id", *wanted]):
            batch.validate(full=True)
            ids = _ids(batch.column("id"), seen, vocabulary_size, table, name, first)
            yield ids, {c: _rows(batch.column(c), dim, c, name, first) for c in wanted}
            first += len(ids)
    except InputError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"cannot be read as Parquet: {error}", source=name) from error


def _ids(column: pa.Array, seen: npt.NDArray[np.bool_], size: int, table: str, source: str, first: int) -> Int64:
    if column.null_count:
        raise InputError("expected ids, got null", source=source, column="id")
    given = column.to_numpy(zero_copy_only=False)
    bad = (given < 0) | (given >= size)
    if bad.any():
        row = int(np.argmax(bad))
        wanted = f"0 <= id < {size} (vocabulary_size of table '{table}')"
        raise InputError(f"expected {wanted}, got {given[row]}", source=source, row=first + row, column="id")
    ids: Int64 = given.astype(np.int64)
    if seen[ids].any() or len(np.unique(ids)) != len(ids):
        raise InputError("an id occurs twice", source=source, column="id")
    seen[ids] = True
    return ids


def _rows(column: Any, dim: int, name: str, source: str, first: int) -> Float32:
    kind = column.type
    is_list = pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not is_list or not pa.types.is_floating(kind.value_type):
        raise InputError(f"expected a list of {dim} floats, got {kind}", source=source, column=name)
    flat = column.flatten()
    if column.null_count or flat.null_count or len(flat) != len(column) * dim or not _even(column, dim):
        raise InputError(f"expected {dim} floats in every row", source=source, column=name)
    values: Float32 = flat.to_numpy(zero_copy_only=False).astype(np.float32)
    rows = values.reshape(len(column), dim)
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        row = first + int(np.argmin(finite))
        raise InputError("expected finite values", source=source, row=row, column=name)
    return rows


def _even(column: Any, dim: int) -> bool:
    if pa.types.is_fixed_size_list(column.type):
        return bool(column.type.list_size == dim)
    return bool((np.diff(column.offsets.to_numpy()) == dim).all())
