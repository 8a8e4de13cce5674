"""The shares of a job as one engine: their tables, deltas, reports and snapshots."""

from penstock.joining.whole_tables import WholeTables, mapped_array

__all__ = ["WholeTables", "mapped_array"]
