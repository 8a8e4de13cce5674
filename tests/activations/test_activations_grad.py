"""The whole lookup against jax: activations and gradients of a dense formulation, for any ragged batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps

BATCH, VOCABULARY, DIM, LENGTH = 3, 5, 2, 2
COMBINERS = ("sum", "mean", "sqrtn")


@pytest.fixture(scope="module")
def engine():
    """A feature per combiner, and two more that share its first table: plain, and a sequence."""
    tables = {c: ps.TableConfig(VOCABULARY, DIM, name=c, combiner=c) for c in COMBINERS}
    features = {c: ps.FeatureConfig(tables[c], name=c) for c in COMBINERS}
    features["again"] = ps.FeatureConfig(tables["sum"], name="again")
    features["sequence"] = ps.FeatureConfig(tables["sum"], max_sequence_length=LENGTH, name="sequence")
    return ps.Engine(ps.EmbeddingConfig.from_features(features, BATCH, ps.SGD(1.0)))


# Weights whose sums are far from zero unless they are zero: near zero a quotient is more than a matter of rounding.
weights_of_one = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 3.0])
one_sample = st.lists(st.tuples(st.integers(0, VOCABULARY - 1), weights_of_one), max_size=4)
batch = st.lists(one_sample, min_size=BATCH, max_size=BATCH)


def dense(table, samples, combiner):
    """Activations (BATCH, DIM) by a matrix product; no weight is omitted, no sample is special but by its divisor."""
    matrix = np.zeros((BATCH, VOCABULARY), np.float32)
    for b, lookups in enumerate(samples):
        weights = np.array([w for _, w in lookups], np.float32)
        divisor = {"sum": 1.0, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}[combiner]
        for i, w in lookups:
            matrix[b, i] += w / divisor if divisor else 0
    return jnp.matmul(matrix, table, precision="highest")


def sequence(table, samples):
    """(BATCH, LENGTH, DIM): positions by themselves, cut at LENGTH."""
    onehot = np.zeros((BATCH, LENGTH, VOCABULARY), np.float32)
    for b, lookups in enumerate(samples):
        for position, (i, _) in enumerate(lookups[:LENGTH]):
            onehot[b, position, i] = 1
    return jnp.matmul(onehot, table, precision="highest")


@given(st.fixed_dictionaries(dict.fromkeys((*COMBINERS, "again", "sequence"), batch)), st.integers(0, 2**31))
@settings(deadline=None, max_examples=60)
def test_activations_and_row_gradients_are_those_of_the_dense_formulation(engine, samples, seed):
    rng = np.random.default_rng(seed)
    tables = {c: rng.normal(size=(VOCABULARY, DIM)).astype(np.float32) for c in COMBINERS}
    for name, rows in tables.items():
        engine.load_parameters(name, rows)
    features = {name: [[i for i, _ in one] for one in of] for name, of in samples.items()}
    weights = {name: [[w for _, w in one] for one in of] for name, of in samples.items()}
    weights["again"] = weights["sequence"] = None

    def forward(tables):
        found = {c: dense(tables[c], samples[c], c) for c in COMBINERS}
        ones = [[(i, 1.0) for i, _ in one] for one in samples["again"]]
        found["again"] = dense(tables["sum"], ones, "sum")
        return found | {"sequence": sequence(tables["sum"], samples["sequence"])}

    activations, dedup = engine.recv_activations(features, weights)
    wanted, back = jax.vjp(forward, tables)
    for name, value in activations.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-5, atol=1e-5, err_msg=name)
    assert dedup.truncated == sum(max(0, len(one) - LENGTH) for one in samples["sequence"])
    upstream = {name: rng.normal(size=np.shape(value)).astype(np.float32) for name, value in wanted.items()}
    engine.send_gradients(upstream, deduplication_data=dedup)
    (gradients,) = back(upstream)
    for name, rows in tables.items():
        moved = rows - engine.lookup(name, range(VOCABULARY))
        np.testing.assert_allclose(moved, gradients[name], rtol=1e-5, atol=2e-5, err_msg=name)


@given(st.fixed_dictionaries(dict.fromkeys(COMBINERS, batch)), st.integers(0, 2**31))
@settings(deadline=None, max_examples=20)
def test_an_example_stream_gives_the_bits_of_send_gradients(engine, samples, seed):
    """Where no two features share a table the order of rows is the same both ways."""
    rng = np.random.default_rng(seed)
    start = {c: rng.normal(size=(VOCABULARY, DIM)).astype(np.float32) for c in COMBINERS}
    gradients = {c: rng.normal(size=(BATCH, DIM)).astype(np.float32) for c in COMBINERS}
    ids = {name: [[i for i, _ in one] for one in of] for name, of in samples.items()}
    weights = {name: [[w for _, w in one] for one in of] for name, of in samples.items()}
    kind = pa.struct(
        [("ids", pa.list_(pa.int64())), ("weights", pa.list_(pa.float32())), ("gradient", pa.list_(pa.float32()))]
    )
    stream = {
        c: pa.array(
            [{"ids": i, "weights": w, "gradient": g} for i, w, g in zip(ids[c], weights[c], gradients[c], strict=True)],
            kind,
        )
        for c in COMBINERS
    }
    found = []
    empty = {"again": [[]] * BATCH, "sequence": [[]] * BATCH}
    for way in ("send", "stream"):
        for name, rows in start.items():
            engine.load_parameters(name, rows)
        if way == "stream":
            engine.run([pa.record_batch(stream)])
        else:
            _, dedup = engine.recv_activations(ids | empty, weights | dict.fromkeys(empty))
            engine.send_gradients(gradients | dict.fromkeys(empty), deduplication_data=dedup)
        found.append({c: engine.lookup(c, range(VOCABULARY)).tobytes() for c in COMBINERS})
    assert found[0] == found[1]
