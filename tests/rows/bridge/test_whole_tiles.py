"""Tables whose last lines do not fill a tile: the same rows and checkpoints as tables of whole tiles."""

import numpy as np
import pytest
from device_table import bytes_of, rule_of, some_rows, started, table_of
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.rows.bridge import sharding
from penstock.rows.bridge.sharding import Layout

# Lines per device before they are rounded up: of 1 and 3 devices, around multiples of 8.
AROUND_TILES = [(128, 1024, 1, 1024), (128, 1024, 3, 342), (64, 2048, 1, 1024), (24, 3000, 1, 615), (24, 1024, 1, 205)]
AROUND_TILES += [(12, 9216, 3, 308), (40, 1024, 3, 114), (20, 5000, 1, 854)]


@given(st.integers(1, 300), st.integers(1, 10**7), st.integers(1, 64), st.booleans(), st.booleans())
@settings(deadline=None)
def test_lines_of_any_table_fill_whole_tiles_and_no_more_than_they_must(dim, rows, devices, bfloat16, halved):
    layout = Layout("t", rows, dim, 1, devices, False, 128, bfloat16, halved)
    assert layout.lines_per_device % 8 == 0
    assert 0 <= layout.lines_per_device * layout.line.group - layout.rows_per_device < 8 * layout.line.group


@pytest.mark.evidence
@pytest.mark.parametrize(("dim", "rows", "devices", "lines"), AROUND_TILES)
@pytest.mark.parametrize("name", ["stochastic_gradient_descent", "adam"])
def test_lines_that_fill_the_last_tile_change_no_row(name, dim, rows, devices, lines, mesh_of, monkeypatch):
    rule, actual = rule_of(name, non_lazy=name == "adam"), []
    for tile_lines in (1, 8):
        monkeypatch.setattr(sharding, "TILE_LINES", tile_lines)
        table = started(table_of(mesh_of, rule, rows, dim, devices))
        assert table.layout.lines_per_device == (lines if tile_lines == 1 else -(-lines // 8) * 8)
        for step in range(2):
            ids, grads = some_rows(step, 150, rows, dim)
            ids[-2:] = 0, rows - 1  # the last row is in the last line, or next to it
            ids, first = np.unique(ids, return_index=True)
            table.apply(ids, grads[first], 0.1)
        copied = np.empty((rows, sum(table.part_dims)), np.float32)
        table.copy_rows(np.arange(rows), copied)()
        actual.append([*bytes_of(table), copied.tobytes()])
    assert actual[0] == actual[1]
