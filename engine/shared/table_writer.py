"""An import path that stays, of ``penstock.serving.shared.table_writer``."""

from penstock.serving.shared.table_writer import SharedTable, SharedWriter

__all__ = ["SharedTable", "SharedWriter"]
