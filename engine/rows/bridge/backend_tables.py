"""What the tables of every backend can do: those of a CPU, of XLA's programs, of several processes, and cached ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from penstock.model.frames import Float32, Int64
from penstock.model.updates.rule import Rate
from penstock.rows.bridge.devices import AnyMesh
from penstock.rows.bridge.sharding import Layout


class BackendTables(Protocol):
    """Tables that share arrays and are updated by one call. ``member`` is the index of one of them.

    Ids are valid, and distinct except for ``read``. Part 0 of a row is the weights, part 1 + s is slot s. Calls that
    queue work may read their arguments until ``wait`` has returned.
    """

    @property
    def mesh(self) -> AnyMesh:
        """The devices that update the tables, on one axis."""

    @property
    def layouts(self) -> Sequence[Layout]:
        """The layout of each table."""

    @property
    def variant(self) -> str:
        """The variant that updates the tables; it changes only if its programs fail (xla_tables.py)."""

    @property
    def compiler(self) -> str:
        """The versions of what compiled the programs that update the tables."""

    @property
    def problems(self) -> Sequence[str]:
        """Problems of the programs on these devices, a sentence each."""

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The physical arrays, which the tables share: of jax, or of NumPy on the host."""

    @property
    def copies_any_number(self) -> bool:
        """Whether ``copy_rows`` takes any number of rows; else each padded number is a separate program."""

    def apply(self, updates: Sequence[tuple[int, Sequence[Any], Rate]], step: int = 0, application: int = 0) -> None:
        """Apply the optimizer once to rows of several tables, in place; queues the update.

        updates : (member, segments, rate) each, with segments (ids, sums) as ``update.Step.update`` takes them
        step, application : the number of the step and of the application in it, which key the rounding to bfloat16
        """

    def write(self, member: int, ids: Int64 | int, values: Float32, part: int) -> None:
        """Set one part of rows. ids : int: of the first of consecutive rows"""

    def put(self, member: int, ids: Int64, rows: Float32) -> None:
        """Queue a write of all parts of rows, side by side: float32 (n, floats of all parts)."""

    def create_rows(self, member: int, ids: Int64, weights: Iterable[Float32]) -> None:
        """Queue writes of weights, and of the starts to the slots.

        weights : float32 (n, dim) in blocks, of which none is larger than the first
        """

    def key_by(self, member: int, keys: Callable[[Int64], Int64]) -> None:
        """Round rows of 16-bit weights by keys instead of ids. keys : ids → keys, int64 (n,), at every ``apply``"""

    def read(self, member: int, ids: Int64 | int, out: Float32, part: int) -> None:
        """Copy one part of rows to ``out``. ids : as for ``write``, and may repeat"""

    def copy_rows(self, member: int, ids: Int64, out: Float32) -> Callable[[], object]:
        """Start to copy rows, as they are now, to ``out``: float32 (n, floats of all parts).

        Return a callable that waits for the copy, on any thread. ``out`` may have room for the first ids only. Unless
        ``copies_any_number``, at most MAX_BUCKET ids per device.
        """

    def wait(self) -> None:
        """Block until every dispatch is done. Raises the device's errors."""

    def warm(self) -> int:
        """Compile the programs of steps, lookups and checkpoints ahead of time; return their number."""


def row_ids(ids: Int64 | int, count: int) -> Int64:
    """Return ids; the first of consecutive rows stands for all of them."""
    return np.arange(ids, ids + count) if isinstance(ids, int) else ids


def parts_of(rows: Float32, layout: Layout) -> list[Float32]:
    """Return the parts of rows, each contiguous. rows : float32 (n, floats of all parts)"""
    return [np.ascontiguousarray(part) for part in np.split(rows, np.cumsum(layout.part_dims)[:-1], axis=1)]


def quoted(names: Sequence[str]) -> str:
    """Return the names of tables as errors print them."""
    if len(names) == 1:
        return f"table '{names[0]}'"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "tables " + ", ".join(f"'{name}'" for name in names[:3]) + more
