"""Masked NumPy arrays are refused in every part of an argument too: what the mask hides would be used."""

from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import DIM, ROWS

import penstock as ps

MESSAGE = r"got a masked array \(numpy.ma\): fill it \(filled\(\)\) or leave out what it masks"


def masked(values, dtype=None):
    """An array whose first value is masked."""
    array = np.asarray(values, dtype)
    return np.ma.array(array, mask=np.arange(array.size).reshape(array.shape) == 0)


IDS, GRADIENTS = np.array([1, 2]), np.ones((2, DIM), np.float32)


@pytest.fixture
def engine():
    table = ps.TableConfig(ROWS, DIM, name="user", optimizer=ps.Adagrad(0.1), combiner="sum")
    features = [ps.FeatureConfig(table, name="clicks"), ps.FeatureConfig(table, name="visits")]
    return ps.Engine(ps.EmbeddingConfig.from_features(features, batch_size=2))


def test_an_array_without_a_masked_value_is_refused_too(engine):
    with pytest.raises(ps.InputError, match=MESSAGE):
        engine.apply({"user": (np.ma.array(IDS), GRADIENTS)})


@pytest.mark.parametrize("pair", [(IDS, list(masked(GRADIENTS))), ([masked(1), 2], GRADIENTS)])
def test_apply_refuses_masked_values_in_lists(engine, pair):
    before = engine.state_hash()
    with pytest.raises(ps.InputError, match=rf"apply\('user'\): {MESSAGE}"):
        engine.apply({"user": pair})
    assert engine.state_hash() == before


def test_load_parameters_refuses_masked_slots(engine):
    rows, before = np.ones((ROWS, DIM), np.float32), engine.state_hash()
    with pytest.raises(ps.UsageError, match=rf"table 'user', accumulators: {MESSAGE}"):
        engine.load_parameters("user", rows, accumulators=masked(rows))
    assert engine.state_hash() == before


WEIGHTS = np.ones(2, np.float32)
INDICES, SPLITS = np.array([[0, 0], [1, 0]]), np.array([0, 1, 2])


def sparse(indices, values):
    return SimpleNamespace(indices=indices, values=values, dense_shape=(2, 1))


def ragged(splits, values):
    return SimpleNamespace(row_splits=splits, flat_values=values)


@pytest.mark.parametrize(
    ("ids", "weights"),
    [
        (masked(IDS), None),
        (masked([[1, 2], [3, 4]]), None),
        ([masked([1, 2]), np.array([3])], None),
        ([[masked(1), 2], [3]], None),
        (ps.CooIds(IDS - 1, masked(IDS)), None),
        (ps.CooIds(masked(IDS - 1), IDS), None),
        (ps.CooIds(IDS - 1, IDS, masked(WEIGHTS)), None),
        (sparse(INDICES, masked(IDS)), None),
        (sparse(masked(INDICES), IDS), None),
        (sparse(INDICES, IDS), sparse(INDICES, masked(WEIGHTS))),
        (ragged(SPLITS, masked(IDS)), None),
        (ragged(masked(SPLITS), IDS), None),
        (ragged(SPLITS, IDS), ragged(SPLITS, masked(WEIGHTS))),
        (IDS, masked(WEIGHTS)),
    ],
)
def test_recv_activations_refuses_masked_arrays(engine, ids, weights):
    with pytest.raises(ps.UsageError, match=rf"feature 'visits': {MESSAGE}"):
        engine.recv_activations([IDS, ids], None if weights is None else [WEIGHTS, weights])


def test_unpacking_deduplication_data_refuses_masked_arrays(engine):
    _, dedup = engine.recv_activations([IDS, IDS])
    integers, floats, mask = dedup.pack()
    with pytest.raises(ps.InputError, match=f"deduplication data: {MESSAGE}"):
        ps.DeduplicationData.unpack(engine.config, np.ma.array(integers), floats, mask)
