"""What TensorFlow's ops say of shapes before anything runs, for code that is being moved over from them.

The checks of the graph, not more: what they leave to the engine is checked where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.activations.nesting import features_of
from penstock.config.embedding import EmbeddingConfig
from penstock.errors import ConfigError, UsageError, listed

Shape = tuple[int, ...]


def activation_shapes(config: EmbeddingConfig, num_outputs: int | None = None) -> list[Shape]:
    """Of every feature, in order: its input shape and its table's dim. Without features: one per table.

    num_outputs : what a RecvTPUEmbeddingActivations op was told; UsageError where that is not their number
    """
    shapes = [(*f.input_shape, config.sizes[f.table][1]) for f in features_of(config)]
    if num_outputs is not None and num_outputs != len(shapes):
        raise UsageError(f"num_outputs: expected {len(shapes)}, one per activation, got {num_outputs}")
    return shapes


def check_learning_rate_shapes(rates: Sequence[Any]) -> None:
    """Every learning rate is a scalar. UsageError if not."""
    for tag, rate in enumerate(rates):
        if np.ndim(rate):
            raise UsageError(f"learning rate for tag {tag}: expected a scalar, got shape {np.shape(rate)}")


def shard_rows(vocabulary_size: int, num_shards: int, shard_id: int) -> int:
    """Rows of one shard, the same for MOD and DIV. UsageError where there is no such shard or it is empty."""
    if num_shards < 1 or not 0 <= shard_id < num_shards:
        raise UsageError(f"shard_id: expected 0 <= shard_id < num_shards, got {shard_id} of {num_shards}")
    quotient, remainder = divmod(vocabulary_size, num_shards)
    rows = quotient + (shard_id < remainder)
    if not rows:
        raise UsageError(f"shard {shard_id} of {num_shards} has none of {vocabulary_size} rows")
    return rows


def retrieve_shapes(config: EmbeddingConfig, num_shards: int, shard_id: int) -> dict[str, list[Shape]]:
    """RetrieveAllTPUEmbeddingParameters: "parameters" and "auxiliary1" to "auxiliary7", a shape per table.

    Where gradients are accumulated the hidden accumulator is one more auxiliary; one that a table has not is (0, 0).
    """
    shapes: dict[str, list[Shape]] = {}
    for spec in config.tables:
        whole = (shard_rows(spec.vocabulary_size, num_shards, shard_id), spec.dim)
        used = 1 + len(spec.slots) + spec.accumulate
        for index, key in enumerate(["parameters", *(f"auxiliary{n}" for n in range(1, 8))]):
            shapes.setdefault(key, []).append(whole if index < used else (0, 0))
    return shapes


def table_named(config: EmbeddingConfig, table_id: int = -1, table_name: str = "") -> str:
    """The table that a Load or Retrieve op means: exactly one of id and name is given. UsageError if not."""
    if (table_id >= 0) == bool(table_name):
        raise UsageError(f"give exactly one of table_id and table_name, got {table_id} and '{table_name}'")
    names = config.table_names
    if table_name not in names and not 0 <= table_id < len(names):
        raise UsageError(f"table {table_name or table_id}: the configuration has {listed(names)}")
    return table_name or names[table_id]


def check_mode(config: EmbeddingConfig) -> None:
    """What ExecuteTPUEmbeddingPartitioner refuses: a configuration whose mode is UNSPECIFIED."""
    if config.mode == "UNSPECIFIED":
        raise ConfigError("the configuration's mode is UNSPECIFIED; use TRAINING, INFERENCE or BACKWARD_PASS_ONLY")
