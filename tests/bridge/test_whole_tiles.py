"""Tables whose last lines do not fill a tile: the same rows and checkpoints as tables of whole tiles."""

import numpy as np
import pytest
from device_table import bytes_of, rule_of, shapes_of, some_rows, started, table_of
from engines import engine_of
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.bridge import sharding
from penstock.bridge.sharding import Layout
from penstock.updates import Adam

# Lines per device before they are rounded up: of 1 and 3 devices, around multiples of 8.
AROUND_TILES = [(128, 1024, 1, 1024), (128, 1024, 3, 342), (64, 2048, 1, 1024), (24, 3000, 1, 615), (24, 1024, 1, 205)]
AROUND_TILES += [(12, 9216, 3, 308), (40, 1024, 3, 114), (20, 5000, 1, 854)]


@pytest.mark.parametrize(("dim", "rows", "devices", "lines"), AROUND_TILES)
def test_a_devices_lines_fill_tiles_of_8_where_lines_are_of_128_lanes(dim, rows, devices, lines):
    layout = Layout("t", rows, dim, 2, devices, True, 128)
    assert -(-layout.rows_per_device // layout.line.group) == lines
    assert layout.lines_per_device == -(-lines // 8) * 8
    assert [shape[0] for shape in shapes_of(layout)] == [devices * layout.lines_per_device] * 2
    plain = Layout("t", rows, dim, 2, devices, True)
    assert plain.lines_per_device == plain.rows_per_device


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


@pytest.mark.evidence
@pytest.mark.parametrize("devices", [1, 3])
def test_a_checkpoint_of_lines_without_whole_tiles_restores_to_tables_with_them(
    devices, mesh_of, tmp_path, monkeypatch
):
    monkeypatch.setenv("PENSTOCK_LAYOUT", "tiled")
    monkeypatch.setenv("PENSTOCK_VARIANT", "xla")
    hashes = []
    for name, tile_lines in (("before", 1), ("after", 8)):
        monkeypatch.setattr(sharding, "TILE_LINES", tile_lines)
        engine = engine_of(Adam(0.1), rows=1500, dim=24, mesh=mesh_of(devices), seed=5)
        engine.apply({"t": some_rows(1, 300, 1500, 24)})
        engine.save(tmp_path / name)
        hashes.append(engine.state_hash())
    resumed = ps.Engine.restore(tmp_path / "before", mesh=mesh_of(devices))
    assert resumed.core.tables.table("t").layout.lines_per_device % 8 == 0
    for again in (resumed, engine):
        again.apply({"t": some_rows(2, 300, 1500, 24)})
        hashes.append(again.state_hash())
    assert hashes[0] == hashes[1]
    assert hashes[2] == hashes[3]
