"""Record batches of rows, as producers send them."""

import numpy as np
import pyarrow as pa


def batch(ids, values=1.0, dim=2, **columns):
    """Rows with these ids. values : of all floats, or (rows, dim) of them

    columns : more, or other ones: an array, or what all rows have; None for no such column
    """
    ids = ids if isinstance(ids, pa.Array) else pa.array(ids, pa.int64())
    rows = np.array(np.broadcast_to(values, np.shape(values) or (len(ids), dim)), np.float32)
    arrays = {"id": ids, "gradient": pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])}
    for name, column in columns.items():
        if isinstance(column, str):
            column = pa.array([column] * len(ids))
        elif isinstance(column, int | np.integer):
            column = pa.array([column] * len(ids), pa.int64())
        if column is not None:
            arrays[name] = column
    return pa.record_batch(arrays)


def lists(rows):
    """Gradients of any length: a column for ``batch``."""
    return pa.array(list(rows), pa.list_(pa.float32()))


def received(batch_sent, shift):
    """The batch as a reader of a message finds it that begins so many bytes behind an address of 8."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch_sent.schema) as writer:
        writer.write_batch(batch_sent)
    return pa.ipc.open_stream(pa.py_buffer(bytes(shift) + sink.getvalue().to_pybytes())[shift:]).read_next_batch()
