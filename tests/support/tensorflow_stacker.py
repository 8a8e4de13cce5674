"""TensorFlow's table stacking as a pure function: which tables SparseCore concatenates into one, and where each lies.

The oracle for the stacks of ``penstock.bridge.stacking``; test_activations_golden.py holds it against recordings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

ACTIVATION_LIMIT_BYTES = 2 << 20
SHARD_LIMIT_BYTES = 2 << 30


@dataclass(frozen=True)
class StackTable:
    """A table to stack: rows, floats per row; only tables of one ``group`` (optimizer and quantization) are stacked."""

    name: str
    height: int
    width: int
    group: str
    output_samples: int


@dataclass(frozen=True)
class TableLayout:
    """The place of a table in its stack.

    Row r is in shard ``(r % num_sparse_cores + rotation) % num_sparse_cores``, at its row
    ``row_offset + r // num_sparse_cores``.
    """

    table_name: str
    stacked_table_name: str
    num_sparse_cores: int
    num_partitions: int
    row_offset: int
    rotation: int
    unsharded_shape: tuple[int, int]
    unsharded_padded_shape: tuple[int, int]
    rows_per_shard: int


@dataclass
class _Stack:
    group: str
    width: int
    tables: list[StackTable] = field(default_factory=list)
    activation_bytes: int = 0
    shard_bytes: int = 0


def stack_tables(
    tables: Sequence[StackTable],
    num_partitions: int,
    sparse_cores_per_partition: int,
    *,
    stacking: bool = True,
    activation_limit: int | None = None,
    shard_limit: int | None = None,
) -> list[TableLayout]:
    """Return the layout of every table, by stack: narrow stacks first, then by group. First fit, in the given order.

    activation_limit, shard_limit : bytes of a stack; None: TensorFlow's, 2 MiB and 2 GiB; 0: none
    """
    limits = (
        ACTIVATION_LIMIT_BYTES if activation_limit is None else activation_limit,
        SHARD_LIMIT_BYTES if shard_limit is None else shard_limit,
    )
    cores = num_partitions * sparse_cores_per_partition
    stacks: list[_Stack] = []
    for table in tables:
        width, height = _up(table.width, 8), _up(table.height, 8 * cores)
        activation = 4 * width * table.output_samples // sparse_cores_per_partition
        shard = 4 * width * height // num_partitions
        fitting = (s for s in stacks if stacking and _fits(s, table.group, width, activation, shard, limits))
        stack = next(fitting, None)
        if stack is None:
            stack = _Stack(table.group, width)
            stacks.append(stack)
        stack.tables.append(table)
        stack.activation_bytes += activation
        stack.shard_bytes += shard
    stacks.sort(key=lambda stack: (stack.width, stack.group))
    return [layout for s in stacks for layout in _layouts(s, num_partitions, sparse_cores_per_partition)]


def _fits(stack: _Stack, group: str, width: int, activation: int, shard: int, limits: tuple[int, int]) -> bool:
    needed = (stack.activation_bytes + activation, stack.shard_bytes + shard)
    room = all(limit == 0 or need < limit for need, limit in zip(needed, limits, strict=True))
    return room and (stack.group, stack.width) == (group, width)


def _layouts(stack: _Stack, num_partitions: int, sparse_cores_per_partition: int) -> list[TableLayout]:
    cores = num_partitions * sparse_cores_per_partition
    name = "_".join(table.name for table in stack.tables)
    heights = [_up(table.height, 8 * cores) for table in stack.tables]
    return [
        TableLayout(
            table_name=table.name,
            stacked_table_name=name,
            num_sparse_cores=cores,
            num_partitions=num_partitions,
            row_offset=sum(heights[:index]) // cores,
            rotation=index * sparse_cores_per_partition % cores,
            unsharded_shape=(table.height, table.width),
            unsharded_padded_shape=(heights[index], stack.width),
            rows_per_shard=sum(heights) // cores,
        )
        for index, table in enumerate(stack.tables)
    ]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
