"""A target of Parquet files: for each step that is kept a folder of tables, and a link to the newest (docs/follow.md).

The files have the form of ``replay --out``, so that ``--init DIR/current`` reads them. The tables stay in memory: each
transaction writes them as a whole, under the lock of a file in the folder.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from penstock.base.errors import StateError
from penstock.base.filesystem import atomic_files
from penstock.base.filesystem.state_files import read_json
from penstock.io.list_columns import row_values
from penstock.io.table_files import TablesWriter, table_path
from penstock.serving.followers.changes import merged
from penstock.serving.followers.row_table import blocks_of
from penstock.serving.followers.target import FILE_ERRORS, Stored, TableRows, Target, locked
from penstock.serving.followers.target_kinds import TargetKind

TARGET = TargetKind(
    title="Parquet",
    form="parquet:DIR",
    example="parquet:rows",
    errors=FILE_ERRORS,
    holds="a file per table",
    transaction="a new folder, and a link to it",
    open=lambda uri: ParquetFolder(uri),
    interval_s=10.0,
)
LINK, STATE, LOCK = "current", "penstock.json", ".lock"
# Folders that stay, the current one included: a reader may still read the one before.
KEPT = 2


class ParquetFolder(Target):
    """The folder of ``parquet:DIR``: ``DIR/current/TABLE.parquet``."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self._path = Path(TARGET.location(uri))
        self._tables: dict[str, TableRows] = {}
        self._folder = ""  # the name of the folder that they are in

    def stored(self) -> Stored | None:
        if not (self._path / LINK).exists():
            if self._path.exists() and not self._is_ours():
                raise StateError(f"{self.name}: the folder holds something else; use another one")
            return None
        try:
            return Stored.decoded(read_json(self._path / LINK / STATE), self.name)
        except (ValueError, KeyError, TypeError):
            raise StateError(f"{self.name}: {LINK}/{STATE} is damaged; use another folder") from None

    def replace(self, new: Stored, tables: Sequence[TableRows], before: Stored | None) -> None:
        with self._compared(before):
            self._write(new, {rows.table: rows for rows in tables})

    def apply(self, new: Stored, changes: Sequence[TableRows], before: Stored) -> None:
        with self._compared(before):
            tables = dict(self._read(new))
            for rows in changes:
                tables[rows.table] = merged(tables[rows.table], rows)
            self._write(new, tables)

    def close(self) -> None:
        self._tables, self._folder = {}, ""

    @contextmanager
    def _compared(self, before: Stored | None) -> Iterator[None]:
        """Hold the folder's lock in the block, with what the folder stores compared."""
        atomic_files.make_folders(self._path)
        with locked(self._path / LOCK):
            self.compare(self.stored(), before)
            yield

    def _write(self, new: Stored, tables: dict[str, TableRows]) -> None:
        folder = self._path / f"step-{new.version.step:012d}-{secrets.token_hex(4)}"
        try:
            with TablesWriter(folder) as writer:
                for name, form in new.job.tables.items():
                    rows = tables[name]
                    blocks = ((part.rows,) for part in blocks_of(rows))
                    keys, encoding = None if form.key_type is None else rows.ids, new.job.rows
                    writer.write(name, {"row": encoding.width(form.dim)}, blocks, keys, encoding)
            with atomic_files.publishing(folder / STATE) as file:
                file.write(json.dumps(new.encoded()).encode())
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        link = self._path / f".{LINK}.part"
        link.unlink(missing_ok=True)
        os.symlink(folder.name, link)
        atomic_files.rename(link, self._path / LINK)
        atomic_files.sync_folder(self._path)
        self._tables, self._folder = tables, folder.name
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
        return all(path.name.startswith(("step-", f".{LINK}.", LOCK)) for path in self._path.iterdir())

    def _read(self, stored: Stored) -> dict[str, TableRows]:
        """Return the tables of the folder that the link leads to, whose names never repeat."""
        current = os.readlink(self._path / LINK)
        if current != self._folder:
            try:
                widths = {name: stored.job.rows.width(form.dim) for name, form in stored.job.tables.items()}
                tables = {name: self._read_table(name, width) for name, width in widths.items()}
            except (pa.ArrowException, FileNotFoundError) as error:
                raise StateError(f"{self.name}: {error}; use another folder") from error
            self._tables, self._folder = tables, current
        return self._tables

    def _read_table(self, name: str, width: int) -> TableRows:
        table = pa.parquet.read_table(table_path(self._path / LINK, name)).combine_chunks()
        ids = table["id"].to_numpy()
        return TableRows(name, ids, row_values(table["row"].combine_chunks(), width), ids[:0])
