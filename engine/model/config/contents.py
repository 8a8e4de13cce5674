"""ConfigContents: what an EmbeddingConfig says about tables, features, gate and norms, as views of its message.

proto_views.py and specs.py have the views of single tables, and lint/ the rules. How a configuration is created and
saved: embedding.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from penstock.base.errors import ConfigError
from penstock.model.config.clipping import Clip, Limit, clip_of, limit_of
from penstock.model.config.engine_config_pb2 import DynamicSettings, EngineConfig, GateSettings
from penstock.model.config.id_ranges import ANY_INT64, ANY_UINT64
from penstock.model.config.lint import lint
from penstock.model.config.lint.findings import Finding, near
from penstock.model.config.lint.proto_rules import validate
from penstock.model.config.lint.source_text import Scan
from penstock.model.config.proto_views import TableMessage, table_messages
from penstock.model.config.specs import FeatureSpec, PythonPart, TableSpec, feature_specs, optimizer_of, table_spec
from penstock.model.config.tpu_embedding_configuration_pb2 import TPUEmbeddingConfiguration
from penstock.model.gate_policy import AHEAD, GatePolicy
from penstock.model.updates import Optimizer


class ConfigContents:
    """The contents of an EmbeddingConfig, which do not change."""

    _message: EngineConfig
    _part: PythonPart
    _scan: Scan | None
    _is_valid: bool

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
    def clip(self) -> Clip | None:
        """The norms that the gradients of a step are scaled down to; None if there are none."""
        return clip_of(self._message)

    @property
    def limit(self) -> Limit | None:
        """What becomes of frames whose norm is unusual for their contributor; None: nothing."""
        return limit_of(self._message)

    @property
    def columns(self) -> dict[str, str]:
        """Role → name of a stream's column, where it has another name than the role."""
        return {column.role: column.name for column in self._message.columns}

    @property
    def _tables(self) -> Sequence[TPUEmbeddingConfiguration.TableDescriptor]:
        return self._message.tpu_embedding_configuration.table_descriptor

    @property
    def schedules(self) -> Mapping[int, Callable[..., Any]]:
        """The callable learning rates passed to ``from_features`` and ``from_tables``, by tag."""
        return MappingProxyType(self._part.schedules)

    @property
    def feature_structure(self) -> Any:
        """The nesting passed to ``from_features``, with each feature's index into ``features`` at its leaf.

        A list of indices for a loaded configuration, since no message holds a nesting.
        """
        structure = self._part.feature_structure
        return list(range(len(self.features))) if structure is None else structure

    @cached_property
    def tables(self) -> tuple[TableSpec, ...]:
        """Every table, by id. Raises ConfigError if this version cannot run one of them."""
        validate(self._message)
        return tuple(table_spec(table, self._part) for table in table_messages(self._message))

    def table(self, name: str) -> TableSpec:
        """Return one table by its name.

        Parameters
        ----------
        name : str
            The table's name.

        Returns
        -------
        TableSpec
            Its size, optimizer, slots and update rule.

        Raises
        ------
        ConfigError
            If there is none of that name, or this version cannot run it.

        Examples
        --------
        >>> import penstock as ps
        >>> config = ps.EmbeddingConfig.from_tables([ps.TableConfig(1000, 8, name="user")], optimizer=ps.Adagrad(0.05))
        >>> user = config.table("user")
        >>> user.dim, user.slots, user.row_bytes
        (8, (('accumulators', 0.10000000149011612),), 64)
        """
        if not self._is_valid:
            validate(self._message)
            self._is_valid = True
        return table_spec(self._table(name), self._part)

    def optimizer(self, name: str) -> Optimizer:
        """Return the optimizer of a table as an instance of its class, even if this version cannot run it.

        Parameters
        ----------
        name : str
            The table's name.

        Returns
        -------
        Optimizer

        Raises
        ------
        ConfigError
            If there is no table of that name.

        Examples
        --------
        >>> import penstock as ps
        >>> config = ps.EmbeddingConfig.from_tables([ps.TableConfig(1000, 8, name="user")], optimizer=ps.SGD(0.5))
        >>> config.optimizer("user") == ps.SGD(0.5)
        True
        """
        return optimizer_of(self._table(name), self._part)

    def _table(self, name: str) -> TableMessage:
        table = self._by_name.get(name)
        if table is None:
            raise ConfigError(f"no table is named '{name}'; {near(name, self.table_names)}")
        return table

    @cached_property
    def _by_name(self) -> dict[str, TableMessage]:
        return {table.name: table for table in reversed(table_messages(self._message))}

    @cached_property
    def features(self) -> tuple[FeatureSpec, ...]:
        """The input features, in order; empty if the configuration has none."""
        return feature_specs(self._message, self._part.feature_structure)

    def lint(self) -> list[Finding]:
        """Return findings about legal but suspicious settings, and about settings that this version cannot run.

        Returns
        -------
        list of Finding

        Examples
        --------
        >>> import penstock as ps
        >>> config = ps.EmbeddingConfig.from_tables([ps.TableConfig(1000, 8, name="user")], optimizer=ps.SGD(0.5))
        >>> config.lint()
        []
        """
        return lint(self._message, self._part.written, self._part.programs, self._scan)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and copy without cached properties, some of which cannot be pickled."""
        kinds = {name: kind for cls in type(self).__mro__ for name, kind in vars(cls).items()}
        return {name: value for name, value in vars(self).items() if not isinstance(kinds.get(name), cached_property)}
