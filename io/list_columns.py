"""Columns of rows: lists of float32, of one size if all rows have one, else of several; of encoded rows their bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.model.frames import Array
from penstock.model.row_encodings import FLOAT32, RowEncoding


def list_type(dims: Iterable[int]) -> pa.DataType:
    """Return the type of lists for rows of these dims."""
    distinct = set(map(int, dims))
    return pa.list_(pa.float32(), *distinct) if len(distinct) == 1 else pa.list_(pa.float32())


def row_type(dims: Iterable[int], rows: RowEncoding) -> pa.DataType:
    """Return the type of a column of encoded rows of these dims."""
    distinct = {rows.row_bytes(dim) for dim in dims}
    return list_type(dims) if rows is FLOAT32 else pa.binary(*(distinct if len(distinct) == 1 else ()))


def list_column(
    values: Array, kind: pa.DataType, dims: Any = None, null: npt.NDArray[np.bool_] | None = None
) -> pa.Array:
    """Return rows as a column. values : float32, or the bytes of encoded rows, of all rows that are not null, in order

    dims : values of each row, 0 of a null one; None: values are (n, dim); null : which rows are null; None: none
    """
    if pa.types.is_fixed_size_binary(kind):
        return _bytes_of_one_size(values, kind, null)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(flat, type=kind)
    dims = np.full(*values.shape) if dims is None else dims
    offsets = np.zeros(len(dims) + 1, np.int32)
    np.cumsum(dims, out=offsets[1:])
    if pa.types.is_binary(kind):
        return pa.Array.from_buffers(kind, len(dims), [_validity(null), pa.py_buffer(offsets), flat.buffers()[1]])
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=kind, mask=None if null is None else pa.array(null))


def row_values(column: pa.Array, width: int) -> Array:
    """Return the rows of a column that are not null: float32 of lists, uint8 of bytes, (n, width)."""
    if not (pa.types.is_binary(column.type) or pa.types.is_fixed_size_binary(column.type)):
        floats: Array = column.flatten().to_numpy().reshape(-1, width)
        return floats
    present = column.drop_null()
    first, stop = present.offset, present.offset + len(present)
    if pa.types.is_binary(column.type):
        offsets = np.frombuffer(present.buffers()[1] or bytes(4), np.int32)
        first, stop = (int(offsets[first]), int(offsets[stop])) if len(present) else (0, 0)
    else:
        first, stop = first * width, stop * width
    data = np.frombuffer(present.buffers()[-1] or b"", np.uint8)
    return data[first:stop].reshape(len(present), width)


def _bytes_of_one_size(values: Array, kind: pa.DataType, null: npt.NDArray[np.bool_] | None) -> pa.Array:
    if null is not None:
        whole = np.zeros((len(null), kind.byte_width), np.uint8)
        whole[~null] = values
        values = whole
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(kind, len(values), [_validity(null), data])


def _validity(null: npt.NDArray[np.bool_] | None) -> Any:
    return None if null is None else pa.array(~null).buffers()[1]
