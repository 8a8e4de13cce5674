"""A target in a Delta Lake table with the columns ``table``, ``id`` and ``row`` (docs/follow.md).

The table's description names the job and an identifier of this target; the step is the version of the Delta
transaction of that identifier, in the same commit as the rows.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from penstock.errors import StateError, UsageError
from penstock.filesystem.state_files import parsed_json
from penstock.io.flight import Delta
from penstock.io.optional import library
from penstock.io.targets.changes import changes_of
from penstock.io.targets.row_table import row_schema, row_table
from penstock.io.targets.target import Job, Stored, TableRows, Target, failures


class DeltaLake(Target):
    """The table of ``delta:URI``. Ids of uint64 keys are stored as the int64 of the same bits: Delta has no uint64."""

    interval_s = 10.0

    def __init__(self, uri: str) -> None:
        super().__init__(f"delta:{uri}")
        if not uri:
            raise UsageError("delta:: expected delta:URI")
        self._uri = uri
        self._library = library("deltalake", "delta", "delta:")

    def stored(self) -> Stored | None:
        with self._failures():
            table = self._table()
            if table is None:
                return None
            job, writer = self._origin(table)
            step = table.transaction_version(writer)
        return None if step is None else Stored(job, step)

    def replace(self, job: Job, tables: Sequence[TableRows], step: int) -> None:
        with self._failures():
            table = self._table()
            writer = secrets.token_hex(8)
            description = json.dumps({"penstock": json.loads(job.encoded()), "writer": writer}, separators=(",", ":"))
            if table is not None:
                self._origin(table)
                # From here on the table has no step, until the next commit.
                table.alter.set_table_description(description)
            self._library.write_deltalake(
                self._uri,
                row_table(tables, row_schema(job, pa.int64(), fixed=False)),
                mode="overwrite",
                schema_mode="overwrite",
                partition_by=["table"],
                description=description,
                commit_properties=self._commit(writer, step),
            )

    def apply(self, job: Job, deltas: Sequence[Delta], step: int) -> None:
        with self._failures():
            table = self._table()
            if table is None:
                raise OSError("the table was removed")
            _, writer = self._origin(table)
            changed = row_table(changes_of(deltas, job), row_schema(job, pa.int64(), fixed=False), with_removed=True)
            merge = table.merge(
                changed,
                "kept.table = new.table AND kept.id = new.id",
                source_alias="new",
                target_alias="kept",
                commit_properties=self._commit(writer, step),
            )
            merge = merge.when_matched_delete("new.row IS NULL").when_matched_update_all("new.row IS NOT NULL")
            merge.when_not_matched_insert_all("new.row IS NOT NULL").execute()

    def _table(self) -> Any:
        try:
            return self._library.DeltaTable(self._uri)
        except self._library.exceptions.TableNotFoundError:
            return None

    def _origin(self, table: Any) -> tuple[Job, str]:
        """Return the job of a table, and the identifier of its transactions. Raises StateError."""
        try:
            description = parsed_json(table.metadata().description or "")
            return Job.decoded(json.dumps(description["penstock"]), self.name), str(description["writer"])
        except (ValueError, TypeError, KeyError):
            raise StateError(f"{self.name}: the table was not written by penstock follow; use another one") from None

    def _commit(self, writer: str, step: int) -> Any:
        return self._library.CommitProperties(app_transactions=[self._library.Transaction(writer, step)])

    def _failures(self) -> Any:
        return failures(self.name, self._library.exceptions.DeltaError)
