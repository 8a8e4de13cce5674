"""A target in a Lance dataset with the columns ``table``, ``id`` and ``row`` (docs/follow.md).

The schema's metadata names the job. Properties of the transaction that wrote the rows are the epoch and the step: that
of a version is found by following each ``restore`` back to the version that it restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import penstock.io.proxies as proxies
from penstock.base.errors import StateError
from penstock.contrib.connectors.lance_versions import store_options
from penstock.io.error_tables import FILES, OBJECT_STORES, UNREACHABLE, ErrorRow, ErrorTable
from penstock.io.registry import Library
from penstock.serving.followers.row_table import row_schema, row_table
from penstock.serving.followers.target import FollowedJob, Stored, TableRows, Target, failures
from penstock.serving.followers.target_kinds import TargetKind

ERRORS = ErrorTable(
    ErrorRow(
        "another writer has committed first: the dataset is read again",
        None,
        "",
        "commit conflict|conflicting|concurrent",
    ),
    *FILES,
    *OBJECT_STORES,
    UNREACHABLE,
    uses_proxies=True,
)
TARGET = TargetKind(
    title="Lance",
    form="lance:URI",
    example="lance:rows.lance",
    errors=ERRORS,
    library=Library("lance", "lance"),
    holds="a dataset of all rows",
    transaction="a version of the dataset",
    open=lambda uri: LanceDataset(uri),
    interval_s=10.0,
)
JOB, EPOCH, STEP = "penstock.job", "penstock.epoch", "penstock.step"


class LanceDataset(Target):
    """The dataset of ``lance:URI``. Rows are lists of one size if all tables have the same dim."""

    takes_encoded = False

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self._uri = TARGET.location(uri)
        self._library = TARGET.load()
        proxies.exempt_loopback()

    def stored(self) -> Stored | None:
        return self._stored(self._dataset())

    def replace(self, new: Stored, tables: Sequence[TableRows], before: Stored | None) -> None:
        dataset = self._dataset()
        self.compare(self._stored(dataset), before)
        self._overwrite(dataset, new, tables)

    def apply(self, new: Stored, changes: Sequence[TableRows], before: Stored) -> None:
        dataset = self._dataset()
        self.compare(self._stored(dataset), before)
        fragments = [fragment.metadata for fragment in dataset.get_fragments()]
        if not fragments:
            self._overwrite(dataset, new, changes)
            return
        merge = dataset.merge_insert(["table", "id"]).when_matched_update_all().when_not_matched_insert_all()
        if gone := _any_of(changes, unsigned=new.job.id_column_type() == "uint64"):
            merge = merge.when_not_matched_by_source_delete(gone)
        transaction, _ = merge.execute_uncommitted(row_table(changes, dataset.schema))
        # As if it changed every fragment: Lance merges concurrent transactions that change different ones.
        update = transaction.operation
        changed = {*update.removed_fragment_ids, *(fragment.id for fragment in update.updated_fragments)}
        others = [fragment for fragment in fragments if fragment.id not in changed]
        update.updated_fragments = [*update.updated_fragments, *others]
        self._commit(transaction, new)

    def _overwrite(self, dataset: Any, new: Stored, tables: Sequence[TableRows]) -> None:
        schema = row_schema(new.job, new.job.id_column_type(), fixed=True).with_metadata({JOB: new.job.encoded()})
        rows = row_table(tables, schema)
        if dataset is None:
            self._library.write_dataset(
                rows,
                self._uri,
                schema,
                storage_options=store_options(self._uri),
                transaction_properties=_properties(new),
            )
            return
        fragments = self._library.fragment.write_fragments(rows, dataset, schema, mode="overwrite")
        overwriting = self._library.LanceOperation.Overwrite(schema, fragments)
        self._commit(self._library.Transaction(dataset.version, overwriting), new)

    def _commit(self, transaction: Any, new: Stored) -> None:
        """Commit a transaction. It fails if another one has changed rows since the dataset was read."""
        transaction.transaction_properties = _properties(new)
        options = store_options(self._uri)
        self._library.LanceDataset.commit(self._uri, transaction, storage_options=options, max_retries=0)

    def _stored(self, dataset: Any) -> Stored | None:
        """Return what the rows of a dataset are, None if that cannot be determined. Raises StateError."""
        if dataset is None:
            return None
        job = self._job_of(dataset)
        FollowedJob.decoded(job, self.name)
        version: int | None = dataset.version
        while version is not None:
            transaction = self._transaction(dataset, version)
            properties = (transaction and transaction.transaction_properties) or {}
            if STEP in properties:
                fields = {"job": job, "epoch": properties[EPOCH], "step": properties[STEP]}
                return Stored.decoded(fields, self.name) if self._is_whole(dataset, version, transaction) else None
            if transaction is not None and isinstance(transaction.operation, self._library.LanceOperation.Restore):
                version = transaction.operation.version
            else:
                version = version - 1 if self._keeps_rows(dataset, version, transaction) else None
        return None

    def _transaction(self, dataset: Any, version: int) -> Any:
        """Return the transaction of a version; None if the dataset no longer has it."""
        try:
            return dataset.read_transaction(version) if version else None
        except (ValueError, OSError) as error:
            if "not found" in str(error).lower():
                return None
            raise

    def _is_whole(self, dataset: Any, version: int, transaction: Any) -> bool:
        """Return whether a transaction has changed the rows that it read: Lance lets others come in between."""
        if isinstance(transaction.operation, self._library.LanceOperation.Overwrite):
            return True
        between = range(transaction.read_version + 1, version)
        return all(self._keeps_rows(dataset, number, self._transaction(dataset, number)) for number in between)

    def _keeps_rows(self, dataset: Any, version: int, transaction: Any) -> bool:
        kinds = self._library.LanceOperation
        if transaction is None or isinstance(transaction.operation, (kinds.Rewrite, kinds.CreateIndex)):
            return transaction is not None
        if type(transaction.operation) not in (kinds.BaseOperation, kinds.UpdateConfig):  # the former: Lance's own
            return False
        here, before = (dataset.checkout_version(number).get_fragments() for number in (version, version - 1))
        return [fragment.metadata for fragment in here] == [fragment.metadata for fragment in before]

    def _dataset(self) -> Any:
        try:
            return self._library.dataset(self._uri, storage_options=store_options(self._uri))
        except ValueError as error:  # pylance has no class for it
            if "not found" in str(error).lower():
                return None
            raise

    def _job_of(self, dataset: Any) -> str:
        job: bytes | None = (dataset.schema.metadata or {}).get(JOB.encode())
        if job is None:
            raise StateError(f"{self.name}: the dataset was not written by penstock follow; use another one")
        return job.decode()

    def failures(self) -> Any:
        return failures(self.name, ERRORS, ValueError, RuntimeError)


def _properties(new: Stored) -> dict[str, str]:
    return {EPOCH: new.version.epoch, STEP: str(new.version.step)}


def _any_of(changes: Sequence[TableRows], unsigned: bool) -> str:
    """Return the SQL condition of the removed rows."""
    conditions = []
    for rows in changes:
        if len(rows.removed):
            ids = ",".join(map(str, rows.removed.view("uint64" if unsigned else rows.removed.dtype).tolist()))
            name = rows.table.replace("'", "''")
            conditions.append(f"(`table` = '{name}' AND id IN ({ids}))")
    return " OR ".join(conditions)
