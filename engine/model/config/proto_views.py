"""Views of the tables of an EngineConfig, which work even if its optimizers cannot be run.

There are no checks here and no Python objects of tables or features; specs.py and contents.py have those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from penstock.model.config.engine_config_pb2 import EngineConfig, TableSettings
from penstock.model.config.optimization_parameters_pb2 import (
    ClippingLimits,
    GradientAccumulationStatus,
    OptimizationParameters,
)
from penstock.model.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration


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
        """The scalar fields of the optimizer's message; of penstock's own optimizers, those that are set."""
        theirs, ours = self.parameters.WhichOneof("parameters"), self.settings.WhichOneof("optimizer")
        if theirs is not None:
            return set_numbers(getattr(self.parameters, theirs))
        return {} if ours is None else set_numbers(getattr(self.settings, ours))

    @property
    def accumulates(self) -> bool:
        """Whether gradients are summed before the update: UNSPECIFIED means yes."""
        return self.parameters.gradient_accumulation_status != GradientAccumulationStatus.DISABLED

    @property
    def is_trainable(self) -> bool:
        return self.settings.trainable or not self.settings.HasField("trainable")

    @property
    def is_never_trained(self) -> bool:
        return not self.is_trainable and self.until_step is None

    @property
    def until_step(self) -> int | None:
        """The step from which on a table that is not trainable is; None: never."""
        return self.settings.until_step if self.settings.HasField("until_step") and not self.is_trainable else None

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


def set_numbers(message: Message) -> dict[str, Any]:
    """Return the scalar fields of an optimizer's message, without optional ones that are not set."""
    fields = [field for field in message.DESCRIPTOR.fields if field.message_type is None]
    return {f.name: getattr(message, f.name) for f in fields if not f.has_presence or message.HasField(f.name)}


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
