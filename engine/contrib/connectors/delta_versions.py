"""The versions of a Delta Lake table: the actions of its log, and the Parquet files that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.fs

from penstock.base.errors import InputError
from penstock.base.filesystem.file_stores import filesystem_at
from penstock.contrib.connectors.table_versions import ERRORS, RowFile, TableVersions, is_remote, store_options
from penstock.contrib.connectors.versioned_source import TableKind
from penstock.io.registry import Library
from penstock.io.sources.batch import Part
from penstock.io.sources.file_names import filesystem_of, with_keys
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
# Version 3 of the protocol names the features that a reader needs, version 2 is columnMapping. The first two of these
# change the rows of a file, and are refused where a version uses them; the others change neither the files of a commit
# nor what is read of them.
_DELETIONS, _MAPPING = "deletionVectors", "columnMapping"
_FEATURES = {
    *(_DELETIONS, _MAPPING, "timestampNtz", "typeWidening", "typeWidening-preview", "v2Checkpoint"),
    *("vacuumProtocolCheck", "variantType", "variantType-preview", "variantShredding", "variantShredding-preview"),
}
_NEWEST_READER = 3
# A path of a file that is a URI: tables that were cloned name the files of another one.
_ABSOLUTE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/.*)", re.DOTALL)


class _Table(NamedTuple):
    """What a version of the table says about its files. types : Delta's, by column"""

    has_mapping: bool
    types: Mapping[str, Any]

    @classmethod
    def of(cls, configuration: Mapping[str, str], schema: str) -> _Table:
        fields = json.loads(schema)["fields"]
        mode = configuration.get("delta.columnMapping.mode", "none")
        return cls(mode != "none", {field["name"]: field["type"] for field in fields})


class DeltaVersions(TableVersions):
    """The table of ``delta:URI``."""

    def __init__(self, uri: str) -> None:
        self._uri = SOURCE.location(uri)
        super().__init__(uri, is_remote(self._uri))
        self._library = SOURCE.load()
        with self._failures():
            self._fs, self._root = filesystem_of(self._uri)
        self._newest: Any = None
        self._read: tuple[int, _Table] | None = None  # the version read last, and the table then

    def _table_at(self, version: int | None = None) -> Any:
        """Return the table at a version; None: the newest one."""
        return self._library.DeltaTable(self._uri, version, store_options(self._uri))

    def latest(self) -> int:
        with self._failures():
            try:
                self._newest = self._table_at()
            except self._library.exceptions.DeltaError:
                # The versions before one that the library cannot read can be read.
                if not (refused := self._refused_by_protocol()):
                    raise
                self._newest = self._table_at(refused - 1)
                return refused
            return int(self._newest.version())

    def creation(self) -> str | None:
        return f"id {self._newest.metadata().id}"

    def files(self, version: int) -> Sequence[RowFile]:
        with self._failures():
            actions = self._actions(version)
            self._check_protocol(version, actions)
            if any(action["remove"].get("dataChange", True) for action in actions if "remove" in action):
                commits = (action["commitInfo"] for action in actions if "commitInfo" in action)
                operation = next((commit.get("operation") for commit in commits), None)
                raise self.changed(version, f"a {operation or 'removal'} that removes rows")
            table = self._table(version, actions)
            if table.has_mapping:
                raise self._unread(version, _MAPPING)
            # The first version rearranges nothing, whatever a clone says.
            added = [
                action["add"]
                for action in actions
                if "add" in action and (version == self.first or action["add"].get("dataChange", True))
            ]
            if any(action.get("deletionVector") for action in added):
                raise self._unread(version, _DELETIONS)
            self._read = version, table
            return [self._file(action, version, table) for action in added]

    def _actions(self, version: int) -> list[dict[str, Any]]:
        path = f"{self._root}/_delta_log/{version:020d}.json"
        if self._fs.get_file_info(path).type == pa.fs.FileType.NotFound:
            raise self.removal_error(version)
        return [json.loads(line) for line in self._fs.open_input_file(path).read().splitlines() if line.strip()]

    def _check_protocol(self, version: int, actions: Sequence[Mapping[str, Any]]) -> None:
        """Raise InputError if a version begins to need more of its readers than this one does."""
        for protocol in (action["protocol"] for action in actions if "protocol" in action):
            unknown = sorted({*(protocol.get("readerFeatures") or ())} - _FEATURES)
            if unknown:
                raise self._unread(version, unknown[0])
            if (number := protocol["minReaderVersion"]) > _NEWEST_READER:
                raise self._unread(version, f"minReaderVersion {number}")

    def _refused_by_protocol(self) -> int | None:
        """Return the newest version whose protocol is refused, of those that the log still has."""
        folder = pa.fs.FileSelector(f"{self._root}/_delta_log", allow_not_found=True)
        names = [file.base_name for file in self._fs.get_file_info(folder)]
        for version in sorted((int(name[:-5]) for name in names if re.fullmatch(r"\d{20}\.json", name)), reverse=True):
            try:
                self._check_protocol(version, self._actions(version))
            except InputError:
                if not version:
                    raise
                return version
        return None

    def _unread(self, version: int, feature: str) -> InputError:
        return InputError(
            f"version {version} uses the feature '{feature}' of Delta Lake, which is not read: rows would be read that "
            "the table does not have, or not be found; copy them to a table without it",
            source=self.name,
        )

    def _table(self, version: int, actions: Sequence[Mapping[str, Any]]) -> _Table:
        """Return the table at a version: as its metadata say, or those of an earlier version."""
        for metadata in (action["metaData"] for action in actions if "metaData" in action):
            return _Table.of(metadata.get("configuration") or {}, metadata["schemaString"])
        if self._read is not None and self._read[0] + 1 == version:
            return self._read[1]
        table = self._newest
        with suppress(self._library.exceptions.DeltaError):  # the log may have lost what precedes the version
            table = self._table_at(version)
        return _Table.of(table.metadata().configuration, table.schema().to_json())

    def _file(self, action: Mapping[str, Any], version: int, table: _Table) -> RowFile:
        name = unquote(action["path"])
        rows = json.loads(action.get("stats") or "{}").get("numRecords")
        keys = {
            column: _partition_value(table.types.get(column), text)
            for column, text in (action.get("partitionValues") or {}).items()
        }

        def open_part(stack: ExitStack) -> Part:
            fs, path = self._place(action["path"])
            if fs.get_file_info(path).type == pa.fs.FileType.NotFound:
                raise self.removal_error(version, name)
            return with_keys(open_file(fs, path, f"{self.name}, version {version}, {name}", stack, False), keys)

        return RowFile(rows, open_part)

    def _place(self, path: str) -> tuple[pa.fs.FileSystem, str]:
        """Return where the file of an ``add`` is. path : encoded, relative to the table, absolute, or a URI"""
        match = _ABSOLUTE.fullmatch(path)
        if match is None:
            return self._fs, unquote(path) if path.startswith("/") else f"{self._root}/{unquote(path)}"
        scheme, rest = match[1].lower(), unquote(match[2])
        if scheme == "file":
            return pa.fs.LocalFileSystem(), "/" + rest.lstrip("/")
        bucket, _, key = rest.lstrip("/").partition("/")
        scheme = {"s3a": "s3", "s3n": "s3"}.get(scheme, scheme)
        if self._uri.startswith(f"{scheme}://"):
            return self._fs, f"{bucket}/{key}"
        fs, inside = filesystem_at(f"{scheme}://{bucket}")
        return fs, f"{inside}/{key}"

    def _failures(self) -> Any:
        damages = (ValueError, LookupError, TypeError, AttributeError)
        return self.failures(self._library.exceptions.DeltaError, pa.ArrowException, OSError, *damages)


def _partition_value(kind: Any, text: str | None) -> pa.Array:
    """Return the value of a partition as an array of length 1; files do not have it. kind : Delta's type"""
    if not text:  # the protocol's null
        return pa.nulls(1, _INTEGERS.get(kind, pa.string()))
    if kind in _INTEGERS:
        return pa.array([int(text)], _INTEGERS[kind])
    return pa.array([text]).dictionary_encode()
