"""Arrow IPC streams of a test's batches, also with penstock's checksums."""

import io
import itertools
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc

from penstock.io.log import LogWriter


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


def log(batches, schema=None):
    """The bytes of a stream with checksums."""
    sink = io.BytesIO()
    with LogWriter(sink, schema or batches[0].schema) as writer:
        for batch in batches:
            writer.write(batch)
    return sink.getvalue()


def messages(content):
    """Every batch with the dictionaries before it, and what stands before and after them."""
    reader = pa.BufferReader(content)
    stream = pa.ipc.open_stream(reader)
    ends = [reader.tell()]
    while True:
        try:
            stream.read_next_batch()
        except StopIteration:
            break
        ends.append(reader.tell())
    pieces = [content[a:b] for a, b in itertools.pairwise(ends)]
    return content[: ends[0]], pieces, content[ends[-1] :]
