"""Shape inference of TensorFlow's ops, for code that is being ported from them.

Only TensorFlow's graph-time checks: the engine checks the rest when it uses the values.
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
    """Return the shape of every feature's activation, in order: its input shape and its table's dim.

    A configuration that lists no features but batch sizes has one feature per table.
    num_outputs : of a RecvTPUEmbeddingActivations op; UsageError if it is not the number of shapes
    Raises ConfigError for a configuration without features.
    """
    shapes = [(*f.input_shape, config.sizes[f.table][1]) for f in features_of(config)]
    if num_outputs is not None and num_outputs != len(shapes):
        raise UsageError(f"num_outputs: expected {len(shapes)}, one per activation, got {num_outputs}")
    return shapes


def check_learning_rate_shapes(rates: Sequence[Any]) -> None:
    """Raise UsageError unless every learning rate is a scalar."""
    for tag, rate in enumerate(rates):
        if np.ndim(rate):
            raise UsageError(f"learning rate for tag {tag}: expected a scalar, got shape {np.shape(rate)}")


def shard_rows(vocabulary_size: int, num_shards: int, shard_id: int) -> int:
    """Return the number of rows of one shard, the same for MOD and DIV. Raises UsageError for a bad or empty shard."""
    if num_shards < 1 or not 0 <= shard_id < num_shards:
        raise UsageError(f"shard_id: expected 0 <= shard_id < num_shards, got {shard_id} of {num_shards}")
    quotient, remainder = divmod(vocabulary_size, num_shards)
    rows = quotient + (shard_id < remainder)
    if not rows:
        raise UsageError(f"shard {shard_id} of {num_shards} has none of {vocabulary_size} rows")
    return rows


def retrieve_shapes(config: EmbeddingConfig, num_shards: int, shard_id: int) -> dict[str, list[Shape]]:
    """Return RetrieveAllTPUEmbeddingParameters' shapes, one per table: "parameters", "auxiliary1" to "auxiliary7".

    With gradient accumulation, the hidden accumulator is one more auxiliary. An auxiliary a table lacks is (0, 0).
    """
    shapes: dict[str, list[Shape]] = {}
    for spec in config.tables:
        whole = (shard_rows(spec.vocabulary_size, num_shards, shard_id), spec.dim)
        used = 1 + len(spec.slots) + spec.accumulate
        for index, key in enumerate(["parameters", *(f"auxiliary{n}" for n in range(1, 8))]):
            shapes.setdefault(key, []).append(whole if index < used else (0, 0))
    return shapes


def table_named(config: EmbeddingConfig, table_id: int = -1, table_name: str = "") -> str:
    """Return the table of a Load or Retrieve op, given by exactly one of id and name. Raises UsageError."""
    if (table_id >= 0) == bool(table_name):
        raise UsageError(f"give exactly one of table_id and table_name, got {table_id} and '{table_name}'")
    names = config.table_names
    if table_name not in names and not 0 <= table_id < len(names):
        raise UsageError(f"table {table_name or table_id}: the configuration has {listed(names)}")
    return table_name or names[table_id]


def check_mode(config: EmbeddingConfig) -> None:
    """Raise ConfigError if the mode is UNSPECIFIED, as ExecuteTPUEmbeddingPartitioner does."""
    if config.mode == "UNSPECIFIED":
        raise ConfigError("the configuration's mode is UNSPECIFIED; use TRAINING, INFERENCE or BACKWARD_PASS_ONLY")
