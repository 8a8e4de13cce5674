"""The example stream: one row per training example, one struct column per feature → gradient rows.

A feature's struct holds the ids that the example looked up, perhaps their weights, and the gradient of the activation
they were combined into. A batch of them becomes what a batch of gradient rows decodes to, so that frames, checks and
errors are those of the row stream; ``penstock.expand`` has the arithmetic. Rows come example by example and feature by
feature in the configuration's order, whatever the batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.config.specs import FeatureSpec
from penstock.errors import ConfigError, InputError, UsageError
from penstock.expand import gains, row_gradients
from penstock.io.columns import Bool, Float32, Int64, Lists, coded, float_lists, integers
from penstock.io.cutting import Piece, Place
from penstock.io.decode import Broken, Decoded, rates_of, steps_of, valid_column
from penstock.io.options import ReadOptions
from penstock.io.schema import ROLES, Roles, field_of, is_float_list, is_list, storage_type, suggestion

CHILDREN = ("ids", "weights", "gradient")


@dataclass(frozen=True)
class ExampleRoles(Roles):
    """The columns of an example stream. ``id`` and ``gradient`` are those of its first feature, for messages.

    features : the features that have a column, in the configuration's order
    """

    features: tuple[FeatureSpec, ...] = ()

    def names(self) -> list[str]:
        fields = (self.step, self.contributor, self.learning_rates)
        return [feature.name for feature in self.features] + [f.name for f in fields if f is not None]


@dataclass(frozen=True)
class ExamplePlace(Place):
    """Where a batch of examples stood.

    examples : int64, shape (rows,), whose gradient row it is; columns, column_of : and of which feature
    """

    examples: Int64
    columns: Sequence[str]
    column_of: Int64

    def error(self, row: int, problem: str, column: str | None, reason: str | None = None) -> InputError:
        """row : a bad gradient row where there is a reason, else an example"""
        if reason is not None:
            row, column = int(self.examples[row]), self.columns[int(self.column_of[row])]
        return super().error(row, problem, column, reason)


class Expanded(NamedTuple):
    """One feature's gradient rows of one batch.

    null : whose gradient is missing; broken : the first example after which nothing of it can be read
    """

    examples: Int64
    ids: Int64
    ids_null: Bool
    gradients: Float32
    null: Bool
    broken: Broken | None


def resolve_examples(schema: pa.Schema, source: str, options: ReadOptions) -> ExampleRoles | None:
    """The roles of an example stream; None where the schema is not one. Raises InputError or ConfigError."""
    structs = [field for field in schema if _is_feature(field.type)]
    if not structs or {"id", "gradient"} <= set(schema.names):
        return None
    known = [feature for feature in options.features if feature.name in {field.name for field in structs}]
    if not known:
        names = [feature.name for feature in options.features if feature.name]
        wanted = f"one of its features ({', '.join(names)})" if names else "any feature"
        near = suggestion(structs[0].name, names)
        problem = f"an example stream, but the configuration does not know its columns as {wanted}{near}"
        raise InputError(problem, source=source, column=structs[0].name)
    if options.on_bad_row == "quarantine":
        raise UsageError(f"{source}: bad rows of an example stream cannot be put aside; use on_bad_row='drop'")
    for feature in known:
        field_of(schema, source, feature.name, feature.name)  # one column has this name
        _check(feature, schema.field(feature.name), options.sizes[feature.table][1], source)
    first = schema.field(known[0].name)
    fields = {role: field_of(schema, source, role, options.columns.get(role)) for role in ROLES[3:]}
    return ExampleRoles(
        **fields,
        id=first,
        gradient=first,
        table=None,
        default_table=known[0].table,
        bfloat16=False,
        features=tuple(known),
    )


def expand_batch(
    batch: pa.RecordBatch, roles: ExampleRoles, options: ReadOptions, place: Place
) -> tuple[Decoded, ExamplePlace, Int64]:
    """A batch of examples as decoded gradient rows, where they stood, and of which example each is.

    Steps, contributors and rates stay one per example: an example that looks nothing up belongs to its frame, too.
    """
    where = {"source": place.source, "batch": place.batch}
    columns = {name: valid_column(batch, name, where) for name in roles.names()}
    parts = [_expand(columns[f.name], f, options.sizes[f.table][1]) for f in roles.features]
    examples = np.concatenate([part.examples for part in parts])
    order = np.argsort(examples, kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    examples = examples[order]
    steps, no_step = steps_of(columns, roles)
    rates, no_rates = rates_of(columns, roles, options.num_tags)
    broken = min(filter(None, [no_step, *(p.broken for p in parts)]), key=lambda b: b.row, default=None)
    tables = list(dict.fromkeys(f.table for f in roles.features))
    of_feature = np.array([tables.index(f.table) for f in roles.features], np.int64)
    feature_of = np.repeat(np.arange(len(parts)), [len(p.ids) for p in parts])[order]
    ids, ids_null = (np.concatenate([part[n] for part in parts])[order] for n in (1, 2))
    decoded = Decoded(
        num_rows=len(examples),
        tables=tuple(tables),
        codes=None if len(tables) == 1 else of_feature[feature_of],
        raw_ids=ids,
        ids=ids,
        ids_null=ids_null if ids_null.any() else None,
        gradients=_gradients(parts, order, position),
        steps=steps,
        contributors=None if roles.contributor is None else coded(columns[roles.contributor.name]),
        rates=rates,
        no_step=broken,
        no_rates=no_rates,
    )
    names = [feature.name for feature in roles.features]
    there = ExamplePlace(place.source, place.batch, place.first_row, examples, names, feature_of)
    return decoded, there, examples


def of_examples(piece: Piece, examples: Int64) -> Piece:
    """A piece cut by examples as one of their gradient rows."""
    start, stop = np.searchsorted(examples, [piece.start, piece.stop]).tolist()
    return replace(piece, start=start, stop=stop, examples=examples, first=piece.start, last=piece.stop)


def _is_feature(kind: pa.DataType) -> bool:
    if not pa.types.is_struct(kind):
        return False
    return {"ids", "gradient"} <= {kind.field(i).name for i in range(kind.num_fields)}


def _check(feature: FeatureSpec, field: pa.Field, dim: int, source: str) -> None:
    """Types of a feature's struct, and that it can be combined."""
    kinds = {child.name: storage_type(child.type) for child in field.type}
    for child, kind in kinds.items():
        fits = is_list(kind) and pa.types.is_integer(kind.value_type) if child == "ids" else is_float_list(kind)
        if child in CHILDREN and not fits:
            wanted = "a list of integers" if child == "ids" else "a list of floats"
            raise InputError(f"expected {wanted} in '{child}', got {kind}", source=source, column=field.name)
    if feature.max_sequence_length and "weights" in kinds:
        raise InputError("a sequence feature takes no weights", source=source, column=field.name)
    if not feature.max_sequence_length and feature.combiner is None:
        raise ConfigError(
            f"feature '{feature.name}': the configuration does not say its combiner, which an example stream needs; "
            f"add feature {{ name: '{feature.name}' combiner: 'mean' }} to an EngineConfig"
        )
    gradient, wanted_floats = kinds["gradient"], _width(feature, dim)
    if pa.types.is_fixed_size_list(gradient) and gradient.list_size != wanted_floats:
        problem = f"expected {wanted_floats} floats in 'gradient', got {gradient.list_size}"
        raise InputError(problem, source=source, column=field.name)


def _width(feature: FeatureSpec, dim: int) -> int:
    return dim * (feature.max_sequence_length or 1)


def _expand(column: pa.StructArray, feature: FeatureSpec, dim: int) -> Expanded:
    names = [child.name for child in column.type]
    children: Mapping[str, pa.Array] = dict(
        zip(names, column.flatten(), strict=True)
    )  # what a null struct holds is null
    num_examples, width = len(column), _width(feature, dim)
    ids, ids_null, lengths = _ids(children["ids"])
    gradients, null, broken = _dense(float_lists(children["gradient"]), width, lengths, feature.name)
    examples = np.repeat(np.arange(num_examples), lengths)
    if feature.max_sequence_length:
        positions = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        kept = positions < feature.max_sequence_length
        samples = (examples * feature.max_sequence_length + positions)[kept]
        rows = row_gradients(gradients.reshape(-1, dim), samples, None)
        return Expanded(examples[kept], ids[kept], ids_null[kept], rows, null[examples[kept]], broken)
    weights = None
    if "weights" in children:
        weights, mismatch = _weights(children["weights"], lengths, feature.name)
        broken = min(filter(None, (broken, mismatch)), key=lambda b: b.row, default=None)
    by = gains(examples, weights, num_examples, feature.combiner or "")
    return Expanded(examples, ids, ids_null, row_gradients(gradients, examples, by), null[examples], broken)


def _ids(column: pa.Array) -> tuple[Int64, Bool, Int64]:
    """Flat ids, which are null, and how many each example has."""
    flat, lengths = _flat(column)
    raw, null = integers(flat)
    if raw.dtype == np.uint64:  # no table has so many rows: it stays out of range
        raw = np.minimum(raw, np.uint64(2**63 - 1))
    return raw.astype(np.int64), np.zeros(len(raw), bool) if null is None else null, lengths


def _flat(column: pa.Array) -> tuple[pa.Array, Int64]:
    """The values of all lists, and the length of each; a null list is an empty one."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return column.flatten(), lengths


def _weights(column: pa.Array, lengths: Int64, name: str) -> tuple[Float32, Broken | None]:
    """A weight per id; a missing one is NaN, and makes its gradient row bad."""
    flat, found = _flat(column)
    with np.errstate(over="ignore"):
        values = pc.fill_null(flat.cast(pa.float64()), float("nan")).to_numpy(zero_copy_only=False).astype(np.float32)
    if np.array_equal(found, lengths):
        return values, None
    row = int(np.argmax(found != lengths))
    whole = np.full(int(lengths.sum()), np.nan, np.float32)  # what comes before the row is right
    before = int(lengths[:row].sum())
    whole[:before] = values[:before]
    return whole, Broken(row, f"expected {lengths[row]} weights, one per id, got {found[row]}", name)


def _dense(lists: Lists, width: int, lengths: Int64, name: str) -> tuple[Float32, Bool, Broken | None]:
    """float32 (examples, width); which are null; the first that looks something up and is of another length."""
    null = np.zeros(lists.num_rows, bool) if lists.null is None else lists.null
    wrong = np.broadcast_to(lists.differ_from(width), null.shape) | null
    if not wrong.any():
        return lists.take(slice(0, lists.num_rows), width), null, None
    dense = np.zeros((lists.num_rows, width), np.float32)
    dense[~wrong] = lists.take(np.flatnonzero(~wrong), width)
    short = wrong & ~null & (lengths > 0)
    if not short.any():
        return dense, null, None
    row = int(np.argmax(short))
    return dense, null, Broken(row, f"expected {width} floats in 'gradient', got {lists.length(row)}", name)


def _gradients(parts: Sequence[Expanded], order: Int64, position: Int64) -> Lists:
    """The rows of all features in their order."""
    counts = [len(part.ids) for part in parts]
    firsts = np.cumsum([0, *counts])
    dims = np.array([part.gradients.shape[1] for part in parts], np.int64)
    null = np.concatenate([part.null for part in parts])[order]
    missing = null if null.any() else None
    if len(parts) == 1:
        return Lists(parts[0].gradients.reshape(-1), counts[0], int(dims[0]), None, missing)
    lengths = np.repeat(dims, counts)[order]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    starts = offsets[:-1]
    values = np.empty(int(lengths.sum()), np.float32)
    for part, dim, first, count in zip(parts, dims.tolist(), firsts, counts, strict=False):
        if not count:
            continue
        at = starts[position[first : first + count]]
        np.lib.stride_tricks.sliding_window_view(values, dim, writeable=True)[at] = part.gradients
    if (dims == dims[0]).all():
        return Lists(values, len(order), int(dims[0]), None, missing)
    return Lists(values, len(order), 0, offsets, missing)
