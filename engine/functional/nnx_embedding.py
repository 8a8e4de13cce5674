"""An import path that stays, of ``penstock.contrib.functional.nnx_embedding``."""

from penstock.contrib.functional.nnx_embedding import Embedding, EmbeddingTable
from penstock.contrib.functional.nnx_materialized import materialized

__all__ = ["Embedding", "EmbeddingTable", "materialized"]
