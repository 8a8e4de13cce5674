"""What the tests of versions share."""

import pytest
from versions import saved


@pytest.fixture
def folder(tmp_path):
    """Commits of steps 1 to 3, which are all that it keeps."""
    saved(tmp_path / "run", range(3))
    return tmp_path / "run"
