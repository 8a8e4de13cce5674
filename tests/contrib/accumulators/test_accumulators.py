"""The conditional accumulators beyond the recorded traces: sums, and what is refused."""

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import penstock as ps


def sparse(**settings):
    return ps.SparseConditionalAccumulator(**{"shape": (10, 2)} | settings)


def rows(*values, dtype=np.float32):
    return np.array([[value, value] for value in values], dtype).reshape(len(values), 2)


# ---- sums


@st.composite
def gradient_lists(draw):
    dtype = draw(st.sampled_from([np.float16, np.float32, np.float64]))
    finite = st.floats(-100, 100, width=16)
    gradients = []
    for _ in range(draw(st.integers(1, 5))):
        ids = draw(st.lists(st.integers(-1, 9), max_size=12))
        gradients.append((np.array(ids, np.int64), draw(hnp.arrays(dtype, (len(ids), 3), elements=finite))))
    return dtype, gradients


@given(gradient_lists(), st.sampled_from(["MEAN", "SUM"]))
def test_ids_in_any_order_are_summed_in_arrival_order_and_counted_once_per_gradient(made, reduction):
    dtype, gradients = made
    acc = ps.SparseConditionalAccumulator(dtype, (10, 3), reduction)
    for ids, values in gradients:
        assert acc.apply_gradient(ids, values)
    taken = acc.take_gradient(len(gradients), timeout=0)
    with np.errstate(over="ignore"):
        ids, sums, _ = reference.coalesce(gradients, 3, reduction == "MEAN", dtype)
    order = np.argsort(ids)
    assert taken.indices.tolist() == ids[order].tolist()
    assert taken.values.tobytes() == sums[order].tobytes()
    assert taken.values.dtype == dtype


def test_float16_rounds_at_every_addition():
    dense, by_id = (
        ps.ConditionalAccumulator("float16", (), "SUM"),
        ps.SparseConditionalAccumulator("float16", None, "SUM"),
    )
    for value in (2048.0, 1.0, 1.0):
        dense.apply_gradient(value)
        by_id.apply_gradient([5], [value])
    assert dense.take_gradient(3) == 2048
    assert by_id.take_gradient(3).values.tolist() == [2048]


def test_rows_of_any_rank_come_back_in_their_shape():
    for inner in ((), (3,), (2, 3), (0,), (2, 0, 3)):
        acc = ps.SparseConditionalAccumulator()
        acc.apply_gradient([4, 1], np.ones((2, *inner), np.float32))
        acc.apply_gradient([4], np.ones((1, *inner), np.float32))
        taken = acc.take_gradient(2)
        assert taken.indices.tolist() == [1, 4]
        assert taken.values.shape == (2, *inner)
        assert taken.dense_shape.tolist() == [-1, *inner]


def test_empty_gradients_count_and_come_back_empty():
    acc = ps.SparseConditionalAccumulator(shape=(-1, 2))
    assert acc.apply_gradient([], np.empty((0, 2), np.float32))
    taken = acc.take_gradient(1)
    assert (taken.indices.shape, taken.values.shape, taken.dense_shape.tolist()) == ((0,), (0, 2), [-1, 2])
    assert acc.global_step == 1


def test_callers_may_change_applied_and_taken_arrays():
    dense, compat, ours = ps.ConditionalAccumulator(), sparse(tf_compat=True), sparse()
    value, ids, values = np.ones(3, np.float32), np.array([1, 2]), rows(1, 1)
    dense.apply_gradient(value)
    value[:] = 9
    assert dense.get_state()["held"]["value"].tolist() == [1, 1, 1]
    for acc in (compat, ours):
        ids[:], values[:] = [1, 2], 1
        acc.apply_gradient(ids, values)
        ids[:], values[:] = 7, 9
        first = acc.take_gradient(1)
        assert (first.indices.tolist(), first.values.tolist()) == ([1, 2], [[1, 1], [1, 1]])
        acc.apply_gradient([3, 4], rows(5, 5), local_step=1)
        assert first.values.tolist() == [[1, 1], [1, 1]]


def test_tensorflows_merge_is_there_when_asked_for():
    # First [3, 1, 3], then [1, 3] → [1, 3, 1, 3] (facts: measured).
    acc = sparse(reduction="SUM", tf_compat=True)
    acc.apply_gradient([3, 1, 3], rows(1, 2, 3))
    acc.apply_gradient([1, 3], rows(10, 20))
    taken = acc.take_gradient(2)
    assert taken.indices.tolist() == [1, 3, 1, 3]
    assert taken.values[:, 0].tolist() == [10, 21, 2, 3]


def test_the_shape_may_change_from_take_to_take_where_none_was_declared():
    acc = ps.SparseConditionalAccumulator()
    for width in (3, 1, 4):
        acc.apply_gradient([0], np.ones((1, width), np.float32), local_step=9)
        with pytest.raises(ps.InputError, match=rf"expected rows of \({width},\), got \(7,\)"):
            acc.apply_gradient([0], np.ones((1, 7), np.float32), local_step=9)
        assert acc.take_gradient(1).values.shape == (1, width)


# ---- what is refused, before any state is touched


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda acc: acc.apply_gradient([1], rows(1), local_step=np.array([0])),
            ps.UsageError,
            "a whole number, got array",
        ),
        (
            lambda acc: acc.apply_gradient([1], rows(1), local_step=0.0),
            ps.UsageError,
            "local_step: expected a whole number",
        ),
        (
            lambda acc: acc.apply_gradient([1], rows(1), local_step=2**63),
            ps.UsageError,
            "local_step: expected an int64",
        ),
        (lambda acc: acc.apply_gradient([1], rows(1), contributor=[3]), ps.UsageError, "contributor: expected an int"),
        (lambda acc: acc.apply_gradient([1], rows(1), grad_shape=5), ps.UsageError, "grad_shape: expected a sequence"),
        (
            lambda acc: acc.apply_gradient([1], rows(1, dtype=np.float64)),
            ps.InputError,
            "expected float32, got float64",
        ),
        (lambda acc: acc.apply_gradient([1], rows(1, dtype=np.int32)), ps.InputError, "expected float32, got int32"),
        (lambda acc: acc.apply_gradient([1], [["a", "b"]]), ps.InputError, "gradient: expected numbers"),
        (lambda acc: acc.apply_gradient([1.5], rows(1)), ps.InputError, "ids: expected integers, got float64"),
        (lambda acc: acc.apply_gradient([[1], [2, 3]], rows(1)), ps.InputError, "ids: .*got lists of several"),
        (
            lambda acc: acc.apply_gradient(np.array([2**63], np.uint64), rows(1)),
            ps.InputError,
            "got 9223372036854775808",
        ),
        (lambda acc: acc.take_gradient(np.array([1])), ps.UsageError, "num_required: expected a whole number"),
        (lambda acc: acc.take_gradient(0), ps.UsageError, "num_required: expected at least 1, got 0"),
        (lambda acc: acc.take_gradient_async(-3), ps.UsageError, "num_required: expected at least 1, got -3"),
        (lambda acc: acc.take_gradient(1, timeout=-1), ps.UsageError, "timeout: expected seconds"),
        (lambda acc: acc.take_gradient(1, timeout=float("nan")), ps.UsageError, "timeout: expected seconds"),
        (lambda acc: acc.set_global_step("1"), ps.UsageError, "global_step: expected a whole number"),
    ],
)
def test_arguments_that_tensorflow_crashes_on_are_named_errors(call, error, message):
    acc = sparse()
    acc.apply_gradient([1], rows(1))
    before = acc.get_state()
    with pytest.raises(error, match=message):
        call(acc)
    assert str(acc.get_state()) == str(before)


@pytest.mark.parametrize(
    ("ids", "values", "grad_shape", "message"),
    [
        ([[1]], rows(1), None, r"ids: expected shape \(n,\), got \(1, 1\)"),
        ([1], np.float32(1), None, "at least one axis"),
        ([1, 2], rows(1), None, "2 ids and 1 rows"),
        ([1], rows(1), (11, 2), r"grad_shape: expected \(10, 2\), got \(11, 2\)"),
        ([1], rows(1), (10,), r"grad_shape: expected \(10, 2\), got \(10,\)"),
        ([10], rows(1), None, "ids: expected id < 10, got 10"),
        ([1], np.ones((1, 3), np.float32), None, r"expected rows of \(2,\), got \(3,\)"),
        ([1], np.ones(1, np.float32), None, r"expected rows of \(2,\), got \(\)"),
    ],
)
def test_gradients_that_do_not_fit_are_refused_and_stale_ones_are_not_even_looked_at(ids, values, grad_shape, message):
    acc = sparse()
    with pytest.raises(ps.InputError, match=message):
        acc.apply_gradient(ids, values, grad_shape=grad_shape)
    assert acc.num_accumulated() == 0
    assert acc.apply_gradient(ids, values, local_step=-1, grad_shape=grad_shape) is False
    assert acc.stale.total == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": ">f4"}, "dtype: expected one of"),
        ({"dtype": "nonsense"}, "dtype: expected one of float16, float32, float64, got 'nonsense'"),
        ({"shape": 3}, "shape: expected None or a sequence"),
        ({"shape": (3, -2)}, "shape: expected dims of at least 0"),
        ({"reduction": "mean"}, "reduction: expected 'MEAN' or 'SUM', got 'mean'"),
    ],
)
def test_settings_that_are_wrong_are_refused_when_made(settings, message):
    for kind in (ps.ConditionalAccumulator, ps.SparseConditionalAccumulator):
        with pytest.raises(ps.UsageError, match=message):
            kind(**settings)


def test_nested_numbers_are_taken_as_the_accumulators_dtype():
    acc = ps.ConditionalAccumulator("float64", (None, 2))
    acc.apply_gradient([[1, 2], [3, 4]])
    assert acc.take_gradient(1).tolist() == [[1, 2], [3, 4]]
    with pytest.raises(ps.InputError, match=r"expected shape \(\?, 2\), got \(2,\)"):
        acc.apply_gradient([1, 2], local_step=1)


def test_arrays_at_odd_addresses_are_summed_like_others():
    def odd(array):
        block = np.empty(array.nbytes + 1, np.uint8)
        block[1:] = array.reshape(-1).view(np.uint8)
        return block[1:].view(array.dtype).reshape(array.shape)

    acc = sparse()
    assert acc.apply_gradient(odd(np.array([3, 1, 3])), odd(rows(1, 2, 4)))
    assert acc.take_gradient(1).values.tolist() == [[2, 2], [5, 5]]
