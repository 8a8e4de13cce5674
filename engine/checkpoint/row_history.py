"""The values of one row in several commits. Each file is read once, and of a local one little more than its headers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.base.errors import StateError, UsageError, listed
from penstock.checkpoint.arrays import keys_and_rows, part_dims, records_of
from penstock.checkpoint.manifests import trusting
from penstock.checkpoint.parts import directories_of
from penstock.checkpoint.store import Commit, Folder
from penstock.checkpoint.table_changes import changes_in
from penstock.model.config.id_ranges import ANY_INT64, ANY_UINT64, bounds, expected
from penstock.model.frames import Float32


class RowVersion(NamedTuple):
    """A row in one commit. parts : the weights and each slot by name; None: the table has no such row

    change : by part, the Euclidean norm of the difference from the commit before that has the row; None: there is none
    """

    commit: Commit
    parts: Mapping[str, Float32] | None
    change: Mapping[str, float] | None


def row_history(folder: Folder, commits: Sequence[Commit], table: str, row_id: int) -> list[RowVersion]:
    """Return the values of a row in some commits, in their order. Digests of files are not verified.

    table : as the newest commit names it; earlier ones may have another name for it, or lack it
    Raises UsageError for an unknown table and an id out of range, StateError for a damaged commit.
    """
    names = [_name_in(commit, commits[-1], table) for commit in commits]
    if not any(names):
        known = dict.fromkeys(entry["name"] for commit in commits for entry in commit.contents["tables"])
        raise UsageError(f"{folder.path}: no table '{table}'; there are: {listed(known)}")
    rows_by_commit = [
        None if name is None else _row_of(folder, commit, name, row_id)
        for commit, name in zip(commits, names, strict=True)
    ]
    rows = {row for row in rows_by_commit if row is not None}
    values: dict[str, dict[int, Float32]] = {}  # by file
    for commit, name in zip(commits, names, strict=True):
        with trusting(f"{folder.path}, commit {commit.number}"):
            for file in commit.files:
                if file.name not in values:
                    values[file.name] = dict(_values_in(records_of(folder, commit, file), name, rows))
    history: list[RowVersion] = []
    last: Mapping[str, Float32] | None = None
    for commit, name, row in zip(commits, names, rows_by_commit, strict=True):
        parts = None if name is None or row is None else _parts(folder, commit, name, row, values)
        change = None if parts is None or last is None else _norms(parts, last)
        history.append(RowVersion(commit, parts, change))
        last = parts or last
    return history


def _name_in(commit: Commit, newest: Commit, table: str) -> str | None:
    """Return the name that a table of the newest commit has in another one; None if that lacks it."""
    known = len(changes_in(commit.contents)) and changes_in(commit.contents)[-1].number
    for change in reversed(changes_in(newest.contents)):
        if change.number > known:
            table = next((old for old, new in change.renamed.items() if new == table), table)
    return table if any(entry["name"] == table for entry in commit.contents["tables"]) else None


def _entry(commit: Commit, table: str) -> Mapping[str, Any]:
    """Return the table's entry in the manifest."""
    entries: dict[str, Mapping[str, Any]] = {entry["name"]: entry for entry in commit.contents["tables"]}
    return entries[table]


def _row_of(folder: Folder, commit: Commit, table: str, row_id: int) -> int | None:
    """Return the number of the row in the files of a commit; None if its table, a dynamic one, lacks the key."""
    entry = _entry(commit, table)
    settings = entry.get("dynamic")
    with trusting(f"{folder.path}, commit {commit.number}"):
        size = entry["vocabulary_size"]
        if settings is not None:
            size = ANY_UINT64 if settings["key_type"] == "uint64" else ANY_INT64
        least, end = bounds(size)
        if not least <= row_id < end:
            raise UsageError(f"table '{table}': expected {expected(size)}, got {row_id}")
        if settings is None:
            return row_id
        keys, rows = keys_and_rows(directories_of(folder, commit)[table], settings)
        (matches,) = np.nonzero(keys == np.asarray(row_id, keys.dtype))
        return int(rows[matches[0]]) if len(matches) else None


def _values_in(records: Iterable[Any], table: str | None, rows: set[int]) -> Iterable[tuple[int, Float32]]:
    """Yield (row, its values) of those rows that a file contains, later ones last."""
    for record in records:
        if record.kind == "rows" and record.header["table"] == table:
            for row in rows:
                for number in np.flatnonzero(record.ids == row).tolist():
                    yield row, record.arrays["rows"][number].astype(np.float32)


def _parts(
    folder: Folder, commit: Commit, table: str, row: int, values: Mapping[str, Mapping[int, Float32]]
) -> Mapping[str, Float32]:
    saved = next((values[file.name][row] for file in reversed(commit.files) if row in values[file.name]), None)
    if saved is None:
        raise StateError(f"{folder.path}, commit {commit.number}: table '{table}' lacks row {row}")
    dims = part_dims(_entry(commit, table))
    return dict(zip(dims, np.split(saved, np.cumsum([*dims.values()])[:-1]), strict=True))


def _norms(parts: Mapping[str, Float32], before: Mapping[str, Float32]) -> dict[str, float]:
    """Return the norm of the difference of every part, in float64."""
    return {
        name: float(np.linalg.norm(values.astype(np.float64) - before[name]))
        for name, values in parts.items()
        if name in before and before[name].shape == values.shape
    }
