"""The rows that the versions of a table appended, in order. A place is a version, a file of it, and a row of that."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing

import pyarrow as pa

from penstock.errors import StateError
from penstock.frames import Place
from penstock.io.lakehouse.table_versions import TableVersions
from penstock.io.sources.batch import Batch, Batches, Part, Parts
from penstock.io.sources.seekable_source import SeekableSource


class VersionedSource(SeekableSource):
    """The frames of one table. The end of a version ends its frame."""

    shortest_pause_s = pause_s = 2.0

    def __init__(self, versions: TableVersions) -> None:
        super().__init__(versions.name, self._open_parts)
        self._versions = versions
        self._next: Place = ()
        self._last = versions.latest()

    def seek(self, place: Place) -> None:
        self._next = place

    def fix_end(self) -> None:
        self._last = self._versions.latest()

    def _open_parts(self) -> Parts:
        first, file, row = self._next or (self._versions.first, 0, 0)
        if first > self._last + 1:
            raise StateError(
                f"{self.name}: the tables contain version {first}, and its newest one is {self._last}: it was "
                "replaced; use another checkpoint, or the former table"
            )
        for version in self._versions.numbers(first, self._last):
            files = self._versions.files(version)
            for number in range(file if version == first else 0, len(files)):
                num_rows = files[number].num_rows
                skipped = row if (version, number) == (first, file) else 0
                if num_rows is None or skipped < num_rows:
                    with ExitStack() as stack:
                        yield _placed(files[number].open(stack), version, number, skipped, number + 1 == len(files))
            self._next = (version + 1, 0, 0)


def _placed(part: Part, version: int, file: int, skipped: int, is_last: bool) -> Part:
    """Return a part without its first rows, whose batches have places. is_last : its end is that of the version"""
    inner, end = part.batches, part.schema.empty_table().to_batches()

    def after(first_row: int) -> Callable[[int], Place]:
        return lambda stop: (version, file, first_row + stop)

    def batches(columns: list[str]) -> Batches:
        with closing(inner(columns)) as found:
            for batch in found:
                start = min(max(skipped - batch.first_row, 0), batch.data.num_rows)
                first_row = batch.first_row + start
                yield Batch(batch.source, batch.data.slice(start), None, first_row, after=after(first_row))
        if is_last:
            nothing = end[0] if end else pa.RecordBatch.from_pylist([], part.schema)
            yield Batch(part.name, nothing, None, 0, ends_frame=True)

    part.batches = batches
    return part
