"""Tables inside a user's jitted step: pure functions over a table that is a pytree.

``gather`` looks up the activations of a batch, and ``apply`` updates the rows that it looked up by the gradients of
these activations. Both work inside ``jax.jit``, ``jax.lax.scan`` and ``jax.shard_map``, on one device or many, and
``apply`` works in place if the table is donated. The host plans the lookups of a batch (lookup_plan.py).

Devices exchange only the rows that are looked up, and their gradients, by all_to_all. A gradient is summed by lookup,
then by device, in the order of the plan (segment_sums.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec

from penstock.base.errors import UsageError, UsageTypeError
from penstock.base.integrations import KERNELS
from penstock.model.updates import Ops, OptaxRule, UpdateRule, quantize
from penstock.model.updates.optax_transforms import own_promotions
from penstock.rows.bridge import line_arrays, programs
from penstock.rows.bridge.row_format import UNTOUCHED, Line
from penstock.rows.bridge.segment_sums import Values, summed, taken
from penstock.rows.bridge.sharding import largest_bucket
from penstock.rows.bridge.variants import kernel


@dataclass(frozen=True)
class Format:
    """The format of a table, static in a compiled program.

    line : of its arrays; variant : "xla" or one of KERNELS, which updates it
    mesh : its devices; axis 0 of every array is distributed over all of the mesh's axes
    quantization : (num_buckets, lower, upper), simulated in lookups; None: none
    """

    line: Line
    mesh: Mesh
    variant: str = "xla"
    quantization: tuple[int, float, float] | None = None

    @property
    def spec(self) -> PartitionSpec:
        return PartitionSpec(self.mesh.axis_names)


@partial(jax.tree_util.register_dataclass, data_fields=["arrays", "numbers"], meta_fields=["format"])
@dataclass(frozen=True)
class Table:
    """A table's weights and slots, a pytree: pass it through jitted functions, and donate it.

    Attributes
    ----------
    arrays : tuple of jax.Array
        In the format of its lines; inside ``shard_map``, one device's part.
    numbers : tuple of jax.Array
        The state of an optax rule that belongs to no row, such as a count of steps.
    format : Format
        Static: the lines of its arrays, the mesh, and the variant that updates it.
    """

    arrays: tuple[jax.Array, ...]
    numbers: tuple[jax.Array, ...]
    format: Format


class Feature(NamedTuple):
    """A feature of a batch. path : its name or key path; shape : of its activation without dim, over all devices"""

    path: str
    shape: tuple[int, ...]


# The arrays of ``Uses``.
PARTS = ["asked", "rows", "samples", "gains", "lines", "counts", "cells", "touched"]
PARTS += ["sample_terms", "sample_nodes", "row_terms", "row_nodes", "line_terms", "line_nodes"]


@partial(jax.tree_util.register_dataclass, data_fields=PARTS, meta_fields=["features", "num_lines"])
@dataclass(frozen=True)
class Uses:
    """The lookups of one batch in one table, a pytree; axis 0 of every array is the device.

    Attributes
    ----------
    asked : array
        int32, shape (devices, devices, A): the rows that a device requests from each device; pads lie beyond the table.
    rows : array
        int32, shape (devices, L): of every lookup, the index of its row in ``asked``; pads lie beyond it.
    samples : array
        int32, shape (devices, L): of every lookup, its sample among those of the device, feature by feature, ascending;
        pads lie beyond.
    gains : array
        float32, shape (devices, L).
    lines : array
        int32, shape (devices, K): the device's lines that any device requests, unique; pads lie beyond its lines.
    counts : array
        int32, shape (devices,): the number of lines before the pads.
    cells : array
        int32, shape (devices, devices * A): of every requested row, device by device, its place in ``lines``, times the
        rows of a line, plus its place there; pads lie beyond.
    touched : array
        bool, shape (devices, K, rows of a line): the rows that are requested.
    features : tuple of Feature
        In the order of ``samples``.
    num_lines : int
        Of the table on each device.
    sample_terms, sample_nodes, row_terms, row_nodes, line_terms, line_nodes : array
        int32, shapes (devices, sums, ·) and (devices, nodes, ·): how a GPU sums the lookups of every sample, those of
        every requested row, and the requested rows of every line (segment_sums.py). On other platforms without sums.
    """

    asked: Any
    rows: Any
    samples: Any
    gains: Any
    lines: Any
    counts: Any
    cells: Any
    touched: Any
    features: tuple[Feature, ...]
    num_lines: int
    sample_terms: Any = None
    sample_nodes: Any = None
    row_terms: Any = None
    row_nodes: Any = None
    line_terms: Any = None
    line_nodes: Any = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each feature's activation on one device, without dim."""
        num_devices = self.asked.shape[-2]
        return {path: (shape[0] // num_devices, *shape[1:]) for path, shape in self.features}


def gather(table: Table, uses: Uses) -> dict[str, jax.Array]:
    """Return the activation of every feature of a table.

    Parameters
    ----------
    table : Table
        The table.
    uses : Uses
        The lookups of a batch in it (``EmbeddingTables.preprocess``).

    Returns
    -------
    dict of str to jax.Array
        By path: float32, the feature's input shape followed by dim. Over several devices, axis 0 is distributed like
        the table's; inside ``shard_map`` it is the device's share of the batch.

    Raises
    ------
    UsageTypeError
        Where the table itself is differentiated: its gradient would have its size.

    Notes
    -----
    Differentiate your loss by the activations, and pass their gradients to ``apply``.

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
    >>> jax.jit(ps.bridge.gather)(tables["item"], uses["item"])["clicked"][:2].tolist()
    [[2.0, 2.0], [1.0, 1.0]]
    """
    table = _without_gradient(table)
    with own_promotions():
        activations: dict[str, jax.Array] = _mapped(table.format, _gather, _specs(table), table.format.spec)(
            table, uses
        )
    return activations


def apply(
    rule: UpdateRule | OptaxRule,
    table: Table,
    uses: Uses,
    gradients: Mapping[str, jax.Array],
    learning_rate: Any = None,
) -> Table:
    """Return the table after one update of the rows of a batch; in place if the table is donated.

    Parameters
    ----------
    rule : UpdateRule or OptaxRule
        ``config.table(name).rule``, or one of ``from_optax``, which contains its learning rate.
    table : Table
        The table.
    uses : Uses
        The lookups of the batch. Rows without a lookup stay unchanged.
    gradients : mapping of str to jax.Array
        Of every activation that ``gather`` returned, by path.
    learning_rate : float, scalar array or None
        Of this step; None: the rule contains it. Of a rule that ``counts_steps``: ``rule.rate_at(rate, step)``.

    Returns
    -------
    Table

    Raises
    ------
    UsageTypeError
        Where the table itself is differentiated.
    UsageError
        For a rule with non-lazy updates, which change every row; for a missing learning rate; for gradients of other
        features or shapes.

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
    >>> gradients = {"clicked": jax.numpy.ones((8, 2))}
    >>> update = jax.jit(ps.bridge.apply, static_argnums=0)
    >>> updated = update(config.table("item").rule, tables["item"], uses["item"], gradients, 0.25)
    >>> jax.jit(ps.bridge.gather)(updated, uses["item"])["clicked"][:2].tolist()
    [[1.25, 1.25], [0.5, 0.5]]
    """
    if isinstance(rule, UpdateRule) and rule.non_lazy:
        raise UsageError(f"{rule.algorithm} with non-lazy updates changes every row; send its gradients to an Engine")
    if isinstance(rule, UpdateRule) and learning_rate is None and rule.program is None:
        raise UsageError(f"{rule.algorithm}: expected a learning_rate, got none; pass the rate of this step")
    rate = jnp.asarray(0.0 if learning_rate is None else learning_rate, jnp.float32)
    if isinstance(rule, UpdateRule) and rule.is_corrected and rate.shape != (3,):
        raise UsageError(f"{rule.algorithm}: expected the three rates of rule.rate_at, got an array of {rate.shape}")
    table = _without_gradient(table)
    specs = (*_specs(table), table.format.spec, PartitionSpec())
    with own_promotions():
        local = _mapped(table.format, partial(_apply, rule), specs, specs[0])
        updated: Table = local(table, uses, dict(gradients), rate)
    return updated


def _without_gradient(table: Table) -> Table:
    """Return the table, which raises UsageTypeError where it is differentiated."""
    return replace(table, arrays=_constant(table.arrays))


@jax.custom_jvp
def _constant(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return arrays


@_constant.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise UsageTypeError(
        "a table has no gradient: it would have the size of the table. Differentiate the loss by the activations that "
        "gather returns, and pass that gradient to apply"
    )


def _specs(table: Table) -> tuple[Any, ...]:
    """Return how a table and uses are distributed."""
    spec = table.format.spec
    return Table(spec, PartitionSpec(), table.format), spec  # type: ignore[arg-type]


def _mapped(form: Format, local: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: Any) -> Callable[..., Any]:
    """Return ``local``, which processes one device's part, for whole arrays; inside ``shard_map`` itself."""
    names, types = set(form.mesh.axis_names), set(form.mesh.axis_types)
    inside = names <= set(jax.sharding.get_abstract_mesh().manual_axes)
    if inside or (form.mesh.size == 1 and types == {AxisType.Auto}):
        return local
    mapped: Callable[..., Any] = jax.shard_map(
        local, mesh=form.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return mapped


# ---- on one device


def _gather(table: Table, uses: Uses) -> dict[str, jax.Array]:
    _check_same(table, uses)
    line, (num_devices, room) = table.format.line, uses.asked.shape[1:]
    wanted = _exchanged(table.format, uses.asked[0])
    read, *_ = programs.rows_of(line, table.arrays, wanted.reshape(-1))
    rows = _exchanged(table.format, read.reshape(num_devices, room, line.dim)).reshape(-1, line.dim)
    if table.format.quantization is not None:
        rows = quantize(Ops(jnp), rows, *table.format.quantization)
    shapes = uses.shapes
    sizes = [math.prod(shape) for shape in shapes.values()]
    lookup_rows = _lookup_values(rows, uses.rows[0], uses.gains[0])
    plan = _of_device(uses.sample_terms, uses.sample_nodes)
    combined = summed(lookup_rows, uses.samples[0], sum(sizes), plan, ascending=True)
    activations, first = {}, 0
    for (path, shape), size in zip(shapes.items(), sizes, strict=True):
        activations[path] = combined[first : first + size].reshape(*shape, line.dim)
        first += size
    return activations


def _apply(
    rule: UpdateRule | OptaxRule, table: Table, uses: Uses, gradients: dict[str, jax.Array], rate: jax.Array
) -> Table:
    _check_same(table, uses)
    line, (num_devices, room) = table.format.line, uses.asked.shape[1:]
    of_samples = _joined(uses.shapes, gradients, line.dim)
    lookup_gradients = _lookup_values(of_samples, uses.samples[0], uses.gains[0])
    plan = _of_device(uses.row_terms, uses.row_nodes)
    of_rows = summed(lookup_gradients, uses.rows[0], num_devices * room, plan)
    arrived = _exchanged(table.format, of_rows.reshape(num_devices, room, line.dim)).reshape(-1, line.dim)
    by_row = table.format.variant == "sparsecore"

    def in_lines(indices: jax.Array | None) -> jax.Array:
        rows, cells = (part if indices is None else taken(part, indices) for part in (arrived, uses.cells[0]))
        return rows if by_row else line_arrays.spread(line, rows, cells % line.group)

    numbers, plan = uses.cells[0] // (1 if by_row else line.group), _of_device(uses.line_terms, uses.line_nodes)
    sums = summed(Values(in_lines, len(arrived)), numbers, uses.lines.shape[1], plan)
    words = jax.lax.bitcast_convert_type(sums, jnp.int32)
    if line.masked and not by_row:
        words = jnp.where(line_arrays.of_half(line, uses.touched[0], 0), words, UNTOUCHED)
    numbers = table.numbers
    if isinstance(rule, OptaxRule):
        rule, numbers = rule.at(table.numbers, line.dim)
    step, arrays = step_of(table.format, rule), table.arrays
    most = largest_bucket(table.format.mesh.devices.flat[0].platform, line)
    for first in range(0, len(words), most):
        span = slice(first, first + most)
        counts, part = jnp.clip(uses.counts - first, 0, most), words[None, span]
        if by_row:
            part = part.reshape(1, -1, line.strip)
        arrays, _ = step(arrays, uses.lines[:, span], part, counts, rate, jnp.int32(0), jnp.uint32(0))
    return Table(arrays, numbers, table.format)


def _of_device(terms: Any, nodes: Any) -> tuple[jax.Array, jax.Array] | None:
    """Return the plan of a device's sums; None: there is none, they are by a scatter."""
    return None if terms is None or not terms.shape[1] else (terms[0], nodes[0])


def _lookup_values(array: jax.Array, rows: jax.Array, gains: jax.Array) -> Values:
    """Return the values of lookups. array : (n, dim); rows, gains : of every lookup, its row there and its factor"""

    def read(indices: jax.Array | None) -> jax.Array:
        if indices is None:
            return array.at[rows].get(mode="fill", fill_value=0.0) * gains[:, None]
        return taken(array, taken(rows, indices)) * taken(gains, indices)[:, None]

    return Values(read, len(rows))


def _check_same(table: Table, uses: Uses) -> None:
    """Raise UsageError for the lookups of another table: our kernel does not check the bounds of its lines."""
    if table.arrays[0].shape[0] != uses.num_lines:
        of_table = f"a table of {table.arrays[0].shape[0]} lines per device"
        raise UsageError(f"expected uses of {of_table}, got some for {uses.num_lines}; preprocess them for this table")


def step_of(form: Format, rule: UpdateRule) -> Callable[..., Any]:
    """Return the function that updates one device's part of a table."""
    if form.variant in KERNELS:
        step: Callable[..., Any] = kernel(form.variant).local_apply(form.mesh, rule, form.line)
        return step
    return programs.local_apply(rule, form.line)


def _exchanged(form: Format, parts: jax.Array) -> jax.Array:
    """Send part i of axis 0 to device i; return the parts from all devices, in order."""
    if len(parts) == 1:
        return parts
    exchanged: jax.Array = jax.lax.all_to_all(parts, form.mesh.axis_names, 0, 0, tiled=True)
    return exchanged


def _joined(shapes: Mapping[str, tuple[int, ...]], gradients: dict[str, jax.Array], dim: int) -> jax.Array:
    """Return the gradients of all samples, float32 (samples, dim), feature by feature."""
    if gradients.keys() != shapes.keys():
        raise UsageError(f"gradients: expected one per feature ({', '.join(shapes)}), got {', '.join(gradients)}")
    for path, shape in shapes.items():
        if gradients[path].shape != (*shape, dim):
            got = list(gradients[path].shape)
            raise UsageError(f"gradient of feature '{path}': expected shape {[*shape, dim]}, got {got}")
    return jnp.concatenate([gradients[path].astype(jnp.float32).reshape(-1, dim) for path in shapes])
