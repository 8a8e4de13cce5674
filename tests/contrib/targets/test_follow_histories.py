"""A sample of ``make follow-histories``: stores have the rows of the positions that they name."""

import pytest
from histories import history
from histories.pools import KINDS, store_of

# Together at least 50.
EACH = 8


@pytest.mark.sampled("redis", "delta")
@pytest.mark.parametrize("kind", KINDS)
def test_a_store_that_names_a_position_has_its_rows_in_random_histories(kind, tmp_path):
    (tmp_path / "server").mkdir()
    with store_of(kind, tmp_path / "server") as next_store:
        for number in range(EACH):
            folder = tmp_path / str(number)
            folder.mkdir()
            counts = history.run(next_store(folder), folder, 0, number)
            assert counts["named"] > counts["checks"] / 2
