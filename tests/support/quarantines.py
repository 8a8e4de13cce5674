"""Batches with bad rows, and the files that they are quarantined in."""

import pyarrow as pa
import pyarrow.ipc

COLUMNS = ["source", "batch", "row_index", "table", "id", "id_text", "origin_step", "reason", "gradient"]


def read(path):
    """The file's batches, whichever of the two IPC formats it has."""
    data = path.read_bytes()
    opened = pa.ipc.open_file(data) if data.startswith(b"ARROW1") else pa.ipc.open_stream(data)
    table = opened.read_all()
    table.validate(full=True)
    return table.to_batches()


def rows_of(path):
    return [row for item in read(path) for row in item.to_pylist()]
