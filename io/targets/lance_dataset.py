"""A target in a Lance dataset with the columns ``table``, ``id`` and ``row`` (docs/follow.md).

The schema's metadata names the job; a property of the transaction that wrote the rows is the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.errors import StateError, UsageError
from penstock.io.flight import Delta
from penstock.io.optional import library
from penstock.io.targets.changes import changes_of
from penstock.io.targets.row_table import row_schema, row_table
from penstock.io.targets.target import Job, Stored, TableRows, Target, failures

JOB, STEP = "penstock.job", "penstock.step"


class LanceDataset(Target):
    """The dataset of ``lance:URI``. Rows are lists of one size if all tables have the same dim."""

    interval_s = 10.0

    def __init__(self, uri: str) -> None:
        super().__init__(f"lance:{uri}")
        if not uri:
            raise UsageError("lance:: expected lance:URI")
        self._uri = uri
        self._library = library("lance", "lance", "lance:")

    def stored(self) -> Stored | None:
        with self._failures():
            dataset = self._dataset()
            if dataset is None:
                return None
            job = Job.decoded(self._job_of(dataset), self.name)
            step = next((of[STEP] for of in _properties(dataset) if STEP in of), None)
        return None if step is None else Stored(job, int(step))

    def replace(self, job: Job, tables: Sequence[TableRows], step: int) -> None:
        schema = row_schema(job, job.id_column_type(), fixed=True).with_metadata({JOB: job.encoded()})
        with self._failures():
            dataset = self._dataset()
            if dataset is not None:
                self._job_of(dataset)
            self._library.write_dataset(
                row_table(tables, schema),
                self._uri,
                schema,
                mode="create" if dataset is None else "overwrite",
                transaction_properties={STEP: str(step)},
            )

    def apply(self, job: Job, deltas: Sequence[Delta], step: int) -> None:
        with self._failures():
            dataset = self._dataset()
            if dataset is None:
                raise OSError("the dataset was removed")
            changes = changes_of(deltas, job)
            merge = dataset.merge_insert(["table", "id"]).when_matched_update_all().when_not_matched_insert_all()
            if gone := _any_of(changes, unsigned=job.id_column_type() == "uint64"):
                merge = merge.when_not_matched_by_source_delete(gone)
            transaction, _ = merge.execute_uncommitted(row_table(changes, dataset.schema))
            transaction.transaction_properties = {STEP: str(step)}
            self._library.LanceDataset.commit(self._uri, transaction)

    def _dataset(self) -> Any:
        try:
            return self._library.dataset(self._uri)
        except ValueError as error:  # pylance has no class for it
            if "not found" in str(error).lower():
                return None
            raise

    def _job_of(self, dataset: Any) -> bytes:
        found: bytes | None = (dataset.schema.metadata or {}).get(JOB.encode())
        if found is None:
            raise StateError(f"{self.name}: the dataset was not written by penstock follow; use another one")
        return found

    def _failures(self) -> Any:
        return failures(self.name, ValueError, RuntimeError)


def _properties(dataset: Any) -> Any:
    """Yield the properties of the last transactions, newest first: others may have compacted the dataset since."""
    for transaction in dataset.get_transactions(dataset.version):
        yield (transaction and transaction.transaction_properties) or {}


def _any_of(changes: Sequence[TableRows], unsigned: bool) -> str:
    """Return the SQL condition of the removed rows."""
    conditions = []
    for of in changes:
        if len(of.removed):
            ids = ",".join(map(str, of.removed.view("uint64" if unsigned else of.removed.dtype).tolist()))
            name = of.table.replace("'", "''")
            conditions.append(f"(`table` = '{name}' AND id IN ({ids}))")
    return " OR ".join(conditions)
