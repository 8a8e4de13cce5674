"""Follows penstock's deltas with numpy and pyarrow alone: what a serving system does with them.

    penstock replay tables.pbtxt log.arrows --limit 0 --out base      # the tables before the first step
    penstock replay tables.pbtxt log.arrows --deltas deltas.arrows --deltas-slots all --out out
    python examples/apply_deltas.py base deltas.arrows copy
    penstock diff out copy                                            # no difference

A delta has a number, the step after which its rows are as it says, and names its parent, the number of the delta before
it. Rows are values, not differences: who has applied a delta may apply it again. So three things can happen:

- its parent is beyond what we have: deltas are missing, and applying it would leave rows behind: stop;
- it ends before what we have: we know it already, skip it;
- else apply it, whole: all its batches, up to the one with no rows left, if the checksum fits.
"""

import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

COLUMNS = ("table", "step", "id", "row", "op", "parent", "checksum", "rows_left")  # every other one is a slot


class BrokenError(Exception):
    """The deltas do not follow on what we have, or are not whole."""


class Follower:
    """Tables that deltas are applied to.

    tables : table → column ("row", then slots) → float32 (rows, dim)
    step : of the tables as they are given
    """

    def __init__(self, tables, step=0):
        self.tables, self.step = tables, step
        self.num_applied = self.num_repeated = 0
        self._pieces, self._checksum = [], None

    def take(self, batch):
        """One batch of a delta. Raises BrokenError; the tables are then as they were after the last whole delta."""
        if not batch.num_rows:
            return
        step, parent, checksum, rows_left = (
            batch[name][0].as_py() for name in ("step", "parent", "checksum", "rows_left")
        )
        if self._checksum is None:
            self._checksum = zlib.crc32(struct.pack("<qq", parent, step))
        for table, ids, values in pieces_of(batch):
            self._checksum = zlib.crc32(table.encode() + b"\0", self._checksum)
            for array in (ids, *values.values()):
                self._checksum = zlib.crc32(array.data, self._checksum)
            self._pieces.append((table, ids, values))
        if checksum != self._checksum:
            raise BrokenError(f"delta {step}: its checksum differs: a batch is missing, or was damaged")
        if not rows_left:
            pieces, self._pieces, self._checksum = self._pieces, [], None
            self._apply(step, parent, pieces)

    def end(self):
        """The stream is over. Raises BrokenError where it was cut inside a delta."""
        if self._pieces:
            raise BrokenError("the stream ends inside a delta")

    def _apply(self, step, parent, pieces):
        if parent > self.step:
            raise BrokenError(f"delta {step} follows on {parent}, and we are at {self.step}: deltas are missing")
        # A delta whose number is its parent's holds rows that were loaded between two steps.
        if step < self.step or parent < step == self.step:
            self.num_repeated += 1
            return
        for table, ids, values in pieces:
            for column, rows in values.items():
                self.tables[table][column][ids] = rows
        self.step = step
        self.num_applied += 1


def pieces_of(batch):
    """(table, ids, column → rows) of every table in a batch: its rows lie together."""
    tables = batch["table"]
    number = tables.indices.to_numpy()
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], batch.num_rows], strict=True):
        values = {}
        for column in batch.schema.names:
            lists = batch[column].slice(start, stop - start)
            if column == "row" or (column not in COLUMNS and not lists.null_count):
                values[column] = lists.flatten().to_numpy().reshape(stop - start, -1)
        yield tables.dictionary[number[start]].as_py(), batch["id"].slice(start, stop - start).to_numpy(), values


def read_tables(folder, columns):
    """What `--out` wrote, as Follower takes it, but for columns that the deltas do not bring up to date."""
    tables = {}
    for path in sorted(Path(folder).glob("*.parquet")):
        read = pyarrow.parquet.read_table(path).combine_chunks()
        name = read.schema.metadata[b"penstock.table"].decode()
        tables[name] = {
            column: read[column].combine_chunks().flatten().to_numpy().reshape(read.num_rows, -1).copy()
            for column in read.schema.names
            if column in columns and column != "id"
        }
    return tables


def write_tables(tables, folder):
    """One Parquet file per table, as `--out` writes them."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, columns in tables.items():
        arrays = {"id": pa.array(np.arange(len(columns["row"])))}
        for column, rows in columns.items():
            arrays[column] = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
        table = pa.table(arrays).replace_schema_metadata({"penstock.table": name})
        pyarrow.parquet.write_table(table, Path(folder, f"{name}.parquet"))


def main(base, deltas, out):
    with pa.ipc.open_stream(deltas) as batches:
        follower = Follower(read_tables(base, batches.schema.names))
        for batch in batches:
            follower.take(batch)
        follower.end()
    write_tables(follower.tables, out)
    print(f"step {follower.step}: {follower.num_applied} deltas applied, {follower.num_repeated} known already")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: apply_deltas.py BASE DELTAS OUT")
    try:
        main(*sys.argv[1:])
    except BrokenError as broken:
        sys.exit(f"apply_deltas: {broken}")
