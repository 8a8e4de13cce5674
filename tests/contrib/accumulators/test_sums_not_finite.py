"""A gradient of finite values with which a sum of a sparse accumulator becomes infinite is refused."""

import numpy as np
import pytest

import penstock as ps

MOST = {"float16": 6e4, "float32": 3e38, "float64": 1.7e308}


@pytest.mark.parametrize("dtype", MOST)
@pytest.mark.parametrize("several", [False, True])
def test_it_is_refused_within_one_gradient_and_over_several(dtype, several):
    acc, big = ps.SparseConditionalAccumulator(dtype, reduction="SUM"), np.full((2, 3), MOST[dtype], dtype)
    if several:
        acc.apply_gradient([7, 3], big)
    with pytest.raises(ps.InputError, match=f"expected sums that are finite as {dtype}, and that of id 7") as error:
        acc.apply_gradient([7, 7], big)
    assert (error.value.reason, acc.num_accumulated()) == ("sum_not_finite", int(several))
    acc.apply_gradient([7, 5], -big)
    taken = acc.take_gradient(1 + several)
    assert taken.indices.tolist() == ([3, 5, 7] if several else [5, 7])
    assert taken.values[-1].tolist() == ([0.0] * 3 if several else (-big[0]).tolist())


@pytest.mark.parametrize("dtype", MOST)
def test_infinite_values_are_summed_and_tf_compat_sums_everything_as_tensorflow_does(dtype):
    acc, big = ps.SparseConditionalAccumulator(dtype, reduction="SUM"), np.full((1, 1), MOST[dtype], dtype)
    acc.apply_gradient([7], [[np.inf]])
    acc.apply_gradient([7], big)
    with pytest.raises(ps.InputError, match="of id 3 is not"):
        acc.apply_gradient([7, 3, 3], np.concatenate([big] * 3))
    assert acc.take_gradient(2).values.tolist() == [[np.inf]]
    compatible = ps.SparseConditionalAccumulator(dtype, reduction="SUM", tf_compat=True)
    for _ in range(2):
        compatible.apply_gradient([7], big)
    assert compatible.take_gradient(2).values.tolist() == [[np.inf]]
