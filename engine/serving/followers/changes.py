"""The changes of one or several deltas, by table: each id once, with its last value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.io.list_columns import row_values
from penstock.serving.flight import Delta
from penstock.serving.followers.target import FollowedJob, TableRows


def changes_of(deltas: Sequence[Delta], job: FollowedJob) -> list[TableRows]:
    """Return the changes of consecutive deltas, one entry per table that changed, ids ascending."""
    batches = [batch.select(["table", "id", "row"]) for delta in deltas for batch in delta.batches]
    if not batches:
        return []
    changed = pa.Table.from_batches(batches)
    names = changed["table"].cast(pa.utf8())
    parts = [(name, changed.filter(pc.equal(names, name))) for name in job.tables]
    return [_newest(name, rows, job) for name, rows in parts if rows.num_rows]


def merged(rows: TableRows, changes: TableRows) -> TableRows:
    """Return the rows of a table after changes, ids ascending. The rows that are kept are copied."""
    stays = ~np.isin(rows.ids, np.concatenate([changes.ids, changes.removed]))
    ids = np.concatenate([rows.ids[stays], changes.ids])
    order = np.argsort(ids)
    return TableRows(rows.table, ids[order], np.concatenate([rows.rows[stays], changes.rows])[order], rows.removed)


def _newest(table: str, rows: pa.Table, job: FollowedJob) -> TableRows:
    """Return the last row of each id. rows : of one table, in the order of their steps; null for removed ids"""
    lists, form = rows["row"].combine_chunks(), job.tables[table]
    ids, from_end = np.unique(rows["id"].to_numpy().view(form.id_type)[::-1], return_index=True)
    newest = rows.num_rows - 1 - from_end
    present = np.asarray(lists.is_valid())[newest]
    values = row_values(lists.take(pa.array(newest[present])), job.rows.width(form.dim))
    return TableRows(table, ids[present], values, ids[~present])
