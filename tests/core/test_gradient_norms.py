"""A norm of gradients is one float, whatever the order and the grouping of the rows."""

import math

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.threads import ThreadTeam
from penstock.core.gradient_norms import EPSILON, FLOATS_PER_TASK, StepNorms, norm_of, squares_of
from penstock.model.config.clipping import Clip
from penstock.model.frames import Coalesced, SummedArrays
from penstock.model.stats import Counters
from penstock.pyx.norms import clip_rows

DIMS = {"word": 64, "user": 3}
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
TINY, LARGEST = np.float32(1e-45), np.finfo(np.float32).max


@given(st.integers(0, 20), st.integers(1, 35), st.integers(0, 99))
def test_a_row_has_the_sum_of_squares_of_the_twin(num_rows, dim, seed):
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=(num_rows, dim)) * 10.0 ** rng.integers(-20, 20, (num_rows, dim))).astype(np.float32)
    assert squares_of(rows).tobytes() == reference.row_squares(rows).tobytes()


@given(st.integers(0, 20), st.integers(1, 35), st.integers(0, 99), st.floats(1e-20, 1e20))
def test_rows_beyond_a_norm_are_those_of_the_twin(num_rows, dim, seed, most):
    rng = np.random.default_rng(seed)
    rows = (rng.normal(size=(num_rows, dim)) * 10.0 ** rng.integers(-20, 20, (num_rows, 1))).astype(np.float32)
    expected, squares = reference.clipped_rows(rows, most, EPSILON), squares_of(rows)
    num_large = (np.sqrt(squares) > most).sum()
    assert clip_rows(rows, squares, most, EPSILON) == num_large
    assert rows.tobytes() == expected.tobytes()
    assert squares.tobytes() == reference.row_squares(expected).tobytes()


@given(st.lists(st.lists(FLOATS, min_size=3, max_size=3), max_size=30), st.randoms())
def test_a_norm_is_the_root_of_the_exact_sum_rounded_once_in_any_order(rows, random):
    squares = squares_of(np.array(rows, np.float32).reshape(-1, 3))
    expected = math.sqrt(math.fsum(squares))
    order = list(range(len(rows)))
    random.shuffle(order)
    shuffled, cut = squares[order], random.randint(0, len(rows))
    assert norm_of([squares]) == norm_of([shuffled[:cut], shuffled[cut:]]) == norm_of(shuffled[:, None]) == expected


@pytest.mark.parametrize("values", [[], [0.0], [TINY], [LARGEST] * 5, [TINY, LARGEST], [1.0, 1e-30, -1.0]])
def test_extreme_values_have_a_norm(values):
    squares = squares_of(np.array(values, np.float32).reshape(-1, 1))
    assert norm_of([squares]) == math.sqrt(math.fsum(float(value) ** 2 for value in values))


def test_a_step_has_the_same_norms_and_bits_on_any_threads():
    rng = np.random.default_rng(0)
    rows = {
        name: rng.normal(size=(3 * FLOATS_PER_TASK // dim + 5, dim)).astype(np.float32) for name, dim in DIMS.items()
    }
    results = []
    for threads in (1, 4):
        step = {name: [Coalesced((SummedArrays(np.arange(len(each)), each.copy()),))] for name, each in rows.items()}
        norms, counters = StepNorms(Clip(2.0, 3.5), ThreadTeam(threads)), Counters()
        norms.clip(step, counters)
        bits = [each.summed[0].sums.tobytes() for several in step.values() for each in several]
        results.append((norms.of_tables, counters, bits))
    assert results[0] == results[1]
    of_tables, counters, _ = results[0]
    assert of_tables == pytest.approx({name: np.linalg.norm(each.astype(np.float64)) for name, each in rows.items()})
    assert counters.clipped_steps == 1
    assert counters.clipped_rows == sum((np.linalg.norm(each, axis=1) > 3.5).sum() for each in rows.values())
