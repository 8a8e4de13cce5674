"""Batches of chosen columns, and what tests of columns ask of their frames and errors."""

import framed
import pyarrow as pa

from penstock.base.errors import InputError
from penstock.io.decoding.reader import FrameReader

SIZES = {"user": (100, 2)}
TWO = {"user": (100, 2), "item": (50, 3)}
INTEGERS = [getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)]
TEXTS = [pa.utf8(), pa.large_utf8(), pa.string_view(), pa.dictionary(pa.int8(), pa.utf8())]
TEXTS += [pa.dictionary(pa.uint64(), pa.large_utf8())]
FLOATS = [pa.float16(), pa.float32(), pa.float64()]
LISTS = [lambda v: pa.list_(v, 2), pa.list_, pa.large_list, lambda v: pa.fixed_shape_tensor(v, [2])]
VIEWS = [None, "user", "item", "other", None, "more", "and one that is too long to stand inline"]


def gradients(rows, kind=None):
    """A column of gradients."""
    return pa.array(rows, kind or pa.list_(pa.float32(), 2))


def batch_of(num_rows=2, **columns):
    """A batch of a few rows; columns : more, or other ones, None for no such column"""
    columns = {"id": pa.array(range(num_rows)), "gradient": gradients([[1.0, 2.0]] * num_rows)} | columns
    return pa.RecordBatch.from_pydict({n: c for n, c in columns.items() if c is not None})


def frames_of(source, sizes=SIZES, **options):
    """The frames of a source."""
    return framed.frames_of(source, sizes=sizes, **options)


def rows_of(frame):
    """table → [(id, gradient row), …] in arrival order."""
    return {
        table: [
            (int(i), g.tolist()) for block in blocks for row, i in enumerate(block.ids) for g in [block.gradient(row)]
        ]
        for table, blocks in frame.rows.items()
    }


def outcome(source, options):
    """Frames as plain values, the error that ended them, and the first bad row of each kind."""
    frames, reader = [], FrameReader(source, options)
    try:
        for frame in reader:
            audited = frame.audited()
            bad = [row for part in audited.bad_rows for row in part.to_pylist()]
            frames.append((rows_of(audited), audited.num_rows, audited.local_step, audited.dropped, bad))
    except InputError as error:
        return frames, str(error), reader.first_bad
    return frames, None, reader.first_bad


def error_of(source, sizes=SIZES, **options):
    """The error that ends a source."""
    return framed.until_error(source, sizes=sizes, **options)[1]


def place_of(error):
    """Where an error is, and why."""
    return error.batch, error.row, error.column, error.reason
