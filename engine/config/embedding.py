"""EmbeddingConfig: what the tables and features of one engine are, wherever that was written down.

The front of this room: it holds one checked EngineConfig message and hands out views of it. Reading and writing
(files.py), the rules (validate.py), the views (specs.py) and the way from Python classes (build.py) stand beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message

from penstock.config import files
from penstock.config.build import build
from penstock.config.engine_config_pb2 import EngineConfig, GateSettings
from penstock.config.lint import Finding, lint
from penstock.config.optimizers import Optimizer
from penstock.config.specs import FeatureSpec, TableSpec, dynamic_tag, feature_specs, table_spec
from penstock.config.tables import TableConfig
from penstock.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration
from penstock.config.validate import near, validate
from penstock.errors import ConfigError


class EmbeddingConfig:
    """An immutable configuration. Make one with ``load``, ``from_proto`` or ``from_tables``.

    Its truth is a message, so what this version does not know of a binary configuration is kept and saved again.
    """

    def __init__(
        self,
        message: EngineConfig,
        schedules: Mapping[int, Callable[[], Any]] | None = None,
        initializers: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """``message`` is copied and checked; the mappings hold what only Python can: callables by tag and by table."""
        validate(message)
        self._message = EngineConfig()
        self._message.CopyFrom(message)
        self._schedules = dict(schedules or {})
        self._initializers = dict(initializers or {})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EmbeddingConfig:
        """From a file: text or binary, TPUEmbeddingConfiguration or EngineConfig. ConfigError says what is wrong."""
        message = files.read(path)
        try:
            return cls(message)
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from None

    @classmethod
    def from_proto(cls, message: Message) -> EmbeddingConfig:
        """From a message: ours, or TensorFlow's of the same name."""
        if not isinstance(message, Message):
            raise TypeError(f"from_proto needs a TPUEmbeddingConfiguration message, got {type(message).__name__}")
        kind = files.KINDS.get(message.DESCRIPTOR.name)
        if kind is None:
            raise ConfigError(
                f"expected a TPUEmbeddingConfiguration or EngineConfig message, got {message.DESCRIPTOR.full_name}"
            )
        ours = kind.FromString(message.SerializeToString(deterministic=True))
        return cls(ours if isinstance(ours, EngineConfig) else EngineConfig(tpu_embedding_configuration=ours))

    @classmethod
    def from_tables(
        cls,
        tables: Sequence[TableConfig],
        optimizer: Optimizer | None = None,
        *,
        num_required: int | None = None,
        reduction: str | None = None,
    ) -> EmbeddingConfig:
        """From Python classes, without features: enough for row streams.

        Tables keep their order; ``optimizer`` is for those without their own. Callable learning rates become dynamic
        tags, numbered by first use, and stay in ``schedules``. The TableConfigs are not changed. A table's combiner
        belongs to the features that use it, and is not kept here.
        """
        return cls(*build(tables, optimizer, num_required, reduction))

    def to_proto(self) -> TPUEmbeddingConfiguration:
        """TensorFlow's message, as it came. Without initializers, initial slot values, combiners and the gate."""
        copy = TPUEmbeddingConfiguration()
        copy.CopyFrom(self._message.tpu_embedding_configuration)
        return copy

    def to_engine_proto(self) -> EngineConfig:
        """The whole, but for callables (learning-rate schedules and initializers), which no message can hold."""
        copy = EngineConfig()
        copy.CopyFrom(self._message)
        return copy

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all of it, atomically: TensorFlow's message where that can hold it, else an EngineConfig.

        Text where the path ends in .pbtxt, .textproto, .txtpb or .txt, else binary. Schedules are not part of a
        file (a dynamic tag says that a rate comes from outside); a callable initializer is a ConfigError.
        """
        if self._initializers:
            name = min(self._initializers)
            raise ConfigError(
                f"table '{name}': its initializer is a Python callable, which a file cannot hold; "
                "use a TruncatedNormal, Uniform or Constant"
            )
        files.write(self._message, path)

    @property
    def schedules(self) -> Mapping[int, Callable[[], Any]]:
        """The callable learning rates of ``from_tables``, by tag."""
        return MappingProxyType(self._schedules)

    @property
    def table_names(self) -> tuple[str, ...]:
        """The tables by id; works whatever their optimizers are."""
        return tuple(table.name for table in self._tables)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """name -> (vocabulary_size, dim); works whatever the optimizers are."""
        return {table.name: (table.vocabulary_size, table.dimension) for table in self._tables}

    @cached_property
    def tables(self) -> tuple[TableSpec, ...]:
        """Every table, by id. ConfigError where this version cannot run one of them."""
        return tuple(self._table(index) for index in range(len(self._tables)))

    def table(self, name: str) -> TableSpec:
        """One table by its name. ConfigError where there is none, or this version cannot run it."""
        names = self.table_names
        if name not in names:
            raise ConfigError(f"no table is named '{name}'{near(name, names)}")
        return self._table(names.index(name))

    @cached_property
    def features(self) -> tuple[FeatureSpec, ...]:
        """The input features, in order; empty where the configuration has none."""
        return feature_specs(self._message)

    @cached_property
    def num_tags(self) -> int:
        """How many values each step brings with it: learning rates, and step counters."""
        tags = set()
        for table in self._tables:
            parameters = table.optimization_parameters
            tags.add(dynamic_tag(parameters))
            if parameters.frequency_aware_adagrad.HasField("step_counter"):
                tags.add(parameters.frequency_aware_adagrad.step_counter.tag)
        return len(tags - {None})

    @property
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
        """Frames that open the gate; None where the configuration does not say."""
        gate = self._message.gate
        return gate.num_required if gate.HasField("num_required") else None

    @property
    def gate_reduction(self) -> str | None:
        """ "mean" or "sum"; None where the configuration does not say."""
        return {GateSettings.MEAN: "mean", GateSettings.SUM: "sum"}.get(self._message.gate.reduction)

    def lint(self) -> list[Finding]:
        """What is legal but looks like a mistake, and what this version cannot run."""
        return lint(self._message)

    @property
    def _tables(self) -> Sequence[TPUEmbeddingConfiguration.TableDescriptor]:
        return self._message.tpu_embedding_configuration.table_descriptor

    def _table(self, index: int) -> TableSpec:
        return table_spec(self._message, index, self._schedules, self._initializers)

    def __repr__(self) -> str:
        tables = ", ".join(f"{name} {rows}x{dim}" for name, (rows, dim) in self.sizes.items())
        return f"EmbeddingConfig({tables})"
