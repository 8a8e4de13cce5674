"""Columns of rows as lists of float32: of one size if all rows have one, else of several."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def list_type(dims: Iterable[int]) -> pa.DataType:
    """Return the type of lists for rows of these dims."""
    distinct = set(map(int, dims))
    return pa.list_(pa.float32(), *distinct) if len(distinct) == 1 else pa.list_(pa.float32())


def list_column(
    values: npt.NDArray[np.float32], kind: pa.DataType, dims: Any = None, null: npt.NDArray[np.bool_] | None = None
) -> pa.Array:
    """Return rows as a column. values : of all rows, in order; dims : of each row; None: values are (n, dim)

    null : which rows are null, of several dims; None: none
    """
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(flat, type=kind)
    dims = np.full(*values.shape) if dims is None else dims
    offsets = np.zeros(len(dims) + 1, np.int32)
    np.cumsum(dims, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=kind, mask=None if null is None else pa.array(null))
