"""Sequences by position, and batches of another size than the configuration's."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

import penstock as ps


def sparse(indices, values, dense_shape=(4, 3)):
    """A tf.SparseTensor."""
    indices = np.array(indices, np.int64).reshape(-1, len(dense_shape))
    return SimpleNamespace(indices=indices, values=np.array(values), dense_shape=np.array(dense_shape))


def ragged(values, row_splits=(0, 2, 2, 3, 6)):
    """A tf.RaggedTensor."""
    return SimpleNamespace(flat_values=np.array(values), row_splits=np.array(row_splits))


def engine_of(batch, length=0, combiner="sum", **feature):
    """A table 6 x 1 that holds 10 to 60, and one feature."""
    table = ps.TableConfig(6, 1, name="t", combiner=combiner)
    feature = ps.FeatureConfig(table, max_sequence_length=length, name="f", **feature)
    engine = ps.Engine(ps.EmbeddingConfig.from_features([feature], batch, ps.SGD(1.0)))
    engine.load_parameters("t", np.arange(10, 70, 10, dtype=np.float32).reshape(6, 1))
    return engine


@pytest.mark.parametrize(
    "value",
    [
        ps.CooIds([[0, 3], [0, 0], [0, 2**40], [1, 2]], [5, 1, 4, 2]),
        sparse([[0, 0], [0, 3], [0, 9], [1, 2]], [1, 5, 4, 2], [2, 10]),
    ],
    ids=["CooIds", "SparseTensor"],
)
def test_a_sequence_is_truncated_by_position_and_not_by_number(value):
    (activations,), dedup = engine_of(2, 3).recv_activations([value])
    assert activations[:, :, 0].tolist() == [[20, 0, 0], [0, 0, 30]]
    assert dedup.truncated == 2
    assert dedup.ids(0, "t").tolist() == [1, 2]


def test_ids_at_one_position_of_a_sequence_add_up():
    engine = engine_of(2, 3)
    (activations,), dedup = engine.recv_activations([ps.CooIds([[0, 1], [0, 1]], [1, 2])])
    assert activations[:, :, 0].tolist() == [[0, 50, 0], [0, 0, 0]]
    engine.send_gradients([np.ones((2, 3, 1), np.float32)], deduplication_data=dedup)
    assert engine.lookup("t", [1, 2])[:, 0].tolist() == [19, 29]


def test_rows_without_positions_fill_a_sequence_from_its_start():
    (activations,), dedup = engine_of(2, 2).recv_activations([ps.CooIds([1, 0, 1, 1], [3, 1, 2, 5])])
    assert activations[:, :, 0].tolist() == [[20, 0], [40, 30]]
    assert dedup.truncated == 1


@pytest.mark.parametrize("length", [0, 3])
def test_a_position_is_not_negative(length):
    with pytest.raises(ps.InputError, match="feature 'f': expected positions of at least 0, got -1"):
        engine_of(2, length).recv_activations([ps.CooIds([[0, 0], [1, -1]], [1, 2])])


# ---- batches of another size

SHORT = "feature 'f': expected ids for 4 samples (its input shape), got 2; pad a short last batch"


@pytest.mark.parametrize("length", [0, 3])
@pytest.mark.parametrize(
    "value",
    [
        [[1, 2], [3]],
        pa.array([[1, 2], [3]]),
        ragged([1, 2, 3], [0, 2, 3]),
        sparse([[0, 0], [0, 1], [1, 0]], [1, 2, 3], [2, 2]),
    ],
    ids=["lists", "arrow", "RaggedTensor", "SparseTensor"],
)
def test_a_smaller_batch_is_refused_in_every_form(value, length):
    with pytest.raises(ps.UsageError) as caught:
        engine_of(4, length).recv_activations([value])
    assert str(caught.value).startswith(SHORT)


@pytest.mark.parametrize(
    "value",
    [[[], [], [], [], []], ragged([1], [0, 1, 1, 1, 1, 1]), sparse([[0, 0]], [1], [5, 1])],
    ids=["lists", "RaggedTensor", "SparseTensor"],
)
def test_a_larger_batch_is_refused_without_advice_to_pad_it(value):
    with pytest.raises(ps.UsageError, match=r"feature 'f': expected ids for 4 samples \(its input shape\), got 5$"):
        engine_of(4).recv_activations([value])


def test_a_short_dense_batch_says_what_to_do():
    with pytest.raises(ps.UsageError, match=r"shape \[4\] or \[4, k\], got \[3\]; pad a short last batch with samples"):
        engine_of(4).recv_activations([np.array([1, 2, 3])])
    with pytest.raises(ps.UsageError, match=r"expected ids for 4 samples \(its input shape\), got 3; pad a short last"):
        engine_of(4).recv_activations([pa.array([1, 2, 3])])


def test_a_batch_that_was_padded_with_empty_samples_moves_what_it_holds():
    engine = engine_of(4)
    (activations,), dedup = engine.recv_activations([[[1, 2], [3], [], []]])
    assert activations[:, 0].tolist() == [50, 40, 0, 0]
    engine.send_gradients([np.ones((4, 1), np.float32)], deduplication_data=dedup)
    assert engine.lookup("t", range(6))[:, 0].tolist() == [10, 19, 29, 39, 50, 60]


@pytest.mark.parametrize(
    "value",
    [[[0, 2], [1, 3, 4, 5]], pa.array([[0, 2], [1, 3, 4, 5]]), ragged([0, 2, 1, 3, 4, 5], [0, 2, 6])],
    ids=["lists", "arrow", "RaggedTensor"],
)
def test_ragged_rows_of_the_leading_axis_of_an_output_shape_are_sequences(value):
    engine = engine_of(None, combiner="mean", output_shape=[2, 3])
    (activations,), dedup = engine.recv_activations([value])
    assert activations[:, :, 0].tolist() == [[10, 30, 0], [20, 40, 50]]
    assert dedup.truncated == 1
    gradient = np.array([[[1], [2], [4]], [[8], [16], [32]]], np.float32)
    engine.send_gradients([gradient], deduplication_data=dedup)
    assert engine.lookup("t", range(6))[:, 0].tolist() == [9, 12, 28, 24, 18, 60]


def test_ragged_rows_of_all_of_an_output_shape_are_combined():
    engine = engine_of(None, output_shape=[2, 3])
    (activations,), _ = engine.recv_activations([ragged([0, 1, 2, 3, 4, 5], [0, 2, 2, 3, 3, 3, 6])])
    assert activations[:, :, 0].tolist() == [[30, 0, 30], [0, 0, 150]]


def test_such_a_sequence_takes_no_weights():
    value = ragged([1, 2, 3], [0, 2, 3])
    with pytest.raises(ps.UsageError, match=r"feature 'f': a sequence feature \(of 3 positions\) takes no weights"):
        engine_of(None, output_shape=[2, 3]).recv_activations([value], [value])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (sparse([[0, 0, 0]], [1], [3, 2, 1]), r"feature 'f': expected ids of dense_shape \[2, 3, k\], got \[3, 2, 1\]"),
        (sparse([[0, 0, 0, 0]], [1], [2, 3, 1, 1]), r"expected ids of dense_shape \[2, 3, k\], got \[2, 3, 1, 1\]"),
        (ragged([[1], [2]], [0, 1, 2]), "feature 'f': expected a RaggedTensor of rank 2"),
        (ragged([1, 2, 3], [0, 1, 2]), "feature 'f': expected a RaggedTensor of rank 2"),
        (ragged([1, 2], [0, 3, 2]), "feature 'f': expected a RaggedTensor of rank 2"),
        (ragged([], []), "feature 'f': expected a RaggedTensor of rank 2"),
        ([[[1], [2]], [[3], [4]]], r"feature 'f': expected ids of a sample as a flat list, got \[\[1\], \[2\]\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(value, message):
    with pytest.raises(ps.UsageError, match=message):
        engine_of(None, output_shape=[2, 3]).recv_activations([value])


@pytest.mark.parametrize(
    ("value", "weights", "message"),
    [
        (ragged([1, 2, 3], [0, 2, 3]), ragged([1, 1, 1], [0, 1, 3]), "feature 'f': sample 0 has 2 ids and 1 weights"),
        (ragged([1, 2, 3], [0, 2, 3]), ragged([1, 1, 1], [0, 1, 2, 3]), "expected weights for 2 samples .*, got 3"),
        (
            sparse([[0, 0], [1, 0]], [1, 2], [2, 1]),
            sparse([[0, 0], [0, 1]], [1.0, 2.0], [2, 2]),
            "feature 'f': the weights are of other indices than the ids",
        ),
        (
            sparse([[0, 0], [1, 0]], [1, 2], [2, 1]),
            sparse([[0, 0], [1, 0]], [1.0, 2.0], [3, 1]),
            "feature 'f': expected weights for 2 samples .*, got 3",
        ),
    ],
)
def test_weights_stand_where_the_ids_do(value, weights, message):
    with pytest.raises(ps.UsageError, match=message):
        engine_of(2).recv_activations([value], [weights])
