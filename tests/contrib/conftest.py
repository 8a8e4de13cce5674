"""What the tests of jobs share."""

import pytest
from checkpoints import batch
from ipc import write


@pytest.fixture
def logs(tmp_path):
    """Three logs of twelve frames."""
    return [str(write(tmp_path / f"{n}.arrows", [batch(step, n) for step in range(12)])) for n in range(3)]
