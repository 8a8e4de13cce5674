"""A table on any backend: rows are dealt to the devices by lines, padded, and a compiled program updates them.

The way of accelerators, and the oracle of the other one (direct.py). What is dispatched when, and in which host
memory it waits, is the Dispatcher's (staging.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from penstock.bridge import programs
from penstock.bridge.ahead import Programs
from penstock.bridge.layout import MAX_BUCKET, Layout
from penstock.bridge.line import UNTOUCHED
from penstock.bridge.rounding import key_of, nearest
from penstock.bridge.staging import Dispatcher
from penstock.updates import UpdateRule

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

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
    """See ``tables.DeviceTable``, whose methods these are.

    dispatcher : in whose order this table's dispatches are
    """

    def __init__(
        self,
        mesh: Mesh,
        layout: Layout,
        rule: UpdateRule,
        starts: Sequence[float],
        variant: str,
        dispatcher: Dispatcher,
    ) -> None:
        programs.check_program(layout.name, rule, layout.dim)
        self._mesh, self.layout, self._rule, self._dispatcher = mesh, layout, rule, dispatcher
        self._programs = Programs(mesh, layout, rule, variant)
        self._make(starts)

    @_at_home
    def _make(self, starts: Sequence[float]) -> None:
        lines = self.layout.num_devices * self.layout.lines_per_device
        self.arrays: tuple[jax.Array, ...]
        self.arrays = programs.create(self._mesh, self.layout.line, lines, tuple(starts))()

    def apply(self, segments: Sequence[tuple[Int64, Float32]], learning_rate: float, step: int, turn: int) -> None:
        reader = f"table '{self.layout.name}', step {step}"
        lr, key = np.float32(learning_rate), key_of(self.layout.name, step, turn)
        self._dispatcher.submit(reader, partial(self._apply, reader, segments, lr, key))

    @_at_home
    def _apply(self, reader: str, segments: Sequence[tuple[Int64, Float32]], lr: np.float32, key: np.uint32) -> None:
        ids, grads = segments[0]
        if len(segments) > 1:
            ids, grads = (np.concatenate(arrays) for arrays in zip(*segments, strict=True))
        if self._rule.non_lazy:
            self._sweep_around(reader, ids, lr, key)
        for cut in self._cuts(ids):
            arena = self._dispatcher.arena()
            sent = self.layout.partition(ids[cut], grads[cut], arena.room)
            apply = self._programs.at("apply", sent.lines.shape[1])
            self.arrays, fence = apply(self.arrays, sent.lines, sent.words, sent.counts, lr, np.int32(0), key)
            arena.read_by(reader, fence)

    @_at_home
    def write(self, ids: Int64 | int, values: Float32, part: int) -> None:
        self._dispatcher.drain()
        ids = np.arange(ids, ids + len(values)) if isinstance(ids, int) else ids
        values = self._as_kept(values, part)
        for cut in self._cuts(ids):
            arena = self._dispatcher.arena()
            sent = self.layout.partition(ids[cut], values[cut], arena.room)
            write = self._programs.at("write", sent.lines.shape[1])
            self.arrays, fence = write(self.arrays, sent.lines, sent.words, np.int32(part))
            arena.read_by(f"table '{self.layout.name}', writing rows", fence)

    @_at_home
    def read(self, ids: Int64 | int, out: Float32, part: int) -> None:
        self._dispatcher.drain()
        ids = np.arange(ids, ids + len(out)) if isinstance(ids, int) else ids
        if not (ids[1:] > ids[:-1]).all():
            distinct, back = np.unique(ids, return_inverse=True)
            rows = np.empty((len(distinct), self.layout.dim), np.float32)
            self.read(distinct, rows, part)
            np.take(rows, back, axis=0, out=out)
            return
        for cut in self._cuts(ids):
            where = self.layout.locate(ids[cut])
            read = self._programs.at("read", where.rows.shape[1])
            out[cut] = where.collect(np.asarray(read(self.arrays, where.rows, np.int32(part))))

    @_at_home
    def copy_rows(self, ids: Int64, out: Float32) -> Callable[[], object]:
        """Nothing waits here for a device: the copy is behind the updates under way, and before those that come."""
        self._dispatcher.drain()
        where = self.layout.locate(ids)
        answers = self._programs.at("copy_rows", where.rows.shape[1])(self.arrays, where.rows)

        def wait() -> None:
            with jax.transfer_guard("allow"):
                out[...] = where.collect(np.asarray(answers))[: out.shape[1]].swapaxes(0, 1)

        return wait

    def drain(self) -> None:
        self._dispatcher.drain()

    def wait(self) -> None:
        self._dispatcher.wait()

    def warm(self) -> int:
        return self._programs.warm()

    def _sweep_around(self, reader: str, ids: Int64, lr: np.float32, key: np.uint32) -> None:
        """Update every row that is none of these."""
        touched = self._programs.at("no_rows")()
        for cut in self._cuts(ids):
            rows = self.layout.locate(ids[cut]).rows
            touched = self._programs.at("mark", rows.shape[1])(touched, rows)
        arena = self._dispatcher.arena()
        self.arrays, fence = self._programs.at("sweep")(self.arrays, touched, lr, np.int32(0), key)
        arena.read_by(reader, fence)

    def _as_kept(self, values: Float32, part: int) -> Float32:
        """Rounded where weights are kept in 16 bits; and no value may be taken for one that did not come."""
        if self.layout.bfloat16 and part == 0:
            values = nearest(values)
        foreign = values.view(np.int32) == UNTOUCHED
        return np.where(foreign, np.float32(np.nan), values) if foreign.any() else values

    def _cuts(self, ids: Int64) -> Iterator[slice]:
        """Runs of ids of which no device gets more than one dispatch may bring."""
        at_once = MAX_BUCKET * self.layout.num_devices
        waiting = [slice(start, min(start + at_once, len(ids))) for start in range(0, len(ids), at_once)][::-1]
        while waiting:
            cut = waiting.pop()
            if self.layout.num_devices > 1 and self.layout.place(ids[cut])[2].max() > MAX_BUCKET:
                middle = (cut.start + cut.stop) // 2
                waiting += [slice(middle, cut.stop), slice(cut.start, middle)]
            else:
                yield cut
