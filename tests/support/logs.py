"""Small logs of our own, and how tests read them."""

import io

import pyarrow as pa
from ipc import log, stream

from penstock.io.decoding.reader import FrameReader, ReadOptions

SIZES = {"user": (50, 2), "item": (50, 2)}
PAIRS = pa.list_(pa.float32(), 2)
NAMES = pa.dictionary(pa.int8(), pa.utf8())


def batch_of(step, names=("user", "item"), rows=3):
    """A separate dictionary, nulls, offsets, validity and a nested dictionary."""
    codes = pa.array([n % len(names) for n in range(rows)], pa.int8())
    columns = {
        "table": pa.DictionaryArray.from_arrays(codes, pa.array(names)),
        "id": pa.array([10 * step + n for n in range(rows)]),
        "gradient": pa.array([[step + 0.5, n + 0.25] for n in range(rows)], PAIRS),
        "step": pa.array([step] * rows),
        "contributor": pa.array([None if n == 1 else f"w{n}" for n in range(rows)], pa.utf8()),
        "note": pa.array([["a", "b"]] * rows, pa.list_(NAMES)),
    }
    return pa.RecordBatch.from_pydict(columns)


BATCHES = [batch_of(0), batch_of(1, ("item", "user")), batch_of(2, rows=1)]


def read(source, **options):
    """The frames as plain values, and whether they were verified."""
    reader = FrameReader(source, ReadOptions(SIZES, **options))
    frames = [
        (
            f.local_step,
            f.contributor,
            {t: [(b.ids.tolist(), b.grads.tolist(), b.which) for b in r] for t, r in f.rows.items()},
        )
        for f in reader
    ]
    return frames, reader.verified


LOG, WANTED = log(BATCHES), read(io.BytesIO(stream(BATCHES)))[0]
# For what is done to every bit or byte.
FEW = [b.drop_columns(["note"]) for b in BATCHES[:2]]
SMALL, SMALL_WANTED = log(FEW), read(io.BytesIO(stream(FEW)))[0]
