"""The rows that other libraries hold and write, and the state that they lead to."""

import pytest
from neighbours import log_of_two_tables, state_of


@pytest.fixture(scope="session")
def gradients():
    """Rows of two tables, as pyarrow has them."""
    return log_of_two_tables()


@pytest.fixture(scope="session")
def expected(gradients):
    """The state after them."""
    return state_of(gradients)
