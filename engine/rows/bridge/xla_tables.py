"""Tables that XLA's programs or the TPU's kernel update: rows are routed to devices by lines, and padded.

Accelerators use this path, and it is the oracle of the other one (host_tables.py). The Dispatcher (dispatcher.py)
decides what to dispatch when, and from which host memory; the Stack (stacking.py), where rows go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from penstock.base.integrations import KERNELS
from penstock.model.frames import Float32, Int64, UInt32
from penstock.model.row_encodings import nearest
from penstock.model.updates.rule import Rate
from penstock.rows.bridge import programs
from penstock.rows.bridge.backend_tables import parts_of, quoted, row_ids
from penstock.rows.bridge.dispatcher import Dispatcher
from penstock.rows.bridge.packing import Packer, Routing
from penstock.rows.bridge.program_cache import Programs, compiler_of
from penstock.rows.bridge.row_format import Line, without_marks
from penstock.rows.bridge.sharding import TableDefinition
from penstock.rows.bridge.stacking import MemberRows, Stack
from penstock.rows.bridge.stochastic_rounding import key_of, words_of

log = logging.getLogger("penstock")

# Steps after which the addresses of the arrays are compared: the compiler may guard a full copy at run time.
WATCHED_STEPS = 3


class XlaTables:
    """BackendTables that are updated by one dispatch.

    definitions : of one group of ``stacking.stacked``
    variant : "xla" or one of KERNELS; dispatcher : runs the dispatches
    problem : why the variant is not the kernel, if that failed its canary
    arrays : existing arrays of these tables; None: new ones, with weights of 0
    moving : whether steps also write and read rows

    problems : of the programs on these devices, a sentence each
    """

    copies_any_number = False
    sends_compact = True  # where a stack allows it

    def __init__(
        self,
        mesh: Mesh,
        definitions: Sequence[TableDefinition],
        variant: str,
        dispatcher: Dispatcher,
        problem: str = "",
        arrays: tuple[jax.Array, ...] | None = None,
        moving: bool = False,
    ) -> None:
        self.mesh, self.layouts = mesh, [definition.layout for definition in definitions]
        _, self._rule, starts, _ = definitions[0]
        self._starts = np.array([0.0, *starts], np.float32)
        self._keys: list[Callable[[Int64], Int64]] = [layout.ids for layout in self.layouts]
        for layout in self.layouts:
            programs.check_program(layout.name, self._rule, layout.dim)
        platform = mesh.devices.flat[0].platform
        self._stack = Stack.of(self.layouts, self._rule, self.sends_compact, platform, moving)
        self._dispatcher = dispatcher
        self._packer = Packer(self._stack, self._dispatcher.team)
        self._row_packer = Packer(self._stack, self._dispatcher.team, by_row=True)
        self.programs = Programs(mesh, self._stack, self._rule, variant)
        lines = self._stack.num_devices * self._stack.lines_per_device
        self.arrays: tuple[jax.Array, ...] = arrays or programs.create(mesh, self._stack.line, lines, tuple(starts))()
        self._num_watched, self._tried = 0, set[int]()  # the sizes for which the kernel was compiled
        names = quoted([layout.name for layout in self.layouts])
        self.problems = [f"{names}: the kernel failed its canary, XLA's program updates: {problem}"] if problem else []

    @property
    def variant(self) -> str:
        return self.programs.variant

    @property
    def compiler(self) -> str:
        return compiler_of(self.mesh.local_devices[0])

    def apply(self, updates: Sequence[tuple[int, Sequence[Any], Rate]], step: int = 0, application: int = 0) -> None:
        names = [self.layouts[member].name for member, _, _ in updates]
        reader = f"{quoted(names)}, step {step}"
        numbers = self._scalars(updates[0], step, application)
        rows = [
            MemberRows(member, ids, grads, self._rounded_by(member, ids))
            for member, segments, _ in updates
            for ids, grads in segments
        ]
        self._dispatcher.submit(reader, partial(self._apply, reader, rows, numbers))

    def _scalars(self, update: tuple[int, Sequence[Any], Rate], step: int, application: int) -> Sequence[Any]:
        """Return the rate, the zero and the key of ``programs.apply``.

        update : of any of the tables. Stacked ones share one learning rate, and none of them is rounded by the key.
        """
        layout = self.layouts[update[0]]
        return np.asarray(update[2], np.float32), np.int32(0), key_of(layout.drawn_as or layout.name, step, application)

    def _apply(self, reader: str, rows: Sequence[MemberRows], numbers: Sequence[Any]) -> None:
        with programs.own_settings(self.mesh), self._watching(reader):
            if self._rule.non_lazy:
                self._sweep_around(reader, rows, numbers)
            self._dispatch("apply", reader, rows, numbers)

    @contextmanager
    def _watching(self, reader: str) -> Iterator[None]:
        """Report if one of the first steps moves a shard of the arrays."""
        watched = self._num_watched < WATCHED_STEPS
        before = self._addresses() if watched else []
        yield
        self._num_watched += watched
        if watched and self._in_any(reader, self._addresses() != before):
            self._report(f"{reader}: the step moved the table instead of updating it in place")

    def _in_any(self, call: str, problem: bool) -> bool:
        """Return whether any process that updates the table has a problem. call : what it does, for messages"""
        return problem

    def _addresses(self) -> list[int]:
        """Return the addresses of the arrays' shards: an in-place update keeps them, a hidden copy does not."""
        return [shard.data.unsafe_buffer_pointer() for array in self.arrays for shard in array.addressable_shards]

    def _report(self, problem: str) -> None:
        """Log a problem of a program, and stop using the kernel."""
        if self.programs.variant in KERNELS:
            self.programs.variant, problem = "xla", f"{problem}; XLA's program updates from here on"
        self.problems.append(problem)
        log.warning(problem)

    def _program(self, name: str, reader: str, size: int, line: Line | None = None) -> programs.Program:
        """Return a program. If the kernel does not compile for a size, continue with XLA's program: nothing is lost."""
        if name == "apply" and self.variant in KERNELS and size not in self._tried:
            self._tried.add(size)
            problem = ""
            try:
                self.programs.at(name, size, line)
            except Exception as error:  # a compiler may raise any type
                problem = str(error).partition("\n")[0] or type(error).__name__
            if self._in_any(f"{reader}, compiling", bool(problem)):
                problem = problem or "it fails in another process"
                self._report(f"{reader}: the kernel does not compile for {size} lines: {problem}")
        return self.programs.at(name, size, line)

    def key_by(self, member: int, keys: Callable[[Int64], Int64]) -> None:
        self._keys[member] = keys

    def _rounded_by(self, member: int, ids: Int64) -> UInt32 | None:
        return words_of(self._keys[member](ids)) if self.layouts[member].bfloat16 else None

    def _sweep_around(self, reader: str, rows: Sequence[MemberRows], numbers: Sequence[Any]) -> None:
        """Update every row but these. The stack has a single table."""
        touched = self.programs.at("no_rows")()
        for member, ids, *_ in rows:
            for _, padded, _ in self._stack.locate(member, ids):
                touched = self.programs.at("mark", padded.shape[1])(touched, padded)
        arena = self._dispatcher.arena()
        self.arrays, fence = self.programs.at("sweep")(self.arrays, touched, *numbers)
        arena.read_by(reader, fence)

    def _dispatch(self, program: str, reader: str, rows: Sequence[MemberRows], numbers: Sequence[Any]) -> None:
        """Run a program on the arrays with rows, as many times as these require. numbers : its scalars"""
        packer, routed = self._routed(program, reader, rows)
        growth, largest = self._stack.growth(program), self.programs.largest(program)
        for span in packer.slices(routed, largest):
            arena = self._dispatcher.arena()
            packed = packer.pack(routed, span, arena.room, growth, largest=largest)
            run = self._program(program, reader, packed.lines.shape[1])
            self.arrays, fence = run(self.arrays, *map(self._put, packed.arguments), *numbers)
            arena.read_by(reader, fence)

    def _routed(self, program: str, reader: str, rows: Sequence[MemberRows]) -> tuple[Packer, Routing]:
        """Return the packer for a program, and the destinations of rows.

        The kernel for SparseCores takes rows in another form than XLA's program. So it is compiled for all sizes of a
        step before the first dispatch: if that fails, XLA's program gets the rows of the whole step.
        """
        if program == "apply" and self.variant == "sparsecore":
            routed = self._row_packer.route(rows)
            growth, largest, most = (
                self._stack.growth(program),
                self.programs.largest(program),
                int(routed.counts.max()),
            )
            for span in self._row_packer.slices(routed, largest):
                size = self._row_packer.capacity(min(most - span.start, largest), largest, growth)
                self._program(program, reader, size)
                if self.variant != "sparsecore":
                    break
            else:
                return self._row_packer, routed
        return self._packer, self._packer.route(rows)

    def _put(self, rows: Any) -> Any:
        """Return rows, (devices, …), as a program takes them."""
        return rows

    def write(self, member: int, ids: Int64 | int, values: Float32, part: int) -> None:
        self._dispatcher.drain()
        self._write(self._writing(member), member, row_ids(ids, len(values)), values, part)

    def create_rows(self, member: int, ids: Int64, weights: Iterable[Float32]) -> None:
        reader, first = self._writing(member), 0
        for block in weights:
            block_ids = ids[first : first + len(block)]
            self._dispatcher.submit(reader, partial(self._write, reader, member, block_ids, block, programs.NEW_ROWS))
            first += len(block)

    def put(self, member: int, ids: Int64, rows: Float32) -> None:
        reader, parts = self._writing(member), parts_of(rows, self.layouts[member])

        def write() -> None:
            for part, values in enumerate(parts):
                self._write(reader, member, ids, values, part)

        self._dispatcher.submit(reader, write)

    def _writing(self, member: int) -> str:
        return f"table '{self.layouts[member].name}', writing rows"

    def _write(self, reader: str, member: int, ids: Int64, values: Float32, part: int) -> None:
        if self.layouts[member].bfloat16 and part <= 0:
            values = nearest(values)
        values = without_marks(values)
        if self._stack.compact and values.shape[1] < self.layouts[member].dim:
            values = np.repeat(values, self.layouts[member].dim, axis=1)  # compact rows all have the dim of the weights
        with programs.own_settings(self.mesh):
            numbers = [*programs.written(part, len(self._starts)), self._starts]
            self._dispatch("write", reader, [MemberRows(member, ids, values)], numbers)

    def read(self, member: int, ids: Int64 | int, out: Float32, part: int) -> None:
        self._dispatcher.drain()
        ids = row_ids(ids, len(out))
        if not (ids[1:] > ids[:-1]).all():
            distinct, inverse = np.unique(ids, return_inverse=True)
            rows = np.empty((len(distinct), out.shape[1]), np.float32)
            self.read(member, distinct, rows, part)
            np.take(rows, inverse, axis=0, out=out)
            return
        with programs.own_settings(self.mesh):
            for span, padded, cells in self._stack.locate(member, ids):
                read = self.programs.at("read", padded.shape[1], self.layouts[member].line)
                out[span] = _flat(read(self.arrays, padded)[part])[cells]

    def copy_rows(self, member: int, ids: Int64, out: Float32) -> Callable[[], object]:
        """Queue a copy of rows: it runs after updates in flight and before later ones."""
        located, copies = list(self._stack.locate(member, ids)), []

        def copy() -> None:
            with programs.own_settings(self.mesh):
                for span, padded, cells in located:
                    read = self.programs.at("read", padded.shape[1], self.layouts[member].line)
                    parts = read(self.arrays, padded)
                    for part in parts:
                        part.copy_to_host_async()
                    copies.append((out[span], cells, parts))

        copied = self._dispatcher.submit(f"table '{self.layouts[member].name}', copying rows", copy)

        def wait() -> None:
            copied.result()
            with jax.transfer_guard("allow"):
                for room, cells, parts in copies:
                    ends = np.cumsum([part.shape[2] for part in parts])[:-1]
                    for columns, part in zip(np.split(room, ends, axis=1), parts, strict=True):
                        columns[...] = _flat(part)[cells[: len(room)]]

        return wait

    def wait(self) -> None:
        self._dispatcher.wait()

    def warm(self) -> int:
        needed = self.programs.needed()
        log.info("warm-up: compiling %d programs of %s", len(needed), quoted([layout.name for layout in self.layouts]))
        for name, size, line in needed:
            self._program(name, "warm-up", size, line)
        return len(needed)


def _flat(answers: jax.Array) -> Float32:
    """Return the answers of all devices, (devices, bucket, …), as one axis."""
    host = np.asarray(answers)
    return host.reshape(-1, *host.shape[2:])
