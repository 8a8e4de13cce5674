"""Batches with bad rows, and the files that they are quarantined in."""

import pyarrow as pa
import pyarrow.ipc

COLUMNS = ["source", "batch", "row_index", "table", "id", "id_text", "origin_step", "reason", "gradient"]
GOOD, BAD = ("user", 1, [1.0, 2.0]), ("user", 99, [1.0, 2.0])
LISTS = pa.list_(pa.float32())


def batch(step, *rows, ids=None, gradients=LISTS):
    """Rows of (table, id, gradient)."""
    columns = {
        "table": pa.array([r[0] for r in rows], pa.utf8()),
        "id": pa.array([r[1] for r in rows], ids or pa.int64()),
        "gradient": pa.array([r[2] for r in rows], gradients),
    }
    if step is not None:
        columns["step"] = pa.array([step] * len(rows), pa.int64())
    return pa.RecordBatch.from_pydict(columns)


def read(path):
    """The file's batches, whichever of the two IPC formats it has."""
    data = path.read_bytes()
    opened = pa.ipc.open_file(data) if data.startswith(b"ARROW1") else pa.ipc.open_stream(data)
    table = opened.read_all()
    table.validate(full=True)
    return table.to_batches()


def rows_of(path):
    return [row for item in read(path) for row in item.to_pylist()]
