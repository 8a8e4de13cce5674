"""Arrow IPC streams of a test's batches."""

import itertools
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc


def stream(batches, end=True, schema=None, metadata=(), make=pa.ipc.new_stream, **options):
    """The bytes of a stream.

    end : with its end marker; metadata : of the first batches, or None; make : or ``new_file``; options : of the writer
    """
    sink = pa.BufferOutputStream()
    writer = make(sink, schema or batches[0].schema, options=pa.ipc.IpcWriteOptions(**options))
    for batch, custom_metadata in itertools.zip_longest(batches, metadata):
        writer.write_batch(batch, custom_metadata)
    if end:
        writer.close()
    return sink.getvalue().to_pybytes()


def write(path, batches, end=True, schema=None):
    """Write a stream to a file; the file's name as text."""
    Path(path).write_bytes(stream(batches, end, schema))
    return str(path)
