"""What changes in the tables of a job, as one stream of deltas: that of one process, and it comes out at process 0.

A delta is cut after the same frame everywhere. Every other process sends process 0 the ids of its rows that changed and
the rows themselves, as many as are its part of a batch, and goes on with the next frame. What is more is sent piece by
piece, as process 0 asks for it: it holds the rows of the batch that it makes and of at most one more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.core import EngineCore
from penstock.deltas import DeltaOptions, Deltas, ids_of
from penstock.distributed.packing import Opened, bytes_of, joined
from penstock.distributed.peers import Peers
from penstock.distributed.peers import Piece as Bytes
from penstock.distributed.tables import SharedState
from penstock.io.storage.delta_format import Block, Piece

if TYPE_CHECKING:
    import pyarrow as pa

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


class SharedDeltas(Deltas):
    """Deltas of an engine that is one of several. What it knows of touched rows are their numbers here."""

    def __init__(self, core: EngineCore, peers: Peers, tables: SharedState, options: DeltaOptions) -> None:
        self._peers, self._shares, self._tables = peers, tables.owned, tables
        self._theirs: list[Theirs] = []  # at process 0: of the delta that is being handed out
        core.changed_step = max(peers.gather("the last step that touched a row", core.changed_step))
        super().__init__(core, options)
        self.emits = peers.rank == 0

    @property
    def fully_consumed(self) -> bool:
        """As all know it: nothing that anybody holds is of a step after the last cut."""
        return self._delta is None and self._core.global_step == self._cut_step

    def take(self) -> Iterator[pa.RecordBatch]:
        if self.emits:
            yield from super().take()
            return
        with self._core.gate.still():
            self._cut_step, self._cut_s = self._core.global_step, time.monotonic()
            self._hand_in()

    def rest(self) -> Iterator[pa.RecordBatch]:
        yield from super().rest()
        # Where an error that all raise ends the run, nobody parts with it while others still hand in.
        self._peers.gather("the last delta", None)

    def outlive(self, error: BaseException) -> bool:
        return super().outlive(error) and self._peers.all_raise(error)

    def loaded(self, name: str, ids: Int64 | None) -> None:
        super().loaded(name, None if ids is None else self._shares[name].mine(ids)[1])

    # ---- at process 0

    def _taken(self) -> list[Block]:
        """What has changed anywhere, by the ids of the whole tables."""
        mine = {block.table: block.ids for block in super()._taken()}
        self._theirs = [Theirs(self._peers, rank, self._tag()) for rank in range(1, self._peers.count)]
        self._core.changed_step = max([self._core.changed_step, *(of.changed_step for of in self._theirs)])
        return [Block(name, ids) for name in self._shares if len(ids := self._merged(name, mine.get(name)))]

    def _merged(self, name: str, mine: Int64 | range | None) -> Int64 | range:
        """Ascending."""
        if isinstance(mine, range) or any(name in of.whole for of in self._theirs):
            return range(self._shares[name].vocabulary_size)
        found = [] if mine is None else [self._shares[name].ids(mine)]
        found += [of.ids[name] for of in self._theirs if name in of.ids]
        return np.sort(np.concatenate(found)) if found else range(0)

    def _read(self, block: Block) -> Piece:
        ids, share = ids_of(block), self._shares[block.table]
        owners, numbers = share.locate(ids)
        values: dict[str, Float32] = {}
        for rank in range(self._peers.count):
            places = np.flatnonzero(owners == rank)
            if not len(places):
                continue
            if rank == self._peers.rank:
                rows = self._here(block.table, numbers[places])
            else:
                rows = self._theirs[rank - 1].take(block.table, len(places))
            for column, of in rows.items():
                values.setdefault(column, np.empty((len(ids), of.shape[1]), np.float32))[places] = of
        return Piece(block.table, ids, values)

    # ---- at the others

    def _hand_in(self) -> None:
        """Ids and the first rows at once; the others when they are asked for."""
        blocks = super()._taken()
        told = [[b.table, None if isinstance(b.ids, range) else len(b.ids)] for b in blocks]
        ids: list[Bytes] = [bytes_of(self._shares[b.table].ids(b.ids)) for b in blocks if not isinstance(b.ids, range)]
        head = {"changed_step": self._core.changed_step, "ids": told}
        chunks = deque(self._form.cut(blocks, self._peers.count))
        self._send(head, ids, chunks)
        while chunks:
            self._peers.receive(0, self._tag())
            self._send({}, [], chunks)

    def _send(self, head: Mapping[str, Any], arrays: list[Bytes], chunks: deque[list[Block]]) -> None:
        sent = []
        for block in chunks.popleft() if chunks else ():
            rows = self._here(block.table, ids_of(block))
            sent.append([block.table, len(block.ids), {column: of.shape[1] for column, of in rows.items()}])
            arrays += map(bytes_of, rows.values())
        self._peers.send(0, self._tag(), joined({**head, "rows": sent}, arrays))

    # ---- everywhere

    def _here(self, name: str, numbers: Int64) -> dict[str, Float32]:
        """Rows that are here, by their numbers."""
        here = self._tables.here(name)
        return {column: here.read(numbers, part) for column, part in self._columns(name).items()}

    def _is_over(self) -> bool:
        """Where steps do not tell, process 0's clock does, and the rows of all."""
        if self._rows is None and self._seconds is None:
            return super()._is_over()
        if self._core.global_step == self._cut_step:
            return False
        told = self._peers.gather(f"what steps touched after {self._cut_step}", [super()._is_over(), self.num_changes])
        enough = self._rows is not None and sum(times for _, times in told) >= self._rows
        return bool(told[0][0]) or enough

    def _sizes(self) -> dict[str, int]:
        return {name: share.num_rows for name, share in self._shares.items()}

    def _tag(self) -> str:
        return f"what changed up to step {self._cut_step}"


class Theirs:
    """What another process has of a delta: ids, by table, and their rows in that order.

    ids : of tables of which some rows have changed; whole : tables of which all have
    """

    def __init__(self, peers: Peers, rank: int, tag: str) -> None:
        self._peers, self._rank, self._tag = peers, rank, tag
        message = Opened(peers.receive(rank, tag))
        self.changed_step = int(message.header["changed_step"])
        told = message.header["ids"]
        self.ids = {name: message.ids(number) for name, number in told if number is not None}
        self.whole = {name for name, number in told if number is None}
        self._held = _rows_in(message)

    def take(self, table: str, number: int) -> dict[str, Float32]:
        """So many of the next rows, which are this table's."""
        found: dict[str, list[Float32]] = {}
        while number:
            if not self._held:
                self._peers.send(self._rank, self._tag)
                self._held = _rows_in(Opened(self._peers.receive(self._rank, self._tag)))
            name, columns = self._held.popleft()
            assert name == table  # both list tables in the configuration's order
            taken = min(number, len(columns["row"]))
            for column, rows in columns.items():
                found.setdefault(column, []).append(rows[:taken])
            if taken < len(columns["row"]):
                self._held.appendleft((name, {column: rows[taken:] for column, rows in columns.items()}))
            number -= taken
        return {column: np.concatenate(several) for column, several in found.items()}


def _rows_in(message: Opened) -> deque[tuple[str, dict[str, Float32]]]:
    """(table, column → rows) in their order."""
    return deque(
        (name, {column: message.rows(number, dim) for column, dim in columns.items()})
        for name, number, columns in message.header["rows"]
    )
