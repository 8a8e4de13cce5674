"""Lookups that are summed without being written out: the bits of writing them out, whatever the machine does."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
import reference
from accumulate import add, drain, is_valid
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.model import combiners
from penstock.pyx.accumulator import Accumulator
from penstock.pyx.row_sums import combine as add_rows

# Signed zeros, subnormal numbers and products that round or underflow.
values = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.5, 1e-45, -1e-40, 1 / 3]),
    st.floats(-(2.0**60), 2.0**60, width=32, allow_nan=False),
)


@st.composite
def a_frame(draw, dim):
    """(ids, gradients, samples, gains), samples in any order."""
    num_samples, num_lookups = draw(st.integers(1, 6)), draw(st.integers(0, 30))
    floats = [np.array(draw(st.lists(values, min_size=n, max_size=n)), np.float32) for n in (num_samples, num_lookups)]
    gradients = np.outer(floats[0], np.linspace(1, 2, dim)).astype(np.float32)
    ids, samples = (
        np.array(draw(st.lists(st.integers(0, most), min_size=num_lookups, max_size=num_lookups)), np.int64)
        for most in (40, num_samples - 1)
    )
    return ids, gradients, samples, floats[1]


def drained(accumulator, frames, parts, mean=False):
    for number, (ids, gradients, samples, gains) in enumerate(frames):
        assert add(accumulator, [(ids, gradients, samples, gains)], number, parts, threads=2)
    return drain(accumulator, mean, ascending=True)


@given(st.data(), st.integers(1, 21), st.sampled_from([1, 2, 8]), st.booleans(), st.sampled_from([None, 41, 2**30]))
@settings(deadline=None, max_examples=150)
def test_sums_equal_those_of_rows_that_were_written_out(data, dim, parts, mean, vocabulary_size):
    frames = data.draw(st.lists(a_frame(dim), min_size=1, max_size=3))
    ids, sums, counts = drained(Accumulator(dim, vocabulary_size=vocabulary_size), frames, parts, mean)
    wanted = reference.coalesce_expanded(frames, dim, mean)
    order = np.argsort(wanted[0])
    assert ids.tolist() == wanted[0][order].tolist()
    assert sums.tobytes() == wanted[1][order].tobytes()
    assert counts.tolist() == wanted[2][order].tolist()


@pytest.mark.parametrize("dim", [8, 16, 32, 64, 128, 131])
def test_many_rows_of_every_unrolled_dim_equal_the_twin(dim):
    rng = np.random.default_rng(dim)
    ids, samples = rng.integers(0, 300, 5000), np.sort(rng.integers(0, 700, 5000))
    gradients, gains = rng.standard_normal((700, dim), np.float32), rng.standard_normal(5000, np.float32)
    wanted = reference.coalesce_expanded([(ids, gradients, samples, gains)], dim)
    order = np.argsort(wanted[0])
    for parts in (1, 4):
        actual = drained(Accumulator(dim, vocabulary_size=300), [(ids, gradients, samples, gains)], parts)
        assert actual[1].tobytes() == wanted[1][order].tobytes()


@pytest.mark.parametrize("dim", [1, 4, 12, 13])
@pytest.mark.parametrize(
    ("gradient", "gain"), [(np.inf, 0), (np.nan, 0), (1, np.nan), (0, np.inf), (2e38, 3), (-np.inf, 1), (1, -np.inf)]
)
def test_a_product_that_is_not_finite_undoes_the_frame(dim, gradient, gain):
    ids, samples, gains = np.arange(20), np.arange(20) % 5, np.ones(20, np.float32)
    accumulator = Accumulator(dim, vocabulary_size=20)
    for column in range(dim):
        gradients, bad = np.ones((5, dim), np.float32), gains.copy()
        gradients[3, column], bad[8] = gradient, gain
        block = (ids, gradients, samples, bad)
        assert not is_valid(accumulator, [block], 0, 2)
        assert not add(accumulator, [block], 0, 2)
        assert len(accumulator) == 0
    assert is_valid(accumulator, [(ids, np.ones((5, dim), np.float32), samples, gains)], 0, 2)


def test_gradients_of_samples_without_lookups_are_not_validated():
    gradients = np.float32([[1], [np.nan]])
    _, sums, _ = drained(Accumulator(1), [(np.array([4]), gradients, np.zeros(1, np.int64), np.float32([0.5]))], 1)
    assert sums.tolist() == [[0.5]]


@pytest.mark.parametrize(
    ("gains", "dtype", "got"),
    [
        (np.ones(2, np.float32), "float32", r"float32 \(2,\)"),
        (np.ones(3), "float32", r"float64 \(3,\)"),
        (np.ones(6, np.float32)[::2], "float32", r"float32 \(3,\)"),
        (np.ones(3, np.float32), "float64", r"float32 \(3,\)"),
    ],
)
def test_gains_that_do_not_fit_are_refused(gains, dtype, got):
    accumulator = Accumulator(1, dtype)
    with pytest.raises(ValueError, match=rf"gains float32 \(n,\), not of float64; got .*, {got}$"):
        add(accumulator, [(np.arange(3), np.ones((3, 1), dtype), None, gains)], 0)


# ---- forward


@given(st.data(), st.integers(1, 70), st.booleans(), st.booleans(), st.booleans())
@settings(deadline=None, max_examples=200)
def test_activations_equal_those_of_the_twin(data, dim, weighted, picked, one_each):
    num_samples, num_rows = data.draw(st.integers(0, 6)), data.draw(st.integers(1, 5))
    numbers = st.integers(0, num_samples - 1)
    samples = range(num_samples) if one_each else data.draw(st.lists(numbers, max_size=30)) if num_samples else []
    samples = np.sort(np.array(samples, np.int64))
    pick = st.lists(st.integers(0, num_rows - 1), min_size=len(samples), max_size=len(samples))
    which = np.array(data.draw(pick), np.uint32) if picked else None
    number = num_rows if picked else len(samples)
    column = np.array(data.draw(st.lists(values, min_size=number, max_size=number)), np.float32)
    rows = np.outer(column, np.linspace(-1, 1, dim)).astype(np.float32)
    by = np.array(data.draw(st.lists(values, min_size=len(samples), max_size=len(samples))), np.float32)
    actual = combiners.combine(rows, samples, by if weighted else None, num_samples, which)
    written = rows if which is None else rows[which]
    ones = by if weighted else np.ones_like(by)
    assert actual.tobytes() == reference.combine(written, samples, ones, num_samples).tobytes()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [4, 8, 16, 32, 64, 128, 131])
def test_many_activations_of_every_unrolled_dim_equal_the_twin(dim, weighted):
    rng = np.random.default_rng(dim)
    rows, which = rng.standard_normal((300, dim), np.float32), rng.integers(0, 300, 5000)
    samples = np.sort(rng.integers(0, 700, 5000))
    by = rng.standard_normal(5000, np.float32) if weighted else np.ones(5000, np.float32)
    actual = combiners.combine(rows, samples, by if weighted else None, 700, which)
    assert actual.tobytes() == reference.combine(rows[which], samples, by, 700).tobytes()


@pytest.mark.parametrize(
    ("rows", "which", "samples", "gains", "message"),
    [
        (2, None, [0, 3], None, "a sample or an index is out of range"),
        (2, None, [0, -1], None, "a sample or an index is out of range"),
        (2, [0, 2], [0, 1], None, "a sample or an index is out of range"),
        (2, [0, -1], [0, 1], None, "a sample or an index is out of range"),
        (3, None, [0, 1], None, "the shapes of rows, indices, samples and out do not match"),
        (2, [0], [0, 1], None, "the shapes of rows, indices, samples and out do not match"),
        (2, None, [0, 1], [1.0], "the shapes of gains and samples do not match"),
    ],
)
def test_lookups_that_lie_outside_are_refused_and_nothing_is_added(rows, which, samples, gains, message):
    out = np.zeros((3, 2), np.float32)
    arrays = [None if array is None else np.array(array, np.int64) for array in (which, samples)]
    with pytest.raises(ValueError, match=message):
        add_rows(np.ones((rows, 2), np.float32), *arrays, None if gains is None else np.float32(gains), out)
    assert not out.any()


# ---- through the engine

LOOKUPS, SAMPLES, DIM = 1 << 17, 1 << 14, 64


def config_of(features, rows=5000, dim=DIM):
    table = ps.TableConfig(rows, dim, name="t", combiner="mean")
    return ps.EmbeddingConfig.from_features([ps.FeatureConfig(table, name=f) for f in features], 4, ps.SGD(0.5))


def column_of(rng, rows=5000, samples=SAMPLES, lookups=LOOKUPS, dim=DIM):
    """Lists of 0 to 2 * lookups / samples ids."""
    ends = np.sort(np.concatenate([[0, lookups], rng.integers(0, lookups, samples - 1)])).astype(np.int32)
    gradients = pa.FixedSizeListArray.from_arrays(rng.standard_normal(samples * dim, np.float32), dim)
    ids = pa.ListArray.from_arrays(pa.array(ends), pa.array(rng.integers(0, rows, lookups)))
    weights = pa.ListArray.from_arrays(pa.array(ends), pa.array(rng.random(lookups, np.float32)))
    return pa.StructArray.from_arrays([ids, weights, gradients], ["ids", "weights", "gradient"])


@pytest.mark.parametrize("features", [("a",), ("a", "b")])
def test_threads_and_batches_do_not_change_the_bits(features):
    rng = np.random.default_rng(0)
    whole = pa.record_batch({"step": np.zeros(SAMPLES, np.int64)} | {f: column_of(rng) for f in features})
    hashes = set()
    for threads, at_once in ((1, SAMPLES), (4, SAMPLES), (4, 1000), (2, 7777)):
        engine = ps.Engine(config_of(features), threads=threads)
        engine.run([whole.slice(start, at_once) for start in range(0, SAMPLES, at_once)])
        hashes.add(engine.state_hash())
    assert len(hashes) == 1


@pytest.mark.parametrize("on_bad_row", ["error", "drop"])
def test_no_array_of_lookups_times_dim_is_made(on_bad_row):
    """Nor where a row is bad, and every value is looked at once more."""
    column = column_of(np.random.default_rng(1))
    if on_bad_row == "drop":
        ids = np.array(column.field(0).values)
        ids[77] = -1
        ids = pa.ListArray.from_arrays(column.field(0).offsets, pa.array(ids))
        column = pa.StructArray.from_arrays([ids, column.field(1), column.field(2)], ["ids", "weights", "gradient"])
    engine = ps.Engine(config_of(("a",)))
    batch = pa.record_batch({"a": column})
    tracemalloc.start()
    report = engine.run([batch], on_bad_row=on_bad_row)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (report.rows, report.dropped) == (LOOKUPS, {} if on_bad_row == "error" else {"id_out_of_range": 1})
    assert peak < LOOKUPS * DIM * 4 / 2
