"""Blocks of frames on their way to the shares of a job: one Arrow record batch per share, and a head per frame for all.

A batch has the columns ``row`` (int64: the number of a row at its share; of a dynamic table the key), ``gradient``
(list<float32>) and, for frames that were summed, ``rows`` (uint32: raw rows in each sum). Rows are in the order of the
frames, then of the tables in the configuration, then of arrival; the metadata says how many each frame and table has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from penstock.contrib.shares.summing import FrameSums
from penstock.io.list_columns import list_column, list_type
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.frames import Float32, Frame, Int64, Rows
from penstock.model.frozen_tables import frozen_tables, without_frozen
from penstock.pyx import partition
from penstock.rows.shares import shares_of

_COUNTS = b"penstock.counts"


class RoutedBlock(NamedTuple):
    """Some frames. heads : the frames without their rows, the same for every share; batches : of every share"""

    heads: list[Frame]
    batches: list[pa.RecordBatch]


class Router:
    """Partitions the rows of frames by share.

    Parameters
    ----------
    config : EmbeddingConfig
        Of the job.
    count : int
        Number of shares.
    seed : int
        Of the job, which decides where the keys of dynamic tables belong.
    sums : bool
        Sum the rows of each id of a frame first, which changes no result if every frame is a separate step.
    """

    def __init__(self, config: EmbeddingConfig, count: int, seed: int = 0, *, sums: bool = False) -> None:
        self._dims = {spec.name: spec.dim for spec in config.tables}
        self._shares = shares_of(config.tables, config.sharding_strategy == "MOD", seed, 0, count)
        self._count, self._frozen = count, frozen_tables(config.tables)
        self._sums = FrameSums(config.tables) if sums else None

    def block(self, frames: Sequence[Frame]) -> RoutedBlock:
        """Return frames as a block.

        Parameters
        ----------
        frames : sequence of Frame
            In order.

        Returns
        -------
        RoutedBlock
            The frames without their rows, and a record batch for every share.

        Raises
        ------
        InputError
            For a bad row.
        """
        count, whole = self._count, [without_frozen(frame.audited(), self._frozen) for frame in frames]
        heads = [_head(frame) for frame in whole]
        routed = []  # (rows, their owners, their numbers there)
        rows_of = np.zeros((len(whole), len(self._dims), count), np.int64)
        for index, frame in enumerate(whole):
            summed = frame.rows if self._sums is None else self._sums.of(frame)
            for table_number, table in enumerate(self._dims):
                for block in summed.get(table, ()):
                    owners, numbers = self._shares[table].locate(np.ascontiguousarray(block.ids))
                    rows_of[index, table_number] += np.bincount(owners, minlength=count)
                    routed.append((block, owners, numbers))
        dims = np.array(list(self._dims.values()))
        totals = rows_of.sum(axis=0)
        num_rows, num_floats = totals.sum(axis=0), dims @ totals
        rows_at, floats_at = np.cumsum(num_rows) - num_rows, np.cumsum(num_floats) - num_floats
        numbers_out, grads_out = np.empty(num_rows.sum(), np.int64), np.empty(num_floats.sum(), np.float32)
        counts_out = None if self._sums is None else np.empty(len(numbers_out), np.uint32)
        firsts = np.stack([rows_at, floats_at], axis=1)
        for block, owners, numbers in routed:
            partition.scatter(
                owners,
                numbers,
                block.grads,
                block.which,
                block.gains,
                block.counts,
                rows_at,
                floats_at,
                numbers_out,
                grads_out,
                counts_out,
            )
        batches = []
        for owner in range(count):
            rows = slice(firsts[owner, 0], rows_at[owner])
            floats = slice(firsts[owner, 1], floats_at[owner])
            of_owner = np.ascontiguousarray(rows_of[:, :, owner])
            counts = None if counts_out is None else counts_out[rows]
            batches.append(_batch(of_owner, dims, numbers_out[rows], grads_out[floats], counts))
        return RoutedBlock(heads, batches)


def _head(frame: Frame) -> Frame:
    """Return a frame without its rows. Its position is counted where the whole frame is read."""
    rows: dict[str, tuple[Rows, ...]] = dict.fromkeys(frame.rows, ())
    return replace(frame, rows=rows, bad_rows=(), audit=None, reject=None, position=(), fingerprint="")


def _batch(rows_of: Int64, dims: Int64, numbers: Int64, grads: Float32, counts: object) -> pa.RecordBatch:
    widths = np.repeat(np.tile(dims, len(rows_of)), rows_of.reshape(-1))
    columns = {
        "row": pa.array(numbers),
        "gradient": list_column(grads, list_type(()), widths),
        **({} if counts is None else {"rows": pa.array(counts)}),
    }
    batch = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
    return batch.replace_schema_metadata({_COUNTS: rows_of.astype("<i4").tobytes()})


def frames_of(heads: Sequence[Frame], batch: pa.RecordBatch, dims: Mapping[str, int]) -> Iterator[Frame]:
    """Yield the frames of a block as a share sees them. Their rows look into the batch.

    Every table that a frame contains is in it, even without a row here. dims : of all tables, in order
    """
    names = list(dims)
    rows_of = np.frombuffer(batch.schema.metadata[_COUNTS], "<i4").reshape(-1, len(names))
    numbers, grads = batch["row"].to_numpy(), batch["gradient"].flatten().to_numpy()
    counts = batch["rows"].to_numpy().astype(np.int64) if "rows" in batch.schema.names else None
    row = offset = 0
    for head, of_frame in zip(heads, rows_of, strict=True):
        rows = {}
        for name, count in zip(names, of_frame.tolist(), strict=True):
            if name not in head.rows:
                continue
            dim = dims[name]
            block_counts = None if counts is None else counts[row : row + count]
            values = grads[offset : offset + count * dim].reshape(count, dim)
            block = Rows(numbers[row : row + count], values, counts=block_counts)
            rows[name] = (block,)
            row, offset = row + count, offset + count * dim
        yield replace(head, rows=rows)
