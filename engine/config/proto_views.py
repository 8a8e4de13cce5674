"""Properties that are read directly from an EngineConfig, even if its optimizers cannot be run.

There are no checks here and no Python objects of tables or features; specs.py and embedding.py have those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from penstock.config.engine_config_pb2 import EngineConfig, GateSettings
from penstock.config.table_message import table_messages
from penstock.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration


class MessageView:
    """A copy of one EngineConfig message, read by name."""

    def __init__(self, message: EngineConfig) -> None:
        self._message = EngineConfig()
        self._message.CopyFrom(message)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and copy without cached properties, some of which cannot be pickled."""
        kinds = {name: kind for cls in type(self).__mro__ for name, kind in vars(cls).items()}
        return {name: value for name, value in vars(self).items() if not isinstance(kinds.get(name), cached_property)}

    @property
    def table_names(self) -> tuple[str, ...]:
        """The tables by id; works whatever their optimizers are."""
        return tuple(table.name for table in self._tables)

    @cached_property
    def sizes(self) -> Mapping[str, tuple[int, int]]:
        """name -> (vocabulary_size, dim); works whatever the optimizers are."""
        return MappingProxyType({table.name: (table.vocabulary_size, table.dimension) for table in self._tables})

    @cached_property
    def num_tags(self) -> int:
        """The number of values that each step supplies: learning rates and step counters."""
        return len({tag for table in table_messages(self._message) for tag in table.tags.values()})

    @cached_property
    def mode(self) -> str:
        """ "UNSPECIFIED", "INFERENCE", "TRAINING" or "BACKWARD_PASS_ONLY"."""
        return TPUEmbeddingConfiguration.Mode.Name(self._message.tpu_embedding_configuration.mode)

    @property
    def sharding_strategy(self) -> str:
        """ "DIV" (contiguous ranges of ids) or "MOD" (id % shards)."""
        strategy = self._message.tpu_embedding_configuration.sharding_strategy
        return "MOD" if strategy == TPUEmbeddingConfiguration.MOD else "DIV"

    @property
    def gate_num_required(self) -> int | None:
        """The number of frames that open the gate; None if the configuration does not specify it."""
        gate = self._message.gate
        return gate.num_required if gate.HasField("num_required") else None

    @property
    def gate_reduction(self) -> str | None:
        """ "mean" or "sum"; None if the configuration does not specify it."""
        return {GateSettings.MEAN: "mean", GateSettings.SUM: "sum"}.get(self._message.gate.reduction)

    @property
    def _tables(self) -> Sequence[TPUEmbeddingConfiguration.TableDescriptor]:
        return self._message.tpu_embedding_configuration.table_descriptor
