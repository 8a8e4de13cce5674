"""Convert one Arrow column to numpy: integers, codes into values, or lists of floats.

Handles types, not roles. Validate the column in full before: these functions take pointers into it, without a copy if
the producer's layout allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Bool = npt.NDArray[np.bool_]
Int64 = npt.NDArray[np.int64]
Codes = npt.NDArray[np.signedinteger[Any]]
Float32 = npt.NDArray[np.float32]

Runs = list[tuple[int, int, int]]  # (start, stop, what all rows from start to stop have in common)

_FLOAT32 = pa.float32()
_FLOATS_AT_ONCE = 1 << 16  # the mask of a finiteness check stays in cache
# Rows are processed run by run if runs have so many on average, else one by one.
ROWS_OF_A_RUN = 256


Look = tuple[Float32, Int64 | None, Float32 | None]  # of Rows: grads, which, gains


@dataclass(eq=False)
class Lists:
    """A column of lists: one flat float32 array and where each row lies in it.

    width : of every row, where offsets is None: row i is then values[i*width : (i+1)*width]
    offsets : integers, shape (n + 1,): row i is values[offsets[i] : offsets[i+1]]
    null : rows that are null or contain a null; None if there are none
    """

    values: Float32
    num_rows: int
    width: int
    offsets: npt.NDArray[Any] | None
    null: Bool | None

    def look(self, rows: slice | Int64, dim: int) -> Look:
        """Return the values and the indices of the selected rows (None: all), without a copy.

        rows : of length dim, not null, ascending; a slice has a start and a stop
        Returns float32 (m, dim), int64 (n,) or None, and None, since there is no factor.
        """
        if self.offsets is None:
            whole = self.values.reshape(self.num_rows, self.width)
            return (whole[rows], None, None) if isinstance(rows, slice) else (whole, rows, None)
        starts = self.offsets[:-1][rows]
        if not len(starts):
            return np.empty((0, dim), np.float32), None, None
        first, num_values = int(starts[0]), len(starts) * dim
        if starts[-1] - first == num_values - dim:  # contiguous
            return self.values[first : first + num_values].reshape(-1, dim), None, None
        # Rows of several lengths: every offset where one of this length could begin.
        windows = np.lib.stride_tricks.sliding_window_view(self.values, dim)
        return windows, starts.astype(np.int64, copy=False), None

    def take(self, rows: slice | Int64, dim: int) -> Float32:
        """Return float32 (n, dim); a view if the rows are contiguous. rows : as in ``look``"""
        values, row_index, _ = self.look(rows, dim)
        return values if row_index is None else values[row_index]

    def of_row(self, row: int) -> Float32:
        length = self.length(row)
        start = row * length if self.offsets is None else int(self.offsets[row])
        return self.values[start : start + length]

    def length(self, row: int) -> int:
        return self.width if self.offsets is None else int(self.offsets[row + 1] - self.offsets[row])

    def differ_from(self, dim: int | np.int64 | Int64) -> Bool:
        """Return which rows do not have that length; one value for all rows if both are constant."""
        return np.asarray((self.width if self.offsets is None else np.diff(self.offsets)) != dim, np.bool_)

    def first_unlike(self, dim: int) -> int | None:
        """Return the first row that is not ``dim`` finite floats."""
        unlike = np.zeros(self.num_rows, bool) | self.differ_from(dim)
        for cause in (self.null, self.not_finite()):
            unlike = unlike if cause is None else unlike | cause
        return int(np.argmax(unlike)) if unlike.any() else None

    def not_finite(self) -> Bool | None:
        """Return which rows contain a NaN or an infinity, None if none do."""
        blocks = range(0, self.values.size, _FLOATS_AT_ONCE)
        if all(np.isfinite(self.values[first : first + _FLOATS_AT_ONCE]).all() for first in blocks):
            return None
        return self.rows_with(~np.isfinite(self.values))

    def rows_with(self, mask: Bool) -> Bool:
        """Return which rows have any True among their values."""
        if self.offsets is None:
            return np.asarray(mask.reshape(self.num_rows, self.width).any(axis=1))
        before = np.concatenate([[0], np.cumsum(mask)])[self.offsets]
        return np.asarray(before[1:] > before[:-1])


def integers(column: pa.Array) -> tuple[npt.NDArray[Any], Bool | None]:
    """Return the values, 0 for null, and which are null (None: none)."""
    null = _null(column)
    return _numpy(column if null is None else pc.fill_null(column, 0)), null


def coded(column: pa.Array) -> tuple[Codes, list[Any]]:
    """Return codes into a list of distinct values, -1 for null, in their signed type, and the list."""
    if not pa.types.is_dictionary(column.type):
        column = _without_views(column).dictionary_encode()
    if column.indices.null_count or pa.types.is_unsigned_integer(column.indices.type):
        codes = pc.fill_null(column.indices.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
    else:
        codes = _numpy(column.indices)
    dictionary = _without_views(column.dictionary)
    if len(dictionary) > len(codes):  # look only at the entries that occur
        used, codes = np.unique(codes, return_inverse=True)
        dictionary = dictionary.take(pa.array(used, mask=used < 0))
    values = dictionary.to_pylist()
    distinct: dict[Any, int] = {}
    renumber = np.array([-1 if v is None else distinct.setdefault(v, len(distinct)) for v in values] + [-1], np.int64)
    if not np.array_equal(renumber[:-1], np.arange(len(values))):
        codes = renumber[codes]
    return codes, list(distinct)


def float_lists(column: pa.Array, bfloat16: bool = False) -> Lists:
    """Read any list of floats as float32. bfloat16 : its uint16 values are bfloat16"""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    kind, null, num_rows = column.type, _null(column), len(column)
    offsets: npt.NDArray[Any] | None = None
    if kind.id == pa.lib.Type_FIXED_SIZE_LIST:
        # .values ignores the slice, and .flatten() would skip null rows.
        width, child = kind.list_size, column.values
        first, last = column.offset * width, (column.offset + num_rows) * width
        if null is None and child.null_count == 0 and child.type == _FLOAT32:
            return Lists(_numpy(child)[first:last], num_rows, width, None, None)
        child = child.slice(first, last - first)
    else:
        offsets, width = _numpy(column.offsets), 0
        first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
        child = column.values
        if child.null_count or child.type != _FLOAT32:
            # A copy has only these rows; otherwise the offsets are valid unchanged.
            child, offsets = child.slice(first, last - first), offsets - offsets[:1]
            first, last = 0, last - first
        lengths = np.diff(offsets)
        if null is None and num_rows and (lengths == lengths[0]).all():
            # Contiguous rows of one length: equivalent to a fixed-size list.
            width, offsets = int(lengths[0]), None
            child = child.slice(first, last - first)
    inside = _null(child)
    if inside is not None:
        child = pc.fill_null(child, 0)
    lists = Lists(_float32(_numpy(child), bfloat16), num_rows, width, offsets, null)
    if inside is None:
        return lists
    holes = lists.rows_with(inside)
    return Lists(lists.values, num_rows, width, offsets, holes if null is None else null | holes)


def _null(column: pa.Array) -> Bool | None:
    if column.null_count == 0:
        return None
    mask: Bool = column.is_null().to_numpy(zero_copy_only=False)
    return mask


def _without_views(column: pa.Array) -> pa.Array:
    """Convert views to large_string or large_binary. The view under a null may point anywhere, and Arrow reads it."""
    if not pa.types.is_string_view(column.type) and not pa.types.is_binary_view(column.type):
        return column
    null = _null(column)
    if null is not None:
        validity, views, *texts = column.buffers()
        end = column.offset + len(column)
        cleared = np.frombuffer(views, np.uint64, 2 * end).reshape(end, 2).copy()
        cleared[column.offset :][null] = 0
        buffers = [validity, pa.py_buffer(cleared), *texts]
        column = pa.Array.from_buffers(column.type, len(column), buffers, column.null_count, column.offset)
    return column.cast(pa.large_string() if pa.types.is_string_view(column.type) else pa.large_binary())


def _numpy(column: pa.Array) -> npt.NDArray[Any]:
    """Return a view of a primitive column without nulls; a copy if the producer did not align it."""
    values: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return values if values.flags.aligned else values.copy()


def _float32(values: npt.NDArray[Any], bfloat16: bool) -> Float32:
    if bfloat16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if values.dtype == np.float32:
        return values
    # Values that are finite only in float64 become infinite here, and signalling NaNs quiet: neither is finite.
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(np.float32)
