"""A record batch → numpy: every column used is validated before a pointer into it is taken.

Also says what is wrong with each row. Knows nothing of frames: reader cuts those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import InputError
from penstock.io.schema import Roles, is_text, storage_type, suggestion

Bool = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

# Why a row is bad; the number is its code, and where several hold the first one is told.
REASONS = (
    "",
    "unknown_table",
    "id_null",
    "id_out_of_range",
    "gradient_null",
    "length_mismatch",
    "gradient_not_finite",
)
CODE = {reason: code for code, reason in enumerate(REASONS)}

_FLOATS_AT_ONCE = 1 << 16  # the mask of a finiteness check stays in cache


@dataclass(frozen=True)
class Gradients:
    """The gradient column: one flat float32 array and where each row lies in it.

    starts : None when row i is values[i*width : (i+1)*width]
    """

    values: Float32
    width: int
    starts: Int64 | None
    lengths: Int64 | None
    null: Bool | None

    def take(self, rows: slice | Int64, dim: int) -> Float32:
        """float32 (n, dim); a view where the rows are a slice of equal widths. Only for rows of length dim."""
        if self.starts is None:
            return self.values.reshape(-1, self.width)[rows]
        return self.values[self.starts[rows][:, None] + np.arange(dim)]


@dataclass(frozen=True)
class Decoded:
    """One batch's columns as numpy.

    tables : names; codes say which row is of which, -1 for a null. One name and codes None: all rows.
    """

    num_rows: int
    tables: tuple[str | None, ...]
    codes: Int64 | None
    raw_ids: npt.NDArray[Any]
    ids: Int64
    ids_null: Bool | None
    gradients: Gradients
    steps: Int64 | None
    contributors: tuple[Int64, list[Any]] | None
    rates: Float32 | None  # (n, number of tags)

    def table_of(self, row: int) -> str | None:
        code = 0 if self.codes is None else int(self.codes[row])
        return None if code < 0 else self.tables[code]


def decode(
    batch: pa.RecordBatch, roles: Roles, default_table: str | None, num_tags: int | None, place: Mapping[str, Any]
) -> Decoded:
    """Validate the columns used and turn them into numpy.

    default_table : of rows that do not say theirs
    num_tags : how many learning rates a row must carry; None does not look at them
    place : source and batch, for messages
    """
    columns = {}
    for name in roles.names():
        column = batch.column(name)
        try:
            column.validate(full=True)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"corrupt Arrow data: {error}", column=name, **place) from error
        columns[name] = column
    raw_ids, ids_null = _integers(columns[roles.id.name])
    tables, codes = _tables(columns, roles, default_table)
    return Decoded(
        num_rows=batch.num_rows,
        tables=tables,
        codes=codes,
        raw_ids=raw_ids,
        # Narrowed only for use as an index: what does not fit int64 is told from raw_ids.
        ids=raw_ids.astype(np.int64, copy=False),
        ids_null=ids_null,
        gradients=_gradients(columns[roles.gradient.name], roles.bfloat16),
        steps=_steps(columns, roles, place),
        contributors=None if roles.contributor is None else _coded(columns[roles.contributor.name]),
        rates=_rates(columns, roles, num_tags, place),
    )


def find_bad_rows(decoded: Decoded, sizes: Mapping[str, tuple[int, int]]) -> npt.NDArray[np.uint8] | None:
    """The reason code of every row, or None when all are good. sizes : table → (vocabulary_size, dim)."""
    known = [sizes.get(name, (0, -1)) if name is not None else (0, -1) for name in decoded.tables]
    if decoded.codes is None:
        vocabulary, dim = (np.int64(n) for n in known[0])
        unknown: Any = np.bool_(dim < 0)
    else:
        # The last entry stands for code -1, a null.
        lookup = np.array([*known, (0, -1)], np.int64)
        vocabulary, dim = lookup[decoded.codes, 0], lookup[decoded.codes, 1]
        unknown = dim < 0
    out_of_range = (decoded.ids < 0) | (decoded.ids >= vocabulary)
    if decoded.raw_ids.dtype == np.uint64:
        out_of_range |= decoded.raw_ids > np.uint64(2**63 - 1)
    gradients = decoded.gradients
    lengths = gradients.width if gradients.lengths is None else gradients.lengths
    causes = {
        "gradient_not_finite": _not_finite_rows(gradients, decoded.num_rows),
        "length_mismatch": np.asarray(lengths != dim),
        "gradient_null": gradients.null,
        "id_out_of_range": out_of_range,
        "id_null": decoded.ids_null,
        "unknown_table": unknown,
    }
    if not any(cause is not None and cause.any() for cause in causes.values()):
        return None
    codes = np.zeros(decoded.num_rows, np.uint8)
    for reason, cause in causes.items():  # the strongest last: it overwrites
        if cause is not None:
            codes[np.broadcast_to(cause, codes.shape)] = CODE[reason]
    return codes if codes.any() else None


def explain(
    decoded: Decoded, row: int, code: int, sizes: Mapping[str, tuple[int, int]], roles: Roles
) -> tuple[str, str]:
    """What is wrong with a row, as (problem, column name)."""
    reason, table = REASONS[code], decoded.table_of(row)
    if reason == "unknown_table":
        column = roles.table.name if roles.table is not None else "table"
        near = suggestion(table, list(sizes)) if table is not None else ""
        got = "null" if table is None else f"'{table}'"
        return f"expected a table of the configuration ({', '.join(sizes)}), got {got}{near}", column
    vocabulary, dim = sizes[table or ""]
    if reason == "id_null":
        return "expected an id, got null", roles.id.name
    if reason == "id_out_of_range":
        wanted = f"0 <= id < {vocabulary} (vocabulary_size of table '{table}')"
        return f"expected {wanted}, got {decoded.raw_ids[row]}", roles.id.name
    if reason == "gradient_null":
        return f"expected {dim} floats, got null", roles.gradient.name
    gradients = decoded.gradients
    length = gradients.width if gradients.lengths is None else int(gradients.lengths[row])
    if reason == "length_mismatch":
        return f"expected {dim} floats (dim of table '{table}'), got {length}", roles.gradient.name
    start = row * length if gradients.starts is None else int(gradients.starts[row])
    values = gradients.values[start : start + length]
    at = int(np.flatnonzero(~np.isfinite(values))[0])
    return f"expected finite float32 values, got {values[at]} at position {at}", roles.gradient.name


def _integers(column: pa.Array) -> tuple[npt.NDArray[Any], Bool | None]:
    null = _null(column)
    if null is not None:
        column = pc.fill_null(column, 0)
    return _numpy(column), null


def _null(column: pa.Array) -> Bool | None:
    if column.null_count == 0:
        return None
    mask: Bool = column.is_null().to_numpy(zero_copy_only=False)
    return mask


def _numpy(column: pa.Array) -> npt.NDArray[Any]:
    """A view of a primitive column without nulls; a copy where the producer did not align it."""
    values: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return values if values.flags.aligned else values.copy()


def _tables(
    columns: Mapping[str, pa.Array], roles: Roles, default: str | None
) -> tuple[tuple[str | None, ...], Int64 | None]:
    if roles.table is None:
        return (roles.default_table or default,), None
    codes, names = _coded(columns[roles.table.name])
    if len(names) == 1 and (codes >= 0).all():
        return tuple(names), None
    return tuple(names), codes


def _coded(column: pa.Array) -> tuple[Int64, list[Any]]:
    """Codes into a list of distinct values, -1 for null."""
    if not pa.types.is_dictionary(column.type):
        if is_text(column.type) and pa.types.is_string_view(column.type):
            column = column.cast(pa.large_string())
        column = column.dictionary_encode()
    indices, values = column.indices, column.dictionary.to_pylist()
    codes = pc.fill_null(indices.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
    distinct: dict[Any, int] = {}
    renumber = np.array([-1 if v is None else distinct.setdefault(v, len(distinct)) for v in values] + [-1], np.int64)
    if not np.array_equal(renumber[:-1], np.arange(len(values))):
        codes = renumber[codes]
    return codes, list(distinct)


def _steps(columns: Mapping[str, pa.Array], roles: Roles, place: Mapping[str, Any]) -> Int64 | None:
    if roles.step is None:
        return None
    steps, null = _integers(columns[roles.step.name])
    if null is not None:
        raise InputError("expected a step, got null", row=int(np.argmax(null)), column=roles.step.name, **place)
    if steps.dtype == np.uint64 and (big := steps > np.uint64(2**63 - 1)).any():
        row = int(np.argmax(big))
        raise InputError(f"expected an int64, got {steps[row]}", row=row, column=roles.step.name, **place)
    return steps.astype(np.int64, copy=False)


def _rates(
    columns: Mapping[str, pa.Array], roles: Roles, num_tags: int | None, place: Mapping[str, Any]
) -> Float32 | None:
    if roles.learning_rates is None or num_tags is None:
        return None
    name = roles.learning_rates.name
    lists = _lists(columns[name], bfloat16=False)
    rows = len(columns[name])
    lengths = np.full(rows, lists.width) if lists.lengths is None else lists.lengths
    bad = lengths != num_tags
    if lists.null is not None:
        bad |= lists.null
    if bad.any():
        row = int(np.argmax(bad))
        got = "null" if lists.null is not None and lists.null[row] else f"{lengths[row]}"
        raise InputError(f"expected {num_tags} learning rates, one per tag, got {got}", row=row, column=name, **place)
    rates = lists.take(slice(0, rows), num_tags) if num_tags else np.empty((rows, 0), np.float32)
    if not np.isfinite(rates).all():
        row = int(np.argmin(np.isfinite(rates).all(axis=1)))
        raise InputError(f"expected finite learning rates, got {rates[row].tolist()}", row=row, column=name, **place)
    return rates


def _gradients(column: pa.Array, bfloat16: bool) -> Gradients:
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    return _lists(column, bfloat16)


def _lists(column: pa.Array, bfloat16: bool) -> Gradients:
    kind, null = storage_type(column.type), _null(column)
    if pa.types.is_fixed_size_list(kind):
        # .values ignores the slice, and .flatten() would skip null rows.
        width = kind.list_size
        child = column.values.slice(column.offset * width, len(column) * width)
        starts = lengths = None
    else:
        offsets = _numpy(column.offsets).astype(np.int64, copy=False)
        first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
        child = column.values.slice(first, last - first)
        starts, lengths, width = offsets[:-1] - first, np.diff(offsets), 0
        if len(lengths) and (lengths == lengths[0]).all() and null is None:
            # Rows of one length, back to back: as good as a fixed-size list.
            width, starts, lengths = int(lengths[0]), None, None
    if child.null_count:
        inside = child.is_null().to_numpy(zero_copy_only=False)
        child = pc.fill_null(child, 0)
        holes = _rows_with(inside, len(column), width, starts, lengths)
        null = holes if null is None else null | holes
    return Gradients(_float32(_numpy(child), bfloat16), width, starts, lengths, null)


def _rows_with(mask: Bool, num_rows: int, width: int, starts: Int64 | None, lengths: Int64 | None) -> Bool:
    """Which rows have any True among their values."""
    if starts is None or lengths is None:
        return mask.reshape(num_rows, width).any(axis=1) if width else np.zeros(num_rows, bool)
    before = np.concatenate([[0], np.cumsum(mask)])
    return np.asarray(before[starts + lengths] > before[starts])


def _float32(values: npt.NDArray[Any], bfloat16: bool) -> Float32:
    if bfloat16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore"):  # what is finite in float64 only is found below as not finite
        return values.astype(np.float32, copy=False)


def _not_finite_rows(gradients: Gradients, num_rows: int) -> Bool | None:
    values = gradients.values
    blocks = range(0, values.size, _FLOATS_AT_ONCE)
    if all(np.isfinite(values[at : at + _FLOATS_AT_ONCE]).all() for at in blocks):
        return None
    return _rows_with(~np.isfinite(values), num_rows, gradients.width, gradients.starts, gradients.lengths)
