"""EmbeddingConfig: the tables and features of one engine, from a file, a message or Python classes.

The front of this room: it holds one EngineConfig message and hands out views of it. Reading and writing (files.py),
the rules (validate.py, lint.py), the views (views.py, specs.py) and the way from Python classes (build.py) stand
beside it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from google.protobuf.message import Message

from penstock.config import text_format
from penstock.config.build import build_tables, write_gate
from penstock.config.build_features import Strategy, build_features
from penstock.config.engine_config_pb2 import EngineConfig
from penstock.config.features import FeatureConfig
from penstock.config.lint import lint
from penstock.config.lint.findings import Finding, near
from penstock.config.lint.proto_rules import validate
from penstock.config.lint.source_text import Scan
from penstock.config.optimizers import Optimizer
from penstock.config.proto_views import MessageView
from penstock.config.specs import FeatureSpec, PythonPart, TableSpec, feature_specs, optimizer_of, table_spec
from penstock.config.tables import TableConfig
from penstock.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration
from penstock.errors import ConfigError

Features = FeatureConfig | Sequence[Any] | Mapping[Any, Any]


class EmbeddingConfig(MessageView):
    """An immutable configuration. Make one with ``load``, ``from_proto``, ``from_features`` or ``from_tables``.

    Its truth is a message, so what this version does not know of a binary configuration is kept and saved again.
    """

    def __init__(self, message: EngineConfig, part: PythonPart | None = None, scan: Scan | None = None) -> None:
        """``message`` is copied, not checked; ``part`` is what only Python can hold, ``scan`` of a text it is from."""
        super().__init__(message)
        self._part = part or PythonPart({}, {}, {}, scan.numbers if scan is not None else {})
        self._scan = scan

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EmbeddingConfig:
        """From a file: text or binary, TPUEmbeddingConfiguration or EngineConfig. ConfigError says what is wrong."""
        message, scan = text_format.read(path)
        try:
            validate(message)
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from None
        return cls(message, scan=scan)

    @classmethod
    def check(cls, path: str | os.PathLike[str]) -> tuple[EmbeddingConfig | None, list[Finding]]:
        """Lint a file, also one that ``load`` refuses: (the configuration or None, all findings).

        ConfigError only for a file that does not parse.
        """
        message, scan = text_format.read(path)
        config = cls(message, scan=scan)
        findings = config.lint()
        try:
            validate(message)
        except ConfigError:
            return None, findings
        return config, findings

    @classmethod
    def from_proto(cls, message: Message) -> EmbeddingConfig:
        """From a message: ours, or TensorFlow's of the same name."""
        if not isinstance(message, Message):
            raise TypeError(f"from_proto needs a TPUEmbeddingConfiguration message, got {type(message).__name__}")
        kind = text_format.KINDS.get(message.DESCRIPTOR.name)
        if kind is None:
            raise ConfigError(
                f"expected a TPUEmbeddingConfiguration or EngineConfig message, got {message.DESCRIPTOR.full_name}"
            )
        ours = kind.FromString(message.SerializeToString(deterministic=True))
        whole = ours if isinstance(ours, EngineConfig) else EngineConfig(tpu_embedding_configuration=ours)
        validate(whole)
        return cls(whole)

    @classmethod
    def from_features(
        cls,
        feature_config: Features,
        batch_size: int | None = None,
        optimizer: Optimizer | None = None,
        *,
        num_hosts: int = 1,
        num_replicas: int = 1,
        num_cores_per_replica: int | None = None,
        per_replica_input_shapes: Any = None,
        pipeline_execution_with_tensor_core: bool = False,
        per_replica_batch_size: int | None = None,
        num_replicas_in_sync: int | None = None,
        num_required: int | None = None,
        reduction: str | None = None,
    ) -> EmbeddingConfig:
        """From Python classes, as ``tf.tpu.experimental.embedding.TPUEmbedding(feature_config, optimizer)`` builds it.

        feature_config : FeatureConfigs in any nesting of dictionaries (visited by sorted key), lists and tuples
        batch_size : per replica, as TensorFlow's per_replica_batch_size (which is accepted, too); not needed where
            per_replica_input_shapes, nested like the features, or every output_shape says the shapes
        num_hosts, num_replicas, num_cores_per_replica : what a TPU strategy supplies; num_replicas_in_sync is
            another name for num_replicas; num_cores_per_replica is None without a device assignment
        num_required, reduction : of the gate, ours

        Tables come in the order of their first use. As in TensorFlow the names they get, and the optimizer that
        they inherit, are written back into the TableConfigs; callable learning rates become dynamic tags.
        Accepts every value that TensorFlow accepts, even if it cannot run: ``lint`` and ``tables`` report that.
        """
        batch_size = _one_of("batch_size", batch_size, "per_replica_batch_size", per_replica_batch_size)
        replicas = num_replicas if num_replicas_in_sync is None else num_replicas_in_sync
        if num_replicas not in (1, replicas):
            raise ConfigError(f"num_replicas is {num_replicas}, but num_replicas_in_sync {replicas}; give one of them")
        strategy = Strategy(num_hosts, replicas, num_cores_per_replica, pipeline_execution_with_tensor_core)
        message, part = build_features(feature_config, optimizer, batch_size, per_replica_input_shapes, strategy)
        write_gate(message, num_required, reduction)
        return cls(message, part)

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
        message, part = build_tables(tables, optimizer)
        write_gate(message, num_required, reduction)
        validate(message)
        return cls(message, part)

    def to_proto(self) -> TPUEmbeddingConfiguration:
        """TensorFlow's message, as it came. Without initializers, initial slot values, combiners and the gate.

        ConfigError where a table has an optimizer that this message cannot hold: one of our own, or a program in
        Python.
        """
        own = next((settings for settings in self._message.table if settings.WhichOneof("optimizer")), None)
        if own is not None:
            raise ConfigError(
                f"table '{own.name}': {own.WhichOneof('optimizer')} is an optimizer of our own, which TensorFlow's "
                "message cannot hold; use to_engine_proto, or save, which writes an EngineConfig"
            )
        self._refuse_programs()
        copy = TPUEmbeddingConfiguration()
        copy.CopyFrom(self._message.tpu_embedding_configuration)
        return copy

    def to_engine_proto(self) -> EngineConfig:
        """The whole, but for Python functions, which no message can hold: schedules, initializers and programs."""
        copy = EngineConfig()
        copy.CopyFrom(self._message)
        return copy

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all of it, atomically: TensorFlow's message where that can hold it, else an EngineConfig.

        Text where the path ends in .pbtxt, .textproto, .txtpb or .txt, else binary. Schedules are not part of a
        file (a dynamic tag says that a rate comes from outside). ConfigError, and nothing written, for a callable
        initializer, a UserDefinedProgram, and whatever ``load`` would refuse.
        """
        if self._part.initializers:
            name = min(self._part.initializers)
            raise ConfigError(
                f"table '{name}': its initializer is a Python callable, which a file cannot hold; "
                "use a TruncatedNormal, Uniform, Constant or RowIdInitializer"
            )
        self._refuse_programs()
        try:
            validate(self._message)
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: not saved, it could not be loaded again: {error}") from None
        text_format.write(self._message, path)

    def _refuse_programs(self) -> None:
        if self._part.programs:
            raise ConfigError(
                f"table '{min(self._part.programs)}': its program is a Python function, which no message can hold; "
                "keep the code that builds this configuration instead"
            )

    @property
    def schedules(self) -> Mapping[int, Callable[..., Any]]:
        """The callable learning rates of ``from_features`` and ``from_tables``, by tag."""
        return MappingProxyType(self._part.schedules)

    @property
    def feature_structure(self) -> Any:
        """The nesting that ``from_features`` was given, with each feature's index into ``features`` at its leaf.

        A configuration from elsewhere has a list of them: no message holds a nesting.
        """
        structure = self._part.feature_structure
        return list(range(len(self.features))) if structure is None else structure

    @cached_property
    def tables(self) -> tuple[TableSpec, ...]:
        """Every table, by id. ConfigError where this version cannot run one of them."""
        validate(self._message)
        return tuple(self._table(index) for index in range(len(self._tables)))

    def table(self, name: str) -> TableSpec:
        """One table by its name. ConfigError where there is none, or this version cannot run it."""
        validate(self._message)
        return self._table(self._index(name))

    def optimizer(self, name: str) -> Optimizer:
        """The optimizer of a table as an instance of its class, also where it can only be kept and not run."""
        return optimizer_of(self._message, self._index(name), self._part)

    def _index(self, name: str) -> int:
        names = self.table_names
        if name not in names:
            raise ConfigError(f"no table is named '{name}'; {near(name, names)}")
        return names.index(name)

    @cached_property
    def features(self) -> tuple[FeatureSpec, ...]:
        """The input features, in order; empty where the configuration has none."""
        return feature_specs(self._message, self._part.feature_structure)

    def lint(self) -> list[Finding]:
        """Return findings about legal but suspicious settings, and about settings that this version cannot run."""
        return lint(self._message, self._part.written, self._part.programs, self._scan)

    def _table(self, index: int) -> TableSpec:
        return table_spec(self._message, index, self._part)

    def __repr__(self) -> str:
        tables = ", ".join(f"{name} {rows}x{dim}" for name, (rows, dim) in self.sizes.items())
        return f"EmbeddingConfig({tables})"


def _one_of(name: str, value: int | None, other: str, other_value: int | None) -> int | None:
    """The value of two arguments that mean the same."""
    if value is not None and other_value is not None and value != other_value:
        raise ConfigError(f"{name} is {value}, but {other} {other_value}; give one of them")
    return other_value if value is None else value
