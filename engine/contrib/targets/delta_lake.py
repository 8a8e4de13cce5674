"""A target in a Delta Lake table with the columns ``table``, ``id`` and ``row`` (docs/follow.md).

The table's description names the job. The information of the commit that wrote the rows names the job, the epoch and
the step: that of a version is found by following ``RESTORE`` back to the version that it restored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

import penstock.io.proxies as proxies
from penstock.base.errors import StateError, short
from penstock.base.filesystem.state_files import parsed_json
from penstock.contrib.connectors.table_versions import store_options
from penstock.io.error_tables import FILES, OBJECT_STORES, UNREACHABLE, ErrorRow, ErrorTable
from penstock.io.registry import Library
from penstock.serving.followers.row_table import row_schema, row_table
from penstock.serving.followers.target import FollowedJob, Stored, TableRows, Target, failures
from penstock.serving.followers.target_kinds import TargetKind

ERRORS = ErrorTable(
    ErrorRow(
        "the table has features or columns that the library cannot write",
        5,
        "DeltaProtocolError SchemaMismatchError",
        advice="use another table, or a newer deltalake",
    ),
    ErrorRow("another writer has committed first: the table is read again", None, "CommitFailedError"),
    *FILES,
    *OBJECT_STORES,
    UNREACHABLE,
    uses_proxies=True,
)
TARGET = TargetKind(
    title="Delta Lake",
    form="delta:URI",
    example="delta:rows.delta",
    errors=ERRORS,
    library=Library("deltalake", "delta"),
    holds="a Delta Lake table of all rows",
    transaction="a version of the table",
    open=lambda uri: DeltaLake(uri),
    interval_s=10.0,
)
STORED = "penstock"
# Operations of others that change no row.
_KEEPING = {"OPTIMIZE", "VACUUM START", "VACUUM END", "SET TBLPROPERTIES", "UPDATE TABLE METADATA"}
# What deltalake says of tables that it cannot change, whenever it tries.
_UNWRITABLE = re.compile(r"DeltaProtocolError|Unsupported table features|is append-only")
# Commits that are read at first, in search of the one that wrote the rows.
_COMMITS = 8
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class DeltaLake(Target):
    """The table of ``delta:URI``. Ids of uint64 keys are stored as the int64 of the same bits: Delta has no uint64."""

    takes_encoded = False

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self._uri = TARGET.location(uri)
        self._library = TARGET.load()
        proxies.exempt_loopback()

    def stored(self) -> Stored | None:
        return self._stored(self._table())

    def replace(self, new: Stored, tables: Sequence[TableRows], before: Stored | None) -> None:
        with self._writable():
            table = self._compared(new.job, before)
            self._library.write_deltalake(
                self._uri if table is None else table,
                row_table(tables, row_schema(new.job, pa.int64(), fixed=False)),
                mode="error" if table is None else "overwrite",
                schema_mode=None if table is None else "overwrite",
                partition_by=["table"],
                description=_description(new.job),
                commit_properties=self._commit(new),
                storage_options=store_options(self._uri) if table is None else None,
            )

    def apply(self, new: Stored, changes: Sequence[TableRows], before: Stored) -> None:
        schema = row_schema(new.job, pa.int64(), fixed=False)
        with self._writable():
            merge = self._compared(new.job, before).merge(
                row_table(changes, schema, with_removed=True),
                "kept.table = new.table AND kept.id = new.id",
                source_alias="new",
                target_alias="kept",
                commit_properties=self._commit(new),
            )
            merge = merge.when_matched_delete("new.row IS NULL").when_matched_update_all("new.row IS NOT NULL")
            merge.when_not_matched_insert_all("new.row IS NOT NULL").execute()

    def _compared(self, job: FollowedJob, before: Stored | None) -> Any:
        """Return the table at the version that was compared, which the next one has to follow; None if there is none.

        Its description names the job first, in a commit that keeps the rows.
        """
        table = self._table()
        self.compare(self._stored(table), before)
        if table is not None and self._origin(table) != job.encoded():
            table.alter.set_table_description(_description(job))
            table = self._table()
            self.compare(self._stored(table), before)
        return table

    def _table(self, version: int | datetime | None = None) -> Any:
        """Return the table at a version; None if there is none."""
        try:
            table = self._library.DeltaTable(self._uri, storage_options=store_options(self._uri))
        except self._library.exceptions.TableNotFoundError:
            return None
        if version is not None:
            table.load_as_version(version)
        return table

    def _stored(self, table: Any) -> Stored | None:
        """Return what the rows of a table are, None if that cannot be determined. Raises StateError."""
        if table is None:
            return None
        self._origin(table)
        version = self._written(table)
        if version is None:
            return None
        text = self._information(table, version).get(STORED)
        return None if text is None else Stored.decoded(parsed_json(text), self.name)

    def _written(self, table: Any) -> int | None:
        """Return the version that wrote the rows of a table; None if that cannot be determined."""
        version: int | None = table.version()
        while version is not None:
            commit = self._information(table, version)
            operation = commit.get("operation")
            if STORED in commit or operation not in {*_KEEPING, "RESTORE"}:
                return version if commit else None
            version = self._restored(version, commit["operationParameters"]) if operation == "RESTORE" else version - 1
        return None

    def _restored(self, version: int, parameters: dict[str, str]) -> int | None:
        """Return the version that one restored: its files are those that the parameters lead to."""
        number, milliseconds = (int(parameters.get(name, -1)) for name in ("version", "datetime"))
        with suppress(self._library.exceptions.DeltaError):  # the log has lost that version
            restored = self._table(number if number >= 0 else _EPOCH + timedelta(milliseconds=milliseconds))
            is_whole = set(restored.file_uris()) == set(self._table(version).file_uris())
            return restored.version() if is_whole and restored.version() < version else None
        return None

    def _information(self, table: Any, version: int) -> dict[str, Any]:
        """Return the information of a commit, empty if the log no longer has it."""
        limit = max(_COMMITS, 2 * (table.version() - version + 1))
        return next((commit for commit in table.history(limit) if commit["version"] == version), {})

    def _origin(self, table: Any) -> str:
        """Return the job that the description of a table names, as text. Raises StateError."""
        try:
            fields = parsed_json(table.metadata().description or "")
            job = json.dumps(fields["penstock"], separators=(",", ":"))
        except (ValueError, TypeError, KeyError):
            raise StateError(f"{self.name}: the table was not written by penstock follow; use another one") from None
        FollowedJob.decoded(job, self.name)
        return job

    def _commit(self, new: Stored) -> Any:
        """Return the properties of a commit. It fails if another one has come since the table was read."""
        return self._library.CommitProperties({STORED: json.dumps(new.encoded())}, max_commit_retries=0)

    @contextmanager
    def _writable(self) -> Iterator[None]:
        """Convert the errors of a table that another writer gave features or properties that a commit breaks."""
        try:
            yield
        except self._library.exceptions.DeltaError as error:
            if not _UNWRITABLE.search(f"{type(error).__name__}: {error}"):
                raise
            line = (str(error).strip().splitlines() or [""])[0]
            raise StateError(
                f"{self.name}: deltalake cannot write it any more: {short(line)}; another writer changed its features "
                "or properties: take them back, or use another table"
            ) from error

    def failures(self) -> Any:
        return failures(self.name, ERRORS, self._library.exceptions.DeltaError)


def _description(job: FollowedJob) -> str:
    return json.dumps({"penstock": json.loads(job.encoded())}, separators=(",", ":"))
