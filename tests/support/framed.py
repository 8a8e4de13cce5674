"""Batches of rows with ids, steps and contributors, and helpers that read their frames and compare them."""

import pyarrow as pa
import pytest

from penstock.base.errors import InputError
from penstock.io.decoding.reader import FrameReader, ReadOptions

SIZES = {"user": (100, 1), "item": (100, 1)}
GRADIENT = pa.list_(pa.float32(), 1)
END = {"penstock.end": ""}


def batch_of(*rows, **roles):
    """Return a batch of rows (id, step, contributor). The gradient is the id.

    roles : column → whether the batch has it; by default it has id and gradient
    """
    rows = [(*row, None, None)[:3] for row in rows]
    columns = {
        "id": pa.array([i for i, _, _ in rows], pa.int64()),
        "gradient": pa.array([None if i is None else [i] for i, _, _ in rows], GRADIENT),
        "step": pa.array([s for _, s, _ in rows], pa.int64()),
        "contributor": pa.array([c for _, _, c in rows], pa.utf8()),
    }
    return pa.RecordBatch.from_pydict({n: c for n, c in columns.items() if roles.get(n, n in ("id", "gradient"))})


def with_steps(*rows, contributor=False):
    """A batch of rows (id, step, contributor)."""
    return batch_of(*rows, step=True, contributor=contributor)


def without_steps(*ids):
    """A batch of ids."""
    return batch_of(*((i,) for i in ids))


def reader_of(source, **options):
    """A reader of one table ``user``."""
    return FrameReader(source, ReadOptions(**({"sizes": {"user": (100, 1)}} | options)))


def frames_of(source, **options):
    """The frames of a source."""
    return list(reader_of(source, **options))


def contents_of(frames):
    """Return [(ids, step, contributor), …], which does not depend on how the rows are split into blocks."""
    return [(ids_of(frame), frame.local_step, frame.contributor) for frame in frames]


def ids_of(frame):
    """The ids of a frame."""
    return [int(i) for blocks in frame.rows.values() for block in blocks for i in block.ids]


def until_error(source, kind=InputError, **options):
    """Return the frames before the error, and the error."""
    frames = []

    def collect():
        for frame in reader_of(source, **options):
            frames.append(frame)

    with pytest.raises(kind) as caught:
        collect()
    assert "\n" not in str(caught.value)
    return frames, caught.value
