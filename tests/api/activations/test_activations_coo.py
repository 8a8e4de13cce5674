"""Lookups as coordinates, by themselves or inside TensorFlow's tensors, are those of the lists they stand for."""

import numpy as np
import pytest
from lookups import engine_of

import penstock as ps


def test_samples_may_have_several_axes():
    engine = engine_of(combiner="sum", output_shape=(2, 2))
    flat, deep = ps.CooIds([0, 3, 3], [1, 2, 3]), ps.CooIds([[0, 0, 0], [1, 1, 0], [1, 1, 1]], [1, 2, 3])
    actual = [engine.recv_activations([value])[0][0] for value in (flat, deep, [[1], [], [], [2, 3]])]
    assert actual[0].shape == (2, 2, 2)
    assert actual[0].tobytes() == actual[1].tobytes() == actual[2].tobytes()


@pytest.mark.parametrize(
    ("value", "weights", "message"),
    [
        (ps.CooIds([0, 4], [1, 1]), None, r"feature 'f': expected rows below \[4\], got \[4\]"),
        (ps.CooIds([0, -1], [1, 1]), None, r"feature 'f': expected rows below \[4\], got \[-1\]"),
        (ps.CooIds([0], [1, 1]), None, r"feature 'f': expected rows of shape \[2\], or \[2, 2\].*got \[1\]"),
        (ps.CooIds([[0, 0, 0]], [1]), None, "feature 'f': expected rows of shape"),
        (ps.CooIds([0.5], [1]), None, "feature 'f': expected integers as rows, got float64"),
        (ps.CooIds([0], [6]), None, "feature 'f': expected 0 <= id < 6, got 6"),
        (ps.CooIds([0], [1.5]), None, "feature 'f': expected integer ids"),
        (ps.CooIds([0], [1], [1, 2]), None, "feature 'f': 1 ids and 2 weights"),
        (ps.CooIds([0], [1], [np.inf]), None, "feature 'f': expected weights that are finite"),
        (ps.CooIds([0], [1], [1]), [[1]], "feature 'f': weights are given twice"),
    ],
)
def test_coordinates_that_do_not_fit_are_refused(value, weights, message):
    with pytest.raises(ValueError, match=message):
        engine_of().recv_activations([value], None if weights is None else weights)
