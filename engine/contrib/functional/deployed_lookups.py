"""What models to deploy share: rows as a forward pass sees them, and combiners in operations of JAX or of Keras.

An id is a number of a dense array there, and every number below 0 is no id, so that shapes are static.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from penstock.contrib.functional.embedding_tables import EmbeddingTables
from penstock.model.config.specs import WEIGHTS, FeatureSpec
from penstock.model.frames import Float32
from penstock.model.updates import Ops, quantize
from penstock.rows.bridge import Table


def forward_rows(embedding_tables: EmbeddingTables, tables: Mapping[str, Table], name: str) -> Float32:
    """Return all rows of a table in id order: through the simulated quantization, if it has one."""
    rows = embedding_tables.parameters(tables, name)[WEIGHTS]
    quantization = next(spec for spec in embedding_tables.config.tables if spec.name == name).quantization
    if quantization is None:
        return rows
    quantized = quantize(Ops(np), rows, quantization.num_buckets, quantization.lower, quantization.upper)
    return np.asarray(quantized, np.float32)


def activation_of(feature: FeatureSpec, ids: Any, weights: Any, rows_of: Callable[[Any], Any], operations: Any) -> Any:
    """Return the activation of a feature, float32: the shape of its samples (of a sequence: and positions), then dim.

    ids : integers of the feature's input shape, and for ids to combine an axis of ids more; weights : likewise, or None
    rows_of : ids → rows; operations : jax.numpy or keras.ops
    """
    is_id = ids >= 0
    rows = rows_of(operations.where(is_id, ids, 0))
    gains = operations.where(is_id, 1.0 if weights is None else weights, 0.0)
    if not feature.sequence_length and feature.combiner in ("mean", "sqrtn"):
        is_mean = feature.combiner == "mean"
        totals = operations.sum(gains if is_mean else gains * gains, axis=-1, keepdims=True)
        is_zero = operations.equal(totals, 0.0)
        totals = operations.where(is_zero, 1.0, totals)
        gains = operations.where(is_zero, 0.0, gains / (totals if is_mean else operations.sqrt(totals)))
    rows = operations.where(operations.expand_dims(is_id, -1), rows * operations.expand_dims(gains, -1), 0.0)
    return rows if feature.sequence_length else operations.sum(rows, axis=-2)
