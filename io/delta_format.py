"""Deltas as Arrow: their columns, their checksum, and how they are split into batches. docs/deltas.md, formats.md.

Opens and writes no file (``delta_sink`` does), and receives the form of every table as an argument.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.base.errors import UsageError
from penstock.io.list_columns import list_column, row_values
from penstock.model.frames import Array, Int64
from penstock.model.row_encodings import FLOAT32, ROWS_KEY, RowEncoding

# The key of the format's number in the schema's metadata, the number, and that of deltas of encoded rows.
DELTAS_KEY, VERSION, ENCODED_VERSION = b"penstock.delta_stream", b"1", b"2"
OPS = ("upsert", "delete")

# A batch ends at the first of these limits: they bound the memory of a consumer, whatever a step changed.
MOST_ROWS = 1 << 16
MOST_BYTES = 1 << 24


class Shape(NamedTuple):
    """The form of a table, as far as deltas depend on it. slots : with the floats of each per row"""

    dim: int
    slots: Mapping[str, int]


class DeltaBlock(NamedTuple):
    """Rows of one table to read. ids : ascending; a range if a whole table changed. keys : of a dynamic table"""

    table: str
    ids: Int64 | range
    keys: KeyChanges | None = None


class KeyChanges(NamedTuple):
    """More about the ids of a dynamic table. deleted : which of them have no row any more; clock : of the table

    last : int64 (n,), the clock when each occurred last, if it is included; of a deleted key it means nothing
    """

    deleted: npt.NDArray[np.bool_]
    clock: int
    last: Int64 | None = None

    def of(self, span: slice) -> KeyChanges:
        """Return the changes of a slice of the ids."""
        return KeyChanges(self.deleted[span], self.clock, None if self.last is None else self.last[span])


class Piece(NamedTuple):
    """The values of a block. values : column → float32 (n, floats), "row" first, then the slots of the table

    keys : as of the block; the values are of the ids that are not deleted
    Encoded rows are uint8 (n, bytes).
    """

    table: str
    ids: Int64
    values: Mapping[str, Array]
    keys: KeyChanges | None = None


# Column, its type, when a stream has it, and what it has (docs/deltas.md). The slots follow ``row``, by name.
COLUMNS = (
    ("table", "dictionary of utf8", "", "in the configuration's order"),
    ("step", "int64", "", "the delta's number: the global step after which the row has these values"),
    ("id", "int64", "", "uint64 if a dynamic table has such keys; ascending within step and table"),
    ("row", "list of float32", "", "the weights, bit for bit what `engine.lookup` returns at that step"),
    (
        "op",
        "dictionary of utf8",
        "`op=True`, or a table is [dynamic](dynamic.md)",
        "`upsert`, or `delete` with a null row",
    ),
    (
        "clock",
        "int64",
        "a table is dynamic",
        "the clock of the row's table at the end of the delta; null of other tables",
    ),
    (
        "last",
        "int64",
        "`last=True`, `--delta-last`",
        "the clock when the key occurred last; null in deletes and of other tables",
    ),
    ("parent", "int64", "`numbered=True`, always in a file", "the number of the previous delta"),
    ("checksum", "uint32", "the same", "[of the delta's rows](formats.md#deltas) up to the end of this batch"),
    ("rows_left", "int64", "the same", "number of rows of the delta in later batches; 0 in its last batch"),
)


class DeltaForm:
    """The form of a stream of deltas.

    tables : the tables that may occur, in the order in which a delta lists them
    slots : the slots to include next to the weights; True: all
    op : include a column with the operation to apply to the row
    numbered : include parent, checksum and rows_left, which reveal missing, repeated, truncated or damaged deltas
    dynamic : a table is dynamic: rows may be null, of deletes, and ``clock`` is the clock of the row's table
    unsigned : ids are uint64, stored as the int64 of the same bits
    last : include the clock when each key of a dynamic table occurred last

    rows : how the rows of its batches are stored
    Raises UsageError for a slot that no table has.
    """

    rows = FLOAT32

    def __init__(
        self,
        tables: Mapping[str, Shape],
        slots: bool | Sequence[str] = (),
        *,
        op: bool = False,
        numbered: bool = False,
        dynamic: bool = False,
        unsigned: bool = False,
        last: bool = False,
    ) -> None:
        self.last = last
        self._dynamic, self._unsigned = dynamic, unsigned
        self._tables, self._op, self._numbered = tables, op, numbered
        self._slots = _checked(tables, slots)
        self._numbers = {name: number for number, name in enumerate(tables)}
        self._names = pa.array(list(tables), pa.utf8())
        rows = pa.list_(pa.float32())
        fields = [
            pa.field("table", pa.dictionary(pa.int32(), pa.utf8()), nullable=False),
            pa.field("step", pa.int64(), nullable=False),
            pa.field("id", pa.uint64() if unsigned else pa.int64(), nullable=False),
            pa.field("row", rows, nullable=dynamic),
            *(pa.field(slot, rows) for slot in self._slots),
        ]
        if op:
            fields.append(pa.field("op", pa.dictionary(pa.int8(), pa.utf8()), nullable=False))
        if dynamic:
            fields += [pa.field(name, pa.int64()) for name in ("clock", *(["last"] if last else []))]
        if numbered:
            fields.append(pa.field("parent", pa.int64(), nullable=False))
            fields.append(pa.field("checksum", pa.uint32(), nullable=False))
            fields.append(pa.field("rows_left", pa.int64(), nullable=False))
        self.schema = pa.schema(fields, metadata={DELTAS_KEY: VERSION})

    def with_rows(self, rows: RowEncoding) -> DeltaForm:
        """Return the form of the same deltas whose rows are stored in another way."""
        if rows is FLOAT32:
            return self
        form, index = copy(self), self.schema.get_field_index("row")
        field = pa.field("row", pa.binary(), self.schema.field(index).nullable)
        form.rows = rows
        form.schema = self.schema.set(index, field).with_metadata({DELTAS_KEY: ENCODED_VERSION, ROWS_KEY: rows.name})
        return form

    def slots_of(self, table: str) -> list[str]:
        """Return the slots of a table that are included."""
        return [slot for slot in self._slots if slot in self._tables[table].slots]

    def split(self, blocks: Iterable[DeltaBlock], parts: int = 1) -> Iterator[list[DeltaBlock]]:
        """Split the blocks of a delta into one list per batch. The result depends only on their ids.

        parts : number of parts that make a batch; the split is into parts
        """
        batch: list[DeltaBlock] = []
        room = 1.0  # as a share of the batch
        for block in blocks:
            shape, first = self._tables[block.table], 0
            row_bytes = 4 * (shape.dim + sum(shape.slots[slot] for slot in self.slots_of(block.table)))
            share = parts * max(1 / MOST_ROWS, row_bytes / MOST_BYTES)
            while first < len(block.ids):
                count = min(len(block.ids) - first, int(room / share))
                if not count and batch:
                    yield batch
                    batch, room = [], 1.0
                    continue
                count = max(count, 1)  # a row that exceeds the limit of a batch is one batch
                span = slice(first, first + count)
                keys = None if block.keys is None else block.keys.of(span)
                batch.append(DeltaBlock(block.table, block.ids[span], keys))
                first, room = first + count, room - count * share
        if batch:
            yield batch

    def batch(self, pieces: Sequence[Piece], step: int, parent: int, checksum: int, rows_left: int) -> pa.RecordBatch:
        """Build one batch of a delta."""
        lengths = [len(piece.ids) for piece in pieces]
        num_rows = sum(lengths)
        numbers = np.array([self._numbers[piece.table] for piece in pieces], np.int32)
        ids = np.concatenate([piece.ids for piece in pieces])
        columns: list[pa.Array] = [
            pa.DictionaryArray.from_arrays(np.repeat(numbers, lengths), self._names),
            pa.array(np.full(num_rows, step)),
            pa.array(ids.view(np.uint64) if self._unsigned else ids),
            *(self._lists(pieces, column) for column in ("row", *self._slots)),
        ]
        if self._op:
            ops = np.concatenate([_deleted(piece) for piece in pieces]).astype(np.int8)
            columns.append(pa.DictionaryArray.from_arrays(ops, pa.array(OPS)))
        if self._dynamic:
            columns += _clocks(pieces, self.last)
        if self._numbered:
            columns.append(pa.array(np.full(num_rows, parent)))
            columns.append(pa.array(np.full(num_rows, checksum, np.uint32)))
            columns.append(pa.array(np.full(num_rows, rows_left)))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def pieces(self, batch: pa.RecordBatch) -> Iterator[Piece]:
        """Yield the pieces of a batch of this form, without slots."""
        numbers = batch["table"].indices.to_numpy()
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        for start, stop in zip(starts, [*starts[1:], batch.num_rows], strict=True):
            part, table, keys = batch.slice(start, stop - start), self._names[numbers[start]].as_py(), None
            rows = part["row"]
            if self._dynamic and not part["clock"].null_count:
                last = part["last"].fill_null(0).to_numpy() if self.last else None
                keys = KeyChanges(np.asarray(rows.is_null()), part["clock"][0].as_py(), last)
            values = row_values(rows, self.rows.width(self._tables[table].dim))
            yield Piece(table, part["id"].to_numpy().view(np.int64), {"row": values}, keys)

    def checksum(self, crc: int, pieces: Sequence[Piece]) -> int:
        """Extend the checksum by a batch: each table's name and a zero byte, ids, rows, then slots in order.

        In a stream with a dynamic table, a byte per id follows the ids, which is 1 for a delete, then of a dynamic
        table the clock, and ``last`` of every upsert, if it is included.
        """
        for piece in pieces:
            crc = zlib.crc32(piece.table.encode() + b"\0", crc)
            crc = zlib.crc32(np.ascontiguousarray(piece.ids, "<i8").data, crc)
            if self._dynamic:
                crc = zlib.crc32(_deleted(piece).astype(np.uint8).data, crc)
            if piece.keys is not None:
                crc = zlib.crc32(struct.pack("<q", piece.keys.clock), crc)
                if piece.keys.last is not None:
                    crc = zlib.crc32(np.ascontiguousarray(piece.keys.last[~piece.keys.deleted], "<i8").data, crc)
            for values in piece.values.values():
                crc = zlib.crc32(np.ascontiguousarray(values, values.dtype.newbyteorder("<")).data, crc)
        return crc

    def _lists(self, pieces: Sequence[Piece], column: str) -> pa.Array:
        """Build a column of lists, or of the bytes of encoded rows, null where a table has no such slot."""
        widths = np.concatenate(
            [
                np.where(_deleted(piece), 0, piece.values[column].shape[1] if column in piece.values else 0)
                for piece in pieces
            ]
        )
        flat = [piece.values[column].reshape(-1) for piece in pieces if column in piece.values]
        none = np.zeros(0, np.float32 if column != "row" or self.rows is FLOAT32 else np.uint8)
        values = flat[0] if len(flat) == 1 else np.concatenate([*flat, none])
        absent = widths == 0
        return list_column(values, self.schema.field(column).type, widths, absent if absent.any() else None)


class DeltaEncoder:
    """Stores the rows of deltas in another way. form : of the deltas, without slots"""

    def __init__(self, form: DeltaForm, rows: RowEncoding) -> None:
        self._form, self._encoded = form, form.with_rows(rows)

    @property
    def schema(self) -> pa.Schema:
        return self._encoded.schema

    def encoded(self, delta: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the batches of one delta, with the checksum of what they contain."""
        if self._encoded is self._form:
            yield from delta
            return
        crc = None
        for batch in delta:
            step, parent, rows_left = (batch[name][0].as_py() for name in ("step", "parent", "rows_left"))
            encode = self._encoded.rows.encode
            pieces = [piece._replace(values={"row": encode(piece.values["row"])}) for piece in self._form.pieces(batch)]
            crc = self._encoded.checksum(checksum_begin(step, parent) if crc is None else crc, pieces)
            yield self._encoded.batch(pieces, step, parent, crc, rows_left)


def _deleted(piece: Piece) -> npt.NDArray[np.bool_]:
    return np.zeros(len(piece.ids), bool) if piece.keys is None else piece.keys.deleted


def _clocks(pieces: Sequence[Piece], with_last: bool) -> Iterator[pa.Array]:
    """Build the columns ``clock``, null in rows of other tables, and ``last``, null there and in deletes."""
    clocks = [np.full(len(piece.ids), 0 if piece.keys is None else piece.keys.clock) for piece in pieces]
    static = np.concatenate([np.full(len(piece.ids), piece.keys is None) for piece in pieces])
    yield pa.array(np.concatenate(clocks), mask=static)
    if with_last:
        lasts = [None if piece.keys is None else piece.keys.last for piece in pieces]
        # Zero under a null, so that equal deltas have equal bytes.
        stamps = [np.where(_deleted(p), 0, 0 if last is None else last) for p, last in zip(pieces, lasts, strict=True)]
        yield pa.array(np.concatenate(stamps), mask=static | np.concatenate([_deleted(piece) for piece in pieces]))


def checksum_begin(step: int, parent: int) -> int:
    """Return the checksum of a delta before its first row: CRC-32 of both numbers, int64, little-endian."""
    return zlib.crc32(struct.pack("<qq", parent, step))


def _checked(tables: Mapping[str, Shape], slots: bool | Sequence[str]) -> list[str]:
    """Return the requested slots, each once. Raises UsageError."""
    existing = list(dict.fromkeys(slot for shape in tables.values() for slot in shape.slots))
    if isinstance(slots, bool):
        return existing if slots else []
    try:
        requested = [slots] if isinstance(slots, str) else list(dict.fromkeys(slots))
    except TypeError:
        raise UsageError(f"slots: expected True, False or names of slots, got {slots!r:.100}") from None
    for slot in requested:
        if slot not in existing:
            raise UsageError(f"slots: no table has a slot '{slot}' (there are: {', '.join(existing) or 'none'})")
    return requested
