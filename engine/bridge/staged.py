"""A table on any backend: rows are dealt to the devices, padded, and XLA gathers, updates and scatters them.

The variant for accelerators, and the oracle of the other one (direct.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from penstock.bridge import programs
from penstock.bridge.layout import MAX_BUCKET, Layout, Partitioned
from penstock.updates import UpdateRule

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

# Dispatches that may be under way: their staging arrays are alive until they have run.
MAX_IN_FLIGHT = 4

P = ParamSpec("P")
R = TypeVar("R")


def _at_home(method: Callable[Concatenate[StagedTable, P], R]) -> Callable[Concatenate[StagedTable, P], R]:
    """Run on the table's own mesh, whatever mesh or transfer guard the caller has set for its own programs."""

    @wraps(method)
    def run(self: StagedTable, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with jax.set_mesh(self._mesh), jax.transfer_guard("allow"):
            return method(self, *args, **kwargs)

    return run


class StagedTable:
    """See ``tables.DeviceTable``, whose methods these are."""

    def __init__(self, mesh: Mesh, layout: Layout, rule: UpdateRule, starts: Sequence[float]) -> None:
        self._mesh = mesh
        self._make(layout, rule, starts)

    @_at_home
    def _make(self, layout: Layout, rule: UpdateRule, starts: Sequence[float]) -> None:
        programs.check_program(layout.name, rule, layout.dim)
        self.layout = layout
        mesh = self._mesh
        self._apply = programs.apply(mesh, rule)
        self._sweep = programs.sweep(mesh, rule) if rule.non_lazy else None
        self._write = programs.write(mesh)
        self._read = programs.read(mesh)
        self._copy_rows = programs.copy_rows(mesh)
        self.array: jax.Array = programs.create(mesh, layout.shape, (0.0, *starts))()
        self._fences: deque[jax.Array] = deque()

    @_at_home
    def apply(self, segments: Sequence[tuple[Int64, Float32]], learning_rate: float) -> None:
        ids, grads = segments[0]
        if len(segments) > 1:
            ids, grads = (np.concatenate(arrays) for arrays in zip(*segments, strict=True))
        lr = np.float32(learning_rate)
        blocks: Iterable[Partitioned] = (self.layout.partition(ids[p], grads[p]) for p in self._slices(len(ids)))
        if self._sweep is not None:
            blocks = list(blocks)
            self._sweep_around(blocks, lr)
        for block in blocks:
            self.array, fence = self._apply(self.array, block.rows, block.values, lr, np.int32(0))
            self._wait_behind(fence)

    @_at_home
    def write(self, ids: Int64 | int, values: Float32, part: int) -> None:
        ids = np.arange(ids, ids + len(values)) if isinstance(ids, int) else ids
        for cut in self._slices(len(ids)):
            block = self.layout.partition(ids[cut], values[cut])
            self.array, fence = self._write(self.array, block.rows, block.values, np.int32(part))
            self._wait_behind(fence)

    @_at_home
    def read(self, ids: Int64 | int, out: Float32, part: int) -> None:
        ids = np.arange(ids, ids + len(out)) if isinstance(ids, int) else ids
        if not (ids[1:] > ids[:-1]).all():
            distinct, back = np.unique(ids, return_inverse=True)
            rows = np.empty((len(distinct), self.layout.dim), np.float32)
            self.read(distinct, rows, part)
            np.take(rows, back, axis=0, out=out)
            return
        for cut in self._slices(len(ids)):
            block = self.layout.partition(ids[cut], np.empty((len(ids[cut]), 0), np.float32))
            out[cut] = block.collect(np.asarray(self._read(self.array, block.rows, np.int32(part))))

    @_at_home
    def copy_rows(self, ids: Int64, out: Float32) -> Callable[[], object]:
        """Nothing waits here: the copy is under way behind the updates that are, and before those that come."""
        block = self.layout.partition(ids, np.empty((len(ids), 0), np.float32))
        answers = self._copy_rows(self.array, block.rows)

        def wait() -> None:
            with jax.transfer_guard("allow"):
                out[...] = block.collect(np.asarray(answers))[: out.shape[1]].swapaxes(0, 1)

        return wait

    def wait(self) -> None:
        while self._fences:
            self._fences.popleft().block_until_ready()

    def _sweep_around(self, blocks: Iterable[Partitioned], lr: np.float32) -> None:
        """Update every row that is in none of the blocks."""
        assert self._sweep is not None
        touched = programs.no_rows(self._mesh, self.layout.shape[0])()
        mark = programs.mark(self._mesh)
        for block in blocks:
            touched = mark(touched, block.rows)
        self.array, fence = self._sweep(self.array, touched, lr, np.int32(0))
        self._wait_behind(fence)

    def _wait_behind(self, fence: jax.Array) -> None:
        self._fences.append(fence)
        while len(self._fences) > MAX_IN_FLIGHT:
            self._fences.popleft().block_until_ready()

    def _slices(self, num_rows: int) -> Iterator[slice]:
        at_once = MAX_BUCKET * self.layout.num_devices
        for start in range(0, num_rows, at_once):
            yield slice(start, min(start + at_once, num_rows))
