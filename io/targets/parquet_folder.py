"""A target of Parquet files: for each step that is kept a folder of tables, and a link to the newest (docs/follow.md).

The files have the form of ``replay --out``, so that ``--init DIR/current`` reads them. The tables stay in memory: each
transaction writes them as a whole.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from penstock.errors import StateError, UsageError
from penstock.filesystem import atomic_files
from penstock.filesystem.state_files import read_json
from penstock.io.flight import Delta
from penstock.io.storage.table_files import TablesWriter, table_path
from penstock.io.targets.changes import changes_of
from penstock.io.targets.row_table import blocks_of
from penstock.io.targets.target import Job, Stored, TableRows, Target, failures

LINK, STATE = "current", "penstock.json"
# Folders that stay, the current one included: a reader may still read the one before.
KEPT = 2


class ParquetFolder(Target):
    """The folder of ``parquet:DIR``: ``DIR/current/TABLE.parquet``."""

    interval_s = 10.0

    def __init__(self, path: str) -> None:
        super().__init__(f"parquet:{path}")
        if not path:
            raise UsageError("parquet:: expected parquet:DIR")
        self._path = Path(path)
        self._tables: dict[str, TableRows] = {}

    def stored(self) -> Stored | None:
        with failures(self.name):
            if not (self._path / LINK).exists():
                if self._path.exists() and not self._is_ours():
                    raise StateError(f"{self.name}: the folder holds something else; use another one")
                return None
            try:
                state = read_json(self._path / LINK / STATE)
                stored = Stored(Job.decoded(json.dumps(state["job"]), self.name), int(state["step"]))
            except (ValueError, KeyError, TypeError):
                raise StateError(f"{self.name}: {LINK}/{STATE} is damaged; use another folder") from None
            try:
                self._tables = self._read(stored.job)
            except (pa.ArrowException, FileNotFoundError) as error:
                raise StateError(f"{self.name}: {error}; use another folder") from error
        return stored

    def replace(self, job: Job, tables: Sequence[TableRows], step: int) -> None:
        self._write(job, {of.table: of for of in tables}, step)

    def apply(self, job: Job, deltas: Sequence[Delta], step: int) -> None:
        tables = dict(self._tables)
        for changes in changes_of(deltas, job):
            tables[changes.table] = _changed(tables[changes.table], changes)
        self._write(job, tables, step)

    def close(self) -> None:
        self._tables = {}

    def _write(self, job: Job, tables: dict[str, TableRows], step: int) -> None:
        with failures(self.name):
            folder = self._path / f"step-{step:012d}-{secrets.token_hex(4)}"
            try:
                with TablesWriter(folder) as writer:
                    for name, form in job.tables.items():
                        of = tables[name]
                        blocks = ((part.rows,) for part in blocks_of(of))
                        writer.write(name, {"row": form.dim}, blocks, None if form.key_type is None else of.ids)
                state = {"job": json.loads(job.encoded()), "step": step}
                with atomic_files.appearing(folder / STATE) as file:
                    file.write(json.dumps(state).encode())
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            link = self._path / f".{LINK}.part"
            link.unlink(missing_ok=True)
            os.symlink(folder.name, link)
            atomic_files.rename(link, self._path / LINK)
            atomic_files.sync_folder(self._path)
            self._tables = tables
            self._discard_old(folder.name)

    def _discard_old(self, current: str) -> None:
        """Remove all folders but the newest, and those of transactions that a kill interrupted."""
        with suppress(OSError):
            others = [path for path in self._path.glob("step-*") if path.name != current]
            others.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
            for path in others[KEPT - 1 :]:
                shutil.rmtree(path, ignore_errors=True)

    def _is_ours(self) -> bool:
        """Return whether a folder without a link is empty but for what a first transaction left."""
        return all(path.name.startswith(("step-", f".{LINK}.")) for path in self._path.iterdir())

    def _read(self, job: Job) -> dict[str, TableRows]:
        tables = {}
        for name, form in job.tables.items():
            read = pa.parquet.read_table(table_path(self._path / LINK, name)).combine_chunks()
            ids = read["id"].to_numpy()
            flat = read["row"].combine_chunks().flatten().to_numpy()
            tables[name] = TableRows(name, ids, flat.reshape(-1, form.dim), ids[:0])
        return tables


def _changed(kept: TableRows, changes: TableRows) -> TableRows:
    """Return the rows of a table after changes, ids ascending. The rows that are kept are copied."""
    stays = ~np.isin(kept.ids, np.concatenate([changes.ids, changes.removed]))
    ids = np.concatenate([kept.ids[stays], changes.ids])
    order = np.argsort(ids)
    return TableRows(kept.table, ids[order], np.concatenate([kept.rows[stays], changes.rows])[order], kept.removed)
