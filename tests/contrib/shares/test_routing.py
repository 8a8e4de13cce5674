"""Frames to the shares of a job: every row arrives once and in order, and everything else of a frame everywhere."""

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from penstock.pyx import partition
from penstock.pyx.keys import key_owners
from penstock.rows.shares import KeyShare


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99), st.integers(1, 9)), max_size=40),
    st.integers(1, 3),
    st.booleans(),
)
def test_rows_go_to_their_owners_in_their_order(rows, dim, gained):
    owners, numbers, counts = (np.array([row[i] for row in rows], np.int64) for i in range(3))
    rng = np.random.default_rng(len(rows))
    grads = rng.standard_normal((len(rows) + 2, dim)).astype(np.float32)
    which = rng.integers(0, len(grads), len(rows))
    gains = rng.standard_normal(len(rows)).astype(np.float32) if gained else None
    sizes = np.bincount(owners, minlength=4)
    rows_at = np.cumsum(sizes) - sizes
    floats_at = rows_at * dim
    out = np.empty(len(rows), np.int64), np.empty(len(rows) * dim, np.float32), np.empty(len(rows), np.uint32)
    firsts = rows_at.copy()
    partition.scatter(owners, numbers, grads, which, gains, counts, rows_at, floats_at, *out)
    summed = grads[which] if gains is None else grads[which] * gains[:, None]
    for owner, twin in enumerate(reference.scatter(owners, numbers, summed, counts, 4)):
        part = slice(firsts[owner], rows_at[owner])
        got = out[0][part], out[1].reshape(-1, dim)[part], out[2][part]
        assert [item.tolist() for item in got] == [item.tolist() for item in twin]


@pytest.mark.parametrize("capacity", [5, 8191, 8192, 100_000, 3_000_001])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 64])
def test_the_rows_of_a_dynamic_table_are_divided_in_contiguous_runs(capacity, count):
    shares = [KeyShare(rank, count, "t", capacity, 0) for rank in range(count)]
    first = 0
    for share in shares:
        if share.num_rows:
            assert share.ids(0) == first
            first += share.num_rows
    assert first == capacity
    keys = np.random.default_rng(0).integers(-(2**63), 2**63, 2000)
    owners = key_owners.owners(keys, 0, "t", capacity, count)
    assert set(owners.tolist()) <= {share.rank for share in shares if share.num_rows}
