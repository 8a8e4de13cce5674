"""A target in shared files of this machine, which ``Reader`` reads without a lock (docs/targets.md).

The header of the files names the version. A follower locks the folder for each transaction. A
transaction that a kill interrupts leaves the header in the middle of a step: the target counts as empty then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from penstock.base.errors import CapacityError, StateError, TargetError
from penstock.model.row_encodings import FLOAT32, RowEncoding
from penstock.pyx.row_reads import StepWords
from penstock.rows.initializers import InitialRows
from penstock.rows.shared.header import (
    DESCRIPTION_BEGIN,
    FAILED,
    HEADER,
    HISTORY_BEGIN,
    WORDS_BEGIN,
    Description,
    HeaderHistory,
    unpacked,
)
from penstock.rows.shared.locks import boot_id, is_locked
from penstock.serving.followers.row_table import blocks_of
from penstock.serving.followers.target import FILE_ERRORS, FollowedJob, Stored, TableForm, TableRows, Target
from penstock.serving.followers.target_kinds import TargetKind
from penstock.serving.shared.table_reader import Reader
from penstock.serving.shared.table_writer import SharedTable, SharedWriter

TARGET = TargetKind(
    title="shared files",
    form="shared:DIR",
    example="shared:tables",
    errors=FILE_ERRORS,
    holds="the tables in files that processes of this machine map",
    transaction="a step of the files",
    open=lambda uri: SharedFiles(uri),
)
# Rows that a new table of keys has room for.
LEAST_ROWS = 1024


class SharedFiles(Target):
    """The folder of ``shared:DIR``. Readers of several rows see a transaction as a whole if they ask for it."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self._path = Path(TARGET.location(uri))
        self._writer: SharedWriter | None = None
        self._own: os.stat_result | None = None  # the header that the writer has published

    def stored(self) -> Stored | None:
        stored = self._read()
        if stored is None and is_locked(self._path):
            raise TargetError(f"{self.name}: another process is writing there")
        return stored

    def replace(self, new: Stored, tables: Sequence[TableRows], before: Stored | None) -> None:
        with self._transaction(before) as writer:
            self._fill(writer, new, tables, self.frame_time)

    def apply(self, new: Stored, changes: Sequence[TableRows], before: Stored) -> None:
        with self._transaction(before) as writer:
            if not self._is_own():  # those of another follower stay, and are continued in files of the next generation
                self._fill(writer, before, self._held(before.job.rows))
            with writer.step(new.version, new.version.step, self.frame_time):
                for rows in changes:
                    if len(rows.removed):
                        writer.remove(rows.table, rows.removed)
                    writer.write(rows.table, rows.ids, rows.rows)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = self._own = None

    @contextmanager
    def _transaction(self, before: Stored | None) -> Iterator[SharedWriter]:
        """Hold the folder's lock in the block, with what the folder stores compared."""
        writer = self._locked()
        try:
            self.compare(self._read(), before)
            yield writer
            self._own = os.stat(self._path / HEADER)
        except CapacityError as error:
            raise TargetError(f"{self.name}: {error}") from error
        finally:
            writer.close()

    def _locked(self) -> SharedWriter:
        """Return the writer with the folder locked: another one, if the files are no longer those that it published."""
        try:
            if self._writer is not None and self._is_own():
                self._writer.lock()
            else:
                self.close()
                self._writer = SharedWriter(self._path)
        except StateError as error:  # it is locked
            raise TargetError(str(error)) from error
        return self._writer

    def _is_own(self) -> bool:
        try:
            return self._own is not None and os.path.samestat(self._own, os.stat(self._path / HEADER))
        except FileNotFoundError:
            return False

    def _read(self) -> Stored | None:
        """Return what the header says; None if there is none, or it is in the middle of a step."""
        try:
            data = (self._path / HEADER).read_bytes()
        except FileNotFoundError:
            return None
        description = unpacked(data, self._path / HEADER)
        if description.config:
            raise StateError(
                f"{self.name}: the tables there are those of replay or serve with --shared; use another folder"
            )
        header = np.frombuffer(data, np.uint8, DESCRIPTION_BEGIN)
        words = StepWords(header[WORDS_BEGIN:HISTORY_BEGIN].view(np.uint64))
        if description.boot != boot_id() or words.state == FAILED or words.sequence & 1:
            return None
        version = HeaderHistory(header).read(words.step)
        absent = {layout.name: layout.keys.absent for layout in description.tables if layout.keys is not None}
        encodings = {layout.row_encoding for layout in description.tables}
        if len(encodings) > 1:
            raise StateError(f"{self.name}: its tables differ in how rows are stored; use another folder")
        job = FollowedJob(version.lineage, _forms(description), absent, *encodings)
        return Stored(job, version)

    def _fill(
        self, writer: SharedWriter, new: Stored, tables: Sequence[TableRows], frame_time: int | None = None
    ) -> None:
        writer.create([_created(rows, new.job) for rows in tables])
        for rows in tables:
            for block in blocks_of(rows):
                writer.write(rows.table, block.ids, block.rows)
        writer.publish(new.version, new.version.step, frame_time)

    def _held(self, rows: RowEncoding) -> list[TableRows]:
        """Return all rows that the files have. rows : how they are stored"""
        with Reader(self._path, dtype=rows.name) as reader:
            ids = {
                layout.name: np.arange(layout.num_rows) if layout.keys is None else reader.keys(layout.name)
                for layout in reader.layouts
            }
            values = {name: reader.lookup(name, each) for name, each in ids.items()}
        dtype = np.float32 if rows is FLOAT32 else np.uint8
        return [TableRows(name, each, values[name].view(dtype), each[:0]) for name, each in ids.items()]


def _forms(description: Description) -> dict[str, TableForm]:
    return {
        layout.name: TableForm(layout.dim, None if layout.keys is None else layout.id_type)
        for layout in description.tables
    }


def _created(rows: TableRows, job: FollowedJob) -> SharedTable:
    """Return the table of all its rows."""
    form = job.tables[rows.table]
    if form.key_type is None:
        return SharedTable(rows.table, form.dim, len(rows.ids), rows=job.rows.name)
    absent = job.absent.get(rows.table, InitialRows())
    num_rows = max(LEAST_ROWS, len(rows.ids))
    return SharedTable(rows.table, form.dim, num_rows, form.key_type, True, absent, job.rows.name)
