"""All tables of a configuration for a user's jitted step: created on the devices, looked up, updated and read.

The host prepares each batch (``preprocess``); the step itself is pure functions over pytrees (``gather``, ``apply``).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from penstock.api.activations.exchange import deduplicated
from penstock.api.activations.nesting import features_of, leaves, structure_for
from penstock.base.errors import UsageError, UsageTypeError, listed
from penstock.base.threads import ThreadTeam
from penstock.model.config.clipping import check_no_norms
from penstock.model.config.embedding import EmbeddingConfig
from penstock.model.config.features import flatten, pack
from penstock.model.config.id_ranges import valid_ids
from penstock.model.config.specs import WEIGHTS, TableSpec
from penstock.model.frames import Float32
from penstock.model.updates import OptaxRule, UpdateRule
from penstock.model.updates.optax_transforms import depends_on_num_rows
from penstock.rows.arguments import checked_parts
from penstock.rows.bridge import backends, functional_table
from penstock.rows.bridge.device_tables import DeviceTable
from penstock.rows.bridge.devices import check_memory, platform
from penstock.rows.bridge.dispatcher import Dispatcher
from penstock.rows.bridge.functional_table import Feature, Format, Table, Uses
from penstock.rows.bridge.jax_devices import local_mesh, one_axis
from penstock.rows.bridge.lookup_plan import LookupPlan, LookupSizes
from penstock.rows.bridge.programs import row_sharding
from penstock.rows.bridge.sharding import Layout, TableDefinition
from penstock.rows.bridge.tracing import is_staging
from penstock.rows.bridge.xla_tables import XlaTables
from penstock.rows.initializers import start_of

Tables = dict[str, Table]
log = logging.getLogger("penstock")


class EmbeddingTables:
    """The tables of a configuration with features, for a step that your program compiles. Loads jax.

    Parameters
    ----------
    config : EmbeddingConfig
        With features.
    mesh : jax.sharding.Mesh or None
        The devices; the rows of every table, and each batch, are distributed over all of its axes. None: all local
        devices.
    rules : mapping of str to OptaxRule
        Table → the rule of ``penstock.updates.from_optax`` that updates it instead of the table's optimizer.
    halves : bool
        Whether arrays may hold halves of words, where XLA moves fewer bytes then; else all are float32.

    Attributes
    ----------
    features : dict of str to tuple of Feature
        The features of every table that has some, in order.
    rules : dict of str to UpdateRule or OptaxRule
        The rule of every table.

    Raises
    ------
    ConfigError
        For a configuration without features.
    UsageError
        For tables that only an Engine can update: dynamic ones, those with 16-bit weights, with non-lazy optimizers, or
        with one update per gradient.

    Notes
    -----
    The tables are values: ``create`` returns them, your step takes and returns them. This object holds none.

    Examples
    --------
    >>> import jax
    >>> import penstock as ps
    >>> item = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), combiner="sum", name="item")
    >>> config = ps.EmbeddingConfig.from_features({"clicked": ps.FeatureConfig(item)}, batch_size=8)
    >>> embedding_tables = ps.functional.EmbeddingTables(config)
    >>> tables = embedding_tables.create()
    >>> batch = {"clicked": [[7, 3], [7], *[[]] * 6]}
    >>> uses = embedding_tables.preprocess(batch)
    >>> @jax.jit
    ... def step(tables, uses):
    ...     activations = embedding_tables.gather(tables, uses)
    ...     gradients = jax.grad(lambda rows: (rows["clicked"] ** 2).sum() / 2)(activations)
    ...     return embedding_tables.apply(tables, uses, gradients)
    >>> tables = step(tables, uses)
    >>> embedding_tables.parameters(tables, "item")["parameters"][[7, 3]]
    array([[-0.5, -0.5],
           [ 0. ,  0. ]], dtype=float32)
    """

    def __init__(
        self,
        config: EmbeddingConfig,
        mesh: Mesh | None = None,
        rules: Mapping[str, OptaxRule] = MappingProxyType({}),
        halves: bool = True,
    ) -> None:
        features_of(config)
        check_no_norms(config.clip, config.limit, "penstock.functional")
        self.config, self.mesh = config, local_mesh() if mesh is None else mesh
        if self.mesh.is_multi_process:
            raise UsageError("a mesh over several processes: EmbeddingTables needs one whose devices are all local")
        for name, rule in rules.items():
            if name not in config.table_names:
                raise UsageError(f"rules: no table '{name}' in the configuration ({listed(config.table_names)})")
            if not config.table(name).trainable:
                raise UsageError(f"rules, table '{name}': it is frozen; omit its rule")
            if not isinstance(rule, OptaxRule):
                got = type(rule).__name__
                raise UsageTypeError(f"rules, table '{name}': expected a rule of updates.from_optax, got {got}")
        own_mesh = one_axis(self.mesh.devices)
        self._specs = {spec.name: spec for spec in config.tables}
        self.rules: dict[str, UpdateRule | OptaxRule] = {n: rules.get(n, s.rule) for n, s in self._specs.items()}
        self._formats: dict[str, Format] = {}
        self._definitions: dict[str, TableDefinition] = {}
        for name, spec in self._specs.items():
            _check(spec, self.rules[name])
            definition = _definition(config, spec, rules.get(name), own_mesh)
            on_cpu = platform(own_mesh) == "cpu"
            variant, problem = backends.choose(own_mesh, *definition[:2], preferred="xla" if on_cpu else None)
            if problem:
                log.warning("table '%s': the kernel failed its canary, XLA's program updates: %s", name, problem)
            variant = "xla" if variant == "host" else variant  # whose tables lie outside of XLA's programs
            layout = backends.formatted(definition.layout, variant) if halves else definition.layout
            q = spec.quantization
            quantization = None if q is None else (q.num_buckets, q.lower, q.upper)
            self._definitions[name] = definition._replace(layout=layout)
            self._formats[name] = Format(layout.line, self.mesh, variant, quantization)
        check_memory((own_mesh, definition.layout.nbytes) for definition in self._definitions.values())
        self._by_gathers = backends.sums_by_gathers(own_mesh)
        self._sizes: dict[str, LookupSizes] = {}
        self._growing = threading.Lock()
        self._dispatcher = Dispatcher(ThreadTeam(None))
        self._indices = {
            name: [index for index, feature in enumerate(config.features) if feature.table == name]
            for name in self._specs
        }
        self.features = {
            name: tuple(Feature(config.features[index].path, config.features[index].input_shape) for index in indices)
            for name, indices in self._indices.items()
            if indices
        }

    def __deepcopy__(self, memo: Any) -> EmbeddingTables:
        return self  # it holds no rows: a copy of a model shares it

    # ---- on the host

    def create(self, seed: int = 0) -> Tables:
        """Return new tables, with the rows that an Engine with this seed starts with.

        Parameters
        ----------
        seed : int
            Seed of the random initial values.

        Returns
        -------
        dict of str to Table
            By name.

        Raises
        ------
        UsageTypeError
            Inside of a jitted function, or of ``nnx.eval_shape``.
        """
        if is_staging():
            raise UsageTypeError(
                "create: runs on the host, and was called in a function that jax traces (jit, nnx.eval_shape); create "
                "tables, and models that contain them, outside, and pass them to the function"
            )
        created = {}
        for name, spec in self._specs.items():
            store = self._store(name)
            DeviceTable(store).fill(start_of(spec, seed))
            rule = self.rules[name]
            created[name] = self._table_from(name, store, rule.numbers if isinstance(rule, OptaxRule) else ())
        return created

    def lookup(self, tables: Mapping[str, Table], name: str, ids: Any) -> Float32:
        """Return the weights of some ids, for evaluation: any number of them, outside of a step.

        Parameters
        ----------
        tables : mapping of str to Table
            The tables.
        name : str
            The table to read.
        ids : array_like of int, shape (n,)
            Repeats allowed.

        Returns
        -------
        numpy.ndarray
            float32, shape (n, dim).

        Raises
        ------
        UsageError
            If the table is unknown, or an id is not an integer in its range.

        Examples
        --------
        >>> import penstock as ps
        >>> item = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), combiner="sum", name="item")
        >>> config = ps.EmbeddingConfig.from_features({"clicked": ps.FeatureConfig(item)}, batch_size=8)
        >>> embedding_tables = ps.functional.EmbeddingTables(config)
        >>> embedding_tables.lookup(embedding_tables.create(), "item", [7, 3, 7]).shape
        (3, 2)
        """
        self._parts(name)
        try:
            wanted = valid_ids(name, ids, self._specs[name].vocabulary_size)
        except UsageError:
            _check_not_traced("lookup", ids)
            raise
        return DeviceTable(self._store(name, tables)).read(wanted)

    def preprocess(self, features: Any, weights: Any = None) -> dict[str, Uses]:
        """Return the lookups of a batch, on the devices, for ``gather`` and ``apply``. Threads may call it.

        Parameters
        ----------
        features, weights : nested like the configuration's features
            As for ``Engine.recv_activations``.

        Returns
        -------
        dict of str to Uses
            By table. Arrays are padded to sizes that only grow, by doubling, so a step is compiled a few times at first
            and not again.

        Raises
        ------
        UsageError
            If a batch cannot be distributed evenly over the devices; also the errors of ``recv_activations``.
        UsageTypeError
            Inside of a jitted function.
        """
        plans = self._plans(features, weights)
        return {name: self._sent(plan.padded(self._sizes[name]), ()) for name, plan in plans.items()}

    def preprocess_steps(self, features: Sequence[Any], weights: Sequence[Any] | None = None) -> dict[str, Uses]:
        """Return the lookups of several batches, on a new first axis: for ``jax.lax.scan`` over steps.

        Parameters
        ----------
        features : sequence
            Batches, each as for ``preprocess``.
        weights : sequence or None
            Weights of the batches.

        Returns
        -------
        dict of str to Uses
            By table.

        Examples
        --------
        >>> import jax
        >>> import penstock as ps
        >>> item = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), combiner="sum", name="item")
        >>> config = ps.EmbeddingConfig.from_features({"clicked": ps.FeatureConfig(item)}, batch_size=8)
        >>> embedding_tables = ps.functional.EmbeddingTables(config)
        >>> tables = embedding_tables.create()
        >>> batch = {"clicked": [[7, 3], [7], *[[]] * 6]}
        >>> uses = embedding_tables.preprocess(batch)
        >>> both = embedding_tables.preprocess_steps([batch, batch])
        >>> both["item"].counts.shape[0], uses["item"].counts.ndim, both["item"].counts.ndim
        (2, 1, 2)
        """
        if not len(features):
            raise UsageError("preprocess_steps: expected at least one batch, got none")
        all_weights = [None] * len(features) if weights is None else weights
        plans = [self._plans(*batch) for batch in zip(features, all_weights, strict=True)]
        stacked = {}
        for name in plans[0]:
            padded = [of_tables[name].padded(self._sizes[name]) for of_tables in plans]
            stacked[name] = self._sent(jax.tree.map(lambda *parts: np.stack(parts), *padded), (None,))
        return stacked

    def parameters(self, tables: Mapping[str, Table], name: str) -> dict[str, Float32]:
        """Return copies of a table's weights and slots.

        Parameters
        ----------
        tables : mapping of str to Table
            The tables.
        name : str
            The table to read.

        Returns
        -------
        dict of str to numpy.ndarray
            "parameters" and every slot by its name: float32, in id order. ``Engine.load_parameters`` takes them.
        """
        parts, device_table = self._parts(name), DeviceTable(self._store(name, tables))
        ids = np.arange(self._specs[name].vocabulary_size)
        return {part: device_table.read(ids, number) for number, part in enumerate(parts)}

    def part_shapes(self, name: str) -> dict[str, tuple[int, int]]:
        """Return the shapes of what ``parameters`` returns.

        Parameters
        ----------
        name : str
            The table.

        Returns
        -------
        dict of str to (int, int)
            vocabulary_size and floats per row, of "parameters" and every slot.
        """
        layout = self._definitions[name].layout
        return {
            part: (layout.vocabulary_size, dim) for part, dim in zip(self._parts(name), layout.part_dims, strict=True)
        }

    def load(self, tables: Mapping[str, Table], name: str, rows: Any, **slots: Any) -> Tables:
        """Return the tables with one of them replaced by other weights and slots.

        Parameters
        ----------
        tables : mapping of str to Table
            The tables. The one that is replaced is updated in place: do not use its former value again.
        name : str
            The table to replace.
        rows : array_like of float32, shape (vocabulary_size, dim)
            The weights.
        **slots : array_like of float32
            All of them, by name, as ``parameters`` returns them.

        Returns
        -------
        dict of str to Table

        Examples
        --------
        >>> import penstock as ps
        >>> item = ps.TableConfig(8, 2, ps.Constant(1.0), ps.SGD(0.5), combiner="sum", name="item")
        >>> config = ps.EmbeddingConfig.from_features({"clicked": ps.FeatureConfig(item)}, batch_size=8)
        >>> embedding_tables = ps.functional.EmbeddingTables(config)
        >>> tables = embedding_tables.create()
        >>> rows = embedding_tables.parameters(tables, "item")["parameters"] * 2
        >>> tables = embedding_tables.load(tables, "item", rows)
        >>> embedding_tables.lookup(tables, "item", [7, 3]).tolist()
        [[2.0, 2.0], [2.0, 2.0]]
        """
        parts, layout = self._parts(name), self._definitions[name].layout
        values = checked_parts(name, parts, {WEIGHTS: rows, **slots}, layout.vocabulary_size, layout.part_dims)
        store = self._store(name, tables)
        for part, value in values.items():
            store.write(0, 0, value, part)
        return {**tables, name: self._table_from(name, store, tables[name].numbers)}

    # ---- traced

    def gather(self, tables: Mapping[str, Table], uses: Mapping[str, Uses]) -> Any:
        """Return the activations of a batch.

        Parameters
        ----------
        tables : mapping of str to Table
            The tables.
        uses : mapping of str to Uses
            The lookups of the batch (``preprocess``).

        Returns
        -------
        nested like the configuration's features
            float32, the feature's input shape followed by dim.

        Raises
        ------
        UsageTypeError
            For anything but lookups, such as ids.
        """
        if not isinstance(uses, Mapping) or not all(isinstance(table_uses, Uses) for table_uses in uses.values()):
            raise UsageTypeError(
                "gather: expected the lookups of a batch, got something else; call preprocess(features) with its ids "
                "on the host, before the step, and give the step what it returns (lookup reads rows by their ids)"
            )
        by_path: dict[str, jax.Array] = {}
        for name, table_uses in uses.items():
            by_path |= functional_table.gather(tables[name], table_uses)
        structure = self.config.feature_structure
        return pack(structure, (by_path[self.config.features[index].path] for index in flatten(structure)))

    def apply(
        self, tables: Mapping[str, Table], uses: Mapping[str, Uses], gradients: Any, learning_rates: Any = None
    ) -> Tables:
        """Return the tables after one update of the rows of a batch; in place if they are donated.

        Parameters
        ----------
        tables : mapping of str to Table
            The tables.
        uses : mapping of str to Uses
            The lookups of the batch.
        gradients : nested like the configuration's features
            Gradients of the activations.
        learning_rates : mapping of int to float, sequence of float or None
            The rate of this step by dynamic tag.

        Returns
        -------
        dict of str to Table
        """
        by_feature = leaves(structure_for(self.config, gradients), gradients, "gradients")
        updated = dict(tables)
        for name, table_uses in uses.items():
            if not self._specs[name].trainable:
                continue
            table_gradients = {self.config.features[index].path: by_feature[index] for index in self._indices[name]}
            rate = self._rate(name, learning_rates)
            updated[name] = functional_table.apply(self.rules[name], tables[name], table_uses, table_gradients, rate)
        return updated

    # ----

    def _rate(self, name: str, learning_rates: Any) -> Any:
        spec = self._specs[name]
        if spec.tag is None or isinstance(self.rules[name], OptaxRule):
            return spec.learning_rate
        try:
            return learning_rates[spec.tag]
        except (TypeError, LookupError) as error:
            wanted = f"learning_rates[{spec.tag}], the rate of its dynamic tag"
            raise UsageError(f"table '{name}': expected {wanted}, got {learning_rates!r}") from error

    def _plans(self, features: Any, weights: Any) -> dict[str, LookupPlan]:
        """Return the plan of every table with features, and note the sizes that it needs."""
        try:
            unique, uses = deduplicated(self.config, features, weights)
        except UsageError:
            _check_not_traced("preprocess", (features, weights))
            raise
        plans = {}
        for name, features_of_table in self.features.items():
            table_uses = [uses[index] for index in self._indices[name]]
            plans[name] = LookupPlan.of(
                self._definitions[name].layout, unique[name], features_of_table, table_uses, self._by_gathers
            )
            sizes = plans[name].sizes
            with self._growing:
                self._sizes[name] = sizes.or_more(self._sizes.get(name, sizes))
        return plans

    def _sent(self, uses: Uses, leading: tuple[None, ...]) -> Uses:
        sharding = NamedSharding(self.mesh, PartitionSpec(*leading, self.mesh.axis_names))
        sent: Uses = jax.device_put(uses, sharding)
        return sent

    def _parts(self, name: str) -> list[str]:
        if name not in self._specs:
            raise UsageError(f"no table '{name}' in the configuration ({listed(self._specs)})")
        rule = self.rules[name]
        if isinstance(rule, OptaxRule):
            return [WEIGHTS, *(f"state_{slot}" for slot in range(rule.num_slots))]
        return [WEIGHTS, *(slot for slot, _ in self._specs[name].slots)]

    def _store(self, name: str, tables: Mapping[str, Table] | None = None) -> XlaTables:
        """Return one table as the engine has it, which reads and writes rows: an existing table, or a new one."""
        mesh, arrays = one_axis(self.mesh.devices), None
        if tables is not None:
            arrays = tuple(jax.device_put(tables[name].arrays, row_sharding(mesh)))
        return XlaTables(mesh, [self._definitions[name]], self._formats[name].variant, self._dispatcher, arrays=arrays)

    def _table_from(self, name: str, store: XlaTables, numbers: tuple[Any, ...]) -> Table:
        store.wait()
        form = self._formats[name]
        arrays = jax.device_put(store.arrays, NamedSharding(self.mesh, form.spec))
        same = NamedSharding(self.mesh, PartitionSpec())
        return Table(tuple(arrays), tuple(jax.device_put(number, same) for number in numbers), form)


def _check_not_traced(method: str, values: Any) -> None:
    """Raise UsageTypeError for a call of a method of the host inside of a jitted function."""
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values)):
        return
    raise UsageTypeError(
        f"{method}: runs on the host, and was called with traced values; call it outside of the jitted function, and "
        "give that what it returns"
    )


def _check(spec: TableSpec, rule: UpdateRule | OptaxRule) -> None:
    """Raise UsageError for a table that only an Engine can update."""
    problems = {
        "it is dynamic": spec.dynamic is not None,
        "it is placed on the host": spec.placement.where != "device",
        "its weights have 16 bits": spec.storage_dtype == "bfloat16",
        "it is updated once per gradient": not spec.accumulate,
        "its optimizer changes rows without gradients": isinstance(rule, UpdateRule) and rule.non_lazy,
        "its optimizer counts steps": isinstance(rule, UpdateRule) and rule.counts_steps,
        "it is trained from a step on (until_step)": not spec.trainable and spec.until_step is not None,
        "it refuses gradients (on_gradient)": spec.refuses_gradients,
    }
    for problem, applies in problems.items():
        if applies:
            raise UsageError(f"table '{spec.name}': {problem}; send its gradients to an Engine")
    if isinstance(rule, OptaxRule) and depends_on_num_rows(rule.transform, spec.vocabulary_size, spec.dim):
        raise UsageError(
            f"rules, table '{spec.name}': the transform depends on the number of rows, as with a mask by shape, and "
            "gets those of a batch, not the table; use one without the mask for the table that it means"
        )


def _definition(config: EmbeddingConfig, spec: TableSpec, rule: OptaxRule | None, mesh: Mesh) -> TableDefinition:
    starts = tuple(start for _, start in spec.slots) if rule is None else rule.starts
    of_table = spec.rule if rule is None else rule.at(rule.numbers, spec.dim)[0]
    layout = Layout(
        spec.name,
        spec.vocabulary_size,
        spec.dim,
        len(starts),
        mesh.size,
        config.sharding_strategy == "MOD",
        backends.lanes(mesh),
        row_slots=of_table.row_slots,
    )
    return TableDefinition(layout, of_table, starts)
