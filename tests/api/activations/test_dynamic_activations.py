"""Activations, their gradients and example streams of dynamic tables: as of static ones, for any key."""

import jax
import numpy as np
import pyarrow as pa
import pytest
from example_streams import examples, structs
from hypothesis import given, settings
from hypothesis import strategies as st
from lookups import config_of

import penstock as ps
from penstock.contrib.functional.embedding_tables import EmbeddingTables

UNSIGNED = ps.Dynamic(key_type="uint64")
EDGES = [-(2**63), -1, 0, 7, 2**40, 2**63 - 1]
LARGE = [0, 5, 2**62, 2**63, 2**63 + 1, 2**64 - 1]
KINDS = pytest.mark.parametrize(
    ("dynamic", "keys"), [(ps.Dynamic(), EDGES), (UNSIGNED, LARGE)], ids=["int64", "uint64"]
)
RAGGED = [[0, 2], [], [4, 5], [1, 1, 3]]


def engine_of(dynamic=None, rows=12, combiner="sum", optimizer=None, **options):
    config = config_of(combiner, rows, optimizer=optimizer or ps.Adagrad(0.5), table={"dynamic": dynamic})
    return ps.Engine(config, **options)


def of(keys, ragged=RAGGED):
    return [[keys[rank] for rank in sample] for sample in ragged]


def gradient(seed=0):
    return np.random.default_rng(seed).standard_normal((4, 2), np.float32)


sample = st.lists(st.integers(0, 5), max_size=4)


@given(
    st.lists(st.lists(sample, min_size=4, max_size=4), min_size=1, max_size=4),
    st.sampled_from(["sum", "mean", "sqrtn"]),
    st.integers(1, 2),
)
@settings(max_examples=40)
def test_steps_have_the_bits_of_a_static_table(batches, combiner, num_required):
    static = engine_of(rows=6, combiner=combiner, num_required=num_required)
    dynamic = engine_of(ps.Dynamic(), combiner=combiner, num_required=num_required)
    for step, batch in enumerate(batches):
        weights = [[[0.5 + position for position, _ in enumerate(item)] for item in batch]]
        actual = [engine.recv_activations([batch], weights) for engine in (static, dynamic)]
        assert actual[0][0][0].tobytes() == actual[1][0][0].tobytes()
        for engine, (_, dedup) in zip((static, dynamic), actual, strict=True):
            assert engine.send_gradients([gradient(step)], deduplication_data=dedup)
    assert static.lookup("t", range(6)).tobytes() == dynamic.lookup("t", range(6)).tobytes()


@KINDS
def test_any_key_is_looked_up_and_updated(dynamic, keys):
    received, applied = engine_of(dynamic), engine_of(dynamic)
    kind = np.uint64 if dynamic is UNSIGNED else np.int64
    for step in range(3):
        (activations,), dedup = received.recv_activations([of(keys)])
        rows = received.lookup("t", np.array(keys, kind))
        wanted = [sum((rows[rank] for rank in item), np.zeros(2, np.float32)) for item in RAGGED]
        np.testing.assert_array_equal(activations, wanted)
        assert received.send_gradients([gradient(step)], deduplication_data=dedup)
        flat = np.concatenate([np.array(item, kind) for item in of(keys)])
        applied.apply({"t": (flat, np.repeat(gradient(step), [len(item) for item in RAGGED], axis=0))})
    assert received.keys("t").to_pylist() == sorted(keys)
    assert received.state_hash() == applied.state_hash()


def test_a_list_of_one_key_per_sample_may_hold_any_keys():
    _, dedup = engine_of(UNSIGNED).recv_activations([[2**64 - 1, 5, 2**63, 5]])
    assert dedup.ids("f", "t").view(np.uint64).tolist() == [2**64 - 1, 5, 2**63, 5]


@KINDS
def test_packed_deduplication_data_keeps_any_key(dynamic, keys):
    engines = [engine_of(dynamic), engine_of(dynamic)]
    for engine, packs in zip(engines, (False, True), strict=True):
        _, dedup = engine.recv_activations([of(keys)])
        if packs:
            integers, floats, mask = dedup.pack()
            assert integers.dtype == np.uint64
            dedup = ps.DeduplicationData.unpack(engine.config, integers, floats, mask)
        assert engine.send_gradients([gradient()], deduplication_data=dedup)
    assert engines[0].state_hash() == engines[1].state_hash()
    assert len(engines[0].keys("t")) == 6


def test_small_negative_keys_are_packed_too():
    engine = engine_of(ps.Dynamic())
    _, dedup = engine.recv_activations([[[-1], [3], [], [-2]]])
    again = ps.DeduplicationData.unpack(engine.config, *dedup.pack())
    assert again.unique_ids["t"].tolist() == [-2, -1, 3]


@pytest.mark.parametrize(
    ("dynamic", "key", "message"),
    [
        (ps.Dynamic(), 2**63, "expected an int64 id, got 9223372036854775808"),
        (UNSIGNED, -1, "expected 0 <= id < 18446744073709551616, got -1"),
    ],
)
def test_a_key_outside_the_type_names_the_feature(dynamic, key, message):
    with pytest.raises(ps.InputError, match=f"feature 'f': {message}") as error:
        engine_of(dynamic).recv_activations([[[5], [], [key], []]])
    assert error.value.reason == "id_out_of_range"


def test_activations_of_absent_keys_are_as_missing_says():
    for missing in ("initial", "zero"):
        engine = engine_of(ps.Dynamic(missing=missing, min_count=3), optimizer=ps.SGD(1.0))
        (first,), dedup = engine.recv_activations([[[-9], [-9, -9], [4], []]])
        assert first[:3].any() == (missing == "initial")
        assert engine.send_gradients([np.ones((4, 2), np.float32)], deduplication_data=dedup)
        (second,), _ = engine.recv_activations([[[-9], [4], [], []]])
        start = engine_of(ps.Dynamic(), optimizer=ps.SGD(1.0)).lookup("t", [-9, 4])
        # Key -9 occurred three times; key 4 still waits.
        np.testing.assert_allclose(second[0], start[0] - 3, rtol=1e-6)
        assert second[1].tobytes() == (start[1] if missing == "initial" else np.zeros(2, np.float32)).tobytes()


# ---- in a jitted step, on arrays of the caller


def test_a_jitted_step_on_the_rows_of_keys_does_what_the_engine_does(mesh_of):
    engine = engine_of(ps.Dynamic(), combiner="mean")
    engine.load_parameters("t", gradient(9), ids=EDGES[:4], accumulators=np.ones((4, 2)))
    embedding = EmbeddingTables(config_of("mean", 12, optimizer=ps.Adagrad(0.5)), mesh_of(1))
    keys, tables = engine.keys("t"), embedding.create()
    start = np.zeros((12, 2), np.float32)
    start[engine.rows("t", keys)] = engine.lookup("t", keys)
    tables = embedding.load(tables, "t", start, accumulators=np.ones((12, 2)))
    batch = [[EDGES[0], EDGES[1]], [], [EDGES[2]], [EDGES[3], EDGES[0]]]
    (seen,), dedup = engine.recv_activations([batch])
    uses = embedding.preprocess([[engine.rows("t", np.array(item, np.int64)) for item in batch]])

    @jax.jit
    def step(tables, uses):
        (activations,) = embedding.gather(tables, uses)
        return activations, embedding.apply(tables, uses, [2 * (activations - 1)])

    activations, tables = step(tables, uses)
    np.testing.assert_allclose(activations, seen, rtol=1e-6)
    engine.send_gradients([2 * (seen - 1)], deduplication_data=dedup)
    after = embedding.parameters(tables, "t")["parameters"][engine.rows("t", dedup.unique_ids["t"])]
    np.testing.assert_allclose(after, engine.lookup("t", dedup.unique_ids["t"]), rtol=1e-5, atol=1e-6)


# ---- example streams


@KINDS
def test_an_example_stream_of_any_keys_gives_the_bits_of_send_gradients(dynamic, keys):
    kind = pa.uint64() if dynamic is UNSIGNED else pa.int64()
    sent, streamed = engine_of(dynamic), engine_of(dynamic)
    for step in range(2):
        _, dedup = sent.recv_activations([of(keys)])
        sent.send_gradients([gradient(step)], deduplication_data=dedup)
        streamed.run([examples([step] * 4, f=structs(of(keys), gradient(step), kind=kind))])
    assert streamed.keys("t").to_pylist() == sorted(keys)
    assert sent.state_hash() == streamed.state_hash()


def test_a_key_outside_the_type_is_a_bad_row_of_an_example_stream():
    engine = engine_of(ps.Dynamic())
    log = examples([0] * 4, f=structs([[5], [2**63], [], []], gradient(), kind=pa.uint64()))
    with pytest.raises(ps.InputError, match="got 9223372036854775808") as error:
        engine.run([log])
    assert error.value.reason == "id_out_of_range"
    assert len(engine.keys("t")) == 0
