"""Deduplication data, packed into integers, floats and a mask, as it travels through a TPU program, and back."""

from dataclasses import replace

import numpy as np
import pytest
from lookups import RAGGED, config_of, engine_of

import penstock as ps


def test_packed_and_unpacked_data_sends_the_same_gradients():
    ours, other = engine_of(combiner="sqrtn"), engine_of(combiner="sqrtn")
    gradient = [np.random.default_rng(1).normal(size=(4, 2)).astype(np.float32)]
    _, dedup = ours.recv_activations([RAGGED])
    integers, floats, mask = dedup.pack()
    assert (integers.dtype, floats.dtype, mask.dtype) == (np.uint32, np.float32, np.int32)
    again = ps.DeduplicationData.unpack(ours.config, integers, floats, mask)
    other.recv_activations([RAGGED])
    ours.send_gradients(gradient, deduplication_data=dedup)
    other.send_gradients(gradient, deduplication_data=again)
    assert ours.state_hash() == other.state_hash()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda i, f, m: (i[:-1], f, m), ps.InputError, "element 4"),
        (lambda i, f, m: (np.append(i, i[:1]), f, m), ps.InputError, "1 integers and 0 floats are left over"),
        (lambda i, f, m: (i, f, m[:-1]), ps.InputError, "left over"),
        (lambda i, f, m: (i, f, m + 2), ps.InputError, "element 0: expected type 0 or 1, got 2"),
        (lambda i, f, m: (i[None], f, m), ps.InputError, "expected a vector of integers"),
        (lambda i, f, m: (i, f, m.reshape(-1)), ps.InputError, r"expected integers of shape \(elements, 2\)"),
        (lambda i, f, m: ([], [], np.zeros((0, 2), np.int32)), ps.InputError, "expected a vector of integers"),
    ],
)
def test_damaged_packed_data_is_refused(damage, error, message):
    engine = engine_of()
    _, dedup = engine.recv_activations([RAGGED])
    with pytest.raises(error, match=message):
        ps.DeduplicationData.unpack(engine.config, *damage(*dedup.pack()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unique_ids": {"t": np.array([0, 1, 2, 3, 6])}}, "table 't': expected 0 <= id < 6, got 6"),
        ({"unique_ids": {"t": np.array([-1, 1, 2, 3, 4])}}, "table 't': expected 0 <= id < 6, got -1"),
        ({"rows": [0, 2, 5, 1, 1, 3]}, "feature 'f': row 5 of 5 unique ids"),
        ({"samples": [0, 9, 2, 3, 3, 3]}, "feature 'f': sample 9 of 4 samples"),
        ({"samples": [0, 0, 2]}, "feature 'f': expected as many of each, got 6 rows, 3 samples, 6 gains"),
        ({"gains": [1.0]}, "feature 'f': expected as many of each, got 6 rows, 6 samples, 1 gains"),
    ],
)
def test_data_that_was_tampered_with_is_refused_before_anything_is_summed(change, message):
    engine = engine_of()
    _, dedup = engine.recv_activations([RAGGED])
    kinds = {"rows": np.uint32, "samples": np.uint32, "gains": np.float32}
    uses = {key: np.array(value, kinds[key]) for key, value in change.items() if key in kinds}
    whole = {key: value for key, value in change.items() if key not in kinds}
    data = replace(dedup, features={"f": replace(dedup.features["f"], **uses)}, **whole)
    with pytest.raises(ps.InputError, match=message):
        engine.send_gradients([np.ones((4, 2), np.float32)], deduplication_data=data)
    with pytest.raises(ps.InputError, match=r"feature|table|expected"):
        ps.DeduplicationData.unpack(engine.config, *data.pack())


def test_packed_data_of_another_configuration_is_refused():
    _, dedup = engine_of().recv_activations([RAGGED])
    with pytest.raises(ps.StateError, match="another configuration"):
        ps.DeduplicationData.unpack(config_of(dim=3), *dedup.pack())
