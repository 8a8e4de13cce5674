"""Streams and files of the same five frames in every container, and what tests of sources ask of them."""

import io
from pathlib import Path

import framed
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
from ipc import stream

from penstock.base.errors import InputError

GRADIENT = pa.list_(pa.float32(), 1)


def batch_of(*steps, table=None):
    """One row per step, its id the step."""
    columns = {"id": pa.array(steps), "gradient": pa.array([[s] for s in steps], GRADIENT), "step": pa.array(steps)}
    if table is not None:
        columns["table"] = table
    return pa.RecordBatch.from_pydict(columns)


BATCHES = [batch_of(0, 0, 1), batch_of(1, 2), batch_of(3, 4)]
TABLE = pa.Table.from_batches(BATCHES)
FRAMES = [[0, 0], [1, 1], [2], [3], [4]]
SIZES = {"user": (1000, 1)}


def frames_of(source, **options):
    """The ids of every frame of a source."""
    return contents_of(framed.frames_of(source, **({"sizes": SIZES} | options)))


def contents_of(frames):
    """The ids of frames."""
    return [framed.ids_of(frame) for frame in frames]


def until_error(source, kind=InputError, **options):
    """The frames before the error, and its text."""
    frames, error = framed.until_error(source, kind, **({"sizes": SIZES} | options))
    return contents_of(frames), str(error)


def parquet(table=TABLE, **options):
    """A Parquet file as bytes."""
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


CONTAINERS = {
    "stream": stream(BATCHES),
    "file": stream(BATCHES, make=pa.ipc.new_file),
    "parquet": parquet(),
    "legacy stream": stream(BATCHES, use_legacy_format=True),
    "lz4 stream": stream(BATCHES, compression="lz4"),
    "zstd file": stream(BATCHES, make=pa.ipc.new_file, compression="zstd"),
    # polars 2.1.0: pl.from_arrow(TABLE).write_ipc(path, record_batch_size=3). Its schema message has no length.
    "polars file": (Path(__file__).parents[1] / "data" / "polars.arrow").read_bytes(),
}
EVERY = pytest.mark.parametrize("container", CONTAINERS)


class OneWay(io.RawIOBase):
    """A pipe: no seeking, and no more than a few bytes at a time."""

    def __init__(self, content, at_once=7):
        self._content, self._at_once = io.BytesIO(content), at_once

    def readable(self):
        return True

    def readinto(self, buffer):
        return self._content.readinto(memoryview(buffer)[: self._at_once])
