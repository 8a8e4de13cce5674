"""An import path that stays, of ``penstock.contrib.functional.nnx_embedding``."""

from penstock.contrib.functional.nnx_embedding import Embedding, EmbeddingTable

__all__ = ["Embedding", "EmbeddingTable"]
