"""The deltas of all passes as one stream: merged by interval of steps, table and id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa

from penstock.contrib.shares.joined_deltas import JoinedDeltas


def merged(parts: Sequence[Path], joined: JoinedDeltas, per_steps: int) -> Iterator[pa.RecordBatch]:
    """Yield the deltas of one engine with all rows, of those of the passes, which are complete logs.

    per_steps : steps per delta, at most. A run that was interrupted has ended a delta early; the merged one is whole
    """
    streams = [groupby(_batches(part), lambda batch: -(-batch["step"][0].as_py() // per_steps)) for part in parts]
    heads = [next(stream, None) for stream in streams]
    while any(head is not None for head in heads):
        interval = min(head[0] for head in heads if head is not None)
        shares = []
        for number, head in enumerate(heads):
            if head is not None and head[0] == interval:
                shares.append([(interval, _newest(list(head[1])))])
                heads[number] = next(streams[number], None)
        yield from joined.join(shares)


def _batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a log that have rows: the last one closes it."""
    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
        yield from (batch for batch in reader if batch.num_rows)


def _newest(batches: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    """Return the batches of an interval without rows that a later delta of it contains too."""
    if len({batch["step"][0].as_py() for batch in batches}) == 1:
        return batches
    deltas = pa.Table.from_batches(batches).unify_dictionaries().combine_chunks()
    (table,) = deltas["table"].chunks
    ids, tables = deltas["id"].to_numpy(), table.indices.to_numpy()
    order = np.lexsort((ids, tables))  # stable: the newest of equal ones is last
    last = np.append((np.diff(ids[order]) != 0) | (np.diff(tables[order]) != 0), True)
    rows: list[pa.RecordBatch] = deltas.take(pa.array(np.sort(order[last]))).to_batches()
    return rows
