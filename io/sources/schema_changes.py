"""Batches of one stream whose schema is not that of the first one: converted if nothing is lost, else refused."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyarrow as pa

_TABLE_KEY = b"penstock.table"


def conformed(
    batch: pa.RecordBatch, schema: pa.Schema, columns: Collection[str] | None = None
) -> pa.RecordBatch | None:
    """Return a batch with the columns of a schema, or None if that would lose something.

    Their order may differ, and of a column whether it may have nulls, its metadata, and whether its strings are a
    dictionary or what their offsets are; a column of nulls fits every type.
    columns : those in use, of which a batch that differs keeps only these; None: all
    """
    if batch.schema.equals(schema, check_metadata=True):
        return batch
    if _table_of(batch.schema) not in (None, _table_of(schema)):
        return None
    if batch.schema.equals(schema):
        return batch
    if sorted(batch.schema.names) != sorted(schema.names):
        return None
    used = pa.schema([field for field in schema if columns is None or field.name in columns], schema.metadata)
    is_reordered = batch.schema.names != used.names
    if is_reordered and len({*used.names}) < len(used.names):
        return None
    converted = []
    for number, field in enumerate(used):
        column = batch.column(field.name if is_reordered else number)
        if not pa.types.is_null(column.type) and _content(column.type) != _content(field.type):
            return None
        try:
            if not column.type.equals(field.type):
                column.validate(full=True)  # the conversion follows offsets and codes
                column = column.cast(field.type)
            converted.append(column)
        except pa.ArrowException:
            return None
    return pa.RecordBatch.from_arrays(converted, schema=used)


def _content(kind: pa.DataType) -> Any:
    """Return what a type can hold, whatever the representation; equal for types that are converted without loss."""
    if pa.types.is_dictionary(kind):
        return _content(kind.value_type)
    if pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return ("list", _content(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return ("list", kind.list_size, _content(kind.value_type))
    if pa.types.is_struct(kind):
        return (kind.num_fields, {field.name: _content(field.type) for field in kind})
    return kind


def _table_of(schema: pa.Schema) -> bytes | None:
    return (schema.metadata or {}).get(_TABLE_KEY)


def difference(batch: pa.RecordBatch, schema: pa.Schema) -> str:
    """Return how the schema of a batch that is not ``conformed`` differs, and what to do."""
    problem = f"the schema changed: expected {_one_line(schema)}; got {_one_line(batch.schema)}"
    if sorted(batch.schema.names) != sorted(schema.names):
        return problem
    return f"{problem}; convert it first: batch.select(schema.names).cast(schema)"


def _one_line(schema: pa.Schema) -> str:
    of_table = _table_of(schema)
    fields = ", ".join(f"{f.name}: {f.type}{'' if f.nullable else ' not null'}" for f in schema)
    return fields if of_table is None else f"{fields} (table '{of_table.decode('utf-8', 'replace')}')"
