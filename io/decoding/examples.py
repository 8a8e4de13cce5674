"""The example stream: one row per training example, one struct column per feature.

A feature's struct holds the ids that the example looked up, perhaps their weights, and the gradient of the activation
they were combined into. This module checks and reads the columns; ``example_gradients`` converts them to gradient
rows, so that frames and errors are those of the row stream. The arithmetic is in ``penstock.model.combiners``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.base.errors import ConfigError, InputError
from penstock.io.decoding.columns import Bool, Float32, Int64, Lists, float_lists
from penstock.io.decoding.example_gradients import ExampleUses, table_rows
from penstock.io.decoding.frame_columns import Broken, frame_columns
from penstock.io.decoding.read_options import ReadOptions
from penstock.io.decoding.role_types import is_float_list, is_list, storage_type, suggestion
from penstock.io.decoding.row_columns import valid_column
from penstock.io.decoding.rows import DecodedBatch
from penstock.io.decoding.schema import Roles, check_types, field_of, fields_of
from penstock.io.decoding.string_ids import hashing_hint, holds_text, ids_of
from penstock.io.sources.batch import Batch
from penstock.model.combiners import gains
from penstock.model.config.specs import FeatureSpec
from penstock.model.frames import ROLES

CHILDREN = ("ids", "weights", "gradient")


@dataclass(frozen=True)
class ExampleRoles(Roles):
    """The columns of an example stream. ``id`` and ``gradient`` are those of its first feature, for messages.

    features : the features that have a column, in the configuration's order
    """

    features: tuple[FeatureSpec, ...] = ()

    @cached_property
    def names(self) -> list[str]:
        fields = (self.step, self.contributor, self.learning_rates, self.time)
        return [feature.path for feature in self.features] + [f.name for f in fields if f is not None]


def resolve_examples(schema: pa.Schema, source: str, options: ReadOptions) -> ExampleRoles | None:
    """Return the roles of an example stream; None for another schema. Raises InputError or ConfigError."""
    structs = [field for field in schema if _is_feature(field.type)]
    if not structs or {"id", "gradient"} <= set(schema.names):
        return None
    columns = {field.name for field in structs}
    features_in_use = [feature for feature in options.features if feature.path in columns]
    if not features_in_use:
        paths = [feature.path for feature in options.features]
        expected = f"one of its features ({', '.join(paths)})" if paths else "any feature"
        near = suggestion(structs[0].name, paths)
        if paths and not any(feature.name for feature in options.features):
            near += "; features without a name go by their key path; name them as their columns"
        problem = f"an example stream, but the configuration does not know its columns as {expected}{near}"
        raise InputError(problem, source=source, column=structs[0].name)
    for feature in features_in_use:
        field_of(schema, source, feature.path, feature.path)  # one column has this name
        _check(feature, schema.field(feature.path), options, source)
    first = schema.field(features_in_use[0].path)
    fields = fields_of(schema, source, ROLES[3:], options)
    check_types(fields, source)
    return ExampleRoles(
        **fields,
        id=first,
        gradient=first,
        table=None,
        default_table=features_in_use[0].table,
        bfloat16=False,
        ids_only=options.ids_only,
        features=tuple(features_in_use),
    )


def decode_examples(batch: Batch, roles: ExampleRoles, options: ReadOptions) -> DecodedBatch:
    """Decode a batch of examples, which must not be empty."""
    columns = {name: valid_column(batch, name) for name in roles.names}
    uses: dict[str, list[ExampleUses]] = {}
    for number, feature in enumerate(roles.features):
        dim = None if options.ids_only else options.sizes[feature.table][1]
        of_feature = _uses(columns[feature.path], feature, number, dim)
        uses.setdefault(feature.table, []).append(of_feature)
    frames, every = frame_columns(columns, roles, options.num_tags), list(chain.from_iterable(uses.values()))
    frames.no_step = _first(frames.no_step, *(use.broken for use in every))
    counts = [use.truncated for use in every if use.truncated is not None]
    return DecodedBatch(
        frames, [table_rows(of_table) for of_table in uses.values()], np.sum(counts, axis=0) if counts else None
    )


def _first(*broken: Broken | None) -> Broken | None:
    return min(filter(None, broken), key=lambda item: item.row, default=None)


def _is_feature(kind: pa.DataType) -> bool:
    if not pa.types.is_struct(kind):
        return False
    return {"ids", "gradient"} <= {kind.field(i).name for i in range(kind.num_fields)}


def _check(feature: FeatureSpec, field: pa.Field, options: ReadOptions, source: str) -> None:
    """Check the types of a feature's struct, and that it can be combined."""
    names = [child.name for child in field.type]
    for child in CHILDREN:
        if names.count(child) > 1:
            problem = f"{names.count(child)} values of the struct have the name '{child}'; keep one"
            raise InputError(problem, source=source, column=field.name)
    kinds = {child.name: storage_type(child.type) for child in field.type}
    for child, kind in kinds.items():
        if child == "ids":
            values = kind.value_type if is_list(kind) else pa.null()
            fits = pa.types.is_integer(values) or (options.hash_ids and holds_text(values))
            expected = f"a list of integers{hashing_hint(values)}"
        else:
            fits, expected = is_float_list(kind), "a list of floats"
        if child in CHILDREN and not fits:
            raise InputError(f"expected {expected} in '{child}', got {kind}", source=source, column=field.name)
    if feature.sequence_length and "weights" in kinds:
        raise InputError("a sequence feature takes no weights", source=source, column=field.name)
    if not feature.sequence_length and feature.combiner is None:
        by = (
            f"name: '{feature.name}'"
            if feature.path == feature.name
            else f"feature_id: {options.features.index(feature)}"
        )
        raise ConfigError(
            f"feature '{feature.path}': the configuration has no combiner for it, which an example stream needs; "
            f"add feature {{ {by} combiner: 'mean' }} to an EngineConfig"
        )
    gradient, num_floats = kinds["gradient"], _width(feature, options.sizes[feature.table][1])
    if not options.ids_only and pa.types.is_fixed_size_list(gradient) and gradient.list_size != num_floats:
        problem = f"expected {num_floats} floats in 'gradient', got {gradient.list_size}{_combined(feature)}"
        raise InputError(problem, source=source, column=field.name)


def _combined(feature: FeatureSpec) -> str:
    """Explain why a feature with a max_sequence_length is not a sequence."""
    if not feature.max_sequence_length or feature.sequence_length:
        return ""
    length, shape = feature.max_sequence_length, list(feature.input_shape)
    return f"; its ids are combined, since its shape {shape} does not end in max_sequence_length {length}"


def _width(feature: FeatureSpec, dim: int) -> int:
    return dim * (feature.sequence_length or 1)


def _uses(column: pa.StructArray, feature: FeatureSpec, number: int, dim: int | None) -> ExampleUses:
    """dim : None: read the ids alone"""
    names = [child.name for child in column.type]
    # The fields of a null struct are null.
    children: Mapping[str, pa.Array] = dict(zip(names, column.flatten(), strict=True))
    flat, lengths = _flat(children["ids"])
    raw_ids, ids_null = ids_of(flat)
    gradients, null, broken = np.empty((len(column) * (feature.sequence_length or 1), 0), np.float32), None, None
    if dim is not None:
        width = _width(feature, dim)
        gradients, null, broken = _dense(float_lists(children["gradient"]), width, lengths, feature.path)
    samples = np.repeat(np.arange(len(column)), lengths)
    by, truncated = None, None
    if feature.sequence_length:
        mask, samples, truncated = _positions(samples, lengths, feature.sequence_length)
        raw_ids, ids_null = raw_ids[mask], None if ids_null is None else ids_null[mask]
        lengths = lengths - truncated
        gradients = gradients if dim is None else gradients.reshape(-1, dim)
    elif dim is not None:
        weights = None
        if "weights" in children:
            weights, mismatch = _weights(children["weights"], lengths, feature.path)
            broken = _first(broken, mismatch)
        by = gains(samples, weights, len(column), feature.combiner or "")
    if null is not None and not (null & (lengths > 0)).any():
        null = None
    return ExampleUses(
        feature.table, number, lengths, raw_ids, ids_null, gradients, samples, by, null, truncated, broken
    )


def _positions(examples: Int64, lengths: Int64, most: int) -> tuple[Bool, Int64, Int64]:
    """Truncate sequences: return a mask of the ids kept, the position of each, and the number dropped by example."""
    positions = np.arange(len(examples)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    mask = positions < most
    return mask, (examples * most + positions)[mask], np.maximum(lengths - most, 0)


def _flat(column: pa.Array) -> tuple[pa.Array, Int64]:
    """Return the values of all lists, and the length of each; a null list is empty."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return column.flatten(), lengths


def _weights(column: pa.Array, lengths: Int64, name: str) -> tuple[Float32, Broken | None]:
    """Return a weight per id; a missing one is NaN, and makes its gradient row bad."""
    flat, num_weights = _flat(column)
    if flat.type != pa.float32():
        flat = flat.cast(pa.float64())  # float16 has no null that can be filled
    with np.errstate(over="ignore"):
        values = pc.fill_null(flat, float("nan")).to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    if not values.flags.aligned:  # as its producer laid it out
        values = values.copy()
    if np.array_equal(num_weights, lengths):
        return values, None
    row = int(np.argmax(num_weights != lengths))
    whole = np.full(int(lengths.sum()), np.nan, np.float32)  # what comes before the row is right
    before = int(lengths[:row].sum())
    whole[:before] = values[:before]
    return whole, Broken(row, f"expected {lengths[row]} weights, one per id, got {num_weights[row]}", name)


def _dense(lists: Lists, width: int, lengths: Int64, name: str) -> tuple[Float32, Bool | None, Broken | None]:
    """Return float32 (examples, width), which examples are null, and the first with lookups that has another length."""
    null = np.zeros(lists.num_rows, bool) if lists.null is None else lists.null
    wrong = np.broadcast_to(lists.differ_from(width), null.shape) | null
    if not wrong.any():
        return lists.take(slice(0, lists.num_rows), width), None, None
    dense = np.zeros((lists.num_rows, width), np.float32)
    dense[~wrong] = lists.take(np.flatnonzero(~wrong), width)
    short = wrong & ~null & (lengths > 0)
    if not short.any():
        return dense, null, None
    row = int(np.argmax(short))
    return dense, null, Broken(row, f"expected {width} floats in 'gradient', got {lists.length(row)}", name)
