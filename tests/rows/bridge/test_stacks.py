"""Which tables share arrays, and where their rows lie."""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.updates import UpdateRule
from penstock.rows.bridge import stacking
from penstock.rows.bridge.sharding import Layout, TableDefinition
from penstock.rows.bridge.stacking import stacked

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
