"""The rows that the versions of a table appended, in order. A position: a version, a file of it, and a row of that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import pyarrow as pa

from penstock.base.errors import InputError, StateError
from penstock.contrib.connectors.table_versions import TableVersions
from penstock.io.patience import Patience
from penstock.io.sources.batch import Batch, Batches, Part, Parts
from penstock.io.sources.seekable_source import GROWS, SeekableSource, created_again
from penstock.io.sources.source_kinds import SourceKind
from penstock.model.frames import Position

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TableKind(SourceKind):
    """A format of tables with versions. versions : returns those of the table that a URI names"""

    versions: Callable[[str], TableVersions]
    read_once = GROWS
    grows = True

    def open(self, uri: str, patience_s: float) -> list[VersionedSource]:
        versions = Patience(patience_s, starts_over=False).call(
            lambda: self.versions(uri),  # pyarrow asks the store for the region of a bucket
            lambda error: InputError(f"the table cannot be read: {error}", source=uri),
        )
        return [VersionedSource(versions, patience_s)]


class VersionedSource(SeekableSource):
    """The frames of one table. The end of a version ends its frame."""

    shortest_pause_s = pause_s = 2.0
    creation: str | None = None

    def __init__(self, versions: TableVersions, patience_s: float) -> None:
        super().__init__(versions.name, self._open_parts, is_ready=True)
        self._versions = versions
        self._patience_s = patience_s
        self._next: Position = ()
        self.fix_end()

    def seek(self, position: Position, creation: str | None = None) -> None:
        self._next, self.creation = position, creation

    def fix_end(self) -> None:
        self._last = self._call(self._versions.latest)
        creation = self._call(self._versions.creation)
        if self._next and self.creation is not None and not self._versions.is_of(self.creation):
            raise StateError(created_again(f"{self.name}: version {self._next[0]}", "table", self.creation, creation))
        self.creation = creation
        if self._next:
            version, *rows = self._next
            self._call(partial(self._versions.check_applied, version if any(rows) else version - 1))

    def _open_parts(self) -> Parts:
        first, file, row = self._next or (self._versions.first, 0, 0)
        if first > self._last + 1:
            raise StateError(
                f"{self.name}: the tables contain version {first}, and its newest one is {self._last}: it was "
                "replaced; use another checkpoint, or the former table"
            )
        for version in self._versions.numbers(first, self._last):
            files = self._call(partial(self._versions.files, version))
            for number in range(file if version == first else 0, len(files)):
                num_rows = files[number].num_rows
                skipped = row if (version, number) == (first, file) else 0
                if num_rows is None or skipped < num_rows:
                    with ExitStack() as stack:
                        open_file = partial(self._call, partial(files[number].open, stack))
                        yield self._placed(open_file, version, number, skipped, number + 1 == len(files))
            self._next = (version + 1, 0, 0)

    def _call(self, call: Callable[[], T]) -> T:
        """Call, again until patience is over if the table's server is gone."""
        return Patience(self._patience_s, starts_over=False).call(call, self._versions.unreadable)

    def _placed(self, open_file: Callable[[], Part], version: int, file: int, skipped: int, is_last: bool) -> Part:
        """Return a file without its first rows, whose batches have positions. is_last : it ends the version"""
        part = open_file()
        inner, end = part.batches, part.schema.empty_table().to_batches()

        def after(first_row: int) -> Callable[[int], Position]:
            return lambda stop: (version, file, first_row + stop)

        def batches(columns: list[str]) -> Batches:
            read, done, patience = inner, skipped, Patience(self._patience_s, starts_over=False)
            while True:
                try:
                    with closing(read(columns)) as inner_batches:
                        for batch in inner_batches:
                            start = min(max(done - batch.first_row, 0), batch.data.num_rows)
                            first_row, data = batch.first_row + start, batch.data.slice(start)
                            yield Batch(batch.source, data, None, first_row, after=after(first_row))
                            done = first_row + data.num_rows
                            patience.good()
                    break
                except InputError as error:
                    if not self._versions.is_remote:
                        raise
                    patience.wait(error)  # the server is gone, or the file is damaged
                    read = open_file().batches
            if is_last:
                nothing = end[0] if end else pa.RecordBatch.from_pylist([], part.schema)
                yield Batch(part.name, nothing, None, 0, ends_frame=True)

        part.batches = batches
        return part
