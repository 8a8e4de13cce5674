"""The shares of a job as one engine: their tables, deltas, reports and snapshots."""

from penstock.joining.whole_tables import WholeTables

__all__ = ["WholeTables"]
