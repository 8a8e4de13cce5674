"""The versions of a Lance dataset: the operation of each, and the fragments that it appended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.contrib.connectors.table_versions import ERRORS, RowFile, TableVersions, is_remote
from penstock.contrib.connectors.versioned_source import TableKind
from penstock.io.registry import Library
from penstock.io.sources.in_memory import scanned_part

SOURCE = TableKind(
    title="Lance",
    form="lance:URI",
    example="lance:gradients.lance",
    errors=ERRORS,
    library=Library("lance", "lance"),
    unit="a version of the dataset",
    versions=lambda uri: LanceVersions(uri),
)


# Requests end after 30 s. By default they are repeated 3 times, and pylance lists versions 6 times: 12 minutes of
# silence, which neither patience nor a signal ends. With this, only those that fail sooner are repeated: 3 minutes.
STORE_OPTIONS = {"client_retry_timeout": "20"}


def store_options(uri: str) -> dict[str, str] | None:
    """Return Lance's options of the store that has a dataset; None: this machine has it."""
    return dict(STORE_OPTIONS) if is_remote(uri) else None


class LanceVersions(TableVersions):
    """The dataset of ``lance:URI``."""

    first = 1

    def __init__(self, uri: str) -> None:
        self._uri = SOURCE.location(uri)
        super().__init__(uri, is_remote(self._uri))
        self._library = SOURCE.load()
        self._dataset: Any = None

    def _dataset_at(self, version: int | None = None) -> Any:
        return self._library.dataset(self._uri, version=version, storage_options=store_options(self._uri))

    def latest(self) -> int:
        with self._failures():
            self._dataset = self._dataset_at()
            return int(self._dataset.version)

    def creation(self) -> str | None:
        return self._transaction(self._dataset.version)

    def is_of(self, creation: str) -> bool:
        """A dataset has no id, so that the transaction of one of its versions identifies it, while it is retained."""
        version, dataset = int(creation.partition(" of version ")[2]), self._dataset
        if version in {each["version"] for each in dataset.versions()}:
            return creation == self._transaction(version)
        return version < int(dataset.version)

    def _transaction(self, version: int) -> str | None:
        with self._failures():
            transaction = self._dataset.read_transaction(version)
        return None if transaction is None else f"transaction {transaction.uuid} of version {version}"

    def files(self, version: int) -> Sequence[RowFile]:
        with self._failures():
            dataset = self._dataset_at()
            versions = {each["version"] for each in dataset.versions()}
            if version not in versions:
                raise self.removal_error(version)
            dataset = self._dataset_at(version)
            operation = dataset.read_transaction(version).operation
            kind, fragments = type(operation).__name__, dataset.get_fragments()
            if kind == "Rewrite":  # a compaction
                return []
            if kind == "Append":
                # Numbers of fragments ascend; a transaction does not have them yet.
                fragments = sorted(fragments, key=lambda each: each.fragment_id)[-len(operation.fragments) :]
            elif version - 1 in versions and _same(fragments, self._dataset_at(version - 1)):
                return []  # it changed an index or a setting
            elif (kind, version) != ("Overwrite", self.first):  # the version that creates a dataset
                raise self.changed(version, f"an operation {kind}, which changes rows")
            return [self._file(fragment, version) for fragment in fragments]

    def _file(self, fragment: Any, version: int) -> RowFile:
        name = f"{self.name}, version {version}, fragment {fragment.fragment_id}"

        def scan(columns: list[str]) -> Any:
            return fragment.scanner(columns=columns).to_reader()

        return RowFile(fragment.physical_rows, lambda _: scanned_part(name, fragment.schema, scan))

    def _failures(self) -> Any:
        return self.failures(ValueError, OSError, RuntimeError)


def _same(fragments: Sequence[Any], before: Any) -> bool:
    return [each.metadata for each in fragments] == [each.metadata for each in before.get_fragments()]
