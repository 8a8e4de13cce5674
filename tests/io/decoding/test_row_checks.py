"""The kernel that sums rows refuses a frame exactly if ``find_bad_rows`` finds an id out of range or a bad value, or a
sum leaves the finite range."""

import numpy as np
import pyarrow as pa
import reference
from accumulate import add, is_valid
from hypothesis import given
from hypothesis import strategies as st

from penstock.io.decoding.read_options import ReadOptions
from penstock.io.decoding.row_checks import REASONS, find_bad_rows
from penstock.io.decoding.row_columns import decode_rows
from penstock.io.decoding.schema import resolve
from penstock.io.sources.batch import Batch
from penstock.pyx.accumulator import Accumulator

VOCABULARY, DIM = 10, 3
IDS = st.sampled_from([0, 3, VOCABULARY - 1, VOCABULARY, -1, 2**63 - 1, -(2**63)])
VALUES = st.sampled_from([0.0, -0.0, 1.5, 3.4e38, float("inf"), float("-inf"), float("nan")])
ROWS = st.lists(st.tuples(IDS, st.lists(VALUES, min_size=DIM, max_size=DIM)), min_size=1, max_size=8)


@given(ROWS)
def test_both_judge_every_row_alike(rows):
    gradient = pa.array([values for _, values in rows], pa.list_(pa.float32(), DIM))
    batch = pa.record_batch({"id": pa.array([row_id for row_id, _ in rows]), "gradient": gradient})
    (decoded,) = decode_rows(
        Batch("x", batch, 0, 0), resolve(batch.schema, "x", ReadOptions({})), "t", None
    ).row_batches
    assert not decoded.may_be_bad({"t": (VOCABULARY, DIM)})
    codes = find_bad_rows(decoded, {"t": (VOCABULARY, DIM)})
    ids, grads = decoded.ids, np.array(gradient.to_pylist(), np.float32)
    for row, code in enumerate([0] * len(rows) if codes is None else codes):
        block = ids[row : row + 1], grads[row : row + 1]
        good = code == 0
        assert good or REASONS[code] in ("id_out_of_range", "gradient_not_finite")
        assert is_valid(Accumulator(DIM, vocabulary_size=VOCABULARY), [block]) == good
        assert add(Accumulator(DIM, vocabulary_size=VOCABULARY), [block], 0) == good
    good = codes is None and not reference.overflowing_rows({}, ids, grads).any()
    assert add(Accumulator(DIM, vocabulary_size=VOCABULARY), [(ids, grads)], 0) == good
