"""The changes of one or several deltas, by table: each id once, with its last value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.serving.flight import Delta
from penstock.serving.followers.target import Float32, FollowedJob, TableForm, TableRows

# A run of rows of one table in a batch: ids, which of them are removed, and the rows of the others.
_Piece = tuple[npt.NDArray[Any], npt.NDArray[np.bool_], Float32]


def changes_of(deltas: Sequence[Delta], job: FollowedJob) -> list[TableRows]:
    """Return the changes of consecutive deltas, one entry per table that changed, ids ascending."""
    pieces: dict[str, list[_Piece]] = {}
    for delta in deltas:
        for batch in delta.batches:
            for table, piece in _pieces(batch, job):
                pieces.setdefault(table, []).append(piece)
    return [_joined(name, pieces[name], form) for name, form in job.tables.items() if name in pieces]


def merged(rows: TableRows, changes: TableRows) -> TableRows:
    """Return the rows of a table after changes, ids ascending. The rows that are kept are copied."""
    stays = ~np.isin(rows.ids, np.concatenate([changes.ids, changes.removed]))
    ids = np.concatenate([rows.ids[stays], changes.ids])
    order = np.argsort(ids)
    return TableRows(rows.table, ids[order], np.concatenate([rows.rows[stays], changes.rows])[order], rows.removed)


def _pieces(batch: pa.RecordBatch, job: FollowedJob) -> Iterator[tuple[str, _Piece]]:
    tables = batch.column("table")
    numbers = tables.indices.to_numpy()
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], batch.num_rows], strict=True):
        name = tables.dictionary[int(numbers[start])].as_py()
        part = batch.slice(start, stop - start)
        row = part.column("row")
        values: Float32 = row.flatten().to_numpy().reshape(-1, job.tables[name].dim)
        ids = part.column("id").to_numpy().view(job.tables[name].id_type)
        yield name, (ids, np.asarray(row.is_null()), values)


def _joined(table: str, pieces: Sequence[_Piece], form: TableForm) -> TableRows:
    ids = np.concatenate([ids for ids, _, _ in pieces])
    removed = np.concatenate([removed for _, removed, _ in pieces])
    rows = np.concatenate([rows for _, _, rows in pieces])
    ids, from_end = np.unique(ids[::-1], return_index=True)
    last = len(removed) - 1 - from_end
    gone = removed[last]
    index = np.cumsum(~removed) - 1  # in rows, which removed ids have none of
    return TableRows(table, ids[~gone], rows[index[last[~gone]]].reshape(-1, form.dim), ids[gone])
