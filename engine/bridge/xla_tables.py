"""Tables on any backend: rows are routed to the devices by lines and padded, and a compiled program updates them.

Accelerators use this path, and it is the oracle of the other one (cpu_ffi.py). The Dispatcher (dispatcher.py) decides
what to dispatch when, and from which host memory; the Stack (stacking.py), which tables share a dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from penstock.bridge import programs
from penstock.bridge.dispatcher import Dispatcher
from penstock.bridge.program_cache import Programs
from penstock.bridge.row_format import UNTOUCHED
from penstock.bridge.sharding import Layout
from penstock.bridge.stacking import Sent, Stack
from penstock.bridge.stochastic_rounding import key_of, nearest
from penstock.updates import UpdateRule

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

Segments = Sequence[tuple[Int64, Float32]]

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", "StagedStack", "StagedTable")


def _at_home(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Run a method on the tables' mesh, regardless of the mesh and transfer guard that the caller has set."""

    @wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with jax.set_mesh(self.mesh), jax.transfer_guard("allow"):
            return method(self, *args, **kwargs)

    return run


class StagedStack:
    """Tables that share arrays and are updated by one dispatch.

    starts : the initial value of each slot; variant : of ``backends.VARIANTS``; dispatcher : runs the dispatches
    """

    def __init__(
        self,
        mesh: Mesh,
        stack: Stack,
        rule: UpdateRule,
        starts: Sequence[float],
        variant: str,
        dispatcher: Dispatcher,
    ) -> None:
        for layout in stack.tables:
            programs.check_program(layout.name, rule, layout.dim)
        self.mesh, self.stack, self.dispatcher = mesh, stack, dispatcher
        self._rule = rule
        self.programs = Programs(mesh, stack, rule, variant)
        lines = stack.num_devices * stack.lines_per_device
        self.arrays: tuple[jax.Array, ...]
        self.arrays = programs.create(mesh, stack.line, lines, tuple(starts))()

    def apply(self, brought: Sequence[tuple[int, Segments]], learning_rate: float, step: int, turn: int) -> None:
        """Queue one optimizer application to rows of several tables. brought : (index of the table, segments) each"""
        names = [self.stack.tables[member].name for member, _ in brought]
        reader = f"{told(names)}, step {step}"
        # Only tables that are not stacked are rounded by the key (stacking.py).
        lr, key = np.float32(learning_rate), key_of(names[0], step, turn)
        sent = [Sent(member, ids, grads) for member, segments in brought for ids, grads in segments]
        self.dispatcher.submit(reader, partial(self._apply, reader, sent, lr, key))

    @_at_home
    def _apply(self, reader: str, sent: Sequence[Sent], lr: np.float32, key: np.uint32) -> None:
        if self._rule.non_lazy:
            self._sweep_around(reader, sent, lr, key)
        dealt = self.stack.deal(sent)
        for cut in self.stack.cuts(dealt.devices):
            arena = self.dispatcher.arena()
            packed = self.stack.pack(dealt, cut, arena.room)
            apply = self.programs.at("apply", packed.lines.shape[1])
            self.arrays, fence = apply(self.arrays, packed.lines, packed.words, packed.counts, lr, np.int32(0), key)
            arena.read_by(reader, fence)

    def _sweep_around(self, reader: str, sent: Sequence[Sent], lr: np.float32, key: np.uint32) -> None:
        """Update every row but these. The stack has a single table."""
        touched = self.programs.at("no_rows")()
        for member, ids, _ in sent:
            for _, where in self.stack.locate(member, ids):
                touched = self.programs.at("mark", where.rows.shape[1])(touched, where.rows)
        arena = self.dispatcher.arena()
        self.arrays, fence = self.programs.at("sweep")(self.arrays, touched, lr, np.int32(0), key)
        arena.read_by(reader, fence)


class StagedTable:
    """One table of a stack. ``device_tables.DeviceTable`` documents the methods."""

    def __init__(self, among: StagedStack, layout: Layout) -> None:
        self.among, self.layout = among, layout
        self.mesh, self._dispatcher = among.mesh, among.dispatcher
        self._member = among.stack.tables.index(layout)

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """The arrays of the whole stack."""
        return self.among.arrays

    def apply(self, segments: Segments, learning_rate: float, step: int, turn: int) -> None:
        self.among.apply([(self._member, segments)], learning_rate, step, turn)

    @_at_home
    def write(self, ids: Int64 | int, values: Float32, part: int) -> None:
        self._dispatcher.drain()
        ids = np.arange(ids, ids + len(values)) if isinstance(ids, int) else ids
        among = self.among
        dealt = among.stack.deal([Sent(self._member, ids, self._as_kept(values, part))])
        for cut in among.stack.cuts(dealt.devices):
            arena = self._dispatcher.arena()
            packed = among.stack.pack(dealt, cut, arena.room)
            write = among.programs.at("write", packed.lines.shape[1])
            among.arrays, fence = write(among.arrays, packed.lines, packed.words, np.int32(part))
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
        among = self.among
        for cut, where in among.stack.locate(self._member, ids):
            read = among.programs.at("read", where.rows.shape[1], self.layout.line)
            out[cut] = where.collect(np.asarray(read(among.arrays, where.rows, np.int32(part))))

    @_at_home
    def copy_rows(self, ids: Int64, out: Float32) -> Callable[[], object]:
        """Copy rows without waiting for a device: the copy runs after updates in flight and before later ones."""
        self._dispatcher.drain()
        programs, copies = self.among.programs, []
        for cut, where in self.among.stack.locate(self._member, ids):
            copy = programs.at("copy_rows", where.rows.shape[1], self.layout.line)
            copies.append((out[:, cut], where, copy(self.among.arrays, where.rows)))

        def wait() -> None:
            with jax.transfer_guard("allow"):
                for room, where, answers in copies:
                    room[...] = where.collect(np.asarray(answers))[: room.shape[1]].swapaxes(0, 1)

        return wait

    def drain(self) -> None:
        self._dispatcher.drain()

    def wait(self) -> None:
        self._dispatcher.wait()

    def warm(self) -> int:
        return self.among.programs.warm()

    def _as_kept(self, values: Float32, part: int) -> Float32:
        """Return values as stored: bfloat16 weights are rounded, and no value may equal UNTOUCHED, a NaN."""
        if self.layout.bfloat16 and part == 0:
            values = nearest(values)
        foreign = values.view(np.int32) == UNTOUCHED
        return np.where(foreign, np.float32(np.nan), values) if foreign.any() else values


def told(names: Sequence[str]) -> str:
    """Return the names of tables as errors print them."""
    if len(names) == 1:
        return f"table '{names[0]}'"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return "tables " + ", ".join(f"'{name}'" for name in names[:3]) + more
