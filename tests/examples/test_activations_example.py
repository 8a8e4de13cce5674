"""The model example: it learns, and its tables are those of a dense reference."""

import numpy as np
import pytest
from scripts import loaded


@pytest.fixture
def example():
    return loaded("examples/two_tower.py")


@pytest.mark.sampled("plain")
@pytest.mark.parametrize("dense_part", ["plain", "optax"])
def test_the_two_tower_example_learns_and_equals_its_dense_reference(example, dense_part):
    if dense_part == "plain":
        example.optax, example.STEPS = None, 100
    else:
        pytest.importorskip("optax", reason="the extra 'examples' is not installed")
    losses, reference, apart = example.train()
    assert len(losses) == example.STEPS
    assert np.mean(losses[:20]) > 0.65  # guessing: 0.69
    assert np.mean(losses[-20:]) < (0.3 if example.STEPS == 100 else 0.15)
    np.testing.assert_allclose(losses, reference, atol=1e-4)
    assert apart < 1e-3


@pytest.mark.evidence
def test_the_example_with_tables_inside_its_jitted_step_has_the_same_losses(example):
    example.optax, example.STEPS = None, 50
    losses, _, _ = example.train()
    np.testing.assert_allclose(example.train_in_one_step(), losses, atol=1e-4)
