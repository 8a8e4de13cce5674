"""Stacked tables as TensorFlow's own stacker lays them out; the cases were run through it."""

from tensorflow_stacker import StackTable, stack_tables

TABLES = [
    StackTable("t0", 63, 9, "b", 1),
    StackTable("t1", 100, 8, "b", 4096),
    StackTable("t2", 8, 15, "b", 128),
    StackTable("t3", 64, 8, "b", 1),
    StackTable("t4", 1, 17, "a", 1),
]


def stacks(**limits):
    return [(of.table_name, of.stacked_table_name, of.rows_per_shard) for of in stack_tables(TABLES, 4, 1, **limits)]


def test_narrow_stacks_come_first_and_tables_of_one_width_and_group_share_one():
    together = [("t1", "t1_t3", 48), ("t3", "t1_t3", 48), ("t0", "t0_t2", 24), ("t2", "t0_t2", 24), ("t4", "t4", 8)]
    assert stacks() == together


def test_a_limit_of_zero_is_none():
    assert stacks(activation_limit=0) == stacks()
    assert stacks(shard_limit=0) == stacks()
    assert [name for _, name, _ in stacks(activation_limit=1000)] == ["t1", "t3", "t0", "t2", "t4"]
