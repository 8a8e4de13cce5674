"""Embedding tables inside a model's own training step, in JAX, Flax and Keras."""

from penstock.contrib.functional.embedding_tables import EmbeddingTables

__all__ = ["EmbeddingTables"]
