"""The model example: it learns, and its tables are those of a dense reference."""

import importlib.util
from pathlib import Path

import numpy as np

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "two_tower.py"


def test_the_two_tower_example_learns_and_equals_its_dense_reference():
    spec = importlib.util.spec_from_file_location("two_tower", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    losses, reference, apart = example.train()
    assert len(losses) == 300
    assert np.mean(losses[:20]) > 0.65  # guessing: 0.69
    assert np.mean(losses[-20:]) < 0.15
    np.testing.assert_allclose(losses, reference, atol=1e-4)
    assert apart < 1e-3
