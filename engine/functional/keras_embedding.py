"""An import path that stays, of ``penstock.contrib.functional.keras_embedding``."""

from penstock.contrib.functional.keras_embedding import Embedding, PreparedBatches, TablePart
from penstock.contrib.functional.keras_materialized import materialized

__all__ = ["Embedding", "PreparedBatches", "TablePart", "materialized"]
