"""The deltas of all shares as one stream: that of one engine with all rows, byte for byte."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute

from penstock.api.deltas import DeltaInProgress, form_of
from penstock.io.delta_format import OPS, DeltaBlock, KeyChanges, Piece
from penstock.model.config.specs import TableSpec
from penstock.model.frames import Array, Float32, Int64
from penstock.model.options import DeltaOptions

# Deltas of one share: the global step at the end of the interval of each, and its batches.
ShareDeltas = Sequence[tuple[int, Sequence[pa.RecordBatch]]]


class JoinedDeltas:
    """Joins deltas step by step.

    changed_step : the last step that changed a row before the first delta
    """

    def __init__(self, specs: Iterable[TableSpec], options: DeltaOptions, changed_step: int) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._form = form_of(self._specs.values(), options)
        self._parent = changed_step

    @property
    def schema(self) -> pa.Schema:
        return self._form.schema

    def join(self, shares: Sequence[ShareDeltas]) -> Iterator[pa.RecordBatch]:
        """Yield one delta per interval, of the shares that changed in it."""
        by_interval: dict[int, list[pa.RecordBatch]] = {}
        for deltas in shares:
            for end, batches in deltas:
                by_interval.setdefault(end, []).extend(batches)
        for _, batches in sorted(by_interval.items()):
            interval = pa.Table.from_batches(batches)
            step = pa.compute.max(interval["step"]).as_py()  # the last one that changed a row of any share
            pieces = {name: piece for name in self._specs if (piece := self._piece(name, interval)) is not None}
            blocks = [DeltaBlock(piece.table, piece.ids, piece.keys) for piece in pieces.values()]
            taken = dict.fromkeys(pieces, 0)
            delta = DeltaInProgress(self._form, blocks, partial(_next, pieces, taken), step, self._parent)
            self._parent = step
            while not delta.is_over:
                yield delta.next()

    def _piece(self, name: str, interval: pa.Table) -> Piece | None:
        """Return the rows of one table, by ascending id."""
        spec = self._specs[name]
        rows = interval.filter(pa.compute.equal(interval["table"].cast(pa.utf8()), name))
        if not rows.num_rows:
            return None
        rows = rows.take(pa.compute.sort_indices(rows["id"])).combine_chunks()
        ids: Int64 = rows["id"].to_numpy().view(np.int64)
        keys = None
        if spec.dynamic is not None:
            deleted = pa.compute.equal(rows["op"].cast(pa.utf8()), OPS[1]).to_numpy()
            last = rows["last"].fill_null(0).to_numpy() if "last" in rows.schema.names else None
            keys = KeyChanges(deleted, rows["clock"][0].as_py(), last)
        dims = {"row": spec.dim, **{slot: spec.slot_dims[slot] for slot in self._form.slots_of(name)}}
        values = {column: _floats(rows[column], dim) for column, dim in dims.items()}
        return Piece(name, ids, values, keys)


def _floats(column: pa.ChunkedArray, dim: int) -> Float32:
    """Return lists of floats as float32 (n, dim), without null ones."""
    flat: Array = column.combine_chunks().flatten().to_numpy()
    return flat.reshape(-1, dim)


def _next(pieces: Mapping[str, Piece], taken: dict[str, int], block: DeltaBlock) -> Piece:
    """Return the next rows of a table, as many as the block has. taken : upserts of each table so far"""
    piece, first = pieces[block.table], taken[block.table]
    count = len(block.ids) if block.keys is None else int((~block.keys.deleted).sum())
    taken[block.table] = first + count
    values = {column: array[first : first + count] for column, array in piece.values.items()}
    assert not isinstance(block.ids, range)
    return Piece(block.table, block.ids, values, block.keys)
