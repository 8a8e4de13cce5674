"""Follow penstock's deltas with numpy and pyarrow alone, as a serving system would.

    penstock replay tables.pbtxt log.arrows --limit 0 --out base      # the tables before the first step
    penstock replay tables.pbtxt log.arrows --deltas deltas.arrows --delta-slots all --out out
    python examples/apply_deltas.py base deltas.arrows copy
    penstock diff out copy                                            # no difference

A delta has a number, the step after which its rows have their values, and a parent, the number of the previous delta.
Rows are values, not differences, so applying a delta is idempotent. There are three cases:

- its parent is ahead of our step: deltas are missing, and applying it would leave some rows stale: stop;
- its number is not ahead of our step: it was applied already, skip it;
- else apply it as a whole: all its batches, up to the one with no rows left, if the checksum matches.

The ids of a dynamic table are keys, and a delta may delete some of them.
"""

import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

# All other columns are slots.
COLUMNS = ("table", "step", "id", "row", "op", "clock", "last", "parent", "checksum", "rows_left")


class BrokenError(Exception):
    """The deltas do not continue our step, or are damaged or truncated."""


class Follower:
    """A copy of the tables that applies deltas.

    tables : table → column ("row", then slots) → float32 (rows, dim)
    keys : table → the keys of its rows, ascending, of dynamic tables
    step : the step of these tables
    """

    def __init__(self, tables, step=0, keys=None):
        self.tables, self.step, self.keys = tables, step, keys or {}
        self.num_applied = self.num_repeated = 0
        self._pieces, self._checksum = [], None

    def take(self, batch):
        """Take one batch of a delta. Raises BrokenError; the tables then stay as of the last complete delta."""
        if not batch.num_rows:
            return
        if encoding := (batch.schema.metadata or {}).get(b"penstock.rows"):
            raise BrokenError(f"rows of {encoding.decode()}: expected float32")
        step, parent, checksum, rows_left = (
            batch[name][0].as_py() for name in ("step", "parent", "checksum", "rows_left")
        )
        if self._checksum is None:
            self._checksum = zlib.crc32(struct.pack("<qq", parent, step))
        for table, ids, deleted, counted, values in pieces_of(batch):
            self._checksum = zlib.crc32(table.encode() + b"\0", self._checksum)
            for array in (ids, *counted, *values.values()):
                self._checksum = zlib.crc32(array.data, self._checksum)
            self._pieces.append((table, ids, deleted, values))
        if checksum != self._checksum:
            raise BrokenError(f"delta {step}: its checksum differs: a batch is missing, or was damaged")
        if not rows_left:
            pieces, self._pieces, self._checksum = self._pieces, [], None
            self._apply(step, parent, pieces)

    def end(self):
        """Check the end of the stream. Raises BrokenError if it was truncated inside a delta."""
        if self._pieces:
            raise BrokenError("the stream ends inside a delta")

    def _apply(self, step, parent, pieces):
        if parent > self.step:
            raise BrokenError(f"delta {step} follows on {parent}, and we are at {self.step}: deltas are missing")
        # A delta with the number of its parent contains rows that were loaded between two steps.
        if step < self.step or parent < step == self.step:
            self.num_repeated += 1
            return
        for table, ids, deleted, values in pieces:
            if table in self.keys:
                self._apply_keys(table, ids, deleted, values)
            else:
                for column, rows in values.items():
                    self.tables[table][column][ids] = rows
        self.step = step
        self.num_applied += 1

    def _apply_keys(self, table, ids, deleted, values):
        """Replace, add and delete rows by key. A serving system would use its index: this copies the table."""
        kept = ~np.isin(self.keys[table], ids)
        keys = np.concatenate([self.keys[table][kept], ids[~deleted]])
        order = np.argsort(keys)
        self.keys[table] = keys[order]
        for column, rows in self.tables[table].items():
            added = [values[column]] if column in values else []  # there is none if all are deletes
            self.tables[table][column] = np.concatenate([rows[kept], *added])[order]


def pieces_of(batch):
    """Yield (table, ids, deleted, counted, column → rows) of every table in a batch, in which its rows are adjacent.

    deleted : which ids have no row; counted : the arrays between the ids and the rows in the checksum
    """
    tables, names = batch["table"], batch.schema.names
    number = tables.indices.to_numpy()
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], batch.num_rows], strict=True):
        part = batch.slice(start, stop - start)
        deleted, values, counted = np.asarray(part["row"].is_null()), {}, []
        if "clock" in names:  # a table is dynamic
            counted.append(deleted.astype(np.uint8))
            if not part["clock"].null_count:  # this one
                counted.append(part["clock"].slice(0, 1).to_numpy())
                if "last" in names:
                    counted.append(part["last"].drop_null().to_numpy())
        num_rows = int((~deleted).sum())
        for column in names if num_rows else ():
            if column == "row" or (column not in COLUMNS and part[column].null_count <= deleted.sum()):
                values[column] = part[column].flatten().to_numpy().reshape(num_rows, -1)
        yield tables.dictionary[number[start]].as_py(), part["id"].to_numpy(), deleted, counted, values


def read_tables(folder, columns):
    """Read the tables that `--out` wrote, without the columns that the deltas do not update, and the keys of dynamic
    tables."""
    tables, keys = {}, {}
    for path in sorted(Path(folder).glob("*.parquet")):
        read = pyarrow.parquet.read_table(path).combine_chunks()
        name = read.schema.metadata[b"penstock.table"].decode()
        if b"penstock.key_type" in read.schema.metadata:
            keys[name] = read["id"].to_numpy()
        tables[name] = {
            column: read[column].combine_chunks().flatten().to_numpy().reshape(-1, read[column].type.list_size).copy()
            for column in read.schema.names
            if column in columns and column != "id"
        }
    return tables, keys


def write_tables(tables, keys, folder):
    """Write one Parquet file per table, as `--out` does."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, columns in tables.items():
        metadata = {"penstock.table": name}
        if name in keys:
            metadata["penstock.key_type"] = keys[name].dtype.name
        arrays = {"id": pa.array(keys.get(name, np.arange(len(columns["row"]))))}
        for column, rows in columns.items():
            arrays[column] = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
        table = pa.table(arrays).replace_schema_metadata(metadata)
        pyarrow.parquet.write_table(table, Path(folder, f"{name}.parquet"))


def main(base, deltas, out):
    with pa.ipc.open_stream(deltas) as batches:
        tables, keys = read_tables(base, batches.schema.names)
        follower = Follower(tables, keys=keys)
        for batch in batches:
            follower.take(batch)
        follower.end()
    write_tables(follower.tables, follower.keys, out)
    print(f"step {follower.step}: {follower.num_applied} deltas applied, {follower.num_repeated} known already")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: apply_deltas.py BASE DELTAS OUT")
    try:
        main(*sys.argv[1:])
    except BrokenError as broken:
        sys.exit(f"apply_deltas: {broken}")
