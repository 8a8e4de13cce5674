"""Views of an EngineConfig, of the whole and of one table, which work even if its optimizers cannot be run.

There are no checks here and no Python objects of tables or features; specs.py and embedding.py have those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from penstock.model.config.engine_config_pb2 import DynamicSettings, EngineConfig, GateSettings, TableSettings
from penstock.model.config.id_ranges import ANY_INT64, ANY_UINT64
from penstock.model.config.optimization_parameters_pb2 import (
    ClippingLimits,
    GradientAccumulationStatus,
    OptimizationParameters,
)
from penstock.model.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration
from penstock.model.gate_policy import AHEAD, GatePolicy


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
    def id_ranges(self) -> Mapping[str, tuple[int, int]]:
        """name -> (vocabulary_size, dim), with ANY_INT64 or ANY_UINT64 for the keys of a dynamic table."""
        ranges = dict(self.sizes)
        for settings in self._message.table:
            if settings.HasField("dynamic") and settings.name in ranges:
                is_unsigned = settings.dynamic.key_type == DynamicSettings.UINT64
                ranges[settings.name] = ANY_UINT64 if is_unsigned else ANY_INT64, ranges[settings.name][1]
        return MappingProxyType(ranges)

    @cached_property
    def needs_time(self) -> bool:
        """Whether the clock of a dynamic table is the time of the stream's rows."""
        settings = [table.dynamic for table in self._message.table if table.HasField("dynamic")]
        return any(dynamic.expire.clock == DynamicSettings.Expire.TIME for dynamic in settings)

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
    def gate_policy(self) -> GatePolicy:
        """What opens the gate, as far as the configuration specifies it."""
        gate, rounds = self._message.gate, self._message.gate.rounds
        if not gate.HasField("rounds"):
            return GatePolicy(self.gate_num_required or 1, gate.max_staleness)
        workers = rounds.workers if rounds.HasField("workers") else tuple(rounds.names)
        count = workers if isinstance(workers, int) else len(workers)
        return GatePolicy(count, 0, workers, rounds.ahead if rounds.HasField("ahead") else AHEAD)

    @property
    def gate_reduction(self) -> str | None:
        """ "mean" or "sum"; None if the configuration does not specify it."""
        return {GateSettings.MEAN: "mean", GateSettings.SUM: "sum"}.get(self._message.gate.reduction)

    @property
    def columns(self) -> dict[str, str]:
        """Role → name of a stream's column, where it has another name than the role."""
        return {column.role: column.name for column in self._message.columns}

    @property
    def _tables(self) -> Sequence[TPUEmbeddingConfiguration.TableDescriptor]:
        return self._message.tpu_embedding_configuration.table_descriptor


@dataclass(frozen=True)
class TableMessage:
    """One table of an EngineConfig.

    index : in table_descriptor
    settings : empty if the table has none; settings_index is then None
    """

    index: int
    descriptor: TPUEmbeddingConfiguration.TableDescriptor
    settings: TableSettings
    settings_index: int | None

    @property
    def name(self) -> str:
        return self.descriptor.name

    @property
    def parameters(self) -> OptimizationParameters:
        return self.descriptor.optimization_parameters

    @property
    def algorithm(self) -> str:
        """The optimizer's field: a member of OptimizationParameters, or one of penstock's; "" if there is none."""
        return self.parameters.WhichOneof("parameters") or self.settings.WhichOneof("optimizer") or ""

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """The scalar fields of the optimizer's message; empty for penstock's own optimizers."""
        member = self.parameters.WhichOneof("parameters")
        if member is None:
            return {}
        own = getattr(self.parameters, member)
        return {field.name: getattr(own, field.name) for field in own.DESCRIPTOR.fields if field.message_type is None}

    @property
    def accumulates(self) -> bool:
        """Whether gradients are summed before the update: UNSPECIFIED means yes."""
        return self.parameters.gradient_accumulation_status != GradientAccumulationStatus.DISABLED

    @property
    def tag(self) -> int | None:
        """The tag of a dynamic rate, None for a constant one. Presence decides: tag 0 is an empty message."""
        rate = self.parameters.learning_rate
        return rate.dynamic.tag if rate.WhichOneof("learning_rate") == "dynamic" else None

    @property
    def tags(self) -> dict[str, int]:
        """The tags of all dynamic inputs, by field of the optimization parameters."""
        counter = self.parameters.frequency_aware_adagrad
        tags = {} if self.tag is None else {"learning_rate.dynamic.tag": self.tag}
        if counter.HasField("step_counter"):
            tags["frequency_aware_adagrad.step_counter.tag"] = counter.step_counter.tag
        return tags

    @property
    def initial_values(self) -> dict[str, float]:
        """The initial values that the settings specify, by slot."""
        return {slot.name: slot.initial_value for slot in self.settings.slot if slot.HasField("initial_value")}


def table_messages(message: EngineConfig) -> list[TableMessage]:
    """Return every table of ``message``; the first settings of a table's name are its settings."""
    by_name: dict[str, int] = {}
    for index, settings in enumerate(message.table):
        by_name.setdefault(settings.name, index)
    return [
        TableMessage(index, table, message.table[number] if number is not None else TableSettings(), number)
        for index, table in enumerate(message.tpu_embedding_configuration.table_descriptor)
        for number in (by_name.get(table.name),)
    ]


def read_limits(limits: ClippingLimits) -> tuple[float | None, float | None]:
    """Return (lower, upper) of a limits message; None for an open side."""
    lower = limits.lower.value if limits.HasField("lower") else None
    upper = limits.upper.value if limits.HasField("upper") else None
    return lower, upper
