"""Rows laid into lines that several of them share: the kernel equals its twin, and refuses what would not fit."""

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from penstock.pyx.partition import lay

UNTOUCHED = -(2**31) + 7


@st.composite
def placed(draw):
    """Rows of one dim, each at a place of its own in lines of some words."""
    dim, per_line, num_lines = draw(st.integers(1, 9)), draw(st.integers(1, 5)), draw(st.integers(1, 8))
    slots = draw(st.lists(st.integers(0, num_lines * per_line - 1), unique=True))
    slack = draw(st.integers(0, 3))
    bits = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=len(slots) * dim, max_size=len(slots) * dim))
    grads = np.array(bits, np.int32).view(np.float32).reshape(len(slots), dim)
    at = np.array(slots, np.int64)
    return at // per_line, at % per_line * dim, grads, (num_lines, per_line * dim + slack)


@given(placed())
def test_bits_lie_where_the_twin_lays_them_and_all_else_stays(case):
    lines, offsets, grads, shape = case
    out, expected = (np.full(shape, UNTOUCHED, np.int32) for _ in range(2))
    lay(lines, offsets, grads, out)
    reference.lay(lines, offsets, grads, expected)
    assert out.tolist() == expected.tolist()


@pytest.mark.parametrize(("line", "offset"), [(-1, 0), (2, 0), (0, -1), (0, 3)])
def test_a_row_that_does_not_fit_is_refused_before_anything_is_written(line, offset):
    out = np.ones((2, 4), np.int32)
    where = np.array([0, line]), np.array([0, offset])
    with pytest.raises(ValueError, match="row 1 of 2 words does not fit"):
        lay(*where, np.zeros((2, 2), np.float32), out)
    assert (out == 1).all()
