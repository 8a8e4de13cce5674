"""Lookups as coordinates, by themselves or inside TensorFlow's tensors, are those of the lists they stand for."""

import jax.numpy as jnp
import numpy as np
import pytest
from lookups import RAGGED, engine_of, ragged, sparse

import penstock as ps

ROWS, IDS = [0, 0, 2, 3, 3, 3], [0, 2, 4, 1, 1, 3]
WEIGHTS = [0.5, 0.25, 3, 1, 0.3, 0.7]
POSITIONS = [[0, 0], [0, 1], [2, 0], [3, 0], [3, 1], [3, 2]]


def seen(value, weights=None, **feature):
    (activations,), dedup = engine_of(**feature).recv_activations([value], None if weights is None else [weights])
    return activations.tobytes(), dedup


@pytest.mark.parametrize(
    "value",
    [
        ps.CooIds(ROWS, IDS),
        ps.CooIds(jnp.array(ROWS), np.array(IDS, np.uint8)),
        ps.CooIds(np.array(POSITIONS), IDS),
        ps.CooIds(np.array(ROWS)[[3, 0, 4, 2, 1, 5]], np.array(IDS)[[3, 0, 4, 2, 1, 5]]),
        ps.CooIds(np.array(POSITIONS)[::-1], IDS[::-1]),
        sparse(POSITIONS, IDS),
        ragged(IDS),
    ],
    ids=["lists", "arrays", "positions", "any order", "positions backwards", "SparseTensor", "RaggedTensor"],
)
@pytest.mark.parametrize("length", [0, 2])
def test_coordinates_give_the_activations_of_ragged_lists(value, length):
    actual, dedup = seen(value, max_sequence_length=length)
    wanted, of_lists = seen(RAGGED, max_sequence_length=length)
    assert actual == wanted
    assert dedup.truncated == of_lists.truncated == (1 if length else 0)
    assert dedup.ids(0, "t").tolist() == of_lists.ids(0, "t").tolist()


@pytest.mark.parametrize(
    ("value", "weights"),
    [
        (ps.CooIds(ROWS, IDS, WEIGHTS), None),
        (ps.CooIds(ROWS, IDS), WEIGHTS),
        (ps.CooIds(ROWS[::-1], IDS[::-1], np.array(WEIGHTS[::-1], np.float16)), None),
        (sparse(POSITIONS, IDS), sparse(POSITIONS, WEIGHTS)),
        (ragged(IDS), ragged(WEIGHTS)),
    ],
    ids=["with the ids", "as an argument", "backwards", "SparseTensor", "RaggedTensor"],
)
def test_weights_go_with_their_ids(value, weights):
    (actual,), _ = engine_of().recv_activations([value], None if weights is None else [weights])
    (wanted,), _ = engine_of().recv_activations([RAGGED], [[[0.5, 0.25], [], [3], [1, 0.3, 0.7]]])
    np.testing.assert_allclose(actual, wanted, rtol=1e-3)  # of float16, and in another order


def test_samples_may_have_several_axes():
    engine = engine_of(combiner="sum", output_shape=(2, 2))
    flat, deep = ps.CooIds([0, 3, 3], [1, 2, 3]), ps.CooIds([[0, 0, 0], [1, 1, 0], [1, 1, 1]], [1, 2, 3])
    actual = [engine.recv_activations([value])[0][0] for value in (flat, deep, [[1], [], [], [2, 3]])]
    assert actual[0].shape == (2, 2, 2)
    assert actual[0].tobytes() == actual[1].tobytes() == actual[2].tobytes()


def test_empty_coordinates_give_zeros():
    (activations,), _ = engine_of().recv_activations([ps.CooIds([], [])])
    assert not activations.any()


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
