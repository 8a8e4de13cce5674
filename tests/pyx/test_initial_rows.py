"""Rows drawn for scattered keys equal those that a table of these rows starts with, bit for bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import truncated_normal, uniform

from penstock.pyx.initial_rows import draw, philox_key

DIMS = [1, 2, 3, 4, 5, 8, 16, 33, 63, 64, 65, 100, 130]


def drawn(keys, seed, table, dim, normal, first, second):
    out = np.empty((len(keys), dim), np.float32)
    draw(np.array(keys, np.int64), philox_key(b"start", seed, table), normal, first, second, out)
    return out


@pytest.mark.parametrize("dim", DIMS)
def test_rows_equal_a_range_of_the_table(dim):
    first = 10**12 - 7
    keys = np.random.default_rng(dim).permutation(np.arange(first, first + 300))
    got = drawn(keys, 3, "items", dim, True, 0.3, 0.05)
    assert got.tobytes() == truncated_normal(3, "items", first, 300, dim, 0.05, 0.3)[keys - first].tobytes()
    got = drawn(keys, 3, "items", dim, False, 1.5, -0.5)
    assert got.tobytes() == uniform(3, "items", first, 300, dim, -0.5, 1.0)[keys - first].tobytes()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20), st.sampled_from(DIMS), st.integers(-5, 2**62))
def test_any_64_bits_have_the_row_of_their_unsigned_number(keys, dim, seed):
    got = drawn(keys, seed, "täble", dim, True, 0.1, 0.0)
    for key, row in zip(keys, got, strict=True):
        assert row.tobytes() == truncated_normal(seed, "täble", key % 2**64, 1, dim, 0.0, 0.1).tobytes()


def test_rows_and_keys_must_agree():
    with pytest.raises(ValueError, match="expected a row for each of 2 keys and 16 bytes, got 1 rows and 16 bytes"):
        draw(np.array([1, 2]), philox_key(b"start", 0, "t"), True, 1.0, 0.0, np.empty((1, 4), np.float32))
