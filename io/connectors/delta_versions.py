"""The versions of a Delta Lake table: the actions of its log, and the Parquet files that they name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs

from penstock.io.connectors.table_versions import ERRORS, RowFile, TableVersions, is_remote
from penstock.io.connectors.versioned_source import TableKind
from penstock.io.registry import Library
from penstock.io.sources.batch import Batches, Part
from penstock.io.sources.files import open_file

SOURCE = TableKind(
    title="Delta Lake",
    form="delta:URI",
    example="delta:gradients.delta",
    errors=ERRORS,
    library=Library("deltalake", "delta"),
    unit="a commit of the table's log",
    versions=lambda uri: DeltaVersions(uri),
)
# Delta's names of the integer types; a partition of any other type is read as text.
_INTEGERS = {"long": pa.int64(), "integer": pa.int32(), "short": pa.int16(), "byte": pa.int8()}


class DeltaVersions(TableVersions):
    """The table of ``delta:URI``."""

    def __init__(self, uri: str) -> None:
        self._uri = SOURCE.location(uri)
        super().__init__(uri, is_remote(self._uri))
        self._library = SOURCE.load()
        with self._failures():
            self._fs, self._root = _filesystem(self._uri)
        self._creation: str | None = None

    def latest(self) -> int:
        with self._failures():
            table = self._library.DeltaTable(self._uri)
            self._creation = f"id {table.metadata().id}"
            return int(table.version())

    def creation(self) -> str | None:
        return self._creation

    def files(self, version: int) -> Sequence[RowFile]:
        path = f"{self._root}/_delta_log/{version:020d}.json"
        with self._failures():
            if self._fs.get_file_info(path).type == pa.fs.FileType.NotFound:
                raise self.removal_error(version)
            log = self._fs.open_input_file(path).read()
        actions = [json.loads(line) for line in log.splitlines() if line.strip()]
        operation = next(
            (action["commitInfo"].get("operation", "") for action in actions if "commitInfo" in action), ""
        )
        if any(action["remove"].get("dataChange", True) for action in actions if "remove" in action):
            raise self.changed(version, f"a {operation or 'removal'} that removes rows")
        for settings in (action["metaData"].get("configuration", {}) for action in actions if "metaData" in action):
            if settings.get("delta.columnMapping.mode", "none") != "none":
                raise self.changed(version, "a mapping of columns")
        added = [action["add"] for action in actions if "add" in action and action["add"].get("dataChange", True)]
        return [self._file(action, version) for action in added]

    def _file(self, action: Mapping[str, Any], version: int) -> RowFile:
        path = unquote(action["path"])
        rows = json.loads(action.get("stats") or "{}").get("numRecords")
        values = action.get("partitionValues") or {}

        def opened(stack: ExitStack) -> Part:
            file_path = f"{self._root}/{path}"
            if self._fs.get_file_info(file_path).type == pa.fs.FileType.NotFound:
                raise self.removal_error(version)
            part = open_file(self._fs, file_path, f"{self.name}, version {version}, {path}", stack, False)
            return _with_values(part, self._values(values)) if values else part

        return RowFile(rows, opened)

    def _values(self, values: Mapping[str, str | None]) -> dict[str, pa.Scalar]:
        """Return the values of the columns that the table is partitioned by; files do not have them."""
        with self._failures():
            fields = self._library.DeltaTable(self._uri).schema().fields
        kinds = {field.name: _INTEGERS.get(getattr(field.type, "type", "")) for field in fields}
        return {
            name: pa.scalar(text if kinds[name] is None or text is None else int(text), kinds[name] or pa.string())
            for name, text in values.items()
        }

    def _failures(self) -> Any:
        return self.failures(self._library.exceptions.DeltaError, pa.ArrowException, OSError)


def _filesystem(uri: str) -> tuple[pa.fs.FileSystem, str]:
    if "://" in uri:
        fs, path = pa.fs.FileSystem.from_uri(uri)
        return fs, path
    return pa.fs.LocalFileSystem(), os.path.abspath(uri)


def _with_values(part: Part, values: Mapping[str, pa.Scalar]) -> Part:
    """Return a part with a column of each value."""
    inner, schema = part.batches, part.schema
    for name, value in values.items():
        schema = schema.append(pa.field(name, value.type))

    def batches(columns: list[str]) -> Batches:
        with closing(inner([name for name in columns if name not in values])) as inner_batches:
            for batch in inner_batches:
                data = batch.data
                for name in columns:
                    if name in values:
                        data = data.append_column(name, pa.repeat(values[name], data.num_rows))
                batch.data = data
                yield batch

    part.schema, part.batches = schema, batches
    return part
