"""Weights of 16 bits: how they are rounded, and the same rows on any devices, in any form and after a restore."""

import jax
import numpy as np
import pytest
from device_table import some_rows
from engines import config_of, stored
from evidence import examples
from hypothesis import given
from hypothesis import strategies as st

import penstock.updates as o
from penstock.api.engine import Engine
from penstock.base.errors import StateError
from penstock.rows.bridge.stochastic_rounding import key_of, stochastic


def test_rounding_at_random_gives_one_of_two_neighbours_and_the_right_mean():
    values = np.full(40_000, np.float32(1.0) + np.float32(0.3 / 128))  # 0.3 of the way from 1 to the next
    bits, ids = values.view(np.uint32), np.arange(len(values), dtype=np.uint32)
    rounded = stochastic(np, bits, key_of("t", 5, 0), ids, ids % np.uint32(7)).view(np.float32)
    assert set(rounded.tolist()) == {1.0, 1.0078125}
    assert abs((rounded > 1).mean() - 0.3) < 0.01


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200), st.integers(0, 2**32 - 1))
@examples(60, 15)
def test_rounding_at_random_is_the_same_on_a_device_and_keeps_what_numbers_are(patterns, seed):
    bits = np.array(patterns, np.uint32)
    ids = np.random.default_rng(seed).integers(0, 2**32, len(bits), np.uint32)
    key = key_of("t", seed, 1)
    host = stochastic(np, bits, key, ids, ids >> np.uint32(3))
    device = jax.jit(lambda *a: stochastic(jax.numpy, *a))(bits, key, ids, ids >> np.uint32(3))
    assert np.asarray(device).tobytes() == host.tobytes()
    before, after = bits.view(np.float32), host.view(np.float32)
    assert not (host & np.uint32(0xFFFF)).any()
    assert (np.isnan(before) == np.isnan(after)).all()
    assert (np.isinf(before) == np.isinf(after)).all()
    assert (np.signbit(before) == np.signbit(after)).all()


def engine_of(bfloat16=True, mesh=None, sharding="DIV", rows=700, optimizer=None, **arguments):
    config = config_of(optimizer or o.Adagrad(0.1), dim=24, rows=rows)
    return Engine(stored(config, "t" * bfloat16, sharding), mesh, **arguments)


def trained(engine, steps=4):
    for step in range(steps):
        engine.apply({"t": some_rows(step, 200, 700, 24)})
    return engine


def test_rows_of_16_bits_are_such_everywhere(tmp_path):
    engine = trained(engine_of())
    rows = engine.lookup("t", range(700))
    assert not (rows.view(np.uint32) & np.uint32(0xFFFF)).any()
    assert (engine.retrieve_parameters("t")["accumulators"].view(np.uint32) & np.uint32(0xFFFF)).any()
    # Close to what 32 bits hold, though not it.
    exact = trained(engine_of(bfloat16=False)).lookup("t", range(700))
    assert 0 < np.abs(exact - rows).max() < 0.02
    engine.write_tables(tmp_path)
    again = engine_of(seed=1)
    again.read_tables(tmp_path)
    assert again.lookup("t", range(700)).tobytes() == rows.tobytes()


def test_many_small_updates_move_a_weight_of_16_bits():
    engine = engine_of(optimizer=o.SGD(1.0), seed=3)
    engine.load_parameters("t", np.ones((700, 24), np.float32))
    for _ in range(64):  # each an eighth of the distance to the next value below 1, which is 2**-8
        engine.apply({"t": (np.arange(700), np.full((700, 24), 2.0**-11, np.float32))})
    assert abs(engine.lookup("t", range(700)).mean() - (1 - 64 * 2.0**-11)) < 1e-3


def test_a_checkpoint_of_16_bits_continues_with_the_same_bits(tmp_path):
    engine = trained(engine_of(), 2)
    engine.save(tmp_path / "c")
    restored = Engine.restore(tmp_path / "c")
    assert restored.state_hash() == engine.state_hash()
    for item in (engine, restored):
        item.apply({"t": some_rows(9, 100, 700, 24)})
    assert restored.state_hash() == engine.state_hash()
    with pytest.raises(StateError, match="table 't' has storage_dtype bfloat16 in the checkpoint and float32 in"):
        Engine.restore(tmp_path / "c", config=engine_of(bfloat16=False).config)
