"""Tables over the devices of several processes, updated by the rows of all of them.

Every process packs its own rows by their owners. A program exchanges them and adds those of the same row in the order
of ranks (row_exchange.py); the step that follows is the one of tables of one process (programs.py), on the same arrays.
All programs run in the order of the calls, which every process makes alike: nothing here is left to a thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from penstock.base.errors import UsageError
from penstock.contrib.meshes.agreement import Processes, placed
from penstock.contrib.meshes.row_exchange import exchange, fetch, mark_lines
from penstock.model.frames import Float32, Int32, Int64
from penstock.model.updates.rule import Rate
from penstock.rows.bridge.backend_tables import quoted, row_ids
from penstock.rows.bridge.dispatcher import Dispatcher
from penstock.rows.bridge.packing import Packed
from penstock.rows.bridge.programs import own_settings
from penstock.rows.bridge.sharding import GROWTH, MAX_BUCKET, TableDefinition, bucket, buckets
from penstock.rows.bridge.stacking import MemberRows, multiple_of
from penstock.rows.bridge.xla_tables import XlaTables


class ProcessTables(XlaTables):
    """BackendTables of several processes.

    ``write`` takes the same rows in every process; ``apply`` and ``read`` take those of each.
    """

    sends_compact = False  # an exchange adds lines

    def __init__(
        self,
        mesh: Mesh,
        definitions: Sequence[TableDefinition],
        variant: str,
        dispatcher: Dispatcher,
        processes: Processes,
        problem: str = "",
    ) -> None:
        self._processes = processes
        self._senders = len(processes.by_rank[processes.rank])
        super().__init__(mesh, definitions, variant, dispatcher, problem)
        # As many neighbouring elements of a line certainly belong to one row.
        self._grain = math.gcd(*[layout.dim for layout in self.layouts], self._stack.line.width)
        # The most lines of one device that a process may send to another one in a dispatch.
        self._most = max(size for size in buckets(MAX_BUCKET) if size <= max(8, MAX_BUCKET // mesh.size))

    def apply(self, updates: Sequence[tuple[int, Sequence[Any], Rate]], step: int = 0, application: int = 0) -> None:
        """Apply the optimizer once to the rows of all processes. Every process names the same tables.

        updates : as for ``BackendTables.apply``; a segment with ``frames`` is divided by the
            sum of those of all processes
        """
        names = [self.layouts[member].name for member, _, _ in updates]
        numbers = self._scalars(updates[0], step, application)
        parts = [(member, segment) for member, segments, _ in updates for segment in segments]
        rows = [
            MemberRows(member, segment.ids, segment.sums, self._rounded_by(member, segment.ids))
            for member, segment in parts
        ]
        frames = [segment.frames for _, segment in parts]
        reader = f"step {step}, {quoted(names)}"
        with own_settings(self.mesh), self._watching(reader):
            arrived = list(self._exchanged(reader, rows, frames))
            if self._rule.non_lazy:
                touched = self.programs.at("no_rows")()
                for lines, words, *_ in arrived:
                    mark = mark_lines(self.mesh, self._stack.line, len(touched), lines.shape[1])
                    touched = mark(touched, lines, words)
                self.arrays, _ = self.programs.at("sweep")(self.arrays, touched, *numbers)
            for lines, *others in arrived:
                run = self._program("apply", reader, lines.shape[1])
                self.arrays, _ = run(self.arrays, lines, *others, *numbers)

    def _in_any(self, call: str, problem: bool) -> bool:
        return bool(self._processes.agree(call, [problem]).any())

    def _exchanged(
        self, call: str, rows: Sequence[MemberRows], frames: Sequence[Int64 | None]
    ) -> Iterator[Sequence[jax.Array]]:
        """Yield the arguments of ``programs.apply``, once per dispatch, which contain all rows of its lines."""
        stack, by_frames = self._stack, all(counts is not None for counts in frames)
        routed = self._packer.route(rows)
        devices, lines = routed.devices, routed.lines
        if stack.line.masked:
            devices, lines = np.divmod(
                np.unique(devices * np.int64(stack.lines_per_device) + lines), stack.lines_per_device
            )
        num_slices, k = self._agreed(call, devices, lines)
        grain, pads = self._grain if by_frames else 0, (stack.lines_per_device, multiple_of(stack.line))
        for number in range(num_slices):
            run = exchange(self.mesh, stack.line, self._processes.by_rank, *pads, grain, k)
            chosen_rows, chosen_frames = (
                _chosen(rows, frames, routed.lines % num_slices == number) if num_slices > 1 else (rows, frames)
            )
            routing = self._packer.route(chosen_rows)
            packed = self._packer.pack(routing, capacity=k * self._senders)
            planes: list[npt.NDArray[Any]] = [packed.lines, packed.words]
            if by_frames:
                planes.append(self._frames(packed, routing.places, chosen_rows, chosen_frames))
            if packed.keys is not None:
                planes.append(packed.keys)
            sent = list(map(self._sent, planes))
            self._processes.agree(f"the exchange of {call}")  # after all that can fail in one process alone
            yield run(*sent, np.int32(0))

    def _frames(
        self, packed: Packed, places: Int32 | None, rows: Sequence[MemberRows], frames: Sequence[Int64 | None]
    ) -> Int32:
        """Return the numbers of frames of rows, once per ``grain`` elements: int32 (devices, capacity, ·)."""
        width = packed.words.shape[2] // self._grain
        plane = np.zeros((*packed.words.shape[:2], width), np.int32)
        flat, first = plane.reshape(-1, width), 0
        assert packed.cells is not None  # because the capacity was given
        for table, counts in zip(rows, frames, strict=True):
            span = slice(first, first + len(table.ids))
            line = self.layouts[table.member].line
            offsets = np.zeros(len(table.ids), np.int64) if places is None else line.offsets(places[span])
            columns = offsets[:, None] // self._grain + np.arange(table.rows.shape[1] // self._grain)
            flat[packed.cells[span, None], columns] = np.asarray(counts)[:, None]
            first = span.stop
        return plane

    def _agreed(self, call: str, devices: npt.NDArray[Any], keys: npt.NDArray[Any]) -> tuple[int, int]:
        """Return into how many slices the rows of every process are divided, and the size of a block of lines.

        A row is in the slice of its key modulo the number of slices. devices, keys : of this process's rows
        """

        def most(num_slices: int) -> int:
            """Return the most rows in a block."""
            if num_slices == 1:
                return int(np.bincount(devices, minlength=1).max(initial=0))
            _, counts = np.unique(devices * np.int64(num_slices) + keys % num_slices, return_counts=True)
            return int(counts.max(initial=0))

        limit, num_slices = self._most * self._senders, 1
        largest = int(self._processes.agree(call, [most(1)]).max())
        while largest > limit:
            num_slices *= 2
            largest = int(self._processes.agree(f"{call}, {num_slices} slices", [most(num_slices)]).max())
        return (num_slices, bucket(-(-largest // self._senders), 8, GROWTH)) if largest else (0, 8)

    def _sent(self, blocks: npt.NDArray[Any]) -> jax.Array:
        """Divide the lines for every device among this process's devices: (devices, senders * k, …) → [n,n,k,…]."""
        n, capacity, *rest = blocks.shape
        parts = blocks.reshape(n, self._senders, capacity // self._senders, *rest).swapaxes(0, 1)
        return placed(self.mesh, [np.ascontiguousarray(part)[None] for part in parts])

    def _put(self, rows: npt.NDArray[Any]) -> jax.Array:
        """Put rows that every process has on the devices of this one. rows : (devices, …)"""
        return placed(
            self.mesh, [rows[device][None].copy() for device in self._processes.by_rank[self._processes.rank]]
        )

    def read(self, member: int, ids: Int64 | int, out: Float32, part: int) -> None:
        table, stack, senders = self.layouts[member], self._stack, self._senders
        wanted = row_ids(ids, len(out))
        devices, rows = stack.rows_of(member, wanted)
        order = np.arange(len(wanted))
        call = f"a lookup in table '{table.name}'"
        num_slices, k = self._agreed(call, devices, order)
        num_lines = stack.num_devices * stack.lines_per_device
        run = fetch(self.mesh, table.line, num_lines, k)
        with own_settings(self.mesh):
            for number in range(num_slices):
                positions = order[number::num_slices]
                beyond = stack.lines_per_device * table.line.group
                asked, cells = stack.padded(devices[positions], rows[positions], beyond, k * senders)
                sent = self._sent(asked)
                self._processes.agree(f"the exchange of {call}")
                answers = run(self.arrays, sent, np.int32(part))
                here = sorted(answers.addressable_shards, key=lambda shard: shard.index[0].start)
                answered = np.stack([np.asarray(shard.data)[0] for shard in here], axis=1)  # (n, senders, k, dim)
                out[positions] = answered.reshape(-1, answered.shape[-1])[cells, : out.shape[1]]

    def copy_rows(self, member: int, ids: Int64, out: Float32) -> Callable[[], object]:
        raise UsageError(f"table '{self.layouts[member].name}' spans processes: no commit or delta copies its rows")

    def wait(self) -> None:
        jax.block_until_ready(self.arrays)

    def warm(self) -> int:
        return 0  # the processes agree on the sizes at every step


def _chosen(
    rows: Sequence[MemberRows], frames: Sequence[Int64 | None], mask: npt.NDArray[np.bool_]
) -> tuple[list[MemberRows], list[Int64 | None]]:
    """Return the rows for which ``mask`` is True. mask : bool, of the rows of all tables in their order"""
    chosen: list[MemberRows] = []
    counts: list[Int64 | None] = []
    first = 0
    for table, frame_counts in zip(rows, frames, strict=True):
        part = mask[first : first + len(table.ids)]
        first += len(table.ids)
        keys = None if table.keys is None else table.keys[part]
        chosen.append(MemberRows(table.member, table.ids[part], table.rows[part], keys))
        counts.append(None if frame_counts is None else frame_counts[part])
    return chosen, counts
