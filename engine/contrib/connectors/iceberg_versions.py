"""The snapshots of an Iceberg table: the operation of each, and the data files that it appended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from penstock.base.errors import StateError, UsageError
from penstock.contrib.connectors.table_versions import ERRORS as TABLE_ERRORS
from penstock.contrib.connectors.table_versions import RowFile, TableVersions
from penstock.contrib.connectors.versioned_source import TableKind
from penstock.io.error_tables import ErrorRow, ErrorTable
from penstock.io.registry import Library
from penstock.io.sources.in_memory import scanned_part

ERRORS = ErrorTable(
    ErrorRow(
        "the catalog refuses the caller",
        2,
        "UnauthorizedError ForbiddenError AuthorizationExpiredError OAuthError SignError",
        advice="check the credentials of the catalog in pyiceberg's configuration",
    ),
    ErrorRow(
        "the catalog is not configured, or needs another package",
        2,
        "NotInstalledError",
        "URI missing|could not initialize catalog|catalog .{0,80}(not configured|unknown)|please install",
        "see the configuration of pyiceberg",
    ),
    ErrorRow(
        "the catalog fails, or limits its requests",
        None,
        "ServerError ServiceUnavailableError TooManyRequestsError",
    ),
    *TABLE_ERRORS.rows,
    uses_proxies=True,
)
SOURCE = TableKind(
    title="Iceberg",
    form="iceberg:CATALOG/NAMESPACE.TABLE",
    example="iceberg:lake/training.gradients",
    errors=ERRORS,
    library=Library("pyiceberg", "iceberg"),
    unit="a snapshot (format 2)",
    versions=lambda uri: IcebergVersions(uri),
)
# A status of an entry in a manifest.
_ADDED = 1


class IcebergVersions(TableVersions):
    """The table of ``iceberg:CATALOG/NAMESPACE.TABLE``. A version is the sequence number of a snapshot.

    The catalog is the one that pyiceberg's configuration names.
    """

    first = 1
    errors = ERRORS

    def __init__(self, uri: str) -> None:
        super().__init__(uri, is_remote=True)
        catalog, _, table = SOURCE.location(uri).partition("/")
        if not catalog or "." not in table:
            raise UsageError(f"{uri}: expected {SOURCE.form}")
        self._catalog, self._identifier = catalog, table
        self._library = SOURCE.load(".catalog")
        self._table: Any = None

    def latest(self) -> int:
        with self.failures(Exception):
            self._table = self._library.load_catalog(self._catalog).load_table(self._identifier)
            if self._table.format_version < 2:
                raise UsageError(f"{self.name}: its format has no sequence numbers; upgrade the table to version 2")
            return max(self._snapshots(), default=0)

    def creation(self) -> str:
        return f"id {self._table.metadata.table_uuid}"

    def check_applied(self, version: int) -> None:
        known = {int(snapshot.sequence_number) for snapshot in self._table.metadata.snapshots}
        if version in known - {*self._snapshots()}:
            raise StateError(
                f"{self.name}: the tables contain version {version}, and the table was rolled back to one before it; "
                "use another checkpoint"
            )

    def numbers(self, first: int, last: int) -> Sequence[int]:
        return sorted(number for number in self._snapshots() if first <= number <= last)

    def files(self, version: int) -> Sequence[RowFile]:
        with self.failures(Exception):
            snapshots = self._snapshots()
            snapshot = snapshots[version]
            if snapshot.parent_snapshot_id not in {None, *(each.snapshot_id for each in snapshots.values())}:
                raise self.removal_error(version - 1)
            kind = snapshot.summary.operation.value
            if kind == "replace":  # a compaction
                return []
            if kind != "append":
                raise self.changed(version, f"an operation {kind}, which changes rows")
            manifests = [
                manifest
                for manifest in snapshot.manifests(self._table.io)
                if manifest.added_snapshot_id == snapshot.snapshot_id
            ]
            if any(manifest.content.name != "DATA" for manifest in manifests):
                raise self.changed(version, "an append with files of deletes")
            entries = [entry for manifest in manifests for entry in manifest.fetch_manifest_entry(self._table.io)]
            return [
                self._file(entry.data_file, version)
                for entry in entries
                if entry.status == _ADDED and entry.snapshot_id in (None, snapshot.snapshot_id)
            ]

    def _snapshots(self) -> dict[int, Any]:
        """Return the snapshots of the table's current branch, by sequence number."""
        snapshots, number = {}, self._table.metadata.current_snapshot_id
        while number is not None and (snapshot := self._table.snapshot_by_id(number)) is not None:
            snapshots[int(snapshot.sequence_number)] = snapshot
            number = snapshot.parent_snapshot_id
        return snapshots

    def _file(self, file: Any, version: int) -> RowFile:
        table, name = self._table, f"{self.name}, version {version}, {file.file_path.rpartition('/')[2]}"
        schema = table.schema().as_arrow()

        def scan(columns: list[str]) -> pa.RecordBatchReader:
            from pyiceberg.expressions import AlwaysTrue
            from pyiceberg.io.pyarrow import ArrowScan
            from pyiceberg.table import FileScanTask

            selected = table.schema().select(*columns)
            reader = ArrowScan(table.metadata, table.io, selected, AlwaysTrue()).to_record_batches([FileScanTask(file)])
            # Batches have list where the schema has large_list, and a reader does not notice.
            wanted = selected.as_arrow()
            return pa.RecordBatchReader.from_batches(wanted, (batch.cast(wanted) for batch in reader))

        return RowFile(int(file.record_count), lambda _: scanned_part(name, schema, scan))
