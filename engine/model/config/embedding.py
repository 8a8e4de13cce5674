"""EmbeddingConfig: the tables and features of one engine, from a file, a message or Python classes.

EmbeddingConfig is the entry point of this package. It holds one EngineConfig message; contents.py has its views of it.
text_format.py reads and writes files, lint/ has the rules, and build.py converts Python classes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from google.protobuf.message import Message

from penstock.base.errors import ConfigError
from penstock.base.html_tables import html_table
from penstock.model.config import text_format
from penstock.model.config.build import build_tables, write_settings
from penstock.model.config.build_features import Strategy, build_features
from penstock.model.config.clipping import Clip, Limit
from penstock.model.config.contents import ConfigContents
from penstock.model.config.engine_config_pb2 import EngineConfig
from penstock.model.config.features import FeatureConfig
from penstock.model.config.lint.findings import Finding
from penstock.model.config.lint.proto_rules import validate
from penstock.model.config.lint.source_text import Scan
from penstock.model.config.proto_views import table_messages
from penstock.model.config.specs import PythonPart
from penstock.model.config.tables import TableConfig
from penstock.model.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration
from penstock.model.updates import OPTIMIZERS, Optimizer

Features = FeatureConfig | Sequence[Any] | Mapping[Any, Any]


class EmbeddingConfig(ConfigContents):
    """An immutable configuration. Create one with ``load``, ``from_proto``, ``from_features`` or ``from_tables``.

    Parameters
    ----------
    message : EngineConfig
        Copied without checks; use one of the four constructors instead.
    part : PythonPart or None
        The values that only Python can hold.
    scan : Scan or None
        The scan of the text that ``message`` was read from.

    Notes
    -----
    It is backed by a message, so unknown fields of a binary configuration are kept and saved again.

    Examples
    --------
    >>> import penstock as ps
    >>> config = ps.EmbeddingConfig.from_tables([ps.TableConfig(1000, 8, name="user")], optimizer=ps.Adagrad(0.05))
    >>> config.save("tables.pbtxt")
    >>> ps.EmbeddingConfig.load("tables.pbtxt").table("user").slots
    (('accumulators', 0.10000000149011612),)
    """

    def __init__(self, message: EngineConfig, part: PythonPart | None = None, scan: Scan | None = None) -> None:
        """Copy ``message`` without checking it."""
        self._message = deepcopy(message)
        self._part = part or PythonPart({}, {}, {}, scan.numbers if scan is not None else {})
        self._scan = scan
        self._is_valid = False  # not checked yet

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> EmbeddingConfig:
        """Load a text or binary TPUEmbeddingConfiguration or EngineConfig file.

        Parameters
        ----------
        path : str or path
            The file; its fields decide which message it is.

        Returns
        -------
        EmbeddingConfig

        Raises
        ------
        ConfigError
            If the file is missing or invalid.

        Examples
        --------
        >>> import penstock as ps
        >>> from pathlib import Path
        >>> optimizer = "optimization_parameters { adagrad { } learning_rate { constant: 0.05 } }"
        >>> text = f'table_descriptor {{ name: "user" vocabulary_size: 1000 dimension: 8 {optimizer} }}'
        >>> _ = Path("mine.pbtxt").write_text(text)
        >>> ps.EmbeddingConfig.load("mine.pbtxt")
        EmbeddingConfig(user 1000x8)
        """
        message, scan = text_format.read(path)
        try:
            validate(message)
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from None
        return cls(message, scan=scan)

    @classmethod
    def check(cls, path: str | os.PathLike[str]) -> tuple[EmbeddingConfig | None, list[Finding]]:
        """Lint a file, even one that ``load`` refuses.

        Parameters
        ----------
        path : str or path
            As for ``load``.

        Returns
        -------
        config : EmbeddingConfig or None
            None if ``load`` refuses the file.
        findings : list of Finding
            All of them.

        Raises
        ------
        ConfigError
            Only if the file does not parse.

        Examples
        --------
        >>> import penstock as ps
        >>> from pathlib import Path
        >>> _ = Path("mine.pbtxt").write_text('table_descriptor { name: "user" vocabulary_size: 0 dimension: 8 }')
        >>> config, findings = ps.EmbeddingConfig.check("mine.pbtxt")
        >>> print(config, findings[0].where, findings[0].line)
        None table_descriptor[0].vocabulary_size 1
        """
        message, scan = text_format.read(path)
        config = cls(message, scan=scan)
        findings = config.lint()
        return (None if any(finding.code < "PS1" for finding in findings) else config), findings

    @classmethod
    def from_proto(cls, message: Message) -> EmbeddingConfig:
        """Create a configuration from penstock's message or TensorFlow's message of the same name.

        Parameters
        ----------
        message : TPUEmbeddingConfiguration or EngineConfig
            Of penstock's or TensorFlow's generated code; copied.

        Returns
        -------
        EmbeddingConfig

        Raises
        ------
        TypeError
            If ``message`` is no message.
        ConfigError
            If it is another message, or invalid.

        Examples
        --------
        >>> import penstock as ps
        >>> config = ps.EmbeddingConfig.from_tables([ps.TableConfig(1000, 8, name="user")], optimizer=ps.SGD(0.5))
        >>> ps.EmbeddingConfig.from_proto(config.to_proto()).optimizer("user").learning_rate
        0.5
        """
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
        columns: Mapping[str, str] | None = None,
        workers: int | Sequence[str] | None = None,
        max_staleness: int | None = None,
        clip: Clip | None = None,
        limit: Limit | None = None,
    ) -> EmbeddingConfig:
        """Convert Python classes as ``tf.tpu.experimental.embedding.TPUEmbedding(feature_config, optimizer)`` does.

        Parameters
        ----------
        feature_config : FeatureConfig, or nested dict, list and tuple of FeatureConfig
            Dictionaries are visited by sorted key.
        batch_size : int or None
            Examples per replica. Not needed if ``per_replica_input_shapes`` or every ``output_shape`` specifies the
            shapes.
        optimizer : Optimizer or None
            Of the tables without one.
        num_hosts, num_replicas : int
            The arguments of a TPU strategy.
        num_cores_per_replica : int or None
            Also an argument of a TPU strategy; None without a device assignment.
        per_replica_input_shapes : nested like the features, or None
            The shape of each feature's ids on a replica.
        pipeline_execution_with_tensor_core : bool
            Kept for the proto.
        per_replica_batch_size : int or None
            TensorFlow's name for ``batch_size``.
        num_replicas_in_sync : int or None
            Another name for ``num_replicas``.
        num_required : int or None
            Frames that open the gate; a setting of penstock's.
        reduction : {"mean", "sum"} or None
            Of the gate; a setting of penstock's.
        columns : mapping of str to str, or None
            Role → name of a column, for streams with other names; ``columns`` of a run take precedence.
        workers, max_staleness
            Of the gate, as for ``Engine``; settings of penstock's.
        clip, limit : Clip or None, Limit or None
            Norms of the gradients of a step, and of a frame; settings of penstock's.

        Returns
        -------
        EmbeddingConfig

        Raises
        ------
        ConfigError
            If arguments contradict each other, or a table has no optimizer.

        Notes
        -----
        Tables are numbered in the order of their first use, and callable learning rates become dynamic tags. The
        TableConfigs are not changed, so several configurations may share them. Every value that TensorFlow accepts is
        accepted, even if it cannot run: ``lint`` and ``tables`` report that.

        References
        ----------
        ``tf.tpu.experimental.embedding.TPUEmbedding``

        Examples
        --------
        >>> import penstock as ps
        >>> item = ps.TableConfig(5_000, 16, name="item")
        >>> features = [ps.FeatureConfig(item, name="clicked"), ps.FeatureConfig(item, name="bought")]
        >>> config = ps.EmbeddingConfig.from_features(features, batch_size=32, optimizer=ps.Adam(0.001))
        >>> config, [feature.path for feature in config.features]
        (EmbeddingConfig(item 5000x16), ['clicked', 'bought'])
        """
        batch = per_replica_batch_size if batch_size is None else batch_size
        if per_replica_batch_size not in (None, batch):
            raise ConfigError(
                f"batch_size is {batch_size}, but per_replica_batch_size {per_replica_batch_size}; give one of them"
            )
        replicas = num_replicas if num_replicas_in_sync is None else num_replicas_in_sync
        if num_replicas not in (1, replicas):
            raise ConfigError(f"num_replicas is {num_replicas}, but num_replicas_in_sync {replicas}; give one of them")
        strategy = Strategy(num_hosts, replicas, num_cores_per_replica, pipeline_execution_with_tensor_core)
        message, part = build_features(feature_config, optimizer, batch, per_replica_input_shapes, strategy)
        write_settings(message, num_required, reduction, columns, workers, max_staleness, clip, limit)
        return cls(message, part)

    @classmethod
    def from_tables(
        cls,
        tables: Sequence[TableConfig],
        optimizer: Optimizer | None = None,
        *,
        num_required: int | None = None,
        reduction: str | None = None,
        columns: Mapping[str, str] | None = None,
        workers: int | Sequence[str] | None = None,
        max_staleness: int | None = None,
        clip: Clip | None = None,
        limit: Limit | None = None,
    ) -> EmbeddingConfig:
        """Convert Python classes without features, which suffices for row streams.

        Parameters
        ----------
        tables : sequence of TableConfig
            They keep their order, and are not changed.
        optimizer : Optimizer or None
            Of the tables without one.
        num_required : int or None
            Frames that open the gate.
        reduction : {"mean", "sum"} or None
            Of the gate.
        columns : mapping of str to str, or None
            Role → name of a column, for streams with other names; ``columns`` of a run take precedence.
        workers, max_staleness
            Of the gate, as for ``Engine``; settings of penstock's.
        clip, limit : Clip or None, Limit or None
            Norms of the gradients of a step, and of a frame; settings of penstock's.

        Returns
        -------
        EmbeddingConfig

        Raises
        ------
        ConfigError
            If a table has no optimizer, or a value is invalid.

        Notes
        -----
        Callable learning rates become dynamic tags, numbered by first use, and stay in ``schedules``. A table's
        combiner belongs to the features that use it, and is not kept here.

        Examples
        --------
        >>> import penstock as ps
        >>> user = ps.TableConfig(1000, 8, name="user")
        >>> warmup = ps.SGD(lambda step: min(0.1, 0.01 * (step + 1)))
        >>> config = ps.EmbeddingConfig.from_tables([user], optimizer=warmup, num_required=4)
        >>> config.schedules[0](4)
        0.05
        """
        message, part = build_tables(tables, optimizer)
        write_settings(message, num_required, reduction, columns, workers, max_staleness, clip, limit)
        validate(message)
        return cls(message, part)

    def to_proto(self) -> TPUEmbeddingConfiguration:
        """Return TensorFlow's message unchanged, without initializers, initial slot values, combiners, gate and norms.

        Returns
        -------
        TPUEmbeddingConfiguration

        Raises
        ------
        ConfigError
            If that message cannot hold a table: a dynamic or a frozen one, or one with an optimizer of penstock's or a
            Python program.

        Examples
        --------
        >>> import penstock as ps
        >>> config = ps.EmbeddingConfig.from_tables([ps.TableConfig(1000, 8, name="user")], optimizer=ps.SGD(0.5))
        >>> config.to_proto().table_descriptor[0].dimension
        8
        """
        dynamic = next((settings.name for settings in self._message.table if settings.HasField("dynamic")), None)
        if dynamic is not None:
            raise ConfigError(
                f"table '{dynamic}' is dynamic, which TensorFlow's message cannot hold; use to_engine_proto, or save, "
                "which writes an EngineConfig"
            )
        frozen = next((table.name for table in table_messages(self._message) if not table.is_trainable), None)
        if frozen is not None:
            raise ConfigError(
                f"table '{frozen}' is not trainable, which TensorFlow's message cannot say; use to_engine_proto, or "
                "save, which writes an EngineConfig"
            )
        own = next((settings for settings in self._message.table if settings.WhichOneof("optimizer")), None)
        if own is not None:
            raise ConfigError(
                f"table '{own.name}': {own.WhichOneof('optimizer')} is an optimizer of our own, which TensorFlow's "
                "message cannot hold; use to_engine_proto, or save, which writes an EngineConfig"
            )
        self._refuse_programs()
        return deepcopy(self._message.tpu_embedding_configuration)

    def to_engine_proto(self) -> EngineConfig:
        """Return the whole message. Python functions (schedules, initializers, programs) are not part of a message.

        Returns
        -------
        EngineConfig

        Examples
        --------
        >>> import penstock as ps
        >>> table = ps.TableConfig(1000, 8, ps.Constant(0.5), ps.RowWiseAdagrad(), name="user")
        >>> print(ps.EmbeddingConfig.from_tables([table]).to_engine_proto().table[0], end="")
        name: "user"
        constant {
          value: 0.5
        }
        row_wise_adagrad {
        }
        """
        return deepcopy(self._message)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the configuration atomically: as TensorFlow's message if that can hold it, else as an EngineConfig.

        Parameters
        ----------
        path : str or path
            Text if it ends in .pbtxt, .textproto, .txtpb or .txt, else binary.

        Raises
        ------
        ConfigError
            For a callable initializer, a UserDefinedProgram, or a configuration that ``load`` would refuse; nothing is
            written.

        Notes
        -----
        Schedules are not part of a file; a dynamic tag means that the rate is supplied at run time.

        Examples
        --------
        >>> import penstock as ps
        >>> config = ps.EmbeddingConfig.from_tables([ps.TableConfig(1000, 8, name="user")], optimizer=ps.SGD(0.5))
        >>> config.save("tables.pbtxt")
        >>> ps.EmbeddingConfig.load("tables.pbtxt")
        EmbeddingConfig(user 1000x8)
        """
        if self._part.initializers:
            name = min(self._part.initializers)
            raise ConfigError(
                f"table '{name}': its initializer is a Python callable, which a file cannot hold; "
                "use a TruncatedNormal, Uniform, Constant, RowIdInitializer or FromFile"
            )
        self._refuse_programs()
        try:
            validate(self._message)
        except ConfigError as error:
            raise ConfigError(f"{os.fspath(path)}: not saved, it could not be loaded again: {error}") from None
        text_format.write(self._message, path)

    def drawn_as(self, names: Mapping[str, str]) -> EmbeddingConfig:
        """Return this configuration with tables that have been renamed.

        Parameters
        ----------
        names : mapping of str to str
            Table → its first name, by which its initial rows are drawn and its keys hashed.

        Returns
        -------
        EmbeddingConfig

        Examples
        --------
        >>> import penstock as ps
        >>> config = ps.EmbeddingConfig.from_tables([ps.TableConfig(1000, 8, name="member")], optimizer=ps.SGD(0.5))
        >>> config.drawn_as({"member": "user"}).table("member").drawn_as
        'user'
        """
        if names == self._part.drawn_as:
            return self
        return EmbeddingConfig(self._message, self._part._replace(drawn_as=dict(names)), self._scan)

    def at_step(self, step: int) -> EmbeddingConfig:
        """Return this configuration as it is at a global step: tables are frozen up to their ``until_step``.

        Parameters
        ----------
        step : int
            The number of steps so far.

        Returns
        -------
        EmbeddingConfig

        Examples
        --------
        >>> import penstock as ps
        >>> word = ps.TableConfig(8, 2, name="word", trainable=False, until_step=100)
        >>> config = ps.EmbeddingConfig.from_tables([word], optimizer=ps.Adagrad(0.1))
        >>> config.table("word").slots, config.at_step(100).table("word").slots
        ((), (('accumulators', 0.10000000149011612),))
        """
        if step == self._part.step or not any(table.HasField("until_step") for table in self._message.table):
            return self
        return EmbeddingConfig(self._message, self._part._replace(step=step), self._scan)

    def _refuse_programs(self) -> None:
        if self._part.programs:
            raise ConfigError(
                f"table '{min(self._part.programs)}': its program is a Python function, which no message can hold; "
                "keep the code that builds this configuration instead"
            )

    def __repr__(self) -> str:
        tables = ", ".join(f"{name} {rows}x{dim}" for name, (rows, dim) in self.sizes.items())
        return f"EmbeddingConfig({tables})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: a row per table, also of one that this version cannot run."""
        head = ("table", "rows", "dim", "optimizer", "learning rate")
        rows = [
            (
                table.name,
                *self.sizes[table.name],
                "frozen" if table.is_never_trained else OPTIMIZERS[table.algorithm].__name__,
                table.parameters.learning_rate.constant if table.tag is None else "dynamic",
            )
            for table in table_messages(self._message)
        ]
        return html_table(head, rows, "EmbeddingConfig")
