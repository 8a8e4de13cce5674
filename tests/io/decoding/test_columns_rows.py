"""Every row of a batch is taken or refused for its reason; offsets and indices are validated; arrays are frames."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from columns import SIZES, TEXTS, TWO, batch_of, error_of, rows_of
from evidence import examples
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import InputError
from penstock.io.decoding.frame_from_arrays import one_frame
from penstock.io.decoding.reader import FrameReader, ReadOptions

# ---- validation


# ---- every row, against plain Python

TABLES = ["user", "item", "other", None]
floats = st.one_of(st.sampled_from([math.nan, math.inf, 1e39, None]), st.floats(-8, 8, width=16))


@st.composite
def row_lists(draw):
    good = draw(st.booleans())
    rows = []
    for _ in range(draw(st.integers(0, 12))):
        table = draw(st.sampled_from(TABLES[: 2 if good else 4]))
        dim = TWO.get(table, (0, 2))[1]
        if good:
            row = (
                table,
                draw(st.integers(0, 49)),
                draw(st.lists(st.floats(-8, 8, width=16), min_size=dim, max_size=dim)),
            )
        else:
            ids = st.one_of(st.none(), st.integers(-2, 101))
            row = (table, draw(ids), draw(st.one_of(st.none(), st.lists(floats, min_size=dim - 1, max_size=dim + 1))))
        rows.append(row)
    return rows


def reason_of(table, i, gradient):
    """The reason that the contract defines, the first in its order."""
    if table not in TWO:
        return "unknown_table"
    if i is None:
        return "id_null"
    if not 0 <= i < TWO[table][0]:
        return "id_out_of_range"
    if gradient is None or None in gradient:
        return "gradient_null"
    if len(gradient) != TWO[table][1]:
        return "length_mismatch"
    with np.errstate(over="ignore"):
        return None if all(math.isfinite(np.float32(v)) for v in gradient) else "gradient_not_finite"


@given(row_lists(), st.sampled_from(TEXTS), st.sampled_from([pa.list_, pa.large_list]), st.integers(0, 3))
@examples(150, 60)
def test_every_row_is_taken_or_dropped_for_its_reason_as_a_plain_loop_would(rows, text, make, start):
    names = pa.array([t for t, _, _ in rows], pa.utf8()).cast(text)
    grads = pa.array([g for _, _, g in rows], make(pa.float64()))
    batch = batch_of(len(rows), id=pa.array([i for _, i, _ in rows], pa.int64()), gradient=grads, table=names)
    wanted, dropped = {}, {}
    for table, i, gradient in rows[start:]:
        reason = reason_of(table, i, gradient)
        if reason is None:
            wanted.setdefault(table, []).append((i, [float(np.float32(v)) for v in gradient]))
        else:
            dropped[reason] = dropped.get(reason, 0) + 1
    reader = FrameReader([batch.slice(start)], ReadOptions(TWO, on_bad_row="drop"))
    frames = list(reader)
    assert len(frames) == (1 if rows[start:] else 0)
    for frame in frames:
        assert rows_of(frame) == wanted
        assert frame.dropped == dropped
        assert frame.num_rows == len(rows[start:])
    assert set(reader.first_bad) == set(dropped)
    if dropped:
        error = error_of([batch.slice(start)], TWO)
        first = next(n for n, row in enumerate(rows[start:]) if reason_of(*row))
        assert (error.row, error.reason) == (first, reason_of(*rows[start:][first]))


# ---- arrays as one frame


@pytest.mark.parametrize(
    ("ids", "values", "message"),
    [
        ([1.5], [[1.0, 2.0]], "expected integers of shape"),
        ([1], [1.0, 2.0], "expected floats of shape"),
        ([1], [["a", "b"]], "expected floats of shape"),
        ([1, 2], [[1.0, 2.0]], "expected as many gradients as ids, got 2 ids and 1 gradients"),
        ([1], [[1.0, 2.0, 3.0]], "expected 2 floats"),
    ],
)
def test_arrays_of_the_wrong_shape_or_type_are_refused(ids, values, message):
    with pytest.raises(InputError, match=message):
        one_frame({"user": (ids, values)}, SIZES, None)
