"""Which tables share arrays, and where their rows lie."""

import numpy as np
import pytest
from device_table import shapes_of
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bench.tpu.moved_bytes import walk
from penstock.bridge import stacking
from penstock.bridge.mesh_selection import make_mesh
from penstock.bridge.program_cache import Programs, jitted, shapes
from penstock.bridge.sharding import Layout, TableDefinition
from penstock.bridge.stacking import Stack, stacked
from penstock.updates import UpdateRule

ADAGRAD = UpdateRule("adagrad", 1)


def groups(tables, lanes=1):
    """tables : (dim, rule, other)"""
    layouts = [
        Layout(f"t{n}", 100, dim, rule.num_slots, 2, False, lanes, row_slots=rule.row_slots)
        for n, (dim, rule, _) in enumerate(tables)
    ]
    return stacked(
        [TableDefinition(layout, rule, (), other) for layout, (_, rule, other) in zip(layouts, tables, strict=True)]
    )


def test_rows_that_lie_by_themselves_share_arrays_by_dim_and_lines_by_width():
    tables = [(dim, ADAGRAD, None) for dim in (4, 8, 4, 200, 8, 128, 129)]
    assert groups(tables) == [[0, 2], [1, 4], [3], [5], [6]]
    assert groups(tables, lanes=128) == [[0, 1, 2, 4, 5], [3, 6]]


def test_another_rule_rate_or_start_is_another_stack():
    adam = UpdateRule("adam", 2)
    tables = [
        (8, ADAGRAD, 1),
        (8, adam, 1),
        (8, ADAGRAD, 2),
        (8, ADAGRAD, 1),
        (8, UpdateRule("adam", 2, (("a", 1.0),)), 1),
    ]
    assert groups(tables) == [[0, 3], [1], [2], [4]]
    assert groups(tables, lanes=128) == [[0, 3], [1], [2], [4]]


def test_a_rule_that_looks_at_whole_rows_stacks_equal_dims_only():
    by_row = UpdateRule("row_wise_adagrad", 1)
    assert groups([(dim, by_row, None) for dim in (8, 16, 8)], lanes=128) == [[0, 2], [1]]


def test_a_table_of_16_bits_and_one_whose_every_row_moves_are_alone():
    sweeping = UpdateRule("adam", 2, non_lazy=True)
    assert groups([(8, sweeping, None)] * 2, lanes=128) == [[0], [1]]
    halves = Layout("t", 100, 8, 1, 2, False, 1, True)
    assert stacked([TableDefinition(halves, ADAGRAD, (0.5,))] * 2) == [[0], [1]]


def test_a_stack_is_no_larger_than_its_limit(monkeypatch):
    monkeypatch.setattr(stacking, "MAX_STACK_BYTES", 2 * 512 * 8 * 8)  # of each of two devices: two such tables
    assert groups([(8, ADAGRAD, None)] * 5) == [[0, 1], [2, 3], [4]]
    monkeypatch.setattr(stacking, "MAX_STACK_BYTES", 1)
    assert groups([(8, ADAGRAD, None)] * 2) == [[0], [1]]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 70), st.sampled_from("abc")), min_size=1, max_size=12))
@settings(deadline=None)
def test_without_limits_tables_of_one_group_and_of_one_width_in_eights_share_a_stack(tables):
    stacks = {}
    for number, (_, width, group) in enumerate(tables):
        stacks.setdefault((-(-width // 8), group), []).append(number)
    ours = stacked([TableDefinition(Layout("t", h, w, 1, 2, False, 8), ADAGRAD, (), g) for h, w, g in tables])
    assert sorted(ours) == sorted(stacks.values())


@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=3),
    devices=st.sampled_from([1, 2, 3, 8]),
    mod=st.booleans(),
    lanes=st.sampled_from([1, 128]),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None)
def test_rows_to_read_are_distributed_to_their_devices_and_padded_with_rows_of_no_table(
    sizes, devices, mod, lanes, seed
):
    layouts = [Layout(f"t{n}", rows, 8, 1, devices, mod, lanes) for n, rows in enumerate(sizes)]
    stack, rng = Stack.of(layouts, ADAGRAD), np.random.default_rng(seed)
    for member, (layout, first_line) in enumerate(zip(layouts, stack.first_lines, strict=False)):
        ids = rng.permutation(layout.vocabulary_size)[: rng.integers(1, layout.vocabulary_size + 1)]
        ((subset, padded, cells),) = stack.locate(member, ids)
        owners, rows = layout.place(ids)
        assert subset == slice(0, len(ids))
        assert (cells // padded.shape[1]).tolist() == owners.tolist()
        assert (padded.reshape(-1)[cells] - first_line * layout.line.group).tolist() == rows.tolist()
        beyond = np.delete(padded.reshape(-1), cells)
        assert (beyond >= stack.lines_per_device * layout.line.group).all()
        assert all(len(set(of_device)) == padded.shape[1] for of_device in padded.tolist())


@pytest.mark.parametrize("dim", [8, 24, 100])
def test_reads_are_one_program_in_three_sizes_that_gathers_whole_lines(dim, mesh_of):
    rule = UpdateRule("adam", 2)
    layout = Layout("t", 100_000, dim, 2, 1, False, 128)
    mesh, stack = make_mesh(mesh_of(1)), Stack.of([layout], rule)
    reads = [(size, line) for name, size, line in Programs(mesh, stack, rule, "xla").needed() if name == "read"]
    assert [size for size, _ in reads] == [512, 4096, 32768]
    num_lines = stack.lines_per_device
    for size, line in reads:
        traced = jitted("read", mesh, None, line, "xla", num_lines).trace(*shapes("read", mesh, line, num_lines, size))
        gathers = [eqn for eqn in walk(traced.jaxpr) if eqn.primitive.name == "gather"]
        assert [eqn.params["slice_sizes"] for eqn in gathers] == [(1, *shape[1:]) for shape in shapes_of(stack)]
