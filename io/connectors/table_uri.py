"""The spelling of tables with versions: ``delta:URI``, ``lance:URI`` and ``iceberg:CATALOG/NAMESPACE.TABLE``."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import UsageError
from penstock.io.connectors.delta_versions import DeltaVersions
from penstock.io.connectors.iceberg_versions import IcebergVersions
from penstock.io.connectors.lance_versions import LanceVersions
from penstock.io.connectors.table_versions import TableVersions
from penstock.io.connectors.versioned_source import VersionedSource

_BY_SCHEME: dict[str, Callable[[str], TableVersions]] = {
    "delta": DeltaVersions,
    "lance": LanceVersions,
    "iceberg": IcebergVersions,
}


def versioned_source(text: str, patience_s: float) -> VersionedSource:
    """Return the source that a text names. patience_s : how long to retry while its server is gone

    Raises UsageError if it is empty, or a library is not installed.
    """
    scheme, _, rest = text.partition(":")
    if not rest:
        raise UsageError(f"{text}: expected {scheme}:{'CATALOG/NAMESPACE.TABLE' if scheme == 'iceberg' else 'URI'}")
    return VersionedSource(_BY_SCHEME[scheme](rest), patience_s)
