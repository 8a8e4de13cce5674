"""Sums of segments by gathers: the documented order, in every padded size, also of segments with many values."""

from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.bench.device_own_steps import sums_by_runs
from penstock.rows.bridge.segment_sums import MOST_TERMS, RUN, SegmentSums, SumSizes, Values, level_sizes, summed


def by_plan(segments, num_segments, values, sizes=None, num_pads=0):
    """Return the sums that the plan gives, of values with pads that must not count."""
    plan = SegmentSums.of(segments, num_segments)
    padded = np.concatenate([values, np.full((num_pads, values.shape[1]), np.nan, np.float32)])
    terms, nodes = plan.padded(sizes or plan.sizes, num_segments, len(padded))
    read = Values(lambda indices: jnp.asarray(padded).at[indices].get(mode="clip"), len(padded))
    return np.asarray(jax.jit(lambda *tree: summed(read, jnp.asarray(segments), num_segments, tree))(terms, nodes))


def random_segments(seed):
    """Segments without values, with one, with few, and some with hundreds."""
    rng = np.random.default_rng(seed)
    sizes = rng.choice([0, 1, 2, 4, 5, 16, 17, 64, 65, 80, 81, 300, 1100], 20)
    return rng.permutation(np.repeat(np.arange(20), sizes)), rng


@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_sums_is_the_documented_one(seed):
    segments, rng = random_segments(seed)
    values = rng.standard_normal((len(segments), 3)).astype(np.float32)
    expected = sums_by_runs(segments, 20, values)
    assert by_plan(segments, 20, values).tobytes() == expected.tobytes()


def test_padded_sizes_do_not_change_a_bit():
    segments, rng = random_segments(9)
    values = rng.standard_normal((len(segments), 2)).astype(np.float32)
    sizes = SegmentSums.of(segments, 20).sizes
    larger = SumSizes(MOST_TERMS, tuple(4 * size for size in [8 * sizes.levels[0], *sizes.levels]))
    assert by_plan(segments, 20, values).tobytes() == by_plan(segments, 20, values, larger, num_pads=5).tobytes()


@pytest.mark.parametrize("number", [1, 4, 5, 64, 65, 1024, 1025, 40_000])
def test_values_of_one_segment_need_few_levels_and_bounded_room(number):
    sums = SegmentSums.of(np.zeros(number, int), 1)
    terms, nodes = sums.padded(sums.sizes, 1, number)
    assert by_plan(np.zeros(number, int), 1, np.ones((number, 1), np.float32)) == number
    assert terms.shape[1] <= MOST_TERMS
    assert nodes.size <= 3 * number + 9 * RUN
    levels = level_sizes(len(nodes))
    assert MOST_TERMS * RUN ** len(levels) >= number > (MOST_TERMS * RUN ** (len(levels) - 1) if levels else 0)


@pytest.mark.parametrize("seed", range(3))
def test_the_size_of_all_nodes_determines_those_of_the_levels(seed):
    sizes = reduce(SumSizes.or_more, (SegmentSums.of(random_segments(10 * seed + n)[0], 20).sizes for n in range(4)))
    assert level_sizes(sum(sizes.levels)) == list(sizes.levels)


def test_without_a_repeated_value_there_are_no_nodes_and_one_term():
    assert SegmentSums.of(np.array([2, 0, 1]), 4).sizes == SumSizes(1, ())
    assert SegmentSums.of(np.zeros(0, int), 3).sizes == SumSizes(1, ())


def test_infinite_values_stay_in_their_segment():
    values = np.array([[1.0], [np.inf], [2.0]], np.float32)
    assert by_plan(np.array([0, 1, 0]), 3, values, num_pads=2).tolist() == [[3.0], [np.inf], [0.0]]
