"""What the tests of training steps share. torch is imported where it is used: these tests are skipped without it."""

import numpy as np
import pytest

import penstock as ps


@pytest.fixture
def engine():
    """An engine of one table, ``user``, whose rows move by half of their gradient."""
    from torch_models import engine_of

    return engine_of(optimizer=ps.SGD(0.5))


@pytest.fixture
def bag(engine):
    """A bag of the engine, whose rows are all ones."""
    import penstock.torch as pt

    engine.load_parameters("user", np.ones((50, 4), np.float32))
    return pt.EmbeddingBag(50, 4, mode="sum", store=pt.store(engine))


@pytest.fixture
def opt(bag):
    """The Step of the bag."""
    import penstock.torch as pt

    return pt.Step(bag)
