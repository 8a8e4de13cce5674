"""recv_activations and send_gradients: what is refused, what the error names, and that nothing is applied."""

import numpy as np
import pyarrow as pa
import pytest
from lookups import RAGGED, engine_of

import penstock as ps


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([[[0], [1], [2]]], "feature 'f': expected ids for 4 samples"),
        ([np.zeros((4, 2, 2), int)], r"feature 'f': expected ids of shape \[4\] or \[4, k\], got \[4, 2, 2\]"),
        ([np.zeros(4)], "feature 'f': expected integer ids, got float64"),
        ([np.array([0, 1, 2, 6])], "feature 'f': expected 0 <= id < 6, got 6"),
        ([[[-1], [], [], []]], "feature 'f': expected 0 <= id < 6, got -1"),
        ([[[1], [2**70], [], []]], "feature 'f': expected 0 <= id < 6, got 1180591620717411303424"),
        ([[1, 2, 3, 2**64]], "feature 'f': expected 0 <= id < 6, got 18446744073709551616"),
        ([[[[1], [2, 3]], [], [], []]], "feature 'f': expected ids of a sample as a flat list"),
        ([pa.array([[1], [None], [], []])], "feature 'f': ids hold 1 nulls"),
        ([RAGGED, RAGGED], "features: expected 1 entries, nested like the features, got 2"),
        ({"g": RAGGED}, r"features: expected a mapping with the features' keys \(f\), got keys g"),
        ([None], "feature 'f': expected an array, got NoneType"),
        (7, "features: expected a sequence of 1, nested like the features, got int"),
    ],
)
def test_bad_features_are_named(features, message):
    with pytest.raises(ValueError, match=message):
        engine_of().recv_activations(features)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([[[1], [], [1], [1, 1, 1]]], "feature 'f': sample 0 has 2 ids and 1 weights"),
        ([[[1, np.nan], [], [1], [1, 1, 1]]], "feature 'f': expected weights that are finite"),
    ],
)
def test_bad_weights_are_named(weights, message):
    with pytest.raises(ValueError, match=message):
        engine_of().recv_activations([RAGGED], weights=weights)


def test_a_gradient_that_a_weight_makes_infinite_names_its_feature():
    engine = engine_of(combiner="sum")
    _, dedup = engine.recv_activations([RAGGED], weights=[[[1e38, 1], [], [1], [1, 1, 1]]])
    with pytest.raises(ps.InputError, match="gradient of feature 'f': times a weight it is not finite"):
        engine.send_gradients([np.full((4, 2), 100, np.float32)], deduplication_data=dedup)


def test_a_sequence_takes_no_weights():
    with pytest.raises(ps.UsageError, match="feature 'f': a sequence feature"):
        engine_of(max_sequence_length=2).recv_activations([RAGGED], weights=[RAGGED])


def infinite():
    gradient = np.zeros((4, 2), np.float32)
    gradient[2, 1] = np.inf
    return gradient


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ([np.zeros((4, 3), np.float32)], r"gradient of feature 'f': expected shape \[4, 2\], got \[4, 3\]"),
        ([np.zeros((4, 2))], "gradient of feature 'f': expected float32, got float64"),
        ([infinite()], r"gradient of feature 'f': expected finite values, got inf at \[2, 1\]"),
        ([], "gradients: expected 1 entries"),
    ],
)
def test_bad_gradients_are_named_and_nothing_is_applied(gradients, message):
    engine = engine_of()
    _, dedup = engine.recv_activations([RAGGED])
    before = engine.state_hash()
    with pytest.raises(ValueError, match=message):
        engine.send_gradients(gradients, deduplication_data=dedup)
    assert engine.state_hash() == before
    assert engine.send_gradients([np.zeros((4, 2), np.float32)], deduplication_data=dedup)


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ([0.5, 0.5], "expected 0 values"),
        (np.array([0.5, 0.5]), "expected 0 values"),
        ([np.zeros(1)], r"expected scalars, one per dynamic tag, got shape \(1,\)"),
        (np.zeros((2, 1)), r"expected scalars, one per dynamic tag, got shape \(1,\)"),
        (0.5, "expected a sequence or a mapping by tag, got 0.5"),
        ([10**400], "expected 0 values"),
    ],
)
def test_the_number_and_shape_of_rates_is_checked(rates, message):
    engine = engine_of()
    _, dedup = engine.recv_activations([RAGGED])
    with pytest.raises(ps.UsageError, match=message):
        engine.send_gradients([np.zeros((4, 2), np.float32)], rates, dedup)


@pytest.mark.parametrize("rates", [[0.5], (0.5,), {0: 0.5}, np.array([0.5]), np.array([0.5], np.float32)])
def test_rates_come_in_any_sequence(rates):
    engine = engine_of(optimizer=ps.SGD(ps.DynamicLearningRate(0)))
    before = engine.lookup("t", [4])
    _, dedup = engine.recv_activations([RAGGED])
    assert engine.send_gradients([np.ones((4, 2), np.float32)], rates, dedup)
    assert (engine.lookup("t", [4]) == before - 0.5).all()


def test_gradients_need_the_data_of_their_own_step_configuration_and_send():
    engine, zeros = engine_of(), [np.zeros((4, 2), np.float32)]
    with pytest.raises(ps.StateError, match="needs deduplication_data="):
        engine.send_gradients(zeros)
    _, old = engine.recv_activations([RAGGED])
    _, new = engine.recv_activations([RAGGED])
    engine.send_gradients(zeros, deduplication_data=new)
    with pytest.raises(ps.StateError, match="of step 0, and the engine's step is 1"):
        engine.send_gradients(zeros, deduplication_data=old)
    with pytest.raises(ps.StateError, match="another configuration"):
        engine_of(dim=3).send_gradients(zeros, deduplication_data=old)


def test_a_configuration_without_features_says_so():
    config = ps.EmbeddingConfig.from_tables([ps.TableConfig(6, 2, name="t")], ps.SGD())
    with pytest.raises(ps.ConfigError, match="the configuration has no features"):
        ps.Engine(config).recv_activations([RAGGED])
