"""Results of commands as Arrow: a stream, or a file in Arrow's file format if its name ends with .arrow or .feather."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from penstock.base.filesystem import atomic_files
from penstock.cli.output import writing

_FILES = (".arrow", ".feather")


def write_arrow(path: Path, rows: list[dict[str, Any]], fields: Mapping[str, pa.DataType]) -> None:
    """Write rows as a table, complete or not at all. Raises OSError, with advice."""
    new_writer = pa.ipc.new_file if path.suffix in _FILES else pa.ipc.new_stream
    table = pa.Table.from_pylist(rows, pa.schema(fields))
    sink = pa.BufferOutputStream()
    with new_writer(sink, table.schema) as writer:
        writer.write_table(table)
    with writing(path):
        atomic_files.make_folders(path.absolute().parent)
        with atomic_files.publishing(path) as file:
            file.write(sink.getvalue())
